"""What is written under one identity is not there for another: a matrix of configurations.

The storage side is real (pools, tree, IO threads, file backend); identities differ in one fact each, or
in the geometry of the model. What may differ (slots, host pages, rows) is no obstacle.
"""

from __future__ import annotations

import contextlib
import logging
import re
from array import array
from typing import Any
from unittest import mock

import pytest
from bitexact_fixtures import PAGE, cpu_hicache, make_kv_pool, make_server_args
from l3_fixtures import FACTS, Server, make_storage, storage_hooked
from startup_fixtures import resolve, write_model
from tree_driver import TreeDriver, tokens

from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.storage_names import (
    StorageNames,
    facts_of,
    name_excess,
    whole_model,
)

PAGES = 3
PROMPT = tokens(PAGES, 5)

IDENTITIES: dict[str, dict[str, Any]] = {
    "the one": {},
    "another model": {"facts": {**FACTS, "model": "other"}},
    "other weights": {"facts": {**FACTS, "weights": "v2"}},
    "another KV dtype": {"facts": {**FACTS, "kv": "float8"}},
    "another group size": {"facts": {**FACTS, "tp": 4}},
    "aligned chunks": {"unit": 2 * PAGE},
    "another head": {"nope": 28, "rope": 4},
    "other ratios": {"layers": (4, 128, 4, 4)},
    "more layers": {"layers": (4, 128, 4, 0, 0)},
}

SAME: dict[str, dict[str, Any]] = {
    "fewer slots": {"slots": 5},
    "more rows and pages": {"rows": 20, "pages": 60},
    "more host pages": {"ratio": 4.0},
}


@pytest.fixture(scope="module", autouse=True)
def _cpu():
    with cpu_hicache(), storage_hooked():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory into which every identity has written the prompt."""
    path = tmp_path_factory.mktemp("names") / "store"
    for options in IDENTITIES.values():
        server = make_storage(path, **options)
        driver = TreeDriver(server.stack)
        driver.run(PROMPT)
        server.settle()
        unit = options.get("unit", PAGE) // PAGE
        assert server.storage.counters.records_written == PAGES
        assert unit in (1, 2)
        server.close()
    return path


def read(server: Server, prompt: array = PROMPT) -> int:
    """Tokens that storage gives an empty server for the prompt."""
    req = TreeDriver(server.stack).request(prompt)
    if not server.submit_prefetch(req):
        return 0
    loaded = server.finish_prefetch(req)
    server.settle()
    return loaded


def written_alone(path, options: dict[str, Any]) -> None:
    server = make_storage(path, **options)
    TreeDriver(server.stack).run(PROMPT)
    server.settle()
    server.close()


@pytest.mark.parametrize("reader", IDENTITIES)
@pytest.mark.parametrize("writer", IDENTITIES)
def test_only_the_identity_that_wrote_it_reads_it(writer, reader, tmp_path, caplog):
    written_alone(tmp_path, IDENTITIES[writer])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        server = make_storage(tmp_path, **IDENTITIES[reader])
        loaded = read(server)
    unit = IDENTITIES[reader].get("unit", PAGE)
    assert loaded == (PAGES * PAGE // unit * unit if reader == writer else 0)
    counters = server.storage.counters
    assert counters.records_loaded == (reader == writer)
    assert counters.refused_record == counters.refused_kv == counters.unreadable == 0
    assert not [r for r in caplog.records if "storage" in r.getMessage()]
    server.close()


@pytest.mark.parametrize("reader", IDENTITIES)
def test_all_of_them_share_a_directory(directory, reader):
    server = make_storage(directory, **IDENTITIES[reader])
    assert read(server) == (2 if reader == "aligned chunks" else PAGES) * PAGE
    assert server.storage.counters.records_loaded == 1
    server.close()


@pytest.mark.parametrize("other", SAME)
def test_sizes_are_no_part_of_it(directory, other):
    server = make_storage(directory, **SAME[other])
    assert read(server) == PAGES * PAGE
    assert server.storage.counters.records_loaded == 1
    server.close()


def test_the_ring_is_no_part_of_it(directory):
    """Records are in position order: a server with a larger ring (speculation) reads the same ones."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    with mock.patch.object(deepseek_v4_memory_pool, "get_swa_ring_size", lambda *_a, **_k: 131):
        server = make_storage(directory)
    assert server.stack.kv_pool.unified_swa_ring_size == 131
    assert read(server) == PAGES * PAGE
    assert server.storage.counters.records_loaded == 1
    server.close()


def test_a_server_without_the_feature_keeps_its_kv_to_itself(directory):
    """The keys of compressed KV carry the identity too: nothing is under the model's plain name."""
    names = {path.name for path in directory.glob("*.bin")}
    assert names
    assert not [name for name in names if not re.search(r"_tiny-bx1-[0-9a-f]{16}\.bin$", name)]


def test_no_name_leaves_the_directory(tmp_path):
    """The pools' names, and a model's name that looks like a path."""
    names = StorageNames.of(FACTS)
    for name in names.pools.values():
        assert re.fullmatch(r"bx1_[a-z0-9_]+_[0-9a-f]{16}", name.value)
    store = tmp_path / "deep" / "store"
    server = make_storage(store, served_model_name="../../../etc/model")
    TreeDriver(server.stack).run(PROMPT)
    server.settle()
    server.close()
    assert {path.parent for path in tmp_path.rglob("*.bin")} == {store}
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_names_that_no_file_system_takes_are_known(tmp_path):
    """The refusal counts as the file system does: bytes of the longest of the names."""
    names = StorageNames.of(FACTS)
    longest = max((pool.value for pool in names.pools.values()), key=len)
    for letter in ("m", "模"):
        model = letter
        while name_excess(model + letter) <= 0:
            model += letter
        for name, fits in ((model, True), (model + letter, False)):
            path = tmp_path / f"{'0' * 64}.{longest}_{names.tagged(name)}.bin"
            with contextlib.nullcontext() if fits else pytest.raises(OSError, match="too long"):
                path.write_bytes(b"")


# ---- the facts themselves


def identity(args: Any, pool: Any, unit: int = 0) -> bytes:
    return StorageNames.of(facts_of(args, pool, DeviceView(pool).layout, unit)).identity


def test_what_the_identity_depends_on(tmp_path):
    def args(config: dict[str, Any] | None = None, *more: str) -> Any:
        # One directory a configuration: SGLang remembers what it read.
        where = tmp_path / re.sub(r"\W", "", f"m{config}")
        return resolve(write_model(where, **(config or {})), ["--served-model-name", "m", *more])

    make_server_args()
    pool = make_kv_pool(pages=2, rows=1)
    first = identity(args(), pool)
    assert first == identity(args(), pool)
    assert first == identity(args(None, "--max-running-requests", "7"), pool)
    assert first == identity(args(None, "--hicache-ratio", "3"), pool)
    assert first == identity(args(None, "--dp-size", "2"), pool), "replicas"
    assert first == identity(args(), make_kv_pool(pages=9, rows=5)), "sizes of pools"
    others = {
        "name": identity(args(None, "--served-model-name", "other"), pool),
        "weights": identity(args(None, "--weight-version", "two"), pool),
        "revision": identity(args(None, "--revision", "two"), pool),
        "config": identity(args({"rms_norm_eps": 1e-3}), pool),
        "aligned": identity(args(), pool, unit=512),
        "ranks": identity(args(None, "--tp-size", "2"), pool),
        "attention": identity(args(None, "--tp-size", "2", "--attn-dp-size", "2"), pool),
        "experts": identity(args(None, "--tp-size", "2", "--ep-size", "2"), pool),
        "layout": identity(args(), make_kv_pool(pages=2, rows=1, nope=28)),
        "layers": identity(args(), make_kv_pool(pages=2, rows=1, layers=(4, 128, 4))),
    }
    assert len({first, *others.values()}) == len(others) + 1, others


def test_with_a_draft_it_depends_on_the_draft(tmp_path):
    make_server_args()
    geometry = {"pages": 2, "rows": 1}
    pool, draft = make_kv_pool(**geometry), make_kv_pool(**geometry, layers=(0,))
    layout = DeviceView(pool, [draft]).layout
    speculation = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3")
    speculation += ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens")

    def names(where: str, *more: str) -> bytes:
        model = write_model(tmp_path / where)
        args = resolve(model, ["--served-model-name", "m", *more])
        return StorageNames.of(facts_of(args, pool, layout, 0)).identity

    with_draft = names("here", *speculation, "4")
    assert with_draft == names("there", *speculation, "4"), "the draft is part of the model"
    other = write_model(tmp_path / "other")
    others = {
        "none": identity(resolve(tmp_path / "here", ["--served-model-name", "m"]), pool),
        "no facts of it": names("here"),
        "another": names("here", *speculation, "4", "--speculative-draft-model-path", str(other)),
    }
    assert len({with_draft, *others.values()}) == len(others) + 1, others


def test_the_model_on_another_path_is_the_same_model(tmp_path):
    pool = make_kv_pool(pages=2, rows=1)
    here, there = (
        resolve(write_model(tmp_path / name), ["--served-model-name", "m"])
        for name in ("here", "there")
    )
    assert identity(here, pool) == identity(there, pool)


def test_all_stages_have_the_same_name():
    pool = make_kv_pool(pages=2, rows=1)
    layout = DeviceView(pool).layout
    stage = type(layout)(
        layers=layout.layers[:2],
        ratios=layout.ratios[:2],
        window_row_bytes=layout.window_row_bytes,
        c4_row_bytes=layout.c4_row_bytes,
        indexer_row_bytes=layout.indexer_row_bytes,
    )
    ratios = pool.compression_ratios
    assert whole_model(stage, ratios).digest() == whole_model(layout, ratios).digest()
    assert stage.digest() != layout.digest()


def test_names_are_added_to_sglangs_enum_once():
    from sglang.srt.mem_cache.hicache_storage import PoolName

    before = list(PoolName)
    names = StorageNames.of({"model": "a model that nobody has"})
    added = list(PoolName)[len(before) :]
    assert added == list(names.pools.values())
    assert StorageNames.of({"model": "a model that nobody has"}) == names
    assert list(PoolName) == [*before, *added]
    for name in added:
        assert PoolName(name.value) is name
        assert name == name.value
        assert f"{name}" == str(name) == name.value
