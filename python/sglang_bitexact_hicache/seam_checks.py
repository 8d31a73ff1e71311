"""The seam table, compared with SGLang.

A missing hook would mean wrong answers, so each seam is compared twice:

* with SGLang's SOURCE (`source_problem`): does the target exist, with the parameters that our handler
  relies on? Reads files and imports nothing of SGLang, so that the launcher can do it before anything
  else happens.
* with what is LIVE in this process (`live_problem`), once the seams are put in place (attach.py).

A problem found in a server is a ValueError that names the seam and the SGLang version.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang_bitexact_hicache import attach, release, seam_table
from sglang_bitexact_hicache.seam import PACKAGE, Kind, Seam, When

# ---- against the installed source


def source_problem(seam: Seam, package: Path | None = None) -> str | None:
    """How SGLang's source differs from what the seam expects, or None. Imports nothing of it.

    Args:
        seam: a row of the table.
        package: the folder of the `sglang` package; None: the one that is installed.
    """
    found = source_of(seam.target, package)
    function = None if found is None else function_in(_read(found[0]), found[1])
    if function is None:
        return "missing: SGLang has no such function"
    args = function.args
    names = tuple(
        arg.arg
        for arg in (
            *args.posonlyargs,
            *args.args,
            *filter(None, (args.vararg,)),
            *args.kwonlyargs,
            *filter(None, (args.kwarg,)),
        )
    )
    if names != seam.parameters:
        return f"signature: ({', '.join(names)}) and not ({', '.join(seam.parameters)})"
    return None


def source_of(target: str, package: Path | None = None) -> tuple[Path, str] | None:
    """The file of a target's module and its qualified name there; None where there is no such file.

    Args:
        target: dotted name of a function.
        package: as in `source_problem`.
    """
    name, *parts = target.split(".")
    if package is None:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return None
        package = Path(next(iter(spec.submodule_search_locations)))
    folder = package
    for i, part in enumerate(parts, start=1):
        source = folder / f"{part}.py"
        if source.is_file():
            return source, ".".join(parts[i:])
        folder = folder / part
    return None


def _read(source: Path) -> str:
    return source.read_text(encoding="utf-8")


@lru_cache(maxsize=32)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def function_in(text: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of this qualified name ("Class.method") in a module's source, or None."""
    return _find_in(_parse(text), name.split(".")) if name else None


def _find_in(scope: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in ast.iter_child_nodes(scope):
        if getattr(node, "name", None) != names[0]:
            continue
        if len(names) == 1 and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node
        if isinstance(node, ast.ClassDef) and names[1:]:
            return _find_in(node, names[1:])
    return None


# ---- in this process


def live_problem(seam: Seam) -> str | None:
    """Why the seam is not in place in this process, or None."""
    try:
        handler = seam.load()
    except (ImportError, AttributeError) as error:
        return f"no handler: {error}"
    if seam.kind is Kind.CALL:
        return None
    if seam.kind is Kind.SUBCLASS:
        return _override_problem(seam, handler)
    return None if attach.is_live(seam) else "not in place in this process"


def _override_problem(seam: Seam, handler: Callable[..., Any]) -> str | None:
    owner = importlib.import_module(f"{PACKAGE}.{seam.handler.partition(':')[0]}")
    ours = getattr(owner, seam.handler.partition(":")[2].split(".")[0])
    try:
        stock = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError):
        return "not in place: the stock method cannot be imported"
    overridden = [
        vars(base)[seam.attribute] for base in ours.__mro__ if seam.attribute in vars(base)
    ]
    if overridden[0] is not handler or stock not in overridden[1:]:
        return "not in place: our class does not override the stock method"
    return None


# ---- the verdicts


def require_source(seams: Iterable[Seam] | None = None) -> None:
    """Refuses an SGLang that is not the one the table was written for.

    Raises:
        ValueError: the version is another one, or a seam's target is missing or has changed; one
            line for each.
    """
    version = release.version_problem()
    problems = [version] if version else []
    problems += _lines(seam_table.SEAMS if seams is None else seams, source_problem)
    _require(problems)


def require_live(*when: When, seams: Iterable[Seam] | None = None) -> None:
    """Refuses to go on where a seam of these phases is not in place in this process.

    Raises:
        ValueError: one line for each such seam.
    """
    table = seam_table.SEAMS if seams is None else seams
    _require(_lines((seam for seam in table if seam.when in when), live_problem))


def _lines(seams: Iterable[Seam], problem_of: Callable[[Seam], str | None]) -> list[str]:
    return [
        f"{seam.target} ({seam.kind.value}): {problem}"
        for seam in seams
        if (problem := problem_of(seam)) is not None
    ]


def _require(problems: list[str]) -> None:
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(
            f"bit-exact HiCache does not fit this SGLang ({release.sglang_version()}); unset "
            f"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE to start without it:{lines}"
        )
