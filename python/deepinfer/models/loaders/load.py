"""Fills a model from what ``resolve_model`` found."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol, get_args, runtime_checkable

import torch

from ...errors import ConfigError, UnsupportedFormatError
from ..base import BatchDependentModel, Fp8CacheModel, LoadableModel, Model, PackingModel, WeightForm
from ..contract import check_model
from ..places import PACKED_SCALE
from ..registry import resolve_architecture
from .dummy import DummyFp8Source, DummySource
from .fp8 import Fp8Source
from .kv_scales import NO_SCALES, KvScales, read_kv_scales
from .resolved import ResolvedModel
from .safetensors_source import SafetensorsSource
from .source import Progress, WeightSource, fill

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
RUN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class LoadsItself(Protocol):
    """A family whose weights are not all numbers to be copied: packed forms, tables that stay in their files."""

    def from_checkpoint(
        self,
        source: ResolvedModel,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str,
        seed: int,
        progress: Progress | None,
    ) -> LoadableModel:
        """A class method: what ``load_model`` does, ``finish_loading`` included."""


def check_load_format(source: ResolvedModel, load_format: str) -> str:
    """The form weights are to be read in: ``dummy``, or what ``source`` holds (``safetensors``, ``fp8``, ``gguf``).

    Raises ``ConfigError`` if they are asked for in another, ``UnsupportedFormatError`` if there are none.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return load_format
    found = source.weight_format
    if found == "none":
        raise UnsupportedFormatError(
            f"{source.name}: no weights that can be read (safetensors or GGUF); load_format='dummy' runs random ones"
        )
    if load_format != "auto" and load_format != ("gguf" if found == "gguf" else "safetensors"):
        raise ConfigError(f"load_format={load_format!r}, but {source.name} holds {found} weights; use load_format='auto'")
    return found


def _source(source: ResolvedModel, load_format: str, seed: int, family: type[LoadableModel], dtype: torch.dtype) -> WeightSource:
    found = check_load_format(source, load_format)
    quantization = source.config.get("quantization_config")
    if found == "dummy":
        shapes = family.from_config(source.config, dtype, torch.device("meta")).parameter_shapes()
        return Fp8Source(DummyFp8Source(shapes, seed, quantization), quantization) if quantization else DummySource(shapes, seed)
    if found == "gguf":
        from .gguf_source import GgufSource

        return GgufSource(source.weight_files, source.config)
    stored = SafetensorsSource(source.weight_files)
    return Fp8Source(stored, source.config["quantization_config"]) if found == "fp8" else stored


def keeps_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights can stay packed: kernels multiply them on a GPU, in 16 bits."""
    return device.type == "cuda" and dtype != torch.float32


def leaves_room(nbytes: int, device: torch.device) -> bool:
    """Whether weights of ``nbytes`` leave half of a GPU's memory to KV."""
    return 2 * nbytes <= torch.cuda.get_device_properties(device).total_memory


def _prepared(
    source: ResolvedModel, dtype: torch.dtype, device: torch.device, load_format: str, seed: int, form: WeightForm, place: torch.device
) -> tuple[LoadableModel, WeightSource]:
    """The model with memory on ``place`` and nothing in it, as it runs on ``device``, and what fills it. Weights stay packed that the
    source, the family and the device can keep so, if ``form`` wants it or expanded ones left too little room."""
    family = resolve_architecture(source.architecture)
    weights = _source(source, load_format, seed, family, dtype)
    make: Callable[..., LoadableModel] | None = getattr(family, "from_packed", None)  # see PackingModel
    if form == "expanded" or make is None or not isinstance(weights, Fp8Source) or not keeps_packed(dtype, device):
        return family.from_config(source.config, dtype, place), weights
    if form == "auto":
        shapes = family.from_config(source.config, dtype, torch.device("meta")).parameter_shapes()
        if leaves_room(sum(map(prod, shapes.values())) * dtype.itemsize, device):
            return family.from_config(source.config, dtype, place), weights
    packable = weights.packable()
    model = make(source.config, dtype, place, packable)
    check_model(model)
    wanted = model.parameter_shapes()
    weights.keep([name for name in packable if name + PACKED_SCALE in wanted], dtype)
    return model, weights


def model_of_size(source: ResolvedModel, dtype: torch.dtype, device: torch.device, load_format: str, weights: WeightForm) -> LoadableModel:
    """The model as ``load_model`` would make it, without memory: for counting bytes. Reads the headers of FP8 checkpoints for a GPU;
    raises as ``load_model`` does before it reads weights."""
    family, meta = resolve_architecture(source.architecture), torch.device("meta")
    if isinstance(family, LoadsItself) or not keeps_packed(dtype, device):
        return family.from_config(source.config, dtype, meta)
    return _prepared(source, dtype, device, load_format, 0, weights, meta)[0]


def no_fp8_cache(name: str) -> ConfigError:
    """What is said of a model that keeps no KV in 8-bit floats; ``name``: which."""
    return ConfigError(
        f"kv_cache_dtype='fp8' is for models of the Llama family, which keep keys and values as they are; {name} has caches of its own: "
        "leave it out"
    )


def keep_fp8_cache(model: Model, name: str, scales: KvScales = NO_SCALES) -> None:
    """Has ``model``, which ``name`` is, keep keys and values as 8-bit floats. Raises ``ConfigError`` if it cannot, else as it does."""
    if not isinstance(model, Fp8CacheModel):
        raise no_fp8_cache(name)
    model.use_fp8_cache(*scales)


def load_model(
    source: ResolvedModel,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    batch_invariant: bool = True,
    weights: WeightForm = "auto",
    fp8_cache: bool = False,
) -> LoadableModel:
    """Builds the model of ``source`` on ``device`` with run dtype ``dtype`` and fills it.

    ``load_format``: ``auto``, ``safetensors``, ``gguf`` or ``dummy`` (random weights from ``seed``, needs only the config).
    ``progress(done, total)`` counts bytes of parameters. Without ``batch_invariant`` a family may take its fastest way for every number of
    rows, if it has one (``base.BatchDependentModel``). ``weights``: whether those of FP8 checkpoints stay ``packed`` (an error where they
    cannot) or are ``expanded``; ``auto``: expanded unless they took more than half of a GPU. ``fp8_cache``: KV is kept as 8-bit floats
    with the checkpoint's scales (an error for a family that cannot, see ``base.Fp8CacheModel``). Raises ``UnsupportedModelError``,
    ``UnsupportedConfigError``, ``UnsupportedFormatError``, ``CheckpointError`` or ``ConfigError``; ``ModelContractError`` for a family of
    another package that does not keep the contract of ``base``.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if dtype not in RUN_DTYPES:
        raise ConfigError(f"dtype {dtype} is not one of float32, bfloat16, float16")
    if weights not in get_args(WeightForm):
        raise ConfigError(f"weights={weights!r} is not one of {', '.join(get_args(WeightForm))}")
    family, device = resolve_architecture(source.architecture), torch.device(device)
    if fp8_cache and not hasattr(family, "use_fp8_cache"):  # said before anything is read
        raise no_fp8_cache(source.name)
    if isinstance(family, LoadsItself):
        model = family.from_checkpoint(source, dtype, device, load_format, seed, progress)
        check_model(model)
    else:
        model, stored = _prepared(source, dtype, device, load_format, seed, weights, device)
        check_model(model)
        if not batch_invariant and isinstance(model, BatchDependentModel):
            model.allow_batch_dependence()
        if fp8_cache:
            keep_fp8_cache(model, source.name, read_kv_scales(stored, dtype))
        fill(model, stored, progress)
    if weights == "packed" and not (isinstance(model, PackingModel) and model.packed_bytes):
        raise ConfigError(
            f"weights='packed', but none of {source.name} can stay packed: that takes an FP8 checkpoint of the Llama family with scales in "
            "blocks of 128 columns, and a GPU with its kernels; leave weights out"
        )
    return model
