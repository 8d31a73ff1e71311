"""The plugin's form of attaching, for tests: where the package is, and how it is undone."""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_bitexact_hicache.settings import Argument

PLUGINS = "bitexact_hicache"
"""What SGLang loads in a process that has the feature and nothing else (SGLANG_PLUGINS)."""

FORM_MODULES = {"attach", "plugin", "seam_table"}
"""This form's modules, of those that are loaded with the flag off."""

ENTERED_OFF = [
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
]
"""All that is patched with the flag off."""

_ON = ["sglang.srt.mem_cache.registry.create_unified_radix_cache", *ENTERED_OFF]

ENTERED_ON = {"after_loading": _ON, "after_building": _ON}
"""All that is patched with the flag on, as long as the feature does not engage."""

STEPS_ON = ["handle_hicache"]
"""Then the steps of argument resolution that have a hook."""


def entered() -> set[str]:
    """Every function of SGLang that runs code of this package, by its own qualified name."""
    from startup_fixtures import our_patches

    return our_patches()


def metavar(argument: Argument) -> str:
    """What `--help` calls the value of an argument; empty for a switch."""
    return argument.metavar or ""


def prepare() -> None:
    """Lets the package be imported where it is not installed. Before SGLang is imported."""
    if importlib.util.find_spec("sglang_bitexact_hicache") is None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python"))


@contextlib.contextmanager
def hooks_undone() -> Iterator[None]:
    """Undoes, on exit, what `attach.install` puts into this process, and the registry's memory of it."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_bitexact_hicache import seam_table
    from sglang_bitexact_hicache.seam import HOOKS

    before = []
    for seam in seam_table.SEAMS:
        if seam.kind in HOOKS:
            owner = pkgutil.resolve_name(seam.target.rpartition(".")[0])
            before.append((owner, seam.attribute, vars(owner)[seam.attribute]))
    hooks = {target: list(entries) for target, entries in HookRegistry._hooks.items()}
    patched = set(HookRegistry._patched)
    steps = {name: list(entries) for name, entries in resolution_hooks._HOOKS.items()}
    try:
        yield
    finally:
        for owner, name, value in before:
            now = vars(owner)[name]
            if now is value:
                continue
            setattr(owner, name, value)
            # The registry also re-pointed what other modules had imported.
            for module in list(sys.modules.values()):
                if isinstance(module, types.ModuleType) and vars(module).get(name) is now:
                    setattr(module, name, value)
        HookRegistry._hooks.clear()
        HookRegistry._hooks.update(hooks)
        HookRegistry._patched.clear()
        HookRegistry._patched.update(patched)
        resolution_hooks._HOOKS.clear()
        resolution_hooks._HOOKS.update(steps)
