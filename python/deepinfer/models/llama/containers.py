"""Parameters of a Llama-family model under their checkpoint names; no forward.

Projections that read the same input are stored fused (q, k, v; gate, up): the checkpoint's tensors are row ranges of the
fused ones, so loading writes straight into the final place. Norm weights are float32, everything else has the run dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..places import ParameterPlaces
from .topology import LlamaTopology


@dataclass
class LayerParameters:
    """One decoder layer; fused weights are ``[out, in]``."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """float32 ``[2, head_dim]``: query norm, key norm."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class LlamaParameters:
    """All tensors of a model and the map from checkpoint names to their places."""

    def __init__(self, topology: LlamaTopology, dtype: torch.dtype, device: torch.device) -> None:
        self.places = ParameterPlaces(dtype, device)
        t = topology
        self.embed = self.places.add("model.embed_tokens.weight", (t.vocab, t.hidden))
        self.layers = [self._layer(t, f"model.layers.{index}.") for index in range(t.layers)]
        self.norm = self.places.add("model.norm.weight", (t.hidden,), torch.float32)
        self.head = self.embed if t.tied else self.places.add("lm_head.weight", (t.vocab, t.hidden))

    def _layer(self, t: LlamaTopology, prefix: str) -> LayerParameters:
        places, attention, mlp = self.places, prefix + "self_attn.", prefix + "mlp."
        qkv_names = tuple(f"{attention}{part}_proj" for part in "qkv")
        qkv_sizes = (t.q_size, t.kv_size, t.kv_size)
        gate_names, gate_sizes = (f"{mlp}gate_proj", f"{mlp}up_proj"), (t.intermediate, t.intermediate)
        norms = None
        if t.qk_norm:
            norms = torch.empty(2, t.head_dim, dtype=torch.float32, device=places.device)
            for part, place in zip("qk", norms, strict=True):
                places.put(f"{attention}{part}_norm.weight", place)
        return LayerParameters(
            input_norm=places.add(f"{prefix}input_layernorm.weight", (t.hidden,), torch.float32),
            qkv=places.add_fused(tuple(f"{n}.weight" for n in qkv_names), qkv_sizes, t.hidden),
            qkv_bias=places.add_fused(tuple(f"{n}.bias" for n in qkv_names), qkv_sizes, None) if t.qkv_bias else None,
            qk_norm=norms,
            out=places.add(f"{attention}o_proj.weight", (t.hidden, t.q_size)),
            out_bias=places.add(f"{attention}o_proj.bias", (t.hidden,)) if t.out_bias else None,
            post_norm=places.add(f"{prefix}post_attention_layernorm.weight", (t.hidden,), torch.float32),
            gate_up=places.add_fused(tuple(f"{n}.weight" for n in gate_names), gate_sizes, t.hidden),
            gate_up_bias=places.add_fused(tuple(f"{n}.bias" for n in gate_names), gate_sizes, None) if t.mlp_bias else None,
            down=places.add(f"{mlp}down_proj.weight", (t.hidden, t.intermediate)),
            down_bias=places.add(f"{mlp}down_proj.bias", (t.hidden,)) if t.mlp_bias else None,
        )
