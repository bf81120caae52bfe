"""Parameters of a DeepSeek-V4.1 model, grouped by what they do, with a place for every checkpoint name; no forward.

Weights that one product reads together are stored together (gate and up projection, the experts of a layer): the checkpoint's
tensors are ranges of them, so loading writes straight into the final place. Norms, mixing coefficients, routing and sinks are
float32, so are the weights of compressors that pool; everything else has the run dtype. Engram tables stay in their files.

``keep_packed`` names the forms of storage (``Form.FP8``, ``Form.FP4_PAIRS``) that a kernel takes as they are. An attribute then
holds the packed numbers (FP8: float8_e4m3fn in its usual shape; FP4: uint8 with half as many columns), and its group's
``scales`` holds their ue8m0 bytes under the attribute's name, otherwise ``scales`` is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...distributed import current_group, share, spread_experts
from ...kernels.block_formats import fp8_scale_shape, mxfp4_shapes
from ..places import ParameterPlaces, unwritten
from .engram_table import EngramTable
from .parameters import Form
from .shared_layers import LayerKind
from .topology import AttentionSizes, DeepseekV41Topology, MoeSizes

Scales = dict[str, torch.Tensor]
"""uint8 (ue8m0) by attribute name: FP8 ``[ceil(N / 32), ceil(K / 32)]``, FP4 ``[..., N, K / 32]``; empty unless kept packed."""


@dataclass
class AttentionParameters:
    """Queries over a low rank, one latent that is key and value, output in groups. ``D`` = head width, ``g`` = groups."""

    wq_a: torch.Tensor
    """``[q_rank, d]``."""
    q_norm: torch.Tensor
    """float32 ``[q_rank]``."""
    wq_b: torch.Tensor
    """``[heads * D, q_rank]``."""
    wkv: torch.Tensor
    """``[D, d]``."""
    kv_norm: torch.Tensor
    """float32 ``[D]``."""
    wo_a: torch.Tensor
    """``[g, o_rank, heads * D / g]``; scales of packed ones are those of ``[g * o_rank, heads * D / g]``."""
    wo_b: torch.Tensor
    """``[d, g * o_rank]``."""
    sink: torch.Tensor
    """float32 ``[heads]``."""
    scales: Scales = field(default_factory=dict)


@dataclass
class CompressorParameters:
    """Of a layer that fills a cache. Float32 if entries pool several tokens (ratio 2), as the pooling is."""

    wkv: torch.Tensor
    """``[D, d]``."""
    wgate: torch.Tensor | None
    """``[D, d]``; None at ratio 1."""
    norm: torch.Tensor
    """float32 ``[D]``."""


@dataclass
class IndexerParameters:
    """Of a layer that selects entries. ``wk`` and ``k_norm`` only where index keys are made, in layers that fill a cache."""

    wq_b: torch.Tensor
    """``[index_heads * index_dim, q_rank]``."""
    weights_proj: torch.Tensor
    """``[index_heads, d]``."""
    wk: torch.Tensor | None
    """``[index_dim, D]``."""
    k_norm: torch.Tensor | None
    """float32 ``[index_dim]``."""
    scales: Scales = field(default_factory=dict)


@dataclass
class MoeParameters:
    """Routing, ``E`` experts of width ``m`` and one shared expert of the same width; rows of w1 (gate) before those of w3 (up)."""

    gate: torch.Tensor
    """float32 ``[E, d]``."""
    bias: torch.Tensor | None
    """float32 ``[E]``; None where experts are given by token (DeepSeek-V4)."""
    bias_vl: torch.Tensor | None
    """float32 ``[E]``, for tokens of images; None where there are none (no vision, draft stages)."""
    w13: torch.Tensor
    """``[n, 2m, d]``: of the ``n`` experts that this rank has, all ``E`` unless they are spread over a group."""
    w2: torch.Tensor
    """``[n, d, m]``."""
    shared_w13: torch.Tensor
    """``[2m, d]``."""
    shared_w2: torch.Tensor
    """``[d, m]``."""
    scales: Scales = field(default_factory=dict)


@dataclass
class MixParameters:
    """One site where ``n`` streams are mixed, all float32."""

    fn: torch.Tensor
    """``[(2 + n) n, n d]``."""
    base: torch.Tensor
    """``[(2 + n) n]``."""
    scale: torch.Tensor
    """``[3]``."""


@dataclass
class EngramParameters:
    """Of a layer that reads rows by n-gram; ``n`` streams."""

    wkv: torch.Tensor
    """``[(n + 1) d, columns * head_dim]``: a key for each stream, then the value."""
    q_weight: torch.Tensor
    """float32 ``[n, d]``."""
    k_weight: torch.Tensor
    """float32 ``[n, d]``."""
    scales: Scales = field(default_factory=dict)
    opened: EngramTable | None = None

    @property
    def table(self) -> EngramTable:
        """The rows, in their file; RuntimeError before a checkpoint is there."""
        if self.opened is None:
            raise RuntimeError("the model's Engram tables are not opened yet: attach_tables has not been called")
        return self.opened


@dataclass
class LayerParameters:
    """One backbone layer or draft stage."""

    attn_norm: torch.Tensor
    """float32 ``[d]``."""
    ffn_norm: torch.Tensor
    """float32 ``[d]``."""
    attn: AttentionParameters
    compressor: CompressorParameters | None
    indexer: IndexerParameters | None
    moe: MoeParameters
    hc_attn: MixParameters
    hc_ffn: MixParameters
    engram: EngramParameters | None


@dataclass
class DraftParameters:
    """Draft stages and what stands before and behind them; ``r`` = rank of the Markov head."""

    stages: list[LayerParameters]
    main_proj: torch.Tensor
    """``[d, taps * d]``."""
    main_norm: torch.Tensor
    """float32 ``[d]``."""
    norm: torch.Tensor
    """float32 ``[d]``."""
    markov_embed: torch.Tensor
    """``[V, r]``."""
    markov_head: torch.Tensor
    """``[V, r]``."""
    confidence: torch.Tensor
    """float32 ``[1, d + r]``."""
    scales: Scales = field(default_factory=dict)


@dataclass
class VisionParameters:
    """Vision tower and aligner: ``tensors`` by checkpoint name (``vision.*``, ``aligner.*``), norms float32."""

    tensors: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class _Places(ParameterPlaces):
    """With the forms that a quantised checkpoint stores its weights in."""

    def __init__(self, quantised: bool, dtype: torch.dtype, device: torch.device, keep_packed: Collection[Form]) -> None:
        super().__init__(dtype, device)
        self._fp8 = quantised and Form.FP8 in keep_packed
        self._fp4 = quantised and Form.FP4_PAIRS in keep_packed

    def _empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return unwritten(name, shape, dtype or self.dtype, self.device)

    def plain(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.add(name, shape, dtype)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return self.add(name, shape, torch.float32)

    def linear(self, names: Sequence[str], rows: int, width: int, scales: Scales, key: str) -> torch.Tensor:
        """``[len(names) * rows, width]``, one name after another; a quantised checkpoint has it in FP8."""
        whole = self._empty(names[0], (len(names) * rows, width), torch.float8_e4m3fn if self._fp8 else None)
        for name, part in zip(names, whole.split(rows), strict=True):
            self.put(f"{name}.weight", part)
        if self._fp8:
            down, across = fp8_scale_shape((rows, width))
            scales[key] = self._empty(names[0], (len(names) * down, across), torch.uint8)
            for name, part in zip(names, scales[key].split(down), strict=True):
                self.put(f"{name}.scale", part)
        return whole

    def experts(self, prefix: str, experts: int, names: Sequence[str], rows: int, width: int, scales: Scales, key: str) -> torch.Tensor:
        """``[n, len(names) * rows, width]`` for the ``n`` of these experts that this rank has (all, unless they are spread over a group
        now); a quantised checkpoint has each expert's tensors in MXFP4."""
        here, height = share(current_group(), experts), len(names) * rows
        first = f"{prefix}{here.start}.{names[0]}"
        if not self._fp4:
            whole = self._empty(first, (len(here), height, width))
            self._split(prefix, here, names, rows, whole, "weight")
            return whole
        (_, packed), (_, blocks) = mxfp4_shapes((rows, width))
        whole = self._empty(first, (len(here), height, packed), torch.uint8)
        scales[key] = self._empty(first, (len(here), height, blocks), torch.uint8)
        self._split(prefix, here, names, rows, whole, "weight")
        self._split(prefix, here, names, rows, scales[key], "scale")
        return whole

    def _split(self, prefix: str, experts: range, names: Sequence[str], rows: int, whole: torch.Tensor, ending: str) -> None:
        for name, part in zip(names, whole.split(rows, 1), strict=True):
            for expert, of_expert in zip(experts, part.unbind(), strict=True):
                self.put(f"{prefix}{expert}.{name}.{ending}", of_expert)


class BlockSizes(Protocol):
    """What the parameters that all blocks have depend on; any topology of these families has it."""

    @property
    def hidden(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def attention(self) -> AttentionSizes: ...
    @property
    def moe(self) -> MoeSizes: ...
    @property
    def quantised_weights(self) -> bool: ...


class BlockParameters:
    """Attention, experts and mixes of blocks under their names, and what the loaders call; DeepSeek-V4's blocks have them, too."""

    embed: torch.Tensor
    """``[V, d]`` in the run dtype."""
    norm: torch.Tensor
    """float32 ``[d]``, before the head."""
    head: torch.Tensor
    """``[V, d]`` in the run dtype."""

    def __init__(self, sizes: BlockSizes, dtype: torch.dtype, device: torch.device | str, keep_packed: Collection[Form] = ()) -> None:
        self._sizes, self.keep_packed = sizes, frozenset(keep_packed)
        self._make = _Places(sizes.quantised_weights, dtype, torch.device(device), keep_packed)
        self._elsewhere = () if current_group() is None else ("*.ffn.experts.*",)  # other ranks have the rest
        self.places: ParameterPlaces = self._make

    def _attention(self, prefix: str) -> AttentionParameters:
        t, a, make, scales = self._sizes, self._sizes.attention, self._make, Scales()
        wo_a = make.linear([f"{prefix}wo_a"], a.o_groups * a.o_rank, a.group_width, scales, "wo_a")
        return AttentionParameters(
            wq_a=make.linear([f"{prefix}wq_a"], a.q_rank, t.hidden, scales, "wq_a"),
            q_norm=make.float32(f"{prefix}q_norm.weight", a.q_rank),
            wq_b=make.linear([f"{prefix}wq_b"], a.heads * a.head_dim, a.q_rank, scales, "wq_b"),
            wkv=make.linear([f"{prefix}wkv"], a.head_dim, t.hidden, scales, "wkv"),
            kv_norm=make.float32(f"{prefix}kv_norm.weight", a.head_dim),
            wo_a=wo_a.view(a.o_groups, a.o_rank, a.group_width),
            wo_b=make.linear([f"{prefix}wo_b"], t.hidden, a.o_groups * a.o_rank, scales, "wo_b"),
            sink=make.float32(f"{prefix}attn_sink", a.heads),
            scales=scales,
        )

    def _moe(self, prefix: str, experts: int, images: bool = False, biased: bool = True) -> MoeParameters:
        d, m, make, scales = self._sizes.hidden, self._sizes.moe.width, self._make, Scales()
        shared, each = f"{prefix}shared_experts.", f"{prefix}experts."
        return MoeParameters(
            gate=make.float32(f"{prefix}gate.weight", experts, d),
            bias=make.float32(f"{prefix}gate.bias", experts) if biased else None,
            bias_vl=make.float32(f"{prefix}gate.bias_vl", experts) if images else None,
            w13=make.experts(each, experts, ("w1", "w3"), m, d, scales, "w13"),
            w2=make.experts(each, experts, ("w2",), d, m, scales, "w2"),
            shared_w13=make.linear([f"{shared}w1", f"{shared}w3"], m, d, scales, "shared_w13"),
            shared_w2=make.linear([f"{shared}w2"], d, m, scales, "shared_w2"),
            scales=scales,
        )

    def _mix(self, prefix: str) -> MixParameters:
        n, make = self._sizes.streams, self._make
        rows = n * (n + 2)
        return MixParameters(
            fn=make.float32(f"{prefix}_fn", rows, n * self._sizes.hidden),
            base=make.float32(f"{prefix}_base", rows),
            scale=make.float32(f"{prefix}_scale", 3),
        )

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See ``registry.LoadableModel``; of packed weights the shapes of what is stored, their scales among them."""
        return self.places.shapes()

    def optional_tensors(self) -> tuple[str, ...]:
        """See ``registry.LoadableModel``."""
        return self._elsewhere

    def parameter(self, name: str) -> torch.Tensor:
        """See ``registry.LoadableModel``."""
        return self.places[name]

    def finish_loading(self) -> None:
        """See ``registry.LoadableModel``; places are final as they are."""


class DeepseekV41Parameters(BlockParameters):
    """All tensors of a model; attributes for the forward, ``places`` for the loaders.

    ``embed`` ``[V, d]`` and ``head`` ``[V, d]`` in the run dtype, ``norm`` float32 ``[d]``, ``layers``, ``drafts`` (None without
    stages), ``vision`` and ``image_start``, ``image_end``, ``image_newline`` ``[d]`` (None without a vision tower), ``token_map``
    int64 ``[V]`` on the CPU (token id → compressed id, −1 = none; None without Engram layers or before ``attach_tables``).
    Tensors are allocated, not set.
    """

    def __init__(
        self, topology: DeepseekV41Topology, dtype: torch.dtype, device: torch.device | str, keep_packed: Collection[Form] = ()
    ) -> None:
        super().__init__(topology, dtype, device, keep_packed)
        self.topology = topology
        make, t = self._make, topology
        self.token_map: torch.Tensor | None = None
        self.embed = make.plain("embed.weight", t.vocab, t.hidden)
        self.layers = [self._layer(index) for index in range(len(t.layers))]
        self.norm = make.float32("norm.weight", t.hidden)
        self.head = make.plain("head.weight", t.vocab, t.hidden)
        self.drafts = self._drafts() if t.drafts.stages else None
        self.vision = self._vision()
        names = ("image_start", "image_end", "image_newline")
        images = [None if t.vision is None else make.plain(name, t.hidden) for name in names]
        self.image_start, self.image_end, self.image_newline = images

    def _compressor(self, prefix: str, ratio: int) -> CompressorParameters:
        t, width, make = self.topology, self.topology.attention.head_dim, self._make
        dtype = torch.float32 if ratio > 1 else None
        return CompressorParameters(
            wkv=make.plain(f"{prefix}wkv.weight", width, t.hidden, dtype=dtype),
            wgate=make.plain(f"{prefix}wgate.weight", width, t.hidden, dtype=dtype) if ratio > 1 else None,
            norm=make.float32(f"{prefix}norm.weight", width),
        )

    def _indexer(self, prefix: str, keys: bool) -> IndexerParameters:
        t, a, make, scales = self.topology, self.topology.attention, self._make, Scales()
        return IndexerParameters(
            wq_b=make.linear([f"{prefix}wq_b"], a.index_heads * a.index_dim, a.q_rank, scales, "wq_b"),
            weights_proj=make.plain(f"{prefix}weights_proj.weight", a.index_heads, t.hidden),
            wk=make.plain(f"{prefix}wk.weight", a.index_dim, a.head_dim) if keys else None,
            k_norm=make.float32(f"{prefix}k_norm.weight", a.index_dim) if keys else None,
            scales=scales,
        )

    def _engram(self, prefix: str, width: int) -> EngramParameters:
        n, d, make, scales = self.topology.streams, self.topology.hidden, self._make, Scales()
        return EngramParameters(
            wkv=make.linear([f"{prefix}wkv"], (n + 1) * d, width, scales, "wkv"),
            q_weight=make.float32(f"{prefix}q_weight", n, d),
            k_weight=make.float32(f"{prefix}k_weight", n, d),
            scales=scales,
        )

    def _block(
        self,
        prefix: str,
        experts: int,
        images: bool,
        compressor: CompressorParameters | None = None,
        indexer: IndexerParameters | None = None,
        engram: EngramParameters | None = None,
    ) -> LayerParameters:
        return LayerParameters(
            attn_norm=self._make.float32(f"{prefix}attn_norm.weight", self.topology.hidden),
            ffn_norm=self._make.float32(f"{prefix}ffn_norm.weight", self.topology.hidden),
            attn=self._attention(f"{prefix}attn."),
            compressor=compressor,
            indexer=indexer,
            moe=self._moe(f"{prefix}ffn.", experts, images),
            hc_attn=self._mix(f"{prefix}hc_attn"),
            hc_ffn=self._mix(f"{prefix}hc_ffn"),
            engram=engram,
        )

    def _layer(self, index: int) -> LayerParameters:
        t, plan, prefix = self.topology, self.topology.layers[index], f"layers.{index}."
        fills = plan.kind is LayerKind.FULL
        selects = fills or plan.kind is LayerKind.REINDEX
        reads = t.engram is not None and plan.engram is not None
        return self._block(
            prefix,
            t.moe.experts,
            t.vision is not None,
            compressor=self._compressor(f"{prefix}attn.compressor.", plan.ratio) if fills else None,
            indexer=self._indexer(f"{prefix}attn.indexer.", fills) if selects else None,
            engram=self._engram(f"{prefix}engram.", t.engram.width) if reads and t.engram is not None else None,
        )

    def _drafts(self) -> DraftParameters:
        t, d, make, scales = self.topology, self.topology.drafts, self._make, Scales()
        last = f"mtp.{d.stages - 1}."
        return DraftParameters(
            stages=self._stages(),
            main_proj=make.linear(["mtp.0.main_proj"], t.hidden, len(d.taps) * t.hidden, scales, "main_proj"),
            main_norm=make.float32("mtp.0.main_norm.weight", t.hidden),
            norm=make.float32(f"{last}norm.weight", t.hidden),
            markov_embed=make.plain(f"{last}markov_head.embed.weight", t.vocab, d.markov_rank),
            markov_head=make.plain(f"{last}markov_head.head.weight", t.vocab, d.markov_rank),
            confidence=make.float32(f"{last}confidence_head.proj.weight", 1, t.hidden + d.markov_rank),
            scales=scales,
        )

    def _stages(self) -> list[LayerParameters]:
        """Every rank has all of their experts: which ranks draft in a step is not agreed upon."""
        d = self.topology.drafts
        with spread_experts(None):
            return [self._block(f"mtp.{stage}.", d.experts, False) for stage in range(d.stages)]

    def _vision(self) -> VisionParameters | None:
        v, d, make = self.topology.vision, self.topology.hidden, self._make
        if v is None:
            return None
        tensors: dict[str, torch.Tensor] = {}

        def add(name: str, *shape: int, norm: bool = False) -> None:
            tensors[name] = make.float32(name, *shape) if norm else make.plain(name, *shape)

        add("vision.patch_embed.proj.weight", v.hidden, v.patch_values)
        add("vision.patch_embed.proj.bias", v.hidden)
        for index in range(v.layers):
            prefix = f"vision.blocks.{index}."
            for norm in ("norm1", "norm2"):
                add(f"{prefix}{norm}.weight", v.hidden, norm=True)
            for name, out in (("wqkv", 3 * v.hidden), ("wo", v.hidden)):
                add(f"{prefix}attn.{name}.weight", out, v.hidden)
                add(f"{prefix}attn.{name}.bias", out)
            add(f"{prefix}mlp.w1.weight", 2 * v.intermediate, v.hidden)
            add(f"{prefix}mlp.w2.weight", v.hidden, v.intermediate)
        add("vision.norm.weight", v.hidden, norm=True)
        for name, width in (("w1", v.merged), ("w2", d)):
            add(f"aligner.{name}.weight", d, width)
            add(f"aligner.{name}.bias", d)
        return VisionParameters(tensors)

    def optional_tensors(self) -> tuple[str, ...]:
        """Checkpoints have a bias for tokens of images in every router; without images nothing reads it."""
        unread = "*.ffn.gate.bias_vl" if self.topology.vision is None else "mtp.*.ffn.gate.bias_vl"
        return (unread, *self._elsewhere)

    def attach_tables(self, tables: Mapping[int, EngramTable], token_map: torch.Tensor | None) -> None:
        """Gives each Engram layer (by layer number) its opened table, and all of them the map of token ids."""
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                layer.engram.opened = tables[index]
        self.token_map = token_map
