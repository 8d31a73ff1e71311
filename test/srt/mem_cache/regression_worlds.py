"""Two Pythons that differ in one installed distribution: SGLang without the plugin, and with it.

A world is a virtual environment whose site-packages are links to this environment's, entry by
entry. The plugin's are left out of the one that is called stock: there is no distribution, no entry
point and no module of it, so stock is stock by construction, and nothing has to be blocked. The
third kind has a small plugin instead that changes what SGLang does (regression_control.py): a
comparison that does not tell it from stock shows nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = "sglang_bitexact_hicache"
PLATFORM = "dsv4_reference_platform"
CONTROL = "regression_control"

STOCK, PLUGIN, ALTERED = "stock", "plugin", "altered"


@dataclass(frozen=True)
class World:
    """A Python to run SGLang in.

    Attributes:
        name: STOCK, PLUGIN or ALTERED.
        python: its executable.
        alteration: for ALTERED, what the control plugin changes (regression_control.ALTERATIONS).
    """

    name: str
    python: Path
    alteration: str | None = None

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of its processes: this one's without the feature's variables and without any
        path or plugin filter that would say what is installed, the reference platform's, then `extra`."""
        from dsv4_reference_platform.launch import server_env

        env = {
            name: value
            for name, value in server_env().items()
            if name not in ("PYTHONPATH", "SGLANG_PLUGINS") and not _of_the_feature(name)
        }
        if self.alteration is not None:
            env["REGRESSION_ALTERATION"] = self.alteration
        # SGLang shows choices that it keeps in a set: in an order that must be the same in both worlds.
        fixed = {"PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "1"}
        return {**env, **fixed, **(extra or {})}

    def run(
        self, argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python argv...` to its end.

        Raises:
            RuntimeError: it did not exit with 0; carries the end of what it wrote.
        """
        done = subprocess.run(
            [str(self.python), "-W", "ignore", *argv],
            env=self.env(env),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: exit status {done.returncode}\n{done.stderr[-4000:]}")
        return done


def _of_the_feature(name: str) -> bool:
    return "BIT_EXACT" in name or "SWA_OFFLOAD" in name or name.startswith("SGLANG_SWA_")


def make_world(folder: Path, name: str, alteration: str | None = None) -> World:
    """Builds a world below `folder`; takes a fraction of a second and no room."""
    root = folder / (name if alteration is None else f"{name}-{alteration}")
    venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
    relative = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    site = root / relative
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # What is installed as editable is linked from this checkout below.
        if PACKAGE not in entry.name and not entry.name.startswith("__editable__"):
            (site / entry.name).symlink_to(entry)
    reference = REPOSITORY / "test" / "reference_platform" / "src" / PLATFORM
    (site / PLATFORM).symlink_to(reference)
    if name == PLUGIN:
        (site / PACKAGE).symlink_to(REPOSITORY / "python" / PACKAGE)
        for entry in Path(sysconfig.get_path("purelib")).glob(f"{PACKAGE}-*.dist-info"):
            (site / entry.name).symlink_to(entry)
    if name == ALTERED:
        (site / f"{CONTROL}.py").symlink_to(Path(__file__).with_name(f"{CONTROL}.py"))
        info = site / f"{CONTROL}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {CONTROL}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{CONTROL} = {CONTROL}:register\n"
        )
    python = root / ("Scripts" if os.name == "nt" else "bin") / "python"
    return World(name, python, alteration)
