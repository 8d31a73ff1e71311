"""The files that the tree gets: this package's modules, the tests, a page; as SGLang would have them.

A file's text is rewritten (names, the modules that the tree has in another form) and formatted with the
tools and settings of SGLang's pre-commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import black
import isort

from sglang_bitexact_hicache.intree.errors import IntreeError
from sglang_bitexact_hicache.seam import PACKAGE

OURS = Path(__file__).parents[1]
"""The folder of this package."""

PROJECT = OURS.parents[1]
"""The checkout of this project: where the tests are. Not there beside an installed package."""

INTREE_PACKAGE = "sglang.srt.mem_cache.bitexact_hicache"
PACKAGE_FOLDER = "python/" + INTREE_PACKAGE.replace(".", "/")
TEST_FOLDER = "test/srt/mem_cache"
PAGE = "docs/advanced_features/bitexact_hicache.md"

SIBLINGS = OURS / "intree" / "siblings"

PLUGIN_ONLY = {
    "__main__": "its one command is the plugin's",
    "plugin": "the entry point by which SGLang finds the plugin",
}
"""Modules that the tree does not get, and why. The sub-packages stay out too: `doctor` says whether a
plugin fits the SGLang beside it, `intree` is this."""

PLUGIN_TESTS = {
    "attachment": "its in-tree form is test/intree/attachment.py",
    "test_swa_attach": "SGLang's hook registry, the release that is installed, and doctor",
    "test_swa_compare": "a benchmark of this project",
    "test_swa_doctor": "doctor",
    "test_swa_doctor_metrics": "doctor",
    "test_swa_gpu_bench": "a benchmark of this project",
    "gpu_bench_on_cpu": "a benchmark of this project",
    "regression": "the plugin installed against not installed",
    "regression_caches": "the plugin installed against not installed",
    "regression_control": "the plugin installed against not installed",
    "regression_probe": "the plugin installed against not installed",
    "regression_servers": "the plugin installed against not installed",
    "regression_startup": "the plugin installed against not installed",
    "regression_trees": "the plugin installed against not installed",
    "regression_worlds": "the plugin installed against not installed",
    "test_swa_regression": "the plugin installed against not installed",
    "test_swa_docs": "pages of this project",
    "test_swa_long": "how this project's tests are run",
    "test_swa_soak": "a benchmark of this project",
    "intree_check": "this command",
    "intree_scratch": "this command",
    "test_swa_intree": "this command",
    "test_swa_kernels": "a benchmark of this project",
    "test_swa_l3_bench": "a benchmark of this project",
    "test_swa_off": "the plugin loaded against not loaded; in the tree: test_swa_seam_points",
    "test_swa_packaging": "the distributions of this project",
    "test_swa_pages": "pages of this project",
    "test_swa_reuse_bench": "a benchmark of this project",
}
"""Test files that the tree does not get, and why."""


def landing(project: Path = PROJECT) -> dict[str, str]:
    """Path in the tree, and text, of every file that is new there.

    Raises:
        IntreeError: the project's tests are not there.
    """
    if not (project / "test" / "intree").is_dir():
        raise IntreeError(
            f"the tests of this project are not in {project}: run this from a checkout of it"
        )
    files = dict(_modules())
    for name, path in sorted(test_sources(project).items()):
        files[f"{TEST_FOLDER}/{name}"] = rewritten(path.read_text(encoding="utf-8"))
    files[PAGE] = (project / "test" / "intree" / "page.md").read_text(encoding="utf-8")
    return files


def _modules() -> Iterator[tuple[str, str]]:
    modules = {path.name: path for path in OURS.glob("*.py") if path.stem not in PLUGIN_ONLY}
    # In the place of the module of the same name.
    modules |= {
        path.name: path
        for path in SIBLINGS.glob("*.py")
        if path.stem not in ("__init__", "factory_incomplete")
    }
    for name, path in sorted(modules.items()):
        yield f"{PACKAGE_FOLDER}/{name}", rewritten(path.read_text(encoding="utf-8"))


def incomplete_factory() -> str:
    """The text of factory.py in a tree that has not all parts yet."""
    return rewritten((SIBLINGS / "factory_incomplete.py").read_text(encoding="utf-8"))


def test_sources(project: Path = PROJECT) -> dict[str, Path]:
    """By name, the file of each test module that the tree gets."""
    found = {
        path.name: path
        for path in (project / TEST_FOLDER).glob("*.py")
        if path.stem not in PLUGIN_TESTS
    }
    return found | {path.name: path for path in (project / "test" / "intree").glob("*.py")}


@lru_cache(maxsize=512)
def rewritten(text: str) -> str:
    """A Python file of this project as the tree has it."""
    text = text.replace(f"{PACKAGE}.intree.siblings", INTREE_PACKAGE)
    text = re.sub(rf"\b{PACKAGE}\b", INTREE_PACKAGE, text)
    text = re.sub(r"\s*# noqa: .*$|  # type: ignore\[.*\]$", "", text, flags=re.M)
    text = isort.code(text, profile="black", known_first_party=["sglang"])
    return black.format_str(text, mode=black.Mode())
