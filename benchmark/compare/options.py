"""The command line, and the sizes that it stands for.

Pure: nothing is started or read here but the arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

ARM_KEYS = ("off", "python", "dev", "checked")
WORKLOADS = ("shared", "random", "decode", "gsm8k", "thinking")


@dataclass(frozen=True)
class Sizes:
    """How much is sent in one pass. Lengths in tokens.

    Attributes:
        repeats: passes of each speed workload; an evaluation is run once.
        prompt, groups, per_group, output, concurrency: of the shared-prefix workload.
        random_prompts, random_prompt, random_output: of the workload without shared prefixes, all
            of them at once.
        decode_batches, decode_prompt, decode_output: of the decode workload, one pass a batch size.
        shots, questions, parallel, answer, thinking_answer: of the evaluations.
    """

    repeats: int
    prompt: int
    groups: int
    per_group: int
    output: int
    concurrency: int
    random_prompts: int
    random_prompt: int
    random_output: int
    decode_batches: tuple[int, ...]
    decode_prompt: int
    decode_output: int
    shots: int
    questions: int
    parallel: int
    answer: int
    thinking_answer: int


SIZES = {
    # Two cores and a tiny model: minutes.
    "small": Sizes(
        repeats=2,
        prompt=1280, groups=2, per_group=3, output=8, concurrency=2,
        random_prompts=3, random_prompt=1024, random_output=8,
        decode_batches=(4,), decode_prompt=320, decode_output=24,
        shots=6, questions=8, parallel=2, answer=16, thinking_answer=16,
    ),
    # The numbers of the request, as far as it gives them.
    "request": Sizes(
        repeats=3,
        prompt=50_000, groups=8, per_group=8, output=200, concurrency=64,
        random_prompts=64, random_prompt=50_000, random_output=200,
        decode_batches=(32, 48, 64), decode_prompt=2_048, decode_output=512,
        shots=8, questions=1_319, parallel=256, answer=512, thinking_answer=8_192,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        arms: keys of the arms to measure now.
        urls: of running servers, by arm; empty where this program starts them.
        command: starts a server in any arm; empty: the reference platform's.
        merge: results of earlier calls, whose arms join the table.
        tokenizer: None: the one that the server names.
    """

    arms: tuple[str, ...]
    urls: dict[str, str]
    command: tuple[str, ...]
    workloads: tuple[str, ...]
    shares: tuple[float, ...]
    sizes: Sizes
    tokenizer: str | None
    gsm8k_data: Path | None
    random_data: Path | None
    json: Path | None
    merge: tuple[Path, ...]
    logs: Path | None
    start_timeout: float
    client_timeout: float


def parse(argv: Sequence[str], description: str) -> Options:
    """The options of a command line.

    Raises:
        SystemExit: with a message on stderr, where it makes no sense.
    """
    argv, command = _split(argv)
    parser = argparse.ArgumentParser(
        prog="compare_arms.py",
        description=description,
        usage="%(prog)s [options] [-- python3 -m sglang.launch_server ... --enable-metrics]",
    )
    _add_arguments(parser)
    given = parser.parse_args(argv)
    urls = {key: given.urls[key].rstrip("/") for key in ARM_KEYS if given.urls.get(key) is not None}
    _check(parser, given, urls, command)
    sizes = replace(
        SIZES[given.sizes],
        **{
            name: getattr(given, name)
            for name in ("repeats", "prompt", "concurrency", "questions")
            if getattr(given, name) is not None
        },
    )
    # With results to merge and nothing else said, only the table is printed.
    default = () if given.merge and not command else ARM_KEYS[:3]
    return Options(
        arms=tuple(urls or given.arms or default),
        urls=urls,
        command=tuple(command),
        workloads=tuple(given.workloads),
        shares=tuple(given.shares),
        sizes=sizes,
        tokenizer=given.tokenizer,
        gsm8k_data=given.gsm8k_data,
        random_data=given.random_data,
        json=given.json,
        merge=tuple(given.merge),
        logs=given.logs,
        start_timeout=given.start_timeout,
        client_timeout=given.client_timeout,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our arguments, the server's command): what stands before and behind "--"."""
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


class _ArmUrl(argparse.Action):
    """Collects --ARM-url options into one dictionary."""

    def __call__(self, _parser, namespace, value, option_string=None):
        namespace.urls[option_string.removeprefix("--").removesuffix("-url")] = value


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(urls={})
    servers = parser.add_argument_group("servers (default: the CPU reference platform's, per arm)")
    for key in ARM_KEYS:
        servers.add_argument(
            f"--{key}-url", action=_ArmUrl, dest="urls", metavar="http://HOST:PORT",
            help=f"a running server of the arm {key!r}; nothing is started then",
        )  # fmt: skip
    servers.add_argument(
        "--arms", nargs="+", choices=ARM_KEYS, help="which arms to start (off python dev)"
    )
    servers.add_argument("--start-timeout", type=float, default=1800, metavar="SECONDS")
    what = parser.add_argument_group("what is sent")
    what.add_argument("--sizes", choices=sorted(SIZES), default="small", help="(%(default)s)")
    what.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    what.add_argument(
        "--shares", nargs="+", type=float, default=(0.6, 0.8), metavar="SHARE",
        help="parts of a prompt that others share (0.6 0.8)",
    )  # fmt: skip
    for name in ("repeats", "prompt", "concurrency", "questions"):
        what.add_argument(f"--{name}", type=int, metavar="N", help="instead of that of --sizes")
    what.add_argument("--tokenizer", help="path of one, where the server's is not readable here")
    what.add_argument("--gsm8k-data", type=Path, help="test.jsonl of GSM8K (a tiny made-up one)")
    what.add_argument("--random-data", type=Path, help="ShareGPT's JSON (a tiny made-up one)")
    what.add_argument("--client-timeout", type=float, default=7200, metavar="SECONDS")
    results = parser.add_argument_group("results")
    results.add_argument("--json", type=Path, metavar="FILE", help="write every pass to FILE")
    results.add_argument(
        "--merge", type=Path, nargs="+", default=(), metavar="FILE",
        help="add the arms of earlier --json files to the table",
    )  # fmt: skip
    results.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of servers")


def _check(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    urls: dict[str, str],
    command: Sequence[str],
) -> None:
    if urls and command:
        parser.error("either running servers (--ARM-url) or a command to start them, not both")
    if urls and given.arms:
        parser.error("--arms is for servers that are started here; with --ARM-url leave it out")
    for key, url in urls.items():
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path:
            parser.error(f"--{key}-url {url!r}: it must be http://HOST:PORT")
    if len(set(urls.values())) < len(urls):
        parser.error("two arms have the same url: the arms are different servers")
    if command and "--enable-metrics" not in command:
        parser.error("the server's command needs --enable-metrics: the restores are counted there")
    for share in given.shares:
        if not 0 < share < 1:
            parser.error(f"--shares {share}: a share is between 0 and 1")
    for name in ("repeats", "prompt", "concurrency", "questions"):
        value = getattr(given, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: it must be positive")
    for name in ("gsm8k_data", "random_data"):
        path = getattr(given, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name.replace('_', '-')} {path}: no such file")
    for path in given.merge:
        if not path.is_file():
            parser.error(f"--merge {path}: no such file")
