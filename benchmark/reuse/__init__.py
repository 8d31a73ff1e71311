"""How much of what the cache holds is reused, and what finding it costs: `python -m reuse`.

traces.py     request streams with fixed seeds, shaped like real use
public.py     a public trace given by path (block hashes, no text)
world.py      the real tree, controller and pools on a CPU, for any arm
scheduler.py  a scheduler without a model that replays a trace on them
replay.py     arms, pool sizes and figures
cpu_cost.py   CPU cost of match, gate and bind
report.py     the table and the plot in docs/
"""

import sys
from pathlib import Path

# The stand-ins for a device are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "test" / "srt" / "mem_cache"))
