"""Entry point (`sglang.srt.plugins`): SGLang calls `register` in each of its processes.

At that time no argument has been parsed. With the flag off only the handling of arguments and
environment is registered, and nothing that imports torch; with it on, also the two hooks that decide
later whether the feature engages (factory.py).
"""

from __future__ import annotations

from sglang_bitexact_hicache import arguments, attach, options
from sglang_bitexact_hicache.seam import When


def register() -> None:
    """Registers the seams of the first phase; `load_plugins` applies them afterwards.

    SGLang logs and swallows an exception here. `seam_checks.require_live` finds out, where there is still
    a seam that runs; a plugin that could not be imported at all leaves SGLang as it is.
    """
    arguments.environment_fields()
    attach.register(When.ALWAYS)
    if options.wanted():
        attach.register(When.FLAG)
