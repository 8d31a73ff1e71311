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
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang_bitexact_hicache import attach, seam_table
from sglang_bitexact_hicache.seam import PACKAGE, Kind, Seam, When


def sglang_version() -> str:
    """The installed SGLang's version, without a local suffix ("0.5.23+rocm" is "0.5.23").

    Raises:
        ValueError: SGLang is not installed.
    """
    try:
        return importlib.metadata.version("sglang").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise ValueError("SGLang is not installed") from None


def version_problem() -> str | None:
    """What is wrong with the installed SGLang's version, or None."""
    found = sglang_version()
    if found == seam_table.SGLANG_VERSION:
        return None
    return f"SGLang {seam_table.SGLANG_VERSION} is needed, {found} is installed"


# ---- against the installed source


def source_problem(seam: Seam) -> str | None:
    """How SGLang's source differs from what the seam expects, or None. Imports nothing of it."""
    function = _find_function(seam.target)
    if function is None:
        return "missing: SGLang has no such function"
    args = function.args
    found = tuple(
        arg.arg
        for arg in (
            *args.posonlyargs,
            *args.args,
            *filter(None, (args.vararg,)),
            *args.kwonlyargs,
            *filter(None, (args.kwarg,)),
        )
    )
    if found != seam.parameters:
        return f"signature: ({', '.join(found)}) and not ({', '.join(seam.parameters)})"
    return None


def _find_function(target: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    parts = target.split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    for i, part in enumerate(parts[1:], start=2):
        source = folder / f"{part}.py"
        if source.is_file():
            return _find_in(_parse(source), parts[i:])
        folder = folder / part
    return None


@lru_cache(maxsize=32)
def _parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"))


def _find_in(scope: ast.AST, names: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    if not names:
        return None
    for node in ast.iter_child_nodes(scope):
        if getattr(node, "name", None) != names[0]:
            continue
        if len(names) == 1 and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return node
        if isinstance(node, ast.ClassDef):
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
    return None if attach.is_live(seam) else "not in place: SGLang did not apply the hook"


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
    version = version_problem()
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
            f"bit-exact HiCache does not fit this SGLang ({sglang_version()}); unset "
            f"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE to start without it:{lines}"
        )
