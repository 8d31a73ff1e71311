"""What SGLang's clients are asked to send, as their own arguments; and the data that they need.

Nothing is downloaded: where no file is given, a tiny one is made up here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compare.options import Options, Sizes

SEED = "42"
"""Of every pass: the arms and their repeats get the same requests."""


@dataclass(frozen=True)
class Workload:
    """One call of bench_serving.

    Attributes:
        name: in the table.
        requests: how many are sent.
        args: what bench_serving gets beside the server, the seed and the output file.
    """

    name: str
    requests: int
    args: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """One call of a GSM8K client.

    Attributes:
        name: in the table.
        module: of SGLang.
        args: beside the server and the data.
    """

    name: str
    module: str
    args: tuple[str, ...]


def speed(options: Options, scratch: Path) -> Iterator[Workload]:
    """The workloads that were asked for, in the order of the table; made-up data goes to `scratch`."""
    sizes = options.sizes
    if "shared" in options.workloads:
        for share in options.shares:
            yield _shared(
                f"shared prefix {share:g}", sizes.prompt, share, sizes.groups, sizes.per_group,
                sizes.output, sizes.concurrency,
            )  # fmt: skip
    if "decode" in options.workloads:
        for batch in sizes.decode_batches:
            yield _shared(
                f"decode, batch {batch}", sizes.decode_prompt, 0.8, 1, batch,
                sizes.decode_output, batch,
            )  # fmt: skip
    if "random" in options.workloads:
        count = sizes.random_prompts
        data = options.random_data or _conversations(scratch / "conversations.json", count)
        yield Workload(
            "random",
            count,
            (
                *("--dataset-name", "random", "--dataset-path", str(data)),
                *("--random-input-len", str(sizes.random_prompt)),
                *("--random-output-len", str(sizes.random_output)),
                *("--random-range-ratio", "1", "--num-prompts", str(count)),
                *("--max-concurrency", str(count)),
            ),
        )


def _shared(
    name: str, prompt: int, share: float, groups: int, per_group: int, output: int, concurrency: int
) -> Workload:
    """Prompts of token ids: `groups` prefixes, each of them followed by `per_group` other endings."""
    prefix = round(prompt * share)
    return Workload(
        name,
        groups * per_group,
        (
            *("--dataset-name", "generated-shared-prefix", "--tokenize-prompt"),
            *("--gsp-num-groups", str(groups), "--gsp-prompts-per-group", str(per_group)),
            *("--gsp-system-prompt-len", str(prefix)),
            *("--gsp-question-len", str(prompt - prefix)),
            *("--gsp-output-len", str(output)),
            *("--num-prompts", str(groups * per_group), "--max-concurrency", str(concurrency)),
        ),
    )


def evaluations(options: Options, scratch: Path) -> Iterator[Evaluation]:
    """The evaluations that were asked for; made-up data goes to `scratch`."""
    sizes = options.sizes
    shots = ("--num-shots", str(sizes.shots))
    data = str(options.gsm8k_data or _questions(scratch / "questions.jsonl", sizes))
    if "gsm8k" in options.workloads:
        yield Evaluation(
            "gsm8k",
            "sglang.test.few_shot_gsm8k",
            (
                *("--data-path", data, *shots, "--num-questions", str(sizes.questions)),
                *("--parallel", str(sizes.parallel), "--max-new-tokens", str(sizes.answer)),
            ),
        )
    if "thinking" in options.workloads:
        yield Evaluation(
            "gsm8k, thinking",
            "sglang.test.run_eval",
            (
                *("--eval-name", "gsm8k", "--gsm8k-data-path", data, *shots),
                *("--num-examples", str(sizes.questions), "--num-threads", str(sizes.parallel)),
                *("--temperature", "0.0", "--repeat", "1"),
                *("--max-tokens", str(sizes.thinking_answer)),
                # Without it DeepSeek-V4's chat encoding does not think, unless the server's
                # SGLANG_DEFAULT_THINKING says so.
                *("--thinking-mode", "deepseek-v3"),
            ),
        )


def _conversations(path: Path, count: int) -> Path:
    """A file like ShareGPT's: the client repeats each first turn up to the length of a prompt, so no
    two of them may begin alike."""
    rows = [
        {"conversations": [{"value": f"{i} is where text {i} begins. "}, {"value": "Yes."}]}
        for i in range(count)
    ]
    path.write_text(json.dumps(rows))
    return path


def _questions(path: Path, sizes: Sizes) -> Path:
    """A file like GSM8K's, enough for the shots and the questions behind them."""
    with path.open("w") as file:
        for i in range(sizes.shots + sizes.questions):
            pens, more = 3 + i, 4 + 2 * i
            row = {
                "question": f"Ann has {pens} pens and buys {more} more. How many has she now?",
                "answer": f"She has {pens} + {more} = {pens + more} pens.\n#### {pens + more}",
            }
            file.write(json.dumps(row) + "\n")
    return path
