"""Measure storage (L3) and run the fault tests; see docs/l3.md.

    python -m l3              everything
    python -m l3 --no-faults  the measurements only

In process, at the geometry of DeepSeek-V4-Pro, without a model; the file backend on a scratch
directory whose files stay in the page cache. Prints the tables and, last, one line of key=value pairs.
Exit status 0 only if every injected fault was survived.
"""

from __future__ import annotations

import argparse
import sys

from l3_fixtures import storage_hooked

from l3 import faults, measure, report
from reuse.world import quiet_cpu_hicache

RESTORE_PAGES = (16, 64)
"""Pages of the prefixes that are restored; the last line is about the first."""

WRITE_RECORDS = (1, 16)
"""Records that go along with 16 pages: the end of a prompt; every page."""

HASHED_PAGES = 64
LONG_PROMPT = 781
"""Pages of 200,000 tokens."""


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m l3", description=__doc__.splitlines()[0])
    parser.add_argument("--no-faults", action="store_true", help="do not run the fault tests")
    parser.add_argument("--repeats", type=int, default=15, help="of a measurement (%(default)s)")
    options = parser.parse_args()
    repeats = options.repeats
    with quiet_cpu_hicache(), storage_hooked():
        restored = [measure.restore(pages, repeats) for pages in RESTORE_PAGES]
        print(report.restore_table(restored), flush=True)
        written = [measure.write(16, records, repeats) for records in WRITE_RECORDS]
        print("\n" + report.write_table(written), flush=True)
        hashing = measure.hashing(HASHED_PAGES, repeats)
        print("\n" + report.hashing_table(hashing), flush=True)
        scheduler = measure.scheduler(LONG_PROMPT, max(1, repeats // 5))
        print("\n" + report.scheduler_table(scheduler), end="\n\n", flush=True)
    found = faults.Faults(0, 0) if options.no_faults else faults.run()
    print(report.last_line(restored[0], found))
    return 0 if options.no_faults or found.all_survived else 1


if __name__ == "__main__":
    sys.exit(main())
