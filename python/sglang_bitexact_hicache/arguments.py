"""The plugin's form of arguments: how the feature's settings are declared to SGLang, and how a command
line's values come back.

SGLang's ServerArgs is a sealed record, so the values travel on it as underscore attributes: those are
allowed at any time and survive pickling into the scheduler processes (`ServerArgs.__reduce__`).

Imports SGLang lazily and no torch: the plugin loads this in every SGLang process, before arguments
are parsed and whether or not the feature is on.
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_bitexact_hicache.seam import Kind, Seam, When
from sglang_bitexact_hicache.settings import SETTINGS, Argument

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"

ARGUMENT_SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_SERVER_ARGS}.add_cli_args",
        Kind.AFTER,
        "arguments:after_add_cli_args",
        "the feature's command-line arguments",
        ("parser",),
        When.ALWAYS,
        "server_args.py:680 prepare_server_args",
    ),
    Seam(
        f"{_SERVER_ARGS}.from_cli_args",
        Kind.AFTER,
        "arguments:after_from_cli_args",
        "their values, on the record that goes to every process",
        ("cls", "args"),
        When.ALWAYS,
        "server_args.py:710 prepare_server_args",
    ),
)
"""The rows of the seam table (seam_table.py) that the arguments need."""


def environment_fields() -> type:
    """SGLang's `Envs`, with the feature's variables declared on it. Idempotent."""
    from sglang.srt.environ import EnvBool, EnvField, EnvInt, Envs, EnvStr

    makers = {bool: EnvBool, int: EnvInt, str: EnvStr}
    missing = {
        setting.env: makers[setting.type](setting.default)
        for setting in SETTINGS
        if setting.env not in vars(Envs)
    }
    if not missing:
        return Envs
    # `Envs` closes its own namespace with this switch, so that `a = envs.A` is caught.
    allowed, EnvField._allow_set_name = EnvField._allow_set_name, True
    try:
        for name, field in missing.items():
            field.__set_name__(Envs, name)
            setattr(Envs, name, field)
    finally:
        EnvField._allow_set_name = allowed
    return Envs


def given(server_args: Any, argument: Argument) -> Any:
    """The value that the command line gave; None where it gave none."""
    return vars(server_args).get(f"_{argument.field}")


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on `ServerArgs.add_cli_args`: the feature's arguments."""
    group = parser.add_argument_group("bit-exact SWA HiCache (DeepSeek-V4 unified_kv)")
    for setting in SETTINGS:
        argument = setting.argument
        if argument is None:
            continue
        # The defaults are None so that an argument that was not given leaves room for its mirror.
        if argument.metavar is None:
            group.add_argument(argument.name, action="store_true", default=None, help=argument.help)
        else:
            group.add_argument(
                argument.name,
                type=setting.type,
                default=None,
                metavar=argument.metavar,
                help=argument.help,
            )


def after_from_cli_args(server_args: Any, cls: type, args: argparse.Namespace) -> None:
    """AFTER hook on `ServerArgs.from_cli_args`: puts the arguments' values on the record.

    A parser that was built before the plugins were loaded does not have them.
    """
    values = vars(args)
    for setting in SETTINGS:
        if setting.argument is not None:
            field = setting.argument.field
            setattr(server_args, f"_{field}", values.get(field))
