"""Made checkpoints: read back by other means than ours, in both forms, byte for byte from a seed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.engine.tokenizer import load_tokenizer
from deepinfer.errors import ConfigError, UnsupportedModelError
from deepinfer.models import resolve_model
from deepinfer.models.deepseek_v41 import make_checkpoint as making
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.drawn import Drawn
from deepinfer.models.deepseek_v41.loading import load_parameters
from deepinfer.models.deepseek_v41.made_tokenizer import build_tokenizer, control_tokens, save_tokenizer
from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint
from deepinfer.models.deepseek_v41.parameters import Form, weights
from deepinfer.models.deepseek_v41.sources import read_token_map
from deepinfer.models.deepseek_v41.topology import read_topology

Load = Callable[..., dict[str, Any]]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def digest(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def plainly(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Float32 numbers of a stored weight, decoded with torch's own types."""
    values, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return values.float()
    spread = scale.float()  # torch knows e8m0
    if values.dtype == torch.int8:
        codes = values.view(torch.uint8).int()
        return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1)] * spread.repeat_interleave(32, 1)
    if "embed" not in name:
        spread = spread.repeat_interleave(32, 0)[: values.shape[0]]
    return values.float() * spread.repeat_interleave(32, 1)[:, : values.shape[1]]


@pytest.fixture(scope="module")
def released(made: Path) -> DeepseekV41Parameters:
    return load_parameters(resolve_model(str(made)), torch.float32)


def test_a_checkpoint_is_loaded_as_torch_reads_it(made: Path, released: DeepseekV41Parameters) -> None:
    tensors, p = stored(made), released
    for name, place in p.places.items():
        assert torch.equal(place, plainly(tensors, name)), name
    rows = torch.tensor([0, 6125, 17, 17])
    for layer in (1, 3):
        engram = p.layers[layer].engram
        assert engram is not None
        assert torch.equal(engram.table.read(rows, torch.float32), plainly(tensors, f"layers.{layer}.engram.embed.weight")[rows])
    assert p.token_map is not None and p.token_map.tolist() == list(range(2048))


def test_weights_are_rounded_once_to_the_run_dtype(made: Path) -> None:
    tensors = stored(made)
    p = load_parameters(resolve_model(str(made)), torch.bfloat16)
    for name, place in p.places.items():
        assert torch.equal(place, plainly(tensors, name).to(place.dtype)), name
    assert p.layers[0].moe.w2.dtype == torch.bfloat16


def test_packed_weights_are_the_stored_bytes(made: Path) -> None:
    tensors = stored(made)
    p = load_parameters(resolve_model(str(made)), torch.bfloat16, keep_packed=(Form.FP8, Form.FP4_PAIRS))
    moe, attn = p.layers[6].moe, p.layers[6].attn
    first = "layers.6.ffn.experts.5."
    assert torch.equal(moe.w13[5, 128:], tensors[first + "w3.weight"].view(torch.uint8))
    assert torch.equal(moe.scales["w13"][5, :128], tensors[first + "w1.scale"].view(torch.uint8))
    assert torch.equal(attn.wq_b.view(torch.uint8), tensors["layers.6.attn.wq_b.weight"].view(torch.uint8))
    assert torch.equal(attn.scales["wq_b"], tensors["layers.6.attn.wq_b.scale"].view(torch.uint8))
    for name, place in p.places.items():
        assert torch.equal(place.float(), tensors[name].to(place.dtype).float() if place.dtype.is_floating_point else
                           tensors[name].view(torch.uint8).float()), name  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "dummy"])
def test_every_way_from_a_seed_gives_the_same_numbers(
    made: Path, released: DeepseekV41Parameters, load: Load, form: str, tmp_path: Path
) -> None:
    """float32 under the same names, and nothing on disk at all."""
    if form == "plain":
        make_checkpoint(load("tiny"), tmp_path / "plain", seed=3, plain=True)
        assert {tensor.dtype for tensor in stored(tmp_path / "plain").values()} == {torch.float32}
        config = json.loads((tmp_path / "plain" / "config.json").read_text())
        assert "quantization_config" not in config and not read_topology(config).quantised_weights
        other = load_parameters(resolve_model(str(tmp_path / "plain")), torch.float32)
    else:
        other = load_parameters(resolve_model(str(made)), torch.float32, load_format="dummy", seed=3)
        kept = load_parameters(resolve_model(str(made)), torch.float32, load_format="dummy", seed=3, keep_packed=tuple(Form))
        tensors = stored(made)
        assert kept.parameter_shapes().keys() <= tensors.keys()
        for name, place in kept.places.items():
            if place.dtype in (torch.uint8, torch.float8_e4m3fn):
                assert torch.equal(place.view(torch.uint8), tensors[name].view(torch.uint8)), name
    assert other.parameter_shapes() == released.parameter_shapes()
    for name, place in released.places.items():
        assert torch.equal(place, other.places[name]), name
    rows = torch.arange(0, 6126, 7).view(2, -1)[:, :400]
    first, second = released.layers[1].engram, other.layers[1].engram
    assert first is not None and second is not None
    assert torch.equal(first.table.read(rows, torch.float32), second.table.read(rows, torch.float32))


def test_a_seed_gives_the_same_bytes_in_pieces_of_any_size(made: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_PIECE_NUMBERS", 20_000)
    largest = 0
    pieces = making._pieces

    def watched(*args: Any) -> Any:
        nonlocal largest
        for piece in pieces(*args):
            largest = max(largest, len(piece))
            yield piece

    monkeypatch.setattr(making, "_pieces", watched)
    make_checkpoint(load("tiny"), tmp_path / "again", seed=3, shard_bytes=5_000_000)
    assert digest(made) == digest(tmp_path / "again")
    assert largest <= 32 * 1024 * 4  # a block of scales of the widest tensor, never a whole one (up to 2 MB)


def test_the_bytes_of_a_seed_are_known(load: Load) -> None:
    """Neither a platform nor a release of a library moves them."""
    state = hashlib.sha256()
    for weight in weights(read_topology(load("tiny"))):
        if weight.name.startswith(("layers.3.attn", "layers.3.ffn.experts.2", "layers.3.hc", "layers.3.engram", "mtp.2.conf")):
            drawn = Drawn(weight, 7)
            state.update(drawn.decoded(0, min(drawn.rows, 64)).contiguous().numpy().tobytes())
    assert state.hexdigest()[:16] == "1bd3a0fc7373152b"


def test_numbers_have_sizes_that_a_model_runs_on(load: Load) -> None:
    for weight in weights(read_topology(load("tiny"))):
        drawn = Drawn(weight, 0)
        values = drawn.decoded(0, min(drawn.rows, 256))
        assert values.isfinite().all() and values.unique().numel() > 1, weight.name
        if values.numel() >= 1024:
            # scales are powers of two (a factor of √2 either way), and small tensors have few of them
            assert 0.6 < (values - drawn.mean).square().mean().sqrt() / drawn.deviation < 1.65, weight.name


def test_shards_index_and_order_of_files(made: Path, released: DeepseekV41Parameters, tmp_path: Path) -> None:
    index = json.loads((made / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in made.glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    tensors = stored(made)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    # the same tensors in other files, in another order, without an index
    for part in range(3):
        save_file(dict(sorted(tensors.items(), key=lambda item: item[0][::-1])[part::3]), tmp_path / f"part-{part}.safetensors")
    shutil.copy(made / "config.json", tmp_path)
    second = load_parameters(resolve_model(str(tmp_path)), torch.float32)
    assert all(torch.equal(place, second.places[name]) for name, place in released.places.items())


def test_the_tokenizer_writes_any_text(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(str(made))
    assert capfd.readouterr().err == ""  # nobody needs to know what transformers does not know
    text = "Hello, wörld! 你好\n\tabc ABC"
    ids = tokenizer.encode(text)
    assert tokenizer.vocab_size == 2048 and ids[0] == 0 and len(ids) < len(text.encode()) + 1
    assert tokenizer.backend.decode(ids[1:]) == text
    assert tokenizer.special_id("eos_token") == 1 and tokenizer.backend.id_to_token(2046) == "<｜image｜>"


@pytest.mark.parametrize(("vocab", "compressed"), [(2048, 1500), (2048, 2000), (700, 460), (20_000, 14_000)])
def test_a_derived_token_map_has_the_count_of_the_configuration(load: Load, vocab: int, compressed: int, tmp_path: Path) -> None:
    config = load(
        "tiny", x_engram_token_map=None, vocab_size=vocab, engram_compressed_vocab_size=compressed, dspark_noise_token_id=vocab - 1
    )
    config["image_token_id"] = vocab - 2
    topology = read_topology(config)
    save_tokenizer(build_tokenizer(topology, control_tokens(config, topology)), tmp_path, 100)
    ids = read_token_map(topology, tmp_path)
    assert ids is not None and ids.shape == (vocab,) and set(ids.tolist()) == set(range(compressed))
    tokenizer = load_tokenizer(str(tmp_path))
    one, other = tokenizer.encode("aa")[1:], tokenizer.encode("AA")[1:]
    assert len(one) == len(other) == 1 and one != other
    assert ids[one].tolist() == ids[other].tolist() != ids[tokenizer.encode("ab")[1:]].tolist()


def test_a_made_checkpoint_loads_with_its_derived_token_map(load: Load, tmp_path: Path) -> None:
    config = load("tiny", x_engram_token_map=None, engram_compressed_vocab_size=1500, engram_layer_ids=[1], engram_num_embeddings=[6126])
    make_checkpoint(config, tmp_path / "derived", seed=0)
    p = load_parameters(resolve_model(str(tmp_path / "derived")), torch.bfloat16)
    assert p.token_map is not None and set(p.token_map.tolist()) == set(range(1500))


def test_what_cannot_be_made_is_refused_in_one_line(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, error: type[Exception] = ConfigError, **changes: Any) -> None:
        with pytest.raises(error, match=match) as caught:
            make_checkpoint(load("tiny", **changes), tmp_path / "new", seed=0)
        assert "\n" not in str(caught.value) and not (tmp_path / "new").exists()

    for ids in (2048, 300):  # capitals share ids, and only so many
        refused(f"with 1[0-9]{{3}} to 20[0-9]{{2}} compressed ids, not {ids} ", x_engram_token_map=None, engram_compressed_vocab_size=ids)
    refused("names a file", x_engram_token_map="map.json")
    refused("share an id", dspark_noise_token_id=2046)
    with pytest.raises(UnsupportedModelError, match="load_format='dummy'"):
        make_checkpoint({"architectures": ["LlamaForCausalLM"]}, tmp_path / "new", seed=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("kept")
    with pytest.raises(ConfigError, match="not an empty directory"):
        make_checkpoint(load("tiny"), tmp_path / "full", seed=0)
    assert (tmp_path / "full" / "precious").read_text() == "kept"
    monkeypatch.setattr(making.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    refused(r"takes 0.0 GB and 0.0 GB are free")


def test_a_write_that_fails_leaves_nothing(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        make_checkpoint(load("tiny"), tmp_path / "new", seed=0, shard_bytes=1_000_000, progress=failing)
    assert not (tmp_path / "new").exists()


def test_full_depth_at_reduced_width_is_drawn(narrow: dict[str, Any]) -> None:
    resolved = SimpleNamespace(config=narrow, weight_format="none", name="narrow", weight_files=(), tokenizer=SimpleNamespace(path=Path()))
    p = load_parameters(resolved, torch.bfloat16, load_format="dummy", seed=1)  # type: ignore[arg-type]
    assert isinstance(p, DeepseekV41Parameters) and len(p.layers) == 40 and p.drafts is not None
    assert all(place.float().isfinite().all() for _, place in p.places.items())
