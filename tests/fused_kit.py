"""The Llama family's fused forward on a CPU: kernels of the CPU target and, of attention and products, torch."""

from __future__ import annotations

import importlib

import pytest
import torch

from attention_kit import stand_in
from deepinfer.kernels.linear import cuda as linear
from deepinfer.kernels.linear.cuda import Product, Projection
from deepinfer.kernels.linear_fp8 import cuda as linear_fp8
from deepinfer.kernels.linear_fp8.cuda import PackedProjection
from deepinfer.kernels.toolchain import loading
from deepinfer.models.llama import fused
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.worker import graphs
from graphs_kit import Recorded
from kernel_kit import OnCpu, need_tilelang

OPERATORS = ("argmax", "embedding", "linear", "linear_fp8", "paged_attention", "rms_norm", "rope_kv", "swiglu")


def exact_product(projection: Product, x: torch.Tensor) -> torch.Tensor:
    """In float64, whose order of additions is lost when it is rounded."""
    out = x.double() @ projection.weight.double().T
    return (out if projection.bias is None else out + projection.bias.double()).to(x.dtype)


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the family made from now on have their fused forward; bfloat16 is float32 on the CPU target."""
    need_tilelang()
    stand_in(monkeypatch)
    monkeypatch.setattr(loading, "load", lambda programs, device, after=False, store=None: [OnCpu(p) for p in programs])
    for module in (fused, *(importlib.import_module(f"deepinfer.kernels.{op}.cuda") for op in OPERATORS)):
        if hasattr(module, "run_dtype"):
            monkeypatch.setattr(module, "run_dtype", lambda dtype: "bfloat16")
    for module in (linear, linear_fp8):
        monkeypatch.setattr(module, "choose", lambda in_features, out_features, rows, gated=False: None)
    for kind in (Projection, PackedProjection):
        monkeypatch.setattr(kind, "by_library", exact_product)
    monkeypatch.setattr(fused, "_LARGEST_STEP", 64)  # so that steps run in pieces

    def finish(model: LlamaModel) -> None:
        assert model._unpacked is not None
        model._places.close()
        how = (model.dtype, model.device, model._invariant, model._cache_scales)
        model._fused = fused.FusedForward(model.topology, model._unpacked, model._rope, *how)

    monkeypatch.setattr(LlamaModel, "finish_loading", finish)
    monkeypatch.setattr(graphs, "can_record", lambda device: True)
    monkeypatch.setattr(graphs, "recorder_for", lambda device: Recorded())
