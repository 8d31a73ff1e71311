"""`python -m sglang_bitexact_hicache`: the command line, of the doctor and of `intree`.

Exit status: 0 everything fits; 1 there is a problem, or what was asked for is not so (the feature is off
on the server, its metrics are off); 2 the command line is wrong, or the server does not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from sglang_bitexact_hicache.doctor import configuration, installed
from sglang_bitexact_hicache.doctor.report import Finding, Report, Section, State
from sglang_bitexact_hicache.intree import command as intree_command

TIMEOUT = 10.0
"""Seconds that a server has to answer."""

LONGEST_TIMEOUT = 86_400.0

_EPILOG = """\
exit status: 0 everything fits; 1 a problem; 2 the command line is wrong, or the server does not answer

examples:
  doctor                                          does this SGLang fit?
  doctor -- --model-path PATH --hicache-ratio 2   would a server with these flags run with the feature?
  doctor --url http://127.0.0.1:30000             does that server?
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; prints the report and returns the exit status.

    Raises:
        SystemExit: status 2, the command line is wrong; 0 after --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    asked, server_flags = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m sglang_bitexact_hicache")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="does the feature fit this SGLang, these server flags, that server?",
        usage="%(prog)s [--json] [--source-only | -- SERVER FLAGS ...]\n"
        "       %(prog)s [--json] --url URL [--api-key KEY] [--timeout SECONDS]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, with stable keys")
    what = doctor.add_mutually_exclusive_group()
    what.add_argument(
        "--source-only",
        action="store_true",
        help="read SGLang's source files, and neither import SGLang nor install the hooks",
    )
    what.add_argument("--url", help="ask a running server instead of this installation")
    doctor.add_argument("--api-key", metavar="KEY", help="of the server at URL")
    doctor.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help=f"to wait for it ({TIMEOUT:g})"
    )
    intree_command.add_arguments(
        commands.add_parser("intree", help="build the feature into a source checkout of SGLang")
    )
    args = parser.parse_args(asked)
    if args.command == "intree":
        return intree_command.run(args)
    if cut < len(words) and (args.url is not None or args.source_only):
        doctor.error("SERVER FLAGS cannot be given with --url or --source-only")
    if args.url is None and (args.api_key is not None or args.timeout is not None):
        doctor.error("--api-key and --timeout need --url")
    if cut < len(words) and not server_flags:
        doctor.error("no SERVER FLAGS behind --")
    # What SGLang prints while it is imported is not part of the report.
    with contextlib.redirect_stdout(sys.stderr):
        if args.url is not None:
            from sglang_bitexact_hicache.doctor import server

            sections = server.ask(args.url, api_key=args.api_key, timeout=args.timeout or TIMEOUT)
        elif args.source_only:
            sections = _of_source()
        else:
            sections = _of_installation(server_flags)
    report = Report(sections)
    print(report.json() if args.json else report.text())
    return report.status


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < LONGEST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {LONGEST_TIMEOUT:g}")
    return seconds


def _of_source() -> list[Section]:
    return [
        installed.installed(flag=configuration.switched_on()),
        configuration.settings(source_only=True),
        installed.seam_table(source_only=True),
    ]


def _of_installation(server_flags: Sequence[str]) -> list[Section]:
    """Of this installation; with server flags, of a server here with these."""
    here = installed.installed(flag=configuration.switched_on())
    if any(f.key == "sglang_version" and f.state is State.PROBLEM for f in here.findings):
        # Another SGLang, or none: asking it the rest would only raise.
        return [here, configuration.settings(source_only=True)]
    installed.install_everything()
    seams = installed.seam_table(source_only=False)
    if not server_flags:
        return [here, configuration.settings(), configuration.gate(), seams]
    try:
        record = configuration.resolve(server_flags)
    except configuration.Unresolved as error:
        refusal = f"SGLang does not accept these flags on this machine: {error}"
        flags = Section(
            "flags", "Server flags", [Finding("resolved", State.PROBLEM, False, refusal, shown="")]
        )
        return [here, configuration.settings(), configuration.gate(), flags, seams]
    from sglang_bitexact_hicache.doctor import plan

    gate, refused = configuration.gate(record), configuration.refused(record)
    found = [here, configuration.settings(record), gate, refused]
    if all(finding.state is State.OK for finding in refused.findings):
        found += plan.plan(record)
    return [*found, seams]
