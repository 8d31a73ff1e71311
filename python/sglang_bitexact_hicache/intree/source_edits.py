"""What is added to a file of SGLang, and taken out again: decorators, their import, fields beside fields.

By syntax tree, every other byte as it was. Pure: text in, text out.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import libcst as cst

from sglang_bitexact_hicache.seam_checks import function_in

DECORATOR = "bitexact_seam"

Change = Callable[[cst.FunctionDef], cst.FunctionDef]


@dataclass(frozen=True)
class Fields:
    """Fields that a class body gets.

    Attributes:
        owner: the class's name.
        after: the sibling behind which they stand.
        names: what they are called, in order.
        source: their statements as one text, without indentation.
    """

    owner: str
    after: str
    names: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class FileEdits:
    """All that is added to one file.

    Attributes:
        functions: qualified names inside the module ("Class.method") that get the decorator.
        decorator_module: where the decorator is imported from.
        fields: or None.
    """

    functions: tuple[str, ...] = ()
    decorator_module: str = ""
    fields: Fields | None = None


class Misfit(Exception):
    """The file has not what the edits start from; the message says what."""


@lru_cache(maxsize=256)
def edited(text: str, edits: FileEdits) -> str:
    """The file with the edits. Its text must be without them (`plain`).

    Raises:
        Misfit: a function, the sibling of a field or a place for the import is missing.
    """
    module = cst.parse_module(text)
    body: list[cst.BaseStatement] = list(module.body)
    for name in edits.functions:
        _decorate(body, name.split("."))
    if edits.fields is not None:
        _add_fields(body, edits.fields)
    if edits.functions:
        _add_import(body, edits.decorator_module)
    return module.with_changes(body=body).code


@lru_cache(maxsize=256)
def plain(text: str, edits: FileEdits) -> str:
    """The file without these edits, wherever it has any of them; edits of others stay."""
    names = edits.fields.names if edits.fields is not None else ()
    if DECORATOR not in text and not any(name in text for name in names):
        return text
    module = cst.parse_module(text)
    body: list[cst.BaseStatement] = list(module.body)
    for name in edits.functions:
        _undecorate(body, name.split("."))
    if edits.fields is not None:
        _remove_fields(body, edits.fields)
    for i in reversed(range(len(body))):
        if _is_import(body[i], edits.decorator_module):
            _remove(body, i)
    return module.with_changes(body=body).code


def _decorate(body: list[cst.BaseStatement], path: list[str]) -> None:
    def add(function: cst.FunctionDef) -> cst.FunctionDef:
        ours = cst.Decorator(cst.Name(DECORATOR))
        found = list(function.decorators)
        # A handler sees the function as it is called; inside a descriptor there is a plain one.
        inner = any(_decorator_name(d) in ("classmethod", "staticmethod") for d in found)
        return function.with_changes(decorators=[*found, ours] if inner else [ours, *found])

    if not _change(body, path, add):
        raise Misfit(f"no function {'.'.join(path)}")


def _undecorate(body: list[cst.BaseStatement], path: list[str]) -> None:
    def remove(function: cst.FunctionDef) -> cst.FunctionDef:
        kept = [d for d in function.decorators if _decorator_name(d) != DECORATOR]
        return function.with_changes(decorators=kept)

    _change(body, path, remove)


def _decorator_name(decorator: cst.Decorator) -> str | None:
    return decorator.decorator.value if isinstance(decorator.decorator, cst.Name) else None


def _change(body: list[cst.BaseStatement], path: list[str], change: Change) -> bool:
    """Replaces the function at the path; whether there is one."""
    for i, statement in enumerate(body):
        if isinstance(statement, cst.ClassDef) and statement.name.value == path[0] and path[1:]:
            inner = list(statement.body.body)
            if _change(inner, path[1:], change):
                body[i] = statement.with_deep_changes(statement.body, body=inner)
                return True
        elif isinstance(statement, cst.FunctionDef) and [statement.name.value] == path:
            body[i] = change(statement)
            return True
    return False


def _fields_of(body: Sequence[cst.CSTNode], owner: str) -> tuple[int, cst.ClassDef]:
    for i, statement in enumerate(body):
        if isinstance(statement, cst.ClassDef) and statement.name.value == owner:
            return i, statement
    raise Misfit(f"no class {owner}")


def _field_name(statement: cst.CSTNode) -> str | None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    first = statement.body[0]
    target = (
        first.target
        if isinstance(first, cst.AnnAssign)
        else first.targets[0].target
        if isinstance(first, cst.Assign)
        else None
    )
    return target.value if isinstance(target, cst.Name) else None


def _add_fields(body: list[cst.BaseStatement], fields: Fields) -> None:
    at, owner = _fields_of(body, fields.owner)
    inner = list(owner.body.body)
    names = [_field_name(statement) for statement in inner]
    taken = [name for name in fields.names if name in names]
    if taken:
        raise Misfit(f"{fields.owner} has {', '.join(taken)} already")
    if fields.after not in names:
        raise Misfit(f"{fields.owner} has no {fields.after}")
    place = names.index(fields.after) + 1
    # The header's comment is the first statement's, so that it goes with it.
    parsed = cst.parse_module(fields.source)
    ours = list(parsed.body)
    ours[0] = ours[0].with_changes(leading_lines=[*parsed.header, *ours[0].leading_lines])
    inner[place:place] = ours
    body[at] = owner.with_deep_changes(owner.body, body=inner)


def _remove_fields(body: list[cst.BaseStatement], fields: Fields) -> None:
    at, owner = _fields_of(body, fields.owner)
    kept = [s for s in owner.body.body if _field_name(s) not in fields.names]
    body[at] = owner.with_deep_changes(owner.body, body=kept)


def _imported_from(statement: cst.CSTNode) -> str | None:
    """The module of a `from X import ...`, None for any other statement."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    first = statement.body[0]
    if not isinstance(first, cst.ImportFrom) or first.module is None or first.relative:
        return None
    return cst.Module([]).code_for_node(first.module)


def _is_import(statement: cst.CSTNode, module: str) -> bool:
    return bool(module) and _imported_from(statement) == module


def _remove(body: list[cst.BaseStatement], at: int) -> None:
    # What stood above the block of imports, stands above the next one again.
    above = body.pop(at).leading_lines
    if above:
        following = body[at]
        lines = [*above, *following.leading_lines]
        body[at] = following.with_changes(leading_lines=lines)


def _add_import(body: list[cst.BaseStatement], module: str) -> None:
    """Into the block of imports that has most of SGLang's, where isort would put it."""
    blocks: list[list[int]] = [[]]
    for i, statement in enumerate(body):
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], (cst.Import, cst.ImportFrom)
        ):
            if (_imported_from(statement) or "").startswith("sglang."):
                blocks[-1].append(i)
        elif blocks[-1]:
            blocks.append([])
    block = max(blocks, key=len)
    if not block:
        raise Misfit("no import of SGLang's, beside which the decorator's would stand")
    line = cst.parse_module(f"from {module} import {DECORATOR}\n").body[0]
    for i in block:
        if (_imported_from(body[i]) or "").lower() > module.lower():
            if i == block[0]:
                # The blank lines and comments above the block stay above it.
                first = body[i]
                line = line.with_changes(leading_lines=first.leading_lines)
                body[i] = first.with_changes(leading_lines=[])
            body.insert(i, line)
            return
    body.insert(block[-1] + 1, line)


# ---- what a function was


def digest(text: str, function: str) -> str | None:
    """A digest of a function's source, decorators included, without blanks at the ends of lines;
    None where there is no such function.

    Args:
        text: the module's source.
        function: its qualified name there.
    """
    node = function_in(text, function)
    if node is None:
        return None
    lines = dict(enumerate(text.splitlines(), start=1))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    # With the decorator of ours it is the same function.
    ours = {d.lineno for d in node.decorator_list if isinstance(d, ast.Name) and d.id == DECORATOR}
    numbers = [n for n in range(first, (node.end_lineno or first) + 1) if n not in ours]
    source = "\n".join(lines[n].rstrip() for n in numbers)
    return hashlib.sha256(source.encode()).hexdigest()[:16]
