"""Configuration of a Mixtral model → a validated plan of what is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import UnsupportedConfigError
from deepinfer.kernels.rope import RopeParameters
from deepinfer.models.config import check_fields, optional_bool, optional_float, optional_int, refuse_foreign_format, required_int
from deepinfer.models.rope_config import ROPE_FIELDS, read_rope

FIELDS = (
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
    "sliding_window",
    "tie_word_embeddings",
    "num_local_experts",
    "num_experts_per_tok",
    "output_router_logits",  # these two are of training only
    "router_jitter_noise",
    *ROPE_FIELDS,
)


@dataclass(frozen=True)
class MixtralTopology:
    """Everything the containers and the forward need; sizes in elements, positions in tokens."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    eps: float
    tied: bool
    window: int | None
    """How many latest positions a row sees, None = all."""
    rope: RopeParameters
    max_position: int


def read_topology(config: Mapping[str, Any]) -> MixtralTopology:
    """Plan from the fields of config.json.

    Raises ``UnsupportedConfigError`` naming the field for anything missing, contradictory, unknown or not implemented.
    """
    refuse_foreign_format(config)
    check_fields(config, FIELDS)
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfigError(f"config field 'hidden_act' = {config['hidden_act']!r} is not implemented; this family uses silu")
    hidden, heads = required_int(config, "hidden_size"), required_int(config, "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads", heads)
    head_dim = optional_int(config, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise UnsupportedConfigError(f"config field 'num_attention_heads' = {heads} must be a multiple of num_key_value_heads = {kv_heads}")
    if head_dim % 2 or (config.get("head_dim") is None and hidden % heads):
        raise UnsupportedConfigError(f"config field 'hidden_size' = {hidden}: num_attention_heads = {heads} must cut it into even heads")
    experts, chosen = optional_int(config, "num_local_experts", 8), optional_int(config, "num_experts_per_tok", 2)
    if chosen > experts:
        raise UnsupportedConfigError(f"config field 'num_experts_per_tok' = {chosen} is above num_local_experts = {experts}")
    trained = optional_int(config, "max_position_embeddings", 131072)
    rope, max_position = read_rope(config, head_dim, trained, default_theta=1e6)
    return MixtralTopology(
        vocab=required_int(config, "vocab_size"),
        hidden=hidden,
        intermediate=required_int(config, "intermediate_size"),
        layers=required_int(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        experts=experts,
        experts_per_token=chosen,
        eps=optional_float(config, "rms_norm_eps", 1e-5),
        tied=optional_bool(config, "tie_word_embeddings"),
        window=None if config.get("sliding_window") is None else required_int(config, "sliding_window"),
        rope=rope,
        max_position=max_position,
    )
