"""The feature as three cumulative patches: substrate, capture, reuse.

Each gives a tree that can be imported and is SGLang's own with the switch off. With it on, a tree without
the last one refuses at startup where the feature would engage (siblings/factory_incomplete.py).
"""

from __future__ import annotations

import ast
import enum
import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sglang_bitexact_hicache.intree.checkout import Checkout, environment_of_git
from sglang_bitexact_hicache.intree.errors import IntreeError
from sglang_bitexact_hicache.intree.landing import (
    INTREE_PACKAGE,
    PACKAGE_FOLDER,
    PAGE,
    TEST_FOLDER,
    incomplete_factory,
    landing,
)
from sglang_bitexact_hicache.intree.tree_plan import plan
from sglang_bitexact_hicache.seam import Seam


class Part(enum.IntEnum):
    """One patch of the series, in their order."""

    SUBSTRATE = 1
    CAPTURE = 2
    REUSE = 3


SUBJECTS = {
    Part.SUBSTRATE: "[HiCache] Bit-exact SWA reuse, substrate: DeepSeek-V4 on unified_kv",
    Part.CAPTURE: "[HiCache] Bit-exact SWA reuse, capture: DeepSeek-V4 on unified_kv",
    Part.REUSE: "[HiCache] Bit-exact SWA reuse, reuse: DeepSeek-V4 on unified_kv",
}

MESSAGES = {
    Part.SUBSTRATE: """\
The flag and the arguments, the gate that says where the feature runs, the rules that refuse a
configuration at startup, and what the bytes are made of: which positions a page boundary owns, the
layout of a record, host slots and who owns them, pinned host pools, identity of KV pages, the header
and the names of a record in storage.

A no-op with SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE off, which is the default: every decorated function is
the function itself. With it on, a server whose configuration the feature fits refuses to start, because
the part that restores is missing.
""",
    Part.CAPTURE: """\
At each completed page the sliding window's rows and the compressors' overlap states are gathered inside
the forward, before the layer overwrites its ring, and copied out on a lane of their own. Plain torch and
Triton. The points at the attention backend, the compressor and the workers are put in place; nothing
arms them yet.

A no-op with the flag off; with it on as before.
""",
    Part.REUSE: """\
The tree's copies of a page carry the identity of the computation that wrote it. A match ends at the
deepest page with an unbroken chain and truth; its window and states are restored into the request's ring
before its first forward. The truths follow their KV to storage and come back verified. Where the truth is
missing, the prompt is computed again; nothing stale or approximate is read.

A no-op with the flag off.
""",
}

PARTS: Mapping[Part, tuple[str, ...]] = {
    Part.SUBSTRATE: (
        *("__init__", "seam", "seam_table", "seam_checks", "seam_point", "attach", "release"),
        *("settings", "arguments", "options", "engagement", "refusals", "factory", "metrics"),
        *("constants", "geometry", "layout", "policy", "aligned", "sizing", "checksum"),
        *("slots", "lineage", "truth", "pinned", "staging", "transfer", "host_pool", "device_view"),
        *("record", "kv_chain", "refused", "stored_pages", "storage_names", "storage_kv"),
        *("storage_pool", "storage_backends", "storage_nixl"),
    ),
    Part.CAPTURE: (
        *("gather", "row_mover", "kernel_mover", "kernels", "pipeline", "capture", "rounds"),
    ),
    Part.REUSE: (
        *("planner", "restore", "checks", "runtime", "forward_hooks", "scheduling", "chunking"),
        *("components", "tree", "tree_writers", "gate", "healing", "abort", "ranks", "exporter"),
        *("storage", "storage_guard", "storage_hooks", "storage_writer"),
    ),
}
"""Which module comes with which patch. `factory` comes with the first and is another until the last."""

_CAPTURE_HANDLERS = "forward_hooks"
"""The points of these handlers come with the capture, though what they would call comes later."""


_ALWAYS = ("conftest", "attachment", "long_tests")


def part_of_module(module: str) -> Part:
    """KeyError: it is in none."""
    return {name: part for part, names in PARTS.items() for name in names}[module]


def part_of_seam(seam: Seam) -> Part:
    """The patch that puts the seam's decorator in place."""
    module = seam.handler.partition(":")[0]
    return Part.CAPTURE if module == _CAPTURE_HANDLERS else part_of_module(module)


def parts_of_tests(files: Mapping[str, str]) -> dict[str, Part]:
    """For each test file, the first patch with which it can run: that of the last module it imports, or
    that the files beside it import."""
    texts = {
        path.removeprefix(f"{TEST_FOLDER}/").removesuffix(".py"): text
        for path, text in files.items()
        if path.startswith(TEST_FOLDER)
    }
    direct, beside = {}, {}
    for name, text in texts.items():
        imported = _imports(text)
        direct[name] = max(
            (part_of_module(m) for m in imported & _modules()), default=Part.SUBSTRATE
        )
        beside[name] = {m.partition(".")[0] for m in imported} & set(texts)
    # What starts a server needs the whole.
    direct["scheduler_harness"] = Part.REUSE
    found: dict[str, Part] = {}
    for name in texts:
        reached, todo = {name}, [name]
        while todo:
            new = beside[todo.pop()] - reached
            reached |= new
            todo += new
        # Through the files beside it too, whatever of them is asked for.
        found[f"{TEST_FOLDER}/{name}.py"] = max(direct[other] for other in reached)
    # Loaded in every process of tests; what they import later, they import when they are asked.
    return {**found, **{f"{TEST_FOLDER}/{name}.py": Part.SUBSTRATE for name in _ALWAYS}}


def _modules() -> set[str]:
    return {name for names in PARTS.values() for name in names if name != "__init__"}


def _imports(text: str) -> set[str]:
    """Names of our modules, and of others by their full names, that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == INTREE_PACKAGE:
                found |= {alias.name for alias in node.names}
            elif node.module.startswith(f"{INTREE_PACKAGE}."):
                found.add(node.module.removeprefix(f"{INTREE_PACKAGE}.").partition(".")[0])
            else:
                found.add(node.module)
    return found


def stages(checkout: Checkout) -> dict[Part, dict[str, str]]:
    """The files of the tree, by path, after each patch; only those that the feature adds or edits.

    Raises:
        IntreeError: the checkout does not fit.
    """
    files = landing()
    tests = parts_of_tests(files)
    found = {}
    for part in Part:
        new = {path: text for path, text in files.items() if _part_of(path, tests) <= part}
        if part is not Part.REUSE:
            new[f"{PACKAGE_FOLDER}/factory.py"] = incomplete_factory()
        edited = plan(checkout, {}, wanted=functools.partial(_comes_with, part)).built
        found[part] = {**edited, **new}
    return found


def _comes_with(part: Part, seam: Seam) -> bool:
    return part_of_seam(seam) <= part


def _part_of(path: str, tests: Mapping[str, Part]) -> Part:
    if path == PAGE:
        return Part.REUSE
    return tests[path] if path in tests else part_of_module(Path(path).stem)


def write(checkout: Checkout, out: Path) -> list[Path]:
    """Writes the patches, as `git format-patch` does; their paths.

    Raises:
        IntreeError: the checkout does not fit, the folder cannot be written, or git is not there.
    """
    trees = stages(checkout)
    stock = {p: text for p, text in plan(checkout, {}).stock.items() if text is not None}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            repository = Path(scratch)
            _git(repository, "init", "-q")
            _commit(repository, stock, "base")
            for part, files in trees.items():
                _commit(repository, files, f"{SUBJECTS[part]}\n\n{MESSAGES[part]}")
            _git(
                *(repository, "format-patch", "-q", "--no-signature", "--zero-commit"),
                *("-o", str(out.resolve()), f"-{len(trees)}"),
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise IntreeError(f"no patches in {out}: {error}") from None
    return sorted(out.glob("000[1-3]-*.patch"))


def _commit(repository: Path, files: Mapping[str, str], message: str) -> None:
    for path, text in files.items():
        file = repository / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    _git(repository, "add", "-A", "-f")
    _git(repository, "commit", "-q", "-m", message)


def _git(repository: Path, *args: str) -> str:
    # Nobody's settings, and no name of a person; the date is that of the commit that one makes of it.
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in _WHO}
    nothing = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(
        ["git", "-C", str(repository), *args],
        capture_output=True,
        text=True,
        check=True,
        env={**environment_of_git(), **nothing, **who},
    ).stdout


_WHO = (
    ("NAME", "sglang-bitexact-hicache"),
    ("EMAIL", "noreply@example.invalid"),
    ("DATE", "2026-01-01T00:00:00Z"),
)
