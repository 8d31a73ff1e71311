"""The Triton kernels against their plain torch references, bit for bit, on a real device pool.

On a machine without a GPU they run in a child process under Triton's interpreter, which has to be
chosen before Triton is imported. benchmark/gpu_lanes.py runs them on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bitexact_fixtures as fixtures
import pytest
import torch
from test_swa_capture import Bench

from sglang_bitexact_hicache.gather import Source
from sglang_bitexact_hicache.ring_gather import KernelRingGather, RingGather

CASES = {
    "one boundary": [(1, 256)],
    "several rows, boundaries and staging slots": [(3, 512), (1, 256), (5, 1024), (2, 25600)],
}


def capture_after(bench: Bench, gather_class: type, sources: list[Source]) -> list[torch.Tensor]:
    """Staging bytes of every pool after a gather of `sources` into slots 3, 2, 1, ..."""
    staging = bench.capture.staging
    for buffer in staging.buffers.values():
        buffer.fill_(0xA5)
    slots = list(range(staging.slots - 1, -1, -1))[: len(sources)]
    gather_class(bench.view, staging, pin=False).run(sources, slots)
    return [buffer.clone() for buffer in staging.buffers.values()]


def compare(case: str, flip: bool = False) -> None:
    """Run both ways over one case; `flip`: change one bit of a ring row in between (control)."""
    with fixtures.cpu_hicache():
        fixtures.make_server_args()
        bench = Bench()
        try:
            sources = [Source(row, end, 0, end) for row, end in CASES[case]]
            plain = capture_after(bench, RingGather, sources)
            if flip:
                ring = bench.view.rings["c4_indexer_state"][-1]
                row, end = CASES[case][0]
                words = ring.buffer.view(torch.int32)
                words[row * ring.size + (end - 1) % ring.size, -1] ^= 1
            kernel = capture_after(bench, KernelRingGather, sources)
        finally:
            bench.close()
    same = [torch.equal(a, b) for a, b in zip(plain, kernel, strict=True)]
    print("equal" if all(same) else f"differ {same}")


def interpreted(*arguments: str) -> str:
    """What this file prints when it is run with Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("case", CASES)
def test_the_ring_gather_leaves_the_bytes_and_checksums_of_plain_torch(case):
    assert interpreted(case) == "equal"


def test_control_one_bit_of_a_ring_row_is_seen():
    # The window pool comes first: its buffer holds every section's checksum.
    assert interpreted("one boundary", "flip") == "differ [False, True, False]"


if __name__ == "__main__":
    compare(sys.argv[1], flip="flip" in sys.argv[2:])
