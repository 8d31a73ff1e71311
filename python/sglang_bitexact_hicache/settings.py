"""The feature's settings, as they are called: data alone.

Four command-line arguments, three environment flags, one environment mirror for each argument (for
users of `sglang.Engine(...)`, which has no command line), one number that only the environment has. How
they are declared to SGLang: arguments.py. How they are read: options.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_bitexact_hicache.policy import DEFAULT_KINDS, Kind

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


@dataclass(frozen=True)
class Argument:
    """The command-line argument of a setting.

    Attributes:
        name: with its dashes.
        metavar: what its value is called in the help; None for a switch.
        help: what `--help` says.
    """

    name: str
    metavar: str | None
    help: str

    @property
    def field(self) -> str:
        """Its name as an attribute."""
        return self.name.lstrip("-").replace("-", "_")


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
    argument: Argument | None = None


SETTINGS: tuple[Setting, ...] = (
    Setting(ENV_FLAG, bool, False, "the feature"),
    Setting(
        ENV_STRIDE,
        int,
        DEFAULT_STRIDE,
        "pages between two boundaries of the grid",
        Argument(
            STRIDE_ARGUMENT,
            "N",
            "Keep the sliding window and the compressor state of every N-th page boundary in "
            f"host memory (default: {DEFAULT_STRIDE}). A larger stride takes less host memory. Only "
            f"with {ENV_FLAG}=1. Environment: {ENV_STRIDE}.",
        ),
    ),
    Setting(
        ENV_TAIL,
        int,
        None,
        "host slots off the grid (2 a request row and 1 for every 6 host pages off the grid)",
        Argument(
            TAIL_ARGUMENT,
            "SLOTS",
            "Host slots for boundaries off the grid, such as the ends of prompts (default: 2 for "
            f"each request row plus 1 for every 6 host pages off the grid). Only with {ENV_FLAG}=1. "
            f"Environment: {ENV_TAIL}.",
        ),
    ),
    Setting(
        ENV_ALIGNED,
        bool,
        False,
        "chunks end, and prefixes are reused, at whole chunks only",
        Argument(
            ALIGNED_ARGUMENT,
            None,
            "End prefill chunks at multiples of --chunked-prefill-size only, and reuse prefixes at "
            "multiples of it only, so that a hit computes the rest of a prompt in the same pieces as a "
            "cold run: for kernels whose bits depend on how a prompt is cut. Costs reuse: of a prompt's "
            "last, incomplete piece nothing is kept, nor of answers. Only with "
            f"{ENV_FLAG}=1. Environment: {ENV_ALIGNED}=1.",
        ),
    ),
    Setting(
        ENV_POINTS,
        str,
        DEFAULT_POINTS,
        "which boundaries are worth a host slot",
        Argument(
            POINTS_ARGUMENT,
            "KINDS",
            "Which page boundaries are worth a host slot, comma-separated: grid (every N-th), "
            "prompt (the ends of prompts), decode (the newest pages of answers), junction (where prompts "
            "part; a prefill chunk is cut there once), fill (any other, while there is room). Default: "
            f"{DEFAULT_POINTS}. Only with {ENV_FLAG}=1. Environment: {ENV_POINTS}.",
        ),
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
