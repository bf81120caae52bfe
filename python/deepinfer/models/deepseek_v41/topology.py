"""Configuration of DeepSeek-V4.1 → a validated plan of what is built. Allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedConfigError
from ...kernels.rope import RopeParameters
from ..config import optional_bool, optional_float, optional_int, required_int
from .engram import EngramTopology, read_engram
from .fields import check_heads, check_most, int_list, read_fields, read_limit, read_quantised, read_rope_tables, token_id
from .shared_layers import LayerKind, SharedLayerTopology
from .vision import VisionTopology, read_vision

MOST_EXPERTS = 1 << 16
MOST_ITERATIONS = 1000


@dataclass(frozen=True)
class LayerPlan:
    """One backbone layer; sources are layer numbers, ``None`` where the layer reads its window only."""

    index: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    index_source: int | None
    index_key_source: int | None
    candidates: bool
    """Its selection is restricted to the candidate source's blocks."""
    decoder: bool
    engram: int | None
    """Which Engram table it reads."""
    tapped: bool
    """Its input feeds the draft stages."""
    stretched_rope: bool
    """Queries, window, entries and outputs turn by ``rope_compress``, otherwise by ``rope_main``."""


@dataclass(frozen=True)
class AttentionSizes:
    """Widths of attention and indexer; ``rope`` channels at the end of every head turn."""

    heads: int
    head_dim: int
    rope: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    candidate_block: int

    @property
    def group_width(self) -> int:
        """Inputs of one group of the output projection."""
        return self.heads * self.head_dim // self.o_groups


@dataclass(frozen=True)
class MoeSizes:
    """One expert layer; one shared expert of the same width runs beside the chosen ones."""

    width: int
    experts: int
    chosen: int
    normalise: bool
    scale: float
    temperature: float
    limit: float
    """Clamp of gate and up projection; 0 = none."""
    weight_first: bool = True
    """Whether an expert's weight multiplies its inner row, else its answer."""


@dataclass(frozen=True)
class DraftTopology:
    """Draft stages: ``block`` drafts a call, from the inputs of backbone layers ``taps``."""

    stages: int
    block: int
    noise_token: int
    taps: tuple[int, ...]
    markov_rank: int
    experts: int
    chosen: int


@dataclass(frozen=True)
class DeepseekV41Topology:
    """Everything containers and forward need; sizes in elements, positions and lengths in tokens."""

    vocab: int
    hidden: int
    eps: float
    streams: int
    sinkhorn_iterations: int
    mix_eps: float
    attention: AttentionSizes
    moe: MoeSizes
    shared: SharedLayerTopology
    layers: tuple[LayerPlan, ...]
    engram: EngramTopology | None
    drafts: DraftTopology
    vision: VisionTopology | None
    rope_main: RopeParameters
    rope_compress: RopeParameters
    max_position: int
    quantised_weights: bool
    """Weights in the released formats; False = plain floats, which also switches the rounding of activations off."""
    quantised_caches: bool
    """Rows are rounded to their cache formats, in whatever form they are kept."""
    token_map: str
    """``derive`` (from the tokenizer), ``identity`` or a file: where compressed token ids come from."""

    @property
    def max_backtracking(self) -> int:
        """Most rows one step may write past the last accepted one: the token that follows it and its drafts."""
        return self.drafts.block + 1 if self.drafts.stages else 1

    @property
    def ring(self) -> int:
        """Rows of a window ring: a rejected draft overwrites only rows that no later window reads."""
        return self.attention.window + self.max_backtracking

    @property
    def encoder_layers(self) -> int:
        """Layers before the decoder."""
        return self.shared.decoder_start

    @property
    def exact_decoder_tokens(self) -> int:
        """Tokens to re-run so that decoder windows are those of a full run: each layer reaches ``window - 1`` further back."""
        return (len(self.layers) - self.encoder_layers) * (self.attention.window - 1) + 1

    @property
    def exact_tokens(self) -> int:
        """The same for all layers."""
        return len(self.layers) * (self.attention.window - 1) + 1

    @property
    def least_keep(self) -> int:
        """Fewest tokens a truncated prefill may keep."""
        return self.ring


def read_attention(fields: Mapping[str, Any], candidate_blocks: int = 0, candidate_block: int = 0) -> AttentionSizes:
    """Widths as the fields have them, for DeepSeek-V4 too; what they must agree on is checked before."""
    return AttentionSizes(
        heads=required_int(fields, "num_attention_heads"),
        head_dim=required_int(fields, "head_dim"),
        rope=required_int(fields, "qk_rope_head_dim"),
        q_rank=required_int(fields, "q_lora_rank"),
        o_rank=required_int(fields, "o_lora_rank"),
        o_groups=required_int(fields, "o_groups"),
        window=required_int(fields, "sliding_window"),
        index_heads=required_int(fields, "index_n_heads"),
        index_dim=required_int(fields, "index_head_dim"),
        index_topk=required_int(fields, "index_topk"),
        candidate_blocks=candidate_blocks,
        candidate_block=candidate_block,
    )


def _attention(fields: Mapping[str, Any], shared: SharedLayerTopology) -> AttentionSizes:
    check_heads(fields)
    topk, blocks, block = required_int(fields, "index_topk"), 0, 0
    if shared.candidate_source is not None:
        blocks, block = required_int(fields, "candidate_topk_blocks"), required_int(fields, "candidate_block_size")
        # the newest block may hold a single visible entry
        if blocks * block - (block - 1) < topk:
            raise UnsupportedConfigError(
                f"config fields 'candidate_topk_blocks' = {blocks} and 'index_topk' = {topk} disagree: "
                f"blocks of {block} (candidate_block_size) may leave fewer candidates than are to be selected"
            )
    return read_attention(fields, blocks, block)


def _moe(fields: Mapping[str, Any], quantised: bool) -> MoeSizes:
    check_most(fields, "num_experts_per_tok", "n_routed_experts")
    if quantised:
        for name in ("moe_intermediate_size", "hidden_size"):
            if required_int(fields, name) % 32:
                raise UnsupportedConfigError(
                    f"config fields {name!r} = {fields[name]} and 'quantization_config.expert_dtype' disagree: "
                    "FP4 experts share a scale among 32 inputs, so the first must be a multiple of 32"
                )
    return MoeSizes(
        width=required_int(fields, "moe_intermediate_size"),
        experts=required_int(fields, "n_routed_experts", MOST_EXPERTS),
        chosen=required_int(fields, "num_experts_per_tok"),
        normalise=optional_bool(fields, "norm_topk_prob", True),
        scale=optional_float(fields, "routed_scaling_factor", 1.0),
        temperature=optional_float(fields, "gate_temp", 1.0),
        limit=read_limit(fields),
    )


def _drafts(fields: Mapping[str, Any], stages: int, vocab: int, layers: int) -> DraftTopology:
    if not stages:
        return DraftTopology(0, 0, 0, (), 0, 0, 0)
    taps = int_list(fields, "dspark_target_layer_ids")
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise UnsupportedConfigError(f"config field 'dspark_target_layer_ids' = {list(taps)} must name layers, each once, in order")
    if taps[-1] >= layers:
        raise UnsupportedConfigError(
            f"config fields 'dspark_target_layer_ids' and 'num_hidden_layers' disagree: layer {taps[-1]} of {layers} is named"
        )
    check_most(fields, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    return DraftTopology(
        stages=stages,
        block=required_int(fields, "dspark_block_size"),
        noise_token=token_id(fields, "dspark_noise_token_id", vocab),
        taps=taps,
        markov_rank=required_int(fields, "dspark_markov_rank"),
        experts=required_int(fields, "dspark_n_routed_experts", MOST_EXPERTS),
        chosen=required_int(fields, "dspark_num_experts_per_tok"),
    )


def _check_decoder(fields: Mapping[str, Any], shared: SharedLayerTopology, engram: EngramTopology | None, taps: tuple[int, ...]) -> None:
    """The decoder can be left out for most of a prompt only if nothing but its own windows comes from it."""
    start = shared.decoder_start
    if engram is not None and engram.layers[-1] >= start:
        raise UnsupportedConfigError(
            f"config fields 'engram_layer_ids' and 'kv_source_layer_ids' disagree: layer {engram.layers[-1]} is in the decoder, "
            f"which starts at the last source, layer {start}; Engram layers belong to the encoder"
        )
    if taps and taps[0] < start:
        raise UnsupportedConfigError(
            f"config fields 'dspark_target_layer_ids' and 'kv_source_layer_ids' disagree: layer {taps[0]} is before the decoder, "
            f"which starts at the last source, layer {start}; drafts read decoder inputs"
        )
    ratios = {shared.ratios[layer] for layer in range(start, len(shared.ratios))}
    if ratios != {shared.ratios[start]}:
        raise UnsupportedConfigError(
            f"config fields 'compress_ratios' and 'kv_source_layer_ids' disagree: decoder layers (from layer {start}) must all read "
            f"its cache, found ratios {sorted(ratios)}"
        )


def _choice(fields: Mapping[str, Any], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = fields.get(name) or default
    if value not in allowed:
        raise UnsupportedConfigError(f"config field {name!r} = {value!r} is not implemented; known: {', '.join(allowed)}")
    return str(value)


def _token_map(fields: Mapping[str, Any], engram: EngramTopology | None, vocab: int) -> str:
    value = fields.get("x_engram_token_map") or "derive"
    if not isinstance(value, str):
        raise UnsupportedConfigError(f"config field 'x_engram_token_map' must be 'derive', 'identity' or a file, found {value!r}")
    if value == "identity" and engram is not None and engram.vocab != vocab:
        raise UnsupportedConfigError(
            f"config fields 'x_engram_token_map' = 'identity' and 'engram_compressed_vocab_size' = {engram.vocab} disagree: "
            f"there are {vocab} tokens (vocab_size)"
        )
    return value


def read_topology(config: Mapping[str, Any]) -> DeepseekV41Topology:
    """Plan from the fields of config.json, flat or with ``text_config``.

    Raises ``UnsupportedConfigError`` naming the field for anything missing, unknown or not implemented, and both fields for a
    contradiction.
    """
    fields = read_fields(config)
    layers, vocab = required_int(fields, "num_hidden_layers"), required_int(fields, "vocab_size")
    stages = fields.get("num_nextn_predict_layers", 3)
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 0:
        raise UnsupportedConfigError(f"config field 'num_nextn_predict_layers' must be an integer ≥ 0, found {stages!r}")
    candidate = fields.get("candidate_source_layer_id")
    if isinstance(candidate, bool) or not isinstance(candidate, int | None):
        raise UnsupportedConfigError(f"config field 'candidate_source_layer_id' must be a layer or -1, found {candidate!r}")
    kv_sources = int_list(fields, "kv_source_layer_ids")
    if not kv_sources:
        raise UnsupportedConfigError("config field 'kv_source_layer_ids' is empty; the decoder starts at its last layer")
    shared = SharedLayerTopology.derive(
        layers,
        stages,
        int_list(fields, "compress_ratios"),
        kv_sources,
        int_list(fields, "index_source_layer_ids"),
        None if candidate is None or candidate < 0 else candidate,
    )
    quantised = read_quantised(fields)
    engram = read_engram(fields, layers, vocab, quantised)
    drafts = _drafts(fields, stages, vocab, layers)
    _check_decoder(fields, shared, engram, drafts.taps)
    rope_main, rope_compress = read_rope_tables(fields)
    tables = {} if engram is None else {layer: number for number, layer in enumerate(engram.layers)}
    plans = tuple(
        LayerPlan(
            index=index,
            kind=shared.kinds[index],
            ratio=shared.ratios[index],
            kv_source=shared.share_kv[index],
            index_source=shared.share_index[index],
            index_key_source=shared.share_index_key[index],
            candidates=shared.uses_candidates(index),
            decoder=index >= shared.decoder_start,
            engram=tables.get(index),
            tapped=index in drafts.taps,
            stretched_rope=shared.ratios[index] > 0,
        )
        for index in range(layers)
    )
    return DeepseekV41Topology(
        vocab=vocab,
        hidden=required_int(fields, "hidden_size"),
        eps=optional_float(fields, "rms_norm_eps", 1e-20),
        streams=optional_int(fields, "hc_mult", 4),
        sinkhorn_iterations=optional_int(fields, "hc_sinkhorn_iters", 20, MOST_ITERATIONS),
        mix_eps=optional_float(fields, "hc_eps", 1e-6),
        attention=_attention(fields, shared),
        moe=_moe(fields, quantised),
        shared=shared,
        layers=plans,
        engram=engram,
        drafts=drafts,
        vision=read_vision(fields, vocab),
        rope_main=rope_main,
        rope_compress=rope_compress,
        max_position=required_int(fields, "max_position_embeddings"),
        quantised_weights=quantised,
        quantised_caches=_choice(fields, "x_cache_quant", "released", ("released", "none")) == "released",
        token_map=_token_map(fields, engram, vocab),
    )
