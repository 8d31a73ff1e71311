"""Ends a server whose parent is gone.

A test run that is killed cannot stop the servers it started, and an orphaned server keeps two
gigabytes and its port. The launcher of ``launch.Server`` therefore watches its parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_VARIABLE = "DSV4_REFERENCE_PARENT"
_PERIOD_S = 2.0


def start() -> None:
    """Start watching, in the one process whose parent ``DSV4_REFERENCE_PARENT`` names."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if os.getppid() == 1 != int(parent):
        # Its parent went while it was starting.
        os.kill(os.getpid(), signal.SIGTERM)
    if int(parent) != os.getppid():
        return
    threading.Thread(target=_watch, args=(int(parent),), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
    os.kill(os.getpid(), signal.SIGTERM)
