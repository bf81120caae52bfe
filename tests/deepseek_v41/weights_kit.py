"""Configurations to test with, and seeded weights for them.

- ``plan("tiny", num_hidden_layers=…)`` → topology from ``tests/data/deepseek_v41/<name>.json`` with fields changed;
  ``config(...)`` → the same as the dictionary a config.json holds.
- ``full_width()`` → the released widths at five layers and one draft stage (a Full and a Reuse encoder layer, the decoder's
  source, a Reindex layer, Engram), fewer experts, a small vocabulary and small tables.
- ``RandomWeights(topology, seed)`` → mapping from checkpoint names to float32 tensors of logical shape; each is made when asked for
  (and kept, unless ``keep=False``), from ``(seed, name)`` alone, so a model of fewer layers has the same weights in them.
  ``released=True`` gives only values that the released formats hold, so that a checkpoint in those formats has the same numbers.
  ``harsh=True`` adds what trained weights have and random ones do not: outputs that are zero, inputs that are amplified, blocks whose
  scale is the least a format can hold; tokens ``HARSH_TOKENS`` have embeddings that are zero, tiny and with outliers.

Values are whole numbers times a constant, so they are the same bits on every machine and with every library version. Nothing is
left at the value of an untrained model: sinks, biases, mixes, norms and gates all matter.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.kernels.block_formats import (
    FP8_ROWS,
    decode_fp8_weight,
    decode_mxfp4_weight,
    encode_fp8_weight,
    encode_mxfp4_weight,
    fake_quantise,
)
from deepinfer.models.deepseek_v41.parameters import Form, ParameterSpec, Part, checkpoint_parameters
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology, read_topology

HARSH_TOKENS = (5, 6, 7)
DATA = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """``tests/data/deepseek_v41/<name>.json`` with fields changed, at whichever level they are; ``None`` removes one."""
    fields: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    for field, value in changes.items():
        level = fields if field in fields else fields["text_config"]
        level[field] = value
        if value is None:
            del level[field]
    return fields


def plan(name: str, **changes: Any) -> DeepseekV41Topology:
    """Topology of ``config(name, **changes)``."""
    return read_topology(config(name, **changes))


def full_width_config(experts: int = 16, vocab: int = 2048) -> dict[str, Any]:
    """The released widths on five layers: Engram, Full ratio 2, Reuse, Full ratio 1 (decoder, candidates), Reindex; one draft stage."""
    return config(
        "full", vocab_size=vocab, num_hidden_layers=5, n_routed_experts=experts, compress_ratios=[0, 2, 2, 1, 1, 0],
        kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 4], candidate_source_layer_id=3, engram_layer_ids=[1],
        engram_vocab_size=1000, engram_num_embeddings=[25874], engram_compressed_vocab_size=vocab, x_engram_token_map="identity",
        num_nextn_predict_layers=1, dspark_target_layer_ids=[3, 4], dspark_n_routed_experts=8, dspark_noise_token_id=vocab - 1,
        vision_config=None, image_token_id=None,
    )  # fmt: skip


def full_width(experts: int = 16, vocab: int = 2048) -> DeepseekV41Topology:
    """Topology of ``full_width_config``."""
    return read_topology(full_width_config(experts, vocab))


def bell(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """About normal float32 numbers, mean 0, deviation 1: sums of four bytes of a generator whose stream is frozen."""
    count = prod(shape)
    raw = np.random.RandomState([seed, zlib.crc32(name.encode())]).bytes(4 * count)
    total = np.frombuffer(raw, np.uint8).reshape(4, count).sum(0, dtype=np.int16) - 510
    return torch.from_numpy(total.astype(np.float32)).view(shape) * (1 / sqrt(4 * (256**2 - 1) / 12))


_SPREAD: tuple[tuple[str, float, float], ...] = (
    # (pattern of the name, mean, deviation); the first that fits
    (r"hc_\w+_scale$", 0.7, 0.15),
    (r"hc_\w+_base$", 0.0, 0.6),
    (r"attn_sink$", 0.0, 1.5),
    (r"\.ape$", 0.0, 0.7),
    (r"gate\.bias(_vl)?$", 0.0, 0.25),
    (r"engram\.[qk]_weight$", 1.0, 0.3),
    (r"(norm\d?|_norm)\.weight$", 1.0, 0.2),
    (r"\.bias$", 0.0, 0.2),
    (r"^image_\w+$", 0.0, 1.0),
    (r"embed\.weight$", 0.0, 1.0),
)
_GAIN: tuple[tuple[str, float], ...] = (
    # what remains are products, whose results have about the deviation of their inputs times this
    (r"(gate|weights_proj)\.weight$", 2.0),
    (r"confidence_head\.proj\.weight$", 0.3),
    (r"^head\.weight$", 0.7),
)


def made(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The float32 tensor ``name``, at a scale where it matters."""
    values = bell(seed, name, shape)
    for pattern, mean, deviation in _SPREAD:
        if re.search(pattern, name):
            return mean + deviation * values
    gain = next((gain for pattern, gain in _GAIN if re.search(pattern, name)), 1.0)
    return values * (gain * shape[-1] ** -0.5)


def _harsher(name: str, values: torch.Tensor) -> torch.Tensor:
    place = zlib.crc32(name.encode())
    if name == "embed.weight":
        zero, tiny, outliers = HARSH_TOKENS
        values[zero] = 0
        values[tiny] *= 2.0**-40
        values[outliers, place % values.shape[1]] = 300.0
    elif re.search(r"(w[1-3kqvo]\w*|main_proj|gate|weights_proj|fn)(\.weight)?$", name) and values.ndim == 2:
        values[place % values.shape[0]] = 0
        values[:, place % values.shape[1]] *= 16
        values[-32:, -32:] *= 2.0**-120
    elif re.search(r"(norm\d?|_norm)\.weight$", name):
        values[place % values.shape[0]] = 12.0
        values[(place + 1) % values.shape[0]] = 0.0
    return values


def _as_released(spec: ParameterSpec, values: torch.Tensor) -> torch.Tensor:
    """The nearest values of the tensor's form; ``spec`` is that of a quantised checkpoint."""
    if spec.form is Form.FP8 and spec.part is Part.ENGRAM_TABLE:
        return fake_quantise(values, FP8_ROWS)
    if spec.form is Form.FP8:
        return decode_fp8_weight(*encode_fp8_weight(values), (values.shape[0], values.shape[1]))
    if spec.form is Form.FP4_PAIRS:
        return decode_mxfp4_weight(*encode_mxfp4_weight(values), (values.shape[0], values.shape[1]))
    return values.bfloat16().float() if spec.form is Form.PLAIN else values


class RandomWeights(Mapping[str, torch.Tensor]):
    """Weights of a topology under checkpoint names; see the module's note."""

    def __init__(
        self, topology: DeepseekV41Topology, seed: int = 0, *, released: bool = False, harsh: bool = False, keep: bool = True
    ) -> None:
        self._specs = {spec.name: spec for spec in checkpoint_parameters(replace(topology, quantised_weights=False))}
        self._forms = {spec.name: spec for spec in checkpoint_parameters(replace(topology, quantised_weights=True))}
        self._seed, self._released, self._harsh, self._keep = seed, released, harsh, keep
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._made.get(name)
        if found is None:
            found = made(name, self._specs[name].shape, self._seed)
            if self._harsh:
                found = _harsher(name, found)
            if self._released:
                found = _as_released(self._forms[name], found)
            if self._keep:
                self._made[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def random_ids(topology: DeepseekV41Topology, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids int64 ``[length]`` without noise and image tokens; some come in runs and pairs, as text does."""
    draw = np.random.RandomState([seed, length])
    limit = topology.drafts.noise_token if topology.drafts.stages else topology.vocab
    if topology.vision is not None:
        limit = min(limit, topology.vision.image_token)
    ids = draw.randint(3, limit, length)
    repeat = draw.randint(0, 4, length) == 0
    ids[1:] = np.where(repeat[1:], ids[:-1], ids[1:])
    return torch.from_numpy(ids.astype(np.int64))
