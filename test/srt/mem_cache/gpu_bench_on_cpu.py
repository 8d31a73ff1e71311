"""The exactness part of benchmark/gpu over the reference platform's kernels, as a program.

A process of its own, because it publishes a configuration and hooks SGLang. Prints one line of JSON a
comparison: what, whether it passed, whether it is a control; then the bytes that no step reads.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import conftest  # noqa: F401 (lets SGLang be imported beside a CPU torch)
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

from gpu import stubs
from gpu.config import FLASH_SCENARIO, PAGE, Scenario, Shape

SHAPE = Shape("reference kernels", (0, 4, 128, 4), heads=2, selected=32, table_width=512)
SCENARIO = Scenario(chunks=(256, 256), more=64, lead=6, steps=8, placed=(256,))


def main() -> None:
    """See the module's docstring."""
    stubs.prepare("cpu")
    from dsv4_reference_platform import install

    install.install()
    from gpu import exactness, feature, strict

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    feature.install_hooks()
    device = torch.device("cpu")
    server = feature.Server(SHAPE, 12, 64 * PAGE, SCENARIO.positions, device)
    server.engage(slots=40, chunk_tokens=512)
    with strict.relaxed():
        found = exactness.Exactness(server, SCENARIO).run()
    server.pages = PAGE
    server.engage(slots=40, chunk_tokens=512, debug=True)
    with strict.relaxed():
        checks = [*found.checks, *exactness.debug_checks(server, FLASH_SCENARIO)]
    server.release()
    for check in checks:
        print(json.dumps([check.what, check.passed, check.control]))
    print(found.unread_bytes)


if __name__ == "__main__":
    main()
