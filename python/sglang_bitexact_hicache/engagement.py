"""The one gate: does the feature run here, and if not, why not.

No other code asks for the device, the model or the backend. The launcher asks with the ServerArgs
record, while it is resolved; a scheduler asks again with its real KV pool in hand, and follows the
launcher where that has said no.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_bitexact_hicache.options import (
    BACKEND,
    ENV_ALLOW_NON_HIP,
    ENV_BACKEND,
    ENV_FLAG,
    env_flag,
)

logger = logging.getLogger(__name__)

_VERDICT_ATTRIBUTE = "_bitexact_hicache_engaged"


@dataclass(frozen=True)
class Engagement:
    """The gate's answer; true when the feature runs.

    Attributes:
        flag: whether the user switched the feature on.
        reasons: the conditions that do not hold, in words. Empty exactly when it runs.
    """

    flag: bool
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.reasons


def engaged(server_args: Any, kvcache: Any = None) -> Engagement:
    """Whether the feature runs for this configuration.

    Args:
        server_args: a ServerArgs record, during or after resolution.
        kvcache: the device KV pool, where it exists. It then answers for the model and the backend,
            instead of the model's configuration and the environment.
    """
    if not env_flag(ENV_FLAG):
        return Engagement(False, (f"{ENV_FLAG} is not set",))
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_platform

    reasons = _model_reasons(server_args) if kvcache is None else _pool_reasons(kvcache)
    if not resolving_view(server_args).enable_hierarchical_cache:
        reasons.append("HiCache is off (--enable-hierarchical-cache)")
    if not (get_platform().is_hip or env_flag(ENV_ALLOW_NON_HIP)):
        reasons.append(f"this is not ROCm/HIP ({ENV_ALLOW_NON_HIP}=1 lifts this, for tests)")
    return Engagement(True, tuple(reasons))


def _model_reasons(server_args: Any) -> list[str]:
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        model_config_of,
        resolving_view,
    )
    from sglang.srt.configs.model_config import is_deepseek_v4
    from sglang.srt.environ import envs

    hf_config = model_config_of(server_args).hf_config
    if not is_deepseek_v4(hf_config):
        return [f"the model is not DeepSeek-V4 (architectures: {hf_config.architectures})"]
    # The environment and not is_unified_kv_triton(): that asks for HIP as well, which is a condition
    # of its own here.
    reasons = []
    flashmla = envs.SGLANG_HACK_FLASHMLA_BACKEND.get()
    if flashmla != BACKEND:
        reasons.append(f"{ENV_BACKEND} is {flashmla!r} and not {BACKEND!r}")
    backends = attention_backends_of(resolving_view(server_args))
    if backends != ("dsv4", "dsv4"):
        reasons.append(f"the attention backends are {backends} (--attention-backend dsv4)")
    return reasons


def _pool_reasons(kvcache: Any) -> list[str]:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    if not isinstance(kvcache, DeepSeekV4TokenToKVPool):
        return [f"the model is not DeepSeek-V4 (its KV pool is a {type(kvcache).__name__})"]
    if not kvcache._unified_kv:
        return ["the KV pool is not the unified_kv_triton one (SGLANG_HACK_FLASHMLA_BACKEND)"]
    return []


def settle(server_args: Any, kvcache: Callable[[], Any] | None = None) -> Engagement:
    """Asks the gate, warns once if the flag is on in vain, and leaves the verdict on the record.

    `kvcache` gives the device KV pool; it is not called where the record already says no.

    The record is pickled into the schedulers, so that a server warns once and not once a rank. A
    scheduler can only add a no: its pool is the better witness, but what the launcher has not
    checked (refusals.py) must not run.
    """
    carried: Engagement | None = vars(server_args).get(_VERDICT_ATTRIBUTE)
    if carried is not None and not carried:
        return carried
    verdict = engaged(server_args, None if kvcache is None else kvcache())
    if not verdict.flag:
        return verdict
    setattr(server_args, _VERDICT_ATTRIBUTE, verdict)
    if not verdict:
        logger.warning(
            "%s=1 has no effect, SGLang runs as it is without it: %s",
            ENV_FLAG,
            "; ".join(verdict.reasons),
        )
    return verdict
