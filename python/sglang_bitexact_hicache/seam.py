"""What a seam is: one place where this package meets SGLang. The table of them: seam_table.py.

A seam's handler is imported when the seam is put in place, so this module and the table stay light.
"""

from __future__ import annotations

import contextlib
import enum
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
"""This package, wherever it is."""


class Kind(enum.Enum):
    """How a seam is attached."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    RESOLUTION = "resolution"
    """A wrapper around a step of argument resolution (`register_resolution_hook`)."""
    SUBCLASS = "subclass"
    """A method of a stock class that a class of ours overrides; nothing is patched."""
    CALL = "call"
    """A function that we call although SGLang does not offer it as an interface."""


class When(enum.Enum):
    """From when on a seam is in place."""

    ALWAYS = "always"
    """In every process of SGLang, flag on or off: argument handling only."""
    FLAG = "flag on"
    """In every process of SGLang with the flag on."""
    ENGAGED = "engaged"
    """In a scheduler, once `engaged()` holds."""
    SPECULATING = "with EAGLE"
    """In such a scheduler, where it has a draft."""


HOOKS = (Kind.BEFORE, Kind.AFTER, Kind.AROUND)
"""The kinds that SGLang's HookRegistry applies."""

ATTACHED = (*HOOKS, Kind.RESOLUTION)
"""The kinds that call a handler from a function of SGLang."""


@dataclass(frozen=True)
class Seam:
    """One row of the table.

    Attributes:
        target: dotted name of the stock function or method, where stock defines it.
        kind: how the handler is attached to it.
        handler: "module:function" or "module:Class.method" in this package; for Kind.CALL the
            function that makes the call.
        why: what it is there for.
        parameters: the target's parameter names, all of them, in order.
        when: from when on it is in place.
        caller: who calls the target on HIP in stock SGLang 0.5.23.
    """

    target: str
    kind: Kind
    handler: str
    why: str
    parameters: tuple[str, ...]
    when: When
    caller: str

    @property
    def attribute(self) -> str:
        """The target's last name."""
        return self.target.rpartition(".")[2]

    def load(self) -> Callable[..., Any]:
        """The handler. Raises ImportError or AttributeError where it is missing."""
        module, _, name = self.handler.partition(":")
        return pkgutil.resolve_name(f"{PACKAGE}.{module}:{name}")


def wrapped_values(function: Any) -> Iterator[Any]:
    """Everything that the wrappers around a function close over, outermost first.

    Follows `__wrapped__`, which SGLang's hooks and the in-tree form's points carry, so each is found
    below another plugin's as well.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            # A cell that is not filled yet raises.
            with contextlib.suppress(ValueError):
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
