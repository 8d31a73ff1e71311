"""The file tree in docs/architecture.md is the tree, each file with the first sentence of its docstring.

python test_swa_docs.py        write it anew
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- the tree: test_swa_docs.py -->\n", "<!-- end of the tree -->\n"
FOLDERS = ("python", "benchmark", "test")


def sentence(source: str) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text.replace("``", "`"), maxsplit=1)[0].rstrip(".:")


def tree(root: Path = ROOT) -> str:
    """The tree as docs/architecture.md has it."""
    lines = []
    for folder in FOLDERS:
        sources = [p for p in (root / folder).rglob("*.py") if "build" not in p.parts]
        for parent in sorted({p.parent for p in sources}):
            lines.append(f"\n**{parent.relative_to(root)}/**\n")
            files = sorted(p for p in sources if p.parent == parent)
            lines += [f"- `{p.name}`: {sentence(p.read_text())}" for p in files]
    return "\n".join(lines) + "\n\n"


def parts(page: str) -> tuple[str, str, str]:
    """The page before the tree, the tree, and the page after it."""
    before, _, rest = page.partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after


def test_the_tree_is_the_tree():
    assert parts(PAGE.read_text())[1] == tree(), "run: python test/srt/mem_cache/test_swa_docs.py"


def test_every_file_says_what_it_is_for():
    silent = [line for line in tree().splitlines() if line.endswith(": ")]
    assert not silent


@pytest.mark.parametrize("change", ["added", "removed", "another sentence"])
def test_a_change_is_noticed(tmp_path, change):
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    source = tmp_path / "python" / "a.py"
    source.write_text('"""What it is. And more."""\n')
    before = tree(tmp_path)
    assert "- `a.py`: What it is\n" in before
    if change == "added":
        (tmp_path / "test" / "b.py").write_text('"""B."""\n')
    elif change == "removed":
        source.unlink()
    else:
        source.write_text('"""What it was."""\n')
    assert tree(tmp_path) != before


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(before + BEGIN + tree() + END + after)
