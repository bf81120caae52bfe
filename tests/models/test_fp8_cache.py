"""A model whose keys and values are 8-bit floats is the model whose cache holds the numbers these stand for; and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.kernels.fp8_cache import FP8, CacheScales, decode, encode
from deepinfer.kernels.rope_kv.cuda import RopeKv
from deepinfer.models import load_model, resolve_model
from deepinfer.models.llama import forward as llama
from exact_kit import KINDS, VOCAB, config_of
from fp8_cache_kit import scales_of, weights_of, write
from fp8_kit import QUANTIZATION
from fused_kit import use_stand_ins
from model_driver import Driver

IDS = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(8)).tolist()


def load(folder: str, dtype: torch.dtype, device: str, fp8: bool = True) -> Any:
    return load_model(resolve_model(folder), dtype, device, fp8_cache=fp8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_cache_of_the_stored_numbers(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model with a cache of its dtype into which the numbers go that 8-bit ones stand for, scaled back: bit for bit where scales
    are powers of two, by which nothing is rounded."""
    config = config_of(kind, "cpu")
    folder = write(tmp_path / "m", config, {**weights_of(config), **scales_of(config["num_hidden_layers"], powers=True)})
    model = load(folder, dtype, "cpu")
    scales = model._cache_scales
    assert model.cache_dtype == FP8 and len({s.key for s in scales}) == len({s.value for s in scales}) == len(scales)
    driver = Driver(model)
    assert all(tensor.dtype == FP8 for tensor in driver.kv.values())
    _, got = driver.prefill(IDS)
    _, cut = Driver(model, block=32, shuffle=1).prefill(IDS, 7)
    assert torch.equal(got, cut)

    left = [scale for layer in scales for scale in (layer.key, layer.value)]
    write_wide = llama.kv_write

    def write_rounded(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
        own = left[calls.pop()]
        assert cache.dtype == dtype and scale == 1.0
        write_wide(cache, (decode(encode(rows.to(dtype), own)) * own).to(dtype), slots)

    monkeypatch.setattr(llama, "kv_write", write_rounded)
    calls = list(range(len(left)))[::-1]
    _, want = Driver(load(folder, dtype, "cpu", fp8=False)).prefill(IDS)
    assert not calls and torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_the_forward_of_kernels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins for a GPU's: each layer's scales go where they belong, in prompts and in single rows."""
    config = {**config_of(kind, "cpu"), "head_dim": 64, "num_hidden_layers": 3}
    folder = write(tmp_path / "m", config, {**weights_of(config), **scales_of(3, powers=True)})
    reference = Driver(load(folder, torch.float32, "cpu")).prefill(IDS)[1].log_softmax(-1)
    use_stand_ins(monkeypatch)
    model = load(folder, torch.float32, "cpu")
    scales, driver = model._cache_scales, Driver(model)
    _, got = driver.prefill(IDS)
    _, single = Driver(model, shuffle=1).prefill(IDS[:40], 1)
    assert torch.equal(single, got[:40]) and all(tensor.dtype == FP8 for tensor in driver.kv.values())
    # their bits are others than the references', and a bit may be another 8-bit number
    assert (reference.exp() * (reference - got.log_softmax(-1))).sum(-1).mean() < 1e-3

    write_wide, calls = RopeKv.__call__, itertools.count()

    def write_rounded(op: RopeKv, qkv: Any, cos: Any, sin: Any, slots: torch.Tensor, out: Any, k: Any, v: Any, *rest: Any) -> None:
        write_wide(op, qkv, cos, sin, slots, out, k, v, *rest)
        own = scales[next(calls) % 3]
        for cache, scale in ((k, own.key), (v, own.value)):
            flat = cache.view(-1, *cache.shape[2:])
            flat[slots] = decode(encode(flat[slots], scale)) * scale

    monkeypatch.setattr(RopeKv, "__call__", write_rounded)
    _, want = Driver(load(folder, torch.float32, "cpu", fp8=False)).prefill(IDS)
    assert next(calls) == 3 and torch.equal(got, want)


def test_answers_are_near_those_of_a_whole_cache(tmp_path: Path, device: str) -> None:
    config = config_of("llama", "cpu")
    folder = write(tmp_path / "m", config, weights_of(config))
    found = [Driver(load(folder, torch.float32, device, fp8), device=device).prefill(IDS)[1].log_softmax(-1) for fp8 in (False, True)]
    divergence = (found[0].exp() * (found[0] - found[1])).sum(-1)
    assert 1e-6 < divergence.mean() < 5e-3 and divergence.max() < 2e-2, "3e-3 nats a token here"


def test_scales_are_a_checkpoints_own_affair_where_kv_is_whole(tmp_path: Path) -> None:
    config = config_of("llama", "cpu")
    weights = weights_of(config)
    found = []
    for name, more in (("without", {}), ("with", scales_of(3))):
        model = load(write(tmp_path / name, config, {**weights, **more}), torch.float32, "cpu", fp8=False)
        assert not model.remarks
        found.append(Driver(model).prefill(IDS)[1])
    assert torch.equal(*found)


def test_scales_of_an_fp8_checkpoint_are_read(tmp_path: Path) -> None:
    config = {**config_of("llama", "cpu"), "quantization_config": {**QUANTIZATION, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    model = load(write(tmp_path / "m", config, {**weights_of(config_of("llama", "cpu")), **scales_of(3)}), torch.float32, "cpu")
    assert [scales.key for scales in model._cache_scales] == pytest.approx([0.03, 0.06, 1.0])
    assert [scales.value for scales in model._cache_scales] == pytest.approx([0.011, 0.0055, 1.0])
    (said,) = model.remarks
    assert "8-bit floats" in said and "the checkpoint's scales" in said
    (said,) = load_model(resolve_model(str(tmp_path / "m")), load_format="dummy", fp8_cache=True).remarks
    assert "without scales" in said


@pytest.mark.parametrize("quantized", [False, True], ids=["whole", "fp8"])
def test_one_scale_for_both_is_that_of_either(quantized: bool, tmp_path: Path) -> None:
    """As older checkpoints have it, in a layer each: for both, apart, none. A scale of queries is left alone, whatever it is."""
    config = config_of("llama", "cpu")
    scales = {
        "model.layers.0.self_attn.kv_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.v_proj.v_scale": torch.tensor(2.0),
        "model.layers.0.self_attn.q_scale": torch.full((4,), torch.nan),
        "model.layers.1.self_attn.q_proj.q_scale": torch.tensor(0.0),
    }
    stored = {**config, "quantization_config": QUANTIZATION} if quantized else config
    folder = write(tmp_path / "m", stored, {**weights_of(config), **scales})
    model = load(folder, torch.float32, "cpu")
    assert model._cache_scales == (CacheScales(0.25, 0.25), CacheScales(0.5, 2.0), CacheScales())
    kept, queries = model.remarks
    assert "the checkpoint's scales" in kept and queries == "the checkpoint's q_scale is not used: queries stay float32"
    assert load(folder, torch.float32, "cpu", fp8=False).remarks == ()


@pytest.mark.parametrize(
    ("dtype", "largest", "said"),
    [
        (torch.float16, 65504 / 448, "stand for numbers too large for float16; use dtype='bfloat16'"),
        (torch.bfloat16, 2.0**16, "no scale of KV, which is above 0 and at most 65536; take kv_cache_dtype='auto'"),
        (torch.float32, 2.0**16, "no scale of KV, which is above 0 and at most 65536; take kv_cache_dtype='auto'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["k", "v", "kv"])
def test_scales_are_read_up_to_the_largest_that_keeps_numbers(
    part: str, dtype: torch.dtype, largest: float, said: str, tmp_path: Path
) -> None:
    config, name = config_of("llama", "cpu"), f"model.layers.1.self_attn.{part}_scale"
    value = torch.tensor(largest)
    if float(value) > largest:
        value = value.nextafter(torch.tensor(0.0))
    model = load(write(tmp_path / "m", config, {**weights_of(config), name: value}), dtype, "cpu")
    one = CacheScales(float(value) if "k" in part else 1.0, float(value) if "v" in part else 1.0)
    assert model._cache_scales == (CacheScales(), one, CacheScales())
    stands_for = torch.tensor(448.0) * value
    assert stands_for.to(dtype).isfinite() and encode(torch.tensor([value * 2.0**-9]), float(value)).float() == 2.0**-9
    beyond = value.nextafter(torch.tensor(torch.inf))
    with pytest.raises(CheckpointError, match=said) as raised:
        load(write(tmp_path / "m", config, {**weights_of(config), name: beyond}), dtype, "cpu")
    assert name in str(raised.value) and f"{float(beyond):g}" in str(raised.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model.layers.0.self_attn.k_scale": torch.ones(2)}, r"shape \[2\]; a scale of KV is one number"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, "is 0, no scale of KV"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(-1.0)}, "is -1, no scale of KV"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(torch.nan)}, "is nan, no scale of KV"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(torch.inf)}, "is inf, no scale of KV"),
        ({"model.layers.1.self_attn.kv_scale": torch.tensor(-torch.inf)}, "is -inf, no scale of KV"),
        ({"model.layers.1.self_attn.kv_scale": torch.tensor(0.0)}, "is 0, no scale of KV"),
        ({"model.layers.1.self_attn.v_proj.v_scale": torch.tensor(1e-38)}, "is 1e-38, no scale of KV"),
        ({"model.layers.2.self_attn.k_scale": torch.tensor(1e38)}, r"is 1e\+38, no scale of KV"),
        ({"model.layers.0.self_attn.kv_scale": torch.ones(2)}, r"shape \[2\]; a scale of KV is one number"),
        ({"model.layers.7.self_attn.k_scale": torch.tensor(1.0)}, "of no layer of this model"),
        ({"model.layers.7.self_attn.kv_scale": torch.tensor(1.0)}, "of no layer of this model"),
        (
            {"model.layers.1.self_attn.v_scale": torch.tensor(1.0), "model.layers.1.self_attn.kv_scale": torch.tensor(1.0)},
            "for one scale; remove one",
        ),
        (
            {"model.layers.0.self_attn.k_scale": torch.tensor(1.0), "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)},
            "for one scale; remove one",
        ),
    ],
)
def test_what_is_no_scale_is_refused_by_name(more: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    config = config_of("llama", "cpu")
    folder = write(tmp_path / "m", config, {**weights_of(config), **more})
    with pytest.raises(CheckpointError, match=said) as raised:
        load(folder, torch.float32, "cpu")
    assert next(iter(more)) in str(raised.value)


def test_families_with_caches_of_their_own_refuse_before_they_read(tmp_path: Path) -> None:
    """No weights are there at all."""
    (tmp_path / "config.json").write_text((Path(__file__).parents[1] / "data" / "deepseek_v41" / "full.json").read_text())
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8' is for models of the Llama family, .* leave it out"):
        load_model(resolve_model(str(tmp_path), load_format="dummy"), load_format="dummy", fp8_cache=True)
