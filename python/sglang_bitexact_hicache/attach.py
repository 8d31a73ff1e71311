"""The plugin's form of attaching, how the seams are put in place: by SGLang's hook registry, and its
hooks of argument resolution.

The registry logs a hook that it cannot apply and goes on; seam_checks.py asks here what is in place.
"""

from __future__ import annotations

import pkgutil

from sglang_bitexact_hicache import seam_table
from sglang_bitexact_hicache.seam import HOOKS, Kind, Seam, When, wrapped_values


def register(*when: When) -> None:
    """Registers the hooks of these phases, for `HookRegistry.apply_hooks` to apply. Idempotent.

    While SGLang loads plugins it applies all of them at the end, so that ours must not be applied
    earlier: a plugin that hooks the same target after us would be ignored.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="bitexact_hicache", dist_name="sglang-bitexact-hicache")
    for seam in seam_table.SEAMS:
        if seam.when not in when:
            continue
        if seam.kind is Kind.RESOLUTION:
            from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

            if not is_live(seam):
                register_resolution_hook(seam.attribute)(seam.load())
        elif seam.kind in HOOKS:
            handler, kind = seam.load(), HookType(seam.kind.value)
            if any(hook is handler for _, hook, _ in HookRegistry._hooks.get(seam.target, ())):
                continue
            HookRegistry.register(seam.target, handler, kind, source=source)
            if seam.target in HookRegistry._patched:
                # Another plugin was there first. The registry applies a target only once, and would
                # never look at our hook: wrap what is there now.
                HookRegistry._apply_target(seam.target, [(kind, handler, source)])


def install(*when: When) -> None:
    """Puts the seams of these phases in place in this process. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    register(*when)
    HookRegistry.apply_hooks()


def is_live(seam: Seam) -> bool:
    """Whether the seam's handler is called in this process. For the kinds that are attached only."""
    handler = seam.load()
    if seam.kind is Kind.RESOLUTION:
        from sglang.srt.arg_groups import resolution_hooks

        return handler in resolution_hooks._HOOKS.get(seam.attribute, ())
    try:
        function = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError):
        return False
    return any(hook is handler for hook in wrapped_values(function))
