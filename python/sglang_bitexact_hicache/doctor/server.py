"""Does a running server use the feature, and does it come to something: read from its HTTP interface.

Two of SGLang's routes are read, `/server_info` (`/get_server_info` where there is no such route) and
`/metrics`. Nothing is sent but these requests, and nothing of SGLang or torch is imported.

That the feature runs there is told by its metrics: they exist exactly where it is engaged, from the first
report on. SGLang sets its own gauge of running requests in the same report, so that one without the
others means that the feature is off.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from sglang_bitexact_hicache import release
from sglang_bitexact_hicache.doctor.report import Finding, Section, State
from sglang_bitexact_hicache.exporter import METRICS, PREFIX, Metric, MetricType
from sglang_bitexact_hicache.settings import BACKEND, ENV_BACKEND, ENV_FLAG, SETTINGS

REPORTED = "sglang:num_running_reqs"
"""SGLang's gauge that every report of a scheduler sets."""

INFO_ROUTES = ("/server_info", "/get_server_info")

REASON = "reason"

Values = Mapping[tuple[str, str], float]
"""By (metric, value of its label `reason` or ""), the largest over the ranks that report. (Decisions, and
so counters, are the same on each of them.)"""


class Unreachable(Exception):
    """Nobody answers there, or not as an SGLang server does; the message says what to change."""


def ask(url: str, *, api_key: str | None = None, timeout: float = 10.0) -> list[Section]:
    """What the server at `url` tells of itself."""
    base = url.rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    try:
        info = _info(base, api_key, timeout)
    except Unreachable as error:
        return [_section([Finding("answers", State.UNREACHABLE, base, str(error))])]
    findings = [Finding("answers", State.OK, base), _version(info)]
    if not info.get("enable_metrics"):
        missing = "metrics are off there: start the server with --enable-metrics to be told more"
        findings += [
            Finding("metrics", State.PROBLEM, False, missing, shown=""),
            _engaged_without(info),
        ]
        return [_section(findings), _settings(info)]
    try:
        text = _get(f"{base}/metrics", None, timeout)
    except Unreachable as error:
        findings.append(Finding("metrics", State.UNREACHABLE, None, str(error)))
        return [_section(findings), _settings(info)]
    values, reported = read_metrics(text)
    findings.append(Finding("metrics", State.OK, True))
    if not values:
        findings.append(_not_engaged(info) if reported else _no_report())
        return [_section(findings), _settings(info)]
    findings += [Finding("engaged", State.OK, True), *_health(values)]
    return [_section(findings), _settings(info), _recomputed(values), _counters(values)]


def _section(findings: list[Finding]) -> Section:
    return Section("server", "Server", findings)


# ---- asking


def _info(base: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    for route in INFO_ROUTES:
        try:
            text = _get(base + route, api_key, timeout)
        except _NoRoute:
            continue
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        raise Unreachable(f"{route} is no JSON object: this is no SGLang server")
    raise Unreachable(f"no {' and no '.join(INFO_ROUTES)} there: this is no SGLang server")


class _NoRoute(Unreachable):
    """The server answers 404."""


def _get(url: str, api_key: str | None, timeout: float) -> str:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            body: bytes = reply.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            raise _NoRoute(f"{url} is not there") from None
        if error.code in (401, 403):
            raise Unreachable("the server asks for its key: give --api-key") from None
        raise Unreachable(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError, OverflowError, http.client.HTTPException) as error:
        # A refused connection, a time-out, a name, a port or a URL that is none, no HTTP.
        raise Unreachable(f"no server answers: {getattr(error, 'reason', error)}") from None
    return body.decode(errors="replace")


# ---- what /metrics says


def read_metrics(text: str) -> tuple[Values, bool]:
    """The feature's values, and whether a scheduler has reported at all."""
    from prometheus_client.parser import text_string_to_metric_families

    ours = {name for metric in METRICS for name in _sample_names(metric)}
    values: dict[tuple[str, str], float] = {}
    reported = False
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reported |= sample.name == REPORTED
            if sample.name in ours:
                key = (sample.name, sample.labels.get(REASON, ""))
                values[key] = max(values.get(key, 0.0), sample.value)
    return values, reported


def _sample_names(metric: Metric) -> tuple[str, ...]:
    if metric.type is MetricType.HISTOGRAM:
        return (f"{metric.name}_count", f"{metric.name}_sum")
    return (metric.name,)


def _value(values: Values, name: str, reason: str = "") -> int:
    return int(values.get((PREFIX + name, reason), 0))


def _health(values: Values) -> list[Finding]:
    captured, restored = _value(values, "captured_total"), _value(values, "restored_total")
    if restored:
        restoring = Finding("restored", State.OK, restored, "hits restored")
    else:
        why = (
            "boundaries were captured, but no prompt has come back to one yet"
            if captured
            else "nothing was captured yet: no prompt has filled a page of 256 tokens"
        )
        restoring = Finding("restored", State.NOTE, 0, why)
    verified = _value(values, "checks_verified_total")
    wrong = _value(values, "rejected_total", "check_failed")
    impossible = _value(values, "rejected_total", "restore_impossible")
    used, slots = _value(values, "slots_used"), _value(values, "slots_total")
    share = f"{used:,} of {slots:,} host slots are used" if slots else "no host slots"
    findings = [
        Finding("captured", State.OK, captured, "boundaries captured"),
        restoring,
        _verified(verified, restored),
        _alarm(
            "mismatches", wrong, "restores were found wrong; their requests ended with an error"
        ),
        _alarm("impossible", impossible, "hits had no truth, a bug; requests ended with an error"),
        Finding("pool", State.OK, {"used": used, "slots": slots}, share, shown=""),
    ]
    if _value(values, "storage_closed"):
        closed = "storage is neither read nor written: the weights changed; restart the server"
        findings.append(Finding("storage_closed", State.PROBLEM, True, closed))
    return findings


def _verified(verified: int, restored: int) -> Finding:
    if verified:
        return Finding("verified", State.OK, verified, "restores verified on the device")
    off = "the checks are off there (SGLANG_SWA_DBG_CHECKSUM)" if restored else ""
    return Finding("verified", State.NOTE, 0, off)


def _alarm(key: str, count: int, meaning: str) -> Finding:
    return Finding(key, State.PROBLEM if count else State.OK, count, meaning if count else "")


RECOMPUTES = (
    ("recomputed_tokens_total", "prompt tokens in cached pages without truth, computed again"),
    ("evicted_total", "truths given up"),
    ("rejected_total", "not done"),
    ("storage_refused_total", "prefetches from storage that came to nothing"),
    ("unknown_pages_total", "pages cached without identity; a hit never passes them"),
)
"""Counters that say why prompts were computed again, without PREFIX."""


def _recomputed(values: Values) -> Section:
    findings = []
    for name, meaning in RECOMPUTES:
        for (metric, reason), value in sorted(values.items()):
            if metric == PREFIX + name and value:
                key = f"{name.removesuffix('_total')}{f'.{reason}' if reason else ''}"
                findings.append(Finding(key, State.NOTE, int(value), meaning))
    if not findings:
        findings = [Finding("reasons", State.OK, "none")]
    title = "Why prompts were computed again, since the server started"
    return Section("recomputed", title, findings)


def _counters(values: Values) -> Section:
    findings = []
    for metric in METRICS:
        for name in _sample_names(metric):
            for (found, reason), value in sorted(values.items()):
                if found == name:
                    key = f"{name.removeprefix(PREFIX)}{f'.{reason}' if reason else ''}"
                    number = int(value) if value == int(value) else value
                    findings.append(Finding(key, State.OK, number))
    return Section("counters", "All counters (docs/metrics.md)", findings, counters=True)


# ---- what /server_info says


def _version(info: Mapping[str, Any]) -> Finding:
    found = info.get("version")
    if found == release.SGLANG_VERSION:
        return Finding("sglang_version", State.OK, found)
    needed = f"this package is for SGLang {release.SGLANG_VERSION}"
    return Finding("sglang_version", State.PROBLEM, found, needed)


def _environment(info: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The server's environment, where it shows that (SGLANG_EXPOSE_OWN_ENV_VARS)."""
    for state in info.get("internal_states") or ():
        if isinstance(state, dict) and isinstance(state.get("env_vars"), dict):
            return dict(state["env_vars"])
    return None


def _obstacles(info: Mapping[str, Any]) -> list[str]:
    """What of the server's own account speaks against the feature."""
    found = []
    environment = _environment(info)
    if environment is None:
        found.append(f"was {ENV_FLAG}=1 in its environment?")
    else:
        if environment.get(ENV_FLAG, "0") in ("", "0"):
            found.append(
                f"{ENV_FLAG} is not set there, or the plugin is not loaded (SGLANG_PLUGINS)"
            )
        if environment.get(ENV_BACKEND) != BACKEND:
            found.append(f"{ENV_BACKEND} is {environment.get(ENV_BACKEND)!r} and not {BACKEND!r}")
    if info.get("enable_hierarchical_cache") is False:
        found.append("HiCache is off there (--enable-hierarchical-cache)")
    backend = info.get("attention_backend")
    if backend not in (None, "dsv4"):
        found.append(f"the attention backend is {backend} (--attention-backend dsv4)")
    return found


def _not_engaged(info: Mapping[str, Any]) -> Finding:
    detail = "the feature is off there, SGLang runs as it is without it: " + "; ".join(
        [
            *_obstacles(info),
            "where the switch is on, a warning in the server's log names what is missing",
        ]
    )
    return Finding("engaged", State.PROBLEM, False, detail, shown="")


def _no_report() -> Finding:
    detail = "no scheduler has reported yet: ask again after a request, or 30 s later"
    return Finding("engaged", State.PROBLEM, None, detail)


def _engaged_without(info: Mapping[str, Any]) -> Finding:
    """Whether the feature runs, where there are no metrics to tell."""
    if info.get("enable_hierarchical_cache") is False:
        return _not_engaged(info)
    return Finding("engaged", State.UNKNOWN, None, "; ".join(_obstacles(info)))


def _settings(info: Mapping[str, Any]) -> Section:
    """The feature's settings there, as far as the server shows them."""
    command = _arguments(info.get("launch_command"))
    environment = _environment(info)
    findings = []
    for setting in SETTINGS:
        value: Any
        if setting.argument is not None and setting.argument.name in command:
            value, origin = command[setting.argument.name], "command line"
        elif environment is not None:
            value, origin = environment.get(setting.env), "environment"
        else:
            unseen = "not shown by the server (SGLANG_EXPOSE_OWN_ENV_VARS=1 there shows it)"
            findings.append(Finding(setting.env, State.UNKNOWN, None, unseen))
            continue
        if value is None:
            value, origin = setting.default, "default"
        findings.append(Finding(setting.env, State.OK, value, f"({origin}) {setting.meaning}"))
    return Section("settings", "Settings of the server", findings)


def _arguments(command: Any) -> dict[str, str | bool]:
    """Option -> value of a command line; True where an option stands alone."""
    words = command.split() if isinstance(command, str) else []
    found: dict[str, str | bool] = {}
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        following = words[i + 1] if i + 1 < len(words) else "--"
        if equals:
            found[name] = value
        else:
            found[name] = True if following.startswith("--") else following
    return found
