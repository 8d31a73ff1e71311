"""Nothing that the feature does on the scheduler's thread or on the forward path waits for the device.

On a CPU the calls that would are noted where they are made (sync_watch.py), on a real scheduler through
captures, restores, a page completed by decode and an abort. `make bench-gpu` and
`benchmark/gpu_lanes.py` let torch raise on them, on a GPU.
"""

from __future__ import annotations

import pytest
import scenarios
from scenarios import PAGE, prompt
from sync_watch import SyncWatch


def watched(h, broken):
    """A cold prompt, its hits from device and host memory, an answer over the end of a page, and a
    request aborted in its prefill: (calls noted, how often each part ran, counter gains)."""
    yield from h.flush()
    before = scenarios.counters(h)
    runtime = h.runtime
    watch = SyncWatch(runtime)
    capture = runtime._capture
    gather = capture.gather_window

    def waiting(plan, layer, chunks):
        if broken:
            float(chunks[0][0, 0])
        gather(plan, layer, chunks)

    ids = prompt(900, 3 * PAGE - 3)
    with watch.on(), scenarios.patched(capture, "gather_window", waiting):
        yield from h.generate(ids, 6)
        yield from h.generate(ids, 2)
        yield from scenarios.AWAY["host"](h)
        yield from h.generate(ids, 2)
        req = h.submit(prompt(901, 1300), 2)
        while not req.kv.holds_kv:
            yield
        h.abort(req)
        yield from h.settle()
    gains = scenarios.since(h, before)
    yield from scenarios.leak_free(h)
    return watch.noted, dict(watch.watched), gains


@pytest.fixture(scope="module")
def process(scheduler_process):
    args = ["--chunked-prefill-size", "512"]
    with scheduler_process("nosync", args, SGLANG_SWA_DBG_CHECKSUM="0") as running:
        yield running


def test_no_call_of_ours_waits_for_the_device(process):
    noted, ran, gains = process.run(watched, False)
    assert noted == []
    # What was watched did run.
    assert gains["restored"] == 2
    assert gains["decode_captured"] == 1
    assert gains["captured"] >= 4
    assert ran["admit"] >= 4
    assert ran["forget"] >= 4
    assert min(ran["gather_window"], ran["gather_state"], ran["after a forward"]) >= 8


def test_control_one_value_read_in_a_hook_is_noted(process):
    noted, _, _ = process.run(watched, True)
    assert noted
    assert all("_local_scalar_dense" in x or "__float__" in x for x in noted), noted
