"""Test-only: change or read rows of a running server's pools, right before a chosen forward.

Nothing here runs unless ``DSV4_REFERENCE_POKE_DIR`` names a directory. Then the server looks
before each model forward for ``command.json`` in it. When the command's condition holds for a
request of that forward, the command is carried out on the rows of that request, the file is
removed and ``result.json`` is written. ``Poker`` is the test's side of this.

A condition is the number of tokens of the request that lie before this forward (``prefix``),
so ``prefix=512`` is the forward that continues at position 512: a later chunk, the first chunk
after a hit, or a decode step. An operation names its rows by what they mean, not by where
they lie::

    {"op": "flip", "where": "ring", "layer": 1, "position": 511, "column": 3, "bit": 14}
    {"op": "fill", "where": "indexer_state", "layer": 1, "position": 511, "value": 3.0}
    {"op": "read", "where": "c4_state", "layer": 1, "position": 511}

    {"op": "keep"}
    {"op": "put"}
    {"op": "scribble"}
    {"op": "not_installed"}

``where``: ``ring`` (rows of the sliding window; in the fp8 layout the 512 bytes of the first pool),
``ring_rope`` (those of the fp8 layout's second pool), ``c4_state`` and ``indexer_state`` (rows of the
ratio-4 compressor states). ``bit`` counts from the least significant bit of the element;
``fill`` takes ``columns`` ``[start, stop]``, all by default. ``keep`` copies every ring row and every
ratio-4 state row of the request aside, ``put`` gives the request the rows that were kept: a request
that continues exactly where another one stood, by no code of the feature. ``scribble`` overwrites the
same rows with noise. ``not_installed`` returns the kernels of ``install.KERNELS`` that are not in place
in the server.

With EAGLE a forward is the target's unless the command says ``"model": "draft"``, and a verification
continues at the committed length. The draft has a ring of its own, and no states; commands see its
extends only, not its single steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "DSV4_REFERENCE_POKE_DIR"
_COMMAND = "command.json"
_RESULT = "result.json"


class Poker:
    """The test's side: arms one command at a time.

    Args:
        directory: an existing directory, the same that the server got in its environment.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @property
    def env(self) -> dict[str, str]:
        """What to pass to ``launch.Server(env=...)``."""
        return {DIRECTORY_VARIABLE: str(self.directory)}

    def arm(
        self, prefix: int, operations: Sequence[Mapping[str, Any]], *, model: str = "target"
    ) -> None:
        """Carry out ``operations`` before the next forward of ``model`` ("target" or "draft") that
        continues at ``prefix``."""
        (self.directory / _RESULT).unlink(missing_ok=True)
        part = self.directory / (_COMMAND + ".part")
        command = {"model": model, "prefix": prefix, "operations": list(operations)}
        part.write_text(json.dumps(command))
        part.rename(self.directory / _COMMAND)

    def disarm(self) -> None:
        """Forget an armed command that has not been carried out."""
        (self.directory / _COMMAND).unlink(missing_ok=True)

    def result(self, timeout: float = 30.0) -> list[Any]:
        """What the operations returned, one entry each: None, or the row for ``read``.

        Raises:
            TimeoutError: no forward met the condition.
        """
        deadline = time.monotonic() + timeout
        path = self.directory / _RESULT
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("no forward met the condition of the armed command")
            time.sleep(0.02)
        return json.loads(path.read_text())


def attach(model: Any) -> None:
    """Server's side: look for commands before each forward of ``model``, where a test asks.

    Runs on the scheduler thread inside the model runner, after everything that prepares a
    forward (a restore of truth included) and before the first layer.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    command = Path(directory) / _COMMAND
    forward = model.forward
    role = "draft" if type(model).__name__.endswith("NextN") else "target"

    def poked_forward(input_ids, positions, forward_batch, *args, **kwargs):
        if command.exists():
            _carry_out(command, role, forward_batch)
        return forward(input_ids, positions, forward_batch, *args, **kwargs)

    model.forward = poked_forward


def _carry_out(path: Path, role: str, forward_batch: Any) -> None:
    command = json.loads(path.read_text())
    if command["model"] != role:
        return
    slot = _slot_continuing_at(forward_batch, command["prefix"])
    if slot is None:
        return
    path.unlink()
    results = [_operate(operation, slot) for operation in command["operations"]]
    part = path.with_name(_RESULT + ".part")
    part.write_text(json.dumps(results))
    part.rename(path.with_name(_RESULT))


def _slot_continuing_at(forward_batch: Any, prefix: int) -> int | None:
    """Request slot of the first row whose computed tokens so far number ``prefix``."""
    mode = forward_batch.forward_mode
    # Device lengths: under the overlap schedule EAGLE has no others. Nothing waits on a CPU.
    if mode.is_target_verify():
        prefixes = forward_batch.seq_lens.tolist()
    elif mode.is_decode() and forward_batch.spec_info is None:
        prefixes = (forward_batch.seq_lens - 1).tolist()
    elif mode.is_extend(include_draft_extend_v2=True):
        prefixes = forward_batch.extend_prefix_lens.tolist()
    else:
        return None
    if prefix not in prefixes:
        return None
    return int(forward_batch.req_pool_indices[prefixes.index(prefix)])


def _operate(operation: Mapping[str, Any], slot: int) -> Any:
    if operation["op"] == "not_installed":
        from dsv4_reference_platform import install

        return install.not_installed()
    import torch

    if operation["op"] in ("keep", "put", "scribble"):
        _whole_slot(operation["op"], slot)
        return None
    row = _row(operation["where"], operation["layer"], slot, operation["position"])
    if operation["op"] == "read":
        return row.float().tolist()
    if operation["op"] == "fill":
        columns = operation.get("columns", [0, row.shape[0]])
        row[columns[0] : columns[1]] = operation["value"]
    elif operation["op"] == "flip":
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[row.element_size()]
        bits = row.view(integer)
        mask = 1 << operation["bit"]
        if operation["bit"] == 8 * row.element_size() - 1:
            mask -= 1 << (8 * row.element_size())
        bits[operation["column"]] ^= mask
    else:
        raise ValueError(f"unknown operation {operation['op']!r}")
    return None


_kept: list[Any] = []


def _whole_slot(operation: str, slot: int) -> None:
    """keep, put or scribble every ring row and ratio-4 state row of a request slot."""
    import torch

    from dsv4_reference_platform.kernels import two_pool

    rows = _rows_of_slot(slot)
    if operation == "keep":
        _kept[:] = [row.clone() for row in rows]
    elif operation == "put":
        for row, kept in zip(rows, _kept, strict=True):
            row.copy_(kept)
    else:
        generator = torch.Generator().manual_seed(slot)
        for row in rows:
            noise = torch.randn(row.shape, generator=generator)
            if row.element_size() == 1:  # noise in scale bytes would be NaN and infinity
                packed = two_pool.pack_nope(noise[:, : two_pool.NOPE_DIM], floor=1e-12)
                two_pool.store(row, slice(None), packed)
            else:
                row.copy_(noise.to(row.dtype))


def _rows_of_slot(slot: int) -> list[Any]:
    """Views of a request slot's rows in every ring and ratio-4 state buffer."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    ring = pool.unified_swa_ring_size
    rings = pool.unified_kv_pool
    views = [
        buffer[slot * ring : (slot + 1) * ring]
        for buffer in (*rings.kv_buffer, *rings.kv_buffer_rope)
        if buffer is not None
    ]
    size = pool.get_ring_size(compress_ratio=4)
    for pools in (pool.compress_state_pools, pool.indexer_compress_state_pools):
        views += [
            state.kv_score_buffer.kv_score[slot * size : (slot + 1) * size]
            for state in pools
            if state is not None and state.ratio == 4
        ]
    return views


def _row(where: str, layer: int, slot: int, position: int) -> Any:
    """The 1-D tensor (a view of the pool) that holds ``position`` of request ``slot``.

    Computed here from the documented layout, not by code of the feature under test.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    pool = get_token_to_kv_pool()
    if where in ("ring", "ring_rope"):
        rings, ring = pool.unified_kv_pool, pool.unified_swa_ring_size
        buffers = rings.kv_buffer if where == "ring" else rings.kv_buffer_rope
        return buffers[layer - pool.start_layer][slot * ring + position % ring]
    pools = {
        "c4_state": pool.compress_state_pools,
        "indexer_state": pool.indexer_compress_state_pools,
    }[where]
    ring = pool.get_ring_size(compress_ratio=4)
    return pools[layer].kv_score_buffer.kv_score[slot * ring + position % ring]
