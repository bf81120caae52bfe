"""The Llama family's forward of kernels, on a CPU: kernels of the CPU target and, of attention and products, torch. Whole engines give the
references' logits, and a sequence its bits whatever runs beside it, in prompt steps, mixed steps and recorded decode steps alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deepinfer.engine.engine import Engine
from deepinfer.kernels.linear.cuda import Projection
from deepinfer.models.base import row_buckets
from deepinfer.models.llama import fused
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from engine_kit import random_prompts
from exact_kit import COMMON, KINDS, VOCAB, check_same, engine_of, run
from fused_kit import exact_product, use_stand_ins

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 96}
TOLD = SamplingParams(temperature=0, max_tokens=5, logprobs=-1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the family made from now on have their fused forward."""
    use_stand_ins(monkeypatch)


def write_checkpoint(folder: Path, kind: str) -> None:
    """Random weights, norms and biases among them, that differ from layer to layer."""
    config = {**COMMON, **KINDS[kind], **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = LlamaModel.from_config(config, torch.float32, torch.device("cpu")).parameter_shapes()
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    save_file({name: w + 1 if "norm" in name else w for name, w in weights.items()}, folder / "model.safetensors")


def engine(folder: Path, kind: str, **settings: Any) -> Engine:
    values = {"max_model_len": 256, "load_format": "auto", "enable_prefix_caching": False, **settings}
    return engine_of("cpu", kind, model=str(folder), **values)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_engines(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    prompts = random_prompts((50, 130, 3, 17, 1, 70), seed=2, vocab=VOCAB)
    write_checkpoint(tmp_path, kind)
    with engine(tmp_path, kind) as references:
        want_logits = references._runner.logits(prompts[1])
    request.getfixturevalue("kernels")
    with engine(tmp_path, kind, max_num_seqs=1, max_num_batched_tokens=256, cuda_graphs="off") as one:
        np.testing.assert_allclose(one._runner.logits(prompts[1]), want_logits, rtol=2e-4, atol=2e-4)
        want = [run(one, [prompt], TOLD)[0] for prompt in prompts]
    for rows, settings in ((90, {"cuda_graphs": "off"}), (90, {"zero_overhead": True}), (60, {"zero_overhead": True})):
        with engine(tmp_path, kind, max_num_seqs=6, max_num_batched_tokens=rows, **settings) as many:
            check_same(want, run(many, prompts, TOLD, turns=[0, 0, 1, 2, 4, 5]), settings)
            assert many.metrics().steps["mixed"] > 1 and many.model._fused is not None  # type: ignore[attr-defined]
            metrics = many.metrics()
            for counts in (metrics.graphs, metrics.prompt_graphs):
                assert (counts.get("replays", 0) > 0) == ("cuda_graphs" not in settings)
            assert rows > 64 or metrics.prompt_graphs["replays"] == metrics.steps["mixed"] + metrics.steps["prefill"] > 5


@pytest.mark.usefixtures("kernels")
def test_without_batch_invariance_nothing_is_compared_and_rows_are_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of this test have the same bits for any number of rows, so that the answers are the same ones."""
    prompts = random_prompts((50, 3, 17, 70), seed=2, vocab=VOCAB)
    write_checkpoint(tmp_path, "llama")
    with engine(tmp_path, "llama", max_num_seqs=1, max_num_batched_tokens=256, cuda_graphs="off") as one:
        want = [run(one, [prompt], TOLD)[0] for prompt in prompts]
    rows: set[int] = set()

    def product(projection: Projection, x: torch.Tensor) -> torch.Tensor:
        rows.add(x.shape[0])
        return exact_product(projection, x)

    def compared(*_: object) -> None:
        raise AssertionError("row counts were compared")

    monkeypatch.setattr(Projection, "by_library", product)
    monkeypatch.setattr(fused, "agreeing_rows", compared)
    with engine(tmp_path, "llama", max_num_seqs=1, max_num_batched_tokens=256, cuda_graphs="off", batch_invariant=False) as one:
        rows.clear()
        check_same(want, [run(one, [prompt], TOLD)[0] for prompt in prompts], {})
        assert rows == {1, 3, 17, 50, 64, 6}  # 70 in pieces of 64
    with engine(tmp_path, "llama", max_num_seqs=6, max_num_batched_tokens=90, batch_invariant=False) as many:
        check_same(want, run(many, prompts, TOLD, turns=[0, 0, 1, 2]), {})
        assert many.metrics().graphs.get("replays", 0) > 0


@pytest.mark.parametrize("most", [1, 5, 40, 256, 257, 300, 600, 1000, 1025, 2000, 8191, 8192, 9000])
def test_every_decode_step_has_a_graph(most: int) -> None:
    """Whatever the number of sequences; row counts that disagree are passed over."""
    made = object.__new__(fused.FusedForward)
    for disagreeing in (set(), {4, 48, 64}, set(range(9))):
        made._rows = [r for r in fused._row_counts() if r not in disagreeing]
        rows = made.graph_rows(most)
        assert rows == sorted(set(rows)) and set(rows) <= set(made._rows) and sum(r >= most for r in rows) == (most <= 8192)
        assert all(made.padded_rows(n) in rows for n in range(1, min(most, 8192) + 1))
    made._rows = None
    assert made.graph_rows(most) == row_buckets(min(most, 8192)) and made.graph_rows(most)[-1] >= min(most, 8192)
    made._rows = [8192]
    assert made.graph_rows(most) == ([8192] if most > 4096 else [])


def of_size(hidden: int, wide: int, rows: list[int]) -> fused.FusedForward:
    """A forward that knows its layers' sizes and which row counts agree."""
    made = object.__new__(fused.FusedForward)
    heads = hidden // 64
    sizes = {"hidden": hidden, "heads": heads, "kv_heads": heads // 4, "head_dim": 64, "intermediate": wide, "vocab": 9, "qk_norm": False}
    made.topology, made.dtype = SimpleNamespace(**sizes), torch.bfloat16  # type: ignore[assignment]
    made._rows = rows
    return made


@pytest.mark.parametrize("most", [1, 20, 40, 100, 512, 1000, 2048, 8192, 20000])
def test_steps_with_prompts_have_a_graph_where_the_host_is_waited_for(most: int) -> None:
    every = fused._row_counts()
    small = of_size(576, 1536, every).prompt_rows(most)
    assert small[-1] == small_end(every, min(most, 8192)), "135M parameters: every step up to the longest product"
    for n in range(1, min(most, 8192) + 1):
        bucket = next(b for b in small if b >= n)
        assert bucket <= max(32, 2 * n) and (n <= 256 or bucket <= n + n // 4)
    large = of_size(4096, 14336, every).prompt_rows(most)
    assert large == [b for b in small if b <= 192], "8B parameters: few rows"
    for disagreeing in ({32, 64}, set(range(33, 1500))):
        agreeing = [r for r in every if r not in disagreeing]
        rows = of_size(576, 1536, agreeing).prompt_rows(most)
        assert rows == sorted(set(rows)) and set(rows) <= set(agreeing) and sum(r >= most for r in rows) == (most <= 8192)
    assert of_size(16384, 53248, every).prompt_rows(most) == [b for b in small if b <= 14]


def small_end(counts: list[int], rows: int) -> int:
    """The least of the counts that holds so many rows."""
    return next(c for c in counts if c >= rows)
