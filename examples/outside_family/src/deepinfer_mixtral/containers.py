"""Parameters of a Mixtral model under their checkpoint names; no forward.

Projections of one input are fused: query, key and value, and each expert's gate (w1) and up (w3). The checkpoint's tensors are row
ranges of the fused ones. Norm weights are float32, everything else has the run dtype.
"""

import torch

from deepinfer.models.places import ParameterPlaces

from .topology import MixtralTopology


class MixtralLayer:
    """One decoder layer; fused weights are ``[out, in]``."""

    def __init__(self, t: MixtralTopology, places: ParameterPlaces, prefix: str) -> None:
        attention, moe = f"{prefix}.self_attn", f"{prefix}.block_sparse_moe"
        heads = [n * t.head_dim for n in (t.heads, t.kv_heads, t.kv_heads)]
        self.input_norm = places.add(f"{prefix}.input_layernorm.weight", (t.hidden,), torch.float32)
        self.qkv = places.add_fused([f"{attention}.{part}_proj.weight" for part in "qkv"], heads, t.hidden)
        self.out = places.add(f"{attention}.o_proj.weight", (t.hidden, heads[0]))
        self.post_norm = places.add(f"{prefix}.post_attention_layernorm.weight", (t.hidden,), torch.float32)
        self.router = places.add(f"{moe}.gate.weight", (t.experts, t.hidden))
        self.gate_up, self.down = [], []
        for expert in (f"{moe}.experts.{number}" for number in range(t.experts)):
            self.gate_up.append(places.add_fused([f"{expert}.w1.weight", f"{expert}.w3.weight"], [t.intermediate] * 2, t.hidden))
            self.down.append(places.add(f"{expert}.w2.weight", (t.hidden, t.intermediate)))


class MixtralParameters:
    """All tensors of a model; ``places`` maps checkpoint names to them."""

    def __init__(self, t: MixtralTopology, dtype: torch.dtype, device: torch.device) -> None:
        self.places = ParameterPlaces(dtype, device)
        self.embed = self.places.add("model.embed_tokens.weight", (t.vocab, t.hidden))
        self.layers = [MixtralLayer(t, self.places, f"model.layers.{index}") for index in range(t.layers)]
        self.norm = self.places.add("model.norm.weight", (t.hidden,), torch.float32)
        self.head = self.embed if t.tied else self.places.add("lm_head.weight", (t.vocab, t.hidden))
