"""Would the feature run, here and with these server flags: its settings, the gate, the refusals.

Server flags are parsed and resolved by SGLang itself, with the feature's switch off for that moment:
with it on a refusal would end the resolution, and a report names all of them beside what SGLang says.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any
from unittest import mock

from sglang_bitexact_hicache import engagement, refusals
from sglang_bitexact_hicache.doctor.report import Finding, Section, State
from sglang_bitexact_hicache.options import env_problem, in_force
from sglang_bitexact_hicache.settings import ENV_FLAG, SETTINGS, Setting


class Unresolved(Exception):
    """SGLang does not accept the server flags, here and now; the message is SGLang's."""


def resolve(flags: Sequence[str]) -> Any:
    """The ServerArgs record that SGLang makes of a server's command line.

    The hooks of the feature's arguments must be installed.

    Raises:
        Unresolved: SGLang refuses them, or they cannot be resolved on this machine.
        SystemExit: status 2, a flag that SGLang does not know; it has printed why.
    """
    from sglang.srt.server_args import prepare_server_args

    with mock.patch.dict(os.environ, {ENV_FLAG: "0"}):
        try:
            record = prepare_server_args(list(flags))
            record.resolve_once()
        except Exception as error:
            # Whatever it is, it ends a server as well. Some of SGLang's assertions say nothing.
            said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            raise Unresolved(f"{type(error).__name__}: {said}") from error
    return record


def switched_on() -> bool:
    """Whether the environment switches the feature on, without SGLang. What cannot be read counts: a
    server refuses it."""
    return os.environ.get(ENV_FLAG, "").strip().lower() not in ("", "0", "false", "no", "n")


def settings(record: Any = None, *, source_only: bool = False) -> Section:
    """Every setting, its value and where that comes from.

    Args:
        record: a ServerArgs record, or None for the environment alone.
        source_only: SGLang must not be imported, so text stays as it is.
    """
    findings = []
    for setting in SETTINGS:
        raw = os.environ.get(setting.env)
        if source_only and raw is not None:
            findings.append(Finding(setting.env, State.OK, raw, _meaning(setting, "environment")))
            continue
        try:
            problem = env_problem(setting.env) if setting.type is bool and not source_only else None
            value, origin = in_force(setting, record)
        except ValueError as error:
            problem, value, origin = str(error), raw, None
        if problem is not None or origin is None:
            findings.append(Finding(setting.env, State.PROBLEM, raw, problem or ""))
        else:
            findings.append(Finding(setting.env, State.OK, value, _meaning(setting, origin.value)))
    return Section("settings", "Settings", findings)


def _meaning(setting: Setting, origin: str) -> str:
    also = f"; {setting.argument.name}" if setting.argument else ""
    return f"({origin}{also}): {setting.meaning}"


def gate(record: Any = None) -> Section:
    """Each condition of the gate.

    One that does not hold is a problem where someone asks for the feature: with server flags, or with the
    switch on here. The switch itself is never one: it is off by default.
    """
    asked = record is not None or switched_on()
    findings = []
    for condition in engagement.conditions(record):
        if condition.met is None:
            state = State.UNKNOWN
        elif condition.met:
            state = State.OK
        else:
            state = State.PROBLEM if asked and condition.name != "flag" else State.NOTE
        detail = f"{condition.needs}? {condition.reason}" if condition.reason else condition.needs
        findings.append(Finding(condition.name, state, condition.met, detail, shown=""))
    return Section("gate", "Gate: the feature runs where all of these hold", findings)


def refused(record: Any) -> Section:
    """Each rule that refuses these flags, where the model is one that the rules are for."""
    title = "Refusals: what the feature would refuse of these flags"
    if any(c.name == "model" and not c.met for c in engagement.conditions(record)):
        detail = "asked of DeepSeek-V4 only"
        return Section("refusals", title, [Finding("rules", State.UNKNOWN, None, detail)])
    try:
        startup = refusals.Startup.of_record(record)
    except ValueError as error:
        return Section("refusals", title, [Finding("rules", State.PROBLEM, None, str(error))])
    found = [
        Finding(rule.name, State.PROBLEM, None, rule.message(startup))
        for rule in refusals.refused(startup)
    ]
    count = f"{len(refusals.RULES)} rules"
    return Section("refusals", title, found or [Finding("rules", State.OK, "none", f"of {count}")])
