"""`@bitexact_seam`: where the feature may enter a function of SGLang.

With SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE off when SGLang is imported, the decorator gives the function
itself back: nothing is there. With it on, the function is called through a point, which calls straight on
until the feature engages and arms it (attach.py). What a handler may do is what SGLang's plugin hooks of
the same name may (srt/plugins/hook_registry.py).

Imports no torch and nothing heavy: SGLang's modules import this one first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from sglang_bitexact_hicache import options
from sglang_bitexact_hicache.seam import Kind, Seam, When

Function = TypeVar("Function", bound=Callable[..., Any])

_WANTED = options.wanted()
"""Once for a process: its functions are all of one form."""


class SeamPoint:
    """The point at one function of SGLang.

    Attributes:
        function: SGLang's own.
        handler: the feature's, None as long as the point is not armed.
        waits_for: the seam for which it arms itself at its first call, or None.
        call: what a call of the function does now.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.handler: Callable[..., Any] | None = None
        self.waits_for: Seam | None = None
        self.call = function

    def arm(self, kind: Kind, handler: Callable[..., Any]) -> None:
        """From now on calls go through the handler. Idempotent."""
        self.handler, self.call = handler, _through(self.function, kind, handler)

    def arm_at_first_call(self, seam: Seam) -> None:
        """The first call arms the point: the handler is not imported while SGLang is."""

        def first(*args: Any, **kwargs: Any) -> Any:
            if self.handler is None:
                self.arm(seam.kind, seam.load())
            return self.call(*args, **kwargs)

        self.waits_for, self.call = seam, first


def bitexact_seam(function: Function) -> Function:
    """Decorator: the function itself with the feature off, otherwise a call through its point.

    Below `@classmethod` and `@staticmethod`, above any other decorator.

    Raises:
        KeyError: the seam table (seam_table.py) has no such function.
    """
    if not _WANTED:
        return function
    from sglang_bitexact_hicache.seam_table import SEAMS

    target = f"{function.__module__}.{function.__qualname__}"
    seam = {seam.target: seam for seam in SEAMS}[target]
    point = SeamPoint(function)
    if seam.when is When.FLAG:
        point.arm_at_first_call(seam)

    @functools.wraps(function)
    def at_point(*args: Any, **kwargs: Any) -> Any:
        return point.call(*args, **kwargs)

    return at_point  # type: ignore[return-value]


def _through(
    function: Callable[..., Any], kind: Kind, handler: Callable[..., Any]
) -> Callable[..., Any]:
    if kind is Kind.AROUND:
        return functools.partial(handler, function)
    if kind is Kind.RESOLUTION:
        return lambda server_args: handler(server_args, function)
    if kind is Kind.BEFORE:

        def before(*args: Any, **kwargs: Any) -> Any:
            changed = handler(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
            return function(*args, **kwargs)

        return before

    def after(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        changed = handler(result, *args, **kwargs)
        return result if changed is None else changed

    return after
