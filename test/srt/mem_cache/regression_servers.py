"""Servers of other models, asked over HTTP, everything they answer written down.

A tiny Llama, a tiny Gemma 3 (sliding layers) and a tiny Muse Glimmer (sliding layers with a pool of
their own) run on the reference platform's CPU, with SGLang's own torch attention. What several requests
do beside each other is deterministic because they arrive in one message: SGLang hands a batch of token
ids to the scheduler as one, and no product depends on which rows share it. Knows nothing of the plugin.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regression_startup import MODELS
from regression_worlds import World
from startup_fixtures import write_config

from dsv4_reference_platform.launch import Server, ServerError
from dsv4_reference_platform.watchdog import PARENT_VARIABLE

VOCABULARY = 320

ANY_ARGS = (
    "--served-model-name", "tiny",
    "--attention-backend", "torch_native",
    "--skip-tokenizer-init",
    "--random-seed", "1",
    "--enable-cache-report",
)  # fmt: skip


class WorldServer(Server):
    """A server of a world.

    Args:
        world: whose Python runs it.
        model: a name of MODELS.
        folder: where the model's configuration and the log go.
        args: beside what every server here has.
        env: beside the world's.
    """

    def __init__(
        self,
        world: World,
        model: str,
        folder: Path,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        path = write_config(folder / model, MODELS[model])
        super().__init__(
            ["--model-path", str(path), *ANY_ARGS, *args],
            hicache=False,
            log_path=folder / f"server-{len(list(folder.glob('server-*')))}.log",
            start_timeout=600,
        )
        self.argv[0] = str(world.python)
        self.env = world.env({PARENT_VARIABLE: str(os.getpid()), **(env or {})})


class Client:
    """Asks a server and writes down what it answers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.said: dict[str, Any] = {}
        self.counts = {"requests": 0, "device": 0, "host": 0, "storage": 0, "retractions": 0}

    def ask(self, name: str, prompts: Sequence[Sequence[int]], tokens: int, **fields: Any) -> Any:
        """Greedy answers to prompts that arrive together, under this name; they are returned too."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
            **fields,
        }
        if len(prompts) == 1:
            body["input_ids"] = body["input_ids"][0]
        try:
            replies = self.server.post("/generate", body)
        except ServerError as error:
            self.said[name] = [{"error": _no_ids(str(error).splitlines()[0])}]
            return []
        replies = replies if isinstance(replies, list) else [replies]
        self.said[name] = [self._answer(reply) for reply in replies]
        return replies

    def _answer(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        meta = reply["meta_info"]
        self.counts["requests"] += 1
        self.counts["retractions"] += meta.get("num_retractions") or 0
        details = meta.get("cached_tokens_details") or {}
        for tier in ("device", "host", "storage"):
            self.counts[tier] += details.get(tier) or 0
        return {
            "ids": reply.get("output_ids"),
            # Not what tells when, where or as which process it was answered.
            "meta": {name: value for name, value in meta.items() if not _of_the_moment(name)},
            "fields": sorted(meta),
        }

    def call(self, name: str, method: str, path: str, body: Any = None) -> Any:
        """Another route's reply, under this name."""
        try:
            reply = self.server.request(method, path, body)
        except ServerError as error:
            reply = _no_ids(str(error).splitlines()[0])
        self.said[name] = reply
        return reply

    def idle(self) -> None:
        """An answer is sent a moment before its request is over, and its pages are written later."""
        self.server.request("GET", "/health")
        time.sleep(0.5)


_MOMENT = ("latency", "time", "_ts", "throughput", "duration", "rate", "speed")


def _of_the_moment(name: str) -> bool:
    return name in ("id", "weight_version") or any(part in name for part in _MOMENT)


def _no_ids(text: str) -> str:
    return re.sub(r"[0-9a-f]{32}|127\.0\.0\.1:\d+", "…", text)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids, other ones for each seed."""
    choice = random.Random(seed)
    return [choice.randrange(3, VOCABULARY) for _ in range(tokens)]


# ---- what is asked


def reuse(client: Client, page: int) -> None:
    """Cold, again, forked, longer, many at once; chunked; with the log probabilities of the prompt."""
    stem = prompt(1, 9 * page + 11)
    client.ask("cold", [stem], 6)
    client.ask("again", [stem], 6)
    client.ask("fork", [stem[: 5 * page + 3] + prompt(2, 2 * page)], 6)
    client.ask("longer", [stem + prompt(3, 3 * page)], page + 5)
    client.ask("together", [stem[: n * page + n] + prompt(10 + n, page) for n in range(8)], 9)
    client.ask("together again", [stem[: n * page + n] + prompt(10 + n, page) for n in range(8)], 9)
    client.ask("prompt logprobs", [stem[: 3 * page]], 2, logprob_start_len=0)
    client.ask("no room", [prompt(4, 5000)], 2)
    client.ask("namespace", [stem], 3, extra_key="other")
    client.call("flush", "POST", "/flush_cache?timeout=30")
    client.ask("after the flush", [stem], 6)


def sessions(client: Client, page: int) -> None:
    """Turns that append, branch and replace; a streaming session; one that is closed."""
    opened = {"capacity_of_str_len": 4096}
    client.call("open", "POST", "/open_session", {**opened, "session_id": "a"})
    client.call("open twice", "POST", "/open_session", {**opened, "session_id": "a"})
    turns: list[str] = []
    for turn in range(4):
        rid = f"turn-{turn}"
        session = {"id": "a", "rid": turns[-1] if turns else None}
        if turn == 3:
            session = {"id": "a", "rid": turns[0], "offset": page}
        client.ask(
            f"turn {turn}", [prompt(20 + turn, 2 * page)], page, rid=rid, session_params=session
        )
        turns.append(rid)
    session = {"id": "a", "rid": turns[1], "replace": True}
    client.ask("replaced", [prompt(30, page)], 4, rid="replaced", session_params=session)
    client.ask("unknown turn", [prompt(30, page)], 4, session_params={"id": "a", "rid": "nobody"})
    client.call("close", "POST", "/close_session", {"session_id": "a"})
    client.ask("closed", [prompt(30, page)], 4, session_params={"id": "a", "rid": None})
    client.call(
        "open streaming", "POST", "/open_session", {**opened, "session_id": "s", "streaming": True}
    )
    for turn in range(4):
        client.ask(
            f"streaming turn {turn}",
            [prompt(40 + turn, page + 7)],
            page,
            session_params={"id": "s"},
        )
    client.call("close streaming", "POST", "/close_session", {"session_id": "s"})
    client.idle()


def aborted(client: Client, page: int) -> None:
    """A long answer is aborted while it runs; the server goes on. How far it came is not compared."""
    replies: list[Any] = []

    def long_answer() -> None:
        body = {
            "input_ids": prompt(50, 2 * page),
            "sampling_params": {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True},
            "rid": "long",
        }
        try:
            replies.append(
                client.server.post("/generate", body)["meta_info"]["finish_reason"]["type"]
            )
        except ServerError as error:
            replies.append(_no_ids(str(error).splitlines()[0]))

    thread = threading.Thread(target=long_answer)
    thread.start()
    while not replies:
        time.sleep(0.5)
        client.server.post("/abort_request", {"rid": "long"})
    thread.join()
    client.said["aborted"] = replies
    client.idle()
    client.call("flush after the abort", "POST", "/flush_cache?timeout=30")
    client.ask("after the abort", [prompt(50, 2 * page)], 4)


def pressure(client: Client, page: int) -> None:
    """More answers than there is room for: some are retracted."""
    client.ask("pressed", [prompt(60 + n, page + n) for n in range(8)], 4 * page)
    client.ask("pressed again", [prompt(60 + n, page + n) for n in range(8)], 4 * page)
    priorities = [{"priority": n % 3} for n in range(6)]
    for fields in priorities:
        client.ask(f"priority {fields['priority']}", [prompt(70, 2 * page)], 4, **fields)


def tiers(client: Client, page: int) -> None:
    """Prompts that push each other off the device, and come back from host memory."""
    prompts = [prompt(80 + n, 6 * page + n) for n in range(5)]
    for turn in range(2):
        for number, one in enumerate(prompts):
            client.ask(f"turn {turn}, prompt {number}", [one], 5)
            client.idle()
    client.ask("forks", [one[: 4 * page] + prompt(90, page) for one in prompts[:2]], 5)
    client.idle()


def restarted(client: Client, page: int) -> None:
    """The same prompts, on a server that finds them in storage."""
    prompts = [prompt(80 + n, 6 * page + n) for n in range(5)]
    for number, one in enumerate(prompts):
        client.ask(f"prompt {number}", [one], 5)
        client.idle()


Ask = Callable[[Client, int], None]

_TIERS = (
    "--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first",
)  # fmt: skip
_STORAGE = (
    "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """A kind of server, and what is asked of it.

    Attributes:
        model: of MODELS. page: tokens that lengths are counted in.
        args: of the server.
        asks: in order; with storage, each on a server of its own on the same directory.
        needs: what must have happened, of Client.counts; or the scenario shows nothing.
        env: of the server.
    """

    model: str
    page: int
    args: tuple[str, ...]
    asks: tuple[Ask, ...]
    needs: tuple[str, ...] = ("device",)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def storage(self) -> bool:
        """Whether its servers have storage."""
        return "--hicache-storage-backend" in self.args

    def servers(self) -> list[tuple[Ask, ...]]:
        """What each server is asked."""
        return [(ask,) for ask in self.asks] if self.storage else [self.asks]


SCENARIOS = {
    "llama": Scenario(
        "llama", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "4096",
         "--schedule-policy", "lpm", "--enable-streaming-session"),
        (reuse, sessions, aborted),
    ),
    "llama, page 1": Scenario(
        "llama", 32,
        ("--page-size", "1", "--chunked-prefill-size", "96", "--max-total-tokens", "4096",
         "--enable-mixed-chunk", "--disable-overlap-schedule", "--radix-eviction-policy", "lfu"),
        (reuse, aborted),
    ),
    "llama, retraction": Scenario(
        "llama", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "1280",
         "--schedule-conservativeness", "0.01", "--enable-priority-scheduling"),
        (pressure,), ("device", "retractions"),
        # As if no answer were long: more are admitted than there will be room for.
        {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"},
    ),
    "llama, no prefix cache": Scenario(
        "llama", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "4096",
         "--disable-radix-cache"),
        (reuse,), ("requests",),
    ),
    "llama, storage": Scenario(
        "llama", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "1024",
         *_TIERS, *_STORAGE, "--hicache-write-policy", "write_through"),
        (tiers, restarted), ("host", "storage"),
    ),
    "llama, write_back": Scenario(
        "llama", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "1024",
         *_TIERS, "--hicache-write-policy", "write_back"),
        (tiers,), ("host",),
    ),
    "gemma3": Scenario(
        "gemma3", 32,
        ("--page-size", "32", "--chunked-prefill-size", "128", "--max-total-tokens", "2048",
         "--swa-full-tokens-ratio", "0.5", "--enable-streaming-session"),
        (reuse, sessions, aborted),
    ),
    # The pools are equally large because SGLang's torch attention reads the sliding layers' pool at the
    # rows of the full one. What it reads is not what the model means, and the same in both worlds.
    "muse-glimmer, hicache": Scenario(
        "muse-glimmer", 64,
        ("--page-size", "64", "--chunked-prefill-size", "128", "--max-total-tokens", "1024",
         "--swa-full-tokens-ratio", "1.0", *_TIERS, "--hicache-write-policy", "write_through"),
        (tiers,), ("host",),
    ),
}  # fmt: skip
"""By name."""


def transcript(name: str, world: World, folder: Path) -> dict[str, Any]:
    """Runs a scenario's servers, one after the other.

    Returns:
        answers, storage, log and counts; each but the counts is to be compared.

    Raises:
        ServerError: a server did not start.
    """
    scenario = SCENARIOS[name]
    folder.mkdir(parents=True)
    storage = folder / "storage"
    said: dict[str, Any] = {}
    log: set[str] = set()
    counts: dict[str, int] = {}
    for number, asks in enumerate(scenario.servers()):
        env = dict(scenario.env)
        if scenario.storage:
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
        with WorldServer(world, scenario.model, folder, scenario.args, env) as server:
            client = Client(server)
            for ask in asks:
                ask(client, scenario.page)
            client.call("model", "GET", "/get_model_info")
            client.said["server"] = sorted(server.request("GET", "/get_server_info"))
            said.update({f"server {number}: {key}": value for key, value in client.said.items()})
            counts = {key: counts.get(key, 0) + value for key, value in client.counts.items()}
            if scenario.storage:
                said[f"server {number}: storage"] = _stored(storage)
            log |= _shapes(server.log(), folder, world)
    hidden = json.loads(json.dumps(said).replace(str(folder), "FOLDER"))
    return {"answers": hidden, "log": sorted(log), "counts": counts}


def _stored(directory: Path) -> dict[str, str]:
    """The files of storage and what is in them, once they stop growing."""
    seen: dict[str, str] = {}
    while True:
        time.sleep(1.0)
        found = {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            for file in sorted(directory.iterdir())
        }
        if found == seen:
            return found
        seen = found


_PERIODIC = ("Prefill batch", "Decode batch", "INFO:     127.0.0.1", "server_args=", "HTTP/1.1")


def _shapes(log: str, folder: Path, world: World) -> set[str]:
    """The lines of a log without what depends on the run; batches are logged by the clock."""
    lines = set()
    for line in log.splitlines():
        if any(word in line for word in _PERIODIC):
            continue
        line = line.replace(str(folder), "FOLDER").replace(str(world.python.parents[1]), "PREFIX")
        line = re.sub(r"\b[0-9a-f]{32}\b", "RID", line)
        # Memory that another process gave back meanwhile makes a difference negative.
        line = re.sub(r"=-(?=\d)", "=", line)
        lines.add(re.sub(r"\d+(\.\d+)?", "#", line))
    return lines
