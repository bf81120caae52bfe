"""The registry, and what a config may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.errors import UnsupportedConfigError, UnsupportedModelError
from deepinfer.models import register_model, resolve_architecture
from deepinfer.models.config import register_harmless_fields
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.models.llama.topology import read_topology
from deepinfer.models.registry import _registered, known_architectures

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "use_cache": True,
}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in BASE.items() if name not in names}


def test_every_built_in_architecture_is_found() -> None:
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert resolve_architecture(name) is LlamaModel
        assert name in known_architectures()


@pytest.mark.parametrize(("name", "near"), [("LLaMAForCausalLM", "LlamaForCausalLM"), ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")])
def test_an_unknown_architecture_names_registry_and_nearest_match(name: str, near: str) -> None:
    """The match is exact: other spelling is another architecture."""
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' is not in deepinfer\.models\.registry; nearest match: {near}"):
        resolve_architecture(name)


def test_models_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.models.registry._registered", dict(_registered))
    register_model("MyForCausalLM", "deepinfer.models.llama.forward:LlamaModel")
    assert resolve_architecture("MyForCausalLM") is LlamaModel
    register_model("BrokenForCausalLM", "no.such.module:Thing")
    with pytest.raises(UnsupportedModelError, match=r"no\.such\.module"):
        resolve_architecture("BrokenForCausalLM")
    with pytest.raises(ValueError, match="module:Class"):
        register_model("X", "module.Class")


def test_models_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("TheirsForCausalLM", "deepinfer.models.llama.forward:LlamaModel", "deepinfer.models")
    monkeypatch.setattr("deepinfer.models.registry.entry_points", lambda group: [point] if group == "deepinfer.models" else [])
    assert resolve_architecture("TheirsForCausalLM") is LlamaModel
    assert "TheirsForCausalLM" in known_architectures()


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("LlamaForCausalLM", {"logit_scale": 0.5}, "logit_scale = 0.5"),
        ("LlamaForCausalLM", {"sliding_window": 128}, "sliding_window = 128"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("LlamaForCausalLM", {"hidden_size": 66}, "hidden_size"),
        ("LlamaForCausalLM", {"head_dim": 15}, "head_dim"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"vocab_size": "big"}, "vocab_size"),
        ("LlamaForCausalLM", {"rms_norm_eps": -1}, "rms_norm_eps"),
        ("LlamaForCausalLM", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("LlamaForCausalLM", {"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ("LlamaForCausalLM", {"attention_bias": 1}, "attention_bias"),
        ("LlamaForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("LlamaForCausalLM", {"some_list": [1]}, "some_list"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window"),
        ("MistralForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_a_field_that_is_not_implemented_is_named(architecture: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=named):
        read_topology({**BASE, **fields}, architecture)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=name):
        read_topology(without(name), "LlamaForCausalLM")


def test_features_that_are_off_and_private_fields_are_accepted() -> None:
    off = {"sliding_window": None, "logit_scale": None, "use_qk_norm": False, "extra": {}, "note": ""}
    assert read_topology({**BASE, **off}, "LlamaForCausalLM").windows == (None, None)
    with pytest.raises(UnsupportedConfigError, match="our_tracking_id"):
        read_topology({**BASE, "our_tracking_id": 7}, "LlamaForCausalLM")
    register_harmless_fields("our_tracking_id")
    assert read_topology({**BASE, "our_tracking_id": 7}, "LlamaForCausalLM").layers == 2


def test_windows_by_layer() -> None:
    def windows(architecture: str, **fields: Any) -> tuple[int | None, ...]:
        return read_topology({**BASE, **fields}, architecture).windows

    assert windows("MistralForCausalLM", sliding_window=9) == (9, 9)
    assert windows("MistralForCausalLM", sliding_window=None) == (None, None)
    assert windows("MistralForCausalLM") == (4096, 4096)
    assert windows("Qwen2ForCausalLM", sliding_window=9, max_window_layers=1) == (None, None)
    assert windows("Qwen2ForCausalLM", sliding_window=9, max_window_layers=1, use_sliding_window=True) == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert windows("Qwen3ForCausalLM", sliding_window=9, use_sliding_window=True, layer_types=kinds) == (9, None)


def test_remote_code_is_refused_unless_ours_runs_the_architecture(tmp_path: Any) -> None:
    import json

    from deepinfer.models import resolve_model

    auto_map = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BASE, **auto_map, "architectures": ["XForCausalLM"]}))
    with pytest.raises(UnsupportedConfigError, match="auto_map"):
        resolve_model(str(tmp_path))
    file.write_text(json.dumps({**BASE, **auto_map}))
    assert resolve_model(str(tmp_path)).weight_format == "none"


def test_a_config_without_architectures_is_refused(tmp_path: Any) -> None:
    from deepinfer.models import resolve_model

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="architectures"):
        resolve_model(str(tmp_path))


def test_limits_and_groups_are_known_without_weights() -> None:
    config = {**BASE, "max_position_embeddings": 256, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert LlamaModel.position_limit(config) == 1024
    model = LlamaModel.from_config(config, torch.bfloat16, torch.device("meta"))
    groups, states = model.kv_groups(32)
    assert states == [] and groups[0].page_tokens == 32
    assert groups[0].page_bytes == 32 * 2 * 2 * 2 * 16 * 2  # tokens, layers, k and v, heads, width, bytes
