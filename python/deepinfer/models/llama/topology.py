"""Configuration of a Llama-family model → a validated plan of what is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedConfigError, UnsupportedModelError
from ...kernels.rope import RopeParameters
from ..config import check_fields, optional_bool, optional_float, optional_int, refuse_foreign_format, required_int
from ..rope_config import ROPE_FIELDS, read_rope

_SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    *ROPE_FIELDS,
)


@dataclass(frozen=True)
class _Family:
    """How one architecture departs from the common ground."""

    fields: tuple[str, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    window: str = "none"
    """``none``, ``all`` (every layer, when ``sliding_window`` is set) or ``by_layer`` (``use_sliding_window`` and layer list)."""
    default_max_position: int = 2048


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(("attention_bias", "mlp_bias")),
    "MistralForCausalLM": _Family(("sliding_window", "layer_types"), window="all", default_max_position=131072),
    "Qwen2ForCausalLM": _Family(
        ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "use_mrope"),
        qkv_bias=True,
        window="by_layer",
        default_max_position=32768,
    ),
    "Qwen3ForCausalLM": _Family(
        ("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        qk_norm=True,
        window="by_layer",
        default_max_position=32768,
    ),
}


@dataclass(frozen=True)
class LlamaTopology:
    """Everything the containers and the forward need; sizes in elements, positions in tokens."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    """Per layer: how many latest positions a row sees, None = all."""
    rope: RopeParameters
    max_position: int

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim


def _windows(config: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    kinds = config.get("layer_types") if family.window != "none" else None
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UnsupportedConfigError(f"config field 'layer_types' must list one kind for each of {layers} layers")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedConfigError(f"config field 'layer_types' names {kind!r}, which is not implemented")
    if family.window == "none":
        return (None,) * layers
    if family.window == "all":
        # the architecture's own default when the field is absent; null switches the window off
        if "sliding_window" in config and config["sliding_window"] is None:
            return (None,) * layers
        window = optional_int(config, "sliding_window", 4096)
        if kinds is not None and "full_attention" in kinds:
            raise UnsupportedConfigError("config field 'layer_types' mixes kinds, which MistralForCausalLM does not define")
        return (window,) * layers
    if not optional_bool(config, "use_sliding_window") or ("sliding_window" in config and config["sliding_window"] is None):
        if kinds is not None and "sliding_attention" in kinds:
            raise UnsupportedConfigError(
                "config field 'layer_types' asks for sliding_attention, but no window is in use (use_sliding_window, sliding_window)"
            )
        return (None,) * layers
    window = optional_int(config, "sliding_window", 4096)
    if kinds is None:
        start = config.get("max_window_layers", 28)
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise UnsupportedConfigError(f"config field 'max_window_layers' must be an integer ≥ 0, found {start!r}")
        kinds = ["sliding_attention" if index >= start else "full_attention" for index in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_topology(config: Mapping[str, Any], architecture: str) -> LlamaTopology:
    """Plan for ``architecture`` from the fields of config.json.

    Raises ``UnsupportedConfigError`` naming the field for anything missing, contradictory, unknown or not implemented.
    """
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(f"the Llama family does not implement {architecture!r}; it knows {', '.join(_FAMILIES)}")
    refuse_foreign_format(config)
    check_fields(config, (*_SHARED_FIELDS, *family.fields))
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedConfigError(f"config field 'hidden_act' = {act!r} is not implemented; this family uses silu")
    if optional_bool(config, "use_mrope"):
        raise UnsupportedConfigError("config field 'use_mrope' = true: multi-axis rotary positions are not implemented")
    layers = required_int(config, "num_hidden_layers")
    hidden, heads = required_int(config, "hidden_size"), required_int(config, "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedConfigError(f"config field 'num_attention_heads' = {heads} must be a multiple of num_key_value_heads = {kv_heads}")
    default_head = 128 if family.qk_norm else hidden // heads
    head_dim = optional_int(config, "head_dim", default_head)
    if head_dim % 2:
        raise UnsupportedConfigError(f"config field 'head_dim' = {head_dim} must be even")
    if config.get("head_dim") is None and not family.qk_norm and hidden % heads:
        raise UnsupportedConfigError(
            f"config field 'hidden_size' = {hidden} must be a multiple of num_attention_heads = {heads} unless head_dim is given"
        )
    trained = optional_int(config, "max_position_embeddings", family.default_max_position)
    rope, max_position = read_rope(config, head_dim, trained)
    attention_bias = "attention_bias" in family.fields and optional_bool(config, "attention_bias")
    return LlamaTopology(
        vocab=required_int(config, "vocab_size"),
        hidden=hidden,
        intermediate=required_int(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=optional_float(config, "rms_norm_eps", 1e-6),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias="mlp_bias" in family.fields and optional_bool(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        tied=optional_bool(config, "tie_word_embeddings"),
        windows=_windows(config, family, layers),
        rope=rope,
        max_position=max_position,
    )
