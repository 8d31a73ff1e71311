"""The reference platform's kernels of the fp8 layout, each against a formula written without them.

Bytes are compared with bytes: the formulas choose scales by counting and round by looking values up in
the list of all float8_e4m3fn numbers. Attention over packed rows must have the bits of the bf16
attention over the same rows unpacked (which test_swa_reference_kernels.py checks), and the value that
its definition gives. Each comparison has a control: a wrong rule, or one changed byte, must fail it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_swa_reference_kernels import (
    DIM,
    HEADS,
    PAGE,
    SCALE,
    TOPK,
    Sequence,
    W,
    angle_table,
    ints,
    make_plan,
    normed,
    rand,
    rotated,
)

from dsv4_reference_platform.kernels import attention, compressor, norm_rope, two_pool

torch.set_num_threads(1)

NOPE, ROPE, ROW = 448, 64, 512
GARBAGE = 0xA5
"""What lies in the bytes of a row that no kernel writes."""


def e4m3(byte: int) -> float:
    """The float8_e4m3fn number with this byte."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


MAGNITUDES = np.array([e4m3(byte) for byte in range(127)])
"""Ascending, 0 to 448; the byte is the index."""


def nearest(magnitudes: np.ndarray) -> np.ndarray:
    """Bytes of the nearest numbers, the even one of two that are equally near."""
    above = np.searchsorted(MAGNITUDES, magnitudes).clip(1, 126)
    below = above - 1
    up, down = MAGNITUDES[above] - magnitudes, magnitudes - MAGNITUDES[below]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)


def packed(row: np.ndarray, floor: float, rounding=nearest) -> list[int]:
    """The 462 bytes of a row's elements without rope (float64)."""
    values, scales = [], []
    for tile in row.reshape(7, 64):
        largest = max(np.abs(tile).max(), floor)
        exponent = -126
        while largest > 448 * 2.0**exponent:
            exponent += 1
        scaled = tile / 2.0**exponent
        values += (rounding(np.abs(scaled)) | np.signbit(scaled) * 0x80).tolist()
        scales += [exponent + 127] * 2
    return values + scales


def unpacked(raw: list[int]) -> np.ndarray:
    """The 448 elements of a packed row; a scale byte for every 32."""
    return np.array([e4m3(raw[i]) * 2.0 ** (raw[NOPE + i // 32] - 127) for i in range(NOPE)])


def new_pools(rows: int, fill: int = GARBAGE) -> tuple[torch.Tensor, torch.Tensor]:
    nope = torch.full((rows, ROW), fill, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return nope, torch.zeros(rows, ROPE, dtype=torch.bfloat16)


def raw(nope: torch.Tensor) -> torch.Tensor:
    return nope.view(torch.uint8)


# -- packing -----------------------------------------------------------------------------------


def awkward_rows() -> torch.Tensor:
    """Rows of every magnitude, and tiles at the edges of the rules."""
    rows = rand(40, NOPE, seed=60) * torch.exp2(torch.arange(40.0) - 20).unsqueeze(1)
    tiles = rows.view(40, 7, 64)
    for row, largest in enumerate((448.0, 7.0, 448.0 * 2**-12)):  # exactly at the end of a scale
        tiles[row] = tiles[row].clamp(-1, 1) * (largest / 4)
        tiles[row, 0, 5] = largest
        tiles[row, 1, 5] = -float(np.nextafter(np.float32(largest), np.float32(np.inf)))
        tiles[row, 2, 5] = float(np.nextafter(np.float32(largest), np.float32(0)))
    tiles[3, 0], tiles[3, 1] = 0.0, -0.0
    tiles[3, 2], tiles[3, 3, 1:] = 1e-13, 1e-7  # under the floor; beside a large element
    ties = torch.from_numpy((MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2).float()
    tiles[4].view(-1)[:126] = ties
    tiles[5].view(-1)[:126] = -ties
    tiles[4:6, :2, 63] = 448.0
    return rows


@pytest.mark.parametrize("floor", [1e-12, 1e-4])
def test_packing_takes_the_least_scale_and_the_nearest_value(floor):
    rows = awkward_rows()
    ours = two_pool.pack_nope(rows, floor).tolist()
    exact = rows.double().numpy()
    for number, row in enumerate(exact):
        assert ours[number] == packed(row, floor), number

    def towards_zero(magnitudes: np.ndarray) -> np.ndarray:
        return np.searchsorted(MAGNITUDES, magnitudes, "right") - 1

    def ties_up(magnitudes: np.ndarray) -> np.ndarray:
        middle = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
        return np.searchsorted(middle, magnitudes, "right")

    # The controls: other rules, one by one.
    for rule in (towards_zero, ties_up):
        assert ours != [packed(row, floor, rule) for row in exact]
    assert ours != [packed(row, 1e-8) for row in exact]
    assert ours != [packed(row * (1 + 2**-22), floor) for row in exact]


def test_packing_depends_on_the_row_alone():
    rows = awkward_rows()
    whole = two_pool.pack_nope(rows, 1e-12)
    for part in (slice(0, 1), slice(3, 8), slice(17, 40)):
        assert torch.equal(two_pool.pack_nope(rows[part], 1e-12), whole[part])
    strided = torch.cat((rows, rows), 1)[:, :NOPE]
    assert torch.equal(two_pool.pack_nope(strided, 1e-12), whole)


def test_storing_leaves_the_rest_of_a_row_alone():
    nope, _ = new_pools(6)
    rows = two_pool.pack_nope(rand(2, NOPE, seed=61), 1e-12)
    two_pool.store(nope, ints(4, 1), rows)
    assert torch.equal(raw(nope)[[4, 1], :462], rows)
    assert bool((raw(nope)[:, 462:] == GARBAGE).all())
    assert bool((raw(nope)[[0, 2, 3, 5]] == GARBAGE).all())


def test_unpacking_reads_one_scale_byte_for_every_32_elements():
    rows, rope = awkward_rows(), rand(40, ROPE, seed=62).bfloat16()
    nope, _ = new_pools(40)
    two_pool.store(nope, slice(None), two_pool.pack_nope(rows, 1e-12))
    whole = two_pool.unpack(nope, rope)
    assert torch.equal(whole[:, NOPE:], rope.float())
    for number in range(40):
        expected = unpacked(raw(nope)[number].tolist())
        assert whole[number, :NOPE].double().tolist() == expected.tolist()
    # Half a unit in the last place of three fraction bits, or of the subnormals.
    step = whole[:, NOPE:].new_tensor(raw(nope)[:, NOPE:462].repeat_interleave(32, 1).tolist())
    bound = torch.maximum(rows.abs() * 2**-4, torch.exp2(step - 127) * 2**-10)
    assert bool(((whole[:, :NOPE] - rows).abs() <= bound).all())
    assert torch.equal(whole.bfloat16().float(), whole), "exact in bf16"
    raw(nope)[7, NOPE + 2 * 3 + 1] += 1  # the control: the second byte of tile 3's scale
    changed = (two_pool.unpack(nope, rope) != whole).nonzero().tolist()
    assert changed == [[7, column] for column in range(64 * 3 + 32, 64 * 3 + 64)]


# -- the fused store ---------------------------------------------------------------------------


class FusedCall:
    """Inputs of fused_qk_norm_rope_swa_store as the model gives them, kv a slice of a wider tensor."""

    def __init__(self, tokens: int = 70):
        table = angle_table()
        self.q = rand(tokens, 2 * DIM, seed=63).bfloat16()
        self.wide = rand(tokens, 128 + DIM, seed=64).bfloat16()
        self.weight = (1 + rand(DIM, seed=65, scale=0.1)).bfloat16()
        # A tile of small elements in each: aiter's least scale is far below the compressor's.
        self.weight[:64] = self.weight[:64] * 1e-6
        self.q[:, DIM : DIM + 64] = self.q[:, DIM : DIM + 64] * 1e-6
        self.positions = torch.arange(tokens) * 37
        self.cos = table.real.bfloat16()[:, None, None].contiguous()
        self.sin = table.imag.bfloat16()[:, None, None].contiguous()
        self.table = torch.complex(self.cos.float(), self.sin.float())[:, 0, 0]

    def __call__(self, rows: slice = slice(None), **outputs):
        return norm_rope.fused_qk_norm_rope_swa_store(
            q=self.q[rows],
            kv=self.wide[rows, 128:],
            q_norm_weight=None,
            kv_norm_weight=self.weight,
            q_rms_eps=1e-6,
            kv_rms_eps=1e-6,
            rope_head_dim=ROPE,
            cos_cache=self.cos,
            sin_cache=self.sin,
            positions=self.positions[rows],
            swa_page_size=1,
            fp8_2buff=True,
            **outputs,
        )

    def prefill(self, rows: slice = slice(None)) -> list[torch.Tensor]:
        """q, its rope half, K and its rope half, of these tokens."""
        count = len(self.positions[rows])
        q_nope, q_rope = (part.view(count, 2, -1) for part in new_pools(2 * count))
        k_nope, k_rope = new_pools(count)
        outputs = {"q_rope_out": q_rope, "k_nope_out": k_nope, "k_rope_out": k_rope}
        assert self(rows, q_out=q_nope, **outputs) is q_nope
        return [raw(q_nope), q_rope, raw(k_nope), k_rope]

    def expected(self, token: int, head: int | None) -> np.ndarray:
        """The normed and rotated row of a query's head, or of K, in float64."""
        if head is None:
            row = normed(self.wide[token, 128:].double().numpy(), self.weight.double().numpy())
        else:
            row = normed(self.q[token, head * DIM : (head + 1) * DIM].double().numpy())
        return rotated(row, self.table, int(self.positions[token]))


def test_fused_store_packs_query_and_key():
    call = FusedCall()
    before = call.wide.clone()
    q_nope, q_rope, k_nope, k_rope = call.prefill()
    assert torch.equal(call.wide, before), "kv is only read"
    for part in (q_nope, k_nope):
        assert bool((part[..., 462:] == GARBAGE).all())

    def wrong(token: int, expected: np.ndarray, nope: torch.Tensor, rope: torch.Tensor) -> float:
        """Part of the row that is not what it should be."""
        row = np.array(nope[:462].tolist()) != packed(expected[:NOPE], 1e-12)
        turned = np.abs(rope.double().numpy() - expected[NOPE:])
        return row.mean() + (turned > np.abs(expected[NOPE:]) * 2**-8 + 1e-6).mean()

    for token in (0, 1, 63, 64, 69):
        for head in (0, 1):
            expected = call.expected(token, head)
            # fp32 against float64: an element on the edge between two values may go either way.
            assert wrong(token, expected, q_nope[token, head], q_rope[token, head]) < 0.005
        expected = call.expected(token, None)
        assert wrong(token, expected, k_nope[token], k_rope[token]) < 0.005
        other = call.expected((token + 1) % 70, None)
        assert wrong(token, other, k_nope[token], k_rope[token]) > 0.5


def test_fused_store_gives_a_token_the_same_bits_alone_and_in_the_ring():
    call = FusedCall()
    whole = call.prefill()
    for rows in (slice(0, 1), slice(5, 69), slice(69, 70)):
        assert all(
            torch.equal(a[..., :462], b[rows][..., :462])
            for a, b in zip(call.prefill(rows), whole, strict=True)
        )
    nope, rope = new_pools(9)
    q_out = torch.empty(3, 2, DIM, dtype=torch.bfloat16)  # bf16 queries: what stock allows as well
    at = ints(4, 0, 7).int()
    call(slice(10, 13), q_out=q_out, swa_cache=nope, swa_rope_cache=rope, swa_loc=at)
    assert torch.equal(raw(nope)[at.long(), :462], whole[2][10:13, :462])
    assert torch.equal(rope[at.long()], whole[3][10:13])
    assert bool((raw(nope)[:, 462:] == GARBAGE).all())
    assert bool((raw(nope)[[1, 2, 3, 5, 6, 8]] == GARBAGE).all())
    assert torch.equal(q_out[..., NOPE:], whole[1][10:13])
    call.wide[11, 128 + 70] *= 2  # the control
    assert not torch.equal(call.prefill(slice(11, 12))[2], whole[2][11:12])
    with pytest.raises(ValueError, match="q_rope_out"):
        call(q_out=torch.empty(70, 2, DIM, dtype=torch.bfloat16), q_rope_out=whole[1])


# -- the compressor's store --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_compressed_rows_are_those_of_the_bf16_store_packed(kind):
    table, weight = angle_table(), 1 + rand(DIM, seed=66, scale=0.1)
    weight[:64] = 1e-7  # a tile under the floor
    kv = rand(3, DIM, seed=67)
    if kind == "prefill":
        tensors = compressor.plan_compress_prefill(
            ints(1), None, None, ints(268), ints(12), None, 12, 4, PAGE, 8, True
        )
        out_loc, written = torch.arange(12) + 60, (63, 67, 71)
    else:
        seq_lens = ints(260, 7, 8)
        tensors = (
            compressor.plan_compress_decode(ints(0, 1, 2), None, None, seq_lens, 4, PAGE, 8, True),
        )
        out_loc, written = ints(5, 6, 7), (5, 7)
    plan = make_plan(4, kind, *tensors)
    plain = torch.zeros(80, DIM, dtype=torch.bfloat16)
    nope, rope = new_pools(80)
    common = {"norm_weight": weight, "norm_eps": 1e-6, "freq_cis": table, "out_loc": out_loc}
    compressor.compress_norm_rope_store(
        kv, plan, **common, kvcache=plain.view(torch.uint8), page_size=1, bf16_store=True
    )
    compressor.compress_norm_rope_store(
        kv,
        plan,
        **common,
        kvcache=raw(nope),
        page_size=1,
        fp8_2buff=True,
        kvcache_rope=rope.view(torch.uint8),
    )
    assert torch.equal(rope, torch.cat((plain[:, NOPE:],), 1))
    for row in range(80):
        found = raw(nope)[row].tolist()
        if row not in written:
            assert found == [GARBAGE] * ROW
            continue
        values = plain[row, :NOPE].double().numpy()
        assert found == packed(values, 1e-4) + [GARBAGE] * 50
        assert found[:462] != packed(values, 1e-12), "the floor"


# -- attention ---------------------------------------------------------------------------------


class Packed(Sequence):
    """A Sequence whose rows and queries lie packed; `k`, `q`, `blocks` and `pool` are its rows
    unpacked, which is exact in bf16."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # Tiles of many sizes, so that a wrong scale would show; small, so that no row has all weight.
        sizes = torch.exp2(torch.arange(-5.0, 2.0)).repeat_interleave(64)
        self.packed = {}
        for name in ("k", "q", "blocks"):
            rows = getattr(self, name).float()
            nope, rope = new_pools(rows[..., 0].numel())
            sized = (rows[..., :NOPE] * sizes).reshape(-1, NOPE)
            two_pool.store(nope, slice(None), two_pool.pack_nope(sized, 1e-12))
            rope.copy_(rows[..., NOPE:].reshape(-1, ROPE))
            lead = rows.shape[:-1]
            self.packed[name] = nope.view(*lead, ROW), rope.view(*lead, ROPE)
            setattr(self, name, two_pool.unpack(*self.packed[name]).bfloat16())
        self.nope, self.rope = new_pools(len(self.pool), fill=0x38)
        self.pool = two_pool.unpack(self.nope, self.rope).bfloat16()
        count = len(self.where) - 1
        at = self.swa_pages + self.where[:count]
        self.pool[at] = self.blocks[:count]
        for pool, rows in zip((self.nope, self.rope), self.packed["blocks"], strict=True):
            raw(pool)[at] = raw(rows)[:count]

    def store(self, positions: torch.Tensor) -> None:
        super().store(positions)
        nope, rope = (rows[positions] for rows in self.packed["k"])
        attention.store_swa_into_unified(
            kv=nope,
            state_slot=torch.full_like(positions, self.slot),
            positions=positions,
            unified_kv=self.nope,
            win=W,
            ring_stride=self.ring,
            final_pos=torch.full_like(positions, int(positions[-1])),
            kv_rope=rope,
            unified_kv_rope=self.rope,
        )

    def prefill(self, *chunks: int, start: int = 0) -> torch.Tensor:
        outputs = []
        for count in chunks:
            positions = torch.arange(start, start + count)
            prefix, prefix_ptr, extend, extend_ptr = self.prefill_lists(positions, start)
            (q, q_rope), (k, k_rope) = (
                [rows[start : start + count] for rows in self.packed[name]] for name in "qk"
            )
            outputs.append(
                attention.prefill_fp8_2buff(
                    q=q,
                    q_rope=q_rope,
                    unified_kv=self.nope,
                    unified_kv_rope=self.rope,
                    kv_indices_prefix=prefix,
                    kv_indptr_prefix=prefix_ptr,
                    kv_extend=k,
                    kv_extend_rope=k_rope,
                    kv_indices_extend=extend,
                    kv_indptr_extend=extend_ptr,
                    attn_sink=self.sink,
                    softmax_scale=SCALE,
                    v_head_dim=DIM,
                )
            )
            self.store(positions)
            start += count
        return torch.cat(outputs)

    def decode(self, position: int) -> torch.Tensor:
        """One decode step of this request."""
        at = ints(position)
        window, selected = (at + 1).clamp(max=W), ints(len(self.blocks_of(position)))
        for pool, rows in zip((self.nope, self.rope), self.packed["k"], strict=True):
            raw(pool)[self.slot * self.ring + position % self.ring] = raw(rows)[position]
        pages, none = self.pages(at), torch.zeros_like(selected)
        streams = attention.build_decode_streams(
            state_slot=ints(self.slot),
            positions=at,
            swa_len=window,
            hca_len=selected if self.ratio == 128 else none,
            csa_len=selected if self.ratio == 4 else none,
            hca_page_indices=(pages if self.ratio == 128 else torch.empty(1, 0, dtype=torch.int32)),
            csa_width=TOPK,
            win=W,
            ring_stride=self.ring,
            swa_pages=self.swa_pages,
        )
        indices, indptr = {0: streams[0:2], 128: streams[2:4], 4: streams[4:6]}[self.ratio]
        if self.ratio == 4:
            attention.fill_compress_tail(
                indices=indices,
                indptr=indptr,
                prefix_len=window,
                page_indices=pages,
                valid_len=selected,
                swa_pages=self.swa_pages,
            )
        q, q_rope = (rows[position : position + 1] for rows in self.packed["q"])
        return attention.decode_fp8_2buff(
            q=q,
            q_rope=q_rope,
            unified_kv=self.nope,
            unified_kv_rope=self.rope,
            kv_indices=indices,
            kv_indptr=indptr,
            attn_sink=self.sink,
            v_head_dim=DIM,
        )


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_over_packed_rows_is_attention_over_the_rows(ratio):
    length = 2200 if ratio == 4 else 700  # above 2,048 tokens the indexer selects
    sequence = Packed(length, ratio)
    out = sequence.prefill(length - 300, 300)
    assert out.dtype == torch.bfloat16
    for position in (0, 3, 127, 128, 511, length - 301, length - 300, length - 1):
        expected = sequence.expected(position)
        error = (out[position].double() - expected).abs() - expected.abs() * 2**-8
        assert error.max() < 1e-5, position
    assert torch.equal(out, Sequence.prefill(Packed(length, ratio), length - 300, 300))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_over_packed_rows_does_not_depend_on_the_chunks(ratio):
    whole = Packed(600, ratio).prefill(600)
    for chunks, slot, ring in (((256, 256, 88), 2, W), ((512, 88), 0, 131), ((1, 63, 536), 1, 131)):
        other = Packed(600, ratio, slot=slot, layout=slot + 1, ring=ring)
        assert torch.equal(other.prefill(*chunks), whole), (chunks, slot, ring)
    other = Packed(600, ratio, slot=3, layout=4)
    other.prefill(596)
    assert torch.equal(
        torch.cat([other.decode(position) for position in range(596, 600)]), whole[596:]
    )


def test_attention_sees_every_byte_of_a_packed_row_that_means_something():
    """The control: a byte of one ring row is changed, which the first 28 queries of a chunk see."""

    def second_chunk(pool: str = "nope", column: int | None = None, bit: int = 0) -> torch.Tensor:
        sequence = Packed(400, 4)
        sequence.prefill(300)
        if column is not None:
            raw(getattr(sequence, pool))[sequence.slot * W + 200 % W, column] ^= bit
        return sequence.prefill(100, start=300)

    before = second_chunk()
    assert torch.equal(second_chunk(), before)
    # A value, the two bytes of its tile's scale, and an element with rope.
    for pool, column, bit in (
        ("nope", 390, 0x20),
        ("nope", 460, 4),
        ("nope", 461, 4),
        ("rope", 7, 2),
    ):
        changed = (second_chunk(pool, column, bit) != before).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == list(range(28)), (pool, column)
    for column in (462, 511):
        assert torch.equal(second_chunk("nope", column, 0xFF), before), "no kernel reads these"


def test_attention_over_packed_rows_refuses_what_is_not_a_pair():
    sequence = Packed(10, 0)
    good = sequence.nope, sequence.rope
    for nope, rope in (
        (good[0][:-1], good[1]),
        (good[0][:, :448].contiguous(), good[1]),
        (good[0], good[1][:, :32].contiguous()),
        (good[0], good[1].float()),
        (good[0].float(), good[1]),
    ):
        sequence.nope, sequence.rope = nope, rope
        with pytest.raises(ValueError, match="row"):
            sequence.prefill(10)
    sequence.nope, sequence.rope = good
    assert sequence.prefill(10).shape == (10, HEADS, DIM)
    stream = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="several queries"):
        attention.decode_fp8_2buff(
            q=sequence.packed["q"][0],
            q_rope=sequence.packed["q"][1],
            unified_kv=sequence.nope,
            unified_kv_rope=sequence.rope,
            kv_indices=stream,
            kv_indptr=stream,
            attn_sink=sequence.sink,
            v_head_dim=DIM,
            max_seqlen_q=2,
        )
