"""Configuration of DeepSeek-V4 → a validated plan of what is built. Allocates nothing.

Accepted are the present form of the fields (``layer_types``, ``mlp_layer_types``, ``compress_rates``, ``rope_parameters`` with ``main`` and
``compress``) and that of the release (``compress_ratios``, ``num_hash_layers``, ``qk_rope_head_dim``, ``rope_scaling``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...errors import UnsupportedConfigError, UnsupportedFormatError
from ...kernels.rope import RopeParameters
from ..config import check_fields, optional_float, optional_int, refuse_foreign_format, required_int
from ..deepseek_v41.fields import check_fixed, check_heads, check_most, int_list, read_limit, read_rope_tables
from ..deepseek_v41.topology import MOST_EXPERTS, MOST_ITERATIONS, AttentionSizes, MoeSizes, read_attention

_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "qk_rope_head_dim",
    "partial_rotary_factor", "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "sliding_window", "rms_norm_eps",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta", "compress_rope_theta", "rope_scaling", "rope_parameters",
    "layer_types", "mlp_layer_types", "compress_rates", "compress_ratios", "num_hash_layers", "index_n_heads", "index_head_dim",
    "index_topk", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "scoring_func", "topk_method",
    "norm_topk_prob", "routed_scaling_factor", "swiglu_limit", "hidden_act", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "expert_dtype",
    # draft stages of the checkpoint are not run, noise of the router is for training
    "num_nextn_predict_layers", "router_jitter_noise",
)  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "scoring_func": ("sqrtsoftplus",), "topk_method": ("noaux_tc",), "attention_bias": (False,),
    "mlp_bias": (False,), "tie_word_embeddings": (False,), "num_key_value_heads": (1,), "n_shared_experts": (1,), "norm_topk_prob": (True,),
}  # fmt: skip
PAGE_TOKENS = 128


class LayerKind(Enum):
    """What a layer reads besides its window; the values are those of ``layer_types``."""

    WINDOW = "sliding_attention"
    """Nothing."""
    SPARSE = "compressed_sparse_attention"
    """Entries that its index selects (CSA); each pools a short window of tokens and the one before it."""
    LONG = "heavily_compressed_attention"
    """All entries (HCA); each pools a long window of tokens."""


_RELEASED = {0: LayerKind.WINDOW, 4: LayerKind.SPARSE, 128: LayerKind.LONG}
"""What the numbers of ``compress_ratios`` mean."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer."""

    index: int
    kind: LayerKind
    ratio: int
    """Tokens of a window that makes an entry; 0 = it makes none."""
    hashed: bool
    """Its experts are given by the token, not chosen."""
    decoder: bool
    """At or behind the last layer that makes entries."""

    @property
    def overlaps(self) -> bool:
        """Whether an entry pools the window before its own, too."""
        return self.kind is LayerKind.SPARSE

    @property
    def pooled(self) -> int:
        """Tokens an entry is made of."""
        return 2 * self.ratio if self.overlaps else self.ratio


@dataclass(frozen=True)
class DeepseekV4Topology:
    """Everything containers and forward need; sizes in elements, positions and lengths in tokens."""

    vocab: int
    hidden: int
    eps: float
    streams: int
    sinkhorn_iterations: int
    mix_eps: float
    attention: AttentionSizes
    moe: MoeSizes
    layers: tuple[LayerPlan, ...]
    rope_main: RopeParameters
    rope_compress: RopeParameters
    max_position: int
    quantised_weights: bool = False

    @property
    def sources(self) -> tuple[LayerPlan, ...]:
        """Layers that make entries."""
        return tuple(plan for plan in self.layers if plan.kind is not LayerKind.WINDOW)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page that cuts no entry: ratios are powers of two, as pages are."""
        return max(PAGE_TOKENS, *(plan.ratio for plan in self.sources))


def _refuse(first: str, second: str, why: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"config fields {first!r} and {second!r} disagree: {why}; correct one of them")


def _names(fields: Mapping[str, Any], name: str, layers: int, known: tuple[str, ...]) -> list[str] | None:
    """A list with one of ``known`` for each layer; None if it is absent."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or any(item not in known for item in value):
        raise UnsupportedConfigError(f"config field {name!r} = {value!r} must list a kind for each layer; known: {', '.join(known)}")
    if len(value) != layers:
        raise _refuse(name, "num_hidden_layers", f"{len(value)} kinds for {layers} layers")
    return value


def _kinds(fields: Mapping[str, Any], layers: int) -> list[LayerKind]:
    named = _names(fields, "layer_types", layers, tuple(kind.value for kind in LayerKind))
    kinds = None if named is None else [LayerKind(name) for name in named]
    if fields.get("compress_ratios") is None:
        if kinds is None:
            raise UnsupportedConfigError("config field 'layer_types' (or 'compress_ratios') is missing: it says what each layer reads")
        return kinds
    # draft stages stand behind the layers
    ratios = int_list(fields, "compress_ratios")
    if len(ratios) < layers:
        raise _refuse("compress_ratios", "num_hidden_layers", f"{len(ratios)} ratios for {layers} layers")
    for index, ratio in enumerate(ratios[:layers]):
        if ratio not in _RELEASED:
            raise UnsupportedConfigError(f"config field 'compress_ratios' gives layer {index} the ratio {ratio!r}; known: 0, 4 and 128")
    listed = [_RELEASED[ratio] for ratio in ratios[:layers]]
    if kinds is not None and kinds != listed:
        first = next(index for index in range(layers) if kinds[index] is not listed[index])
        raise _refuse("layer_types", "compress_ratios", f"layer {first} is {kinds[first].value} and has ratio {ratios[first]}")
    return listed


def _rates(fields: Mapping[str, Any]) -> dict[LayerKind, int]:
    """Tokens of a window by kind."""
    rates = {kind: ratio for ratio, kind in _RELEASED.items()}
    given = fields.get("compress_rates")
    if given is None:
        return rates
    wanted = {LayerKind.SPARSE.value, LayerKind.LONG.value}
    if not isinstance(given, Mapping) or not set(given) <= wanted:
        raise UnsupportedConfigError(f"config field 'compress_rates' must map {' and '.join(sorted(wanted))} to tokens, found {given!r}")
    for name in given:
        rates[LayerKind(name)] = rate = required_int(given, name)
        if rate & (rate - 1):
            raise UnsupportedConfigError(
                f"config field 'compress_rates' joins {rate} tokens of {name}, which cut pages: a power of two is needed"
            )
        if fields.get("compress_ratios") is not None and _RELEASED.get(rate) is not LayerKind(name):
            raise _refuse("compress_rates", "compress_ratios", f"{name} pools {rate} tokens in the first, 4 or 128 in the second")
    return rates


def _hashed(fields: Mapping[str, Any], layers: int) -> list[bool]:
    named = _names(fields, "mlp_layer_types", layers, ("hash_moe", "moe"))
    count = fields.get("num_hash_layers")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= layers):
        raise UnsupportedConfigError(f"config field 'num_hash_layers' = {count!r} must be a number of layers, of which there are {layers}")
    if named is None:
        if count is None:
            raise UnsupportedConfigError(
                "config field 'mlp_layer_types' (or 'num_hash_layers') is missing: it says which experts are given"
            )
        return [index < count for index in range(layers)]
    hashed = [name == "hash_moe" for name in named]
    if count is not None and hashed != [index < count for index in range(layers)]:
        raise _refuse("mlp_layer_types", "num_hash_layers", f"the first {count} layers are to be 'hash_moe' and no others")
    return hashed


def _with_rope_width(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` with ``qk_rope_head_dim``, which may be given as a part of a head."""
    width, part = fields.get("qk_rope_head_dim"), fields.get("partial_rotary_factor")
    if part is None:
        required_int(fields, "qk_rope_head_dim")
        return fields
    head = required_int(fields, "head_dim")
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise UnsupportedConfigError(f"config field 'partial_rotary_factor' = {part!r} must be a number above 0 and at most 1")
    if width is not None and width != int(head * part):
        raise _refuse("partial_rotary_factor", "qk_rope_head_dim", f"{part!r} of a head of {head} is {int(head * part)}, not {width!r}")
    return {**fields, "qk_rope_head_dim": int(head * part)}


def _refuse_quantised(fields: Mapping[str, Any]) -> None:
    refuse_foreign_format(fields)
    for name in ("quantization_config", "expert_dtype"):
        if fields.get(name):
            raise UnsupportedFormatError(
                f"config field {name!r} = {fields[name]!r}: packed weights of this family are not read; use a checkpoint in plain floats"
            )


def _check_least_two(fields: Mapping[str, Any], name: str, why: str) -> None:
    if required_int(fields, name) < 2:
        raise UnsupportedConfigError(f"config field {name!r} = {fields[name]} is not implemented ({why}); 2 and more are")


def _moe(fields: Mapping[str, Any]) -> MoeSizes:
    check_most(fields, "num_experts_per_tok", "n_routed_experts")
    _check_least_two(fields, "num_experts_per_tok", "the weight of a single expert would be its score, or 1 by another reading")
    return MoeSizes(
        width=required_int(fields, "moe_intermediate_size"),
        experts=required_int(fields, "n_routed_experts", MOST_EXPERTS),
        chosen=required_int(fields, "num_experts_per_tok"),
        normalise=True,
        scale=optional_float(fields, "routed_scaling_factor", 1.5),
        temperature=1.0,
        limit=read_limit(fields),
        weight_first=False,
    )


def _attention(fields: Mapping[str, Any]) -> AttentionSizes:
    check_heads(fields)
    _check_least_two(fields, "sliding_window", "what entries pool reaches further back than windows of one token")
    return read_attention(fields)


def read_topology(config: Mapping[str, Any]) -> DeepseekV4Topology:
    """Plan from the fields of config.json.

    Raises ``UnsupportedConfigError`` naming the field for anything missing, unknown or not implemented, and both fields for a
    contradiction; ``UnsupportedFormatError`` for packed weights.
    """
    _refuse_quantised(config)
    check_fields(config, _FIELDS)
    check_fixed(config, _FIXED)
    fields = _with_rope_width(dict(config))
    layers = required_int(fields, "num_hidden_layers")
    kinds, rates, hashed = _kinds(fields, layers), _rates(fields), _hashed(fields, layers)
    sources = [index for index, kind in enumerate(kinds) if kind is not LayerKind.WINDOW]
    if not sources:
        raise UnsupportedConfigError("config field 'layer_types' names no layer that makes entries; prefixes are found by pages of entries")
    rope_main, rope_compress = read_rope_tables(fields)
    return DeepseekV4Topology(
        vocab=required_int(fields, "vocab_size"),
        hidden=required_int(fields, "hidden_size"),
        eps=optional_float(fields, "rms_norm_eps", 1e-6),
        streams=optional_int(fields, "hc_mult", 4),
        sinkhorn_iterations=optional_int(fields, "hc_sinkhorn_iters", 20, MOST_ITERATIONS),
        mix_eps=optional_float(fields, "hc_eps", 1e-6),
        attention=_attention(fields),
        moe=_moe(fields),
        layers=tuple(LayerPlan(index, kind, rates[kind], hashed[index], decoder=index >= sources[-1]) for index, kind in enumerate(kinds)),
        rope_main=rope_main,
        rope_compress=rope_compress,
        max_position=required_int(fields, "max_position_embeddings"),
    )
