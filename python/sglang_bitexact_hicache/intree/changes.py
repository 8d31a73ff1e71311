"""All or nothing: what a tree has and what it is to have, written and taken back."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sglang_bitexact_hicache.intree.errors import IntreeError

Changes = Mapping[str, tuple[str | None, str | None]]
"""By path relative to the tree: the text before and after; None where there is no file."""


def apply(root: Path, changes: Changes) -> None:
    """Makes the changes, each file in one step. Where one fails, those before it are undone.

    Raises:
        IntreeError: a file cannot be written; the tree is as it was.
    """
    done: list[str] = []
    made: list[Path] = []
    try:
        for path, (_, after) in changes.items():
            _put(root / path, after, made)
            done.append(path)
    except OSError as error:
        for path in reversed(done):
            _put(root / path, changes[path][0], made)
        _drop(made)
        raise IntreeError(f"nothing was changed: {error}") from None
    for path, (_, after) in changes.items():
        if after is None:
            _drop_empty(root, (root / path).parent)


def _put(file: Path, text: str | None, made: list[Path]) -> None:
    if text is None:
        file.unlink(missing_ok=True)
        return
    for folder in reversed([file.parent, *file.parent.parents]):
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
    with _beside(file) as temporary:
        temporary.write_bytes(text.encode())
        # A file that others link to, as a package manager's cache may, stays theirs as it is.
        if file.exists():
            shutil.copymode(file, temporary)
        else:
            temporary.chmod(0o644)
        os.replace(temporary, file)


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _drop(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _drop_empty(root: Path, folder: Path) -> None:
    """A folder that has nothing left but what Python compiled, and those above it that were only its."""
    while folder != root and folder.is_dir():
        left = [entry for entry in folder.iterdir() if entry.name != "__pycache__"]
        if left:
            return
        shutil.rmtree(folder)
        folder = folder.parent
