"""While code of ours runs on the scheduler's or the forward's path, nothing may wait for the device.

Inside `strict()` torch's own check makes every synchronising call of its an error (`.item()`, blocking
copies), and what that check does not see raises as well: synchronising the device, a stream or an event,
and asking an event again and again whether it happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

ASKED_AT_MOST = 2
"""Times that one event may be asked in one section: to count something, not to wait."""

_WAITS = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
_ERROR, _OFF = 2, 0

_inside = False
_relaxed = False
_asked: Counter[int] = Counter()


class Waited(RuntimeError):
    """Code of ours waited for the device."""


class _Section:
    """The scope of code of ours. Not a generator: it is entered in what is timed."""

    def __enter__(self) -> None:
        global _inside
        if _relaxed:
            return
        _inside = True
        _asked.clear()
        torch._C._cuda_set_sync_debug_mode(_ERROR)

    def __exit__(self, *_: object) -> None:
        global _inside
        if _inside:
            torch._C._cuda_set_sync_debug_mode(_OFF)
            _inside = False


_section = _Section()


def strict() -> _Section:
    """`with strict():` is the scope of code of ours. Not to be nested."""
    return _section


@contextmanager
def relaxed() -> Iterator[None]:
    """`strict()` allows everything meanwhile: for the debug checks, which have to wait."""
    global _relaxed
    _relaxed = True
    try:
        yield
    finally:
        _relaxed = False


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run inside `strict()`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with strict():
            return function(*args, **kwargs)

    return call


def install() -> None:
    """Lets the waits that torch's check does not see raise inside `strict()`. Once a process."""
    for owner, name in _WAITS:
        setattr(owner, name, _refusing(getattr(owner, name), name))
    torch.cuda.Event.query = _counting(torch.cuda.Event.query)


def catches_everything() -> bool:
    """Negative control: each kind of wait is noticed."""
    event = torch.cuda.Event()
    event.record()

    def poll() -> None:
        for _ in range(100):
            event.query()

    waits: tuple[Callable[[], Any], ...] = (
        torch.cuda.synchronize,
        torch.cuda.current_stream().synchronize,
        event.synchronize,
        poll,
        torch.ones(1, device="cuda").item,
    )
    return all(_raises(wait) for wait in waits)


def _raises(wait: Callable[[], Any]) -> bool:
    try:
        with strict():
            wait()
    except RuntimeError:
        return True
    return False


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _inside:
            raise Waited(f"{name} was called on the forward's path")
        return original(*args, **kwargs)

    return call


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(event: Any) -> bool:
        if _inside:
            _asked[id(event)] += 1
            if _asked[id(event)] > ASKED_AT_MOST:
                raise Waited("an event was asked again and again on the forward's path")
        return original(event)

    return call
