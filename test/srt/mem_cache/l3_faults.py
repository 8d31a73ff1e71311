"""Faults of storage (L3): what can go wrong with it, and the scenarios that suffer it.

A fault of stored bytes is a row of FAULTS: what is done to the files of a prompt, how much of the prompt
the next two requests reuse, what the counters gain, and what the log says. Other faults are scenarios of
their own: a read that fails or hangs, a backend that is detached, a directory that takes nothing, a
process that dies.

Scenarios run inside a scheduler process (scheduler_harness.py) and end with `leak_free`. A test whose
name begins with `test_fault_` injects one fault; benchmark/l3 counts them by that name.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from l3_scenarios import from_storage, populate, stored, stored_since
from scenarios import (
    PAGE,
    cold,
    dirty_rings,
    leak_free,
    patched,
    prompt,
    settle_storage,
    to_host,
    to_storage,
)
from scheduler_harness import Harness, Result, Steps

from sglang_bitexact_hicache import record, storage, storage_guard
from sglang_bitexact_hicache.layout import C4_POOL, POOLS, WINDOW_POOL

C4, _, C128 = KV_POOLS = ("deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")
"""SGLang's host pools of compressed KV, in bf16."""

MARKER = "kv"
"""The file of no bytes that SGLang keeps for each page beside those of the pools."""

NEW = 2
"""Tokens that each request generates."""

READING = (
    *("records_read", "records_loaded", "bytes_read", "bytes_used"),
    *("refused_record", "refused_kv", "unreadable", "unproved", "not_asked"),
)
"""The counters of storage that prefetches bump; the others count writes."""


def prompt_of(pages: int) -> list[int]:
    """The prompt of so many whole pages that faults happen to."""
    return prompt(4000 + pages, pages * PAGE + 20)


# ---- what is stored of a prompt


@dataclass(frozen=True)
class Stored:
    """Where the file backend keeps a prompt's pages and records; pages are counted from 0."""

    root: Path
    hashes: Sequence[str]
    layout: Any
    key_of: Callable[[str, str], str]
    suffixed: Callable[[str], str]

    @classmethod
    def of(cls, h: Harness, ids: Sequence[int]) -> Stored:
        """The whole pages of a prompt, in the directory that is attached."""
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        storage, backend = h.cache.truth_storage, file_backend(h)

        def key_of(page_hash: str, pool: str) -> str:
            return backend._log_key(storage.names.pools.get(pool, pool), page_hash)

        # With EAGLE a page is named by pairs of tokens.
        key = RadixKey(array("q", ids), is_bigram=h.cache.tree_core.is_eagle).page_aligned(PAGE)
        hashes = get_storage_hash_str(key, None, page_size=PAGE)
        root = Path(backend.file_path)
        return cls(root, hashes, storage.layout, key_of, backend._get_suffixed_key)

    def key(self, page: int, pool: str) -> str:
        """The backend's key of a page: of a KV pool, of the marker, or of the record at its end."""
        return self.key_of(self.hashes[page], pool)

    def path(self, page: int, pool: str) -> Path:
        """The file under that key."""
        return self.root / f"{self.suffixed(self.key(page, pool))}.bin"

    def files(self) -> list[Path]:
        """Every file that the prompt has."""
        return [path for page in range(len(self.hashes)) for path in self._of_page(page)]

    def deepest(self) -> int:
        """Pages before the deepest boundary that has all of its files."""
        kv = 0
        while kv < len(self.hashes) and self._whole(kv, (MARKER, *KV_POOLS)):
            kv += 1
        return max((page + 1 for page in range(kv) if self._whole(page, POOLS)), default=0)

    def _of_page(self, page: int) -> Iterator[Path]:
        paths = (self.path(page, pool) for pool in (MARKER, *KV_POOLS, *POOLS))
        return filter(Path.exists, paths)

    def _whole(self, page: int, pools: Sequence[str]) -> bool:
        return all(self.path(page, pool).exists() for pool in pools)


def file_backend(h: Harness) -> Any:
    """SGLang's HiCacheFile, behind the guard and, where there is one, SGLang's failure injector."""
    backend = h.cache.cache_controller.storage_backend.backend
    return getattr(backend, "_backend", backend)


def stored_anew(h: Harness, ids: Sequence[int]) -> Steps:
    """The prompt's pages and records in storage, whole, as another server would have written them: this
    one knows nothing of them. Returns (its cold answer, Stored)."""
    yield from to_storage(h)
    assert h.cache.clear_storage_backend()
    known = h.state.setdefault("written", {})
    if tuple(ids) not in known:
        answer = yield from populate(h, ids, NEW)
        files = Stored.of(h, ids).files()
        known[tuple(ids)] = answer, {path.name: path.read_bytes() for path in files}
        yield from to_storage(h)
        assert h.cache.clear_storage_backend()
    answer, contents = known[tuple(ids)]
    where = Stored.of(h, ids)
    for name, data in contents.items():
        (where.root / name).write_bytes(data)
    return answer, where


# ---- damage


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def resize(path: Path, size: int) -> None:
    """The file shorter, or longer by bytes that mean nothing."""
    data = path.read_bytes()
    path.write_bytes(data[:size] + b"\xa5" * (size - len(data)))


def header_fields() -> dict[str, tuple[int, int]]:
    """Offset and length of each field in the fixed part of a record's header."""
    formats = re.findall(r"\d*[sQ]", record._FIELDS.format)
    fields, offset = {}, 0
    for name, form in zip((*record._Fields._fields, "checksum"), (*formats, "Q"), strict=True):
        length = struct.calcsize(f"<{form}")
        fields[name] = offset, length
        offset += length
    assert offset == record._CHECKSUM_END
    return fields


def behind_the_fields(layout: Any) -> dict[str, int]:
    """One byte of each thing else that a header holds."""
    hashes = record.HOST_FIXED_BYTES
    marks = hashes + record.SECTION_HASH_BYTES * layout.num_sections
    return {
        "zeros": hashes - 1,
        "section hash": hashes,
        "kv mark": marks,
        "unused kv mark": marks + record.KV_DIGEST_BYTES * record.KV_MARKS - 1,
        "device checksum": layout.host_header_bytes,
        "end": layout.header_bytes - 1,
    }


def forge(path: Path, layout: Any, name: str) -> None:
    """Another value in one header field, under a checksum that is right for it."""
    window = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
    offset, length = header_fields()[name]
    window[offset + length - 1] ^= 0x10
    checksum = record._header_checksum(window, layout)
    record._CHECKSUM.pack_into(window, record._CHECKSUM_AT, checksum)
    path.write_bytes(window.tobytes())


def another_page(where: Stored, page: int, pool: str) -> None:
    """A page of KV gets the bytes of another page: valid, of the same length, of another prefix."""
    other = (page + 1) % len(where.hashes)
    where.path(page, pool).write_bytes(where.path(other, pool).read_bytes())


# ---- faults of stored bytes


def pages(count: int) -> dict[str, int]:
    """So many pages of every KV pool."""
    return dict.fromkeys(KV_POOLS, count)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with what is stored of a prompt, and what comes of it.

    Attributes:
        pages: of the prompt; every boundary has a record.
        damage: what is done to the files.
        first, again: pages that the next request reuses from storage, and the one after it.
        read: pages that the first request reads of each KV pool; a record too, if one is counted.
        counts: what the counters gain with the first request, but for bytes.
        later: the same with the second request, but for what it reads and uses.
        page: whose key the log line names; None: the log says nothing.
        says: the reason in that line.
    """

    pages: int
    damage: Callable[[Stored], Any]
    first: int
    again: int
    read: Mapping[str, int]
    counts: Mapping[str, int]
    later: Mapping[str, int] = field(default_factory=dict)
    page: int | None = None
    says: str = ""


@dataclass(frozen=True)
class Suffered:
    """What a fault did: the answer before it, and (result, counter gains, storage gains) of the two
    requests after it."""

    cold: Result
    first: tuple[Result, dict[str, int], dict[str, int]]
    again: tuple[Result, dict[str, int], dict[str, int]]
    keys: Sequence[str]
    page_bytes: Mapping[str, int]
    record_bytes: int

    def gains(
        self, read: Mapping[str, int], counts: Mapping[str, int], used: bool
    ) -> dict[str, int]:
        """What the counters have to gain, with the bytes."""
        nbytes = sum(count * self.page_bytes[pool] for pool, count in read.items())
        nbytes += counts.get("records_read", 0) * self.record_bytes
        gained = {**counts, "bytes_read": nbytes, "bytes_used": nbytes if used else 0}
        gained["bytes_written"] = counts.get("records_written", 0) * self.record_bytes
        return {name: value for name, value in gained.items() if value}


def damaged_record(damage: Callable[[Stored], Any], says: str, count: int = 2) -> Fault:
    """The deepest record is not what it should be: the boundary before it is used, if there is one."""
    return Fault(
        pages=count,
        damage=damage,
        first=0,
        again=count - 1,
        read=pages(count),
        counts={
            **{"records_read": 1, "refused_record": 1},
            **{"records_present": count, "pages_read_back": count},
        },
        later={"records_present": 1},
        page=count - 1,
        says=f"is refused: {says}",
    )


def short_record(pool: str, size: Callable[[int, Any], int], count: int = 2) -> Fault:
    """A file of the deepest record is cut off."""

    def damage(where: Stored) -> None:
        path = where.path(count - 1, pool)
        resize(path, size(path.stat().st_size, where.layout))

    return Fault(
        pages=count,
        damage=damage,
        first=0,
        again=count - 1,
        read=pages(count),
        counts={"unreadable": 1, "records_present": count, "pages_read_back": count},
        later={"records_present": 1},
        page=count - 1,
        says="is unreadable: OSError: Short read",
    )


def missing_record(*pools: str) -> Fault:
    """Files of the deepest of three records are not there: seen at once, and written again."""
    return Fault(
        pages=3,
        damage=lambda where: [where.path(2, pool).unlink() for pool in pools],
        first=2,
        again=3,
        read=pages(2),
        counts={"records_read": 1, "records_loaded": 1, "records_written": 1, "pages_read_back": 1},
    )


def foreign_page(page: int, pool: str) -> Fault:
    """A page of KV has other valid bytes: no record behind it is used."""
    return Fault(
        pages=3,
        damage=partial(another_page, page=page, pool=pool),
        first=0,
        again=page,
        read=pages(3),
        counts={
            **{"records_read": 1, "refused_kv": 1, "write_not_own": 3 - page},
            **{"records_present": page, "pages_read_back": page + 1},
        },
        later={"write_not_own": 3 - page},
        page=page,
        says=f"is refused: the KV from page {page} ",
    )


def short_page(page: int, pool: str, size: Callable[[int], int]) -> Fault:
    """A page of KV is cut off: it is read with all others, then one after the other up to it."""

    def damage(where: Stored) -> None:
        path = where.path(page, pool)
        resize(path, size(path.stat().st_size))

    return Fault(
        pages=3,
        damage=damage,
        first=0,
        again=page,
        read={**pages(3), pool: page},
        counts={
            **{"unreadable": 1, "write_not_own": 3 - page},
            **{"records_present": page, "pages_read_back": page},
        },
        later={"write_not_own": 3 - page},
        page=page,
        says="is unreadable: OSError: Short read",
    )


def missing_page(page: int, pool: str) -> Fault:
    """A file of a page of KV is not there: seen at once, and written again."""
    return Fault(
        pages=3,
        damage=lambda where: where.path(page, pool).unlink(),
        first=page,
        again=3,
        read=pages(page),
        counts={
            **{"records_read": page > 0, "records_loaded": page > 0},
            **{"records_present": 3 - page, "pages_read_back": 3 - page},
        },
    )


def longer(page: int, pool: str, count: int) -> Fault:
    """What comes after the bytes that belong there is not read."""

    def damage(where: Stored) -> None:
        path = where.path(page, pool)
        resize(path, path.stat().st_size + 100)

    counts = {"records_read": 1, "records_loaded": 1}
    return Fault(count, damage, count, count, pages(count), counts)


def pushed(page: int, pool: str) -> Callable[[Stored], None]:
    """Damage: the bytes begin one byte late, so that the file is longer and all of it is wrong."""
    return lambda where: where.path(page, pool).write_bytes(
        b"\0" + where.path(page, pool).read_bytes()
    )


def _section_flips() -> Iterator[tuple[str, Fault]]:
    def flip_section(where: Stored, pool: str, which: int) -> None:
        # An exponent bit of the first value of the last row: the control has to see it.
        section = where.layout.sections(pool)[which]
        row = section.offset + section.nbytes - section.row_bytes
        flip(where.path(1, pool), row + (1 if pool == WINDOW_POOL else 3), 3)

    for pool in POOLS:
        for which, name in ((0, "first"), (-1, "last")):
            damage = partial(flip_section, pool=pool, which=which)
            yield f"bit in {name} layer of {pool}", damaged_record(damage, f"section {pool} layer ")


def _header_flips() -> Iterator[tuple[str, Fault]]:
    def flip_field(where: Stored, name: str) -> None:
        offset, length = header_fields()[name]
        flip(where.path(0, WINDOW_POOL), offset + length - 1)

    def flip_behind(where: Stored, name: str) -> None:
        flip(where.path(0, WINDOW_POOL), behind_the_fields(where.layout)[name])

    def forge_field(where: Stored, name: str) -> None:
        forge(where.path(0, WINDOW_POOL), where.layout, name)

    # Of a prompt with one record: there is nothing before it.
    for name in header_fields():
        damage = partial(flip_field, name=name)
        yield f"bit in header field {name}", damaged_record(damage, "header checksum", 1)
    for name in ("zeros", "section hash", "kv mark", "unused kv mark", "device checksum", "end"):
        damage = partial(flip_behind, name=name)
        yield f"bit in header's {name}", damaged_record(damage, "header checksum", 1)
    for name in record._Fields._fields:
        damage = partial(forge_field, name=name)
        yield f"forged header field {name}", damaged_record(damage, name.replace("_", " "), 1)


def _lengths() -> Iterator[tuple[str, Fault]]:
    sizes: dict[str, Callable[[int, Any], int]] = {
        "nothing": lambda size, layout: 0,
        "a byte": lambda size, layout: 1,
        "a header": lambda size, layout: layout.header_bytes,
        "half": lambda size, layout: size // 2,
        "all but a byte": lambda size, layout: size - 1,
    }
    for pool in POOLS:
        for name, size in sizes.items():
            yield f"{name} of {pool}", short_record(pool, size, 2 if name == "half" else 1)
        yield f"{pool} longer", longer(1, pool, 2)
        yield (
            f"{pool} pushed",
            damaged_record(
                pushed(1, pool),
                "header checksum" if pool == WINDOW_POOL else f"section {pool} layer ",
            ),
        )
        yield f"no {pool}", missing_record(pool)
    yield "no file of the deepest record", missing_record(*POOLS)
    for name, size in sizes.items():
        if name != "a header":
            yield f"{name} of a {C4} page", short_page(1, C4, lambda n, size=size: size(n, None))
    for page, name in enumerate(("first", "middle", "last")):
        yield f"half of the {name} {C128} page", short_page(page, C128, lambda n: n // 2)
    yield f"a {C4} page longer", longer(1, C4, 3)


def _pages() -> Iterator[tuple[str, Fault]]:
    for page, name in enumerate(("first", "middle", "last")):
        for pool in KV_POOLS:
            yield f"another run's {name} {pool} page", foreign_page(page, pool)
        for pool in (C4, MARKER):
            yield f"no {name} {pool} page", missing_page(page, pool)
    fault = foreign_page(1, C4)
    yield f"a {C4} page pushed", Fault(**{**vars(fault), "damage": pushed(1, C4)})


FAULTS: Mapping[str, Fault] = {
    name: fault
    for rows in (_section_flips, _header_flips, _lengths, _pages)
    for name, fault in rows()
}
"""Every fault of stored bytes, by name."""


def suffered(h: Harness, answer: Result, where: Stored, first: Any, again: Any) -> Suffered:
    """What the scenarios below return."""
    storage = h.cache.truth_storage
    page_bytes = {pool.value: storage.kv.nbytes(pool) for pool in storage.kv.names}
    return Suffered(answer, first, again, where.hashes, page_bytes, storage.layout.slot_bytes)


def suffer(h: Harness, name: str) -> Steps:
    """A fault of FAULTS, then the prompt twice, each time with empty L1 and L2."""
    fault = FAULTS[name]
    ids = prompt_of(fault.pages)
    answer, where = yield from stored_anew(h, ids)
    fault.damage(where)
    first = yield from from_storage(h, ids, NEW)
    again = yield from from_storage(h, ids, NEW)
    return suffered(h, answer, where, first, again)


def suffer_behind_a_prefix(h: Harness, name: str) -> Steps:
    """The same, each time with the prompt's first page in the tree, from storage."""
    fault = FAULTS[name]
    ids = prompt_of(fault.pages)
    answer, where = yield from stored_anew(h, ids)
    requests = []
    for _ in range(2):
        yield from to_storage(h)
        yield from h.generate([*ids[:PAGE], 5], 1)
        if not requests:
            fault.damage(where)
        dirty_rings(h)
        before = stored(h)
        result = yield from h.generate(ids, NEW)
        yield from settle_storage(h)
        requests.append((result, {}, stored_since(h, before)))
        yield from leak_free(h)
    return suffered(h, answer, where, *requests)


def short_record_inside(h: Harness, short: int, whole: int) -> Steps:
    """A prompt whose deepest record is too short, then twice a longer one that begins with it."""
    answer, where = yield from stored_anew(h, prompt_of(whole))
    resize(where.path(short - 1, WINDOW_POOL), 1)
    yield from from_storage(h, [*prompt_of(whole)[: short * PAGE], 5], NEW)
    first = yield from from_storage(h, prompt_of(whole), NEW)
    again = yield from from_storage(h, prompt_of(whole), NEW)
    return suffered(h, answer, where, first, again)


# ---- the backend is another one, or none


def attach(
    h: Harness, root: str | Path, policy: str = "wait_complete", **config: Any
) -> tuple[bool, str]:
    """SGLang's own attach of the file backend, at run time; `config` is its extra config."""
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput

    asked = AttachHiCacheStorageReqInput(
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config_json=json.dumps(
            {"file_storage_path": str(root), **config}
        ),
        hicache_storage_prefetch_policy=policy,
    )
    done = h.scheduler.attach_hicache_storage_wrapped(asked)
    return done.success, done.message


def detach(h: Harness) -> tuple[bool, str]:
    """SGLang's own detach, at run time."""
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqInput

    done = h.scheduler.detach_hicache_storage_wrapped(DetachHiCacheStorageReqInput())
    return done.success, done.message


def attach_instead(h: Harness, root: str | Path, policy: str = "wait_complete", **config: Any):
    """Detach what is attached and attach this; both must succeed."""
    for success, message in (detach(h), attach(h, root, policy, **config)):
        assert success, message


def move_to(h: Harness, root: str | Path) -> Steps:
    """Detach what is attached, if anything, and attach this directory."""
    yield from to_storage(h)
    attach_instead(h, root)


def state_of_storage(h: Harness) -> dict[str, Any]:
    """What an attach changes."""
    cache, controller = h.cache, h.cache.cache_controller
    threads = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread", "backup_thread")
    return {
        "enabled": (cache.enable_storage, controller.enable_storage),
        "backend": (controller.storage_backend_type, id(controller.storage_backend)),
        "policies": (cache.prefetch_stop_policy, controller.write_policy, cache.is_write_back),
        "threads": [id(getattr(controller, name)) for name in threads],
    }


def refused_attach(h: Harness, backend: str, write_policy: str | None, attached: bool) -> Steps:
    """An attach that is not for this server: (its outcome, what it changed, the prompt's cold answer, its
    result and counter gains from storage afterwards)."""
    ids = prompt_of(1)
    answer, where = yield from stored_anew(h, ids)
    if not attached:
        assert detach(h)[0]
    before = state_of_storage(h)
    outcome = h.cache.attach_storage_backend(backend, hicache_write_policy=write_policy)
    after = state_of_storage(h)
    changed = {name for name, value in after.items() if value != before[name]}
    if not attached:
        assert attach(h, where.root)[0]
    hit, gains, _ = yield from from_storage(h, ids, NEW)
    return outcome, changed, answer, hit, gains


# ---- reads that fail, or do not come back


@contextmanager
def reading(h: Harness, key: str, read: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """While it lasts, whoever reads this key from the backend gets what `read` makes of it.

    `read` is given the backend's own read; key "": of any key; "query": of a hit query.
    """
    backend = file_backend(h)
    name = "batch_exists_v2" if key == "query" else "get"
    original = getattr(backend, name)

    def replaced(asked: Any, *args: Any) -> Any:
        own = partial(original, asked, *args)
        return read(own) if key in ("query", "", asked) else own()

    setattr(backend, name, replaced)
    try:
        yield
    finally:
        delattr(backend, name)


def raises(_own: Callable[[], Any]) -> Any:
    """A read that raises."""
    raise OSError("no route to storage")


def gives_nothing(_own: Callable[[], Any]) -> Any:
    """A read of what is not there, although it was found a moment ago."""
    return None


def failing_read(h: Harness, page: int, pool: str, how: str) -> Steps:
    """Storage finds all of a prompt of three pages and then fails to read one file: Suffered.

    `how`: "raises", "gives nothing", or "deleted": the file goes between the query and the read.
    """
    ids = prompt_of(3)
    answer, where = yield from stored_anew(h, ids)

    deletions = iter([where.path(page, pool).unlink])

    def deleted(own: Callable[[], Any]) -> Any:
        next(deletions, lambda: None)()
        return own()

    read = {"raises": raises, "gives nothing": gives_nothing, "deleted": deleted}[how]
    yield from to_storage(h)
    dirty_rings(h)
    before = stored(h)
    # The writer, which reads back what is stored, comes once the file is there again.
    with reading(h, "" if how == "deleted" else where.key(page, pool), read):
        request = h.submit(ids, NEW)
        while not request.finished():
            yield
    (result,) = yield from h.finish(request)
    yield from settle_storage(h)
    first = result, {}, stored_since(h, before)
    yield from leak_free(h)
    again = yield from from_storage(h, ids, NEW)
    return suffered(h, answer, where, first, again)


def after_a_minute(h: Harness, ids: Sequence[int]) -> Steps:
    """The prompt from storage, when what was refused for a while is asked for again."""
    later = storage_guard.UNREADABLE_SECONDS + 1
    with patched(h.cache.truth_storage.refused, "_clock", lambda: time.monotonic() + later):
        hit = yield from from_storage(h, ids, NEW)
    return hit


def failing_query(h: Harness) -> Steps:
    """Storage cannot even be asked: Suffered."""
    ids = prompt_of(2)
    answer, where = yield from stored_anew(h, ids)
    yield from to_storage(h)
    dirty_rings(h)
    before = stored(h)
    with (
        reading(h, "query", raises),
        patched(h.cache, "write_backup_storage", lambda node_id: None),
    ):
        result = yield from h.generate(ids, NEW)
        yield from settle_storage(h)
    first = result, {}, stored_since(h, before)
    yield from leak_free(h)
    again = yield from from_storage(h, ids, NEW)
    return suffered(h, answer, where, first, again)


class Gate:
    """A read that hangs until it is opened."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, own: Callable[[], Any]) -> Any:
        self.reached.set()
        self._opened.wait(60)
        return own()

    def open(self, after: float = 0) -> None:
        """Let everybody through, now or in a while."""
        threading.Timer(after, self._opened.set).start()


def scribble_over_free_pages(h: Harness, rows: Any) -> int:
    """Other bytes in those of these host pages that nobody holds, as their next owner would put there;
    how many they are, with those that the tree has taken for other pages meanwhile."""
    anchor = h.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    free = {*anchor.free_slots.tolist(), *(i for r in anchor.release_slots for i in r.tolist())}
    mine = [row // PAGE for row in rows[::PAGE].tolist() if row in free]
    for pool in h.cache.truth_storage.kv.names:
        for buffer in h.cache.host_pool_group.get_pool(pool).kv_buffer:
            buffer[mine] = 7
    nodes = h.cache.tree_core._collect_all_nodes()
    hosts = [node.component_data[0].host_value for node in nodes if node.parent is not None]
    taken = {row for host in hosts if host is not None for row in host.tolist()}
    return len(mine) + sum(row in taken for row in rows[::PAGE].tolist())


def hanging_read(h: Harness, pool: str, policy: str, abort: bool) -> Steps:
    """A read of a prompt's last page hangs; meanwhile another prompt is answered, and this one too or it
    is aborted, as the policy has it; then the read comes back.

    Returns (Suffered, without its first result if aborted; whether the prompt was answered while the
    read hung; host pages that had another owner when it came back; the other prompt's result and cold
    run).
    """
    ids, other = prompt_of(3), prompt(4100, 300)
    root = file_backend(h).file_path
    yield from to_storage(h)
    attach_instead(h, root, policy, prefetch_timeout_base=60)
    assert h.cache.clear_storage_backend()
    other_cold = yield from populate(h, other, NEW)
    answer, where = yield from stored_anew(h, ids)
    gate, store = Gate(), h.cache.store
    dirty_rings(h)
    before = stored(h)
    with reading(h, "query" if pool == "query" else where.key(2, pool), gate):
        request = h.submit(ids, NEW)
        while not gate.reached.is_set():
            if policy == "best_effort":
                # A scheduling round would admit the request with nothing.
                h.cache.check_hicache_events()
                time.sleep(0.001)
            else:
                yield
        handle = request.cache_request_handle
        operation = h.cache.ongoing_prefetch[handle].operation
        rows = operation.host_indices
        while pool in POOLS and operation.completed_tokens < len(operation.hash_value) * PAGE:
            # SGLang gives back at once only the pages that it knows to have been read.
            h.cache.check_hicache_events()
            time.sleep(0.001)
        if policy == "timeout":
            # On a busy machine a short time would be over before the read begins.
            while handle not in h.cache._storage_prefetch_wait:
                yield
            h.cache._storage_prefetch_wait[handle].timeout_s = 0.1
        if pool != "query":
            beside = yield from h.generate(other, NEW)
        if abort:
            h.abort(request)
            while h.scheduler.waiting_queue:
                yield
        answered = yield from _within(30 if policy != "wait_complete" else 0.5, request.finished)
        for _ in range(3):
            yield
        scribbled = 0 if rows is None else scribble_over_free_pages(h, rows)
        gate.open()
        if not abort:
            (result,) = yield from h.finish(request)
    if pool == "query":
        beside = yield from h.generate(other, NEW)
    yield from settle_storage(h)
    yield from _within(20, lambda: store.in_use() == len(store))
    first = None if abort else result, {}, stored_since(h, before)
    yield from leak_free(h)
    attach_instead(h, root)
    again = yield from from_storage(h, ids, NEW)
    of_prompt = suffered(h, answer, where, first, again)
    return of_prompt, answered and not abort, scribbled, beside, other_cold


def flush_while_reading(h: Harness) -> Steps:
    """A read hangs and is given up; the server is asked to flush meanwhile, and after it has returned:
    (cold answer, the answer without it, what the flushes said)."""
    ids, root = prompt_of(3), file_backend(h).file_path
    yield from to_storage(h)
    attach_instead(h, root, "timeout", prefetch_timeout_base=60)
    answer, where = yield from stored_anew(h, ids)
    gate, store = Gate(), h.cache.store
    with reading(h, where.key(2, WINDOW_POOL), gate), patched(storage, "HANGS_SECONDS", 0.2):
        try:
            request = h.submit(ids, NEW)
            handle = request.cache_request_handle
            while not (gate.reached.is_set() and handle in h.cache._storage_prefetch_wait):
                yield
            h.cache._storage_prefetch_wait[handle].timeout_s = 0.1
            (result,) = yield from h.finish(request)
            idle = yield from _within(20, h.scheduler.is_fully_idle)
            assert idle, "the flush would be refused anyway"
            flushed = [h.scheduler.flush_cache(empty_cache=False)]
        finally:
            gate.open()
    yield from settle_storage(h)
    yield from _within(20, lambda: store.in_use() == len(store))
    flushed.append(h.scheduler.flush_cache(empty_cache=False))
    yield from leak_free(h)
    attach_instead(h, root)
    return answer, result, flushed


def _within(seconds: float, done: Callable[[], bool]) -> Steps:
    """Step until it is done or the time is over; whether it is done."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        yield
    return done()


def detached_while_reading(h: Harness, pool: str, abort: bool) -> Steps:
    """Storage is detached while a page of a prefetch is read, attached again, and used.

    SGLang refuses while a request waits. What happens at the end of the process, and to a read whose
    request was aborted, is a detach all the same. Returns (SGLang's refusal, the detach, slots and
    host pages that are nobody's after it, Suffered without its first result if aborted).
    """
    ids = prompt_of(3)
    answer, where = yield from stored_anew(h, ids)
    gate, store = Gate(), h.cache.store
    dirty_rings(h)
    before = stored(h)
    with reading(h, where.key(2, pool), gate):
        request = h.submit(ids, NEW)
        while not gate.reached.is_set():
            yield
        refused = detach(h)
        if abort:
            h.abort(request)
            while h.scheduler.waiting_queue:
                yield
        gate.open(after=0.3)
        done = detach(h) if abort else h.cache.detach_storage_backend()
    h.scheduler.enable_hicache_storage = False
    result = None
    if not abort:
        (result,) = yield from h.finish(request)
    yield from h.settle()
    anchor = h.cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    cached = sum(len(copies.host) for _, copies in h.cache.copies.items() if copies.host)
    left = store.in_use() - len(store), (anchor.size - anchor.available_size()) // PAGE - cached
    assert attach(h, where.root)[0]
    first = result, {}, stored_since(h, before)
    yield from leak_free(h)
    again = yield from from_storage(h, ids, NEW)
    return refused, done, left, suffered(h, answer, where, first, again)


# ---- a directory that takes nothing


@dataclass(frozen=True)
class Lost:
    """What happened with a directory that took nothing: the cold answer; (result, storage gains) of the
    two requests meanwhile, and of the two when it takes files again; what was written meanwhile,
    whether this process believes any page of the prompt to be there, and parts of files."""

    cold: Result
    meanwhile: Sequence[tuple[Result, dict[str, int]]]
    afterwards: Sequence[tuple[Result, dict[str, int]]]
    files: Sequence[str]
    believed: bool
    leftovers: Sequence[str] = ()


def _requests(h: Harness, ids: Sequence[int]) -> Steps:
    results = []
    for _ in range(2):
        yield from to_storage(h)
        dirty_rings(h)
        before = stored(h)
        result = yield from h.generate(ids, NEW)
        yield from settle_storage(h)
        results.append((result, stored_since(h, before)))
    return results


def lost_directory(h: Harness, how: str) -> Steps:
    """The directory is gone, or a file, or one of the kernel's that takes no files; then it is back."""
    ids = prompt_of(3)
    answer, where = yield from stored_anew(h, ids)
    assert h.cache.clear_storage_backend()
    if how == "takes no files":
        attach_instead(h, "/sys")
    else:
        shutil.rmtree(where.root)
        if how == "is a file":
            where.root.write_bytes(b"")
    meanwhile = yield from _requests(h, ids)
    files = Stored.of(h, ids).files()
    known = h.cache.truth_storage.stored
    believed = any(known.digest(page_hash) is not None for page_hash in where.hashes)
    yield from to_storage(h)
    if how == "takes no files":
        attach_instead(h, where.root)
    else:
        if how == "is a file":
            where.root.unlink()
        os.makedirs(where.root)
    afterwards = yield from _requests(h, ids)
    yield from leak_free(h)
    return Lost(answer, meanwhile, afterwards, [path.name for path in files], believed)


def full_disk(h: Harness, root: str | Path, limit: int) -> Steps:
    """No file can grow beyond so many bytes: the kernel's answer to the write, as on a full disk."""
    ids = prompt_of(3)
    back = file_backend(h).file_path
    yield from move_to(h, root)
    answer, where = yield from stored_anew(h, ids)
    assert h.cache.clear_storage_backend()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        meanwhile = yield from _requests(h, ids)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    files = [path.name for path in where.files()]
    known = h.cache.truth_storage.stored
    believed = any(known.digest(page_hash) is not None for page_hash in where.hashes)
    leftovers = [path.name for path in where.root.glob(".*")]
    afterwards = yield from _requests(h, ids)
    yield from leak_free(h)
    yield from move_to(h, back)
    return Lost(answer, meanwhile, afterwards, files, believed, leftovers)


# ---- other processes


def dies_writing(h: Harness, ids: Sequence[int], where: str) -> Steps:
    """Cold, with a backup thread that stops in the middle of a write for ever, so that this process can
    be killed there: the answer. `where`: in a page of "KV", before its "record", or "between" the files
    of that record; of the prompt's second page."""
    yield from to_storage(h)
    backend, stored_at = file_backend(h), Stored.of(h, ids)
    pool = {"KV": C4, "record": C4_POOL, "between": WINDOW_POOL}[where]
    original, held = backend.set, threading.Event()

    def set_(key: str, value: Any = None, *args: Any) -> bool:
        if key == stored_at.key(1, pool):
            data = value.contiguous().numpy().tobytes()
            (stored_at.root / ".half.tmp").write_bytes(data[: len(data) // 2])
            held.set()
            threading.Event().wait()
        return original(key, value, *args)

    backend.set = set_
    answer = yield from h.generate(ids, NEW)
    while not held.is_set():
        yield
    return answer


def written_together(h: Harness, prompts: Sequence[Sequence[int]], meeting: Path) -> Steps:
    """Prompts computed, without asking storage, and written, each file at the moment at which another
    process writes it: (results, storage gains). They meet in a directory."""
    yield from to_storage(h)
    backend = file_backend(h)
    original = backend.set

    def set_(key: str, value: Any = None, *args: Any) -> bool:
        (meeting / f"{key}.{os.getpid()}").touch()
        deadline = time.monotonic() + 10
        while len(list(meeting.glob(f"{key}.[0-9]*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.0005)
        return original(key, value, *args)

    before, results = stored(h), []
    with (
        patched(h.cache, "prefetch_from_storage", lambda *_args, **_options: None),
        patched(backend, "set", set_),
    ):
        for ids in prompts:
            results.append((yield from h.generate(ids, NEW)))
            yield from settle_storage(h)
    gains = stored_since(h, before)
    yield from leak_free(h)
    return results, gains


def answer_of(h: Harness, ids: Sequence[int]) -> Steps:
    """With empty L1 and L2, and all that is written in storage: the Result. In any arm."""
    yield from settle_storage(h)
    yield from h.flush()
    result = yield from h.generate(ids, NEW)
    yield from settle_storage(h)
    return result


def deepest_stored(h: Harness, ids: Sequence[int]) -> int:
    """Pages before the deepest whole boundary of a prompt in the directory that is attached."""
    return Stored.of(h, ids).deepest()


# ---- SGLang's own failure injector


def at_random(h: Harness, seed: int, requests: int) -> Steps:
    """Requests of a few prompts, some at once, from whatever tier, while storage fails at random.

    Returns (wrong answers, tokens that came from storage, storage gains).
    """
    rng = random.Random(seed)
    stem = prompt(4200, PAGE)
    prompts = [[*stem, *prompt(4201 + i, length)] for i, length in enumerate((30, 50, 270, 290))]
    colds = []
    with patched(h.cache, "write_backup_storage", lambda node_id: None):
        for ids in prompts:
            colds.append((yield from cold(h, ids, 1)))
    before, wrong, from_l3 = stored(h), [], 0
    while requests > 0:
        picked = [rng.randrange(len(prompts)) for _ in range(rng.randint(1, 4))]
        requests -= len(picked)
        dirty_rings(h)
        results = yield from h.finish(*(h.submit(prompts[i], 1) for i in picked))
        wrong += [r for i, r in zip(picked, results, strict=True) if not r.same_answer(colds[i])]
        from_l3 += sum(result.storage for result in results)
        yield from rng.choice((to_storage, to_storage, to_host, settle_storage))(h)
        if rng.random() < 0.3:
            h.cache.truth_storage.refused.clear()
    gains = stored_since(h, before)
    yield from leak_free(h)
    return wrong, from_l3, gains


# ---- controls


def unverified(h: Harness, name: str, how: str, checked: bool) -> Steps:
    """A fault of FAULTS with the verification broken: (cold answer, hit, its counter gains).

    `how`: "record" and "kv" believe the record's bytes, or that the KV is its own. `checked`: whether
    the debug checks run.
    """
    fault = FAULTS[name]
    ids = prompt_of(fault.pages)
    answer, where = yield from stored_anew(h, ids)
    fault.damage(where)
    runtime = h.runtime
    lies = {"record": ("check", _believing), "kv": ("first_doubtful", lambda *_args: None)}
    with (
        patched(storage_guard, *lies[how]),
        patched(runtime, "_checks", runtime._checks if checked else None),
    ):
        hit, gains, _ = yield from from_storage(h, ids, NEW)
    return answer, hit, gains


def _believing(records: Any, layout: Any, *, boundary: int, **_rest: Any) -> record.Seal:
    """Stands for `record.check`: whatever the record says is taken as it is."""
    marks = record._marks(records[WINDOW_POOL], layout)[: boundary // PAGE]
    marks = tuple(mark.tobytes() for mark in marks)
    return record.Seal(boundary, marks[-1], marks)
