"""A Llama-family model on a GPU by fused kernels.

Per layer: norm · projection · rotation and cache write · attention · projection · sum and norm · projection and gated activation ·
projection · sum and norm. The residual stream is float32, everything else the run dtype. A row's bits do not depend on the number of rows,
which are padded only to counts that were compared when the model was loaded; without batch invariance nothing is compared, and nothing
padded. Decode steps allocate nothing that outlives them and read no
number of the host but the row count, so they can be recorded as graphs.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from ...errors import KernelBuildError
from ...kernels import registry
from ...kernels.argmax.cuda import Argmax
from ...kernels.embedding.cuda import Embedding
from ...kernels.fp8_cache import CacheScales
from ...kernels.linear.cuda import Product, agreeing_rows, linears_of
from ...kernels.linear_fp8.cuda import PackedProjection, differing
from ...kernels.paged_attention.cuda import PagedAttention, Scratch, attention_programs, cache_factors, unit_tokens, wide_unit_tokens
from ...kernels.paged_attention.units import Units, one_row_units, step_units
from ...kernels.rms_norm.cuda import AddRmsNorm, RmsNorm
from ...kernels.rope import RopeTable
from ...kernels.rope_kv.cuda import RopeKv
from ...kernels.swiglu.cuda import SwiGlu
from ...kernels.toolchain import ModelShape
from ...kernels.toolchain.loading import prepare
from ...kernels.toolchain.shapes import run_dtype
from ..base import DecodeRows, ForwardBatch, PromptRows, row_buckets
from .containers import LlamaParameters
from .projections import Projections
from .topology import LlamaTopology

_LARGEST_STEP = 8192
"""Rows of one product; longer steps run in pieces of it."""

_LARGEST_HEAD = 512
"""The same for the rows that want logits."""

_FEW = 64
"""Rows that are padded to without looking at how many of them are padding."""

_LAUNCH_FLOPS = 10**10
"""What a GPU computes in the time that its host takes to launch one kernel from Python: 20 us at 500 TFLOP/s."""

_LONGEST_TABLE = 1 << 18
"""Positions whose rotations are kept in a table; models with more compute them every step."""


_OPERATORS = ("argmax", "embedding", "linear", "linear_fp8", "rms_norm", "rope_kv", "swiglu")
"""What the forward launches besides attention, whose kernels follow from the page and the window."""


def kernel_shape(t: LlamaTopology, dtype: str, page_tokens: int = 64, weights: str = "plain", kv: str = "plain") -> ModelShape:
    """What the kernels of a model of the family follow from."""
    return ModelShape(t.hidden, t.heads, t.kv_heads, t.head_dim, t.intermediate, t.vocab, page_tokens, dtype, t.qk_norm, weights, kv)


def _row_counts() -> list[int]:
    return [*row_buckets(256), *range(320, 1025, 64), *range(1280, _LARGEST_STEP + 1, 256)]


def _prompt_counts() -> list[int]:
    """Row counts of steps with prompts that are worth a graph each: less than a quarter of a step is padding, where that takes time."""
    quarters = [size + size * quarter // 4 for size in (1 << n for n in range(8, 13)) for quarter in range(4)]
    return [32, 64, 128, 192, *quarters, _LARGEST_STEP]


@dataclass(frozen=True)
class _LayerCache:
    """What operators take beside a layer's caches in 8 bits, ``None`` for others: ``written`` reciprocals of the scales, ``read``
    ``cache_factors``."""

    written: torch.Tensor | None
    read: torch.Tensor | None

    @classmethod
    def of(cls, scales: CacheScales, head_dim: int, device: torch.device) -> _LayerCache:
        written = torch.tensor([1 / scales.key, 1 / scales.value], dtype=torch.float32, device=device)
        return cls(written, cache_factors(head_dim, scales, device))


class _Layer:
    """One layer's weights, ready to run."""

    __slots__ = ("down", "gated", "input_norm", "out", "post_norm", "qk_norm", "qkv", "window")

    def __init__(self, p: LlamaParameters, index: int, t: LlamaTopology, project: Projections, swiglu: SwiGlu) -> None:
        layer = p.layers[index]
        self.input_norm, self.post_norm, self.qk_norm = layer.input_norm, layer.post_norm, layer.qk_norm
        self.qkv = project(layer.qkv, layer.qkv_bias)
        self.out = project(layer.out, layer.out_bias)
        self.gated = project.gated(layer.gate_up, layer.gate_up_bias, swiglu)
        self.down = project(layer.down, layer.down_bias)
        self.window = t.windows[index]

    @property
    def projections(self) -> tuple[Product, ...]:
        """All of them, in order; a gated one, where kernels do both at once, behind its product."""
        at_once = () if self.gated.few is None else (self.gated,)
        return self.qkv, self.out, self.gated.product, *at_once, self.down


class FusedForward:
    """The forward of a loaded model by kernels.

    Args:
        topology, parameters: of the model, every weight written. Packed weights whose kernels cannot be had, or have other bits than
            the library, are expanded, in ``parameters`` too.
        rope: its rotations.
        dtype: bfloat16 or float16.
        device: a GPU.
        batch_invariant: a row's bits are those it has in any other number of rows.
        cache_scales: of each layer, where keys and values are kept as 8-bit floats; ``None`` = in ``dtype``.

    Raises ``KernelBuildError`` if a kernel cannot be had: the model then runs on its reference operators.
    """

    def __init__(
        self,
        topology: LlamaTopology,
        parameters: LlamaParameters,
        rope: RopeTable,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = True,
        cache_scales: Sequence[CacheScales] | None = None,
    ) -> None:
        t = topology
        self.topology, self.dtype, self.device = t, dtype, device
        shape = kernel_shape(
            t, run_dtype(dtype), weights="fp8" if parameters.packed else "plain", kv="plain" if cache_scales is None else "fp8"
        )
        prepare([program for op in _OPERATORS for program in registry.programs(shape, op)], device)
        project = Projections(dtype, device)
        self._swiglu = SwiGlu(t.intermediate, dtype, device)
        self._layers, self._rows = self._agreeing_layers(parameters, project, batch_invariant)
        self._embed_weight, self._norm_weight = parameters.embed, parameters.norm
        self._head = project(parameters.head)
        self._embed = Embedding(t.vocab, t.hidden, t.head_dim, dtype, device)
        self._norm = RmsNorm(t.hidden, t.eps, dtype, device)
        self._add_norm = AddRmsNorm(t.hidden, t.eps, dtype, device)
        self._fp8_cache = cache_scales is not None
        self._rope_kv = RopeKv(t.heads, t.kv_heads, t.head_dim, dtype, device, t.qk_norm, t.eps, fp8=self._fp8_cache)
        self._cache = [_LayerCache(None, None)] * t.layers
        if cache_scales is not None:
            self._cache = [_LayerCache.of(scales, t.head_dim, device) for scales in cache_scales]
        self._argmax: Argmax | None = None
        self._rope = rope
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        if t.max_position <= _LONGEST_TABLE and t.rope.rope_type != "dynamic":
            cos, sin = rope.pair_cos_sin(torch.arange(t.max_position, device=device))
            self._table = (cos.contiguous(), sin.contiguous())
        self._scratch = Scratch(t.heads, t.head_dim, device)
        self._attention: dict[int | None, PagedAttention] = {}
        self._page_tokens = 0
        self._head_rows: list[int] | None = None
        if batch_invariant:
            self._head_rows = agreeing_rows([self._head], [r for r in _row_counts() if r <= _LARGEST_HEAD])
        self._firsts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _agreeing_layers(
        self, parameters: LlamaParameters, project: Projections, batch_invariant: bool
    ) -> tuple[list[_Layer], list[int] | None]:
        """All layers, and the row counts whose bits agree in all of them; ``None`` = any number is run as it is."""
        t = self.topology
        try:
            layers = [_Layer(parameters, index, t, project, self._swiglu) for index in range(t.layers)]
        except KernelBuildError:  # said once in a warning by whoever missed the kernel
            if not parameters.packed:
                raise
            parameters.expand()
            return self._agreeing_layers(parameters, project, batch_invariant)
        project.allocate()
        if not batch_invariant:
            return layers, None
        every = [projection for layer in layers for projection in layer.projections]
        rows = agreeing_rows(every, _row_counts())
        if wrong := differing([p for p in every if isinstance(p, PackedProjection)]):
            warnings.warn(f"packed weights are expanded, since kernels differ: {'; '.join(wrong)}", RuntimeWarning, stacklevel=2)
            del every, layers
            parameters.expand()
            return self._agreeing_layers(parameters, project, batch_invariant)
        return layers, rows

    def use_pages(self, page_tokens: int) -> None:
        """Makes attention for pages of ``page_tokens`` tokens. Raises ``KernelBuildError``."""
        if page_tokens == self._page_tokens:
            return
        t, dtype = self.topology, run_dtype(self.dtype)
        windows = sorted(set(t.windows), key=lambda w: w or 0)
        shape = (t.heads, t.kv_heads, t.head_dim, page_tokens)
        prepare([p for w in windows for p in attention_programs(*shape, w or 0, dtype, self._fp8_cache)], self.device)
        self._attention = {w: PagedAttention(*shape, w, self.dtype, self.device, self._scratch, self._fp8_cache) for w in windows}
        self._page_tokens = page_tokens

    def graph_rows(self, max_rows: int) -> list[int]:
        """See ``base.GraphModel``: for every bucket the next row count whose bits agree, unless most of it would be padding."""
        padded = {r: self.padded_rows(r) for r in row_buckets(min(max_rows, _LARGEST_STEP))}
        return sorted({p for r, p in padded.items() if p <= max(2 * r, _FEW)})

    def prompt_rows(self, max_rows: int) -> list[int]:
        """See ``base.PromptGraphModel``: row counts whose bits agree, up to those whose products take longer than launching them."""
        *of_layer, _ = linears_of(kernel_shape(self.topology, run_dtype(self.dtype)))
        most = (len(of_layer) + 5) * _LAUNCH_FLOPS // sum(2 * width * out for width, out in of_layer)
        largest = min(max_rows, _LARGEST_STEP)
        wanted = [count for count in _prompt_counts() if count < largest] + [largest]
        return sorted({padded for padded in map(self.padded_rows, wanted) if padded <= most})

    @property
    def unit_rows(self) -> int:
        """See ``base.PromptGraphModel``."""
        return unit_tokens(self.topology.heads, self.topology.kv_heads)

    def padded_rows(self, count: int) -> int:
        """The least row count of at least ``count`` that is made of whole pieces of ``_LARGEST_STEP`` and one that agrees."""
        if self._rows is None:
            return count
        whole, rest = divmod(count, _LARGEST_STEP)
        return whole * _LARGEST_STEP + (self._rows[bisect_left(self._rows, rest)] if rest else 0)

    def forward(self, batch: ForwardBatch, names: Sequence[tuple[str, str]], kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``base.Model.forward``."""
        count = batch.ids.shape[0]
        ids, pos, (slots,) = batch.padded(self.padded_rows(count))
        units = self._units(batch)
        return self._run(ids, pos, slots, units, names, kv)[:count]

    def decode(self, rows: DecodeRows, names: Sequence[tuple[str, str]], kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``base.GraphModel.decode``."""
        count = rows.ids.shape[0]
        units = one_row_units(rows.block_table, rows.pos, rows.table_row, self._counting(count))
        return self._run(rows.ids, rows.pos, rows.slots[0], units, names, kv)

    def prompt_step(self, rows: PromptRows, names: Sequence[tuple[str, str]], kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``base.PromptGraphModel.prompt_step``."""
        units = Units(rows.block_table, rows.pos, rows.unit_first, rows.unit_count, rows.unit_row)
        return self._run(rows.ids, rows.pos, rows.slots[0], units, names, kv)

    def _units(self, batch: ForwardBatch) -> Units:
        """Wide ones if a sequence has more rows than the others hold; bits are the same."""
        t, tokens = self.topology, self.unit_rows
        wide = wide_unit_tokens(t.heads, t.kv_heads, t.head_dim, self._fp8_cache)
        if wide and max(end - first for first, end in pairwise(batch.cu_q_host)) > tokens:
            tokens = wide
        return step_units(batch.block_table, batch.pos, batch.cu_q_host, tokens, tokens == wide)

    def _counting(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if count not in self._firsts:
            first = torch.arange(count, dtype=torch.int32, device=self.device)
            self._firsts[count] = (first, torch.ones_like(first))
        return self._firsts[count]

    def _begin(self, ids: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The residual stream, and the rotations of the rows."""
        t, rows = self.topology, ids.shape[0]
        x, *turned = (
            torch.empty((rows, width), dtype=torch.float32, device=self.device) for width in (t.hidden, t.head_dim // 2, t.head_dim // 2)
        )
        table, at = self._table, pos
        if table is None:  # rows of rotations are made, and taken as they are
            cos, sin = self._rope.pair_cos_sin(pos)
            table, at = (cos.contiguous(), sin.contiguous()), torch.arange(rows, device=self.device)
        self._embed(ids, self._embed_weight, x, at, table, (turned[0], turned[1]))
        return x, (turned[0], turned[1])

    def _run(
        self,
        ids: torch.Tensor,
        pos: torch.Tensor,
        slots: torch.Tensor,
        units: Units,
        names: Sequence[tuple[str, str]],
        kv: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        t, rows = self.topology, ids.shape[0]
        x, (cos, sin) = self._begin(ids, pos)
        normed = torch.empty((rows, t.hidden), dtype=self.dtype, device=self.device)
        q = torch.empty((rows, t.heads, t.head_dim), dtype=self.dtype, device=self.device)
        attended = torch.empty_like(q)
        self._norm(x, self._layers[0].input_norm, normed)
        for index, (layer, (k_name, v_name)) in enumerate(zip(self._layers, names, strict=True)):
            k_cache, v_cache, cache = kv[k_name], kv[v_name], self._cache[index]
            qkv = self._product(layer.qkv, normed)
            self._rope_kv(qkv, cos, sin, slots, q, k_cache, v_cache, layer.qk_norm, cache.written)
            self._attention[layer.window](q, k_cache, v_cache, units, attended, cache.read)
            added = self._product(layer.out, attended.view(rows, t.q_size))
            self._add_norm(x, added, layer.post_norm, normed)
            added = self._product(layer.down, self._product(layer.gated, normed))
            following = self._layers[index + 1].input_norm if index + 1 < t.layers else self._norm_weight
            self._add_norm(x, added, following, normed)
        return normed

    def _product(self, projection: Product, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= _LARGEST_STEP:
            return projection(x)
        return torch.cat([projection(piece) for piece in x.split(_LARGEST_STEP)])

    def run_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[R, hidden]`` → ``[R, vocab]`` in the run dtype."""
        count = hidden.shape[0]
        if count > _LARGEST_HEAD:
            return torch.cat([self.run_logits(piece) for piece in hidden.split(_LARGEST_HEAD)])
        rows = count if self._head_rows is None else self._head_rows[bisect_left(self._head_rows, count)]
        if rows != count:
            hidden = F.pad(hidden, (0, 0, 0, rows - count))
        return self._head(hidden.contiguous())[:count]

    def greedy(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """See ``base.GreedyModel``."""
        logits = self.run_logits(hidden)
        rows = logits.shape[0]
        if self._argmax is None or self._argmax.max_rows < rows:
            self._argmax = Argmax(self.topology.vocab, self.dtype, max(rows, _LARGEST_HEAD), self.device)
        self._argmax(logits, tokens, torch.empty(rows, dtype=torch.float32, device=self.device))
