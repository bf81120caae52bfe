"""The three forms of an operator that tests compare: its reference, its kernels on TileLang's CPU target, its kernels on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.kernels.toolchain import Program
from deepinfer.kernels.toolchain.loading import load
from deepinfer.kernels.toolchain.lowering import on_cpu

FORMS = ["reference", "cpu-target", pytest.param("gpu", marks=pytest.mark.gpu)]


def device_of(form: str) -> torch.device:
    """Where a form runs."""
    return torch.device("cuda" if form == "gpu" else "cpu")


def as_stored(x: torch.Tensor, form: str) -> torch.Tensor:
    """``x`` where and as a form's kernels take it: the CPU target has bfloat16 as float32."""
    if form == "cpu-target" and x.dtype == torch.bfloat16:
        x = x.float()
    return x.to(device_of(form)).contiguous()


class OnCpu:
    """A kernel of the CPU target, launched as one on a GPU is."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._call: Callable[..., Any] | None = None

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        """Launches, compiled by then; numbers of dynamic shapes, which tensors tell there, are dropped."""
        if self._call is None:
            self._call = on_cpu(self._program)
        self._call(*args[: len(self._call.prim_func.params)])  # type: ignore[attr-defined]


def kernels_on(form: str, programs: list[Program]) -> list[Any]:
    """The programs' kernels in one form; skips the test where they cannot be had."""
    if form == "gpu":
        loaded = load(programs, torch.device("cuda"))
        assert loaded is not None, "see the warning"
        return list(loaded)
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    return [OnCpu(p) for p in programs]
