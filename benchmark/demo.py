"""The demo: a cached prompt answers exactly as an uncached one, on a real server; without the
feature it does not.

Starts stock `sglang.launch_server` on the reference platform, once per arm
(SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE=0 and 1, nothing else differs), and sends the same requests:

1. cold: each prompt once, on an empty cache; these answers are the reference.
2. six rounds of the same prompt (device hits at its last page, where a chunk ends), then a prompt
   that leaves it after seven pages (a hit inside a chunk). Between any two requests others dirty
   the ring rows that the next one will be given.
3. the same two kinds of hit once other prompts have pushed the prefix out to host memory.
4. a conversation whose second turn resumes on a page that the first answer completed, from the
   device and from host memory; it must equal the writer, continued (demo_chat.py).
5. with the feature only: a server is stopped and another one started on the same storage (L3), which
   must answer from there; and must refuse a record of which one bit was flipped (demo_restart.py).

Prints one table and, last, one line of key=value pairs, and writes a report to look at
(demo_report.py; build/demo-report.html unless --report says otherwise). Exit status 0 only if every hit
of the on-arm was restored, verified and equal to its cold run (ids and logprobs), and the off-arm
differs from its cold run somewhere it reused the cache (the negative control).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tabulate import tabulate

import demo_chat
import demo_report
import demo_restart
from dsv4_reference_platform.launch import Server
from dsv4_reference_platform.poke import Poker

PAGE = 256
ROUNDS = 6
SENTENCE = "This is a long shared prefix sentence. "
PROMPT = SENTENCE * 66  # 2,574 byte tokens: ten pages, a chunk end at 2,560
FORK = 7 * PAGE  # 1,792: inside a chunk of 512
CHUNK = 512
SERVER_ARGS = [
    *("--chunked-prefill-size", str(CHUNK)),
    # Room for the prompt and its forks; two other long prompts push them out to host memory.
    *("--max-total-tokens", "6144"),
    *("--max-running-requests", "16"),
    *("--hicache-ratio", "6"),
]
CHECK_LINES = {
    "window": "[SWA-DBG] restore verified",
    "landing": "[LB-DEV] device landing byte-exact",
    "state": "[C4-STATE-DBG] state ride bit-exact",
}
TIERS = ("device", "host", "storage")
# What a verified restore compared: window and state each say so once.
RESTORED_BYTES = re.compile(r"(?:restore verified|state ride bit-exact) .* bytes=(\d+)")
REPORT = Path(__file__).resolve().parents[1] / "build/demo-report.html"
# What the request greps for as a failure; none of it may be in a log of ours.
FAILURE = re.compile(r"MISMATCH|reuse_reject|BIND-MISS|AssertionError|Traceback")


@dataclass(frozen=True)
class Step:
    """One request of the script: its name in the table, its prompt, the hit the on-arm must make."""

    name: str
    prompt: str
    hit: int
    tier: str


def fork(tag: str) -> str:
    """A prompt that shares exactly the first seven pages with PROMPT."""
    return PROMPT[:FORK] + f"Here {tag} leaves the shared path. " * 20


def last_page(prompt: str) -> int:
    """The deepest boundary that a repeat of the prompt can hit: a last token must be computed."""
    return (len(prompt) - 1) // PAGE * PAGE


DEVICE_FORK, HOST_FORK = fork("the device fork"), fork("the host fork")
SCRIPT = [
    *(
        Step(f"round {i}", PROMPT, last_page(PROMPT) if i else 0, "device" if i else "-")
        for i in range(ROUNDS)
    ),
    Step("fork", DEVICE_FORK, FORK, "device"),
    Step("host repeat", PROMPT, last_page(PROMPT), "host"),
    Step("host fork", HOST_FORK, FORK, "host"),
]


@dataclass
class Row:
    """What one step did in one arm."""

    prompt_tokens: int
    cached: int
    tiers: dict[str, int]
    """Cached tokens by the tier that they came from."""
    verified: int
    mismatches: int
    text_equal: bool
    logprobs_equal: bool
    seconds: float
    """Of the whole request, as its client saw it."""
    restored_bytes: int
    """Of the truth, as the checks counted them."""

    @property
    def source(self) -> str:
        """The tiers that the prefix came from, as in "device 1024 + host 1536"."""
        return " + ".join(f"{tier} {tokens}" for tier, tokens in self.tiers.items()) or "-"


CHAT_STEPS = [
    Step("turn 2", "", demo_chat.BOUNDARY, "device"),
    Step("turn 2, host", "", demo_chat.BOUNDARY, "host"),
]
"""Rows of the table that the conversation fills; their reference is the writer, continued."""
RESTART_STEPS = [
    Step(demo_restart.WHOLE, PROMPT, last_page(PROMPT), "storage"),
    # All of a prefetch or nothing: what came with the refused record is not used either.
    Step(demo_restart.FLIPPED, PROMPT, 0, "-"),
    Step(demo_restart.AFTER, PROMPT, last_page(PROMPT) - PAGE, "storage"),
]
"""Rows of the table that the second server on a storage fills, in the on-arm only."""


WHAT = {
    **{f"round {i}": "the same prompt again" for i in range(ROUNDS)},
    "round 0": "the cache is empty",
    "fork": "leaves the prompt after 7 pages",
    "host repeat": "again, once pushed out to host memory",
    "host fork": "another fork, from host memory",
    "turn 2": "a chat goes on after its first answer",
    "turn 2, host": "the same, from host memory",
    demo_restart.WHOLE: "first request of a new server",
    demo_restart.FLIPPED: "one bit of its record was flipped",
    demo_restart.AFTER: "asked once more",
}
"""The table's rows in words."""


@dataclass
class Arm:
    """One arm's results, by step name."""

    flag: str
    rows: dict[str, Row] = field(default_factory=dict)
    cold: dict[str, tuple] = field(default_factory=dict)
    chat: dict[str, demo_chat.Turn] = field(default_factory=dict)
    restart: demo_restart.Restart | None = None
    failures: int = 0


class Progress:
    """One line a request, so that a run is visible while it runs."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)

    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._start


def ask(server: Server, prompt: str) -> tuple[tuple, dict]:
    """Send one prompt; (what must be equal between hit and cold, the usage report)."""
    reply = server.complete(prompt, max_tokens=8, logprobs=1, return_cached_tokens_details=True)
    choice = reply["choices"][0]
    logprobs = choice["logprobs"]
    answer = (choice["text"], tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))
    return answer, reply


def dirty(server: Server, seed: int) -> None:
    """Write other requests' rows over the ring rows of free slots, without caching a page."""
    prompts = [[(seed * 131 + i * 17 + j * j) % 250 + 3 for j in range(200)] for i in range(3)]
    server.generate_batch(prompts, max_new_tokens=1)


def push_out(server: Server, tags: tuple[str, ...] = ("one", "two", "three")) -> None:
    """Fill the device pool with other prompts, so that what was cached moves to host memory."""
    for tag in tags:
        server.complete(f"Prompt number {tag} has nothing in common. " * 40, max_tokens=1)


def checks(log: str) -> dict[str, int]:
    """How often each of the three check lines, and a failure, stands in a server log; and the bytes that
    the checks compared."""
    counts = {name: log.count(text) for name, text in CHECK_LINES.items()}
    counts["failures"] = sum(
        1 for line in log.splitlines() if "server_args=" not in line and FAILURE.search(line)
    )
    counts["bytes"] = sum(map(int, RESTORED_BYTES.findall(log)))
    return counts


def arm_server(flag: str, log_path: Path, args: Sequence[str], env: Mapping[str, str]) -> Server:
    """An arm's server, not started, with more arguments and environment."""
    return Server([*SERVER_ARGS, *args], {**arm_env(flag), **env}, log_path=log_path)


def arm_env(flag: str) -> dict[str, str]:
    """The environment of an arm: every restore is verified."""
    return {
        "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": flag,
        "SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP": "1",
        "SGLANG_SWA_DBG_CHECKSUM": "1",
    }


def run_arm(flag: str, log_path: Path, poker: Poker, say: Progress) -> Arm:
    """Start one arm's server, run the script and the conversation, stop it."""
    say(f"arm {flag}: starting the server")
    with arm_server(flag, log_path, (), poker.env) as server:
        say(f"arm {flag}: up after {server.boot_seconds:.0f} s")
        return run_script(flag, server, poker, say)


def run_script(flag: str, server: Server, poker: Poker, say: Progress) -> Arm:
    """Send the script and the conversation to an arm's running server."""
    arm = Arm(flag)
    for prompt in (PROMPT, DEVICE_FORK, HOST_FORK):
        server.flush_cache()
        arm.cold[prompt], reply = ask(server, prompt)
        say(f"arm {flag}: cold, {reply['usage']['prompt_tokens']} tokens")
    server.flush_cache()
    for i, step in enumerate(SCRIPT):
        if step.tier == "host":
            push_out(server)
        dirty(server, i)
        before = checks(server.log())
        asked = time.monotonic()
        answer, reply = ask(server, step.prompt)
        seconds = time.monotonic() - asked
        after = checks(server.log())
        verified = {name: after[name] - before[name] for name in CHECK_LINES}
        details = (reply.get("sglext") or {}).get("cached_tokens_details") or {}
        usage = reply["usage"]
        arm.rows[step.name] = Row(
            prompt_tokens=usage["prompt_tokens"],
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            tiers=tiers_of(details),
            verified=min(verified.values()),
            mismatches=after["failures"] - before["failures"],
            text_equal=answer[:2] == arm.cold[step.prompt][:2],
            logprobs_equal=answer[2] == arm.cold[step.prompt][2],
            seconds=seconds,
            restored_bytes=after["bytes"] - before["bytes"],
        )
        row = arm.rows[step.name]
        say(
            f"arm {flag}: {step.name}: cached {row.cached} ({row.source}), "
            f"{'equal to' if row.logprobs_equal else 'DIFFERS from'} cold"
        )
    arm.chat = demo_chat.converse(
        server,
        poker,
        checks,
        lambda seed: dirty(server, seed),
        lambda: push_out(server, ("four", "five", "six", "seven")),
        lambda text: say(f"arm {flag}: {text}"),
    )
    arm.failures = checks(server.log())["failures"]
    return arm


def add_chat_rows(arm: Arm, reference: demo_chat.Turn | None) -> None:
    """The conversation's rows of an arm, compared with the on-arm's continued writer."""
    for step in CHAT_STEPS:
        turn = arm.chat[step.name]
        ids, logprobs = demo_chat.outcome(turn.answer)
        want = demo_chat.outcome(reference.answer) if reference else (None, None)
        arm.rows[step.name] = Row(
            prompt_tokens=turn.answer.raw["meta_info"]["prompt_tokens"],
            cached=turn.answer.cached_tokens,
            tiers=tiers_of(turn.answer.cached_tokens_details or {}),
            verified=min(turn.checks[name] for name in CHECK_LINES),
            mismatches=turn.checks["failures"],
            text_equal=ids == want[0],
            logprobs_equal=logprobs == want[1],
            seconds=turn.seconds,
            restored_bytes=turn.checks["bytes"],
        )


def run_restart(arm: Arm, logs: Path, folder: Path, say: Progress) -> None:
    """Stop and start servers of the on-arm on a storage in `folder`; its rows, against their cold run."""
    arm.restart = demo_restart.restart(
        PROMPT,
        range(PAGE, last_page(PROMPT) + 1, PAGE),
        folder,
        lambda name, args, env: arm_server(arm.flag, logs / f"{name}.log", args, env),
        ask,
        checks,
        dirty,
        say,
    )
    arm.failures += arm.restart.failures
    for name, repeat in arm.restart.repeats.items():
        usage = repeat.reply["usage"]
        arm.rows[name] = Row(
            prompt_tokens=usage["prompt_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            tiers=tiers_of((repeat.reply.get("sglext") or {}).get("cached_tokens_details") or {}),
            verified=min(repeat.checks[line] for line in CHECK_LINES),
            mismatches=repeat.checks["failures"],
            text_equal=repeat.answer[:2] == arm.restart.cold[:2],
            logprobs_equal=repeat.answer[2] == arm.restart.cold[2],
            seconds=repeat.seconds,
            restored_bytes=repeat.checks["bytes"],
        )


def tiers_of(details: dict) -> dict[str, int]:
    """Cached tokens by tier, only where there are any."""
    return {tier: details[tier] for tier in TIERS if details.get(tier)}


def steps_of(on: Arm) -> list[Step]:
    """The table's rows: those of the restart where there was one."""
    return [*SCRIPT, *CHAT_STEPS, *(RESTART_STEPS if on.restart is not None else ())]


def problems(off: Arm, on: Arm) -> Iterator[str]:
    """What does not hold, in words; nothing when the demo succeeded."""
    for step in steps_of(on):
        row = on.rows[step.name]
        if row.cached != step.hit:
            yield f"{step.name}: the on-arm reused {row.cached} tokens, not {step.hit}"
        if row.verified != (step.hit > 0):
            yield f"{step.name}: {row.verified} restores verified"
        if step.tier == "host" and "host" not in row.source:
            yield f"{step.name}: nothing came from host memory ({row.source})"
        if step.tier == "device" and "host" in row.source:
            yield f"{step.name}: not a pure device hit ({row.source})"
        if step.tier == "storage" and row.source != f"storage {step.hit}":
            yield f"{step.name}: not a pure hit in storage ({row.source})"
        if row.mismatches:
            yield f"{step.name}: {row.mismatches} failure lines in the log"
        if not (row.text_equal and row.logprobs_equal):
            yield f"{step.name}: the on-arm's answer differs from its reference"
    if on.failures or off.failures:
        yield f"failure lines in the logs: off {off.failures}, on {on.failures}"
    if on.cold != off.cold:
        yield "the two arms' cold runs differ"
    if "scribbled" not in on.chat:
        yield "turn 2: nothing resumed on the page of the answer, so there is no reference"
    elif demo_chat.outcome(on.chat["scribbled"].answer) == demo_chat.outcome(
        on.chat["continued"].answer
    ):
        yield "the conversation's control failed: noise in the writer's rows changed nothing"
    if on.restart is not None:
        yield from restart_problems(on)
    if not control(off):
        yield "the negative control failed: the off-arm equals its cold run wherever it reused"


def restart_problems(on: Arm) -> Iterator[str]:
    """What does not hold of the restart beyond its rows."""
    if on.restart.cold != on.cold[PROMPT]:
        yield "restart: the cold run with storage differs from the one without"
    for step in RESTART_STEPS:
        repeat = on.restart.repeats[step.name]
        wanted = demo_restart.NO_PREFETCH
        if step.hit:
            wanted = demo_restart.Prefetch("success", step.hit, matched=0, loaded=step.hit)
        if repeat.prefetch != wanted:
            yield f"{step.name}: {repeat.prefetch}, not {wanted}"
        refusals = int(step.name == demo_restart.FLIPPED)
        if repeat.refused != refusals:
            yield f"{step.name}: {repeat.refused} window records refused, not {refusals}"


def control(off: Arm) -> bool:
    """Whether the off-arm differs from its cold run somewhere that it reused the cache."""
    return any(r.cached > 0 and not (r.logprobs_equal and r.text_equal) for r in off.rows.values())


def boundary(step: Step, chunk: int) -> str:
    """What kind of boundary the step's hit ends at."""
    if step.hit == 0:
        return "-"
    if step in CHAT_STEPS:
        return "answer"
    return "interior" if step.hit % chunk else "chunk end"


def table(off: Arm, on: Arm, chunk: int = CHUNK) -> str:
    """The one table, of servers that cut prompts every `chunk` tokens."""
    header = [
        "request", "boundary", "prompt tokens", "cached off", "cached on", "from (on)",
        "restores verified", "mismatches", "output = ref off/on", "logprobs = ref off/on",
    ]  # fmt: skip
    yes = {True: "yes", False: "NO"}
    rows = []
    for step in steps_of(on):
        a, b = off.rows.get(step.name), on.rows[step.name]
        rows.append([
            step.name, boundary(step, chunk), b.prompt_tokens, a.cached if a else "-",
            b.cached, b.source, b.verified, b.mismatches,
            f"{yes[a.text_equal] if a else '-'}/{yes[b.text_equal]}",
            f"{yes[a.logprobs_equal] if a else '-'}/{yes[b.logprobs_equal]}",
        ])  # fmt: skip
    return tabulate(rows, header, tablefmt="github")


def report(off: Arm, on: Arm, wrong: Sequence[str]) -> str:
    """The report, as HTML."""
    lines = [
        demo_report.Line(
            step.name,
            WHAT[step.name],
            boundary(step, CHUNK),
            off.rows.get(step.name),
            on.rows[step.name],
        )
        for step in steps_of(on)
    ]
    hits = [row for row in on.rows.values() if row.cached]
    differing = [row for row in off.rows.values() if row.cached and not row.logprobs_equal]
    reused_off = sum(row.cached > 0 for row in off.rows.values())
    figures = {
        "hits with the feature on": len(hits),
        "of them equal to their reference": sum(r.text_equal and r.logprobs_equal for r in hits),
        "restores verified": sum(row.verified for row in on.rows.values()),
        "mismatches": on.failures + off.failures,
        "hits with the feature off that differ": f"{len(differing)} of {reused_off}",
    }
    return demo_report.page(lines, demo_report.Verdict(wrong, figures))


def main() -> int:
    """Run both arms; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--report", type=Path, default=REPORT, help="the report (%(default)s)")
    options = parser.parse_args()
    start = time.monotonic()
    say = Progress()
    with TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        arms = []
        for flag in ("0", "1"):
            pokes = Path(scratch) / flag
            pokes.mkdir()
            arms.append(run_arm(flag, logs / f"arm{flag}.log", Poker(pokes), say))
        off, on = arms
        for arm in arms:
            add_chat_rows(arm, on.chat.get("continued"))
        run_restart(on, logs, Path(scratch) / "storage", say)
    print("\n" + table(off, on))
    print("ref: the cold run; of turn 2 the first turn's request itself, continued.\n")
    wrong = list(problems(off, on))
    for line in wrong:
        print(f"FAILED: {line}")
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(report(off, on, wrong), encoding="utf-8")
    print(f"report: {options.report}")
    deepest = SCRIPT[ROUNDS - 1].name
    restarted = on.rows[demo_restart.WHOLE]
    prefetch = on.restart.repeats[demo_restart.WHOLE].prefetch
    print(
        f"rounds={ROUNDS} cached_on={on.rows[deepest].cached} "
        f"cached_off={off.rows[deepest].cached} "
        f"host_hits={sum('host' in r.source for r in on.rows.values())} "
        f"restores_verified={sum(r.verified for r in on.rows.values())} "
        f"mismatches={on.failures + off.failures} exact={int(not wrong)} "
        f"negative_control={int(control(off))} seconds={time.monotonic() - start:.0f} "
        f"l3_cached={restarted.cached} l3_verified={restarted.verified} "
        f"l3_matched={prefetch.matched} l3_loaded={prefetch.loaded}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
