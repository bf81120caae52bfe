"""Settings, switches and devices: what holds by default, and what a wrong value says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig
from deepinfer.errors import ConfigError, UnsupportedFormatError
from deepinfer.platforms import available_devices, get_platform
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.platforms.cuda import CudaPlatform


def test_defaults_on_a_cpu() -> None:
    run = EngineConfig(model="m", device="cpu").resolve()
    assert (run.max_num_seqs, run.max_num_batched_tokens, run.kv_memory_fraction) == (64, 512, 0.5)
    assert run.dtype in (torch.bfloat16, torch.float32) and run.device.type == "cpu"


def test_batch_invariance_holds_unless_it_is_given_up() -> None:
    assert EngineConfig(model="m", device="cpu").resolve().batch_invariant
    assert not EngineConfig(model="m", device="cpu", batch_invariant=False).resolve().batch_invariant
    with pytest.raises(ConfigError, match="batch_invariant must be True or False, got 'off'"):
        EngineConfig(model="m", batch_invariant="off")  # type: ignore[arg-type]


def test_dtype_auto_is_bf16_only_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, dtype in ((frozenset({"avx512_bf16"}), torch.bfloat16), (frozenset({"avx2"}), torch.float32)):
        monkeypatch.setattr("deepinfer.platforms.cpu._cpu_flags", lambda flags=flags: flags)
        assert EngineConfig(model="m", device="cpu").resolve().dtype is dtype
    assert EngineConfig(model="m", device="cpu", dtype=torch.float32).resolve().dtype is torch.float32


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"trust_remote_code": True}, ["trust_remote_code", "register_model"]),
        ({"model": ""}, ["model"]),
        ({"dtype": "int3"}, ["dtype", "bfloat16"]),
        ({"block_size": 48}, ["block_size", "64"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_seqs": 10**11}, ["max_num_seqs", "1048575"]),
        ({"max_num_batched_tokens": 10**11}, ["max_num_batched_tokens", "16777215"]),
        ({"num_threads": 10**9}, ["num_threads", "1024"]),
        ({"max_model_len": -4}, ["max_model_len"]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ["max_num_seqs", "max_num_batched_tokens"]),
        ({"kv_memory_fraction": 1.5}, ["kv_memory_fraction"]),
        ({"kv_memory_fraction": 0.5, "gpu_memory_utilization": 0.6}, ["kv_memory_fraction", "gpu_memory_utilization"]),
        ({"num_kv_blocks": 5, "kv_memory_fraction": 0.5}, ["num_kv_blocks", "kv_memory_fraction"]),
        ({"load_format": "pickle"}, ["load_format", "safetensors"]),
        ({"seed": -1}, ["seed"]),
        ({"enable_prefix_caching": "yes"}, ["enable_prefix_caching"]),
    ],
)
def test_a_wrong_setting_names_itself_and_what_to_use(settings: dict[str, object], names: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        EngineConfig(**{"model": "m", **settings})  # type: ignore[arg-type]
    assert all(name in str(e.value) for name in names)


def test_a_quantization_that_is_not_read_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormatError, match="'awq'"):
        EngineConfig(model="m", quantization="awq")


def test_an_unknown_setting_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'tensor_parallel'.*block_size"):
        EngineConfig.from_args("m", tensor_parallel=2)


def test_gpu_memory_utilization_is_the_same_setting() -> None:
    assert EngineConfig(model="m", gpu_memory_utilization=0.25).kv_memory_fraction == 0.25
    assert EngineConfig(model="m", device="cpu", kv_memory_fraction=0.3).resolve().kv_memory_fraction == 0.3


def test_few_batched_tokens_lower_the_default_number_of_sequences() -> None:
    assert EngineConfig(model="m", device="cpu", max_num_batched_tokens=3).resolve().max_num_seqs == 3
    assert EngineConfig(model="m", device="cpu", max_num_seqs=700).resolve().max_num_batched_tokens == 700


def test_float16_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        EngineConfig(model="m", device="cpu", dtype="float16").resolve()


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="'cpu'"):
        get_platform(name)


def test_a_missing_gpu_names_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "count", staticmethod(lambda: 0))
    with pytest.raises(ConfigError, match=r"'cuda:0'.*device='cpu'"):
        EngineConfig(model="m", device="cuda:0").resolve()
    assert get_platform("auto").name == "cpu"
    assert [p.name for p in available_devices()] == ["cpu"]


def test_a_gpu_number_beyond_those_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "count", staticmethod(lambda: 2))
    with pytest.raises(ConfigError, match="cuda:1"):
        get_platform("cuda:2")


def test_cpu_memory_is_positive_and_within_the_total() -> None:
    p = CpuPlatform()
    assert 0 < p.memory_available() <= p.memory_total()
    assert "cores" in p.describe()


def test_the_arithmetic_of_a_processor_names_library_and_instructions() -> None:
    told = {}
    for capability in ("default", None):
        env = {**os.environ, **({"ATEN_CPU_CAPABILITY": capability} if capability else {})}
        code = "from deepinfer.platforms.cpu import CpuPlatform; print(CpuPlatform().arithmetic)"
        told[capability] = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert f"torch {torch.__version__} " in told[None] and torch.backends.cpu.get_cpu_capability() in told[None]
    assert "DEFAULT" in told["default"] and told[None].split()[-1] == told["default"].split()[-1]


@pytest.mark.gpu
def test_cuda_numerics_are_set_before_a_model_runs() -> None:
    p = get_platform("cuda")
    p.prepare(None)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0" and os.environ["CUBLASLT_WORKSPACE_SIZE"] == "0"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert 0 < p.memory_available() <= p.memory_total()


def test_switches_are_read_by_name_and_type() -> None:
    assert environ.get("DEEPINFER_NUM_THREADS", {}) is None
    assert environ.get("DEEPINFER_NUM_THREADS", {"DEEPINFER_NUM_THREADS": "3"}) == 3
    assert environ.get("DEEPINFER_QUIET", {"DEEPINFER_QUIET": "on"}) is True
    with pytest.raises(ConfigError, match=r"DEEPINFER_NUM_THREADS='0'"):
        environ.get("DEEPINFER_NUM_THREADS", {"DEEPINFER_NUM_THREADS": "0"})
    with pytest.raises(KeyError):
        environ.get("DEEPINFER_NOPE", {})


def test_a_setting_wins_over_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nonsense")
    monkeypatch.setenv("DEEPINFER_NUM_THREADS", "2")
    monkeypatch.setenv("DEEPINFER_QUIET", "1")
    assert EngineConfig(model="m", device="cpu").resolve().num_threads == 2
    assert EngineConfig(model="m", device="cpu", num_threads=1).resolve().num_threads == 1
    assert EngineConfig(model="m", device="cpu", quiet=False).resolve().quiet is False
    with pytest.raises(ConfigError, match="nonsense"):
        EngineConfig(model="m").resolve()


def test_every_switch_is_described() -> None:
    rows = environ.describe({"DEEPINFER_QUIET": "1"})
    assert [r["name"] for r in rows] == [s.name for s in environ.SWITCHES] and len({r["name"] for r in rows}) == len(rows)
    quiet = next(r for r in rows if r["name"] == "DEEPINFER_QUIET")
    assert quiet["value"] is True and quiet["set"] and all(r["why"] and r["kind"] for r in rows)
