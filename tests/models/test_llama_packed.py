"""FP8 weights of the Llama family that stay packed: whole engines on a CPU have the bits of expanded weights, whatever had to give way;
what stays packed, what a configuration alone makes of it, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.engine.engine import Engine
from deepinfer.errors import CheckpointError, ConfigError, KernelBuildError
from deepinfer.kernels.linear_fp8 import cuda as linear_fp8
from deepinfer.kernels.linear_fp8.cuda import Choice, PackedProjection
from deepinfer.models import load_model, resolve_model
from deepinfer.models.kernel_shape import read_kernel_shape
from deepinfer.models.llama import fused
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.models.loaders import load, model_of_size
from deepinfer.models.sizes import resident_bytes
from deepinfer.sampling import SamplingParams
from engine_kit import random_prompts
from exact_kit import COMMON, KINDS, VOCAB, check_same, engine_of, run
from fp8_kit import QUANTIZATION, write_pair
from fused_kit import exact_product, use_stand_ins

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 192}
TOLD = SamplingParams(temperature=0, max_tokens=5, logprobs=-1)
PROMPTS = random_prompts((50, 3, 17, 1, 70), seed=2, vocab=VOCAB)
CUDA = torch.device("cuda")


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    return {**COMMON, **KINDS[kind], **SIZES, **more}


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay packed on a CPU, too."""
    monkeypatch.setattr(load, "keeps_packed", lambda dtype, device: True)
    monkeypatch.setattr(load, "leaves_room", lambda nbytes, device: False)


@pytest.fixture
def kernels(packing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have their fused forward, whose expansions are the CPU target's."""
    use_stand_ins(monkeypatch)


def engine(model: str, kind: str, **settings: Any) -> Engine:
    values = {"max_model_len": 256, "load_format": "auto", "enable_prefix_caching": False, "cuda_graphs": "off", **settings}
    return engine_of("cpu", kind, model=model, **values)


def answers(model: str, kind: str, packed: bool, **settings: Any) -> list[Any]:
    with engine(model, kind, **settings) as made:
        assert bool(made.model.packed_bytes) == packed  # type: ignore[attr-defined]
        return run(made, PROMPTS, TOLD)


# Whole engines


@pytest.mark.parametrize("kind", KINDS)
def test_whole_engines_have_the_bits_of_expanded_weights(
    kind: str, kernels: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights with a bias are expanded when they are loaded, and so is what was not converted."""
    fp8, expanded = write_pair(tmp_path, config_of(kind), powers=True, plain=["model.layers.1.mlp.up_proj"] if kind == "llama" else [])
    want = answers(expanded, kind, packed=False)
    check_same(want, answers(fp8, kind, packed=True, weights="packed", quiet=False))
    assert re.search(r"\n  FP8 weights stay packed, 0\.00 GB, and are multiplied as float32\n", capsys.readouterr().err)
    check_same(want, answers(fp8, kind, packed=False, weights="expanded"))
    check_same(want, answers(fp8, kind, packed=True, max_num_seqs=5, max_num_batched_tokens=40))
    parameters = load_model(resolve_model(fp8))._unpacked  # type: ignore[attr-defined]
    kept = [tuple(weight.shape) for weight in parameters.packed]
    heads = (KINDS[kind]["num_attention_heads"] + 2 * KINDS[kind]["num_key_value_heads"]) * 64
    first = [(heads, 128)] if kind != "window_bias" else []
    out, up, down = (128, KINDS[kind]["num_attention_heads"] * 64), (384, 128), (128, 192)
    assert kept == [*first, out, up, down, *first, out, *([up] if kind != "llama" else []), down]


def test_kernels_for_few_rows(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the library as well, which adds in another order here: a sequence's bits are its own, and right."""
    monkeypatch.setattr(linear_fp8, "choose", lambda i, o, rows: Choice(16, 64, 4096, 64) if rows <= 64 and i < 256 else None)
    monkeypatch.setattr(fused, "_row_counts", lambda: [1, 8, 16, 40, 64])

    def by_kernel(projection: PackedProjection, x: torch.Tensor) -> torch.Tensor:
        if not projection.few.limit:
            return exact_product(projection, x)
        out = x.new_empty((len(x), projection.packed.shape[0]))
        projection.few(x, projection.packed, out)
        return out

    monkeypatch.setattr(PackedProjection, "by_library", by_kernel)
    fp8, expanded = write_pair(tmp_path, config_of("qk_norm"), powers=True)
    with engine(expanded, "qk_norm") as one:
        want = one._runner.logits(PROMPTS[0])
    with engine(fp8, "qk_norm") as one:
        np.testing.assert_allclose(one._runner.logits(PROMPTS[0]), want, rtol=2e-4, atol=2e-4)
        alone = [run(one, [prompt], TOLD)[0] for prompt in PROMPTS]
        assert one.model.packed_bytes  # type: ignore[attr-defined]
    check_same(alone, answers(fp8, "qk_norm", packed=True, max_num_seqs=5, max_num_batched_tokens=60, zero_overhead=True))


# What gives way


def test_kernels_of_other_bits_are_not_used(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU target's order of additions is not that of the product in the library's place."""
    monkeypatch.setattr(linear_fp8, "choose", lambda i, o, rows: Choice(8, 64, 4096, 64) if rows <= 16 and i == 128 else None)
    monkeypatch.setattr(fused, "_row_counts", lambda: [1, 8, 64])
    fp8, expanded = write_pair(tmp_path, config_of("llama"), powers=True)
    want = answers(expanded, "llama", packed=False)
    with pytest.warns(
        RuntimeWarning, match=r"packed weights are expanded, since kernels differ: \[512, 128\]: products of more than 0 rows"
    ):
        check_same(want, answers(fp8, "llama", packed=False))
    with pytest.warns(RuntimeWarning, match="since kernels differ"), pytest.raises(ConfigError, match="weights='packed'"):
        answers(fp8, "llama", packed=False, weights="packed")


def test_without_their_kernels_weights_are_expanded(kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **more: object) -> None:
        raise KernelBuildError("none here")

    fp8, expanded = write_pair(tmp_path, config_of("llama"), powers=True)
    want = answers(expanded, "llama", packed=False)
    monkeypatch.setattr(linear_fp8, "require", missing)
    check_same(want, answers(fp8, "llama", packed=False))
    model: Any = load_model(resolve_model(fp8))
    assert model._fused is not None and model.remarks == (
        "FP8 weights are expanded to float32: their kernels could not be used, see the warning",
    )


def test_reference_operators_run_expanded_weights(packing: None, tmp_path: Path) -> None:
    fp8, expanded = write_pair(tmp_path, config_of("window_bias"))
    check_same(answers(expanded, "window_bias", packed=False), answers(fp8, "window_bias", packed=False))
    assert load_model(resolve_model(expanded)).remarks == ()  # type: ignore[attr-defined]


def test_what_cannot_stay_packed_is_an_error_if_it_must(tmp_path: Path, packing: None) -> None:
    fp8, expanded = write_pair(tmp_path, config_of("llama"))
    with pytest.raises(ConfigError, match=r"weights='packed', but none of .*expanded can stay packed"):
        load_model(resolve_model(expanded), weights="packed")
    with pytest.raises(ConfigError, match="weights='tight' is not one of auto, packed, expanded"):
        load_model(resolve_model(fp8), weights="tight")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights must be one of auto, packed, expanded"):
        engine(fp8, "llama", weights="tight")


@pytest.mark.parametrize(("dtype", "device", "packed"), [("float32", "cuda", 0), ("bfloat16", "cpu", 0), ("bfloat16", "cuda", 1)])
def test_packed_on_a_gpu_in_sixteen_bits(dtype: str, device: str, packed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default if expanded weights took more than half of the GPU, and counted before anything is loaded."""
    fp8, _ = write_pair(tmp_path, config_of("llama"))
    kind = getattr(torch, dtype)
    spread = model_of_size(resolve_model(fp8), kind, torch.device(device), "auto", "expanded")
    whole, numbers = resident_bytes(spread), sum(map(math.prod, spread.parameter_shapes().values()))
    for memory, room in ((4 * numbers, True), (4 * numbers - 1, False)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: SimpleNamespace(total_memory=memory))
        auto = resident_bytes(model_of_size(resolve_model(fp8), kind, torch.device(device), "auto", "auto"))
        assert (auto == whole) == (room or not packed)
    for load_format in ("auto", "dummy"):
        auto, expanded = (
            resident_bytes(model_of_size(resolve_model(fp8), kind, torch.device(device), load_format, form))
            for form in ("auto", "expanded")  # type: ignore[arg-type]
        )
        weights = 2 * (512 * 128 + 128 * 256 + 384 * 128 + 128 * 192)
        scales = 2 * 4 * (32 * 1 + 8 * 2 + 24 * 1 + 8 * 2)
        assert expanded - auto == packed * (weights - scales)


# What stays packed


def change(folder: str, **tensors: torch.Tensor | None) -> None:
    """Puts tensors in the place of others, or takes them away."""
    path = Path(folder) / "model.safetensors"
    found = {**load_file(path), **tensors}
    path.unlink()
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path, {"format": "pt"})


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("scale", "ending", "stays"),
    [
        (torch.tensor(0.5), "_scale", True),
        (torch.tensor([0.5]), "_scale_inv", True),
        (torch.rand(128, 1), "_scale", False),
        (torch.rand(1, 2, dtype=torch.bfloat16), "_scale_inv", True),
    ],
    ids=["tensor", "one", "rows", "bfloat16"],
)
def test_scales(scale: torch.Tensor, ending: str, stays: bool, packing: None, tmp_path: Path) -> None:
    """One a tensor is one of many blocks; one a row is not."""
    fp8, _ = write_pair(tmp_path, config_of("llama"))
    change(fp8, **{f"{NAME}_scale_inv": None, NAME + ending: scale})
    packed, expanded = (model_filled(fp8, form) for form in ("packed", "expanded"))
    assert (packed.parameter(NAME).dtype == torch.float8_e4m3fn) == stays
    for name in expanded.parameter_shapes():
        assert torch.equal(numbers(packed, name), expanded.parameter(name)), name
    assert sum(packed.parameter(name).dtype == torch.float8_e4m3fn for name in expanded.parameter_shapes()) == 13 + stays


def model_filled(folder: str, form: str) -> LlamaModel:
    """Filled, and its places still open."""
    source, fill = resolve_model(folder), load.fill
    model, stored = load._prepared(source, torch.bfloat16, CUDA, "auto", 0, form, torch.device("cpu"))  # type: ignore[arg-type]
    assert isinstance(model, LlamaModel)
    model.finish_loading = lambda: None  # type: ignore[method-assign]
    fill(model, stored)
    return model


def numbers(model: LlamaModel, name: str) -> torch.Tensor:
    """What the parameter stands for."""
    place = model.parameter(name)
    if place.dtype != torch.float8_e4m3fn:
        return place
    wide = model.parameter(f"{name}_scale_inv").repeat_interleave(16, 0).repeat_interleave(128, 1)[:, : place.shape[1]]
    return (place.float() * wide).to(torch.bfloat16)


@pytest.mark.parametrize("block", [[64, 256], [16, 128], [24, 128], [128, 64]], ids=str)
def test_blocks_of_other_sizes(block: list[int], packing: None, tmp_path: Path) -> None:
    """They stay packed if 16 rows by 128 columns lie within, in every weight: else it is expanded."""
    fp8, _ = write_pair(tmp_path, config_of("llama"))
    config = config_of("llama", quantization_config={**QUANTIZATION, "weight_block_size": block})
    (Path(fp8) / "config.json").write_text(json.dumps(config))
    tensors = load_file(Path(fp8) / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    scales = {
        name: torch.rand(
            *(-(-n // b) for n, b in zip(tensors[name.removesuffix("_scale_inv")].shape, block, strict=True)), generator=generator
        )
        for name in tensors
        if name.endswith("_scale_inv")
    }
    change(fp8, **scales)
    packed, expanded = (model_filled(fp8, form) for form in ("packed", "expanded"))
    assert (packed.parameter(NAME).dtype == torch.float8_e4m3fn) == (block not in ([24, 128], [128, 64]))
    assert all(torch.equal(numbers(packed, name), expanded.parameter(name)) for name in expanded.parameter_shapes())


def test_a_configuration_alone(tmp_path: Path) -> None:
    """Random weights are FP8 numbers, the same packed and expanded; what is not to be converted is not."""
    config = config_of("qk_norm", quantization_config={**QUANTIZATION, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = resolve_model(str(tmp_path))
    models = []
    for form in ("packed", "expanded"):
        model, stored = load._prepared(source, torch.bfloat16, CUDA, "dummy", 3, form, torch.device("cpu"))  # type: ignore[arg-type]
        assert isinstance(model, LlamaModel)
        model.finish_loading = lambda: None  # type: ignore[method-assign]
        load.fill(model, stored)
        models.append(model)
    packed, expanded = models
    kept = {name for name in expanded.parameter_shapes() if packed.parameter(name).dtype == torch.float8_e4m3fn}
    every = {name for name in expanded.parameter_shapes() if name.endswith("_proj.weight")}
    assert every - kept == {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")}, "gate and up are one weight"
    for name, shape in expanded.parameter_shapes().items():
        assert torch.equal(numbers(packed, name), expanded.parameter(name)) and expanded.parameter(name).isfinite().all()
        if name in every:
            assert 0.5 < float(expanded.parameter(name).float().std()) * shape[1] ** 0.5 < 2
    up, down = (expanded.parameter(f"model.layers.0.mlp.{part}_proj.weight") for part in ("up", "down"))
    assert len(up.unique()) > 512 > len(down[:128, :128].unique()), "of one block, 8-bit numbers"


def test_kernels_follow_from_the_configuration() -> None:
    plain, fp8 = config_of("llama"), config_of("llama", quantization_config=QUANTIZATION)
    other = config_of("llama", quantization_config={**QUANTIZATION, "weight_block_size": [32, 32]})
    assert [read_kernel_shape(c).weights for c in (plain, fp8, other)] == ["plain", "fp8", "plain"]


# What is refused


def test_numbers_that_would_be_nonsense_are_refused(packing: None, tmp_path: Path) -> None:
    fp8, _ = write_pair(tmp_path, config_of("llama"))
    path = Path(fp8) / "model.safetensors"
    kept = path.read_bytes()
    values = load_file(path)[NAME].clone()
    values.view(torch.uint8)[5, 7] = 0xFF
    for tensors, what in (
        ({NAME: values}, f"'{NAME}' .* holds NaN"),
        ({f"{NAME}_scale_inv": torch.full((1, 2), torch.inf)}, f"'{NAME}(_scale_inv)?' .* holds NaN or infinity"),
        ({f"{NAME}_scale_inv": torch.full((1, 2), 3e37)}, f"'{NAME}' .* too large for bfloat16|holds NaN or infinity"),
        ({f"{NAME}_scale_inv": torch.ones(2, 2)}, rf"'{NAME}_scale_inv' .* shape \[2, 2\], which fits"),
        ({f"{NAME}_scale_inv": None}, f"neither {NAME}_scale_inv nor"),
    ):
        change(fp8, **tensors)
        with pytest.raises(CheckpointError, match=what):
            load_model(resolve_model(fp8), torch.bfloat16)
        path.write_bytes(kept)
