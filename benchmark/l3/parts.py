"""Parts: a stopwatch on functions, by label: how long each took, with and without the others in it."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock


class Call(NamedTuple):
    """Seconds of one call, with what was inside: of the clock, and of the core that ran it."""

    wall: float
    cpu: float


class Parts:
    """See the module's docstring. Any thread; the functions are put back on exit.

        with Parts() as parts:
            parts.watch(owner, "name", "label")

    Attributes:
        wall, cpu: seconds by label, less what other watched functions took inside.
        calls: each call by label.
        began, ended: `perf_counter` at the first call and after the last.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._thread = threading.local()
        self.reset()

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def reset(self) -> None:
        """Forget what was measured."""
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def watch(self, owner: Any, name: str, label: str | Callable[[], str]) -> None:
        """Measure `owner.name` from now on; a label that is a function is asked at each call."""
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._time(label if isinstance(label, str) else label(), function, args, kwargs)

        self._stack.enter_context(mock.patch.object(owner, name, watched))

    def _time(self, label: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # What the functions that the caller watches took inside it: wall, cpu.
        outer = getattr(self._thread, "inner", None)
        inner = self._thread.inner = [0.0, 0.0]
        begin, start = time.thread_time(), time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            end = time.perf_counter()
            wall, cpu = end - start, time.thread_time() - begin
            self._thread.inner = outer
            if outer is not None:
                outer[0] += wall
                outer[1] += cpu
            self.wall[label] += wall - inner[0]
            self.cpu[label] += cpu - inner[1]
            self.calls[label].append(Call(wall, cpu))
            self.began.setdefault(label, start)
            self.ended[label] = end
