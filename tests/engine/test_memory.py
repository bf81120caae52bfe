"""A device that runs out of memory while an engine starts: the error says what to lower, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.cli.app import main
from deepinfer.engine import assembly
from deepinfer.engine.memory import is_out_of_memory
from deepinfer.errors import CapacityError
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.sampling import SamplingParams
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.runner import ModelRunner
from engine_kit import generate, make_engine, random_prompts, tiny_checkpoint

ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB"),
    "cuda": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    "host": MemoryError("Unable to allocate 32.0 GiB"),
}
POOLS = r"lower kv_memory_fraction \(now 0\.5\), num_kv_blocks or max_num_seqs \(now \d+\)"
PHASES = {
    "start": (CpuPlatform, "prepare", "no memory is left for a process on cpu .*another device"),
    "weights": (assembly, "load_model", r"no memory is left for the weights on cpu \(.* of .* GiB are free.*a smaller model, dtype="),
    "pools": (KVCache, "__init__", f"no memory is left for KV and step buffers on cpu .*{POOLS}"),
    "copies": (ModelRunner, "measure_swap", f"no memory is left for copies on cpu .*{POOLS}"),
}


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["torch", "cuda"])
def test_every_phase_of_a_start_says_what_to_lower(phase: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, said = PHASES[phase]
    checkpoint = tiny_checkpoint("llama", layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(ERRORS[kind]))
        with pytest.raises(CapacityError, match=said) as refused:
            make_engine(checkpoint, "cpu")
    assert refused.value.__cause__ is ERRORS[kind] and "\n" not in str(refused.value)
    with make_engine(checkpoint, "cpu") as engine:  # and the next start has what the first one had taken
        assert len(generate(engine, random_prompts((5,)), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].tokens) == 3


def test_a_command_has_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(KVCache, "__init__", failing(ERRORS["torch"]))
    assert main(["generate", "--model", str(tiny_checkpoint("llama", layers=1)), "--device", "cpu", "hello"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("deepinfer: error: no memory is left for KV and step buffers on cpu") and "kv_memory_fraction" in said


@pytest.mark.parametrize("phase", PHASES)
def test_other_errors_stay_what_they_are(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, _ = PHASES[phase]
    fault = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(where, name, failing(fault))
    with pytest.raises(RuntimeError) as raised:
        make_engine(tiny_checkpoint("llama", layers=1), "cpu")
    assert raised.value is fault


def test_which_errors_mean_it() -> None:
    assert all(map(is_out_of_memory, ERRORS.values()))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) and not is_out_of_memory(KeyError("memory"))
    assert not is_out_of_memory(ValueError("out of memory"))
