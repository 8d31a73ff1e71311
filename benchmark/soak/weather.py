"""What happens to storage while the server works."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from dsv4_reference_platform.launch import ServerError
from soak.server import PipedServer

IDLE_SECONDS = 60.0
"""How long a server may take to become idle once nobody asks."""
PART = 0.05
"""Of the files, how many a storm damages."""
FULL = 512 << 10
"""Bytes that a file may have on a full disk: those of a record's windows are more, those of the server's
own files are not."""


class Weather:
    """Changes every few seconds, on a thread of its own, until it is stopped.

    `faults`: how often what happened. SGLang detaches and attaches storage on an idle server
    only, so `restart_storage` is called while no client asks.
    """

    def __init__(self, server: PipedServer, storage: Path, seed: str) -> None:
        self._server = server
        self._storage = storage
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weather")
        self.faults: Counter[str] = Counter()
        self._lasting: dict[str, Callable[[ExitStack], None]] = {
            "full disk": lambda stack: stack.enter_context(server.full_disk(FULL)),
            "away": self._away,
        }
        self._damages: dict[str, Callable[[Path], None]] = {
            "a byte changed": self._flip,
            "cut short": lambda path: _cut(path, path.stat().st_size // 2),
            "emptied": lambda path: _cut(path, 0),
            "deleted": lambda path: path.unlink(missing_ok=True),
        }

    def __enter__(self) -> Weather:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def restart_storage(self) -> None:
        """Detach and attach."""
        config = {
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            try:
                self._server.request("DELETE", "/hicache/storage-backend")
                break
            except ServerError as error:
                # Requests that nobody waits for any more may still run.
                if "not idle" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        self._server.request("PUT", "/hicache/storage-backend", config)
        self.faults["storage restarted"] += 1

    def _run(self) -> None:
        while not self._over.wait(self._rng.uniform(1, 4)):
            kind = self._rng.choice([*self._lasting, *self._damages, "clear sky"])
            if kind == "clear sky":
                continue
            try:
                self._happen(kind)
            except (OSError, ServerError):
                continue  # the server was killed meanwhile
            self.faults[kind] += 1

    def _happen(self, kind: str) -> None:
        if kind in self._lasting:
            with ExitStack() as stack:
                self._lasting[kind](stack)
                self._over.wait(self._rng.uniform(1, 3))
            return
        for path in list(self._storage.iterdir()):
            if self._rng.random() < PART and path.is_file():
                self._damages[kind](path)

    def _away(self, stack: ExitStack) -> None:
        elsewhere = self._storage.with_name(self._storage.name + " away")
        self._storage.rename(elsewhere)
        stack.callback(_back, elsewhere, self._storage)

    def _flip(self, path: Path) -> None:
        size = path.stat().st_size
        if size:
            with open(path, "r+b") as file:
                file.seek(self._rng.randrange(size))
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))


def _cut(path: Path, size: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)


def _back(elsewhere: Path, storage: Path) -> None:
    """The volume is there again; what a server wrote into its place is gone, as behind a mount."""
    if storage.exists():
        for path in storage.iterdir():
            path.unlink()
        storage.rmdir()
    elsewhere.rename(storage)
