"""Configurations that are trained, as the dictionary a config.json holds.

Owns: sizes. Never touches: weights. ``tiny`` is the one to train (window 128), ``small`` seven times that (16,384 ids), ``smoke``
the layers of ``tiny`` in the least widths.
"""

from __future__ import annotations

from typing import Any

from corpus import BOS, EOS, NOISE, PAD

from deepinfer.models.deepseek_v41.engram import table_primes

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 64, "qk_rope_head_dim": 32,
        "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 4, "n_routed_experts": 12, "num_experts_per_tok": 2, "sliding_window": 128,
        "index_n_heads": 16, "index_head_dim": 32, "index_topk": 32, "candidate_topk_blocks": 16, "candidate_block_size": 8,
        "engram_vocab_size": 5000, "engram_n_heads": 2, "engram_head_dim": 32, "dspark_markov_rank": 64, "dspark_n_routed_experts": 8,
    },
    "small": {
        "num_hidden_layers": 12, "max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 2048},
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0], "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10], "candidate_source_layer_id": 6, "engram_layer_ids": [1, 4],
        "dspark_target_layer_ids": [9, 10, 11],
        "hidden_size": 640, "moe_intermediate_size": 320, "num_attention_heads": 8, "head_dim": 128, "qk_rope_head_dim": 64,
        "q_lora_rank": 256, "o_lora_rank": 160, "o_groups": 4, "n_routed_experts": 12, "num_experts_per_tok": 3, "sliding_window": 128,
        "index_n_heads": 16, "index_head_dim": 64, "index_topk": 128, "candidate_topk_blocks": 64, "candidate_block_size": 8,
        "engram_vocab_size": 16000, "engram_n_heads": 4, "engram_head_dim": 64, "dspark_markov_rank": 64, "dspark_n_routed_experts": 6,
    },
    "smoke": {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32, "qk_rope_head_dim": 16,
        "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
        "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "candidate_topk_blocks": 4, "candidate_block_size": 4,
        "engram_vocab_size": 200, "engram_n_heads": 2, "engram_head_dim": 32, "dspark_markov_rank": 32, "dspark_n_routed_experts": 4,
    },
}  # fmt: skip


def config(name: str, vocab: int, compressed: int | None) -> dict[str, Any]:
    """The configuration ``name`` for a tokenizer of ``vocab`` ids and ``compressed`` Engram ids (None = identity)."""
    if name not in _SIZES:
        raise ValueError(f"no configuration {name!r}; choose one of {', '.join(_SIZES)}")
    sizes = _SIZES[name]
    primes = table_primes(2, 4, sizes["engram_n_heads"], sizes["engram_vocab_size"])
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "num_hidden_layers": 10,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256},
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7, 9],
        "candidate_source_layer_id": 5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [sum(map(sum, table)) for table in primes],
        "engram_max_ngram_size": 4,
        "engram_pad_token_id": PAD,
        "engram_compressed_vocab_size": vocab if compressed is None else compressed,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_num_experts_per_tok": 2,
        "x_engram_token_map": "identity" if compressed is None else "derive",
        **sizes,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }
