"""The server of a soak: its log, its numbers, and what its processes hold."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import demo
from dsv4_reference_platform.launch import Server
from sglang_bitexact_hicache.doctor.server import read_metrics
from sglang_bitexact_hicache.exporter import PREFIX

ARGS = (
    *("--chunked-prefill-size", "512"),
    # Less than the requests have together, so that prefixes go to host memory and to storage; more
    # than those that run at once, so that none is retracted.
    *("--max-total-tokens", "8192"),
    *("--max-running-requests", "8"),
    *("--hicache-ratio", "2"),
    "--enable-metrics",
    # SGLang attaches and detaches storage for those only who have this key.
    *("--admin-api-key", "soak"),
)
STORAGE_ARGS = (
    *("--hicache-storage-backend", "file"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
MIB = 1 << 20


def soak_server(log: Path, storage: Path | None) -> PipedServer:
    """The feature on, every restore verified; not started."""
    args, env = [*demo.SERVER_ARGS, *ARGS], demo.arm_env("1")
    if storage is not None:
        args += STORAGE_ARGS
        env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
    server = PipedServer(args, env, log_path=log)
    server.headers["Authorization"] = "Bearer soak"
    return server


class PipedServer(Server):
    """A server whose log comes through a pipe: a limit on the size of its files is for storage alone."""

    @contextmanager
    def open_log(self) -> Iterator[int]:
        """See Server.open_log."""
        reading, writing = os.pipe()
        thread = threading.Thread(target=_copy, args=(reading, self.log_path), daemon=True)
        thread.start()
        try:
            yield writing
        finally:
            os.close(writing)

    def first_write(self, storage: Path) -> None:
        """A prompt that goes to storage, so that SGLang's hash is compiled before the weather changes.

        Raises:
            TimeoutError: nothing was written.
        """
        self.generate([11, 12] * 300, 1)
        deadline = time.monotonic() + 120
        while not any(storage.glob("*")):
            if time.monotonic() > deadline:
                raise TimeoutError("the server writes nothing to storage")
            time.sleep(0.2)

    def kill(self) -> None:
        """What a crash is: every process at once, in the middle of whatever it does."""
        os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    @contextmanager
    def full_disk(self, limit: int) -> Iterator[None]:
        """No file of its processes grows beyond so many bytes meanwhile: the kernel refuses the write."""
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        pids = self.processes()
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            for pid in set(pids) & set(self.processes()):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)

    def metric(self, name: str, reason: str = "") -> float:
        """A metric of the feature's; 0 before the first report."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            values, _ = read_metrics(reply.read().decode())
        return values.get((PREFIX + name, reason), 0.0)


def _copy(reading: int, path: Path) -> None:
    with open(reading, "rb") as source, open(path, "wb", buffering=0) as target:
        while block := source.read1(1 << 16):
            target.write(block)


@dataclass(frozen=True)
class Held:
    """What a server that is idle and empty holds.

    Attributes:
        threads, files, resident: of all its processes; open files, bytes.
        slots: host slots of truth that are not free.
    """

    threads: int
    files: int
    resident: int
    slots: int

    @classmethod
    def by(cls, server: PipedServer) -> Held:
        """After a flush, and a prompt of less than a page, with which the metrics are reported."""
        server.flush_cache()
        server.generate([7] * 40, 1)
        server.flush_cache()
        time.sleep(1)
        processes = [Path("/proc") / str(pid) for pid in server.processes()]
        return cls(
            threads=sum(len(list((p / "task").iterdir())) for p in processes),
            files=sum(len(list((p / "fd").iterdir())) for p in processes),
            resident=sum(_resident(p) for p in processes),
            slots=int(server.metric("slots_used")),
        )

    def leaks(self, before: Held) -> list[str]:
        """What grew since then beyond what a running server's own buffers explain."""
        grown = []
        if self.threads > before.threads:
            grown.append(f"threads {before.threads} -> {self.threads}")
        # Connections of clients that are being closed.
        if self.files > before.files + 8:
            grown.append(f"open files {before.files} -> {self.files}")
        if self.resident > before.resident + max(64 * MIB, before.resident // 20):
            grown.append(f"MiB {before.resident // MIB} -> {self.resident // MIB}")
        if self.slots:
            grown.append(f"{self.slots} host slots")
        return grown


def _resident(process: Path) -> int:
    fields = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    return int(fields["VmRSS"].split()[0]) * 1024 if "VmRSS" in fields else 0
