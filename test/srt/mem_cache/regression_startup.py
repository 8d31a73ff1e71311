"""What SGLang has once its plugins are loaded: arguments, environment, help, log lines, modules.

Everything is as text that does not depend on the process. Knows nothing of the plugin: what the
plugin adds by design is taken out by the comparison (regression.py), by name.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from startup_fixtures import MODEL_CONFIG, OTHER_MODEL_CONFIG, write_config

_SLIDING_AND_FULL = {
    "torch_dtype": "bfloat16",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 4096,
}

SLIDING_CONFIG = {
    **_SLIDING_AND_FULL,
    "architectures": ["MuseGlimmerForCausalLM"],
    "model_type": "muse_glimmer",
    "no_rope_layers": [1, 0, 1, 0],
    # Kernels that a CPU does not have.
    "use_attn_output_gate": False,
    "output_soft_cap_temp": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A tiny Muse Glimmer: sliding and full layers, to which SGLang gives a KV pool each."""

GEMMA_CONFIG = {
    **_SLIDING_AND_FULL,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 16,
    # SGLang finds the sliding layers by these two, and then refuses them a pool of their own, with a
    # warning: for Gemma that is switched off.
    "is_hybrid_swa": True,
    "hybrid_layer_pattern": [1, 0, 1, 0],
    "rms_norm_eps": 1e-6,
}
"""A tiny Gemma 3: sliding and full layers in one KV pool."""

MODELS = {
    "gemma3": GEMMA_CONFIG,
    "llama": OTHER_MODEL_CONFIG,
    "muse-glimmer": SLIDING_CONFIG,
    "deepseek-v4": MODEL_CONFIG,
}

_ANY = ("--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "1")
_TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct")
_FILE = ("--hicache-storage-backend", "file", "--hicache-write-policy", "write_back")

COMMANDS: dict[str, tuple[str, Sequence[str]]] = {
    "llama": ("llama", ()),
    "llama, hicache": ("llama", _TIERS),
    "llama, storage": ("llama", (*_TIERS, *_FILE, "--page-size", "64")),
    "llama, sessions": ("llama", ("--enable-streaming-session", "--schedule-policy", "lpm")),
    "llama, no cache": ("llama", ("--disable-radix-cache", "--enable-priority-scheduling")),
    "gemma3": ("gemma3", ("--page-size", "32")),
    "muse-glimmer": ("muse-glimmer", ("--page-size", "16")),
    "muse-glimmer, hicache": (
        "muse-glimmer",
        (*_TIERS, "--page-size", "64", "--swa-full-tokens-ratio", "0.4"),
    ),
    "deepseek-v4": ("deepseek-v4", (*_TIERS, "--page-size", "256")),
}
"""Command lines to resolve: name, model and arguments."""


def facts() -> dict[str, Any]:
    """All of it; call it in a process that has loaded nothing of SGLang yet."""
    records: list[str] = []
    with _log(records), tempfile.TemporaryDirectory() as folder:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.environ import Envs
        from sglang.srt.server_args import ServerArgs

        def clean(text: str) -> str:
            return _ADDRESS.sub("0x…", text.replace(folder, "FOLDER").replace(sys.prefix, "PREFIX"))

        # Usage is left out: it is the same arguments once more, wrapped to the width.
        parser = argparse.ArgumentParser(prog="sglang", usage="…")
        os.environ["COLUMNS"] = "100"
        ServerArgs.add_cli_args(parser)
        found: dict[str, Any] = {
            "environment": {
                name: f"{type(field).__name__} {clean(repr(field.default))}"
                for name, field in vars(Envs).items()
                if hasattr(field, "default")
            },
            "help": _groups(clean(parser.format_help())),
            "parsed": {
                name: clean(repr(value))
                for name, value in vars(parser.parse_args(["--model-path", "x"])).items()
            },
            "signatures": _signatures(),
            "defaults": _fields(ServerArgs(model_path="x"), clean),
        }
        for name, (model, arguments) in COMMANDS.items():
            path = write_config(Path(folder) / model, MODELS[model])
            found[f"resolved: {name}"] = _resolved(path, arguments, clean)
    found["log"] = [clean(line) for line in records]
    return found


def modules() -> list[str]:
    """The modules that this process has imported."""
    return sorted(sys.modules)


_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def _fields(server_args: Any, clean: Any) -> dict[str, str]:
    names = {*type(server_args).__struct_fields__, *vars(server_args)}
    return {name: clean(repr(getattr(server_args, name, "unset"))) for name in sorted(names)}


def _resolved(path: Path, arguments: Sequence[str], clean: Any) -> dict[str, str]:
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(["--model-path", str(path), *_ANY, *arguments])
        server_args.resolve_once()
    except ValueError as error:
        return {"refused": clean(str(error))}
    return _fields(server_args, clean)


def _groups(text: str) -> dict[str, str]:
    """The help by the title of its group."""
    groups: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        if re.fullmatch(r"\S.*:", line):
            title = line
        groups[title] = groups.get(title, "") + line + "\n"
    return {title: lines.strip() for title, lines in groups.items()}


def _signatures() -> dict[str, str]:
    """The public functions that a scheduler calls on its cache, as they are bound in this process."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache import common, registry
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    found = {}
    for owner in (UnifiedRadixCache, ScheduleBatch, PrefillAdder, Req, common, registry):
        for name, value in vars(owner).items():
            if inspect.isfunction(value):
                wrapped = hasattr(value, "__wrapped__")
                found[f"{owner.__name__}.{name}"] = (
                    f"{value.__module__}.{value.__qualname__}{inspect.signature(value)} {wrapped}"
                )
    return found


@contextlib.contextmanager
def _log(records: list[str]) -> Iterator[None]:
    """What is logged meanwhile, from INFO on. SGLang replaces the root logger's handlers: a record
    factory sees them all."""
    stock = logging.getLogRecordFactory()

    def keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = stock(*args, **kwargs)
        if record.levelno >= logging.INFO:
            records.append(f"{record.levelname} {record.name} {record.getMessage()}")
        return record

    logging.setLogRecordFactory(keep)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().setLevel(level)
        logging.setLogRecordFactory(stock)
