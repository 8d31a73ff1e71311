"""The tables and the last line."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from l3.faults import Faults
from l3.measure import (
    OURS,
    RESTORE_PARTS,
    SCHEDULER_CALLS,
    STOCK,
    WRITE_KV,
    WRITE_PARTS,
    Hashing,
    Restored,
    Scheduler,
    Written,
)


def _table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def restore_table(restored: Sequence[Restored]) -> str:
    """Time of each part, and of all of them against plain I/O."""
    header = ["a restore, in ms", "whose"]
    header += [f"{r.pages} pages" for r in restored] + [f"{r.pages} pages, CPU" for r in restored]

    def row(name: str, whose: str, values: Sequence[str], cpu: Sequence[str] = ()) -> list[str]:
        return [name, whose, *values, *(cpu or [""] * len(restored))]

    rows = [
        row(
            part,
            whose,
            [_ms(r.wall.get(part, 0.0)) for r in restored],
            # What happens between the threads is no thread's work.
            [_ms(r.cpu[part]) if part in r.cpu else "" for r in restored],
        )
        for part, whose in RESTORE_PARTS.items()
    ]
    rows += [
        row("all of SGLang's", STOCK, [_ms(r.seconds_of(STOCK)) for r in restored]),
        row("all of ours", OURS, [_ms(r.seconds_of(OURS)) for r in restored]),
        row("all of it", "", [_ms(r.seconds) for r in restored]),
        row("the same files, plainly", "", [_ms(r.plain) for r in restored]),
        row("restore / plain", "", [f"{r.ratio:.2f}" for r in restored]),
        row(
            "SGLang's part / plain", "", [f"{r.seconds_of(STOCK) / r.plain:.2f}" for r in restored]
        ),
        row("verified, GB/s of a core", OURS, [f"{r.verify_gb_per_s:.2f}" for r in restored]),
        row("MB", "", [f"{r.nbytes / 1e6:.1f}" for r in restored]),
        row("files", "", [str(r.files) for r in restored]),
    ]
    return _table(rows, header)


def write_table(written: Sequence[Written]) -> str:
    """Time of each part of a write."""
    header = ["a write, in ms"] + [f"{w.pages} pages, {w.records} record(s)" for w in written]
    rows = [[part, *(_ms(w.wall.get(part, 0.0)) for w in written)] for part in WRITE_PARTS]
    alone = [w.wall[WRITE_KV] for w in written]
    rows += [
        ["all of it", *(_ms(w.seconds) for w in written)],
        [
            "with records / KV alone",
            *(f"{w.seconds / kv:.2f}" for w, kv in zip(written, alone, strict=True)),
        ],
        ["MB of KV", *(f"{w.kv_bytes / 1e6:.1f}" for w in written)],
        ["MB of records", *(f"{w.record_bytes / 1e6:.1f}" for w in written)],
    ]
    return _table(rows, header)


def hashing_table(hashing: Hashing) -> str:
    """GB/s."""
    rows = [
        ["record verified (check)", hashing.check],
        ["record packed (seal)", hashing.seal],
        ["page of KV hashed (HostKv.digest)", hashing.digest],
    ]
    return _table([[name, f"{value:.2f}"] for name, value in rows], ["one core", "GB/s"])


def scheduler_table(found: Scheduler) -> str:
    """Milliseconds of the scheduler thread."""
    header = [
        f"the scheduler thread, {found.tokens} tokens, in ms",
        "CPU, typical",
        "CPU, longest",
        "clock, typical",
        "clock, longest",
    ]
    rows = [
        [
            f"{label} ({name})",
            *(_ms(found.typical[label].cpu), _ms(found.longest[label].cpu)),
            *(_ms(found.typical[label].wall), _ms(found.longest[label].wall)),
        ]
        for label, name in SCHEDULER_CALLS.items()
    ]
    rows.append(
        [
            f"all {found.writes} writes of the prompt together",
            *(_ms(found.writing.cpu), "", _ms(found.writing.wall), ""),
        ]
    )
    return _table(rows, header)


def last_line(restored: Restored, faults: Faults) -> str:
    """`l3_restore_vs_plain_io` is restore time divided by plain time: 1.0 is as fast."""
    return (
        f"l3_restore_vs_plain_io={restored.ratio:.2f} "
        f"verify_gb_per_s={restored.verify_gb_per_s:.2f} "
        f"faults_injected={faults.injected} faults_survived={faults.survived}"
    )
