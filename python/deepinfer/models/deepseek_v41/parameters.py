"""Every tensor of a checkpoint: name, shape and form of storage, without allocating one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from ...kernels.block_formats import WEIGHT_BLOCK, fp8_scale_shape, mxfp4_shapes
from .shared_layers import LayerKind
from .topology import DeepseekV41Topology


class Part(Enum):
    """Which part of the model a tensor belongs to."""

    BACKBONE = "backbone"
    ENGRAM_TABLE = "engram table"
    DRAFT = "draft"
    VISION = "vision"


class Form(Enum):
    """Forms of storage; the value lists the safetensors types that carry them, the one we write first."""

    PLAIN = ("BF16", "F32", "F16")
    FLOAT32 = ("F32",)
    FP8 = ("F8_E4M3",)
    FP4_PAIRS = ("I8", "U8")
    SCALE = ("F8_E8M0", "U8")

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the type written first."""
        return {"BF16": 2, "F32": 4}.get(self.value[0], 1)


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor as stored."""

    name: str
    shape: tuple[int, ...]
    form: Form
    part: Part

    @property
    def parameters(self) -> int:
        """Weights it carries: a scale is none, a byte of pairs is two."""
        if self.form is Form.SCALE:
            return 0
        return prod(self.shape) * (2 if self.form is Form.FP4_PAIRS else 1)

    @property
    def nbytes(self) -> int:
        """Bytes in the type written first."""
        return prod(self.shape) * self.form.item_bytes


@dataclass(frozen=True)
class Weight:
    """One weight as the model sees it: what is stored under ``name``, with the scales beside it if it is packed."""

    name: str
    shape: tuple[int, ...]
    """Of the numbers, not of the bytes that carry them."""
    stored: ParameterSpec
    scale: ParameterSpec | None


@dataclass(frozen=True)
class Census:
    """Totals of a checkpoint."""

    tensors: int
    parameters: dict[Part, int]
    nbytes: dict[Part, int]


class _Names:
    """Yields specifications under a prefix."""

    def __init__(self, quantised: bool, part: Part) -> None:
        self._quantised, self._part = quantised, part

    def plain(self, name: str, *shape: int, form: Form = Form.PLAIN) -> Iterator[ParameterSpec]:
        yield ParameterSpec(name, shape, form, self._part)

    def linear(self, name: str, out: int, width: int) -> Iterator[ParameterSpec]:
        """FP8 in square blocks."""
        if not self._quantised:
            yield from self.plain(f"{name}.weight", out, width)
            return
        yield ParameterSpec(f"{name}.weight", (out, width), Form.FP8, self._part)
        yield ParameterSpec(f"{name}.scale", fp8_scale_shape((out, width)), Form.SCALE, self._part)

    def expert(self, name: str, out: int, width: int) -> Iterator[ParameterSpec]:
        """MXFP4."""
        if not self._quantised:
            yield from self.plain(f"{name}.weight", out, width)
            return
        packed, scales = mxfp4_shapes((out, width))
        yield ParameterSpec(f"{name}.weight", packed, Form.FP4_PAIRS, self._part)
        yield ParameterSpec(f"{name}.scale", scales, Form.SCALE, self._part)

    def table(self, name: str, rows: int, width: int) -> Iterator[ParameterSpec]:
        """FP8 rows, each with its own scales."""
        if not self._quantised:
            yield from self.plain(f"{name}.weight", rows, width)
            return
        yield ParameterSpec(f"{name}.weight", (rows, width), Form.FP8, self._part)
        yield ParameterSpec(f"{name}.scale", (rows, width // WEIGHT_BLOCK), Form.SCALE, self._part)


def _block(t: DeepseekV41Topology, make: _Names, prefix: str, experts: int) -> Iterator[ParameterSpec]:
    """What backbone layers and draft stages have in common."""
    a, d = t.attention, t.hidden
    attn, ffn = f"{prefix}attn.", f"{prefix}ffn."
    yield from make.linear(f"{attn}wq_a", a.q_rank, d)
    yield from make.plain(f"{attn}q_norm.weight", a.q_rank)
    yield from make.linear(f"{attn}wq_b", a.heads * a.head_dim, a.q_rank)
    yield from make.linear(f"{attn}wkv", a.head_dim, d)
    yield from make.plain(f"{attn}kv_norm.weight", a.head_dim)
    yield from make.linear(f"{attn}wo_a", a.o_groups * a.o_rank, a.group_width)
    yield from make.linear(f"{attn}wo_b", d, a.o_groups * a.o_rank)
    yield from make.plain(f"{attn}attn_sink", a.heads, form=Form.FLOAT32)
    yield from make.plain(f"{prefix}attn_norm.weight", d)
    yield from make.plain(f"{prefix}ffn_norm.weight", d)
    mixes = t.streams * (t.streams + 2)
    for site in ("attn", "ffn"):
        yield from make.plain(f"{prefix}hc_{site}_fn", mixes, t.streams * d, form=Form.FLOAT32)
        yield from make.plain(f"{prefix}hc_{site}_base", mixes, form=Form.FLOAT32)
        yield from make.plain(f"{prefix}hc_{site}_scale", 3, form=Form.FLOAT32)
    yield from make.plain(f"{ffn}gate.weight", experts, d)
    yield from make.plain(f"{ffn}gate.bias", experts, form=Form.FLOAT32)
    yield from make.plain(f"{ffn}gate.bias_vl", experts, form=Form.FLOAT32)
    for name, out, width in (("w1", t.moe.width, d), ("w2", d, t.moe.width), ("w3", t.moe.width, d)):
        yield from make.linear(f"{ffn}shared_experts.{name}", out, width)
        for expert in range(experts):
            yield from make.expert(f"{ffn}experts.{expert}.{name}", out, width)


def _layer(t: DeepseekV41Topology, index: int) -> Iterator[ParameterSpec]:
    plan, a, d = t.layers[index], t.attention, t.hidden
    make, prefix = _Names(t.quantised_weights, Part.BACKBONE), f"layers.{index}."
    yield from _block(t, make, prefix, t.moe.experts)
    if plan.kind is LayerKind.FULL:
        yield from make.plain(f"{prefix}attn.compressor.wkv.weight", a.head_dim, d)
        if plan.ratio > 1:
            yield from make.plain(f"{prefix}attn.compressor.wgate.weight", a.head_dim, d)
        yield from make.plain(f"{prefix}attn.compressor.norm.weight", a.head_dim)
        yield from make.plain(f"{prefix}attn.indexer.wk.weight", a.index_dim, a.head_dim)
        yield from make.plain(f"{prefix}attn.indexer.k_norm.weight", a.index_dim)
    if plan.kind in (LayerKind.FULL, LayerKind.REINDEX):
        yield from make.linear(f"{prefix}attn.indexer.wq_b", a.index_heads * a.index_dim, a.q_rank)
        yield from make.plain(f"{prefix}attn.indexer.weights_proj.weight", a.index_heads, d)
    if t.engram is not None and plan.engram is not None:
        table = _Names(t.quantised_weights, Part.ENGRAM_TABLE)
        yield from table.table(f"{prefix}engram.embed", t.engram.rows[plan.engram], t.engram.head_dim)
        yield from make.linear(f"{prefix}engram.wkv", (t.streams + 1) * d, t.engram.width)
        yield from make.plain(f"{prefix}engram.q_weight", t.streams, d)
        yield from make.plain(f"{prefix}engram.k_weight", t.streams, d)


def _drafts(t: DeepseekV41Topology) -> Iterator[ParameterSpec]:
    make, d, last = _Names(t.quantised_weights, Part.DRAFT), t.hidden, t.drafts.stages - 1
    for stage in range(t.drafts.stages):
        yield from _block(t, make, f"mtp.{stage}.", t.drafts.experts)
    if t.drafts.stages:
        yield from make.linear("mtp.0.main_proj", d, len(t.drafts.taps) * d)
        yield from make.plain("mtp.0.main_norm.weight", d)
        yield from make.plain(f"mtp.{last}.norm.weight", d)
        yield from make.plain(f"mtp.{last}.markov_head.embed.weight", t.vocab, t.drafts.markov_rank)
        yield from make.plain(f"mtp.{last}.markov_head.head.weight", t.vocab, t.drafts.markov_rank)
        yield from make.plain(f"mtp.{last}.confidence_head.proj.weight", 1, d + t.drafts.markov_rank)


def _vision(t: DeepseekV41Topology) -> Iterator[ParameterSpec]:
    if t.vision is None:
        return
    v, d, make = t.vision, t.hidden, _Names(False, Part.VISION)
    yield from make.plain("vision.patch_embed.proj.weight", v.hidden, v.patch_values)
    yield from make.plain("vision.patch_embed.proj.bias", v.hidden)
    for index in range(v.layers):
        prefix = f"vision.blocks.{index}."
        yield from make.plain(f"{prefix}norm1.weight", v.hidden)
        yield from make.plain(f"{prefix}norm2.weight", v.hidden)
        yield from make.plain(f"{prefix}attn.wqkv.weight", 3 * v.hidden, v.hidden)
        yield from make.plain(f"{prefix}attn.wqkv.bias", 3 * v.hidden)
        yield from make.plain(f"{prefix}attn.wo.weight", v.hidden, v.hidden)
        yield from make.plain(f"{prefix}attn.wo.bias", v.hidden)
        yield from make.plain(f"{prefix}mlp.w1.weight", 2 * v.intermediate, v.hidden)
        yield from make.plain(f"{prefix}mlp.w2.weight", v.hidden, v.intermediate)
    yield from make.plain("vision.norm.weight", v.hidden)
    for name, width in (("w1", v.merged), ("w2", d)):
        yield from make.plain(f"aligner.{name}.weight", d, width)
        yield from make.plain(f"aligner.{name}.bias", d)
    for name in ("start", "end", "newline"):
        yield from make.plain(f"image_{name}", d)


def checkpoint_parameters(topology: DeepseekV41Topology) -> Iterator[ParameterSpec]:
    """All tensors of a checkpoint of ``topology``, in the order of the forward."""
    t, make = topology, _Names(topology.quantised_weights, Part.BACKBONE)
    yield from make.plain("embed.weight", t.vocab, t.hidden)
    for index in range(len(t.layers)):
        yield from _layer(t, index)
    yield from make.plain("norm.weight", t.hidden)
    yield from make.plain("head.weight", t.vocab, t.hidden)
    yield from _drafts(t)
    yield from _vision(t)


def weights(topology: DeepseekV41Topology) -> Iterator[Weight]:
    """All weights of ``topology`` in the order of ``checkpoint_parameters``, each with its scales."""
    specs = iter(checkpoint_parameters(topology))
    for spec in specs:
        packed = spec.form in (Form.FP8, Form.FP4_PAIRS)
        shape = (spec.shape[0], 2 * spec.shape[1]) if spec.form is Form.FP4_PAIRS else spec.shape
        yield Weight(spec.name, shape, spec, next(specs) if packed else None)  # scales follow what they belong to


def count(topology: DeepseekV41Topology) -> Census:
    """Tensors, weights and bytes by part."""
    tensors = 0
    parameters, nbytes = dict.fromkeys(Part, 0), dict.fromkeys(Part, 0)
    for spec in checkpoint_parameters(topology):
        tensors += 1
        parameters[spec.part] += spec.parameters
        nbytes[spec.part] += spec.nbytes
    return Census(tensors, parameters, nbytes)
