"""How a Mixtral model is computed: the class that the entry point names.

Rows are padded once to a fixed set of counts and stay padded through all layers. The residual stream is float32; projections run in
the run dtype, attention, norms and routing in float32.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F

from deepinfer.kernels.experts import pack_experts, softmax_top_k
from deepinfer.kernels.kv_write import kv_write
from deepinfer.kernels.linear import PackedLinear, pack_linear, row_bucket, row_quantum
from deepinfer.kernels.paged_attention import make_plan, paged_attention, safe_query_block
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import RopeTable
from deepinfer.models.base import ForwardBatch, PagedGroup, Source, StateGroup

from .containers import MixtralLayer, MixtralParameters
from .ops import split_heads
from .topology import MixtralTopology, read_topology


class PackedLayer:
    """One layer, ready to run."""

    def __init__(self, layer: MixtralLayer, index: int) -> None:
        self.k_name, self.v_name = f"layers.{index}.k", f"layers.{index}.v"
        self.input_norm, self.post_norm = layer.input_norm, layer.post_norm
        self.qkv, self.out, self.router = pack_linear(layer.qkv), pack_linear(layer.out), pack_linear(layer.router)
        self.experts = pack_experts(layer.gate_up, layer.down)


class MixtralModel:
    """Mixtral for causal language modelling; ``deepinfer.models.base.LoadableModel`` says what each method is for."""

    def __init__(self, topology: MixtralTopology, dtype: torch.dtype, device: torch.device) -> None:
        self.topology, self.dtype, self.device = topology, dtype, device
        self.vocab_size, self.max_position = topology.vocab, topology.max_position
        parameters = MixtralParameters(topology, dtype, device)
        self._places, self._embed, self._norm = parameters.places, parameters.embed, parameters.norm
        self._unpacked: MixtralParameters | None = parameters
        self._rope = RopeTable(topology.rope, device)
        self._layers: list[PackedLayer] = []
        self._head: PackedLinear | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """Refuses what is not implemented, by field, before anything is allocated."""
        return cls(read_topology(config), dtype, device)

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """Longest sequence in tokens."""
        return read_topology(config).max_position

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint name → shape."""
        return self._places.shapes()

    def optional_tensors(self) -> tuple[str, ...]:
        """Old checkpoints store rotary frequencies; some tied ones store the head a second time."""
        return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if self.topology.tied else ()))

    def parameter(self, name: str) -> torch.Tensor:
        """Where a checkpoint's tensor is written."""
        return self._places[name]

    def finish_loading(self) -> None:
        """Packs the weights layer by layer and frees the unpacked ones."""
        self._places.close()
        parameters, self._unpacked = self._unpacked, None
        assert parameters is not None
        t = self.topology
        self._query_block = safe_query_block(self.device, t.head_dim, t.heads // t.kv_heads)
        self._head = pack_linear(parameters.head)
        for index in range(t.layers):
            self._layers.append(PackedLayer(parameters.layers.pop(0), index))

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """One paged group: keys and values of every layer, in the run dtype."""
        t = self.topology
        names = tuple(f"layers.{index}.{part}" for index in range(t.layers) for part in "kv")
        return [PagedGroup(block_tokens, (Source(names, block_tokens, (t.kv_heads, t.head_dim), self.dtype),))], []

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` in the run dtype after the final norm; writes K and V of the rows to ``kv``."""
        t, count = self.topology, batch.ids.shape[0]
        rows = row_bucket(count, row_quantum(self.device))
        ids, pos, (slots,) = batch.padded(rows)
        cos, sin = self._rope.cos_sin(pos)
        page_tokens = kv["layers.0.k"].shape[1]
        plan = make_plan(
            batch.pos, batch.block_table, batch.cu_q_host, batch.seq_len_host, batch.num_decodes, page_tokens, self._query_block
        )
        x = F.embedding(ids, self._embed).float()
        for layer in self._layers:
            q, k, v = split_heads(layer.qkv(rms_norm(x, layer.input_norm, t.eps, self.dtype)), t.heads, t.kv_heads, cos, sin)
            k_cache, v_cache = kv[layer.k_name], kv[layer.v_name]
            kv_write(k_cache, k, slots)
            kv_write(v_cache, v, slots)
            attended = paged_attention(q, k_cache, v_cache, plan, t.head_dim**-0.5, t.window)
            x += layer.out(attended.flatten(1).to(self.dtype))
            normed = rms_norm(x, layer.post_norm, t.eps, self.dtype)
            experts, shares = softmax_top_k(layer.router(normed), t.experts_per_token)
            x += layer.experts(normed, experts, shares)
        return rms_norm(x, self._norm, t.eps, self.dtype)[:count]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[R, hidden]``, any choice of rows of ``forward`` → float32 ``[R, vocab]``."""
        assert self._head is not None, "finish_loading has not been called"
        return self._head(hidden).float()
