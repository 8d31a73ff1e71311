"""Findings, and how they are printed: for people, or as JSON for machines. Pure Python.

Both prints have the same content, but for counters that are 0, which only JSON names. The keys of the
JSON are stable: sections and findings keep theirs, and a new one may be added; `format` counts up when
that is not so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

FORMAT = 1
"""Of the JSON."""


class State(Enum):
    """What a finding means for the verdict."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, not a problem."""
    UNKNOWN = "unknown"
    """Cannot be told here; the detail says what is missing."""
    PROBLEM = "problem"
    UNREACHABLE = "no answer"
    """What was asked about does not answer."""


@dataclass(frozen=True)
class Finding:
    """One fact.

    Attributes:
        key: stable id within its section.
        state: what it means for the verdict.
        value: a JSON value, None where there is none.
        detail: what it means or what to change, in words; may be empty.
        shown: the value as people read it; None: as it is.
    """

    key: str
    state: State
    value: Any = None
    detail: str = ""
    shown: str | None = None


@dataclass(frozen=True)
class Section:
    """Findings that answer one question.

    Attributes:
        key: stable id.
        title: for people.
        findings: in the order in which people read them.
        counters: whether they are counters, whose zeros people are not shown.
    """

    key: str
    title: str
    findings: Sequence[Finding]
    counters: bool = False


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    sections: Sequence[Section]

    @property
    def problems(self) -> list[str]:
        """`section.key` of each finding that is a problem, or of what could not be reached."""
        return [
            f"{section.key}.{finding.key}"
            for section in self.sections
            for finding in section.findings
            if finding.state in (State.PROBLEM, State.UNREACHABLE)
        ]

    @property
    def status(self) -> int:
        """The exit status: 0 everything fits, 1 problems, 2 something could not be reached."""
        states = {finding.state for section in self.sections for finding in section.findings}
        if State.UNREACHABLE in states:
            return 2
        return int(State.PROBLEM in states)

    @property
    def verdict(self) -> str:
        """The status in words."""
        problems = len(self.problems)
        return ("everything fits", f"{problems} problem(s)", "no answer")[self.status]

    def text(self) -> str:
        """For people: a line for each finding, problems again at the end."""
        lines: list[str] = []
        for section in self.sections:
            findings = [f for f in section.findings if f.value or not section.counters]
            width = min(46, max((len(f.key) for f in findings), default=0))
            lines.append(section.title)
            for finding in findings:
                value = _plain(finding.value) if finding.shown is None else finding.shown
                shown = " ".join(part for part in (value, finding.detail) if part)
                state = f"{finding.state.value:<7}"
                lines.append(f"  {state}  {finding.key:<{width}}  {shown}".rstrip())
            if len(findings) < len(section.findings):
                lines.append(f"  {len(section.findings) - len(findings)} more are 0")
            lines.append("")
        lines.append(self.verdict + "".join(f"\n  {problem}" for problem in self.problems))
        return "\n".join(lines)

    def json(self) -> str:
        """For machines."""
        return json.dumps(
            {
                "format": FORMAT,
                "status": self.status,
                "verdict": self.verdict,
                "problems": self.problems,
                "sections": {
                    section.key: {
                        finding.key: {
                            "state": finding.state.value,
                            "value": finding.value,
                            "detail": finding.detail,
                        }
                        for finding in section.findings
                    }
                    for section in self.sections
                },
            },
            indent=2,
        )


def _plain(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
