"""The two SGLang entry points of the reference platform.

Both do nothing unless ``SGLANG_PLATFORM=dsv4_reference`` names this platform, so the
distribution may stay installed beside a normal SGLang. SGLang calls ``activate`` when it looks
for its platform and ``register`` when it loads general plugins, in every process of a server.

``DSV4_REFERENCE_DEVICE=cuda`` asks for the platform's variant on an NVIDIA GPU (cuda_platform.py).
"""

from __future__ import annotations

import os

PLATFORM_NAME = "dsv4_reference"
DEVICE_VARIABLE = "DSV4_REFERENCE_DEVICE"

_CLASSES = {
    "cpu": "dsv4_reference_platform.cpu_platform:ReferenceCpuPlatform",
    "cuda": "dsv4_reference_platform.cuda_platform:ReferenceCudaPlatform",
}


def selected() -> bool:
    """Whether ``SGLANG_PLATFORM`` names this platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def device() -> str:
    """The device that the platform runs on, ``cpu`` by default.

    Raises:
        ValueError: ``DSV4_REFERENCE_DEVICE`` names another device than ``cpu`` and ``cuda``.
    """
    name = os.environ.get(DEVICE_VARIABLE, "cpu")
    if name not in _CLASSES:
        raise ValueError(f"{DEVICE_VARIABLE}={name!r}: it is one of {sorted(_CLASSES)}")
    return name


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: the platform class by name, or None."""
    if not selected():
        return None
    return _CLASSES[device()]


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: opens the unified_kv gate.

    Every process of a server gets this, so that all of them resolve the same memory layout;
    the kernels are installed by the platform object, in the process that owns a model runner.
    The launcher also gets the watchdog over its parent.
    """
    if not selected():
        return
    from dsv4_reference_platform import install, watchdog

    watchdog.start()
    install.open_unified_kv_gate()
