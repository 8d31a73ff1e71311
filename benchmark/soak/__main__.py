"""Load a server on the CPU reference platform with everything at once, and check every answer.

    python -m soak --minutes 2 [--kills 10] [--seed 1] [--logs DIR]

First every request of the seed is answered by the idle server, on an empty cache. Then four clients
repeat them in a random mix for the given time, while storage is damaged, full, away and restarted;
every answer (ids and logprobs) must be the idle server's, every restore is verified on the device, and
in the end the server must hold what it held at first. With `--kills`, that many servers on the same
storage are killed in the middle first, each after a share of the time. Exit status 0 if so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import demo
from soak.clients import Clients
from soak.plan import Plan
from soak.report import Found
from soak.server import Held, PipedServer, soak_server
from soak.weather import Weather

CALM_EVERY = 10.0
"""Seconds between two moments at which nobody asks: the cache is flushed, so that storage is what is
left; every other time storage is restarted first."""


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of load (%(default)s)")
    parser.add_argument("--kills", type=int, default=0, help="servers that are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    asked = parser.parse_args()
    say = demo.Progress()
    with TemporaryDirectory() as scratch:
        logs = asked.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        storage = Path(scratch) / "storage"
        found = Soak(asked.seed, logs, storage, say).run(60 * asked.minutes, asked.kills)
    print("\n" + found.table() + "\n")
    for line in [*found.wrong[:20], *found.leaks]:
        print(f"FAILED: {line}")
    print(found.last_line())
    return 0 if found.ok else 1


class Soak:
    """Servers on one storage, one after the other."""

    def __init__(self, seed: int, logs: Path, storage: Path, say: demo.Progress) -> None:
        self._seed = seed
        self._logs = logs
        self._storage = storage
        self._say = say
        self._plan = Plan.of(seed)
        self._found = Found()

    def run(self, seconds: float, kills: int) -> Found:
        """All of it; half of the time is that of the servers that are killed."""
        with soak_server(self._logs / "idle.log", None) as server:
            self._plan.answer_all(server, self._seed, self._say)
        share = seconds / 2 / kills if kills else 0.0
        for number in range(kills):
            self._killed(number, share)
        self._whole_day(seconds - kills * share)
        return self._found

    def _killed(self, number: int, seconds: float) -> None:
        seed = f"{self._seed} {number}"
        with soak_server(self._logs / f"killed{number}.log", self._storage) as server:
            server.first_write(self._storage)
            with (
                Clients(server, self._plan, seed) as clients,
                Weather(server, self._storage, seed) as weather,
            ):
                time.sleep(seconds)
                clients.leave()
                server.kill()
        self._count(server, clients, weather, seconds)
        self._found.kills += 1
        self._say(f"killed after {seconds:.0f} s: {sum(clients.done.values())} requests")

    def _whole_day(self, seconds: float) -> None:
        # What is allocated at a first use and then kept is no leak.
        warm = min(seconds / 3, 60.0)
        held: list[Held] = []
        with soak_server(self._logs / "server.log", self._storage) as server:
            server.first_write(self._storage)
            with (
                Clients(server, self._plan, f"{self._seed}") as clients,
                Weather(server, self._storage, f"{self._seed}") as weather,
            ):
                start = time.monotonic()
                calms = 0
                while (left := start + seconds - time.monotonic()) > 0:
                    time.sleep(min(left, CALM_EVERY))
                    calms += 1
                    if calms % 2:
                        clients.pause(weather.restart_storage)
                    clients.pause(server.flush_cache)
                    if not held and time.monotonic() - start >= warm:
                        clients.pause(lambda: held.append(Held.by(server)))
                    self._say(f"{sum(clients.done.values())} requests")
            after = Held.by(server)
            self._say(f"held at first {held[0]}, in the end {after}")
            self._found.leaks += after.leaks(held[0])
            for reason in ("check_failed", "restore_impossible"):
                if count := server.metric("rejected_total", reason):
                    self._found.wrong.append(f"{count:.0f} requests ended with {reason}")
        self._count(server, clients, weather, seconds)

    def _count(
        self, server: PipedServer, clients: Clients, weather: Weather, seconds: float
    ) -> None:
        found, checked = self._found, demo.checks(server.log())
        found.seconds += seconds
        found.done += clients.done
        found.cached += clients.cached
        found.faults += weather.faults
        found.verified += min(checked[line] for line in demo.CHECK_LINES)
        found.wrong += [*clients.mismatches, *clients.errors]
        if checked["failures"]:
            found.wrong.append(f"{checked['failures']} failure lines in {server.log_path.name}")


if __name__ == "__main__":
    sys.exit(main())
