"""What capture and restore share: the device rings, the host records, device staging and one lane."""

from __future__ import annotations

from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.host_pool import TruthHostPools
from sglang_bitexact_hicache.metrics import Counters
from sglang_bitexact_hicache.row_mover import open_mover
from sglang_bitexact_hicache.staging import DeviceStaging
from sglang_bitexact_hicache.transfer import CopyLane


class RecordPipeline:
    """Moves records one way between the rings of `view` and the host slots of `pools`.

    Args:
        staging_slots: records of device staging, allocated here (ValueError if they do not fit).
        lane: the queue of this direction's copies.
        pin: whether index tensors are pinned on their way to the device.
    """

    def __init__(
        self,
        view: DeviceView,
        pools: TruthHostPools,
        staging_slots: int,
        lane: CopyLane,
        counters: Counters,
        *,
        pin: bool,
    ) -> None:
        self._view = view
        self._pools = pools
        self._lane = lane
        self._counters = counters
        self.staging = DeviceStaging(view.layout, staging_slots, view.device)
        self._mover = open_mover(view, self.staging, pin=pin)
