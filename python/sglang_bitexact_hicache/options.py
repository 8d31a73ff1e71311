"""The feature's switches and numbers: how they are read, checked and carried.

Imports SGLang lazily and no torch: this is loaded in every SGLang process, before arguments are parsed
and whether or not the feature is on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang_bitexact_hicache.arguments import environment_fields, given
from sglang_bitexact_hicache.policy import Kind
from sglang_bitexact_hicache.settings import (
    BOOLEAN_FLAGS,
    DEFAULT_POINTS,
    DEFAULT_STRIDE,
    ENV_ALIGNED,
    ENV_CHECKSUM,
    ENV_FLAG,
    ENV_POINTS,
    ENV_ROW_LIMIT,
    ENV_STRIDE,
    ENV_TAIL,
    POINTS_ARGUMENT,
    SETTINGS,
    Setting,
)

if TYPE_CHECKING:
    from sglang_bitexact_hicache.sizing import Sizing

_DRAM_ATTRIBUTE = "_bitexact_hicache_available_dram"
"""Its name on the ServerArgs record: the launcher's reading of free host memory. It is sealed, but
underscore attributes are allowed at any time and survive pickling into the scheduler processes."""


class Origin(Enum):
    """Where a setting's value comes from."""

    ARGUMENT = "command line"
    ENVIRONMENT = "environment"
    DEFAULT = "default"


def in_force(setting: Setting, server_args: Any = None) -> tuple[Any, Origin]:
    """The value that a server with these arguments would run with, and where it comes from.

    Args:
        setting: one of SETTINGS.
        server_args: a ServerArgs record, None for the environment alone.

    Raises:
        ValueError: a number in the environment is not an integer.
    """
    if server_args is not None and setting.argument is not None:
        value = given(server_args, setting.argument)
        if value is not None:
            return value, Origin.ARGUMENT
    text = os.environ.get(setting.env, "").strip()
    if not text:
        return setting.default, Origin.DEFAULT
    if setting.type is bool:
        return env_flag(setting.env), Origin.ENVIRONMENT
    return (_integer(setting.env, text) if setting.type is int else text), Origin.ENVIRONMENT


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        stride: a boundary is kept at every `stride`-th page (of 256 tokens).
        tail_slots: host slots on top of the grid's, or None for the default formula (sizing.py).
        reuse_points: names of the kinds of boundary to keep, comma-separated (policy.Kind).
        aligned_prefill: chunks end, and hits too, at multiples of the chunk size (aligned.py).
        row_limit: host slots that one request may hold before a tree node owns them, or None for the
            default formula (sizing.py).
        checksum: verify and report every restore.
        available_dram: bytes of host memory that were free when the launcher looked, or None where
            no launcher did (a cache that is built outside a server).
        sizing: the host pools' size, once it is settled (in a scheduler, before the cache is built).
    """

    stride: int = DEFAULT_STRIDE
    tail_slots: int | None = None
    reuse_points: str = DEFAULT_POINTS
    aligned_prefill: bool = False
    row_limit: int | None = None
    checksum: bool = False
    available_dram: int | None = None
    sizing: Sizing | None = None

    @classmethod
    def of(cls, server_args: Any) -> Options:
        """The options that a ServerArgs record carries, the environment filling what it does not.

        The command line wins over the environment. Values are not judged here (refusals.py does).

        Raises:
            ValueError: a number in the environment is not an integer.
        """
        value = {setting.env: in_force(setting, server_args)[0] for setting in SETTINGS}
        return cls(
            stride=value[ENV_STRIDE],
            tail_slots=value[ENV_TAIL],
            reuse_points=value[ENV_POINTS],
            aligned_prefill=value[ENV_ALIGNED],
            row_limit=value[ENV_ROW_LIMIT],
            checksum=value[ENV_CHECKSUM],
            available_dram=vars(server_args).get(_DRAM_ATTRIBUTE),
        )

    @property
    def planned(self) -> Sizing:
        """The host pools' size. ValueError where it is not settled yet."""
        if self.sizing is None:
            raise ValueError("the size of the host pools is not planned yet")
        return self.sizing

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of boundary to keep.

        Raises:
            ValueError: a name is unknown, or there is none (refusals.py says so at startup).
        """
        names = [name.strip().lower() for name in self.reuse_points.split(",") if name.strip()]
        known = {kind.value: kind for kind in Kind}
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ValueError(f"{POINTS_ARGUMENT} {self.reuse_points!r}: not of {', '.join(known)}")
        return frozenset(known[name] for name in names)


def env_flag(name: str) -> bool:
    """A boolean environment flag, read as SGLang reads its own (`EnvBool`), at call time."""
    environment_fields()
    from sglang.srt.environ import envs

    return getattr(envs, name).get()


def env_problem(name: str) -> str | None:
    """What is wrong with a boolean environment flag's value, or None.

    SGLang warns and takes the default, so a typo in the main switch would serve without the feature.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        vars(environment_fields())[name].parse(text)
    except ValueError:
        return f"{name} must be 0 or 1, got {text!r}"
    return None


def wanted() -> bool:
    """Whether the seams of the switch are to be in place: it is on, or cannot be read, which is refused
    later, where an exception is not swallowed."""
    return env_problem(ENV_FLAG) is not None or env_flag(ENV_FLAG)


def check_env_flags() -> None:
    """Refuse boolean environment flags that cannot be read.

    Raises:
        ValueError: one line for each.
    """
    problems = [p for name in BOOLEAN_FLAGS if (p := env_problem(name)) is not None]
    if problems:
        raise ValueError("; ".join(problems))


def compress_state_dtype() -> str:
    """SGLang's dtype of the compressor states (SGLANG_DSV4_COMPRESS_STATE_DTYPE), by torch's name; a name
    that SGLang does not take, and ends at, as it is."""
    from sglang.srt.environ import envs

    asked = envs.SGLANG_DSV4_COMPRESS_STATE_DTYPE.get().strip().lower()
    return {"fp32": "float32", "bf16": "bfloat16"}.get(asked, asked)


def _integer(name: str, text: str) -> int:
    # Not through EnvInt: that falls back to the default on a typo, and a pool of the wrong size
    # would be the only sign of it.
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def carry_available_dram(server_args: Any, nbytes: int) -> None:
    """Puts the launcher's one reading of free host memory on the record, for every rank of it."""
    setattr(server_args, _DRAM_ATTRIBUTE, nbytes)
