"""Notes every call by which a runtime would make the host wait for the device.

On a CPU nothing is asynchronous, so the calls are noted where they are made: whatever reads a value of
a tensor (`item`, `tolist`, a truth value, `nonzero`, a mask as an index, ...) or waits for an event or
a lane on the calling thread would synchronise a GPU. Only what the runtime itself does is watched, in
the thread of the scheduler: its part of a forward, its hooks, admission, release. Waiting on an event
by a stream (`Event.wait`) is how it is meant to be.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_bitexact_hicache import transfer

READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero")
WATCHED = ("admit", "forget", "gather_window", "gather_state", "settle")
ATEN = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2"}


class SyncWatch:
    """Attributes: `noted`, where such calls were made; `watched`, how often each method ran."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._thread = threading.get_ident()
        self._inside = False
        self.noted: list[str] = []
        self.watched: Counter[str] = Counter()

    def note(self, what: str) -> None:
        """Such a call was made."""
        if self._inside and threading.get_ident() == self._thread:
            caller = traceback.extract_stack(limit=4)[0]
            self.noted.append(f"{what} from {caller.name}:{caller.lineno}")

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        self.watched[name] += 1
        before, self._inside = self._inside, True
        try:
            with _Dispatched(self):
                yield
        finally:
            self._inside = before

    @contextmanager
    def on(self) -> Iterator[SyncWatch]:
        """Watch while the context lasts."""
        with ExitStack() as stack:
            for name in READS:
                self._tap(stack, torch.Tensor, name)
            self._tap(stack, torch.cuda, "synchronize")
            for kind in (transfer._FutureEvent, transfer._DeviceEvent, transfer._Happened):
                self._tap(stack, kind, "synchronize")
            for lane in (transfer.ThreadLane, transfer.StreamLane):
                self._tap(stack, lane, "drain")
            for name in WATCHED:
                stack.enter_context(
                    mock.patch.object(self._runtime, name, self._watched_method(name))
                )
            stack.enter_context(mock.patch.object(self._runtime, "forward", self._forward()))
            yield self

    def _tap(self, stack: ExitStack, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, tapped))

    def _watched_method(self, name: str) -> Callable[..., Any]:
        method = getattr(self._runtime, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._watching(name):
                return method(*args, **kwargs)

        return watched

    def _forward(self) -> Callable[..., Any]:
        forward = self._runtime.forward

        @contextmanager
        def watched(batch: Any) -> Iterator[Any]:
            scope = forward(batch)
            with self._watching("before a forward"):
                active = scope.__enter__()
            try:
                yield active
            except BaseException as error:
                if not scope.__exit__(type(error), error, error.__traceback__):
                    raise
            else:
                with self._watching("after a forward"):
                    scope.__exit__(None, None, None)

        return watched


class _Dispatched(TorchDispatchMode):
    """What reaches the dispatcher without going through a method of Tensor."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for argument in args
            if isinstance(argument, (list, tuple))
            for index in argument
        )
        if masks or name in ATEN:
            self._watch.note(f"aten::{name}")
        return func(*args, **(kwargs or {}))
