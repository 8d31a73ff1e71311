"""Digests of pages in SGLang's host pools: of the bytes, whatever the layout and whoever else hashes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sglang_bitexact_hicache.kv_chain import page_digest
from sglang_bitexact_hicache.storage_kv import BLOCK_BYTES, HostKv

PAGES = 6
# Bytes of one layer's page: a whole pool in one block, several blocks with a short last one, a layer in
# blocks of two, and layers that are larger than half a block and than a block.
POOLS = {
    "c128": (5, 2048),
    "c4": (11, 65_536),
    "indexer": (3, BLOCK_BYTES // 2),
    "large": (3, BLOCK_BYTES // 2 + 4),
    "larger": (2, BLOCK_BYTES + 4),
    "single": (1, 8448),
}
NAMES = [SimpleNamespace(value=name) for name in POOLS]


@pytest.fixture(scope="module")
def layers():
    """Random bytes by pool: [layers, pages, bytes]."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 256, (count, PAGES, nbytes), dtype=torch.uint8, generator=generator)
        for name, (count, nbytes) in POOLS.items()
    }


def kv_of(layers: dict, layout: str) -> HostKv:
    """Over pools in this layout."""

    def pool(name):
        rows = layers[name.value]
        if layout == "layer_first":
            return SimpleNamespace(layout=layout, kv_buffer=[row.clone() for row in rows])
        pages = rows.transpose(0, 1).contiguous()
        if layout == "page_first_direct":
            pages = pages.unsqueeze(2)
        return SimpleNamespace(layout=layout, kv_buffer=pages)

    return HostKv(SimpleNamespace(get_pool=pool), NAMES)


def right(layers: dict, page: int) -> bytes:
    """The digest from the bytes of each pool, one after the other."""
    contents = [(name, layers[name][:, page].contiguous().numpy().tobytes()) for name in POOLS]
    return page_digest([(name, len(content), [content]) for name, content in sorted(contents)])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_digest_does_not_depend_on_the_layout(layers, layout):
    kv = kv_of(layers, layout)
    assert [kv.digest(page) for page in range(PAGES)] == [right(layers, p) for p in range(PAGES)]
    assert kv.nbytes() == sum(count * nbytes for count, nbytes in POOLS.values())
    assert kv.nbytes(NAMES[1]) == 11 * 65_536


def test_threads_do_not_meet_in_the_scratch(layers):
    kv = kv_of(layers, "layer_first")
    wanted = [right(layers, page) for page in range(PAGES)]
    pages = list(range(PAGES)) * 40
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(kv.digest, pages)) == [wanted[page] for page in pages]


def test_a_digest_sees_every_layer_of_every_pool(layers):
    kv = kv_of(layers, "layer_first")
    before = kv.digest(2)
    for name in POOLS:
        for buffer in kv._pools[name]:
            buffer[2, -1] ^= 1
            assert kv.digest(2) != before
            buffer[2, -1] ^= 1
    assert kv.digest(2) == before
