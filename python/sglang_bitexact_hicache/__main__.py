"""`python -m sglang_bitexact_hicache`: see doctor/command.py."""

from __future__ import annotations

import sys

from sglang_bitexact_hicache.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
