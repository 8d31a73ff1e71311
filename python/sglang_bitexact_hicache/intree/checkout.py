"""A source tree of SGLang: where its files are, which release it is."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sglang_bitexact_hicache.intree.errors import IntreeError

PACKAGE_FOLDER = "python/sglang"
"""Where a checkout of SGLang has its package."""


@dataclass(frozen=True)
class Checkout:
    """A source tree.

    Attributes:
        root: its folder; paths of files are relative to it, with slashes.
        version: its release ("0.5.23"), None where it does not say.
    """

    root: Path
    version: str | None

    @classmethod
    def at(cls, folder: Path) -> Checkout:
        """The tree in this folder.

        Raises:
            IntreeError: it is not a source tree of SGLang.
        """
        package = folder / PACKAGE_FOLDER
        if not (package / "srt" / "mem_cache").is_dir():
            raise IntreeError(
                f"{folder} is not a source tree of SGLang: it has no {PACKAGE_FOLDER}/srt/mem_cache"
            )
        return cls(folder, _built_version(package) or _tagged_version(folder))

    def read(self, path: str) -> str | None:
        """A file's text with its own line ends, None where there is no such file.

        Raises:
            IntreeError: it cannot be read.
        """
        try:
            return (self.root / path).read_bytes().decode()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise IntreeError(f"{path}: {error}") from None


def _built_version(package: Path) -> str | None:
    """What a build has left in the tree. Not imported: that would import SGLang."""
    try:
        text = (package / "_version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(
        r"^(?:__version__ = )?version = ['\"]([^'\"+]+)|^__version__ = ['\"]([^'\"+]+)", text, re.M
    )
    return found and (found[1] or found[2])


def environment_of_git() -> dict[str, str]:
    """This process's environment without the variables by which git would work on another repository than
    the one that it is told (a git hook has them)."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def _tagged_version(folder: Path) -> str | None:
    """The release tag that git's HEAD is at. A tree between two releases is neither."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--tags", "--exact-match", "--match", "v*"],
            capture_output=True,
            text=True,
            check=True,
            env=environment_of_git(),
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().removeprefix("v") or None
