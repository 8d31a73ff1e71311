"""A plugin that changes what SGLang does: the negative control of the regression comparison.

Installed by regression_worlds.py in the world called altered, in place of the plugin. Each alteration
is small and of another kind; `REGRESSION_ALTERATION` names those that are made, with commas between.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def _lose_a_page() -> None:
    """Every fifth match of more than a page comes back a page short."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hits = [0]

    def around(stock: Callable[..., Any], cache: Any, params: Any) -> Any:
        found = stock(cache, params)
        if found.device_prefix_len <= cache.page_size:
            return found
        hits[0] += 1
        if hits[0] % 5:
            return found
        params.key.limit = found.device_prefix_len - cache.page_size
        return stock(cache, params)

    HookRegistry.register(f"{_CACHE}.match_prefix", around, HookType.AROUND)


def _change_an_environment_default() -> None:
    from sglang.srt.environ import envs

    field = type(envs).__dict__["SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO"]
    field.default = 0.8


def _add_an_argument() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result: None, parser: Any) -> None:
        parser.add_argument("--regression-control", help="Not SGLang's.")

    target = "sglang.srt.server_args.ServerArgs.add_cli_args"
    HookRegistry.register(target, after, HookType.AFTER)


def _import_a_module() -> None:
    pass


def _warn() -> None:
    logging.getLogger("sglang.srt.server_args").warning("this line is not SGLang's")


ALTERATIONS: dict[str, Callable[[], None]] = {
    "match": _lose_a_page,
    "environment": _change_an_environment_default,
    "argument": _add_an_argument,
    "module": _import_a_module,
    "log": _warn,
}
"""What can be changed, by name."""


def register() -> None:
    """Entry point: makes the alterations that the environment names."""
    for name in os.environ["REGRESSION_ALTERATION"].split(","):
        ALTERATIONS[name]()
