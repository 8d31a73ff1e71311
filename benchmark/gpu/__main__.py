"""Build, check and time the plugin on a GPU; see the package's docstring.

    python -m gpu                     everything
    python -m gpu --json numbers.json the raw numbers too
    python -m gpu --layers 6 --tokens 2048 --no-exact   a smoke run

On a machine without a GPU: one line, exit status 2. Otherwise tables and, last, one line of key=value
pairs; exit status 0 only if every comparison came out as it has to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu import needs


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the raw numbers")
    parser.add_argument("--layers", type=int, help="only the model's first layers")
    parser.add_argument("--tokens", type=int, default=8192, help="of the chunk (%(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="of each timing (%(default)s)")
    parser.add_argument("--no-exact", action="store_true", help="measure only; exact=0")
    options = parser.parse_args()
    if options.layers is not None and options.layers < 3:
        parser.error("the first layer of ratio 4 is the third")
    problem = needs.missing()
    if problem is not None:
        print(problem)
        return 2
    # Not before: they import what a machine without a GPU may lack.
    from gpu import config
    from gpu.runner import Main

    run = config.Run(chunk=options.tokens, repeats=options.repeats)
    shape = config.PRO if options.layers is None else config.PRO.first(options.layers)
    return Main(shape, run).run(exactness=not options.no_exact, path=options.json)


if __name__ == "__main__":
    sys.exit(main())
