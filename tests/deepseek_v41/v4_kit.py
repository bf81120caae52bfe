"""A small DeepSeek-V4: configuration, plan, seeded weights under checkpoint names, and transformers' model with these weights.

- ``config()`` → what ``tests/data/deepseek_v41/tiny_v4.json`` holds: window-only, CSA and HCA layers, two layers with experts by token id.
- ``read_plan(config)`` → sizes for ``v4.SequentialV4``; ``tensors(plan)`` → names and shapes; ``weights(plan, seed)``.
- ``transformers_model(config, weights)`` → ``DeepseekV4ForCausalLM`` in float32 with the same numbers.
- ``production_model(config, weights)`` → the family's own, for ``forward_kit.Bench``; ``write_checkpoint(where, config, weights)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer.kernels.rope import RopeParameters
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.deepseek_v41.topology import AttentionSizes, DraftTopology, MoeSizes
from deepseek_v41.v4 import V4Plan
from deepseek_v41.weights_kit import DATA, made

DRAFTS: dict[str, Any] = {
    "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_noise_token_id": 511, "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 16,
}  # fmt: skip
"""Fields that give the configuration draft stages."""
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def config(**changes: Any) -> dict[str, Any]:
    """The configuration with fields changed."""
    return {**json.loads((DATA / "tiny_v4.json").read_text(encoding="utf-8")), **changes}


def read_plan(fields: Mapping[str, Any]) -> V4Plan:
    """Sizes and wiring of a configuration in transformers' present form."""
    rates, yarn = fields["compress_rates"], fields["rope_scaling"]
    rope = int(fields["head_dim"] * fields["partial_rotary_factor"])
    return V4Plan(
        vocab=fields["vocab_size"],
        hidden=fields["hidden_size"],
        eps=fields["rms_norm_eps"],
        streams=fields["hc_mult"],
        sinkhorn_iterations=fields["hc_sinkhorn_iters"],
        mix_eps=fields["hc_eps"],
        attention=AttentionSizes(
            heads=fields["num_attention_heads"],
            head_dim=fields["head_dim"],
            rope=rope,
            q_rank=fields["q_lora_rank"],
            o_rank=fields["o_lora_rank"],
            o_groups=fields["o_groups"],
            window=fields["sliding_window"],
            index_heads=fields["index_n_heads"],
            index_dim=fields["index_head_dim"],
            index_topk=fields["index_topk"],
            candidate_blocks=0,
            candidate_block=0,
        ),
        moe=MoeSizes(
            width=fields["moe_intermediate_size"],
            experts=fields["n_routed_experts"],
            chosen=fields["num_experts_per_tok"],
            normalise=True,
            scale=fields["routed_scaling_factor"],
            temperature=1.0,
            limit=fields["swiglu_limit"],
        ),
        ratios=tuple(rates.get(kind, 0) for kind in fields["layer_types"]),
        csa_ratio=rates[CSA],
        hashed=tuple(kind == "hash_moe" for kind in fields["mlp_layer_types"]),
        rope_main=RopeParameters(rope, theta=fields["rope_theta"]),
        rope_compress=RopeParameters(
            rope,
            theta=fields["compress_rope_theta"],
            rope_type=yarn["rope_type"],
            factor=yarn["factor"],
            original_max_position=yarn["original_max_position_embeddings"],
            beta_fast=yarn["beta_fast"],
            beta_slow=yarn["beta_slow"],
            attention_factor=1.0,
        ),
        drafts=_drafts(fields),
    )


def _drafts(fields: Mapping[str, Any]) -> DraftTopology:
    if not fields["num_nextn_predict_layers"]:
        return DraftTopology(0, 0, 0, (), 0, 0, 0)
    return DraftTopology(
        stages=fields["num_nextn_predict_layers"],
        block=fields["dspark_block_size"],
        noise_token=fields["dspark_noise_token_id"],
        taps=tuple(fields["dspark_target_layer_ids"]),
        markov_rank=fields["dspark_markov_rank"],
        experts=fields["n_routed_experts"],
        chosen=fields["num_experts_per_tok"],
    )


def _layer(t: V4Plan, ratio: int, hashed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    a, d = t.attention, t.hidden
    yield "attn.wq_a.weight", (a.q_rank, d)
    yield "attn.q_norm.weight", (a.q_rank,)
    yield "attn.wq_b.weight", (a.heads * a.head_dim, a.q_rank)
    yield "attn.wkv.weight", (a.head_dim, d)
    yield "attn.kv_norm.weight", (a.head_dim,)
    yield "attn.wo_a.weight", (a.o_groups * a.o_rank, a.group_width)
    yield "attn.wo_b.weight", (d, a.o_groups * a.o_rank)
    yield "attn.attn_sink", (a.heads,)
    pools = [("attn.compressor", a.head_dim)] if ratio else []
    if ratio == t.csa_ratio:
        pools.append(("attn.indexer.compressor", a.index_dim))
        yield "attn.indexer.wq_b.weight", (a.index_heads * a.index_dim, a.q_rank)
        yield "attn.indexer.weights_proj.weight", (a.index_heads, d)
    for name, width in pools:
        columns = 2 * width if ratio == t.csa_ratio else width
        yield f"{name}.wkv.weight", (columns, d)
        yield f"{name}.wgate.weight", (columns, d)
        yield f"{name}.ape", (ratio, columns)
        yield f"{name}.norm.weight", (width,)
    yield "attn_norm.weight", (d,)
    yield "ffn_norm.weight", (d,)
    mixes = t.streams * (t.streams + 2)
    for site in ("attn", "ffn"):
        yield f"hc_{site}_fn", (mixes, t.streams * d)
        yield f"hc_{site}_base", (mixes,)
        yield f"hc_{site}_scale", (3,)
    yield "ffn.gate.weight", (t.moe.experts, d)
    yield ("ffn.gate.tid2eid", (t.vocab, t.moe.chosen)) if hashed else ("ffn.gate.bias", (t.moe.experts,))
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(t.moe.experts))):
        yield f"ffn.{expert}.w1.weight", (t.moe.width, d)
        yield f"ffn.{expert}.w3.weight", (t.moe.width, d)
        yield f"ffn.{expert}.w2.weight", (d, t.moe.width)


def tensors(plan: V4Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoint names and shapes; all float32 but ``tid2eid``, which is int64."""
    yield "embed.weight", (plan.vocab, plan.hidden)
    for index in range(len(plan.ratios)):
        for name, shape in _layer(plan, plan.ratios[index], plan.hashed[index]):
            yield f"layers.{index}.{name}", shape
    yield from _head_mix(plan, "")
    yield "norm.weight", (plan.hidden,)
    yield "head.weight", (plan.vocab, plan.hidden)
    last, d = f"mtp.{plan.drafts.stages - 1}.", plan.hidden
    for stage in range(plan.drafts.stages):
        for name, shape in _layer(plan, 0, False):
            yield f"mtp.{stage}.{name}", shape
    if plan.drafts.stages:
        yield "mtp.0.main_proj.weight", (d, len(plan.drafts.taps) * d)
        yield "mtp.0.main_norm.weight", (d,)
        yield from _head_mix(plan, last)
        yield f"{last}norm.weight", (d,)
        yield f"{last}markov_head.embed.weight", (plan.vocab, plan.drafts.markov_rank)
        yield f"{last}markov_head.head.weight", (plan.vocab, plan.drafts.markov_rank)
        yield f"{last}confidence_head.proj.weight", (1, d + plan.drafts.markov_rank)


def _head_mix(plan: V4Plan, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}hc_head_fn", (plan.streams, plan.streams * plan.hidden)
    yield f"{prefix}hc_head_base", (plan.streams,)
    yield f"{prefix}hc_head_scale", (1,)


def weights(plan: V4Plan, seed: int) -> dict[str, torch.Tensor]:
    """Seeded weights; every token has experts that differ from each other."""
    found = {}
    for name, shape in tensors(plan):
        if name.endswith("tid2eid"):
            draw = np.random.RandomState([seed, int(name.split(".")[1])])
            order = draw.random_sample((plan.vocab, plan.moe.experts)).argsort(1, kind="stable")
            found[name] = torch.from_numpy(order[:, : plan.moe.chosen].astype(np.int64).copy())
        else:
            found[name] = made(name, shape, seed)
    return found


_RENAMED = (
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.", "self_attn.compressor.indexer."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".attn_sink", ".sinks"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".wkv.", ".kv_proj."),
    (".wgate.", ".gate_proj."),
    (".ape", ".position_bias"),
    (".norm.", ".kv_norm."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".shared_experts.w1.", ".shared_experts.gate_proj."),
    (".shared_experts.w2.", ".shared_experts.down_proj."),
    (".shared_experts.w3.", ".shared_experts.up_proj."),
)
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def transformers_names(plan: V4Plan, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as transformers names and packs them."""
    named = {}
    for name, value in given.items():
        if ".experts." in name or name.startswith("mtp."):
            continue
        key = _OUTSIDE.get(name)
        if key is None:
            key = name
            for ours, theirs in _RENAMED:
                key = key.replace(ours, theirs)
            key = f"model.{key}"
        named[key] = value
    for index in range(len(plan.ratios)):
        experts = [f"layers.{index}.ffn.experts.{number}" for number in range(plan.moe.experts)]
        up = [torch.cat((given[f"{expert}.w1.weight"], given[f"{expert}.w3.weight"])) for expert in experts]
        named[f"model.layers.{index}.mlp.experts.gate_up_proj"] = torch.stack(up)
        named[f"model.layers.{index}.mlp.experts.down_proj"] = torch.stack([given[f"{expert}.w2.weight"] for expert in experts])
    return named


def transformers_model(fields: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> Any:
    """transformers' model with these weights, for inference on the CPU in float32."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    unknown = ("architectures", "model_type", "dtype")
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{name: value for name, value in fields.items() if name not in unknown}))
    model.load_state_dict(transformers_names(read_plan(fields), given), strict=True)
    return model.float().eval()


def production_model(
    fields: Mapping[str, Any], given: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> DeepseekV4Model:
    """The engine's model with these weights."""
    model = DeepseekV4Model.from_config(fields, dtype, torch.device(device))
    for name in model.parameter_shapes():
        place = model.parameter(name)
        place.copy_(given[name].view(place.shape))
    model.finish_loading()
    return model


def write_checkpoint(where: Path, fields: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> Path:
    """A directory with these weights in two files and an index, under the release's names."""
    from safetensors.torch import save_file

    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    names, index = sorted(given), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: given[name].contiguous() for name in part}, where / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in given.values())
    found = {"metadata": {"total_size": total}, "weight_map": index}
    (where / "model.safetensors.index.json").write_text(json.dumps(found), encoding="utf-8")
    return where
