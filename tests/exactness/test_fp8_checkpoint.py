"""A released FP8 checkpoint of the Llama family runs as the numbers it stands for, to the last bit: packed on a GPU, expanded elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer.kernels import registry
from deepinfer.kernels.paged_attention.cuda import attention_programs
from deepinfer.kernels.toolchain import Program
from deepinfer.models import resolve_model
from deepinfer.models.kernel_shape import read_kernel_shape
from deepinfer.models.llama.topology import read_topology
from deepinfer.sampling import SamplingParams
from engine_kit import random_prompts
from exact_kit import KINDS, SIZES, VOCAB, check_same, config_of, engine_of, run
from fp8_kit import BLOCK, QUANTIZATION, write_pair

PAGE = 16
"""Tokens of a page in ``engine_of``."""

TOLD = SamplingParams(temperature=0, max_tokens=8, logprobs=-1)


def gpu_programs() -> list[Program]:
    """All kernels that the tests of this file launch on a GPU; also for building them where TileLang is."""
    found: dict[Program, None] = {}
    for kind in KINDS:
        config = {**config_of(kind, "cuda"), "quantization_config": QUANTIZATION}
        shape, topology = read_kernel_shape(config, page_tokens=PAGE), read_topology(config, config["architectures"][0])
        found |= dict.fromkeys(registry.wanted(shape))
        for window in set(topology.windows) - {None}:
            sizes = (shape.heads, shape.kv_heads, shape.head_dim, PAGE)
            found |= dict.fromkeys(attention_programs(*sizes, window or 0, shape.dtype))
    return list(found)


def test_kernels_of_the_gpus_tests_follow_from_the_configurations() -> None:
    programs = gpu_programs()
    assert {p.op for p in programs} == set(registry.operators()) and all(
        dict(p.constants).get("page_tokens", PAGE) == PAGE for p in programs
    )


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_weights_are_the_numbers_they_stand_for(place: str, tmp_path: Path) -> None:
    assert SIZES["cpu"]["intermediate_size"] % BLOCK
    fp8, expanded = write_pair(tmp_path, config_of("qk_norm", place))
    assert resolve_model(fp8).weight_format == "fp8"
    prompts = random_prompts((5, 70, 33), vocab=VOCAB)
    found = []
    for model in (fp8, expanded):
        form = "packed" if place == "cuda" and model == fp8 else "auto"
        with engine_of(place, "qk_norm", model=model, load_format="auto", weights=form) as engine:
            assert bool(engine.model.packed_bytes) == (place == "cuda" and model == fp8), "see the warning"  # type: ignore[attr-defined]
            found.append(run(engine, prompts, TOLD))
    check_same(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_have_the_bits_of_expanded_ones(kind: str, tmp_path: Path) -> None:
    """Every logit and the KV of every layer, in steps of one row to steps that are expanded for, in graphs and without; weights with a
    bias stay expanded. A module that was not converted is as the checkpoint has it."""
    plain = ["model.layers.1.mlp.down_proj"] if kind == "llama" else []
    fp8, expanded = write_pair(tmp_path, config_of(kind, "cuda"), plain=plain)
    lengths = (1, 5, 17, 33, 70, 130, 300, 700)
    prompts = random_prompts(lengths * 5, seed=3, vocab=VOCAB)
    settings: list[dict[str, Any]] = [
        {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "cuda_graphs": "off"},
        {"max_num_seqs": 48, "max_num_batched_tokens": 200},
        {"max_num_seqs": 48, "max_num_batched_tokens": 2048, "cuda_graphs": "off"},
    ]
    found = []
    for model, weights in ((expanded, "auto"), (fp8, "packed"), (fp8, "expanded")):
        for more in settings[:1] if weights != "packed" else settings:
            with engine_of("cuda", kind, model=model, load_format="auto", weights=weights, **more) as engine:
                assert bool(engine.model.packed_bytes) == (weights == "packed"), "see the warning"  # type: ignore[attr-defined]
                found.append(run(engine, prompts, TOLD))
    for other in found[1:]:
        check_same(found[0], other)
