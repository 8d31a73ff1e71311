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

from sglang_bitexact_hicache.options import env_flag
from sglang_bitexact_hicache.settings import BACKEND, ENV_ALLOW_NON_HIP, ENV_BACKEND, ENV_FLAG

logger = logging.getLogger(__name__)

_VERDICT_ATTRIBUTE = "_bitexact_hicache_engaged"


@dataclass(frozen=True)
class Condition:
    """One condition of the gate, as it was found.

    Attributes:
        name: a short id.
        needs: what has to be so, in words.
        met: whether it is; None where it cannot be asked.
        reason: why it is not, or cannot be asked; empty where it is met.
    """

    name: str
    needs: str
    met: bool | None
    reason: str = ""


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
    flag = _flag()
    if not flag.met:
        return Engagement(False, (flag.reason,))
    found = _of_model(server_args) if kvcache is None else [_pool(kvcache)]
    found += [_hicache(server_args), _platform()]
    return Engagement(True, tuple(c.reason for c in found if c.met is False))


def conditions(server_args: Any = None) -> list[Condition]:
    """Every condition that `engaged` asks of a configuration, the flag first, each for itself.

    Args:
        server_args: a ServerArgs record; None: what the environment alone can answer.
    """
    return [_flag(), *_of_model(server_args), _hicache(server_args), _platform()]


def _flag() -> Condition:
    met = env_flag(ENV_FLAG)
    return Condition("flag", f"{ENV_FLAG}=1", met, "" if met else f"{ENV_FLAG} is not set")


_UNASKED = "not known without the server's arguments"


def _of_model(server_args: Any) -> list[Condition]:
    if server_args is None:
        return [
            Condition("model", _MODEL, None, _UNASKED),
            _backend(),
            Condition("attention", _ATTENTION, None, _UNASKED),
        ]
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        model_config_of,
        resolving_view,
    )
    from sglang.srt.configs.model_config import is_deepseek_v4

    hf_config = model_config_of(server_args).hf_config
    if not is_deepseek_v4(hf_config):
        other = f"the model is not DeepSeek-V4 (architectures: {hf_config.architectures})"
        return [
            Condition("model", _MODEL, False, other),
            Condition("backend", _BACKEND, None, "asked of DeepSeek-V4 only"),
            Condition("attention", _ATTENTION, None, "asked of DeepSeek-V4 only"),
        ]
    backends = attention_backends_of(resolving_view(server_args))
    met = backends == ("dsv4", "dsv4")
    reason = "" if met else f"the attention backends are {backends} (--attention-backend dsv4)"
    return [
        Condition("model", _MODEL, True),
        _backend(),
        Condition("attention", _ATTENTION, met, reason),
    ]


_MODEL = "the model is DeepSeek-V4"
_ATTENTION = "the attention backends are dsv4"
_BACKEND = f"{ENV_BACKEND}={BACKEND}"


def _backend() -> Condition:
    from sglang.srt.environ import envs

    # The environment and not is_unified_kv_triton(): that asks for HIP as well, which is a condition
    # of its own here.
    found = envs.SGLANG_HACK_FLASHMLA_BACKEND.get()
    met = found == BACKEND
    reason = "" if met else f"{ENV_BACKEND} is {found!r} and not {BACKEND!r}"
    return Condition("backend", _BACKEND, met, reason)


def _pool(kvcache: Any) -> Condition:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    reason = ""
    if not isinstance(kvcache, DeepSeekV4TokenToKVPool):
        reason = f"the model is not DeepSeek-V4 (its KV pool is a {type(kvcache).__name__})"
    elif not kvcache._unified_kv:
        reason = f"the KV pool is not the {BACKEND} one ({ENV_BACKEND})"
    return Condition("pool", "the KV pool is that of unified_kv", not reason, reason)


def _hicache(server_args: Any) -> Condition:
    needs = "HiCache is on"
    if server_args is None:
        return Condition("hicache", needs, None, _UNASKED)
    from sglang.srt.arg_groups.overrides import resolving_view

    met = bool(resolving_view(server_args).enable_hierarchical_cache)
    reason = "" if met else "HiCache is off (--enable-hierarchical-cache)"
    return Condition("hicache", needs, met, reason)


def _platform() -> Condition:
    from sglang.srt.runtime_context import get_platform

    needs = "ROCm/HIP"
    if get_platform().is_hip:
        return Condition("platform", needs, True)
    if env_flag(ENV_ALLOW_NON_HIP):
        return Condition("platform", f"{needs}, lifted by {ENV_ALLOW_NON_HIP}=1", True)
    reason = f"this is not ROCm/HIP ({ENV_ALLOW_NON_HIP}=1 lifts this, for tests)"
    return Condition("platform", needs, False, reason)


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
