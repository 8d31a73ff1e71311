"""`make regression`: SGLang without the plugin against SGLang with it and the flag off.

Every scenario (regression_startup, regression_trees, regression_servers) is run in both worlds
(regression_worlds) and the transcripts are compared, whole. The third world, in which a small
plugin changes five things, is the control: each of the five must be noticed. One line at the end;
exit status 0 where nothing differs, everything happened that a scenario is there for, and the
control was noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regression_caches
import regression_servers
from regression_control import ALTERATIONS
from regression_worlds import ALTERED, PACKAGE, PLUGIN, STOCK, World, make_world

PROBE = str(Path(__file__).with_name("regression_probe.py"))

Transcripts = dict[str, Any]
"""By scenario; JSON."""


@dataclass(frozen=True)
class Amount:
    """How much is run.

    Attributes:
        trees: names of regression_caches.SHAPES; seeds, operations: of each of them.
        servers: names of regression_servers.SCENARIOS.
        control: those of the servers that the control runs too.
    """

    trees: Sequence[str]
    seeds: int
    operations: int
    servers: Sequence[str]
    control: Sequence[str]


QUICK = Amount(regression_caches.QUICK, 1, 250, (), ())
"""What `make test` runs."""
WHOLE = Amount(
    tuple(regression_caches.SHAPES), 3, 400, tuple(regression_servers.SCENARIOS), ("llama",)
)

NOTICED_IN = {
    "match": "tree: ",
    "environment": "startup: environment",
    "argument": "startup: help",
    "module": "startup: modules",
    "log": "startup: log",
}
"""Where each alteration of the control must be noticed: how the scenario's name begins."""


def run(world: World, amount: Amount, folder: Path) -> Transcripts:
    """All transcripts of a world.

    Raises:
        RuntimeError, ServerError: a process failed.
    """
    jobs = {"trees": amount.trees, "seeds": amount.seeds, "operations": amount.operations}
    file = folder / f"{world.name}.json"
    world.run([PROBE, str(file), json.dumps(jobs)], timeout=1800)
    found = json.loads(file.read_text())
    servers = amount.control if world.name == ALTERED else amount.servers
    for number, name in enumerate(servers):
        # As in both worlds, so that nothing depends on how long a path is.
        place = folder / world.name / f"server-{number}"
        found[f"server: {name}"] = regression_servers.transcript(name, world, place)
    return found


def run_worlds(amount: Amount, folder: Path) -> dict[str, Transcripts]:
    """The transcripts of the three worlds, two of them at a time."""
    worlds = [
        make_world(folder, STOCK),
        make_world(folder, PLUGIN),
        make_world(folder, ALTERED, ",".join(ALTERATIONS)),
    ]
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(
                (world.name for world in worlds),
                pool.map(lambda world: run(world, amount, folder), worlds),
                strict=True,
            )
        )


# ---- what the plugin adds by design


def additions() -> dict[str, set[str]]:
    """What is there with the flag off, by its own tables: environment variables, arguments, where their
    values travel, modules, and what SGLang says when it loads any plugin."""
    from sglang_bitexact_hicache import plugin, settings

    carried = {f"_{s.argument.field}" for s in settings.SETTINGS if s.argument is not None}
    modules = {"arguments", "attach", "constants", "geometry", "options", "plugin", "policy"}
    modules |= {"seam", "seam_table", "settings"}
    entry = f"{plugin.__name__}:{plugin.register.__name__}"
    said = {
        f"INFO sglang.srt.plugins   - bitexact_hicache -> {entry}",
        "INFO sglang.srt.plugins Loaded plugin bitexact_hicache from group sglang.srt.plugins",
        "INFO sglang.srt.plugins Executed general plugin: bitexact_hicache",
    }
    for method in ("add_cli_args", "from_cli_args"):
        said.add(
            "INFO sglang.srt.plugins.hook_registry Applied 1 hook(s) to "
            f"sglang.srt.server_args.ServerArgs.{method} "
            "(from: plugin=bitexact_hicache, dist=sglang-bitexact-hicache)"
        )
    return {
        "environment": {setting.env for setting in settings.SETTINGS},
        "help": {"bit-exact SWA HiCache (DeepSeek-V4 unified_kv):"},
        "parsed": {name.removeprefix("_") for name in carried},
        "resolved": carried,
        "modules": {PACKAGE, *(f"{PACKAGE}.{name}" for name in modules)},
        "log": said,
    }


def without_additions(found: Transcripts) -> tuple[Transcripts, dict[str, set[str]]]:
    """A world's transcripts without what the plugin adds, and what of that was there."""
    added = additions()
    seen: dict[str, set[str]] = {kind: set() for kind in added}
    left = {}
    for name, value in found.items():
        kind = name.removeprefix("startup: ").partition(":")[0]
        known = added.get(kind, set()) if name.startswith("startup: ") else set()
        seen.setdefault(kind, set()).update(known.intersection(value))
        if not known:
            left[name] = value
        elif isinstance(value, dict):
            left[name] = {key: entry for key, entry in value.items() if key not in known}
        else:
            left[name] = [entry for entry in value if entry not in known]
    return left, {kind: seen[kind] for kind in added}


# ---- the comparison


@dataclass(frozen=True)
class Difference:
    """A scenario that is not the same in two worlds: where, and what each of them has there."""

    scenario: str
    where: str
    stock: str
    other: str

    def __str__(self) -> str:
        return f"{self.scenario} {self.where}\n  stock {self.stock}\n  other {self.other}"


def differences(stock: Transcripts, other: Transcripts) -> list[Difference]:
    """The first difference of each scenario that has one."""
    found = []
    for name in sorted({*stock, *other}):
        for where, one, two in _differing(stock.get(name, _ABSENT), other.get(name, _ABSENT), ""):
            found.append(Difference(name, where, repr(one)[:300], repr(two)[:300]))
            break
    return found


def _differing(one: Any, two: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    # As text: 1 is not 1.0, and the order of a dictionary counts.
    if json.dumps(one) == json.dumps(two):
        return
    if isinstance(one, dict) and isinstance(two, dict):
        if list(one) != list(two) and set(one) == set(two):
            yield where, list(one), list(two)
        for key in [*one, *(key for key in two if key not in one)]:
            yield from _differing(one.get(key, _ABSENT), two.get(key, _ABSENT), f"{where}/{key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for number, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from _differing(left, right, f"{where}/{number}")
    elif isinstance(one, list) and isinstance(two, list):
        yield where, [e for e in one if e not in two][:3], [e for e in two if e not in one][:3]
    else:
        yield where, one, two


_ABSENT = "(absent)"


def nothing_shown(found: Transcripts) -> list[str]:
    """Scenarios in which what they are there for did not happen, so that being equal shows little."""
    missing = []
    for name, value in found.items():
        kind, _, rest = name.partition(": ")
        if kind == "server":
            for need in regression_servers.SCENARIOS[rest].needs:
                if not value["counts"].get(need):
                    missing.append(f"{name}: no {need}")
    for kind in ("reused tokens", "evicted", "loaded back", "out of memory", "flush"):
        total = sum(
            value["counts"].get(kind, 0) for name, value in found.items() if name.startswith("tree")
        )
        if not total:
            missing.append(f"trees: no {kind}")
    return missing


def noticed(stock: Transcripts, altered: Transcripts) -> dict[str, list[str]]:
    """By alteration: the scenarios in which the control was noticed."""
    names = [difference.scenario for difference in differences(stock, altered)]
    return {
        alteration: [name for name in names if name.startswith(NOTICED_IN[alteration])]
        for alteration in ALTERATIONS
    }


def main(argv: Sequence[str]) -> int:
    """Runs everything; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only what `make test` runs")
    parser.add_argument("--keep", type=Path, help="a new folder for transcripts and logs")
    arguments = parser.parse_args(argv)
    amount = QUICK if arguments.quick else WHOLE
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = run_worlds(amount, folder.resolve())
        if arguments.keep:
            for name, value in found.items():
                (folder / f"{name}.json").write_text(json.dumps(value, indent=1))
    stock = found[STOCK]
    plugin, seen = without_additions(found[PLUGIN])
    different = differences(stock, plugin)
    not_there = {kind: names for kind, names in additions().items() if seen[kind] != names}
    missing = nothing_shown(stock)
    control = noticed(stock, found[ALTERED])
    if amount.control:
        altered = {f"server: {name}" for name in amount.control}
        names = {difference.scenario for difference in differences(stock, found[ALTERED])}
        control["server"] = sorted(altered & names)
    for line in (*different, *missing, *(f"not loaded: {kind}" for kind in not_there)):
        print(line)
    operations = sum(
        len(value["operations"]) for name, value in stock.items() if name.startswith("tree: ")
    )
    requests = sum(
        value["counts"]["requests"] for name, value in stock.items() if name.startswith("server: ")
    )
    servers = sum(len(regression_servers.SCENARIOS[name].servers()) for name in amount.servers)
    caught = sum(bool(names) for names in control.values())
    print(
        f"scenarios={len(stock)} operations={operations} servers={servers} requests={requests} "
        f"different={len(different)} control={caught}/{len(control)}"
    )
    return 0 if not (different or missing or not_there) and caught == len(control) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
