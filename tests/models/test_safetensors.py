"""HF directories: shards, missing, unexpected, truncated and mis-shaped tensors, FP8, random weights, foreign formats."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_kit import expected_logits, network, prompt, save
from deepinfer.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedConfigError, UnsupportedFormatError
from deepinfer.models import load_model, resolve_model
from deepinfer.models.loaders.safetensors_source import SafetensorsSource, find_safetensors
from model_driver import Driver


def logits(directory: Path, ids: list[int], **how: Any) -> torch.Tensor:
    return Driver(load_model(resolve_model(str(directory)), **how)).prefill(ids)[1]


def edit(directory: Path, change: Any) -> None:
    """Rewrites model.safetensors after ``change(tensors)``."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_shards_are_read_together() -> None:
    directory = save("qwen2", shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    ids = prompt(30)
    torch.testing.assert_close(logits(directory, ids), expected_logits("qwen2", ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_nan_and_infinity_among_weights_are_named(value: float, name: str) -> None:
    directory = save("qwen2")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    edit(directory, spoil)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' in .*model\.safetensors holds NaN or infinity"):
        logits(directory, prompt(3))


def test_weights_beyond_the_run_dtype_are_named() -> None:
    directory, name = save("qwen2"), "model.layers.0.mlp.down_proj.weight"
    edit(directory, lambda tensors: tensors[name].view(-1)[:1].fill_(1e5))
    assert logits(directory, prompt(3)).isfinite().all()
    with pytest.raises(CheckpointError, match=rf"'{name}' .* up to 1e\+05, too large for float16; use dtype='float32'"):
        logits(directory, prompt(3), dtype=torch.float16)


def test_a_missing_shard_is_named() -> None:
    directory = save("qwen2", shard_size="60KB")
    gone = sorted(directory.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"{gone.name} is missing"):
        resolve_model(str(directory))


def test_a_tensor_the_index_lists_and_its_shard_lacks_is_named() -> None:
    directory = save("qwen2", shard_size="60KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' is missing from .*{shard.name}"):
        load_model(resolve_model(str(directory)))


def test_missing_unexpected_and_misshaped_tensors_are_named() -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    for change, what in (
        (lambda t: t.pop(name), rf"tensor '{name}' is missing from"),
        (lambda t: t.update(stray=torch.zeros(2)), r"tensor 'stray' in .*model\.safetensors is not part"),
        (lambda t: t.update({name: torch.zeros(8, 64)}), r"has shape \[8, 64\], the configuration needs \[32, 64\]"),
        (lambda t: t.update({name: torch.zeros(32, 64, dtype=torch.int8)}), rf"'{name}' .* dtype torch\.int8"),
    ):
        directory = save("qwen2")
        edit(directory, change)
        with pytest.raises(CheckpointError, match=what):
            load_model(resolve_model(str(directory)))


def test_of_many_that_are_missing_or_unexpected_ten_are_named() -> None:
    for change, what in (
        (
            lambda t: [t.pop(name) for name in sorted(t) if "layers.1." in name],
            r"12 tensors are missing, the first of them from .*: '.* and 2 more",
        ),
        (
            lambda t: t.update({f"stray.{n:02}": torch.zeros(2) for n in range(11)}),
            r"11 tensors are not part of this .*: 'stray.00', .*'stray.09' and 1 more",
        ),
    ):
        directory = save("qwen2")
        edit(directory, change)
        with pytest.raises(CheckpointError, match=what) as caught:
            load_model(resolve_model(str(directory)))
        assert len(str(caught.value).split(", '")) == 10


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.001])
def test_a_truncated_file_is_named(keep: float) -> None:
    directory = save("llama")
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    what = rf"expected {len(data)} bytes, the file has {int(len(data) * keep)}" if keep > 0.1 else "truncated: its header needs"
    with pytest.raises(CheckpointError, match=what):
        load_model(resolve_model(str(directory)))


def test_a_file_that_is_not_safetensors_is_named() -> None:
    directory = save("llama")
    for data in (b"", b"hello", b"\x05\0\0\0\0\0\0\0{bad}"):
        (directory / "model.safetensors").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_model(resolve_model(str(directory)))


@pytest.mark.parametrize(
    ("spans", "size", "why"),
    [
        ({"a": [0, 8], "b": [8, 16]}, 17, "1 byte behind its last tensor"),
        ({"a": [0, 8], "b": [4, 12]}, 12, "'b' overlaps tensor 'a'"),
        ({"a": [0, 8], "b": [0, 8]}, 8, "'b' overlaps tensor 'a'"),
        ({"a": [8, 16]}, 16, "'a' lies 8 bytes behind the header"),
        ({"a": [12, 20], "b": [0, 8]}, 20, "'a' lies 4 bytes behind tensor 'b'"),
    ],
)
def test_tensors_fill_a_file_without_gaps(tmp_path: Path, spans: dict[str, list[int]], size: int, why: str) -> None:
    file = tmp_path / "odd.safetensors"

    def write(places: dict[str, list[int]], size: int) -> None:
        text = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in places.items()}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))

    write({"a": [8, 16], "b": [0, 8]}, 16)
    assert SafetensorsSource([file]).read("b").tolist() == [0, 0]
    write(spans, size)
    with pytest.raises(CheckpointError, match=why) as told:
        SafetensorsSource([file])
    assert "odd.safetensors" in str(told.value) and "\n" not in str(told.value)


def test_old_leftovers_are_ignored() -> None:
    """Stored rotary frequencies, and a second copy of a tied head."""
    directory = save("llama")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(directory, change)
    ids = prompt(20)
    torch.testing.assert_close(logits(directory, ids), expected_logits("llama", ids), rtol=1e-4, atol=1e-4)


def _quantise(values: torch.Tensor, block: list[int] | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values, scales, and what they stand for."""
    top = torch.finfo(torch.float8_e4m3fn).max
    rows, columns = values.shape
    down, across = block or (rows, columns)
    tall, wide = -(-rows // down), -(-columns // across)
    padded = torch.zeros(tall * down, wide * across)
    padded[:rows, :columns] = values
    tiles = padded.view(tall, down, wide, across)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-6) / top
    stored = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    expanded = (stored.float() * scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return stored.view(torch.uint8).reshape(padded.shape)[:rows, :columns].contiguous().view(torch.float8_e4m3fn), scale, expanded


@pytest.mark.parametrize("layout", ["blocks", "tensor", "rows"])
def test_fp8_checkpoints_are_expanded(layout: str) -> None:
    """Blocks that do not divide the matrix, one scale per tensor, one per row; against transformers on the expanded values."""
    directory, net = save("qwen3"), copy.deepcopy(network("qwen3"))
    block = {"blocks": [48, 40], "tensor": None, "rows": [1, 10**6]}[layout]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("proj.weight"):
                shape = [block[0], min(block[1], tensors[name].shape[1])] if block else None
                stored, scale, expanded = _quantise(tensors[name], shape)
                tensors[name] = stored
                tensors[name + ("_scale_inv" if layout == "blocks" else "_scale")] = scale if block else scale.reshape(())
                if layout == "tensor":
                    tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(())
                net.get_parameter(name).data.copy_(expanded)

    edit(directory, change)
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    edit_config(directory, quantization_config=fields | ({"weight_block_size": block} if layout == "blocks" else {}))
    found = resolve_model(str(directory))
    assert found.weight_format == "fp8"
    ids = prompt(40)
    with torch.inference_mode():
        want = net(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Driver(load_model(found)).prefill(ids)[1], want, rtol=1e-4, atol=1e-4)


def test_fp8_without_its_scale_or_with_a_wrong_one_is_named() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for scale, what in ((None, rf"{name}_scale_inv"), (torch.ones(7, 3), r"_scale_inv' .* shape \[7, 3\]")):
        directory = save("llama")

        def change(tensors: dict[str, torch.Tensor], scale: torch.Tensor | None = scale) -> None:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            if scale is not None:
                tensors[name + "_scale_inv"] = scale

        edit(directory, change)
        edit_config(directory, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
        with pytest.raises(CheckpointError, match=what):
            load_model(resolve_model(str(directory)))


@pytest.mark.parametrize(
    "fields", [{"fmt": "e3m4"}, {"weight_block_size": [128]}, {"weight_block_size": [0, 128]}, {"rotation": "hadamard"}]
)
def test_fp8_settings_that_are_not_implemented_are_named(fields: dict[str, Any]) -> None:
    directory = save("llama")
    edit_config(directory, quantization_config={"quant_method": "fp8", **fields})
    with pytest.raises(UnsupportedConfigError, match=next(iter(fields))):
        load_model(resolve_model(str(directory)))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "shiny"}, "shiny"),
        ({"bits": 3}, "unnamed"),
    ],
)
def test_foreign_quantisation_is_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    directory = save("llama")
    edit_config(directory, quantization_config=quantization)
    with pytest.raises(UnsupportedFormatError, match=named):
        resolve_model(str(directory))


def test_adapters_and_packed_tensors_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedFormatError, match="LoRA"):
        resolve_model(str(tmp_path))
    for file, named in (("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")):
        directory = save("llama")
        (directory / file).write_text("{}")
        with pytest.raises(UnsupportedFormatError, match=named):
            resolve_model(str(directory))
    for name, named in (("model.layers.0.mlp.up_proj.qweight", "AWQ or GPTQ"), ("base.lora_A.weight", "LoRA")):
        directory = save("llama")
        edit(directory, lambda tensors, name=name: tensors.update({name: torch.zeros(2)}))
        with pytest.raises(UnsupportedFormatError, match=named):
            load_model(resolve_model(str(directory)))


def test_pickle_weights_are_refused() -> None:
    directory = save("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedFormatError, match="pickle"):
        resolve_model(str(directory))


def test_random_weights_need_only_a_config() -> None:
    directory = save("mistral")
    (directory / "model.safetensors").unlink()
    found = resolve_model(str(directory))
    with pytest.raises(UnsupportedFormatError, match="load_format='dummy'"):
        load_model(found)
    ids = prompt(30)
    first, same, other = (Driver(load_model(found, load_format="dummy", seed=seed)).prefill(ids)[1] for seed in (1, 1, 2))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert first.isfinite().all() and 0.1 < first.std() < 10


def test_progress_counts_up_to_all_bytes() -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(resolve_model(str(save("llama"))), progress=lambda done, total: seen.append((done, total)))
    assert model.vocab_size == 120
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.numel() * 4 for p in network("llama").parameters())


def test_settings_that_do_not_exist_are_refused() -> None:
    found = resolve_model(str(save("llama")))
    with pytest.raises(ConfigError, match="load_format"):
        load_model(found, load_format="tensorizer")
    with pytest.raises(ConfigError, match="float64"):
        load_model(found, torch.float64)
    with pytest.raises(ConfigError, match="load_format='gguf'"):
        load_model(found, load_format="gguf")


def test_what_is_not_there_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (str(tmp_path / "absent"), "./absent", "absent.gguf"):
        with pytest.raises(ModelNotFoundError, match="no such file"):
            resolve_model(name)
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedFormatError, match="directory"):
        resolve_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelNotFoundError, match="hub id"):
        resolve_model("not a name!")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFoundError, match="offline mode is on"):
        resolve_model("someone/absent-model")


def test_config_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for text in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            resolve_model(str(tmp_path))


def test_generation_config_and_template_are_found() -> None:
    directory = save("llama")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "temperature": 0.6}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    found = resolve_model(str(directory))
    assert found.eos_token_ids == (5, 7) and found.generation_config["temperature"] == 0.6
    assert found.chat_template == "{{ messages }}"
    assert found.tokenizer.kind == "hf" and found.tokenizer.path == directory
    before = found.revision
    edit(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
    assert resolve_model(str(directory)).revision != before


@pytest.mark.parametrize(
    "text",
    ['{"a":' * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\xff{"],
    ids=["nested-too-deeply", "more-digits-than-python-reads", "not-utf8"],
)
def test_files_that_are_no_readable_json_are_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"[" * 100_000, "header is not valid"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', "an entry without data_offsets"),
    ],
    ids=["nested-too-deeply", "infinite-offset"],
)
def test_a_hostile_header_is_refused(header: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=named):
        SafetensorsSource([file])


HOSTILE: dict[str, tuple[Any, str]] = {
    "no object": (7, "without data_offsets, 'w'"),
    "backwards": ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "without data_offsets, 'w'"),
    "before the data": ({"dtype": "F32", "shape": [3], "data_offsets": [-8, 4]}, "without data_offsets, 'w'"),
    "three offsets": ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}, "without data_offsets, 'w'"),
    "text offsets": ({"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}, "without data_offsets, 'w'"),
    "no shape": ({"dtype": "F32", "data_offsets": [0, 4]}, "without dtype or shape, 'w'"),
    "no dtype": ({"shape": [1], "data_offsets": [0, 4]}, "without dtype or shape, 'w'"),
    "one number": ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "without dtype or shape, 'w'"),
    "negative": ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "without dtype or shape, 'w'"),
    "number as dtype": ({"dtype": 3, "shape": [1], "data_offsets": [0, 4]}, "without dtype or shape, 'w'"),
    "huge": ({"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}, "'w' is F32 .* and has 4 bytes; the file is damaged"),
}


@pytest.mark.parametrize(("entry", "named"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_is_refused_before_anything_is_read(entry: Any, named: str, tmp_path: Path) -> None:
    file, header = tmp_path / "model.safetensors", json.dumps({"w": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=named) as caught:
        SafetensorsSource([file])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", "a/../../model.safetensors"])
def test_an_index_does_not_lead_out_of_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="lies outside of the checkpoint's directory"):
        find_safetensors(tmp_path)
