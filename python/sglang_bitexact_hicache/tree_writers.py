"""Startup check: stock writes the rows of tree nodes only where components.py looks.

Identity follows a node's device rows (`FULL.value`) and host rows (`FULL.host_value`). A place in
SGLang that writes them and that no hook of ours sees would give a page the identity of other bytes,
silently. So the installed source is parsed and every assignment to an attribute `value` or
`host_value` in the modules that build the tree must be one of `WRITERS`, and as many.

The table holds all such writers in these modules, those of other components and of the root too:
from the syntax alone one cannot tell whose `ComponentData` is written.

Reads source files; imports of sglang only to find them. Any thread, once, at startup.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TREE = "sglang.srt.mem_cache.unified_cache.unified_tree_core"
_FULL = "sglang.srt.mem_cache.unified_cache.components.full"
_SWA = "sglang.srt.mem_cache.unified_cache.components.swa"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache"

SCANNED = (
    _CACHE,
    "sglang.srt.mem_cache.unified_cache",
    "sglang.srt.mem_cache.buffer_mode",
)
"""Modules and packages (with everything below) in which every writer must be known."""

NOT_SCANNED = ("sglang.srt.mem_cache.unified_cache.components.mamba",)
"""The component that BxCache refuses."""

_ATTRIBUTES = ("value", "host_value")


class Writer(NamedTuple):
    """A function of SGLang that assigns an attribute `value` or `host_value`."""

    module: str
    function: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function} (.{self.attribute})"


class Known(NamedTuple):
    """How often a known writer assigns, and what follows it."""

    times: int
    followed_by: str


_NOT_FULL = "not FULL's rows"

WRITERS: Mapping[Writer, Known] = {
    # FULL on the device
    Writer(_TREE, "UnifiedTreeCore.reset", "value"): Known(1, "root: carries no identity"),
    Writer(_TREE, "UnifiedTreeCore._add_new_node", "value"): Known(
        1, "BxFull.commit_insert_component_data"
    ),
    Writer(_TREE, "UnifiedTreeCore._unevict_node_on_insert", "value"): Known(
        1, "BxSWA.recover_after_unevict"
    ),
    Writer(_TREE, "UnifiedTreeCore._cascade_evict", "value"): Known(2, "BxFull.evict_component"),
    Writer(_FULL, "FullComponent.redistribute_on_node_split", "value"): Known(
        2, "BxFull.redistribute_on_node_split"
    ),
    Writer(_FULL, "FullComponent.commit_hicache_transfer", "value"): Known(
        1, "BxFull.commit_hicache_transfer"
    ),
    Writer(_SWA, "SWAComponent._recover_from_incoming", "value"): Known(
        1, "unreachable: BxSWA.update_component_on_insert_overlap keeps the tree's rows"
    ),
    # FULL on the host
    Writer(_TREE, "UnifiedTreeCore.insert_host", "host_value"): Known(2, "BxTreeCore.insert_host"),
    Writer(_FULL, "FullComponent.redistribute_on_node_split", "host_value"): Known(
        2, "BxFull.redistribute_on_node_split"
    ),
    Writer(_FULL, "FullComponent.evict_component", "host_value"): Known(
        1, "BxFull.evict_component"
    ),
    Writer(_FULL, "FullComponent.commit_hicache_transfer", "host_value"): Known(
        1, "BxFull.commit_hicache_transfer"
    ),
    # SWA's own rows: all zeros in a ring, and no identity
    Writer(_SWA, "SWAComponent.redistribute_on_node_split", "value"): Known(3, _NOT_FULL),
    Writer(_SWA, "SWAComponent.redistribute_on_node_split", "host_value"): Known(2, _NOT_FULL),
    Writer(_SWA, "SWAComponent.evict_component", "value"): Known(1, _NOT_FULL),
    Writer(_SWA, "SWAComponent.evict_component", "host_value"): Known(1, _NOT_FULL),
    Writer(_SWA, "SWAComponent.commit_hicache_transfer", "host_value"): Known(1, _NOT_FULL),
    Writer(_SWA, "SWAComponent._attach_swa_host_value", "host_value"): Known(1, _NOT_FULL),
    # asserts that its component is not FULL
    Writer(_TREE, "UnifiedTreeCore.set_component_device_value", "value"): Known(1, _NOT_FULL),
    # attributes of the same name on the walk's state and on InsertParams
    Writer(_TREE, "UnifiedTreeCore._finish_insert_walk_node", "value"): Known(1, _NOT_FULL),
    Writer(_CACHE, "UnifiedRadixCache.checkpoint_into_tree", "value"): Known(1, _NOT_FULL),
}


def check_tree_writers(expected: Mapping[Writer, Known] = WRITERS) -> None:
    """Raise ValueError naming each place where the installed SGLang differs from `expected`."""
    found = find_writers()
    problems = []
    for writer, times in sorted(found.items()):
        known = expected.get(writer)
        if known is None:
            problems.append(f"{writer} writes tree rows and is not followed by any hook")
        elif known.times != times:
            problems.append(f"{writer} writes {times} times, expected {known.times}")
    problems += [
        f"{writer} does not write any more (it was followed by {known.followed_by})"
        for writer, known in sorted(expected.items())
        if writer not in found
    ]
    if problems:
        raise ValueError(
            "strict bit-exact HiCache cannot follow this SGLang's prefix cache: "
            + "; ".join(problems)
        )


def find_writers() -> Counter[Writer]:
    """Every assignment to an attribute `value` or `host_value` in `SCANNED`, counted."""
    found: Counter[Writer] = Counter()
    for name in SCANNED:
        for module, path in _sources(name):
            if module in NOT_SCANNED:
                continue
            found += writers_in_source(path.read_text(encoding="utf-8"), module)
    return found


def writers_in_source(source: str, module: str) -> Counter[Writer]:
    """The writers in one module's source text."""
    visitor = _Assignments(module)
    visitor.visit(ast.parse(source))
    return visitor.found


def _sources(name: str) -> list[tuple[str, Path]]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"strict bit-exact HiCache: SGLang's module {name} is not there")
    origin = Path(spec.origin)
    if not spec.submodule_search_locations:
        return [(name, origin)]
    sources = []
    for path in sorted(origin.parent.rglob("*.py")):
        parts = path.relative_to(origin.parent).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        sources.append((".".join((name, *parts)), path))
    return sources


class _Assignments(ast.NodeVisitor):
    """Collects stores to the attributes, with the qualified name of the function around them."""

    def __init__(self, module: str) -> None:
        self.found: Counter[Writer] = Counter()
        self._module = module
        self._scope: list[str] = []

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _ATTRIBUTES and isinstance(node.ctx, ast.Store | ast.Del):
            self._record(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # setattr(x, "value", ...) is the same store in other words.
        if isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            for argument in node.args[1:2]:
                if isinstance(argument, ast.Constant) and argument.value in _ATTRIBUTES:
                    self._record(argument.value)
        self.generic_visit(node)

    def _record(self, attribute: str) -> None:
        self.found[Writer(self._module, ".".join(self._scope), attribute)] += 1
