"""SGLang's own clients, each call a process, and what their output says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from compare.workloads import SEED, Evaluation, Workload


class ClientError(RuntimeError):
    """A client failed, or printed no result; carries the end of its output."""


class Speed(NamedTuple):
    """What bench_serving measured in one pass. Rates in tokens a second, times as named."""

    requests: int
    completed: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    prompt_tok_s: float
    output_tok_s: float
    peak_output_tok_s: float
    tpot_ms: float
    ttft_ms: float


class Score(NamedTuple):
    """What an evaluation found: fractions of 1, and output tokens a second."""

    accuracy: float
    invalid: float | None
    """Answers without a number; None where the client does not say."""
    output_tok_s: float | None


def bench(
    url: str, workload: Workload, scratch: Path, tokenizer: str | None, timeout: float
) -> Speed:
    """Run bench_serving once: one request to warm up, a flush, then the workload.

    Raises:
        ClientError: it failed.
    """
    output = scratch / "bench.jsonl"
    output.unlink(missing_ok=True)
    named = ("--tokenizer", tokenizer) if tokenizer else ()
    printed = _run(
        "sglang.bench_serving",
        (
            *("--backend", "sglang", "--base-url", url, "--seed", SEED, *named, *workload.args),
            *("--flush-cache", "--cache-report", "--disable-tqdm", "--output-file", str(output)),
        ),
        scratch,
        timeout,
    )
    if not output.is_file():
        raise ClientError(f"bench_serving wrote no result:\n{_tail(printed)}")
    return speed_of(json.loads(output.read_text()), workload.requests)


def speed_of(result: Mapping[str, Any], requests: int) -> Speed:
    """A pass, from the line that bench_serving appends to its output file."""
    return Speed(
        requests=requests,
        completed=result["completed"],
        seconds=result["duration"],
        prompt_tokens=result["total_input_tokens"],
        cached_tokens=result["cache_report"]["total_cached_tokens"],
        prompt_tok_s=result["input_throughput"],
        output_tok_s=result["output_throughput"],
        peak_output_tok_s=result["max_output_tokens_per_s"],
        tpot_ms=result["median_tpot_ms"],
        ttft_ms=result["median_ttft_ms"],
    )


def evaluate(url: str, evaluation: Evaluation, scratch: Path, timeout: float) -> Score:
    """Run an evaluation once.

    Raises:
        ClientError: it failed, or printed no score.
    """
    server = urlsplit(url)
    where = ("--host", server.hostname, "--port", str(server.port))
    return score_of(_run(evaluation.module, (*where, *evaluation.args), scratch, timeout))


def score_of(printed: str) -> Score:
    """A score, from what either client prints.

    Raises:
        ClientError: there is none in it.
    """
    accuracy = _number(r"(?:Accuracy|Score)", printed)
    if accuracy is None:
        raise ClientError(f"no accuracy was printed:\n{_tail(printed)}")
    return Score(accuracy, _number("Invalid", printed), _number("Output throughput", printed))


def _number(label: str, printed: str) -> float | None:
    found = re.search(rf"^{label}: ([0-9.]+)", printed, re.MULTILINE)
    return float(found[1]) if found else None


def _run(module: str, args: Sequence[str], scratch: Path, timeout: float) -> str:
    """Everything that `python -m module` printed."""
    home = Path.home()
    env = {
        **os.environ,
        # bench_serving keeps generated prompts in a folder of HOME, under a name that does not say
        # whose vocabulary they are of: those of another model could be sent.
        "HOME": str(scratch),
        "HF_HOME": os.environ.get("HF_HOME", str(home / ".cache" / "huggingface")),
        # The client of the chat API wants one; the server does not look at it.
        "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "EMPTY"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *args],
        cwd=scratch,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise ClientError(f"{module} ended with {done.returncode}:\n{_tail(done.stdout)}")
    return done.stdout


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])
