"""What a soak found, as a table and a line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tabulate import tabulate


@dataclass
class Found:
    """Of one or more servers on one storage.

    Attributes:
        done: requests by kind; cached: reused prompt tokens by tier.
        verified: restores that were verified on the device.
        faults: by kind.
        wrong: answers that differ, errors, failure lines of a log, checks that failed.
        leaks: what was left.
        kills: servers that were killed.
    """

    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    kills: int = 0

    @property
    def ok(self) -> bool:
        """Nothing wrong, nothing left, and something was shown: without restores it proves nothing."""
        return not self.wrong and not self.leaks and self.verified > 0

    def table(self) -> str:
        """The counts."""
        rows = [
            *((f"requests: {kind}", count) for kind, count in sorted(self.done.items())),
            *((f"reused tokens: {tier}", count) for tier, count in sorted(self.cached.items())),
            ("restores verified", self.verified),
            *((f"faults: {kind}", count) for kind, count in sorted(self.faults.items())),
            ("servers killed", self.kills),
            ("seconds of load", f"{self.seconds:.0f}"),
        ]
        return tabulate(rows, ("", ""), "github")

    def last_line(self) -> str:
        """What `make soak` ends with."""
        return (
            f"requests={sum(self.done.values())} restores_verified={self.verified} "
            f"mismatches={len(self.wrong)} faults={sum(self.faults.values())} leaks={len(self.leaks)}"
        )
