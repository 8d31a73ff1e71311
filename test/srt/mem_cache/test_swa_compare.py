"""The comparison of arms, and the demo's report: everything in them that needs no server of SGLang."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmark"))

import compare_arms
import demo
import demo_report
from compare import arms, clients, counters, measure, options, report, workloads
from compare.clients import Score, Speed
from compare.counters import Counts
from compare.measure import Measured, ScorePass, SpeedPass
from dsv4_reference_platform.launch import ServerError, free_port

SHARED = "shared prefix 0.6"


def parse(*argv: str) -> options.Options:
    return options.parse(argv, "text")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--off-url", "10.0.0.1:30000"],
            "--off-url '10.0.0.1:30000': it must be http://HOST:PORT",
        ),
        (["--off-url", "http://127.0.0.1"], "it must be http://HOST:PORT"),
        (["--dev-url", "https://127.0.0.1:1"], "it must be http://HOST:PORT"),
        (["--dev-url", "http://127.0.0.1:1/v1"], "it must be http://HOST:PORT"),
        (["--off-url", "http://h:1", "--dev-url", "http://h:1/"], "two arms have the same url"),
        (["--off-url", "http://h:1", "--", "serve", "--enable-metrics"], "not both"),
        (["--off-url", "http://h:1", "--arms", "dev"], "--arms is for servers that are started"),
        (["--", "python3", "-m", "sglang.launch_server"], "needs --enable-metrics"),
        (["--shares", "1.0"], "--shares 1.0: a share is between 0 and 1"),
        (["--repeats", "0"], "--repeats 0: it must be positive"),
        (["--gsm8k-data", "/nowhere.jsonl"], "--gsm8k-data /nowhere.jsonl: no such file"),
        (["--merge", "/nowhere.json"], "--merge /nowhere.json: no such file"),
        (["--workloads", "sharegpt"], "invalid choice: 'sharegpt'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_options():
    chosen = parse("--sizes", "request", "--repeats", "5", "--prompt", "20000")
    assert chosen.arms == ("off", "python", "dev")
    assert (chosen.sizes.repeats, chosen.sizes.prompt) == (5, 20_000)
    assert chosen.sizes.decode_batches == (32, 48, 64) and chosen.sizes.questions == 1319
    running = parse("--dev-url", "http://127.0.0.1:2/", "--off-url", "http://127.0.0.1:1")
    assert running.arms == ("off", "dev")
    assert running.urls == {"off": "http://127.0.0.1:1", "dev": "http://127.0.0.1:2"}
    launched = parse("--arms", "off", "dev", "--", "serve", "--enable-metrics", "--port=7")
    assert launched.command == ("serve", "--enable-metrics", "--port=7")
    assert launched.arms == ("off", "dev")


def test_only_merging_measures_nothing(tmp_path):
    file = tmp_path / "off.json"
    file.touch()
    assert parse("--merge", str(file)).arms == ()
    assert parse("--merge", str(file), "--dev-url", "http://h:1").arms == ("dev",)


def test_an_arm_differs_from_the_one_before_it_in_one_variable():
    def differing(one: str, other: str) -> set[str]:
        pair = arms.ARMS[one].env.items() ^ arms.ARMS[other].env.items()
        return {name for name, _ in pair}

    assert differing("off", "python") == {arms.TREE_CORE}
    assert differing("off", "dev") == {arms.FLAG}
    assert differing("dev", "checked") == {arms.CHECKS}
    assert tuple(arms.ARMS) == options.ARM_KEYS


def test_a_server_of_any_command(tmp_path, monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    command = ["serve", "--port", "30007", "--enable-metrics"]
    server = arms.CommandServer(command, arms.ARMS["dev"].env, tmp_path / "log", 1.0)
    assert server.argv == command and server.url == "http://127.0.0.1:30007"
    assert server.env[arms.FLAG] == "1" and "SGLANG_PLATFORM" not in server.env
    assert arms.port_of(["serve", "--port=5"]) == 5
    assert arms.port_of(["serve"]) == arms.DEFAULT_PORT


STAND_IN = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

print("flag", os.environ["SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_the_command_is_started_in_each_arm_and_stopped(tmp_path):
    (tmp_path / "serve.py").write_text(STAND_IN)
    port = str(free_port())
    command = (sys.executable, str(tmp_path / "serve.py"), "--port", port, "--enable-metrics")
    chosen = parse("--start-timeout", "60", "--", *command)
    for key, flag in (("off", "0"), ("dev", "1")):
        with arms.serve(key, chosen, tmp_path) as endpoint:
            # A command's server is a GPU's: what its processes use of the CPU says nothing.
            assert endpoint.url == f"http://127.0.0.1:{port}" and endpoint.cpu_seconds is None
            assert endpoint.log.read_text().splitlines()[0] == f"flag {flag}"
            # A server that is in the way would be measured under another's name.
            with (
                pytest.raises(ServerError, match=f"port {port} is in use"),
                arms.serve("python", chosen, tmp_path),
            ):
                pass
        with pytest.raises(OSError):
            counters.read(endpoint.url, None)


def test_a_running_server_is_left_alone(tmp_path):
    chosen = parse("--dev-url", "http://127.0.0.1:1")
    with arms.serve("dev", chosen, tmp_path) as endpoint:
        assert endpoint == ("http://127.0.0.1:1", None, None)


def test_every_arm_is_sent_the_same(tmp_path):
    chosen = parse("--shares", "0.6", "0.8")
    sent = list(workloads.speed(chosen, tmp_path))
    names = [workload.name for workload in sent]
    assert names == [SHARED, "shared prefix 0.8", "decode, batch 4", "random"]
    shared = dict(zip(sent[0].args, sent[0].args[1:], strict=False))
    assert shared["--gsp-system-prompt-len"] == "768" and shared["--gsp-question-len"] == "512"
    assert [workload.requests for workload in sent] == [6, 6, 4, 3]
    # The client repeats what a conversation begins with, so none may begin as another does.
    text = (tmp_path / "conversations.json").read_text()
    assert len({row.split('"value": "')[1][0] for row in text.split("conversations")[1:]}) == 3


def test_made_up_questions_are_what_sglang_reads(tmp_path):
    from sglang.test.simple_eval_mixed_prefix_gsm8k import GSM8KEval, get_answer_value

    chosen = parse()
    plain, thinking = workloads.evaluations(chosen, tmp_path)
    path = dict(zip(plain.args, plain.args[1:], strict=False))["--data-path"]
    read = GSM8KEval(
        num_examples=chosen.sizes.questions, num_shots=chosen.sizes.shots, data_path=path
    )
    assert [get_answer_value(line["answer"]) for line in read._lines] == [
        7 + 3 * i for i in range(chosen.sizes.shots, chosen.sizes.shots + chosen.sizes.questions)
    ]
    assert thinking.args[-2:] == ("--thinking-mode", "deepseek-v3")


def test_scores_are_what_the_clients_print():
    plain = (
        "x\nAccuracy: 0.942\nInvalid: 0.001\nLatency: 9.9 s\nOutput throughput: 12.900 token/s\n"
    )
    assert clients.score_of(plain) == Score(0.942, 0.001, 12.9)
    assert clients.score_of("Total latency: 7.3 s\nScore: 0.933\n") == Score(0.933, None, None)
    with pytest.raises(clients.ClientError, match="no accuracy was printed:\nfoo"):
        clients.score_of("foo\n")


def test_a_client_is_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    (tmp_path / "asked.py").write_text(
        "import os, sys\n"
        "if '--fail' in sys.argv: sys.exit('it went wrong')\n"
        "print(sys.argv[1:], os.environ['HOME'], os.environ['HF_HOME'])\nprint('Accuracy: 0.5')\n"
    )
    evaluation = workloads.Evaluation("asked", "asked", ("--parallel", "2"))
    assert clients.evaluate("http://127.0.0.1:7", evaluation, tmp_path, 60).accuracy == 0.5
    printed = clients._run("asked", ("--port", "7"), tmp_path, 60).splitlines()[0]
    cache = Path.home() / ".cache" / "huggingface"
    assert printed == f"['--port', '7'] {tmp_path} {cache}"
    with pytest.raises(clients.ClientError, match="asked ended with 1:\nit went wrong"):
        clients._run("asked", ("--fail",), tmp_path, 60)


PAGE_OF_METRICS = """\
# HELP sglang:bitexact_hicache_restored_total Hits restored into a request's rows.
# TYPE sglang:bitexact_hicache_restored_total counter
sglang:bitexact_hicache_restored_total{engine_type="unified",tp_rank="0"} 6.0
sglang:bitexact_hicache_restored_total{engine_type="unified",tp_rank="1"} 4.0
sglang:bitexact_hicache_checks_verified_total{engine_type="unified",tp_rank="0"} 5.0
sglang:bitexact_hicache_recomputed_tokens_total{engine_type="unified",tp_rank="0"} 2.56e+02
sglang:bitexact_hicache_rejected_total{reason="no_slot",tp_rank="0"} 7.0
sglang:bitexact_hicache_rejected_total{reason="check_failed",tp_rank="0"} 1.0
sglang:cached_tokens_total{cache_source="device"} 4608.0
"""


def test_counts_are_summed_over_ranks():
    counts = counters.parse(PAGE_OF_METRICS)
    assert counts == Counts(restored=10, verified=5, failed=1, recomputed=256)
    assert counts.since(Counts(restored=4)) == Counts(6, 5, 1, 256)
    stock = PAGE_OF_METRICS.splitlines()[-1]
    assert counters.parse(stock) is None


@pytest.fixture
def small_server():
    """A server on the loopback address with the metrics above; the paths that were asked for."""
    asked = []
    known = {"/metrics", "/flush_cache?timeout=60"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
            self.wfile.write(PAGE_OF_METRICS.encode())

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_counts_of_a_running_server(small_server, tmp_path):
    url, asked = small_server
    assert counters.read(url, None) == Counts(10, 5, 1, 256)
    # A log knows of checks before the metrics do, and of failures that have no metric.
    log = tmp_path / "log"
    log.write_text("[SWA-DBG] restore verified rid=1\nserver_args=MISMATCH\n[LB-DEV] MISMATCH\n")
    assert counters.read(url, log) == Counts(10, 1, 1, 256)
    assert counters.read(f"{url}/elsewhere", None) is None
    with pytest.raises(OSError):
        counters.flush(url, timeout=1)
    assert asked[-1] == "/flush_cache?timeout=0.5"


def test_each_pass_begins_with_an_empty_cache_and_its_own_counts(
    small_server, tmp_path, monkeypatch
):
    url, asked = small_server
    cpu = iter(range(100))

    def bench(*args):
        asked.append("bench")
        return speed(1000)

    def evaluate(*args):
        asked.append("evaluate")
        return Score(0.5, None, None)

    monkeypatch.setattr(clients, "bench", bench)
    monkeypatch.setattr(clients, "evaluate", evaluate)
    chosen = parse("--workloads", "shared", "gsm8k", "--shares", "0.6", "--repeats", "2")
    said: list[str] = []
    measured = measure.run(
        arms.Endpoint(url, None, lambda: next(cpu)),
        list(workloads.speed(chosen, tmp_path)),
        workloads.evaluations(chosen, tmp_path),
        chosen,
        tmp_path,
        said.append,
    )
    around = ["/flush_cache?timeout=60", "/metrics", "bench", "/metrics"]
    assert asked == [*around, *around, *around[:2], "evaluate", "/metrics"]
    # Nothing was counted by this server meanwhile, whatever it had counted before.
    assert measured.speeds == {SHARED: [SpeedPass(speed(1000), Counts(), 1)] * 2}
    assert measured.scores == {"gsm8k": ScorePass(Score(0.5, None, None), Counts())}
    assert len(said) == 3 and measured.tree_core is None


def speed(rate: float, cached: int = 4608, completed: int = 8) -> Speed:
    return Speed(8, completed, 10_000 / rate, 10_000, cached, rate, 10.0, 15.0, 40.0, 900.0)


def one(rates, counts, accuracy=None, **fields) -> Measured:
    passes = [SpeedPass(speed(rate, **fields), counts, 9.0) for rate in rates]
    measured = Measured({SHARED: passes})
    if accuracy is not None:
        measured.scores["gsm8k"] = ScorePass(Score(accuracy, 0.001, 9.0), counts)
    return measured


def three() -> dict[str, Measured]:
    return {
        "off": one([1000, 1020], None, 0.94),
        "python": one([990, 1015], None, 0.94),
        "dev": one([950, 1000], Counts(6), 0.942),
    }


def test_the_table_and_the_last_line():
    rows = {
        tuple(cell.strip() for cell in line.split("|")[1:3]): [
            cell.strip() for cell in line.split("|")[3:-1]
        ]
        for line in report.table(three()).splitlines()
    }
    assert rows["workload", ""] == [
        "off", "off, python tree", "dev", "dev − off", "dev − off, python tree",
    ]  # fmt: skip
    assert rows[SHARED, "prompt tok/s"] == [
        "1010 (1000 to 1020)", "1002 (990 to 1015)", "975 (950 to 1000)", "-3.5 % ~", "-2.7 % ~",
    ]  # fmt: skip
    assert rows[SHARED, "cached tokens"] == ["4608", "4608", "4608", "+0.0 %", "+0.0 %"]
    assert rows[SHARED, "server CPU, s"] == ["9.0", "9.0", "9.0", "+0.0 %", "+0.0 %"]
    assert rows[SHARED, "restored hits"] == ["-", "-", "6", "-", "-"]
    assert rows["gsm8k", "accuracy"] == ["0.940", "0.940", "0.942", "+0.002", "+0.002"]
    assert not any("verified" in name or "without truth" in name for _, name in rows)
    # 20,000 tokens in 19.8 s, and in 20.5 s.
    assert report.last_line(three()) == (
        "off_tok_s=1010 dev_tok_s=974 diff_pct=-3.5 off_acc=0.940 dev_acc=0.942"
    )
    assert report.last_line({"dev": three()["dev"]}).startswith(
        "off_tok_s=- dev_tok_s=974 diff_pct=-"
    )


def test_rows_that_only_some_workloads_have():
    some = {
        "dev": Measured({"decode, batch 4": [SpeedPass(speed(300), Counts(3, recomputed=256))]}),
        "checked": Measured({"decode, batch 4": [SpeedPass(speed(300), Counts(3, 3))]}),
    }
    text = report.table(some)
    assert "prompt tok/s" not in text and "median TPOT" in text
    without_truth, verified = text.splitlines()[-2:]
    assert without_truth.split("|")[2:5] == [
        " cached without truth, tokens ",
        " 256   ",
        " 0              ",
    ]
    assert verified.split("|")[2].strip() == "restores verified"


def test_a_difference_says_whether_it_may_be_chance():
    assert report.difference([100, 102], [90, 99]) == "-6.4 %"
    assert report.difference([100, 102], [90, 100]) == "-5.9 % ~"
    assert report.difference([100], [90]) == "-10.0 % ~"
    assert report.difference([0], [0]) == "0" and report.difference([0], [3]) == "+3"
    assert report.spread([1.04, 1.01], 1) == "1.0" and report.spread([1, 3], 0) == "2 (1 to 3)"


def test_what_does_not_hold():
    assert list(report.problems(three())) == []
    checked = {**three(), "checked": one([500], Counts(6, 6))}
    assert list(report.problems(checked)) == []
    for change, problem in [
        ({"dev": one([950], Counts(6), completed=7)}, "dev: .*: 1 requests did not complete"),
        ({"dev": one([950], None)}, "dev: none of the feature's metrics"),
        ({"dev": one([950], Counts(0))}, "dev: .*: 4608 tokens were cached, nothing was restored"),
        ({"dev": one([950], Counts(6, failed=2))}, "dev: 2 failed checks"),
        ({"off": one([950], Counts(6))}, "off: the feature's metrics are there"),
        ({"off": one([950], None, cached=0)}, "off: .*: nothing was cached"),
        ({"checked": one([500], Counts(6, 5))}, "dev, checked: 6 hits restored, 5 verified"),
        ({"checked": one([500], Counts(0, 0), cached=0)}, "dev, checked: 0 hits restored"),
    ]:
        found = list(report.problems({**three(), **change}))
        assert any(re.match(problem, line) for line in found), problem


def test_arms_measured_at_different_times(tmp_path, capsys):
    chosen = parse()
    file = tmp_path / "arms.json"
    measure.save(file, compare_arms._sent(chosen), three())
    assert compare_arms._merged(parse("--merge", str(file))) == three()
    assert compare_arms.main(["--merge", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == report.last_line(three())
    for argv, message in [
        (["--merge", str(file), "--repeats", "9"], "other requests were sent then"),
        (["--merge", str(file), str(file)], "the arm 'off' is there twice"),
    ]:
        assert compare_arms.main(argv) == 1
        assert message in capsys.readouterr().err
    assert asdict(three()["dev"])["tree_core"] is None


def test_the_tree_core_that_a_log_names():
    line = "[...] Init Unified Radix Cache. Components: (FULL, SWA). Tree Core: RustUnifiedTreeCore"
    assert measure.tree_core(f"a\n{line}\nb") == "RustUnifiedTreeCore"
    assert measure.tree_core("nothing") is None


def row(tiers: dict[str, int], *, equal: bool = True) -> demo.Row:
    cached = sum(tiers.values())
    return demo.Row(2574, cached, tiers, 1, 0, True, equal, 0.5, 2**20)


def test_the_picture_accounts_for_every_token():
    lines = [
        demo_report.Line("round 1", "again", "chunk end", row({"device": 2304}, equal=False),
                         row({"device": 512, "host": 2048})),
        demo_report.Line("restart", "new", "chunk end", None, row({"storage": 2560})),
        demo_report.Line("bit <flipped>", "it was flipped", "-", None, row({})),
    ]  # fmt: skip
    svg = ElementTree.fromstring(demo_report.picture(lines))
    bars: dict[str, list[tuple[str, float]]] = {}
    colours = {colour: tier for tier, colour in demo_report.COLOURS.items()}
    for rect in svg.iter("rect"):
        if rect.get("height") == str(demo_report._HEIGHT):
            piece = (colours[rect.get("fill")], float(rect.get("width")))
            bars.setdefault(rect.get("y"), []).append(piece)
    scale = 2574 / demo_report._BAR
    assert [[(tier, round(width * scale, -1)) for tier, width in bar] for bar in bars.values()] == [
        [("device", 2300), ("recomputed", 270)],
        [("device", 510), ("host", 2050), ("recomputed", 10)],
        [("storage", 2560), ("recomputed", 10)],
        [("recomputed", 2570)],
    ]
    texts = [text.text for text in svg.iter("text")]
    assert "✗ ≠ reference: other logprobs" in texts and "nothing reused: it was flipped" in texts
    assert texts.count("✓ = reference, bit for bit") == 2 and "bit <flipped>" in texts


def test_the_report_says_what_failed():
    lines = [demo_report.Line("round 1", "again", "chunk end", None, row({"host": 2560}))]
    good = demo_report.page(lines, demo_report.Verdict((), {"restores verified": 12}))
    assert "Every hit is exact" in good and "<b>12</b><span>restores verified" in good
    assert '<td class="word">host 2560</td>' in good and "1.00" in good
    bad = demo_report.page(lines, demo_report.Verdict(["a < b"], {}))
    assert "Something does not hold" in bad and "<li>a &lt; b</li>" in bad
    # It is one file: nothing is loaded.
    assert "src=" not in good and "href=" not in good and "http" not in good
