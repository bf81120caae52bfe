"""Configurations of the family, fresh for every test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint

DATA = Path(__file__).resolve().parents[2] / "data" / "deepseek_v41"


@pytest.fixture(scope="session")
def load() -> Callable[..., dict[str, Any]]:
    """``load("tiny", head_dim=96)``: a configuration with text fields changed; ``None`` removes one."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        config["text_config"].update(changes)
        for field, value in changes.items():
            if value is None:
                del config["text_config"][field]
        return config

    return read


@pytest.fixture(scope="session")
def flat(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The same with the text fields at the top."""

    def read(name: str, **changes: Any) -> dict[str, Any]:
        config = load(name, **changes)
        text = config.pop("text_config")
        return {**text, **config}

    return read


@pytest.fixture(scope="session")
def made(load: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``tiny`` in the released form, seed 3, in several shards. Read it only."""
    directory = tmp_path_factory.mktemp("v41") / "released"
    make_checkpoint(load("tiny"), directory, seed=3, shard_bytes=5_000_000)
    return directory


@pytest.fixture
def narrow(load: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """All 43 layers of the real plan at reduced width, with every list of sources as released."""
    widths: dict[str, Any] = {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16,
        "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "vocab_size": 512,
        "index_n_heads": 4, "index_head_dim": 32, "engram_num_embeddings": [6126, 6332], "engram_vocab_size": 1000, "engram_n_heads": 2,
        "engram_head_dim": 32, "engram_compressed_vocab_size": 512, "x_engram_token_map": "identity", "dspark_noise_token_id": 511,
        "dspark_markov_rank": 8, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
    config = load("full", **widths)
    config["image_token_id"] = 510
    config["vision_config"].update(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    return config
