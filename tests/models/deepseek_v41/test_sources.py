"""Checkpoints that are off in one thing each: named in one line, before the model has memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.errors import CheckpointError, ConfigError, DeepInferError, UnsupportedConfigError, UnsupportedFormatError
from deepinfer.models import load_model, resolve_model
from deepinfer.models.deepseek_v41 import loading
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.loading import load_parameters
from deepinfer.models.deepseek_v41.parameters import Form
from deepinfer.models.deepseek_v41.sources import ReleasedSource
from deepinfer.models.deepseek_v41.topology import read_topology

Tensors = dict[str, torch.Tensor]
EXPERT, LINEAR, TABLE = "layers.3.ffn.experts.5.w1", "layers.3.attn.wkv", "layers.1.engram.embed"


@pytest.fixture(scope="module")
def tensors(made: Path) -> Tensors:
    return {name: tensor for file in made.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def spoiled(made: Path, tensors: Tensors, tmp_path: Path) -> Callable[..., Path]:
    """``spoiled(change)``: the checkpoint in one file, after ``change(tensors)``, which may replace tensors but not write to them."""

    def make(change: Callable[[Tensors], Any] = lambda _: None) -> Path:
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(made / file, tmp_path)
        changed = dict(tensors)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors")
        return tmp_path

    return make


def refused(directory: Path, match: str, error: type[DeepInferError] = CheckpointError, allocates: bool = False, **how: Any) -> str:
    """Loading raises ``error``, in one line, and unless ``allocates`` nothing has been given memory by then."""
    with pytest.MonkeyPatch.context() as patch:
        if not allocates:

            def forbidden(*_: Any) -> None:
                raise AssertionError("the model was given memory")

            patch.setattr(loading, "DeepseekV41Parameters", forbidden)
        with pytest.raises(error, match=match) as caught:
            load_parameters(resolve_model(str(directory)), torch.float32, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(name: str, place: tuple[int, ...], byte: int) -> Callable[[Tensors], None]:
    """Sets one byte of a tensor."""

    def change(tensors: Tensors) -> None:
        raw = tensors[name].view(torch.uint8).clone()
        raw[place] = byte
        tensors[name] = raw.view(tensors[name].dtype)

    return change


@pytest.mark.parametrize("name", [EXPERT, LINEAR, TABLE, "mtp.0.main_proj"])
def test_nan_among_scales(spoiled: Callable[..., Path], name: str) -> None:
    directory = spoiled(put(f"{name}.scale", (1, 0), 255))
    refused(directory, rf"scales '{name}\.scale' in .*model\.safetensors hold NaN \(byte 255\) at \[1, 0\]")


def test_nan_is_found_wherever_a_scan_is_cut(spoiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.models.deepseek_v41.sources._SCAN_BYTES", 64)
    refused(spoiled(put(f"{EXPERT}.scale", (127, 7), 255)), r"at \[127, 7\]")


@pytest.mark.parametrize("kept", [(), (Form.FP8,)], ids=["decoded", "packed"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_among_values(spoiled: Callable[..., Path], kept: tuple[Form, ...], byte: int) -> None:
    directory = spoiled(put(f"{LINEAR}.weight", (63, 255), byte))
    refused(directory, rf"values of '{LINEAR}\.weight'.* hold NaN", allocates=True, keep_packed=kept)


def test_missing_and_extra_tensors_and_what_they_map_to(spoiled: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("layers.2.attn.compressor")]:
            tensors[name.replace("layers.2", "layers.3")] = tensors.pop(name)

    message = refused(spoiled(change), "does not fit its config.json")
    assert "3 tensors are missing: layers.2.attn.compressor.wkv.weight (backbone: plain, BF16 or F32 or F16 [64, 256])" in message
    stray = "layers.3.attn.compressor.norm.weight (BF16 [64]: layer 3 makes no cache of its own ('kv_source_layer_ids'))"
    assert f"3 tensors have no place in it: {stray}" in message


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (f"{EXPERT}.weight", lambda t: t.view(torch.float8_e4m3fn)),  # FP4 pairs that call themselves FP8
        (f"{EXPERT}.weight", lambda t: t[:, :-1].contiguous()),
        (f"{EXPERT}.scale", lambda t: t.view(torch.uint8).float()),
        (f"{LINEAR}.weight", lambda t: t.view(torch.int8)),
        (f"{LINEAR}.scale", lambda t: t[:1].contiguous()),  # blocks of 128 × 128
        (f"{TABLE}.scale", lambda t: t[:-1].contiguous()),
        ("layers.0.attn.attn_sink", lambda t: t.bfloat16()),
    ],
    ids=["fp4-as-fp8", "cut", "float-scales", "fp8-as-bytes", "other-blocks", "short-table", "rounded-sinks"],
)
def test_other_packings_and_shapes(spoiled: Callable[..., Path], name: str, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name] = form(tensors[name])

    refused(spoiled(change), rf"1 tensor is stored otherwise: {name} is ")


def test_a_truncated_shard_is_named(made: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cut"
    shutil.copytree(made, directory)
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    refused(directory, rf"{shard.name} is truncated at tensor")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        resolve_model(str(directory))


def test_raw_bytes_of_scales_and_pairs_are_taken(spoiled: Callable[..., Path], made: Path) -> None:
    """Types that say less and hold the same bits."""

    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.weight"] = tensors[f"{EXPERT}.weight"].view(torch.uint8)
        for name in (EXPERT, LINEAR, TABLE):
            tensors[f"{name}.scale"] = tensors[f"{name}.scale"].view(torch.uint8)

    first = load_parameters(resolve_model(str(made)), torch.bfloat16)
    for kept in ((), (Form.FP8, Form.FP4_PAIRS)):
        other = load_parameters(resolve_model(str(spoiled(change))), torch.bfloat16, keep_packed=kept)
        if not kept:
            assert all(torch.equal(place, other.places[name]) for name, place in first.places.items())


def test_norms_may_be_float32_and_numbers_float16(spoiled: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float() + 2**-20
        tensors["head.weight"] = tensors["head.weight"].half()

    p = load_parameters(resolve_model(str(spoiled(change))), torch.float32)
    assert (p.norm - p.norm.bfloat16().float()).abs().max() > 0
    assert torch.equal(p.head, p.head.half().float())


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"].update(changes)
    file.write_text(json.dumps(config))


def test_a_token_map_of_another_count(spoiled: Callable[..., Path]) -> None:
    directory = spoiled()
    edit_config(directory, x_engram_token_map="derive")
    refused(directory, "2048 tokens give [0-9]+ compressed ids, 'engram_compressed_vocab_size' is 2048")
    (directory / "tokenizer.json").write_text("{}")
    refused(directory, "not a tokenizer that can be read")
    (directory / "tokenizer.json").unlink()
    refused(directory, "tokenizer.json is missing: Engram rows are found by the texts of tokens")
    edit_config(directory, x_engram_token_map="identity", engram_compressed_vocab_size=2000)
    refused(directory, "'x_engram_token_map' = 'identity' and 'engram_compressed_vocab_size' = 2000", UnsupportedConfigError)


def test_a_token_map_from_a_file(spoiled: Callable[..., Path]) -> None:
    directory = spoiled()
    ids = [-1, *range(2000), *range(40)]
    edit_config(directory, x_engram_token_map="map.json", engram_compressed_vocab_size=2000)
    refused(directory, "map.json: not readable")
    (directory / "map.json").write_text(json.dumps({"ids": ids}))
    p = load_parameters(resolve_model(str(directory)), torch.bfloat16)
    assert p.token_map is not None and p.token_map.tolist() == [*ids, *[-1] * 7]
    (directory / "map.json").write_text(json.dumps({"ids": [*ids, 2000]}))
    refused(directory, r"2042 tokens 2001 compressed ids \(the largest is 2000\), .* 'engram_compressed_vocab_size' 2000")
    (directory / "map.json").write_text(json.dumps({"ids": ids * 2}))
    refused(directory, "gives 4082 tokens")
    (directory / "map.json").write_text(json.dumps({"ids": [0, 1.5]}))
    refused(directory, "'ids' must list")


def test_tables_stay_in_their_files(made: Path) -> None:
    p = load_parameters(resolve_model(str(made)), torch.bfloat16, engram_cache_bytes=33 * 80)
    engram = p.layers[3].engram
    assert engram is not None and engram.table.rows == 6332 and engram.table.capacity == 80
    assert isinstance(engram.table._values, np.memmap) and isinstance(engram.table._scales, np.memmap)
    engram.table.read(torch.tensor([5, 5, 9]))
    assert engram.table.counters.bytes_read == 2 * 33
    roomy = load_parameters(resolve_model(str(made)), torch.bfloat16).layers[3].engram
    assert roomy is not None and roomy.table.capacity == 6332 * 8  # a small table needs no large cache
    whole = load_parameters(resolve_model(str(made)), torch.bfloat16, engram_cache_bytes=None).layers[3].engram
    assert whole is not None and whole.table.capacity == 0 and not isinstance(whole.table._values, np.memmap)
    rows = torch.arange(0, 6332, 11)
    assert torch.equal(whole.table.read(rows), engram.table.read(rows))


@pytest.mark.parametrize("kept", [(), (Form.FP8, Form.FP4_PAIRS)], ids=["decoded", "packed"])
def test_a_device_holds_the_same_numbers(made: Path, device: str, kept: tuple[Form, ...]) -> None:
    here = load_parameters(resolve_model(str(made)), torch.bfloat16, keep_packed=kept)
    there = load_parameters(resolve_model(str(made)), torch.bfloat16, device, keep_packed=kept)
    for name, place in there.places.items():
        assert place.device.type == torch.device(device).type
        assert torch.equal(place.cpu().view(torch.uint8), here.places[name].view(torch.uint8)), name


def test_tensors_come_in_any_order(made: Path) -> None:
    source = ReleasedSource(sorted(made.glob("*.safetensors")), read_topology(json.loads((made / "config.json").read_text())))
    names = sorted(source.names(), key=lambda name: name[::-1])
    first = {name: source.read(name) for name in names[:20]}
    assert all(tuple(tensor.shape) == source.shape(name) for name, tensor in first.items())
    assert all(torch.equal(source.read(name), first[name]) for name in reversed(names[:20]))


def test_formats_that_are_not_there(made: Path, tmp_path: Path) -> None:
    refused(made, "holds fp8 weights", ConfigError, load_format="gguf")
    shutil.copy(made / "config.json", tmp_path)
    refused(tmp_path, "no weights that can be read", UnsupportedFormatError)
    assert load_parameters(resolve_model(str(tmp_path)), torch.bfloat16, load_format="dummy").token_map is not None


class Itself:
    """A family that loads itself."""

    seen: tuple[Any, ...] = ()

    @classmethod
    def from_checkpoint(cls, source: Any, dtype: torch.dtype, device: torch.device, load_format: str, seed: int, progress: Any) -> Any:
        cls.seen = (source.name, dtype, device.type, load_format, seed)
        loaded: Any = load_parameters(source, dtype, device, load_format=load_format, seed=seed, progress=progress)
        loaded.vocab_size, loaded.max_position = loaded.topology.vocab, loaded.topology.max_position
        return loaded


def test_a_family_may_load_itself(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.models.loaders.load.resolve_architecture", lambda _: Itself)
    steps: list[tuple[int, int]] = []
    model: Any = load_model(resolve_model(str(made)), torch.bfloat16, seed=4, progress=lambda done, total: steps.append((done, total)))
    assert isinstance(model, DeepseekV41Parameters) and Itself.seen == (str(made), torch.bfloat16, "cpu", "auto", 4)
    assert steps[-1][0] == steps[-1][1] == sum(place.nbytes for _, place in model.places.items())
    with pytest.raises(ConfigError, match="load_format='zip'"):
        load_model(resolve_model(str(made)), torch.bfloat16, load_format="zip")
