"""What the machine can do: the floors that the measurements are set against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.timing import device_ms, medians, whole


@dataclass(frozen=True)
class Floors:
    """Rates.

    Attributes:
        device_copy: bytes read and written a second, of a large copy on the device.
        matmul: floating point operations a second of an 8192-cube bf16 product.
        pinned: for each number of records: seconds of bare copies of so many records between pinned host
            memory and the device, one copy a record, from an idle device; (to the device, to the host).
        record_bytes: bytes of such a record.
    """

    device_copy: float
    matmul: float
    pinned: dict[int, tuple[float, float]]
    record_bytes: int

    def pinned_rate(self, records: int, *, to_host: bool = False) -> float:
        """Bytes a second."""
        return records * self.record_bytes / self.pinned[records][to_host]


def measure(record_bytes: int, counts: tuple[int, ...], repeats: int) -> Floors:
    """All of them; `record_bytes` is what moves for one boundary."""
    return Floors(
        _device_copy(repeats),
        _matmul(repeats),
        _pinned(record_bytes, counts, repeats),
        record_bytes,
    )


def _device_copy(repeats: int) -> float:
    source = torch.randint(0, 1 << 30, (1 << 28,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    work = whole(lambda: target.copy_(source))
    ms = medians({"copy": lambda: device_ms(work, ahead_ms=5)}, repeats)["copy"]
    return 2 * source.nbytes / (1e-3 * ms)


def _matmul(repeats: int) -> float:
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    work = whole(lambda: torch.mm(a, b, out=out))
    ms = medians({"mm": lambda: device_ms(work, ahead_ms=5)}, repeats)["mm"]
    return 2 * n**3 / (1e-3 * ms)


def _pinned(
    record_bytes: int, counts: tuple[int, ...], repeats: int
) -> dict[int, tuple[float, float]]:
    most = max(counts)
    host = torch.empty(most, record_bytes, dtype=torch.uint8, pin_memory=True).random_()
    device = torch.empty(most, record_bytes, dtype=torch.uint8, device="cuda")
    lane = torch.cuda.Stream()

    def copies(count: int, *, to_host: bool) -> None:
        with torch.cuda.stream(lane):
            for i in range(count):
                target, source = (host[i], device[i]) if to_host else (device[i], host[i])
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(lane)

    arms = {
        (count, to_host): lambda c=count, h=to_host: device_ms(
            whole(lambda: copies(c, to_host=h)), ahead_ms=0
        )
        for count in counts
        for to_host in (False, True)
    }
    ms = medians(arms, repeats)
    return {c: (1e-3 * ms[c, False], 1e-3 * ms[c, True]) for c in counts}
