"""The settings as fields of SGLang's: the statements, from the one table of settings."""

from __future__ import annotations

from sglang_bitexact_hicache.intree.source_edits import Fields
from sglang_bitexact_hicache.settings import SETTINGS

_TYPES = {bool: "EnvBool", int: "EnvInt", str: "EnvStr"}


def environment_fields() -> Fields:
    """For environ.py's `Envs`."""
    lines = [
        "# Bit-exact reuse of DeepSeek-V4's sliding windows and compressor states with HiCache."
    ]
    lines += [f"{s.env} = {_TYPES[s.type]}({_literal(s.default)})" for s in SETTINGS]
    return Fields(
        "Envs",
        "SGLANG_ENABLE_HICACHE_SWA_TAIL_ONLY_BACKUP",
        tuple(s.env for s in SETTINGS),
        "\n".join(lines) + "\n",
    )


def argument_fields() -> Fields:
    """For the `Memory` namespace of ServerArgs."""
    statements, names = [], []
    for setting in SETTINGS:
        if setting.argument is not None:
            # No default of its own: an argument that was not given leaves room for its mirror.
            switch = setting.type is bool
            kind = "bool" if switch else f"Optional[{setting.type.__name__}]"
            names.append(setting.argument.field)
            statements.append(
                f"{names[-1]}: A[\n    {kind},\n    {_literal(setting.argument.help)},\n] = "
                f"{False if switch else None}\n"
            )
    return Fields(
        "Memory", "hicache_storage_prefetch_retry_max_attempts", tuple(names), "".join(statements)
    )


def _literal(value: object) -> str:
    """As black writes it."""
    if isinstance(value, str):
        assert '"' not in value
        return f'"{value}"'
    return repr(value)
