"""Start, ask and stop a stock SGLang server on the reference platform.

Used by the demo and by the tests::

    with Server(args=["--chunked-prefill-size", "512"], env={"SGLANG_PLUGINS": "dsv4_reference"}) as s:
        text = s.complete("Once upon a time", max_tokens=8)
        answer = s.generate([5, 6, 7] * 100, max_new_tokens=4)
        print(answer.ids, answer.logprobs, answer.cached_tokens)
        s.flush_cache()

With ``DSV4_REFERENCE_DEVICE=cuda`` in this process's environment, on the NVIDIA GPU (cuda_platform.py).

No SGLang import here: the client side needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dsv4_reference_platform import activation
from dsv4_reference_platform.watchdog import PARENT_VARIABLE

MODEL_PATH = Path(__file__).parent / "model"

# What the unified_kv path asks of the environment when no GPU kernel library is there.
PLATFORM_ENV = {
    "SGLANG_PLATFORM": "dsv4_reference",
    "SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton",
    # Torch formulas where SGLang has one beside its compiled kernel.
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_USE_TOPK_V2": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    # How aiter's fp8 decode splits its work; SGLang would ask the GPU at startup.
    "SGLANG_DSV4_FP8_DECODE_SPLIT_MODEL": "0",
    # A Triton kernel that is not replaced fails at its launch, instead of running in the
    # interpreter a thousand times slower without anyone noticing.
    "TRITON_INTERPRET": "0",
    # Same bits for the same product, wherever the operands lie in memory.
    "MKL_CBWR": "AUTO",
    "OMP_NUM_THREADS": "1",
    # Or SGLang wants a NUMA node for each rank. Cores by rank, for the thread pool of its CPU kernels,
    # which are not here: nothing is bound.
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * 8),
    # No inductor: its compilations, of the helpers of EAGLE for one, take longer than the requests.
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# What the platform needs, beside its device; nothing here is about HiCache or the feature.
PLATFORM_ARGS = (
    "--load-format", "dummy",
    "--attention-backend", "dsv4",
    "--page-size", "256",
    "--dsa-topk-backend", "torch",
    "--mem-fraction-static", "0.3",
    "--skip-server-warmup",
    # An idle scheduler spins otherwise, and takes a core from every other server.
    "--sleep-on-idle",
)  # fmt: skip

# On a GPU, beside the above: the platform has no graph runner.
CUDA_ARGS = ("--disable-cuda-graph",)

# The flags of the request that apply on one rank.
REQUEST_ARGS = (
    "--swa-full-tokens-ratio", "0.1",
    "--enable-cache-report",
    "--enable-hierarchical-cache",
    "--hicache-write-policy", "write_through",
    "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first",
)  # fmt: skip

# The tiny model with a NextN layer (weights.py): other weights, the same with and without EAGLE.
NEXTN_ARGS = ("--json-model-override-args", '{"num_nextn_predict_layers": 1}')

# Beside the above: a chain of three drafts a round.
EAGLE_ARGS = (
    "--speculative-algorithm", "EAGLE",
    "--speculative-num-steps", "3",
    "--speculative-num-draft-tokens", "4",
    "--speculative-eagle-topk", "1",
)  # fmt: skip

# Sizes that keep the pools of the tiny model small; override by passing the flag again.
SIZE_ARGS = (
    "--max-total-tokens", "16384",
    "--max-running-requests", "8",
    "--hicache-ratio", "2",
    "--chunked-prefill-size", "2560",
)  # fmt: skip


def server_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: this process's, the platform's, then ``extra``."""
    return {**os.environ, **PLATFORM_ENV, **(extra or {})}


def server_argv(port: int, args: Sequence[str] = (), *, hicache: bool = True) -> list[str]:
    """The command line of a server on 127.0.0.1.

    Args:
        port: a free port.
        args: flags appended last, so that they override the defaults above.
        hicache: whether to add ``REQUEST_ARGS`` (without it: no host memory tier).
    """
    return [
        sys.executable, "-m", "sglang.launch_server",
        "--model-path", str(MODEL_PATH),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--device", activation.device(),
        *PLATFORM_ARGS,
        *(CUDA_ARGS if activation.device() == "cuda" else ()),
        *SIZE_ARGS,
        *(REQUEST_ARGS if hicache else ()),
        *args,
    ]  # fmt: skip


def held_port() -> socket.socket:
    """A free TCP port on 127.0.0.1, which is given to nobody else while the socket is open.

    A server binds its port half a minute after it was chosen, and meanwhile other processes are started
    that ask the system for free ones. The socket does not listen: who binds the port by its number, and
    allows the address to be reused as servers do, gets it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with held_port() as held:
        return held.getsockname()[1]


class Answer(NamedTuple):
    """What /generate returned for one prompt."""

    ids: list[int]
    """Output token ids."""
    logprobs: list[float]
    """Log probability of each output token."""
    top_logprobs: list[list[tuple[float, int]]]
    """Per output token (log probability, id) of the most likely tokens, if asked for."""
    prompt_logprobs: list[float]
    """Log probability of each prompt token but the first, if asked for."""
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    cached_tokens_details: dict[str, Any] | None
    """Where they came from ({"device": .., "host": ..}), with --enable-cache-report."""
    raw: dict[str, Any]


class ServerError(RuntimeError):
    """The server did not start, died, or answered an error; carries the end of its log."""


class Server:
    """One server process group, started on entry and stopped on exit.

    Args:
        args: extra command line flags (they override the defaults).
        env: extra environment variables.
        hicache: whether the request's HiCache flags are added.
        log_path: where stdout and stderr go; a new temporary file when left out.
        start_timeout: seconds to wait for /health.

    Attributes:
        port, pid, log_path, boot_seconds: known once started.
        headers: of each request, beside its type.
    """

    def __init__(
        self,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        hicache: bool = True,
        log_path: str | os.PathLike[str] | None = None,
        start_timeout: float = 240.0,
    ) -> None:
        held = held_port()
        weakref.finalize(self, held.close)
        self.port = held.getsockname()[1]
        self.headers: dict[str, str] = {}
        self.argv = server_argv(self.port, args, hicache=hicache)
        self.env = server_env({PARENT_VARIABLE: str(os.getpid()), **(env or {})})
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix="dsv4-reference-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        self.start_timeout = start_timeout
        self.boot_seconds: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the launcher, which is also the id of the process group."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the launcher, None while it runs or before it started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> Server:
        """Start the process and return once it is healthy.

        Raises:
            ServerError: it exited or was not healthy within ``start_timeout``; it is stopped.
        """
        begin = time.monotonic()
        with self.open_log() as log:
            self._process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: stop() reaches scheduler and detokenizer as one group.
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(begin + self.start_timeout)
        except BaseException:
            self.stop()
            raise
        self.boot_seconds = time.monotonic() - begin
        return self

    def open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | int]:
        """Where the processes write their output while they are started."""
        return open(self.log_path, "wb")

    def _wait_until_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"server exited with {self.returncode}\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.25)
        raise ServerError(f"not healthy after {self.start_timeout:.0f} s\n{self.log_tail()}")

    def stop(self, grace: float = 10.0) -> None:
        """Stop the server: TERM to the launcher, then KILL for what is left of its group.

        Args:
            grace: seconds that the launcher has to stop its children in an orderly way.
        """
        if self._process is None:
            return
        group = self._process.pid
        # Only the launcher: a child that dies first makes it report a crash and wait.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace)
        # Children may outlive the launcher; the group id stays valid until the last is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        """Everything that the server wrote so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """CPU time (user + system) used so far by the processes of this server's group."""
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in self._stats().values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def processes(self) -> list[int]:
        """Ids of the processes of this server's group."""
        return list(self._stats())

    def _stats(self) -> dict[int, list[str]]:
        """By id: the fields of /proc/ID/stat behind the name."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.pid:
                found[int(stat.parent.name)] = fields
        return found

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """``request`` of ``body``, or of an empty one."""
        return self.request("POST", path, body or {}, timeout)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> Any:
        """Send ``body`` as JSON; returns the decoded JSON reply (or text if it is not JSON).

        Raises:
            ServerError: the server answered with an error status or not at all.
        """
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self.headers},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code} {error.read().decode()[:2000]}") from error
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"{path}: {error}\n{self.log_tail()}") from error
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 4,
        *,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        rid: str | None = None,
        dp_rank: int | None = None,
        timeout: float = 600.0,
    ) -> Answer:
        """Greedy /generate of one token-id prompt, with log probabilities of the output.

        Args:
            input_ids: the prompt; a byte ``b`` of text is the id ``b + 3``.
            max_new_tokens: how many tokens to generate; the end token does not stop it.
            top_logprobs: how many of the most likely tokens to report per output token.
            prompt_logprobs: report the prompt's log probabilities too (no prefix is reused then).
            rid: request id, for the server's log.
            dp_rank: the replica, or data parallel rank, that is to answer; the server's choice if None.
            timeout: seconds to wait for the answer.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": top_logprobs,
        }
        if prompt_logprobs:
            body["logprob_start_len"] = 0
        if rid is not None:
            body["rid"] = rid
        if dp_rank is not None:
            body["routed_dp_rank"] = dp_rank
        return _answer(self.post("/generate", body, timeout))

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 4, *, timeout: float = 600.0
    ) -> list[Answer]:
        """Like ``generate`` for several prompts that arrive in one request."""
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        return [_answer(reply) for reply in self.post("/generate", body, timeout)]

    def complete(self, prompt: str, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """/v1/completions of a text prompt at temperature 0; returns the whole reply."""
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/completions", {**body, **fields})

    def flush_cache(self, timeout: float = 60.0) -> None:
        """Empty the prefix cache (device and host), as soon as the server is idle: an answer is sent
        a moment before its request is over.

        Raises:
            ServerError: requests were still running after half of `timeout` seconds.
        """
        self.post(f"/flush_cache?timeout={timeout / 2}", timeout=timeout)


def _answer(reply: Mapping[str, Any]) -> Answer:
    meta = reply["meta_info"]
    top = meta.get("output_top_logprobs") or []
    return Answer(
        ids=reply.get("output_ids", []),
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs", [])],
        top_logprobs=[[(entry[0], entry[1]) for entry in step or []] for step in top],
        prompt_logprobs=[
            entry[0] for entry in meta.get("input_token_logprobs") or [] if entry[0] is not None
        ],
        cached_tokens=meta.get("cached_tokens", 0),
        cached_tokens_details=meta.get("cached_tokens_details"),
        raw=dict(reply),
    )
