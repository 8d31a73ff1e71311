"""What a server itself counted: the feature's metrics, and the lines of its checks."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

PREFIX = "sglang:bitexact_hicache_"
_SERIES = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$")
_FATAL = ('reason="check_failed"', 'reason="restore_impossible"')
_FAILURE = re.compile(r"MISMATCH|reuse_reject|BIND-MISS|AssertionError|Traceback")
_VERIFIED = "[SWA-DBG] restore verified"


class Counts(NamedTuple):
    """Since the server started."""

    restored: int = 0
    """Hits whose truth was restored."""
    verified: int = 0
    """Of those, by the debug checks."""
    failed: int = 0
    """Checks that failed, restores that were not possible; where there is a log, its failure lines."""
    recomputed: int = 0
    """Prompt tokens that the cache holds and had no truth for."""

    def since(self, before: Counts) -> Counts:
        """What was added to `before`."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def read(url: str, log: Path | None) -> Counts | None:
    """The counts of a server; None where it exports none of ours (the feature is off, or nothing was
    reported yet), or has no metrics."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
            counts = parse(reply.read().decode())
    except urllib.error.HTTPError:
        counts = None
    if counts is None or log is None:
        return counts
    # The metrics are brought up to date with a batch, before its checks are through.
    text = log.read_text(errors="replace")
    failures = sum(
        1 for line in text.splitlines() if "server_args=" not in line and _FAILURE.search(line)
    )
    return counts._replace(verified=text.count(_VERIFIED), failed=failures)


def parse(text: str) -> Counts | None:
    """The counts in a page of metrics, summed over the ranks that report; None without any of ours."""
    sums: dict[str, float] = {}
    fatal = 0.0
    for line in text.splitlines():
        found = _SERIES.match(line)
        if not found or not line.startswith(PREFIX):
            continue
        name, labels, value = found.groups()
        name = name.removeprefix(PREFIX)
        sums[name] = sums.get(name, 0.0) + float(value)
        if name == "rejected_total" and any(reason in (labels or "") for reason in _FATAL):
            fatal += float(value)
    if not sums:
        return None
    return Counts(
        restored=int(sums.get("restored_total", 0)),
        verified=int(sums.get("checks_verified_total", 0)),
        failed=int(fatal),
        recomputed=int(sums.get("recomputed_tokens_total", 0)),
    )


def flush(url: str, timeout: float = 120.0) -> None:
    """Empty the prefix cache, on the device and in host memory, as soon as the server is idle.

    Raises:
        urllib.error.URLError: it did not become idle in time, or there is no server.
    """
    request = urllib.request.Request(f"{url}/flush_cache?timeout={timeout / 2:g}", method="POST")
    urllib.request.urlopen(request, timeout=timeout).close()
