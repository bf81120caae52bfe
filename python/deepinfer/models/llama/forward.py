"""How a Llama-family model is computed: by fused kernels on a GPU that has them (``fused``), else by reference operators, as here.

Rows are padded once to a fixed set of counts and stay padded through all layers, unless batch invariance is not asked for. The residual
stream is float32; projections run in the run dtype, attention and norms in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F

from ...errors import KernelBuildError
from ...kernels.fp8_cache import CacheScales
from ...kernels.kv_write import kv_write
from ...kernels.linear import PackedLinear, pack_linear, row_bucket, row_quantum
from ...kernels.paged_attention import make_plan, paged_attention, safe_query_block
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import RopeTable
from ...kernels.swiglu import swiglu
from ..base import DecodeRows, ForwardBatch, PagedGroup, PromptRows, Source, StateGroup
from ..registry import architecture_of
from .cache_scales import OPTIONAL, layer_scales
from .containers import LayerParameters, LlamaParameters
from .fused import FusedForward
from .ops import split_heads
from .topology import LlamaTopology, read_topology


class _Layer:
    """Packed projections and norms of one layer, ready to run."""

    __slots__ = ("down", "gate_up", "input_norm", "out", "post_norm", "qk_norm", "qkv", "window")

    def __init__(self, p: LayerParameters, t: LlamaTopology, window: int | None, dtype: torch.dtype, invariant: bool) -> None:
        self.input_norm, self.post_norm = p.input_norm, p.post_norm
        qkv, out, gate_up, down = p.expand(dtype)
        self.qkv = pack_linear(qkv, p.qkv_bias, invariant=invariant)
        self.out = pack_linear(out, p.out_bias, invariant=invariant)
        self.gate_up = pack_linear(gate_up, p.gate_up_bias, invariant=invariant)
        self.down = pack_linear(down, p.down_bias, invariant=invariant)
        self.qk_norm = None
        if p.qk_norm is not None:
            self.qk_norm = torch.cat((p.qk_norm[:1].expand(t.heads, -1), p.qk_norm[1:].expand(t.kv_heads, -1)))
        self.window = window


class LlamaModel:
    """Llama, Mistral, Qwen2 and Qwen3 for causal language modelling; see ``models.base.Model`` for the contract."""

    def __init__(self, topology: LlamaTopology, dtype: torch.dtype, device: torch.device, packed: Collection[str] = ()) -> None:
        self.topology = topology
        self.dtype, self.device = dtype, device
        self.vocab_size = topology.vocab
        self.max_position = topology.max_position
        parameters = LlamaParameters(topology, dtype, device, packed)
        self._places = parameters.places
        self._unpacked: LlamaParameters | None = parameters
        self._rope = RopeTable(topology.rope, device)
        self._layers: list[_Layer] = []
        self._names = [(f"layers.{index}.k", f"layers.{index}.v") for index in range(topology.layers)]
        self._embed = parameters.embed
        self._norm = parameters.norm
        self._head: PackedLinear | None = None
        self._fused: FusedForward | None = None
        self._query_block = 1
        self._row_quantum = row_quantum(device)
        self._invariant = True
        self._packs = bool(parameters.packed)
        self._cache_scales: tuple[CacheScales, ...] | None = None
        self._query_scales = False  # whether the checkpoint has some, which nothing here reads

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """See ``base.LoadableModel``."""
        return cls(read_topology(config, architecture_of(config)), dtype, device)

    @classmethod
    def from_packed(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, packed: Collection[str]) -> Self:
        """See ``base.PackingModel``."""
        return cls(read_topology(config, architecture_of(config)), dtype, device, packed)

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """See ``base.LoadableModel``."""
        return read_topology(config, architecture_of(config)).max_position

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See ``base.LoadableModel``."""
        return self._places.shapes()

    def optional_tensors(self) -> tuple[str, ...]:
        """Old checkpoints store rotary frequencies, some tied ones the head a second time, some scales for KV in 8 bits."""
        return ("*.rotary_emb.inv_freq", *OPTIONAL, *(("lm_head.weight",) if self.topology.tied else ()))

    def parameter(self, name: str) -> torch.Tensor:
        """See ``base.LoadableModel``."""
        return self._places[name]

    def allow_batch_dependence(self) -> None:
        """See ``base.BatchDependentModel``: rows are neither padded nor run in pieces whose bits agree."""
        self._invariant = False

    def use_fp8_cache(self, scales: Mapping[str, float], unused: Sequence[str] = ()) -> None:
        """See ``base.Fp8CacheModel``."""
        self._cache_scales = layer_scales(scales, self.topology.layers)
        self._query_scales = bool(unused)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values as they are kept."""
        return self.dtype if self._cache_scales is None else torch.float8_e4m3fn

    def finish_loading(self) -> None:
        """Makes the fused forward if its kernels are there, else packs the weights for the reference operators."""
        self._places.close()
        assert self._unpacked is not None
        if self.device.type == "cuda":
            how = (self.dtype, self.device, self._invariant, self._cache_scales)
            try:
                self._fused = FusedForward(self.topology, self._unpacked, self._rope, *how)
            except KernelBuildError:  # said once in a warning by whoever missed the kernel
                self._fused = None
        if self._fused is None:
            self._pack()

    def _pack(self) -> None:
        """Packs the weights layer by layer and frees the unpacked ones."""
        parameters, self._unpacked = self._unpacked, None
        assert parameters is not None
        t, invariant = self.topology, self._invariant
        self._head = pack_linear(parameters.head, largest_rows=64 if self.device.type == "cpu" else None, invariant=invariant)
        self._query_block = safe_query_block(self.device, t.head_dim, t.heads // t.kv_heads, invariant)
        layers = parameters.layers
        for window in t.windows:
            self._layers.append(_Layer(layers.pop(0), t, window, self.dtype, invariant))

    @property
    def packed_bytes(self) -> int:
        """See ``base.PackingModel``."""
        return 0 if self._unpacked is None else sum(weight.nbytes for weight in self._unpacked.packed)

    @property
    def remarks(self) -> tuple[str, ...]:
        """See ``base.RemarkingModel``."""
        said, dtype = [], str(self.dtype).removeprefix("torch.")
        if self._packs and self.packed_bytes:
            said.append(f"FP8 weights stay packed, {self.packed_bytes / 1e9:.2f} GB, and are multiplied as {dtype}")
        elif self._packs:
            said.append(f"FP8 weights are expanded to {dtype}: their kernels could not be used, see the warning")
        if self._cache_scales is not None:
            scaled = any(scales != CacheScales() for scales in self._cache_scales)
            whose = "with the checkpoint's scales" if scaled else "without scales: the checkpoint has none"
            said.append(f"KV is kept in 8-bit floats (e4m3), {whose}; answers are approximate")
        if self._query_scales:
            said.append(f"the checkpoint's q_scale is not used: queries stay {dtype}")
        return tuple(said)

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """One paged group: keys and values of every layer, in ``cache_dtype``, under ``layers.<i>.k`` and ``layers.<i>.v``."""
        if self._fused is not None:
            try:
                self._fused.use_pages(block_tokens)
            except KernelBuildError:
                self._fused = None
                self._pack()
        names = tuple(name for pair in self._names for name in pair)
        source = Source(names, block_tokens, (self.topology.kv_heads, self.topology.head_dim), self.cache_dtype)
        return [PagedGroup(block_tokens, (source,))], []

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` in the run dtype after the final norm; writes K and V of the rows to ``kv``."""
        if self._fused is not None:
            return self._fused.forward(batch, self._names, kv)
        t = self.topology
        count = batch.ids.shape[0]
        rows = row_bucket(count, self._row_quantum) if self._invariant else count
        ids, pos, (slots,) = batch.padded(rows)
        cos, sin = self._rope.cos_sin(pos)
        page_tokens = kv[self._names[0][0]].shape[1]
        plan = make_plan(
            batch.pos, batch.block_table, batch.cu_q_host, batch.seq_len_host, batch.num_decodes, page_tokens, self._query_block
        )
        scale = t.head_dim**-0.5
        x = F.embedding(ids, self._embed).float()
        scales = self._cache_scales or (CacheScales(),) * t.layers
        for layer, (k_name, v_name), of_cache in zip(self._layers, self._names, scales, strict=True):
            k_cache, v_cache = kv[k_name], kv[v_name]
            normed = rms_norm(x, layer.input_norm, t.eps, self.dtype)
            q, k, v = split_heads(layer.qkv(normed), t.heads, t.kv_heads, t.head_dim, layer.qk_norm, t.eps, cos, sin)
            kv_write(k_cache, k.to(self.dtype), slots, of_cache.key)
            kv_write(v_cache, v, slots, of_cache.value)
            attended = paged_attention(q, k_cache, v_cache, plan, scale * of_cache.key, layer.window)
            if of_cache.value != 1.0:
                attended *= of_cache.value
            x += layer.out(attended.view(rows, t.q_size).to(self.dtype))
            normed = rms_norm(x, layer.post_norm, t.eps, self.dtype)
            x += layer.down(swiglu(layer.gate_up(normed)))
        return rms_norm(x, self._norm, t.eps, self.dtype)[:count]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[R, hidden]`` → float32 ``[R, vocab]``; the rows may be any choice of rows of ``forward``."""
        return self.run_logits(hidden).float()

    @torch.inference_mode()
    def run_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``base.RunLogitsModel``."""
        if self._fused is not None:
            return self._fused.run_logits(hidden)
        if self._head is None:
            raise RuntimeError("finish_loading has not been called")
        return self._head(hidden)

    def graph_rows(self, max_rows: int) -> Sequence[int] | None:
        """See ``base.GraphModel``: none with reference operators, whose shapes follow from lengths."""
        return None if self._fused is None else self._fused.graph_rows(max_rows)

    @torch.inference_mode()
    def decode(self, rows: DecodeRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``base.GraphModel``. Raises ``RuntimeError`` where ``graph_rows`` gives none."""
        if self._fused is None:
            raise RuntimeError("decode needs fused kernels; graph_rows says whether there are any")
        return self._fused.decode(rows, self._names, kv)

    def prompt_rows(self, max_rows: int) -> Sequence[int]:
        """See ``base.PromptGraphModel``: none with reference operators."""
        return [] if self._fused is None else self._fused.prompt_rows(max_rows)

    @property
    def unit_rows(self) -> int:
        """See ``base.PromptGraphModel``."""
        return 1 if self._fused is None else self._fused.unit_rows

    @torch.inference_mode()
    def prompt_step(self, rows: PromptRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``base.PromptGraphModel``. Raises ``RuntimeError`` where ``prompt_rows`` gives none."""
        if self._fused is None:
            raise RuntimeError("prompt_step needs fused kernels; prompt_rows says whether there are any")
        return self._fused.prompt_step(rows, self._names, kv)

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """See ``base.GreedyModel``."""
        if self._fused is None:
            tokens.copy_(self.logits(hidden).argmax(-1))
        else:
            self._fused.greedy(hidden, tokens)
