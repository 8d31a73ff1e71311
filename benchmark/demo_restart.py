"""The demo's cold restart: a new server answers its first repeat of a prompt from storage (L3).

One server with a file backend on an empty directory computes the prompt, and is stopped once storage has
everything of it. Another one starts on that directory, with nothing in device or host memory: the prompt
must come back whole from storage, every restored byte verified, and the answer must be the cold run's.

Then the control, on the same server: its cache is flushed and one bit of the deepest window record is
flipped on disk. The record must be refused, by name in the log, and the answer must still be the cold
run's, computed again. A flush later the same file is not asked for any more, and the prompt comes back
from storage up to the page before.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_reference_platform.launch import Server

STORAGE_ARGS = (
    *("--hicache-storage-backend", "file"),
    # A request waits for what storage has of it: how much it finds does not depend on timing.
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
STORAGE_DIR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"

WHOLE, FLIPPED, AFTER = "restart", "bit flipped", "after that"
"""The requests to the second server, by their names in the table."""

REFUSED = re.compile("record [0-9a-f]{64} in storage is refused: section swa_window")
"""What the log says of a window record with other bytes than were written."""

_PREFETCH = r"HiCache prefetch (\w+) req={} completed=(\d+) matched=(\d+) loaded=(\d+)"
_HEADER = struct.Struct("<8sQ16sQ")
"""How a window record begins: magic, version, identity, boundary."""
_QUIET_SECONDS = 1.0
"""Nothing in the directory may change for so long before the first server is stopped."""


class Prefetch(NamedTuple):
    """SGLang's own log line about what a request got from storage; lengths in tokens."""

    outcome: str
    completed: int
    matched: int
    loaded: int


NO_PREFETCH = Prefetch("none", 0, 0, 0)
"""There is no such line."""


@dataclass(frozen=True)
class Repeat:
    """One repeat of the prompt to the second server."""

    answer: tuple
    reply: dict[str, Any]
    checks: dict[str, int]
    prefetch: Prefetch
    refused: int
    """Log lines about a refused window record."""
    seconds: float


@dataclass
class Restart:
    """Everything that happened, the second server's requests by name."""

    cold: tuple
    repeats: dict[str, Repeat] = field(default_factory=dict)
    failures: int = 0


class Store:
    """The directory of SGLang's file backend, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def window_records(self) -> dict[int, Path]:
        """The files of window records by their boundary, which their header says."""
        found = {}
        for path in self.folder.glob("*_swa_window_*.bin"):
            with path.open("rb") as file:
                found[_HEADER.unpack(file.read(_HEADER.size))[-1]] = path
        return found

    def wait_for(self, boundaries: Sequence[int], timeout: float = 60.0) -> int:
        """Return, with the number of files, once the records of these boundaries are there and nothing
        is written any more.

        Raises:
            TimeoutError: with what there is instead.
        """
        deadline = time.monotonic() + timeout
        before, since = None, 0.0
        while time.monotonic() < deadline:
            # Files under other names are still being written.
            now = {path.name: path.stat().st_size for path in self.folder.glob("*.bin")}
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since >= _QUIET_SECONDS and set(boundaries) <= set(
                self.window_records()
            ):
                return len(now)
            time.sleep(0.1)
        raise TimeoutError(f"storage has records at {sorted(self.window_records())} only")

    def flip_bit(self) -> int:
        """Flip one bit in the middle of the deepest window record; its boundary."""
        boundary, path = max(self.window_records().items())
        record = bytearray(path.read_bytes())
        record[len(record) // 2] ^= 1
        path.write_bytes(record)
        return boundary


def restart(
    prompt: str,
    boundaries: Sequence[int],
    folder: Path,
    start: Callable[[str, Sequence[str], Mapping[str, str]], Server],
    ask: Callable[[Server, str], tuple[tuple, dict]],
    checks: Callable[[str], dict[str, int]],
    dirty: Callable[[Server, int], None],
    say: Callable[[str], None],
) -> Restart:
    """Run it.

    Args:
        prompt: what is asked.
        boundaries: of its records, in tokens.
        folder: an empty directory for storage.
        start: a server of the on-arm, by a name for its log, with more arguments and environment.
        ask, checks, dirty, say: the demo's.
    """
    store = Store(folder)
    env = {STORAGE_DIR: str(folder)}
    with start("populate", STORAGE_ARGS, env) as server:
        say(f"storage: up after {server.boot_seconds:.0f} s")
        cold, _ = ask(server, prompt)
        files = store.wait_for(boundaries)
        say(f"storage: cold, {files} files in storage; stopping the server")
        result = Restart(cold, failures=checks(server.log())["failures"])
    with start("restart", STORAGE_ARGS, env) as server:
        say(f"storage: up again after {server.boot_seconds:.0f} s")

        def repeat(name: str, seed: int) -> None:
            dirty(server, seed)
            before = server.log()
            asked = time.monotonic()
            answer, reply = ask(server, prompt)
            seconds = time.monotonic() - asked
            log = server.log()
            counts, counts_before = checks(log), checks(before)
            done = Repeat(
                answer=answer,
                reply=reply,
                checks={key: counts[key] - counts_before[key] for key in counts},
                prefetch=prefetch_of(log, reply["id"]),
                refused=len(REFUSED.findall(log)) - len(REFUSED.findall(before)),
                seconds=seconds,
            )
            result.repeats[name] = done
            equal = "equal to" if answer == cold else "DIFFERS from"
            say(f"storage: {name}: loaded {done.prefetch.loaded}, {equal} cold")

        repeat(WHOLE, 51)
        server.flush_cache()
        say(f"storage: one bit flipped in the window record at {store.flip_bit()}")
        repeat(FLIPPED, 52)
        server.flush_cache()
        repeat(AFTER, 53)
        result.failures += checks(server.log())["failures"]
    return result


def prefetch_of(log: str, rid: str) -> Prefetch:
    """What SGLang's log line says of a request's prefetch."""
    found = re.search(_PREFETCH.format(re.escape(rid)), log)
    return Prefetch(found[1], *map(int, found.groups()[1:])) if found else NO_PREFETCH
