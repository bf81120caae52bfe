"""Brings an architecture of one's own: a class, registered under the name that the checkpoint's config.json uses.

    python examples/own_model.py

The model here is Qwen3 whose attention looks back over at most 32 tokens in every second layer, which needs no new mathematics:
it rewrites its configuration and lets the built-in family do the rest. A family with mathematics of its own brings four modules:
docs/adding-a-model.md writes one.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from deepinfer import LLM, SamplingParams, register_model
from deepinfer.models.llama.forward import LlamaModel


def as_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model in the fields that the built-in family knows."""
    kinds = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(config["num_hidden_layers"])]
    windows = {"layer_types": kinds, "sliding_window": 32, "use_sliding_window": True}
    return {**config, "architectures": ["Qwen3ForCausalLM"], **windows}


class NearsightedModel(LlamaModel):
    """Sliding windows on odd layers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        return super().from_config(as_qwen3(config), dtype, device)

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        return super().position_limit(as_qwen3(config))


CONFIG = {
    "architectures": ["NearsightedForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def main() -> None:
    # Another package does the same with an entry point of group "deepinfer.models".
    register_model("NearsightedForCausalLM", f"{__name__}:NearsightedModel")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        # load_format="dummy" fills in random weights, so ids are all that can be asked for.
        with LLM(folder, load_format="dummy") as llm:
            output = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=8, detokenize=False))[0]
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
