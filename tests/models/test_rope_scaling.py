"""Rotary parameters read from configs, old and new style, against transformers' own tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.errors import UnsupportedConfigError
from deepinfer.kernels.rope import RopeTable
from deepinfer.models.rope_config import read_rope

L3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": L3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-factors": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.9},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-untruncated": {**YARN, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


def peer(parameters: dict[str, Any], theta: float) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters={**parameters, "rope_theta": theta}
    )
    return LlamaRotaryEmbedding(config)


def ours(config: dict[str, Any]) -> RopeTable:
    parameters, _ = read_rope(config, 64, 512)
    return RopeTable(parameters, torch.device("cpu"))


def check(table: RopeTable, rotary: Any, positions: torch.Tensor) -> None:
    cos, sin = table.cos_sin(positions)
    want_cos, want_sin = rotary(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], want_cos[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[:, 0, 32:], want_sin[0, :, 32:], rtol=1e-5, atol=1e-5)
    assert torch.equal(sin[:, 0, :32], -sin[:, 0, 32:])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_tables_equal_transformers(name: str, style: str) -> None:
    given = CASES[name]
    if style == "rope_parameters":
        config: dict[str, Any] = {"rope_parameters": {**given, "rope_theta": 50000.0}}
    else:  # older configs: theta apart, and "type" for the kind
        config = {"rope_theta": 50000.0, "rope_scaling": {"type" if key == "rope_type" else key: value for key, value in given.items()}}
    check(ours(config), peer(given, 50000.0), torch.arange(512))


def test_dynamic_scaling_uses_the_length_of_the_row() -> None:
    """Beyond the trained length a row has the frequencies transformers uses when that row is the newest."""
    table = ours({"rope_parameters": {**CASES["dynamic"], "rope_theta": 10000.0}})
    for position in (511, 512, 700, 1023):
        check(table, peer(CASES["dynamic"], 10000.0), torch.tensor([position]))


def test_reach_in_tokens() -> None:
    assert read_rope({}, 64, 512)[1] == 512
    assert read_rope({"rope_scaling": CASES["linear"]}, 64, 512)[1] == 1536
    assert read_rope({"rope_scaling": CASES["dynamic"]}, 64, 512)[1] == 1024
    assert read_rope({"rope_scaling": CASES["llama3"]}, 64, 512)[1] == 512
    assert read_rope({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 64, 512)[1] == 2048


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {**L3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {**CASES["yarn"], "wobble": 3}}, "wobble"),
        ({"rope_parameters": {"mrope_section": [8, 12, 12], "rope_type": "default"}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}}, "original_max_position_embeddings' = 0.5"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1e308}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "factor' = 1e\\+308 stretches 64 positions"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e308}}, "stretches 512 positions"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 10**400}}, "factor"),  # an integer that no float holds
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "default", "frequency_factors": 3}}, "frequency factors"),
        ({"rope_scaling": {"rope_type": "default", "frequency_factors": ["1"] * 32}}, "frequency_factors"),
    ],
)
def test_what_is_not_implemented_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=named):
        read_rope(config, 64, 512)


def test_more_positions_than_rows_can_carry_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="max_position_embeddings"):
        read_rope({}, 64, 2**31)
    assert read_rope({}, 64, 2**31 - 1)[1] == 2**31 - 1
