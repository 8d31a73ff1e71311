"""`intree`: the feature built into a source tree of SGLang, taken out again, and written as patches.

The trees are made of the installed package (intree_scratch.py). What the built tree does is asked of
processes that run on it and cannot import the plugin.
"""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import intree_scratch
import pytest
from intree_scratch import ROOT

from sglang_bitexact_hicache import __main__ as command
from sglang_bitexact_hicache import seam_checks, seam_table
from sglang_bitexact_hicache.intree import builder, changes, landing, series, tree_plan
from sglang_bitexact_hicache.intree.checkout import Checkout
from sglang_bitexact_hicache.intree.digests import DIGESTS
from sglang_bitexact_hicache.intree.landing import PACKAGE_FOLDER, TEST_FOLDER
from sglang_bitexact_hicache.intree.series import PARTS, Part
from sglang_bitexact_hicache.seam import When

BUDGET = 150
"""The most lines that SGLang's own files may get."""

DOCSTRING = '"""Initialize a UnifiedRadixCache'

REGISTRY = "python/sglang/srt/mem_cache/registry.py"


def intree(*args: object) -> int:
    """The command's exit status."""
    return command.main(["intree", "--sglang-src", *map(str, args)])


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit(tree: Path, path: str, old: str, new: str) -> None:
    """Somebody edits a file of the tree, once."""
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new, 1))


SOME_TESTS = (
    *("attachment", "conftest", "long_tests", "startup_fixtures", "bitexact_fixtures"),
    "scheduler_harness",
    *("test_swa_capture", "test_swa_record", "test_swa_rounds"),
)
"""The tests that land here: formatting all of them is most of the work. intree_check.py lands all."""


@pytest.fixture(scope="module", autouse=True)
def _some_tests(tmp_path_factory):
    """The project, with a few of its tests."""
    project = tmp_path_factory.mktemp("project")
    (project / TEST_FOLDER).mkdir(parents=True)
    for name in SOME_TESTS:
        shutil.copy2(ROOT / TEST_FOLDER / f"{name}.py", project / TEST_FOLDER)
    shutil.copytree(ROOT / "test" / "intree", project / "test" / "intree")
    few = functools.partial(landing.landing, project)
    with mock.patch.object(builder, "landing", few), mock.patch.object(series, "landing", few):
        yield


@pytest.fixture
def tree(tmp_path) -> Path:
    """The files that the command reads, as the wheel has them."""
    return intree_scratch.make(tmp_path / "tree", only_source=True)


# ---- build, check, again, revert


def test_build_check_again_and_revert(tree, capsys):
    stock = files_of(tree)
    assert intree(tree, "--check") == 1
    would = capsys.readouterr().out
    assert files_of(tree) == stock
    assert "would write: seams=21 " in would

    assert intree(tree) == 0
    said = capsys.readouterr().out
    built = files_of(tree)
    assert said.splitlines()[-1] == would.splitlines()[-1].removeprefix("would write: ")
    assert said.splitlines()[:-1] == would.splitlines()[:-1]

    assert intree(tree, "--check") == 0
    assert capsys.readouterr().out.startswith("nothing to do")
    assert intree(tree) == 0
    assert "files_touched=0" in capsys.readouterr().out
    assert files_of(tree) == built

    assert intree(tree, "--revert") == 0
    assert files_of(tree) == stock
    assert intree(tree, "--revert") == 0
    assert files_of(tree) == stock


def test_sglangs_own_files_get_few_lines_and_lose_none(tree):
    assert intree(tree) == 0
    added = {}
    for path, text in tree_plan.plan(Checkout.at(tree), builder.landing()).stock.items():
        if text is not None:
            before, after = text.splitlines(), (tree / path).read_text().splitlines()
            # What was there is there, in its order.
            rest = iter(after)
            assert all(line in rest for line in before), path
            added[path] = len(after) - len(before)
    assert 0 < sum(added.values()) <= BUDGET
    assert max(added.values()) <= 20
    page = (ROOT / "docs" / "upstreaming.md").read_text()
    assert f"| all {len(added)} | {sum(added.values())} |" in page


def test_what_others_edit_beside_it_stays_when_it_goes(tree):
    assert intree(tree) == 0
    edit(tree, REGISTRY, "import logging\n", "import logging\nimport os\n")
    assert intree(tree, "--revert") == 0
    text = (tree / REGISTRY).read_text()
    assert "import os\n" in text
    assert "bitexact" not in text


def test_the_modules_are_ours_with_their_names_rewritten():
    files = builder.landing()
    own = {path.stem for path in landing.OURS.glob("*.py")} - set(landing.PLUGIN_ONLY)
    there = {Path(path).stem for path in files if path.startswith(PACKAGE_FOLDER)}
    assert there == own | {"seam_point"}
    for path, text in files.items():
        assert "sglang_bitexact_hicache" not in text, path
        if path.endswith(".py"):
            ast.parse(text)
    tests = {Path(name).stem for name in landing.test_sources()}
    here = {path.stem for path in (ROOT / TEST_FOLDER).glob("*.py")}
    assert set(landing.PLUGIN_TESTS) <= here
    assert tests == here - set(landing.PLUGIN_TESTS) | {"attachment", "test_swa_seam_points"}


# ---- refused: one error, and nothing half done


def refused(capsys, tree: Path, *args: object) -> list[str]:
    """The command refuses, and the tree is as it was; what it says."""
    before = files_of(tree) if tree.is_dir() else {}
    assert intree(tree, *args) == 2
    assert (files_of(tree) if tree.is_dir() else {}) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_folder_that_is_no_sglang_is_refused(tmp_path, capsys):
    (line,) = refused(capsys, tmp_path)
    assert "is not a source tree of SGLang" in line
    (line,) = refused(capsys, tmp_path / "nothing")
    assert "is not a source tree of SGLang" in line


@pytest.mark.parametrize("args", [(), ("--check",), ("--series", "out")])
def test_an_edited_seam_is_refused_by_its_place(tree, capsys, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edit(tree, REGISTRY, DOCSTRING, DOCSTRING + "A note.")
    (line,) = refused(capsys, tree, *args)
    number = (tree / REGISTRY).read_text().splitlines().index("def create_unified_radix_cache(") + 1
    assert f"{REGISTRY}:{number}: create_unified_radix_cache is not that of SGLang 0.5.23" in line
    assert not (tmp_path / "out").exists()


def test_an_edited_seam_is_found_in_a_built_tree_too(tree, capsys):
    assert intree(tree) == 0
    capsys.readouterr()
    edit(tree, REGISTRY, DOCSTRING, DOCSTRING + "A note.")
    (line,) = refused(capsys, tree)
    assert "create_unified_radix_cache is not that of" in line


def test_a_seam_that_is_edited_elsewhere_in_its_file_is_not(tree):
    edit(tree, REGISTRY, "import logging\n", "import logging\n\n# A note.\n")
    assert intree(tree, "--check") == 1


def test_a_file_that_is_not_python_is_refused(tree, capsys):
    edit(tree, REGISTRY, "import logging", "import logging(")
    (line,) = refused(capsys, tree)
    assert REGISTRY in line and "not Python" in line


def version(tree: Path, number: str) -> None:
    """The tree says that it is this release."""
    file = tree / "python" / "sglang" / "_version.py"
    file.write_text(file.read_text().replace("0.5.23", number))


def test_another_release_fits_where_every_seam_is_found(tree):
    version(tree, "0.5.24")
    edit(tree, REGISTRY, DOCSTRING, DOCSTRING + "A note.")
    assert intree(tree) == 0


def test_another_release_that_misses_a_seam_is_refused(tree, capsys):
    version(tree, "0.5.24")
    edit(tree, REGISTRY, "def create_unified_radix_cache(", "def create_another_cache(")
    (line,) = refused(capsys, tree)
    assert "create_unified_radix_cache: missing" in line


def test_a_release_that_is_not_known_must_be_the_same_at_every_seam(tree, capsys):
    (tree / "python" / "sglang" / "_version.py").unlink()
    assert intree(tree, "--check") == 1
    capsys.readouterr()
    edit(tree, REGISTRY, DOCSTRING, DOCSTRING + "A note.")
    refused(capsys, tree)


def test_a_file_of_that_name_with_another_text_is_refused(tree, capsys):
    (tree / PACKAGE_FOLDER).mkdir(parents=True)
    (tree / PACKAGE_FOLDER / "gate.py").write_text("# somebody's\n")
    (line,) = refused(capsys, tree)
    assert line.endswith("gate.py: there already, with another text")
    refused(capsys, tree, "--revert")


@pytest.mark.parametrize("failing", [0, 7, 60])
@pytest.mark.parametrize("args", [(), ("--revert",)])
def test_a_tree_that_cannot_be_written_is_as_it_was(tree, capsys, monkeypatch, failing, args):
    if args:
        assert intree(tree) == 0
        capsys.readouterr()
        # A revert replaces the edited files and removes the others.
        failing = min(failing, 10)
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == failing + 1:
            raise PermissionError(13, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(changes.os, "replace", replace)
    (line,) = refused(capsys, tree, *args)
    assert "nothing was changed" in line and "Permission denied" in line


def test_without_the_extra_it_is_named(tree, capsys, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("sglang_bitexact_hicache.intree.")]:
        if not name.endswith((".command", ".errors")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("sglang_bitexact_hicache.intree.builder")
    monkeypatch.setitem(sys.modules, "libcst", None)
    (line,) = refused(capsys, tree)
    assert "sglang-bitexact-hicache[intree]" in line


# ---- the digests, and that nothing of SGLang is stored


def test_every_seam_has_its_digest():
    found = {}
    for seam in seam_table.SEAMS:
        if seam.when is not When.ALWAYS:
            source, name = seam_checks.source_of(seam.target)
            found[seam.target] = tree_plan.digest(source.read_text(), name)
    assert found == DIGESTS


RUN = 6
"""Lines that follow one another, alike in two files, that count as copied."""


def runs(text: str) -> set[tuple[str, ...]]:
    """Every run of lines of code, without imports, comments and lines of a few characters."""
    lines = [line.strip() for line in text.splitlines()]
    code = [s for s in lines if len(s) > 8 and not s.startswith(("#", "import ", "from ", '"""'))]
    return {tuple(code[i : i + RUN]) for i in range(len(code) - RUN + 1)}


def bodies(text: str) -> list[str]:
    """The bodies of its functions; not their heads, which an override has too."""
    lines = text.splitlines()
    return [
        "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def copied_from_sglang(texts: list[str]) -> set[tuple[str, ...]]:
    """The runs of lines that these texts have from a function in a file of SGLang with a seam in it."""
    sources = {seam_checks.source_of(seam.target)[0] for seam in seam_table.SEAMS}
    theirs: set[tuple[str, ...]] = set()
    for source in sources:
        for body in bodies(source.read_text()):
            theirs |= runs(body)
    return set().union(*(runs(text) & theirs for text in texts))


def test_no_source_of_sglang_is_stored_here():
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in names
        if name.endswith((".py", ".md", ".toml", ".patch")) and (ROOT / name).is_file()
    ]
    assert len(texts) > 150
    assert copied_from_sglang(texts) == set()


def test_control_a_copied_function_is_found():
    source, name = seam_checks.source_of("sglang.srt.managers.scheduler.Scheduler.flush_cache")
    text = source.read_text()
    node = seam_checks.function_in(text, name)
    body = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    assert copied_from_sglang(["x = 1\n" + body])


# ---- the series


def test_the_series_is_not_written_into_another_repository(tmp_path, monkeypatch):
    other, ours = tmp_path / "other", tmp_path / "ours"
    for folder in (other, ours):
        folder.mkdir()
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
    # As in a git hook.
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    (ours / "file").write_text("")
    series._git(ours, "add", "file")
    series._git(ours, "commit", "-q", "-m", "one")
    monkeypatch.delenv("GIT_DIR")
    assert series._git(ours, "log", "--oneline").endswith(" one\n")
    assert not any((other / ".git" / "refs" / "heads").iterdir())


def test_every_module_is_in_one_part():
    names = [name for names in PARTS.values() for name in names]
    assert len(names) == len(set(names))
    there = {Path(p).stem for p in builder.landing() if p.startswith(PACKAGE_FOLDER)}
    assert set(names) == there


def test_no_module_needs_one_of_a_later_part():
    later = {}
    for path, text in builder.landing().items():
        if path.startswith(PACKAGE_FOLDER) and Path(path).stem != "factory":
            part = series.part_of_module(Path(path).stem)
            needed = at_import(text) & series._modules()
            later |= {(path, m): m for m in needed if series.part_of_module(m) > part}
    assert later == {}
    needed = series._imports(landing.incomplete_factory()) & series._modules()
    assert all(series.part_of_module(m) is Part.SUBSTRATE for m in needed)


def at_import(text: str) -> set[str]:
    """What a module imports when it is imported: not in a function, nor for the type checker alone."""
    tree = ast.parse(text)
    kept = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return series._imports(ast.unparse(ast.Module(kept, [])))


# ---- what the trees do


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A tree that can be run, stock."""
    return intree_scratch.make(tmp_path_factory.mktemp("whole") / "tree")


def run(tree: Path, *args: str, **env: str) -> str:
    """A Python on the tree; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *args],
        cwd=tree / "test" / "srt" / "mem_cache",
        env={**intree_scratch.environment(tree), **env},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


STAGE = """
import importlib, pathlib, sys
import sglang.srt.mem_cache.bitexact_hicache as package
from sglang.srt.arg_groups import hicache_hook
from sglang.srt.mem_cache import registry
names = sorted(p.stem for p in pathlib.Path(package.__path__[0]).glob("*.py"))
for name in names:
    if name not in ("kernels", "kernel_mover"):
        importlib.import_module(f"{package.__name__}.{name}")
print(len(names), hasattr(hicache_hook.handle_hicache, "__wrapped__"),
      hasattr(registry.create_unified_radix_cache, "__wrapped__"))
if sys.argv[1] == "refused":
    from sglang.srt.mem_cache.bitexact_hicache import engagement
    engagement.settle = lambda *_: engagement.Engagement(True, ())
    hicache_hook.handle_hicache.__wrapped__  # there is a point
    from sglang.srt.mem_cache.bitexact_hicache.seam_point import SeamPoint
    (point,) = [c.cell_contents for c in hicache_hook.handle_hicache.__closure__
                if isinstance(c.cell_contents, SeamPoint)]
    point.function = lambda record: None
    try:
        hicache_hook.handle_hicache(object())
    except ValueError as error:
        print(error)
"""


def test_the_series_builds_up_to_the_tree_and_each_stage_runs(whole, tmp_path, capsys):
    assert intree(whole, "--series", tmp_path / "out") == 0
    patches = sorted((tmp_path / "out").iterdir())
    assert [p.name[:5] for p in patches] == ["0001-", "0002-", "0003-"]
    tree = tmp_path / "tree"
    shutil.copytree(whole, tree, copy_function=os.link)
    (tree / TEST_FOLDER).mkdir(parents=True)
    for part, patch in zip(Part, patches, strict=True):
        # `git apply` writes new files, so that what is linked stays as it was.
        subprocess.run(["git", "apply", "--whitespace=error", str(patch)], cwd=tree, check=True)
        modules = sum(len(names) for p, names in PARTS.items() if p <= part)
        out = run(tree, "-c", STAGE, "off", SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE="0")
        assert out.splitlines()[-1] == f"{modules} False False"
        if part is Part.CAPTURE:
            out = run(tree, "-c", STAGE, "refused", SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE="1")
            assert "(reuse) is missing" in out.splitlines()[-1]
            # The tests that came with the patches so far.
            tests = sorted(p.name for p in (tree / TEST_FOLDER).glob("test_swa_*.py"))
            assert tests == ["test_swa_record.py", "test_swa_rounds.py"]
            out = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
            assert " passed" in out and "failed" not in out
    want = {path: text.encode() for path, text in _built(whole).items()}
    got = files_of(tree)
    assert {path: got[path] for path in want} == want


def _built(tree: Path) -> dict[str, str]:
    return dict(tree_plan.plan(Checkout.at(tree), builder.landing()).built)


def test_the_tree_runs_without_the_plugin(whole):
    """Its points, its arguments, and capture and restore byte for byte; the plugin cannot be imported."""
    assert intree(whole) == 0
    out = run(
        *(whole, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("test_swa_seam_points.py", "test_swa_capture.py"),
    )
    assert " passed" in out and "skipped" not in out
    control = subprocess.run(
        [sys.executable, "-c", "import sglang_bitexact_hicache"],
        env=intree_scratch.environment(whole),
        capture_output=True,
        text=True,
    )
    assert control.returncode != 0
    assert "imported the plugin" in control.stderr
