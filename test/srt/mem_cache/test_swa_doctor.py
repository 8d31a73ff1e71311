"""The doctor: what it says of an installation, of server flags and of a running server.

Flags are resolved by SGLang, plans are compared with what the feature plans over real pools, and servers
are HTTP servers that answer what a real one does (test_swa_metrics.py has a real exporter's page).
"""

from __future__ import annotations

import http.server
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from attachment import hooks_undone
from bitexact_fixtures import cpu_hicache, make_kv_pool
from startup_fixtures import (
    ENGAGING_ARGS,
    ENGAGING_ENV,
    MODEL_CONFIG,
    OTHER_MODEL_CONFIG,
    build_context,
    environment,
    publish,
    resolve,
    write_config,
    write_model,
)

from dsv4_reference_platform.launch import EAGLE_ARGS
from sglang_bitexact_hicache import (
    arguments,
    attach,
    engagement,
    factory,
    refusals,
    seam_table,
    settings,
    sizing,
)
from sglang_bitexact_hicache.device_view import DeviceView
from sglang_bitexact_hicache.doctor import command, configuration, plan
from sglang_bitexact_hicache.exporter import METRICS, PREFIX, MetricType
from sglang_bitexact_hicache.seam import When

ROOT = Path(__file__).parents[3]
FLAG = "SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE"
SIZES = ("--max-total-tokens", "2048", "--max-running-requests", "4")

Findings = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def _hooks():
    with hooks_undone():
        arguments.environment_fields()
        attach.install(When.ALWAYS)
        yield


@pytest.fixture(autouse=True)
def _clean_environment():
    unset = {setting.env: None for setting in settings.SETTINGS}
    # SGLang sets it when it parses arguments.
    level = logging.root.level
    with environment(**{**unset, **ENGAGING_ENV}, SGLANG_PLUGINS=None):
        yield
    logging.root.setLevel(level)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dsv4")


@pytest.fixture
def doctor(capsys):
    """Runs the command with --json; its exit status and sections."""

    def run(*words: str) -> tuple[int, Findings]:
        status = command.main(["doctor", "--json", *words])
        found = json.loads(capsys.readouterr().out)
        assert found["status"] == status
        states = {"problem", "no answer"}
        assert found["problems"] == [
            f"{section}.{key}"
            for section, findings in found["sections"].items()
            for key, finding in findings.items()
            if finding["state"] in states
        ]
        return status, found["sections"]

    return run


def flags(model: Path, *more: str) -> list[str]:
    return ["--", "--model-path", str(model), *ENGAGING_ARGS, *SIZES, *more]


def values(section: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {key: finding["value"] for key, finding in section.items()}


# ---- this installation


def test_without_flags_what_needs_them_is_unknown(doctor):
    status, found = doctor()
    assert status == 0
    assert {key: f["state"] for key, f in found["gate"].items()} == {
        "flag": "ok",
        "model": "unknown",
        "backend": "ok",
        "attention": "unknown",
        "hicache": "unknown",
        "platform": "ok",
    }
    assert set(found["seams"]) == {seam.target for seam in seam_table.SEAMS}
    assert "layout" not in found


def test_the_environment_is_a_problem_only_where_the_feature_is_switched_on(doctor):
    with environment(SGLANG_HACK_FLASHMLA_BACKEND="auto"):
        status, found = doctor()
        assert status == 1
        assert found["gate"]["backend"]["state"] == "problem"
        assert "is 'auto' and not 'unified_kv_triton'" in found["gate"]["backend"]["detail"]
        with environment(**{FLAG: "0"}):
            status, found = doctor()
            assert status == 0
            assert found["gate"]["backend"]["state"] == "note"


@pytest.mark.parametrize(
    ("plugins", "flag", "status", "state"),
    [
        ("dsv4_reference", "1", 1, "problem"),
        ("dsv4_reference", "0", 0, "note"),
        ("dsv4_reference, bitexact_hicache", "1", 0, "ok"),
        ("", "1", 0, "ok"),
    ],
)
def test_it_tells_when_sglang_will_not_load_the_plugin(doctor, plugins, flag, status, state):
    with environment(SGLANG_PLUGINS=plugins, **{FLAG: flag}):
        found_status, found = doctor("--source-only")
        from sglang.srt.plugins import load_plugins_by_group

        loaded = "bitexact_hicache" in load_plugins_by_group("sglang.srt.plugins")
    assert found["installed"]["loaded_by_sglang"]["state"] == state
    assert found["installed"]["loaded_by_sglang"]["value"] is loaded
    assert found_status == status


def test_text_and_json_say_the_same(capsys):
    command.main(["doctor", "--source-only", "--json"])
    found = json.loads(capsys.readouterr().out)
    command.main(["doctor", "--source-only"])
    text = capsys.readouterr().out
    assert found["verdict"] == "everything fits"
    assert text.rstrip().endswith("everything fits")
    for findings in found["sections"].values():
        for key, finding in findings.items():
            line = (
                rf"(?m)^  {finding['state']} +{re.escape(key)}  .*{re.escape(finding['detail'])}$"
            )
            assert re.search(line, text), key


@pytest.mark.parametrize(
    "words",
    [
        ["--source-only", "--url", "http://127.0.0.1:1"],
        ["--source-only", "--", "--model-path", "x"],
        ["--url", "http://127.0.0.1:1", "--", "--model-path", "x"],
        ["--"],
        ["--nonsense"],
        ["--api-key", "k"],
        ["--timeout", "5"],
        ["--url", "http://127.0.0.1:1", "--timeout", "0"],
        ["--url", "http://127.0.0.1:1", "--timeout", "nan"],
        ["--url", "http://127.0.0.1:1", "--timeout", "1e12"],
    ],
)
def test_a_wrong_command_line_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["doctor", *words])
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_server_flag_that_sglang_does_not_know_is_status_2(model, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["doctor", *flags(model, "--no-such-flag")])
    assert stop.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


# ---- settings


def test_every_setting_with_its_value_and_origin(doctor, model):
    argument = "--hicache-swa-offload-page-stride"
    with environment(
        SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE="8", SGLANG_HICACHE_SWA_OFFLOAD_TAIL_SLOTS="5"
    ):
        _, found = doctor(*flags(model, argument, "4"))
        _, alone = doctor()
    assert list(found["settings"]) == [setting.env for setting in settings.SETTINGS]
    stride = "SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"
    assert found["settings"][stride]["value"] == 4
    assert "command line" in found["settings"][stride]["detail"]
    assert alone["settings"][stride]["value"] == 8
    assert "environment" in alone["settings"][stride]["detail"]
    assert found["settings"]["SGLANG_HICACHE_SWA_OFFLOAD_TAIL_SLOTS"]["value"] == 5
    assert "default" in found["settings"]["SGLANG_SWA_DBG_CHECKSUM"]["detail"]
    assert found["settings"]["SGLANG_HICACHE_SWA_OFFLOAD_REUSE_POINTS"]["value"] == (
        settings.DEFAULT_POINTS
    )


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda setting: setting.env)
def test_what_cannot_be_read_is_a_problem(doctor, setting):
    with environment(**{setting.env: "often"}):
        status, found = doctor()
    readable = setting.type is str
    assert found["settings"][setting.env]["state"] == ("ok" if readable else "problem")
    assert status == (0 if readable else 1)


# ---- server flags: gate and refusals


def test_it_fits(doctor, model):
    status, found = doctor(*flags(model))
    assert status == 0, [f for f in found["gate"].values() if f["state"] != "ok"]
    assert values(found["gate"]) == dict.fromkeys(
        ["flag", "model", "backend", "attention", "hicache", "platform"], True
    )
    assert values(found["refusals"]) == {"rules": "none"}


def test_the_switch_alone_being_off_is_no_problem(doctor, model):
    with environment(**{FLAG: "0"}):
        status, found = doctor(*flags(model))
    assert status == 0
    assert found["gate"]["flag"]["state"] == "note"


def _without_hicache() -> list[str]:
    return [word for word in ENGAGING_ARGS if word != "--enable-hierarchical-cache"]


def test_every_condition_that_does_not_hold_is_named(doctor, model, tmp_path):
    with environment(
        SGLANG_UNIFIED_KV_BIT_EXACT_ALLOW_NON_HIP="0", SGLANG_HACK_FLASHMLA_BACKEND="auto"
    ):
        status, found = doctor("--", "--model-path", str(model), *_without_hicache())
        reasons = engagement.engaged(resolve(model, (), _without_hicache())).reasons
    assert status == 1
    wrong = {key: f["detail"] for key, f in found["gate"].items() if f["state"] == "problem"}
    assert set(wrong) == {"backend", "hicache", "platform"}
    # One definition: what the gate says is what is told.
    assert [detail.partition("? ")[2] for detail in wrong.values()] == list(reasons)

    other = write_config(tmp_path / "other", OTHER_MODEL_CONFIG)
    args = [word for word in ENGAGING_ARGS if word not in ("--page-size", "256")]
    status, found = doctor("--", "--model-path", str(other), *args)
    assert status == 1
    assert "LlamaForCausalLM" in found["gate"]["model"]["detail"]
    assert found["gate"]["backend"]["state"] == "unknown"
    assert found["refusals"]["rules"]["state"] == "unknown"
    assert "layout" not in found


def test_every_refusal_is_named_and_nothing_is_planned(doctor, model):
    args = ("--hicache-write-policy", "write_back", "--hicache-swa-offload-page-stride", "0")
    status, found = doctor(*flags(model, *args))
    assert status == 1
    with environment(**{FLAG: "0"}):
        startup = refusals.Startup.of_record(resolve(model, args))
    assert {key: f["detail"] for key, f in found["refusals"].items()} == {
        rule.name: rule.message(startup) for rule in refusals.refused(startup)
    }
    assert set(found["refusals"]) == {"stride", "write_policy"}
    assert "pools" not in found


def test_what_sglang_refuses_is_passed_on(doctor, tmp_path):
    status, found = doctor(*flags(tmp_path / "nothing"))
    assert status == 1
    assert "SGLang does not accept these flags" in found["flags"]["resolved"]["detail"]
    assert "nothing" in found["flags"]["resolved"]["detail"]


def test_of_an_assertion_that_says_nothing_the_line_is_passed_on(doctor, model):
    with mock.patch(
        "sglang.srt.server_args.ServerArgs.resolve_once", autospec=True, side_effect=_says_nothing
    ):
        status, found = doctor(*flags(model))
    assert status == 1
    assert "AssertionError: raise AssertionError" in found["flags"]["resolved"]["detail"]


def _says_nothing(record):
    raise AssertionError


def test_resolving_leaves_the_switch_as_it_is(model):
    record = configuration.resolve(flags(model)[1:])
    assert os.environ[FLAG] == "1"
    # With the switch on, the launcher would have left its verdict.
    assert not [name for name in vars(record) if "bitexact" in name]


# ---- server flags: the plan


@pytest.fixture
def _cpu():
    """Where unified_kv pools can be built."""
    with cpu_hicache():
        yield


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_layout_is_that_of_sglangs_pools(model, fp8, drafts):
    from sglang.srt.arg_groups.overrides import model_config_of

    server_args = resolve(model)
    publish(server_args)
    pool = make_kv_pool(
        pages=1, rows=1, layers=MODEL_CONFIG["compress_ratios"], nope=448, rope=64, fp8=fp8
    )
    own = [
        make_kv_pool(pages=1, rows=1, layers=(0,), nope=448, rope=64, fp8=fp8)
        for _ in range(drafts)
    ]
    config = model_config_of(server_args)
    expected = DeviceView(pool, own).layout
    asked = {"fp8": fp8, "draft_layers": drafts}
    assert plan.layout_of(config, state_dtype="float32", **asked) == expected
    halved = plan.layout_of(config, state_dtype="bfloat16", **asked)
    assert halved.digest() != expected.digest()
    assert halved.record_bytes("c4_state") * 2 == expected.record_bytes("c4_state")


def test_the_ratio_of_a_draft_layer_is_not_the_models(tmp_path):
    from sglang.srt.arg_groups.overrides import model_config_of

    longer = write_model(tmp_path / "longer", compress_ratios=[0, 4, 128, 4, 0])
    config = model_config_of(resolve(longer))
    layout = plan.layout_of(config, fp8=False, state_dtype="float32")
    assert layout.ratios == (0, 4, 128, 4)


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--hicache-swa-offload-page-stride", "4"),
        ("--hicache-swa-offload-tail-slots", "3", "--hicache-ratio", "3.5"),
        (
            *("--hicache-swa-offload-aligned-prefill", "--chunked-prefill-size", "512"),
            *("--hicache-swa-offload-page-stride", "3"),
        ),
        EAGLE_ARGS,
    ],
)
def test_the_plan_is_what_a_scheduler_plans(doctor, model, args):
    status, found = doctor(*flags(model, *args))
    assert status == 0
    server_args = resolve(model, args)
    publish(server_args)
    pool = make_kv_pool(pages=8, rows=4, layers=MODEL_CONFIG["compress_ratios"], nope=448, rope=64)
    own = (
        [make_kv_pool(pages=8, rows=4, layers=(0,), nope=448, rope=64)]
        if args == EAGLE_ARGS
        else []
    )
    context = build_context(server_args, pages=8, rows=4, pool=pool, drafts=own)
    planned = factory.plan_pools(context)
    pools, sized = values(found["pools"]), planned.planned
    assert pools["windows"] == sized.slots
    assert pools["grid_windows"] == sized.grid_slots
    assert pools["tail_windows"] == sized.tail_slots
    assert pools["bytes"] == sized.nbytes
    assert pools["row_limit"] == sized.row_limit
    assert pools["stride"] == planned.stride
    assert found["layout"]["digest"]["value"] == DeviceView(pool, own).layout.digest()
    assert found["layout"]["slot_bytes"]["value"] == sized.slot_bytes


def test_what_is_missing_for_a_plan_is_named(doctor, model):
    status, found = doctor("--", "--model-path", str(model), *ENGAGING_ARGS)
    assert status == 0
    assert found["pools"]["device_tokens"]["state"] == "unknown"
    assert "--max-total-tokens" in found["pools"]["device_tokens"]["detail"]
    assert "--max-running-requests" in found["pools"]["request_rows"]["detail"]
    assert "windows" not in found["pools"]
    pages = -(-plan.SAMPLE_TOKENS // 256)
    assert found["pools"]["sample"]["value"]["windows"] == 2 * pages


def test_pools_that_do_not_fit_are_a_problem(doctor, model, monkeypatch):
    monkeypatch.setattr(factory, "free_host_memory", lambda: 1_000_000)
    status, found = doctor(*flags(model))
    assert status == 1
    assert "do not fit in host memory" in found["pools"]["memory"]["detail"]
    assert sizing.STRIDE_ARGUMENT in found["pools"]["memory"]["detail"]


# ---- a running server


class Stub:
    """Answers what a server would: text by path, or a status."""

    def __init__(self) -> None:
        self.routes: dict[str, str | int] = {}
        self.keys: list[str | None] = []
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.keys.append(self.headers.get("Authorization"))
                answer = stub.routes.get(self.path, 404)
                status, text = (answer, "") if isinstance(answer, int) else (200, answer)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def serve(self, metrics: str | None = None, route: str = "/server_info", **info: Any) -> None:
        """A server with this page of metrics, None where they are off."""
        facts = {
            "version": "0.5.23",
            "enable_metrics": metrics is not None,
            "enable_hierarchical_cache": True,
            "attention_backend": "dsv4",
            "launch_command": "--model-path m --hicache-swa-offload-page-stride=4 "
            "--hicache-swa-offload-aligned-prefill --tp-size 2",
            "internal_states": [{}],
            **info,
        }
        self.routes = {route: json.dumps(facts)}
        if metrics is not None:
            self.routes["/metrics"] = metrics


@pytest.fixture(scope="module")
def _stub() -> Iterator[Stub]:
    stub = Stub()
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield stub
    stub.server.shutdown()
    thread.join()
    stub.server.server_close()


@pytest.fixture
def stub(_stub) -> Stub:
    _stub.routes, _stub.keys = {}, []
    return _stub


def metrics_page(ranks: int = 1, **numbers: float) -> str:
    """A page with every metric at 0 but these (`name` or `name__reason`), and SGLang's own gauge."""
    lines = [f'sglang:num_running_reqs{{tp_rank="{rank}"}} 0.0' for rank in range(ranks)]
    for metric in METRICS:
        for labels, _ in metric.series():
            name = metric.name.removeprefix(PREFIX)
            reason = labels.get("reason")
            if metric.type is MetricType.COUNTER:
                name = name.removesuffix("_total")
            key = f"{name}__{reason}" if reason else name
            label = f',reason="{reason}"' if reason else ""
            suffix = "_count" if metric.type is MetricType.HISTOGRAM else ""
            lines += [
                f'{metric.name}{suffix}{{tp_rank="{rank}"{label}}} {numbers.get(key, 0)}'
                for rank in range(ranks)
            ]
    return "\n".join(lines) + "\n"


def test_asking_a_server_needs_neither_sglang_nor_torch(stub):
    stub.serve(metrics_page(restored=1))
    code = (
        "import sys; sys.modules.update(sglang=None, torch=None)\n"
        "from sglang_bitexact_hicache.doctor.command import main\n"
        f"sys.exit(main(['doctor', '--url', {stub.url!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything fits" in done.stdout


def test_nobody_there_is_status_2(doctor):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        status, found = doctor("--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert status == 2
    assert "no server answers" in found["server"]["answers"]["detail"]


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "nothing at all",
        "ftp://127.0.0.1",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "http://h:p",
    ],
)
def test_no_url_is_status_2(doctor, url):
    assert doctor("--url", url)[0] == 2


def test_another_server_is_status_2(doctor, stub):
    status, found = doctor("--url", stub.url)
    assert status == 2
    assert "this is no SGLang server" in found["server"]["answers"]["detail"]
    stub.routes = {"/server_info": "<html>"}
    assert doctor("--url", stub.url)[0] == 2


def test_a_server_that_asks_for_its_key(doctor, stub):
    stub.routes = {"/server_info": 401}
    status, found = doctor("--url", stub.url)
    assert status == 2
    assert "--api-key" in found["server"]["answers"]["detail"]
    stub.serve(metrics_page())
    assert doctor("--url", stub.url, "--api-key", "k")[0] == 0
    assert "Bearer k" in stub.keys


def test_metrics_off_names_the_flag(doctor, stub):
    stub.serve(None)
    status, found = doctor("--url", stub.url)
    assert status == 1
    assert "--enable-metrics" in found["server"]["metrics"]["detail"]
    assert found["server"]["engaged"]["state"] == "unknown"


def test_the_feature_is_off_there(doctor, stub):
    stub.serve("sglang:num_running_reqs 0.0\n", enable_hierarchical_cache=False)
    status, found = doctor("--url", stub.url)
    assert status == 1
    assert found["server"]["engaged"]["value"] is False
    assert f"was {FLAG}=1 in its environment?" in found["server"]["engaged"]["detail"]
    assert "--enable-hierarchical-cache" in found["server"]["engaged"]["detail"]

    shown = [{"env_vars": {FLAG: "1", "SGLANG_HACK_FLASHMLA_BACKEND": "auto"}}]
    stub.serve("sglang:num_running_reqs 0.0\n", internal_states=shown)
    _, found = doctor("--url", stub.url)
    assert "SGLANG_HACK_FLASHMLA_BACKEND is 'auto'" in found["server"]["engaged"]["detail"]
    assert FLAG not in found["server"]["engaged"]["detail"]
    assert found["settings"][FLAG]["value"] == "1"


def test_no_report_yet_is_not_off(doctor, stub):
    stub.serve("process_start_time_seconds 1.0\n")
    status, found = doctor("--url", stub.url)
    assert status == 1
    assert found["server"]["engaged"]["value"] is None
    assert "no scheduler has reported yet" in found["server"]["engaged"]["detail"]


def test_another_version_there(doctor, stub):
    stub.serve(metrics_page(), version="0.5.22")
    status, found = doctor("--url", stub.url)
    assert status == 1
    assert found["server"]["sglang_version"]["value"] == "0.5.22"


def test_a_server_that_restores(doctor, stub):
    stub.serve(
        metrics_page(
            ranks=2,
            captured=7,
            restored=5,
            checks_verified=5,
            slots_used=6,
            slots_total=90,
            recomputed_tokens=512,
            evicted__pool_full=3,
            storage_refused__kv=1,
        ),
        route="/get_server_info",
    )
    status, found = doctor("--url", stub.url + "/")
    assert status == 0
    # Two ranks, and nothing is counted twice.
    assert values(found["server"]) == {
        "answers": stub.url,
        "sglang_version": "0.5.23",
        "metrics": True,
        "engaged": True,
        "captured": 7,
        "restored": 5,
        "verified": 5,
        "mismatches": 0,
        "impossible": 0,
        "pool": {"used": 6, "slots": 90},
    }
    assert values(found["recomputed"]) == {
        "recomputed_tokens": 512,
        "evicted.pool_full": 3,
        "storage_refused.kv": 1,
    }
    assert found["counters"]["evicted_total.superseded"]["value"] == 0
    stride = found["settings"]["SGLANG_HICACHE_SWA_OFFLOAD_PAGE_STRIDE"]
    assert (stride["value"], stride["state"]) == ("4", "ok")
    assert found["settings"]["SGLANG_HICACHE_SWA_OFFLOAD_ALIGNED_PREFILL"]["value"] is True
    assert found["settings"][FLAG]["state"] == "unknown"


def test_a_server_with_nothing_to_restore(doctor, stub):
    stub.serve(metrics_page(captured=2))
    status, found = doctor("--url", stub.url)
    assert status == 0
    assert "no prompt has come back" in found["server"]["restored"]["detail"]


@pytest.mark.parametrize(
    ("counter", "key"),
    [
        ("rejected__check_failed", "mismatches"),
        ("rejected__restore_impossible", "impossible"),
        ("storage_closed", "storage_closed"),
    ],
)
def test_what_must_not_happen_is_a_problem(doctor, stub, counter, key):
    stub.serve(metrics_page(restored=4, **{counter: 1}))
    status, found = doctor("--url", stub.url)
    assert status == 1
    assert found["server"][key]["state"] == "problem"
