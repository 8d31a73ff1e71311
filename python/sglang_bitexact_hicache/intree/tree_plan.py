"""What a tree is to become: the seam table as edits, and the new files; compared with what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from libcst import ParserSyntaxError

from sglang_bitexact_hicache import release, seam_checks, seam_table
from sglang_bitexact_hicache.intree.changes import Changes
from sglang_bitexact_hicache.intree.checkout import PACKAGE_FOLDER, Checkout
from sglang_bitexact_hicache.intree.digests import DIGESTS
from sglang_bitexact_hicache.intree.errors import IntreeError
from sglang_bitexact_hicache.intree.fields import argument_fields, environment_fields
from sglang_bitexact_hicache.intree.landing import INTREE_PACKAGE
from sglang_bitexact_hicache.intree.source_edits import FileEdits, Misfit, digest, edited, plain
from sglang_bitexact_hicache.seam import ATTACHED, Seam, When

SEAM_POINT = f"{INTREE_PACKAGE}.seam_point"
ENVIRON = f"{PACKAGE_FOLDER}/srt/environ.py"
MEMORY_FIELDS = f"{PACKAGE_FOLDER}/srt/arg_groups/fields/memory.py"


@dataclass(frozen=True)
class TreePlan:
    """A tree, without and with the feature.

    Attributes:
        stock: by path, each file that is edited, without the feature; None: a file that is new.
        built: the same files with it.
        found: the same files as they are.
        seams: how many seams became a decorator.
    """

    stock: Mapping[str, str | None]
    built: Mapping[str, str]
    found: Mapping[str, str | None]
    seams: int

    def apply(self) -> Changes:
        """What is left to do."""
        return {
            path: (self.found[path], text)
            for path, text in self.built.items()
            if self.found[path] != text
        }

    def revert(self) -> Changes:
        """What is to be taken out."""
        return {
            path: (self.found[path], text)
            for path, text in self.stock.items()
            if self.found[path] != text
        }

    def lines_added(self) -> dict[str, int]:
        """How many lines each file of SGLang gets; none is changed or removed."""
        return {
            path: len(self.built[path].splitlines()) - len(text.splitlines())
            for path, text in self.stock.items()
            if text is not None
        }


def attached_seams() -> list[Seam]:
    """The seams that become decorators, in the table's order."""
    return [s for s in seam_table.SEAMS if s.kind in ATTACHED and s.when is not When.ALWAYS]


def plan(
    checkout: Checkout,
    new_files: Mapping[str, str],
    *,
    wanted: Callable[[Seam], bool] = lambda seam: True,
) -> TreePlan:
    """The plan for a tree.

    Args:
        checkout: the tree.
        new_files: what it gets beside the edits (landing.landing).
        wanted: which of the attached seams become decorators; all.

    Raises:
        IntreeError: a seam is missing, has other parameters or was edited; a file that is to be new is
            there with another text. One line for each.
    """
    problems = _seam_problems(checkout)
    if problems:
        raise IntreeError("\n".join(problems))
    seams = [seam for seam in attached_seams() if wanted(seam)]
    edits, every = _edits(checkout, seams), _edits(checkout, attached_seams())
    found: dict[str, str | None] = {}
    stock: dict[str, str | None] = {}
    built: dict[str, str] = {}
    for path, file_edits in edits.items():
        text = checkout.read(path)
        if text is None:
            problems.append(f"{path}: missing")
            continue
        found[path] = text
        try:
            # A seam that is not wanted any more goes too.
            without = plain(text, every[path])
            stock[path], built[path] = without, edited(without, file_edits)
        except (Misfit, ParserSyntaxError) as error:
            problems.append(f"{path}: {error}")
    for path, text in new_files.items():
        found[path], stock[path], built[path] = checkout.read(path), None, text
        if found[path] not in (None, text):
            problems.append(f"{path}: there already, with another text")
    if problems:
        raise IntreeError("\n".join(problems))
    return TreePlan(stock, built, found, len(seams))


def _edits(checkout: Checkout, seams: list[Seam]) -> dict[str, FileEdits]:
    functions: dict[str, list[str]] = {}
    for seam in seams:
        path, name = _place(checkout, seam)
        functions.setdefault(path, []).append(name)
    edits = {p: FileEdits(tuple(names), SEAM_POINT) for p, names in functions.items()}
    edits[ENVIRON] = FileEdits(fields=environment_fields())
    edits[MEMORY_FIELDS] = FileEdits(fields=argument_fields())
    return edits


def _place(checkout: Checkout, seam: Seam) -> tuple[str, str]:
    source = seam_checks.source_of(seam.target, checkout.root / PACKAGE_FOLDER)
    assert source is not None, "the seams were checked"
    return source[0].relative_to(checkout.root).as_posix(), source[1]


def _seam_problems(checkout: Checkout) -> list[str]:
    """A line for each seam that the tree has not as the table has it."""
    problems = []
    package = checkout.root / PACKAGE_FOLDER
    same_release = checkout.version in (None, release.SGLANG_VERSION)
    # Those of the arguments are of the plugin's form alone.
    for seam in (seam for seam in seam_table.SEAMS if seam.when is not When.ALWAYS):
        try:
            problem = seam_checks.source_problem(seam, package)
        except SyntaxError as error:
            path, _ = _place(checkout, seam)
            problems.append(f"{path}:{error.lineno}: this is not Python: {error.msg}")
            continue
        if problem is not None:
            problems.append(f"{seam.target}: {problem}")
        elif same_release:
            path, name = _place(checkout, seam)
            text = checkout.read(path) or ""
            if digest(text, name) != DIGESTS[seam.target]:
                node = seam_checks.function_in(text, name)
                line = 0 if node is None else node.lineno
                problems.append(
                    f"{path}:{line}: {name} is not that of SGLang {release.SGLANG_VERSION}"
                )
    # A file is named once for all its seams.
    return list(dict.fromkeys(problems))
