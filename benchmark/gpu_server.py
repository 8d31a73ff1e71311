"""The whole stock server on one NVIDIA GPU: the demo's rounds, and a load of concurrent requests.

    python benchmark/gpu_server.py [rounds | load] [--logs DIR]

Needs an NVIDIA GPU with nvcc, SGLang 0.5.23 and both distributions of this repository in the
environment; not sgl_kernel, which would not fit every torch. Servers run stock `sglang.launch_server` on
the reference platform's CUDA variant (`dsv4_reference_platform.cuda_platform`): the random 6-layer
DeepSeek-V4 of the tests, SGLang's own Triton kernels of unified_kv and its JIT-compiled compressor,
real streams, overlap scheduling, pinned host memory; what is replaced stands in
`dsv4_reference_platform.install`. Eager forwards: the platform has no graph runner.

1. The JIT modules are compiled side by side (SGLang compiles each at its first use, one by one), while
   the servers start.
2. rounds: demo.py's script and conversation on a server per arm, feature off and on, with
   `--chunked-prefill-size 256`. GPU kernels are not invariant to how a prompt is cut into chunks, so a
   hit can only be compared bit for bit with a cold run where the cuts coincide; with chunks of one page
   they do at every boundary. The on-arm must restore, verify and answer as cold everywhere; the off-arm
   must differ from cold somewhere it reused (the negative control).
3. load: concurrent requests whose prompts share prefixes, in three waves (cold cache; new tails behind
   the same prefixes; second turns), with chunks of 2,048 so that boundaries inside chunks are captured
   too. On three servers, one after the other: off, on, and on with every restore verified.

Exit status 0 only if the rounds are exact, the negative control holds, and under load every restore
was verified and nothing mismatched.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

import demo
from dsv4_reference_platform import activation
from dsv4_reference_platform.launch import Answer, Server, server_env
from dsv4_reference_platform.poke import Poker

ROUND_ARGS = ("--chunked-prefill-size", str(demo.PAGE))
LOAD_ARGS = (
    *("--chunked-prefill-size", "2048"),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "24"),
    *("--hicache-ratio", "2"),
)
LOAD_ARMS = {"off": ("0", "0"), "on": ("1", "0"), "on, verified": ("1", "1")}
"""Arm of the load: (the feature's flag, SGLANG_SWA_DBG_CHECKSUM)."""
GROUPS, PER_GROUP, CONCURRENCY, NEW_TOKENS = 8, 6, 24, 32
PREFIX_TOKENS, TAIL_TOKENS = 6 * demo.PAGE, 250
WAVES = ("cold", "shared prefix", "second turn")


@dataclass
class Wave:
    """What a wave of requests took: seconds of each request, prompt and reused tokens."""

    seconds: float
    latencies: list[float]
    prompt_tokens: int
    cached_tokens: int


def compile_kernels() -> None:
    """Compile side by side the JIT modules that the server will load, into SGLang's cache."""
    import torch
    from sglang.kernels.jit.utils import parallel_compile
    from sglang.kernels.ops.activation import silu_and_mul_clamp
    from sglang.kernels.ops.attention.dsv4 import compress, norm_rope
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.kernels.ops.moe import dsv4

    f32, bf16 = torch.float32, torch.bfloat16
    store = partial(compress._jit_compress_norm_rope_module, f32)
    parallel_compile(
        [
            compress._jit_compress_plan_module,
            partial(compress._jit_compress_module, 512, f32, f32, f32, 4),
            partial(compress._jit_compress_module, 128, f32, f32, f32, 4),
            partial(compress._jit_compress_module, 512, f32, f32, f32, 128),
            partial(store, 512, 64, 1, True, KVLayout.V4, False),
            partial(store, 128, 64, 64, False, KVLayout.V4, False),
            partial(norm_rope._jit_fused_norm_rope_module, bf16, 512, 64),
            partial(norm_rope._jit_main_q_norm_rope_module, bf16, 512, 64, True),
            norm_rope._jit_fused_rope_module,
            partial(norm_rope._jit_main_q_indexer_rope_hadamard_quant_module, bf16),
            dsv4._jit_mask_topk_module,
            partial(silu_and_mul_clamp._jit_silu_and_mul_clamp_module, bf16),
        ]
    )


def prompts_of(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of the first two waves: per group one prefix, per request and wave its own tail."""
    rng = random.Random(seed)
    waves: tuple[list[list[int]], list[list[int]]] = ([], [])
    for _ in range(GROUPS):
        prefix = [rng.randrange(3, 250) for _ in range(PREFIX_TOKENS)]
        for prompts in waves:
            for _ in range(PER_GROUP):
                tail = [rng.randrange(3, 250) for _ in range(rng.randrange(100, TAIL_TOKENS))]
                prompts.append(prefix + tail)
    for prompts in waves:
        rng.shuffle(prompts)
    return waves


def send(server: Server, prompts: Sequence[Sequence[int]]) -> tuple[Wave, list[Answer]]:
    """Send the prompts, CONCURRENCY at a time."""

    def one(prompt: Sequence[int]) -> tuple[float, Answer]:
        start = time.monotonic()
        answer = server.generate(prompt, NEW_TOKENS)
        return time.monotonic() - start, answer

    start = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        results = list(pool.map(one, prompts))
    seconds = time.monotonic() - start
    answers = [answer for _, answer in results]
    wave = Wave(
        seconds,
        [latency for latency, _ in results],
        sum(map(len, prompts)),
        sum(answer.cached_tokens for answer in answers),
    )
    return wave, answers


def load(server: Server, seed: int) -> dict[str, Wave]:
    """The three waves, on a cache that starts empty."""
    server.flush_cache()
    rng = random.Random(seed)
    first, second = prompts_of(seed)
    waves = {}
    waves[WAVES[0]], _ = send(server, first)
    waves[WAVES[1]], answers = send(server, second)
    turns = [
        [*prompt, *answer.ids, *(rng.randrange(3, 250) for _ in range(100))]
        for prompt, answer in zip(second, answers, strict=True)
    ]
    waves[WAVES[2]], _ = send(server, turns)
    return waves


def load_server(arm: str, log_path: Path) -> Server:
    """A server of the load, not started."""
    flag, verify = LOAD_ARMS[arm]
    return demo.arm_server(flag, log_path, LOAD_ARGS, {"SGLANG_SWA_DBG_CHECKSUM": verify})


def load_table(loads: dict[str, dict[str, Wave]]) -> str:
    """Per wave and arm: seconds, latency, tokens a second, reused tokens."""
    header = [
        "wave", "arm", "requests", "seconds", "median latency s", "prompt tokens/s",
        "output tokens/s", "prompt tokens", "reused",
    ]  # fmt: skip
    rows = []
    for name in WAVES:
        for arm, waves in loads.items():
            wave = waves[name]
            count = len(wave.latencies)
            rows.append([
                name, arm, count, f"{wave.seconds:.2f}",
                f"{statistics.median(wave.latencies):.2f}",
                f"{wave.prompt_tokens / wave.seconds:.0f}",
                f"{count * NEW_TOKENS / wave.seconds:.0f}",
                wave.prompt_tokens, wave.cached_tokens,
            ])  # fmt: skip
    return tabulate(rows, header, tablefmt="github")


@contextmanager
def running(servers: Mapping[str, Server]) -> Iterator[None]:
    """Start the servers beside each other, while the kernels compile; stop them beside each other.

    Raises:
        ServerError: one did not start.
        RuntimeError: the JIT modules do not compile on this machine.
    """
    compile_all = [sys.executable, __file__, "--compile"]
    with (
        subprocess.Popen(compile_all, env=server_env()) as compiler,
        ThreadPoolExecutor(len(servers)) as pool,
    ):
        try:
            list(pool.map(Server.start, servers.values()))
            if compiler.wait() != 0:
                raise RuntimeError("SGLang's JIT modules do not compile here")
            yield
        finally:
            list(pool.map(Server.stop, servers.values()))


def run_rounds(logs: Path, scratch: Path, say: demo.Progress) -> Iterator[str]:
    """Part 2: prints its table and a line of results; what does not hold, in words."""
    arms = ("0", "1")
    pokers, servers = {}, {}
    for flag in arms:
        folder = scratch / flag
        folder.mkdir()
        pokers[flag] = Poker(folder)
        log = logs / f"rounds{flag}.log"
        servers[flag] = demo.arm_server(flag, log, ROUND_ARGS, pokers[flag].env)
    with running(servers), ThreadPoolExecutor(len(arms)) as pool:
        say("rounds: servers up")
        off, on = pool.map(
            lambda flag: demo.run_script(flag, servers[flag], pokers[flag], say), arms
        )
    for arm in (off, on):
        demo.add_chat_rows(arm, on.chat.get("continued"))
    print("\n" + demo.table(off, on, chunk=demo.PAGE))
    print("ref: the cold run; of turn 2 the first turn's request itself, continued.\n")
    wrong = list(demo.problems(off, on))
    print(
        f"rounds: restores_verified={sum(row.verified for row in on.rows.values())} "
        f"mismatches={on.failures + off.failures} exact={int(not wrong)} "
        f"negative_control={int(demo.control(off))}",
        flush=True,
    )
    yield from wrong


def run_load(logs: Path, say: demo.Progress) -> Iterator[str]:
    """Part 3: prints its table and a line of results; what does not hold, in words."""
    servers = {arm: load_server(arm, logs / f"load{i}.log") for i, arm in enumerate(LOAD_ARMS)}
    loads = {}
    with running(servers):
        say("load: servers up")
        for arm, server in servers.items():
            load(server, seed=1)  # compiles the Triton kernels of these shapes
            loads[arm] = load(server, seed=2)
            say(f"load, {arm}: {sum(wave.seconds for wave in loads[arm].values()):.1f} s")
        counts = {arm: demo.checks(server.log()) for arm, server in servers.items()}
    print("\n" + load_table(loads) + "\n")
    verified = {name: counts["on, verified"][name] for name in demo.CHECK_LINES}
    failures = {arm: count["failures"] for arm, count in counts.items()}
    print(
        f"load: restores_verified={min(verified.values())} mismatches={sum(failures.values())}",
        flush=True,
    )
    if not min(verified.values()) == max(verified.values()) > 0:
        yield f"load: restores verified {verified}"
    if any(failures.values()):
        yield f"load: failure lines in the logs {failures}"


def main() -> int:
    """Run the parts asked for; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("rounds", "load"), help="both by default")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--compile", action="store_true", help="part 1 alone, in this process")
    options = parser.parse_args()
    if options.compile:
        compile_kernels()
        return 0
    os.environ[activation.DEVICE_VARIABLE] = "cuda"
    say = demo.Progress()
    wrong: list[str] = []
    with TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        if options.part != "load":
            wrong += run_rounds(logs, Path(scratch), say)
        if options.part != "rounds":
            wrong += run_load(logs, say)
    for line in wrong:
        print(f"FAILED: {line}")
    print(f"device={device_name()} seconds={say.seconds():.0f} ok={int(not wrong)}")
    return 1 if wrong else 0


def device_name() -> str:
    """The GPU's name, with underscores."""
    import torch

    return torch.cuda.get_device_name().replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
