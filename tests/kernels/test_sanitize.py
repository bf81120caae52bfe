"""The driver for ``compute-sanitizer`` calls every registered kernel: checked on a CPU, with kernels that do nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import Dialect, ModelShape, Program, StoredKernel, loading
from deepinfer.kernels.toolchain.nvrtc import Resources
from deepinfer.kernels.toolchain.shapes import LLAMA_8B, NAMED
from kernel_kit import need_tilelang


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("sanitize", Path(__file__).with_name("sanitize.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module
    spec.loader.exec_module(module)
    return module


class Idle:
    """A kernel that holds what it is given against the types of its signature, and does nothing."""

    def __init__(self, program: Program) -> None:
        from tilelang import tvm

        function = program.build(Dialect())
        used = Resources(64, 0, 0, 0, 0)
        self.stored = StoredKernel(program.name, "sm_90a", "", "", "", (), (), 128, 32 << 10, used, b"")
        self.name = program.name
        self.kinds: list[str | None] = []  # a tensor's type, None for a number; sizes come last
        sizes: dict[str, None] = {}
        for variable in function.params:
            buffer = function.buffer_map.get(variable, None)
            self.kinds.append(None if buffer is None else str(buffer.dtype))
            sizes |= {str(n.name): None for n in (buffer.shape if buffer is not None else ()) if isinstance(n, tvm.tirx.Var)}
        self.kinds += [None] * len(sizes)

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        assert all(n > 0 for n in grid), f"{self.name}: an empty grid"
        given = [str(a.dtype).removeprefix("torch.") if isinstance(a, torch.Tensor) else None for a in args]
        taken = iter(self.kinds)  # in the signature's order; what a kernel does not use, it does not take
        assert all(kind in taken for kind in given), f"{self.name} is given {given}, its signature is {self.kinds}"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel can be had and does nothing."""
    need_tilelang()
    monkeypatch.setattr(loading, "load", lambda programs, *args, **more: [Idle(p) for p in programs])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def test_every_registered_operator_is_exercised(sanitize: ModuleType) -> None:
    assert sorted(sanitize.EXERCISES) == list(registry.operators()), "add the operator to EXERCISES of tests/kernels/sanitize.py"


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("shape", ["smollm2-135m", "smollm2-135m-kv8"])
def test_every_kernel_is_launched_with_what_it_takes(sanitize: ModuleType, shape: str) -> None:
    assert sanitize.exercise(shape, torch.device("cpu")) == []


@pytest.mark.usefixtures("idle")
def test_packed_weights_are_exercised(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shapes as small as the one above do not have."""
    small = ModelShape(256, 4, 2, 64, 512, 128, weights="fp8")
    monkeypatch.setitem(NAMED, "small", small)
    monkeypatch.setattr(sanitize, "EXERCISES", {"linear_fp8": sanitize.linear_fp8})
    missed = sanitize.exercise("small", torch.device("cpu"))
    assert {p.op for p in missed} == {op for op in registry.operators() if registry.programs(small, op)} - {"linear_fp8"}


@pytest.mark.usefixtures("idle")
def test_a_kernel_that_is_left_out_is_named(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "EXERCISES", {"swiglu": sanitize.swiglu})
    missed = sanitize.exercise("smollm2-135m", torch.device("cpu"))
    assert {p.op for p in missed} == set(registry.operators()) - {"swiglu", "linear_fp8"}


def test_without_a_gpu_it_says_so(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main() == 2
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMED if NAMED[name] is not LLAMA_8B])
def test_every_kernel_runs(sanitize: ModuleType, name: str) -> None:
    assert sanitize.exercise(name, torch.device("cuda")) == []
