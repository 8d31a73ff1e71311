"""What storage (L3) costs: `python -m l3`.

world.py      real pools, tree, controller, IO threads and file backend on a CPU, at any geometry
parts.py      where the time goes: a stopwatch on functions of SGLang and of ours
measure.py    restore, write, hashing, the scheduler's share
faults.py     the fault tests, run and counted
report.py     the tables and the last line
"""

import sys
from pathlib import Path

# The stand-ins for a device are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "test" / "srt" / "mem_cache"))
