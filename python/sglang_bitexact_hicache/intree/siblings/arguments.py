"""The in-tree form of arguments: the settings are fields of SGLang's `Envs` and of its ServerArgs, beside
their siblings (environ.py, arg_groups/fields/memory.py)."""

from __future__ import annotations

from typing import Any

from sglang_bitexact_hicache.seam import Seam
from sglang_bitexact_hicache.settings import Argument

ARGUMENT_SEAMS: tuple[Seam, ...] = ()
"""None: SGLang declares and carries its own fields."""


def environment_fields() -> type:
    """SGLang's `Envs`."""
    from sglang.srt.environ import Envs

    return Envs


def given(server_args: Any, argument: Argument) -> Any:
    """The value that the command line gave; None where it gave none."""
    value = getattr(server_args, argument.field)
    # A switch that was not given leaves room for its mirror in the environment.
    return None if value is False else value
