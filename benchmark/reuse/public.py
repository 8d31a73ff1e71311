"""A public trace given by path, in the format of Mooncake's FAST'25 traces.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one id for each
512 tokens of the prompt; equal ids stand for equal blocks with equal blocks before them). The traces
are in github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache License 2.0); none is kept here.

What such a trace cannot say: what was answered. So answers here are texts of their own, of the
given length, and a prompt that continues an earlier answer shares only what its block ids say: no hit
on a page that decode completed. Blocks of 512 tokens also hide where inside a block prompts part.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from reuse.traces import Segment, Trace, Turn

BLOCK = 512
REQUESTS = 1500
"""Requests read from the file."""

LONGEST = 100_000
"""Longer requests are left out: the device of the replay does not hold them."""

_ANSWERS = 1 << 32
"""Ids of answers begin here, far above the ids of blocks."""


def load(path: Path) -> Trace:
    """The first REQUESTS requests of the file, those that are too long left out, in its order."""
    turns = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, REQUESTS)):
            record = json.loads(line)
            length = record["input_length"]
            if length + record["output_length"] > LONGEST:
                continue
            blocks = record["hash_ids"]
            if not 0 < length <= BLOCK * len(blocks):
                raise ValueError(f"{path}:{number + 1}: {length} tokens in {len(blocks)} blocks")
            prompt = tuple(
                Segment(block + 1, min(BLOCK, length - BLOCK * place))
                for place, block in enumerate(blocks)
                if length > BLOCK * place
            )
            answer = Segment(_ANSWERS + number, max(2, record["output_length"]))
            turns.append(Turn(prompt, answer, None))
    return Trace(path.stem, tuple(turns))
