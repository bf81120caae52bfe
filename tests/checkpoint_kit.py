"""Tiny checkpoints of every supported shape, made with transformers, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

VOCAB = 120
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}
SCALED = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-llama3": (
        "LlamaConfig",
        {"rope_parameters": {**SCALED, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": {**SCALED, "rope_type": "yarn", "factor": 4.0}}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 24}),
    "mistral-no-window": ("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "Qwen3Config",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@cache
def network(variant: str) -> Any:
    """The transformers model of a variant, random from a fixed seed, biases and norms not at their neutral values."""
    import transformers as hf

    kind, extra = VARIANTS[variant]
    config = getattr(hf, kind)(**{**COMMON, **extra})
    torch.manual_seed(list(VARIANTS).index(variant))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def save(variant: str, shard_size: str = "5GB") -> Path:
    """A fresh directory holding the variant's checkpoint."""
    where = Path(mkdtemp(prefix=f"{variant}-"))
    network(variant).save_pretrained(where, max_shard_size=shard_size)
    return where


def expected_logits(variant: str, ids: Sequence[int]) -> torch.Tensor:
    """Logits ``[len, vocab]`` of transformers."""
    with torch.inference_mode():
        return network(variant)(torch.tensor([list(ids)])).logits[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
