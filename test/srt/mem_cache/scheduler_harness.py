"""A real SGLang scheduler in a child process, stepped by test scenarios.

The child runs stock `run_scheduler_process` (the same function a server's scheduler process runs),
on the reference platform and with the plugins of this environment. Only the place where a scheduler
receives requests is taken over: each pass of its event loop resumes a *scenario*, a generator
function of a test module, which may submit requests, look at and change anything in the process, and
yields to let the loop take one step. So a test sees every state between two scheduling rounds, on
real objects, and one process serves all tests of one configuration.

    def scenario(h, prompt):                 # runs in the child
        first = yield from h.generate(prompt, new=4)
        return first.cached

    with SchedulerProcess(args=[...], env={...}) as process:
        assert process.run(scenario, prompt) == 0

With tensor parallelism there is a process for each rank (`SchedulerRanks`). Each runs the whole scenario
on its own scheduler, one step with every pass of the ranks' event loops, which a collective keeps
together as SGLang's broadcast of requests does in a server. With data parallel attention the ranks'
scenarios may do different things, and end at different times.
"""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
import types
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4_reference_platform.launch import held_port, server_argv, server_env

Steps = Generator[None, None, Any]

FAILURE_WORDS = ("MISMATCH", "reuse_reject", "BIND-MISS", "AssertionError", "Traceback")
"""What the request greps a server's log for."""

FEATURE_ENV = {
    "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1",
    "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "1",
    "SGLANG_SWA_DBG_CHECKSUM": "1",
}
"""The feature on, with every restore verified."""


def failure_lines(log: str) -> list[str]:
    """The lines of a log that say that something failed."""
    return [
        line
        for line in log.splitlines()
        if "server_args=" not in line and any(word in line for word in FAILURE_WORDS)
    ]


@dataclass(frozen=True)
class Result:
    """What a finished request answered and where its prefix came from."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    device: int
    host: int
    storage: int = 0
    error: str | None = None
    accepted: tuple[int, ...] = ()
    """With EAGLE: its rounds, by the number of drafts that were accepted in them."""

    def same_answer(self, other: Result) -> bool:
        """Equal output ids and bit-equal logprobs."""
        return self.ids == other.ids and self.logprobs == other.logprobs


@dataclass
class Harness:
    """What a scenario works with, inside the child. `scheduler` is the real one."""

    scheduler: Any
    state: dict[str, Any] = field(default_factory=dict)
    """Kept between the scenarios of one process."""
    _count: int = 0

    @property
    def cache(self) -> Any:
        """The scheduler's tree cache."""
        return self.scheduler.tree_cache

    @property
    def rank(self) -> int:
        """The tensor-parallel rank of this scheduler."""
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_rank

    @property
    def runtime(self) -> Any:
        """The feature's TruthRuntime, or None where it is not engaged."""
        return getattr(self.cache, "truth_runtime", None)

    @property
    def pool(self) -> Any:
        """The DeepSeekV4TokenToKVPool."""
        return self.scheduler.token_to_kv_pool_allocator.get_kvcache()

    @property
    def draft_pools(self) -> tuple[Any, ...]:
        """The KV pools of the draft's layers, with EAGLE."""
        return self.scheduler.tp_worker.model_runner.mtp_draft_device_pools

    def submit(
        self,
        ids: Sequence[int],
        new: int = 4,
        *,
        rid: str | None = None,
        logprob: bool = True,
        **sampling: Any,
    ) -> Any:
        """Hand a request to the scheduler; returns its Req."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        options = {"ignore_eos": True, **sampling}
        params = SamplingParams(max_new_tokens=new, temperature=0.0, **options)
        params.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=rid or f"r{self._count}",
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=logprob,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.handle_generate_request(request)
        return self.scheduler.waiting_queue[-1]

    def abort(self, req: Any) -> None:
        """Ask the scheduler to abort a request, as a client's disconnect does."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=req.rid))

    def finish(self, *reqs: Any) -> Steps:
        """Step until the requests are finished and their rows given back; their Results."""
        while not all(req.finished() and not req.kv.holds_kv for req in reqs):
            yield
        return [self.result(req) for req in reqs]

    def result(self, req: Any) -> Result:
        """The Result of a finished Req."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        reason = req.finished_reason
        logprobs = req.logprob.output_token_logprobs_val if req.return_logprob else []
        # The last round of a request with EAGLE may have committed more than was asked for.
        ids = list(req.output_ids_through_stop)
        return Result(
            ids=ids,
            logprobs=[float(x) for x in logprobs[: len(ids)]],
            cached=req.cached_tokens,
            device=req.cached_tokens_device,
            host=req.cached_tokens_host,
            storage=req.cached_tokens_storage,
            error=reason.message if isinstance(reason, FINISH_ABORT) else None,
            accepted=tuple(req.spec_correct_drafts_histogram),
        )

    def generate(self, ids: Sequence[int], new: int = 4, **options: Any) -> Steps:
        """Submit one request and step until it is finished; its Result."""
        (result,) = yield from self.finish(self.submit(ids, new, **options))
        return result

    def settle(self) -> Steps:
        """Step until nothing runs, waits or moves."""
        yield
        while not self.scheduler.is_fully_idle():
            yield
        if self.runtime is not None:
            self.runtime.drain()

    def flush(self) -> Steps:
        """Flush the cache as /flush_cache does, once everything is idle (less the collection of
        Python's garbage at its end, which takes a second)."""
        yield from self.settle()
        assert self.scheduler.flush_cache(empty_cache=False)

    def evict_device(self, tokens: int) -> None:
        """Push at least `tokens` tokens of unlocked prefixes from the device pool to host memory."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.flush_pending_backups()
        self.cache.evict(EvictParams(num_tokens=tokens))


class SchedulerRanks:
    """The child processes of a server's tensor-parallel ranks; `run` executes scenarios in all of them,
    one at a time.

    Args:
        args: server flags, appended to the platform's and the request's defaults.
        env: environment variables of the children.
        ranks: how many there are; the flags say so too.
        log_path: where their output goes.
    """

    def __init__(
        self,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        ranks: int,
        log_path: Path,
        start_timeout: float = 240.0,
    ) -> None:
        self.args = list(args)
        self.ranks = ranks
        argv = server_argv(port=0, args=args)
        # The program and `-m sglang.launch_server` are what the children stand in for.
        # They wait for the next scenario where a server would sleep.
        self._argv = [a for a in argv[argv.index("--model-path") :] if a != "--sleep-on-idle"]
        self._env = server_env(env)
        self.log_path = log_path
        self._timeout = start_timeout
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._failed = False

    def __enter__(self) -> Any:
        # A scheduler that fails signals its parent, which in a server is the launcher: here the
        # failure arrives through the pipe.
        self._sigquit = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        os.environ.update(self._env)
        self._held = held_port()
        where = self._held.getsockname()[1]
        try:
            for rank in range(self.ranks):
                pipe, child = context.Pipe()
                # Nobody listens there, but SGLang derives other ports from it.
                argv = [*self._argv, "--port", str(_port_with_room())]
                process = context.Process(
                    target=_child, args=(child, argv, str(self.log_path), rank, where)
                )
                process.daemon = True
                process.start()
                child.close()
                self._pipes.append(pipe)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        if set(self._receive(self._timeout)) != {"ready"}:
            raise RuntimeError("a scheduler process said something else than ready")
        return self

    def __exit__(self, *_exc: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            # After a failure the others wait for the one that failed.
            process.join(0 if self._failed else 10)
            if process.is_alive():
                process.kill()
                process.join()
        self._held.close()
        signal.signal(signal.SIGQUIT, self._sigquit)

    def run(self, scenario: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Run `scenario(harness, *args)` of an importable test module on every rank; what each returns.

        A generator is stepped with the event loop, a plain function runs in one go. Raises
        AssertionError with the traceback of the first rank that failed; then, with several ranks, the
        others may be waiting for it, and nothing more can be run.
        """
        if self._failed:
            raise RuntimeError("a rank failed in an earlier scenario")
        for pipe in self._pipes:
            pipe.send((scenario.__module__, scenario.__qualname__, args))
        return self._receive(timeout)

    def log(self) -> str:
        """The children's output so far."""
        return self.log_path.read_text(errors="replace")

    def _receive(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        values: dict[int, Any] = {}
        while waiting := [p for rank, p in enumerate(self._pipes) if rank not in values]:
            ready = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
            if not ready:
                self._failed = True
                raise TimeoutError(f"no answer in {timeout} s; log ends:\n{self.log()[-4000:]}")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    ok, values[rank] = pipe.recv()
                except EOFError:
                    self._failed = True
                    raise RuntimeError(
                        f"scheduler {rank} died; log ends:\n{self.log()[-4000:]}"
                    ) from None
                if not ok:
                    self._failed = self.ranks > 1
                    raise AssertionError(f"in scheduler process {rank}:\n{values[rank]}")
        return [values[rank] for rank in range(self.ranks)]


class SchedulerProcess(SchedulerRanks):
    """A child process with the one scheduler of a server that has one rank."""

    def __init__(
        self,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        log_path: Path,
        start_timeout: float = 240.0,
    ) -> None:
        super().__init__(args, env, ranks=1, log_path=log_path, start_timeout=start_timeout)

    def run(self, scenario: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
        """Run `scenario(harness, *args)`; returns what it returns (see SchedulerRanks.run)."""
        (value,) = super().run(scenario, *args, timeout=timeout)
        return value


def _child(pipe: Any, argv: list[str], log_path: str, rank: int, where: int) -> None:
    """One rank's process; `where`: the port at which the ranks find each other."""
    # Only the file's own folder makes the test modules importable by name here.
    sys.path.insert(0, str(Path(__file__).parent))
    with open(log_path, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.managers import scheduler as module
        from sglang.srt.server_args import PortArgs, prepare_server_args

        server_args = prepare_server_args(argv)
        server_args.resolve_once()
        server_args.check_server_args()
        port_args = PortArgs.init_new(server_args)
        port_args.nccl_port = where
        with _sinks(port_args.tokenizer_ipc_name, port_args.detokenizer_ipc_name):
            module.Scheduler.ingest_requests = _Driver(pipe).ingest
            module.run_scheduler_process(
                server_args,
                port_args,
                gpu_id=rank,
                tp_rank=rank,
                pp_rank=0,
                dp_rank=_dp_rank(server_args, rank),
                pipe_writer=types.SimpleNamespace(send=lambda info: pipe.send((True, "ready"))),
            )
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


PORTS = range(20_000, 30_000)
"""Below those that a system hands out by itself, where a free port may be taken a moment later."""

DERIVED = range(234, 240)
"""Of a port, those that SGLang derives from it with data parallel attention."""


def _port_with_room() -> int:
    """A port that is free, and those that SGLang derives from it."""
    while True:
        port = random.choice(PORTS)
        with ExitStack() as probes:
            try:
                for number in (port, *(port + offset for offset in DERIVED)):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
        return port


def _dp_rank(server_args: Any, rank: int) -> int | None:
    """The data-parallel rank of a tensor-parallel one, as SGLang's data parallel controller gives it."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.layers.dp_attention import compute_dp_attention_world_info

    cfg = resolving_view(server_args)
    if cfg.attn_dp_size == 1:
        return None
    _, _, dp_rank, _ = compute_dp_attention_world_info(rank, cfg.tp_size, cfg.attn_dp_size)
    return dp_rank


@contextmanager
def _sinks(*addresses: str) -> Any:
    """Receive and drop what the scheduler sends to processes that are not there."""
    import zmq

    context = zmq.Context()
    sockets = []
    for address in addresses:
        socket = context.socket(zmq.PULL)
        socket.bind(address)
        sockets.append(socket)

    def drain() -> None:
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                socket.recv_multipart()

    threading.Thread(target=drain, daemon=True, name="test-sink").start()
    yield


class _Driver:
    """Stands where the scheduler receives requests: resumes the running scenario each pass."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._harness: Harness | None = None
        self._steps: Steps | None = None
        self._begun = False
        """Whether there is an outcome to tell of."""
        self._done = True
        self._outcome: Any = None
        """What the scenario returned, until all ranks are done with theirs."""

    @property
    def ingest(self) -> Callable[..., list]:
        driver = self

        def ingest_requests(scheduler: Any, stop_at_pause: bool = False) -> list:
            driver.step(scheduler)
            return []

        return ingest_requests

    def step(self, scheduler: Any) -> None:
        if self._harness is None:
            self._harness = Harness(scheduler)
        try:
            if self._all_done():
                self._begin()
            if self._steps is not None:
                next(self._steps)
        except StopIteration as stop:
            self._steps, self._outcome, self._done = None, stop.value, True
        except EOFError:
            os._exit(0)
        except Exception:
            self._steps, self._done, self._begun = None, True, False
            self._pipe.send((False, traceback.format_exc()))

    def _all_done(self) -> bool:
        """Whether every rank is done with its scenario; none takes its next step before all are here.
        With data parallelism a scenario may end earlier on one rank: it goes on stepping, idle."""
        group = self._harness.scheduler.tp_cpu_group
        done = torch.tensor(int(self._done))
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(done, torch.distributed.ReduceOp.MIN, group)
        return bool(done)

    def _begin(self) -> None:
        if self._begun:
            self._pipe.send((True, self._outcome))
        self._begun = True
        module, name, args = self._pipe.recv()
        outcome = getattr(importlib.import_module(module), name)(self._harness, *args)
        self._done = not isinstance(outcome, Generator)
        self._steps, self._outcome = (None, outcome) if self._done else (outcome, None)
