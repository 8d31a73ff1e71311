"""The feature's switches and numbers: how they are declared, read, checked and carried.

Four command-line arguments, three environment flags, one environment mirror for each argument (for
users of `sglang.Engine(...)`, which has no command line), one number that only the environment has.
SGLang's ServerArgs is a sealed record, so the arguments' values travel on it as underscore attributes:
those are allowed at any time and survive pickling into the scheduler processes
(`ServerArgs.__reduce__`).

Imports SGLang lazily and no torch: the plugin loads this in every SGLang process, before arguments
are parsed and whether or not the feature is on.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Kind

if TYPE_CHECKING:
    from sglang_bitexact_hicache.sizing import Sizing

ENV_FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
"""The feature's switch, off by default."""

ENV_ALLOW_NON_HIP = "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP"
"""Lets a test platform or an NVIDIA GPU run the same code; in production the gate is ROCm."""

ENV_CHECKSUM = "SGLANG_SWA_DBG_CHECKSUM"
"""Prints three lines for every restore, after re-reading the device rows."""

ALIGNED_ARGUMENT = "--hicache-swa-offload-aligned-prefill"
ENV_ALIGNED = "SGLANG_HICACHE_SWA_OFFLOAD_ALIGNED_PREFILL"

ENV_BACKEND = "SGLANG_HACK_FLASHMLA_BACKEND"
BACKEND = "unified_kv_triton"
"""SGLang's own variable, and the value with which the feature engages."""

STRIDE_ARGUMENT = "--hicache-swa-offload-page-stride"
ENV_STRIDE = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"
TAIL_ARGUMENT = "--hicache-swa-offload-tail-slots"
ENV_TAIL = "SGLANG_HICACHE_SWA_OFFLOAD_TAIL_SLOTS"
POINTS_ARGUMENT = "--hicache-swa-offload-reuse-points"
ENV_POINTS = "SGLANG_HICACHE_SWA_OFFLOAD_REUSE_POINTS"

ENV_ROW_LIMIT = "SGLANG_SWA_HICACHE_STATE_STAGING_PAGES"
"""The most host slots that one request may hold before a tree node owns them (sizing.row_limit)."""

DEFAULT_STRIDE = 1
DEFAULT_POINTS = ",".join(kind.value for kind in Kind if kind in DEFAULT_KINDS)

_DRAM_ATTRIBUTE = "_bitexact_hicache_available_dram"
"""Its name on the ServerArgs record: the launcher's reading of free host memory."""


class Origin(Enum):
    """Where a setting's value comes from."""

    ARGUMENT = "command line"
    ENVIRONMENT = "environment"
    DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """One of the feature's settings.

    Attributes:
        env: its environment variable.
        type: bool, int or str.
        default: its value where neither the command line nor the environment has one; None: a formula.
        meaning: in a few words, the formula of a default included.
        argument: the command-line argument with the same meaning, which wins; None where there is none.
    """

    env: str
    type: type
    default: bool | int | str | None
    meaning: str
    argument: str | None = None

    @property
    def attribute(self) -> str | None:
        """Where the argument's value travels on the ServerArgs record; None where there is none."""
        return self.argument and self.argument.removeprefix("-").replace("-", "_")

    def in_force(self, server_args: Any = None) -> tuple[Any, Origin]:
        """The value that a server with these arguments would run with, and where it comes from.

        Args:
            server_args: a ServerArgs record, None for the environment alone.

        Raises:
            ValueError: a number in the environment is not an integer.
        """
        if server_args is not None and self.attribute is not None:
            carried = vars(server_args).get(self.attribute)
            if carried is not None:
                return carried, Origin.ARGUMENT
        text = os.environ.get(self.env, "").strip()
        if not text:
            return self.default, Origin.DEFAULT
        if self.type is bool:
            return env_flag(self.env), Origin.ENVIRONMENT
        return (_integer(self.env, text) if self.type is int else text), Origin.ENVIRONMENT


SETTINGS: tuple[Setting, ...] = (
    Setting(ENV_FLAG, bool, False, "the feature"),
    Setting(
        ENV_STRIDE, int, DEFAULT_STRIDE, "pages between two boundaries of the grid", STRIDE_ARGUMENT
    ),
    Setting(
        ENV_TAIL,
        int,
        None,
        "host slots off the grid (2 a request row and 1 for every 6 host pages off the grid)",
        TAIL_ARGUMENT,
    ),
    Setting(
        ENV_ALIGNED,
        bool,
        False,
        "chunks end, and prefixes are reused, at whole chunks only",
        ALIGNED_ARGUMENT,
    ),
    Setting(
        ENV_POINTS, str, DEFAULT_POINTS, "which boundaries are worth a host slot", POINTS_ARGUMENT
    ),
    Setting(
        ENV_ROW_LIMIT,
        int,
        None,
        "host slots that one request may hold (the grid of its longest prompt and 1, at most 1.5 times "
        "the slots)",
    ),
    Setting(ENV_CHECKSUM, bool, False, "every restore is verified on the device and logged"),
    Setting(ENV_ALLOW_NON_HIP, bool, False, "the ROCm condition is lifted, for tests"),
)
"""Every setting of the feature."""

BOOLEAN_FLAGS = tuple(setting.env for setting in SETTINGS if setting.type is bool)


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
        value = {setting.env: setting.in_force(server_args)[0] for setting in SETTINGS}
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
    install_env_fields()
    from sglang.srt.environ import envs

    return getattr(envs, name).get()


def env_problem(name: str) -> str | None:
    """What is wrong with a boolean environment flag's value, or None.

    SGLang warns and takes the default, so a typo in the main switch would serve without the feature.
    """
    install_env_fields()
    from sglang.srt.environ import Envs

    text = os.environ.get(name)
    if text is None:
        return None
    try:
        vars(Envs)[name].parse(text)
    except ValueError:
        return f"{name} must be 0 or 1, got {text!r}"
    return None


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


def install_env_fields() -> None:
    """Declares the feature's environment variables on SGLang's `Envs`. Idempotent."""
    from sglang.srt.environ import EnvBool, EnvField, EnvInt, Envs, EnvStr

    makers = {bool: EnvBool, int: EnvInt, str: EnvStr}
    missing = {
        setting.env: makers[setting.type](setting.default)
        for setting in SETTINGS
        if setting.env not in vars(Envs)
    }
    if not missing:
        return
    # `Envs` closes its own namespace with this switch, so that `a = envs.A` is caught.
    allowed, EnvField._allow_set_name = EnvField._allow_set_name, True
    try:
        for name, field in missing.items():
            field.__set_name__(Envs, name)
            setattr(Envs, name, field)
    finally:
        EnvField._allow_set_name = allowed


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on `ServerArgs.add_cli_args`: the feature's arguments."""
    group = parser.add_argument_group("bit-exact SWA HiCache (DeepSeek-V4 unified_kv)")
    # The defaults are None so that an argument that was not given leaves room for its mirror.
    group.add_argument(
        STRIDE_ARGUMENT,
        type=int,
        default=None,
        metavar="PAGES",
        help="Keep the sliding window and the compressor state of every PAGES-th page boundary in "
        f"host memory (default: {DEFAULT_STRIDE}). A larger stride takes less host memory. Only "
        f"with {ENV_FLAG}=1. Environment: {ENV_STRIDE}.",
    )
    group.add_argument(
        TAIL_ARGUMENT,
        type=int,
        default=None,
        metavar="SLOTS",
        help="Host slots for boundaries off the grid, such as the ends of prompts (default: 2 for "
        f"each request row plus 1 for every 6 host pages off the grid). Only with {ENV_FLAG}=1. "
        f"Environment: {ENV_TAIL}.",
    )
    group.add_argument(
        POINTS_ARGUMENT,
        type=str,
        default=None,
        metavar="KINDS",
        help="Which page boundaries are worth a host slot, comma-separated: grid (every PAGES-th), "
        "prompt (the ends of prompts), decode (the newest pages of answers), junction (where prompts "
        "part; a prefill chunk is cut there once), fill (any other, while there is room). Default: "
        f"{DEFAULT_POINTS}. Only with {ENV_FLAG}=1. Environment: {ENV_POINTS}.",
    )
    group.add_argument(
        ALIGNED_ARGUMENT,
        action="store_true",
        default=None,
        help="End prefill chunks at multiples of --chunked-prefill-size only, and reuse prefixes at "
        "multiples of it only, so that a hit computes the rest of a prompt in the same pieces as a "
        "cold run: for kernels whose bits depend on how a prompt is cut. Costs reuse: of a prompt's "
        "last, incomplete piece nothing is kept, nor of answers. Only with "
        f"{ENV_FLAG}=1. Environment: {ENV_ALIGNED}=1.",
    )


def after_from_cli_args(server_args: Any, cls: type, args: argparse.Namespace) -> None:
    """AFTER hook on `ServerArgs.from_cli_args`: puts the arguments' values on the record.

    A parser that was built before the plugins were loaded does not have them.
    """
    given = vars(args)
    for setting in SETTINGS:
        if setting.attribute is not None:
            setattr(server_args, setting.attribute, given.get(setting.attribute[1:]))


def carry_available_dram(server_args: Any, nbytes: int) -> None:
    """Puts the launcher's one reading of free host memory on the record, for every rank of it."""
    setattr(server_args, _DRAM_ATTRIBUTE, nbytes)
