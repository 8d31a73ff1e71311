"""The reference platform's CUDA variant, as far as a machine without a GPU can tell.

What it chooses and replaces: in processes of their own, whose torch says that it has an NVIDIA GPU.
What it computes on one: benchmark/gpu_server.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="needs sglang 0.5.23")

from dsv4_reference_platform import activation, install, launch

PRETEND = """
import torch, torchvision, types
torch.version.cuda = "13.0"
properties = types.SimpleNamespace(
    multi_processor_count=132, total_memory=141 << 30, major=9, minor=0, name="NVIDIA H200"
)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda *args: properties
torch.cuda.get_device_capability = lambda *args: (9, 0)
torch.cuda.get_device_name = lambda *args: "NVIDIA H200"
"""
SHIM = "import dsv4_reference_platform.sgl_kernel_shim as shim; shim.install()\n"
IS_CUDA = "from sglang.srt.utils import is_cuda; print(is_cuda())"


def python(code: str, **env: str) -> str:
    """The last line that a process of this interpreter printed."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **launch.PLATFORM_ENV, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.strip().splitlines()[-1]


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", activation.PLATFORM_NAME)
    monkeypatch.setenv(activation.DEVICE_VARIABLE, "cuda")


def test_the_device_is_the_cpu_unless_asked(monkeypatch):
    monkeypatch.delenv(activation.DEVICE_VARIABLE, raising=False)
    monkeypatch.setenv("SGLANG_PLATFORM", activation.PLATFORM_NAME)
    assert activation.device() == "cpu"
    assert activation.activate().endswith(":ReferenceCpuPlatform")
    argv = launch.server_argv(1)
    assert argv[argv.index("--device") + 1] == "cpu" and "--disable-cuda-graph" not in argv
    assert install.replaced_kernels() == install.KERNELS


def test_the_device_is_a_gpu_when_asked(cuda):
    assert activation.activate().endswith(":ReferenceCudaPlatform")
    argv = launch.server_argv(1)
    assert argv[argv.index("--device") + 1] == "cuda" and "--disable-cuda-graph" in argv


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setenv(activation.DEVICE_VARIABLE, "tpu")
    with pytest.raises(ValueError, match="tpu"):
        activation.device()


def test_on_a_gpu_stock_kernels_stay_unless_named(cuda, monkeypatch):
    assert install.replaced_kernels() == {}
    monkeypatch.setenv(install.KERNELS_VARIABLE, "moe.hash_topk,metadata")
    names = set(install.replaced_kernels().values())
    assert "moe.hash_topk" in names and "metadata.sparse_buffers" in names
    assert not any(name.startswith("attention") for name in names)
    monkeypatch.setenv(install.KERNELS_VARIABLE, "moe.hash_topq")
    with pytest.raises(ValueError, match="hash_topq"):
        install.replaced_kernels()


def test_sglang_is_told_that_sgl_kernel_is_missing():
    assert python(SHIM + PRETEND + IS_CUDA, **{activation.DEVICE_VARIABLE: "cuda"}) == "False"
    # Control: what SGLang takes this machine for where the variant was not asked for.
    assert python(SHIM + PRETEND + IS_CUDA) == "True"


def test_the_scheduler_imports_and_gets_its_kernels():
    """Everything that a scheduler process imports, without sgl_kernel; then what is in which place."""
    code = """
import importlib, pkgutil
for name in ("managers.scheduler", "models.deepseek_v4", "entrypoints.http_server"):
    importlib.import_module(f"sglang.srt.{name}")
from dsv4_reference_platform import install
from dsv4_reference_platform.kernels import transfer_kv
install.install()
resolve = pkgutil.resolve_name
dsv4 = "sglang.kernels.ops.attention.dsv4"
indexer = "sglang.srt.layers.attention.dsv4.indexer"
host = resolve("sglang.srt.mem_cache.memory_pool_host")
assert install.not_installed() == []
assert resolve(f"{dsv4}.compress.compress_forward").__module__ == f"{dsv4}.compress"
assert resolve(f"{dsv4}.unified_kv_kernels.runtime._cu_count")() == 132
assert resolve("sglang.kernels.ops.moe.dsv4.hash_topk").__name__ == "hash_topk_triton"
chosen = resolve(f"{indexer}.topk_transform_paged")
assert chosen is resolve(f"{indexer}.topk_transform_pytorch_vectorized")
assert host.transfer_kv_direct is transfer_kv.transfer_kv_direct
assert not hasattr(host, "transfer_kv_all_layer_mla")
register = resolve("sglang.srt.mem_cache.pool_host.common._cuda_host_register")
assert register.__module__ == "sglang.srt.mem_cache.pool_host.common"
print("in place")
"""
    assert python(SHIM + PRETEND + code, **{activation.DEVICE_VARIABLE: "cuda"}) == "in place"
