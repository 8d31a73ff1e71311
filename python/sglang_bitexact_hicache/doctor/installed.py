"""Does this package fit the SGLang that is installed here, and will SGLang load it?"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, entry_points, version

from sglang_bitexact_hicache import attach, release, seam_checks
from sglang_bitexact_hicache import seam_table as table
from sglang_bitexact_hicache.doctor.report import Finding, Section, State
from sglang_bitexact_hicache.seam import When

DISTRIBUTION = "sglang-bitexact-hicache"
GROUP = "sglang.srt.plugins"
ENV_PLUGINS = "SGLANG_PLUGINS"
"""SGLang's own variable: the plugins to load, by name, comma-separated; not set: all."""

_MODULE = "sglang_bitexact_hicache.plugin"
_NOT_INSTALLED = "this package is not installed, only found on the path: install it with pip"


def installed(*, flag: bool) -> Section:
    """Versions, the entry point, and whether SGLang would load it. Imports nothing of SGLang.

    Args:
        flag: whether the feature is switched on here; only then is a plugin that is left out a problem.
    """
    return Section(
        "installed", "Installed", [_own_version(), _sglang_version(), *_entry_point(flag)]
    )


def _own_version() -> Finding:
    try:
        return Finding("package_version", State.OK, version(DISTRIBUTION))
    except PackageNotFoundError:
        return Finding("package_version", State.PROBLEM, None, _NOT_INSTALLED)


def _sglang_version() -> Finding:
    try:
        problem = release.version_problem()
    except ValueError as error:
        return Finding("sglang_version", State.PROBLEM, None, str(error))
    if problem:
        return Finding("sglang_version", State.PROBLEM, release.sglang_version(), problem)
    return Finding("sglang_version", State.OK, release.SGLANG_VERSION)


def _entry_point(flag: bool) -> list[Finding]:
    ours = [e for e in entry_points(group=GROUP) if e.value.partition(":")[0] == _MODULE]
    if not ours:
        return [Finding("entry_point", State.PROBLEM, None, f"missing: {_NOT_INSTALLED}")]
    found = Finding("entry_point", State.OK, f"{ours[0].name} = {ours[0].value}")
    # As SGLang reads it (plugins.load_plugins_by_group).
    only = {name.strip() for name in os.environ.get(ENV_PLUGINS, "").split(",") if name.strip()}
    if not only or ours[0].name in only:
        return [found, Finding("loaded_by_sglang", State.OK, True)]
    left_out = (
        f"{ENV_PLUGINS}={os.environ[ENV_PLUGINS]} leaves it out: SGLang runs as it is without it, "
        f"with the switch on too, and without a warning; add {ours[0].name} to it"
    )
    state = State.PROBLEM if flag else State.NOTE
    return [found, Finding("loaded_by_sglang", state, False, left_out, shown="")]


def seam_table(*, source_only: bool) -> Section:
    """A finding for each seam: SGLang's source has it and, unless `source_only`, it is in place here."""
    findings = []
    for seam in table.SEAMS:
        problem = seam_checks.source_problem(seam)
        if problem is None and not source_only:
            problem = seam_checks.live_problem(seam)
        kind = f"({seam.when.value}, {seam.kind.value})"
        key = seam.target
        if problem is None:
            findings.append(Finding(key, State.OK, "found", kind))
        else:
            findings.append(Finding(key, State.PROBLEM, problem.partition(":")[0], problem))
    return Section("seams", "Seams: where this package meets SGLang", findings)


def install_everything() -> None:
    """Puts every seam in place, as a scheduler does it; other plugins too: one may be in our way."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    attach.install(*When)
