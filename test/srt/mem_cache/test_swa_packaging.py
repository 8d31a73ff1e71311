"""The wheel and the source distribution: what is in them, and that they leave a stock SGLang as it was.

The source distribution is built from this checkout, and the wheel from the source distribution. The wheel
is installed with pip into a virtual environment that has everything that this one has, by links, but for
this package and the reference platform; without a package index, so that a requirement that is not there
fails.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "sglang_bitexact_hicache"
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in", "python")
OURS = (PACKAGE, "__editable__", "dsv4_reference_platform")
"""Beginnings of what the environment of the tests has and the clean one must not have."""
UNFIT = "torchvision"
"""Linked to another torch than a CPU's: its import fails, but where the reference platform mends it."""

DISCOVERY = """
import json, sys
from importlib.util import find_spec
from sglang.srt.plugins import load_plugins_by_group
spec = find_spec("sglang_bitexact_hicache")
places = None if spec is None else list(spec.submodule_search_locations)
sys.stdout.write(json.dumps([sorted(load_plugins_by_group("sglang.srt.plugins")), places]))
"""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=junk)
        else:
            shutil.copy(ROOT / name, source / name)
    sdist = _build(source, "sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, _build(unpacked, "wheel", folder)


def _build(source: Path, what: str, folder: Path) -> Path:
    code = f"import setuptools.build_meta as b; b.build_{what}({str(folder)!r})"
    _run([sys.executable, "-W", "ignore", "-c", code], cwd=source)
    (made,) = folder.glob("*.tar.gz" if what == "sdist" else "*.whl")
    return made


def _run(words: list[str], **options: Any) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "SGLANG_"))}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, env=env, check=False, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


class Clean:
    """A virtual environment with a stock SGLang."""

    def __init__(self, folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
            # What a .pth file says is of the environment that it lies in.
            if not entry.name.startswith((*OURS, UNFIT, "__pycache__")) and entry.suffix != ".pth":
                (self.packages / entry.name).symlink_to(entry)

    def pip(self, *words: str) -> str:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        return _run([*pip, "--disable-pip-version-check", *words])

    def names(self) -> set[str]:
        return {entry.name for entry in self.packages.iterdir()} - {"__pycache__"}

    def discovery(self) -> tuple[list[str], list[str] | None]:
        """Plugins that SGLang finds, and where the module is."""
        plugins, places = json.loads(_run([str(self.python), "-W", "ignore", "-c", DISCOVERY]))
        return plugins, places

    def changed_files_of_sglang(self) -> list[str]:
        """Files of SGLang that are not what its own RECORD says they are."""
        (record,) = self.packages.glob("sglang-*.dist-info/RECORD")
        rows = [row for row in csv.reader(record.read_text().splitlines()) if row[1]]
        assert len(rows) > 1000
        # Scripts lie beside the site-packages that SGLang was installed into.
        installed = record.resolve().parent.parent
        return [
            name
            for name, digest, _ in rows
            if _sha256((installed if name.startswith("..") else self.packages) / name) != digest
        ]


def _sha256(path: Path) -> str:
    raw = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Clean:
    return Clean(tmp_path_factory.mktemp("clean") / "venv")


def _modules() -> set[str]:
    folder = ROOT / "python" / PACKAGE
    return {
        path.relative_to(ROOT / "python").as_posix()
        for path in folder.rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


# ---- what is in them


def test_the_wheel_has_every_module_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licence = next(n for n in wheel.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert names == _modules()
    assert f"{PACKAGE}/py.typed" in names


def test_the_source_distribution_has_what_it_needs(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SHIPPED, *(f"python/{name}" for name in _modules())} <= names


def test_the_metadata(built, project):
    with zipfile.ZipFile(built[1]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        found = message_from_bytes(wheel.read(name))
        entry_points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert found["Version"] == project["version"] == built[0].name.split("-")[-1][: -len(".tar.gz")]
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == distribution("sglang").metadata["Requires-Python"]
    # Not SGLang: pip would bring its CUDA stack to machines that must not have it.
    needed = found.get_all("Requires-Dist")
    assert [r for r in needed if "extra ==" not in r] == project["dependencies"] == ["xxhash>=3.4"]
    # What one command alone needs.
    extra = project["optional-dependencies"]
    assert list(extra) == ["intree"]
    assert [r for r in needed if "extra ==" in r] == [
        f'{r}; extra == "intree"' for r in extra["intree"]
    ]
    assert entry_points.split() == [
        *("[sglang.srt.plugins]", "bitexact_hicache", "=", f"{PACKAGE}.plugin:register")
    ]


def test_the_change_log_begins_with_this_version(project):
    titles = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert titles[0].split()[1] == project["version"]


# ---- beside a stock SGLang


def test_installed_and_gone_again_and_sglang_is_as_it_was(built, clean):
    before = clean.names()
    assert not [name for name in before if name.startswith(OURS)]
    assert clean.changed_files_of_sglang() == []

    clean.pip("install", "--no-index", "--quiet", str(built[1]))
    assert clean.changed_files_of_sglang() == []
    plugins, places = clean.discovery()
    assert plugins == ["bitexact_hicache"]
    assert places == [str(clean.packages / PACKAGE)]
    report = json.loads(
        _run([str(clean.python), "-m", PACKAGE, "doctor", "--source-only", "--json"])
    )
    assert report["status"] == 0, report["problems"]
    assert report["sections"]["installed"]["entry_point"]["state"] == "ok"

    clean.pip("uninstall", "--yes", "--quiet", PACKAGE)
    assert clean.changed_files_of_sglang() == []
    assert clean.names() == before
    assert clean.discovery() == ([], None)


def test_a_file_of_sglang_that_changed_would_be_found(clean):
    sglang = clean.packages / "sglang"
    stock = sglang.readlink()
    sglang.unlink()
    sglang.mkdir()
    for entry in stock.iterdir():
        (sglang / entry.name).symlink_to(entry)
    (sglang / "version.py").unlink()
    (sglang / "version.py").write_bytes((stock / "version.py").read_bytes() + b"\n")
    try:
        assert clean.changed_files_of_sglang() == ["sglang/version.py"]
    finally:
        shutil.rmtree(sglang)
        sglang.symlink_to(stock)
