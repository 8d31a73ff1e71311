"""A scratch tree of SGLang: the installed package in the folders of a source checkout, and an environment
in which Python finds that one, and never the plugin."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

BLOCKER = '''"""The plugin must not be imported by anything here."""

import sys


class _Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sglang_bitexact_hicache":
            raise ImportError("the in-tree form imported the plugin")


sys.meta_path.insert(0, _Blocked())
'''


def make(folder: Path, *, only_source: bool = False) -> Path:
    """Makes the tree in this folder; returns the folder.

    Args:
        folder: new.
        only_source: the files that `intree` reads alone; nothing can be run then.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    installed = Path(next(iter(spec.submodule_search_locations)))
    package = folder / "python" / "sglang"
    if only_source:
        from sglang_bitexact_hicache import seam_checks, seam_table

        sources = {seam_checks.source_of(seam.target)[0] for seam in seam_table.SEAMS}
        more = ("_version.py", "srt/environ.py", "srt/arg_groups/fields/memory.py")
        for source in sorted(sources | {installed / name for name in more}):
            copy = package / source.relative_to(installed)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    else:
        # `intree` replaces files and writes into none, so that links are as good as copies.
        shutil.copytree(installed, package, copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that runs on the tree, with the reference platform's plugin alone."""
    block = folder / "block"
    block.mkdir(exist_ok=True)
    (block / "sitecustomize.py").write_text(BLOCKER)
    path = [block, folder / "python", ROOT / "test" / "reference_platform" / "src"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_PLUGINS": "dsv4_reference",
        "OMP_NUM_THREADS": "1",
    }
