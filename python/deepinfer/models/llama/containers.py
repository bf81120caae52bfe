"""Parameters of a Llama-family model under their checkpoint names; no forward.

Weights whose parts are all among ``packed`` stay 8-bit floats with scales (``kernels/linear_fp8``), unless they have a bias or sizes that
no kernel is made for.

Projections that read the same input are stored fused (q, k, v; gate, up): the checkpoint's tensors are row ranges of the
fused ones, so loading writes straight into the final place. Norm weights are float32, everything else has the run dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ...kernels.linear_fp8 import PackedWeight, can_pack
from ..places import ParameterPlaces
from .topology import LlamaTopology

Weight = torch.Tensor | PackedWeight


@dataclass
class LayerParameters:
    """One decoder layer; fused weights are ``[out, in]``."""

    input_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """float32 ``[2, head_dim]``: query norm, key norm."""
    out: Weight
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Of its projections."""
        return self.qkv, self.out, self.gate_up, self.down

    def expand(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Puts expanded weights in the place of packed ones, one by one; gives all of them: qkv, out, gate_up, down."""
        found = []
        for name in ("qkv", "out", "gate_up", "down"):
            weight: Weight = getattr(self, name)
            found.append(weight.expanded(dtype) if isinstance(weight, PackedWeight) else weight)
            setattr(self, name, found[-1])
        return found


class LlamaParameters:
    """All tensors of a model and the map from checkpoint names to their places. ``packed``: names of weights that may stay packed."""

    def __init__(self, topology: LlamaTopology, dtype: torch.dtype, device: torch.device, packed: Collection[str] = ()) -> None:
        self._packed = frozenset(packed)
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
            qkv=self._weight(qkv_names, qkv_sizes, t.hidden, t.qkv_bias),
            qkv_bias=places.add_fused(tuple(f"{n}.bias" for n in qkv_names), qkv_sizes, None) if t.qkv_bias else None,
            qk_norm=norms,
            out=self._weight((f"{attention}o_proj",), (t.hidden,), t.q_size, t.out_bias),
            out_bias=places.add(f"{attention}o_proj.bias", (t.hidden,)) if t.out_bias else None,
            post_norm=places.add(f"{prefix}post_attention_layernorm.weight", (t.hidden,), torch.float32),
            gate_up=self._weight(gate_names, gate_sizes, t.hidden, t.mlp_bias),
            gate_up_bias=places.add_fused(tuple(f"{n}.bias" for n in gate_names), gate_sizes, None) if t.mlp_bias else None,
            down=self._weight((f"{mlp}down_proj",), (t.hidden,), t.intermediate, t.mlp_bias),
            down_bias=places.add(f"{mlp}down_proj.bias", (t.hidden,)) if t.mlp_bias else None,
        )

    def _weight(self, modules: Sequence[str], sizes: Sequence[int], columns: int, bias: bool) -> Weight:
        names = [f"{module}.weight" for module in modules]
        if not bias and can_pack(columns, sizes) and self._packed.issuperset(names):
            return self.places.add_packed(names, sizes, columns)
        return self.places.add_fused(names, sizes, columns)

    @property
    def packed(self) -> tuple[PackedWeight, ...]:
        """Weights that are packed."""
        return tuple(w for layer in self.layers for w in layer.weights if isinstance(w, PackedWeight))

    def expand(self) -> None:
        """Puts expanded weights in the place of packed ones."""
        for layer in self.layers:
            layer.expand(self.places.dtype)
