"""A process of one world: `python regression_probe.py FILE JOBS`; JOBS is JSON, FILE gets the answer.

JOBS: {"trees": [name, ...], "seeds": n, "operations": n}. The answer: {scenario: transcript}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(file: str, jobs: str) -> None:
    """Runs the jobs and writes their transcripts."""
    import regression_startup

    asked = json.loads(jobs)
    found: dict[str, Any] = {
        f"startup: {name}": value for name, value in regression_startup.facts().items()
    }

    import regression_trees

    from dsv4_reference_platform import install

    install.install()  # the copies of HiCache, which are GPU kernels
    for name in asked["trees"]:
        for seed in range(asked["seeds"]):
            found[f"tree: {name}, seed {seed}"] = regression_trees.transcript(
                name, seed, asked["operations"]
            )
    found["startup: modules"] = regression_startup.modules()
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
