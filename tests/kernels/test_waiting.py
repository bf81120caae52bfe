"""Every kernel of a step lets the next one start, waits for those before, and reads nothing but weights until then: but for attention of
single rows, whose older keys are there once ``rope_kv`` lets it start."""

from __future__ import annotations

import dataclasses

import pytest

import kernel_kit
from deepinfer.kernels import registry
from deepinfer.kernels.embedding.cuda import Embedding
from deepinfer.kernels.toolchain import Program
from deepinfer.kernels.toolchain.shapes import SMOLLM2_135M
from kernel_kit import read_before_waiting

ALWAYS = ("embedding", "rms_norm", "rope_kv", "swiglu")
"""Operators looked at on every change; the others at night."""


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, id=p.name, marks=[] if p.op in ALWAYS else pytest.mark.nightly) for p in registry.wanted(SMOLLM2_135M)],
)
def test_only_weights_are_read_before_waiting(program: Program) -> None:
    older = {"k", "v", "table", "position", "table_row"} if program.factory == "decode_attention" else set()
    assert read_before_waiting(program, late=program.op == "rope_kv") <= {"weight", "weights"} | older


def test_the_check_sees_a_read_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same kernel with its wait at the end."""
    (program,) = Embedding.programs(7, 64, 32, "bfloat16")
    assert read_before_waiting(program) == set()
    found = kernel_kit.lowered(program)
    wait = "  cudaGridDependencySynchronize();\n"
    assert wait in found.source
    body, _, _ = found.source.replace(wait, "").rpartition("}")
    late = dataclasses.replace(found, source=f"{body}{wait}}}\n")
    monkeypatch.setattr(kernel_kit, "lowered", lambda program: late)
    assert read_before_waiting(program) == {"ids", "table", "x", "position", "cosines", "sines", "row_cos", "row_sin"}
