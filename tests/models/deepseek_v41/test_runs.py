"""Made checkpoints behind ``LLM``: text in, text out, the same from a directory as from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError

Load = Callable[..., dict[str, Any]]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quiet": True, "max_model_len": 1024, "max_num_seqs": 2, "num_threads": 2}


def test_a_made_checkpoint_answers_in_text(made: Path) -> None:
    values = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (read,) = LLM(model=str(made), **SETTINGS).generate(["Once upon a time"], values)
    (drawn,) = LLM(model=str(made), load_format="dummy", seed=3, **SETTINGS).generate(["Once upon a time"], values)
    assert read.prompt_token_ids is not None and read.prompt_token_ids[0] == 0 and len(read.prompt_token_ids) > 4
    assert len(read.outputs[0].token_ids) == 5 and read.outputs[0].text
    assert read.outputs[0].token_ids == drawn.outputs[0].token_ids and read.outputs[0].text == drawn.outputs[0].text
    assert len(set(read.outputs[0].token_ids)) > 1


def test_the_cache_of_table_rows_is_a_setting_and_is_counted(made: Path) -> None:
    values = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = "abc " * 12  # n-grams that come again
    answers, counted = [], []
    for room in (0.0, 0.001):
        llm = LLM(model=str(made), engram_cache_gib=room, **SETTINGS)
        answers.append(llm.generate([prompt], values)[0].outputs[0].token_ids)
        counted.append(llm.metrics().tables)
    assert answers[0] == answers[1]
    none, some = counted
    assert none["capacity"] == none["hits"] == 0 < none["misses"] == none["lookups"] < none["rows"]
    # half a mebibyte for each of two tables, records of 33 bytes in sets of eight
    assert some["capacity"] == 2 * (int(0.001 * 2**30) // 2 // 33 // 8 * 8) and some["hits"] > 0
    assert some["bytes_read"] == 33 * some["misses"] < none["bytes_read"]


def test_a_cache_of_table_rows_is_refused_where_there_is_none(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engram_cache_gib must be a number of GiB"):
        LLM(model=str(made), engram_cache_gib=-1, **SETTINGS)
    llama = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    with pytest.raises(ConfigError, match="engram_cache_gib is a setting of models with"):
        LLM(model=str(tmp_path), load_format="dummy", engram_cache_gib=1, **SETTINGS)


@pytest.mark.nightly
def test_full_depth_runs_on_random_weights(load: Load, narrow: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    llm = LLM(model=str(tmp_path), load_format="dummy", seed=1, **SETTINGS)
    values = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 200))}], values)
    assert len(output.outputs[0].token_ids) == 64 and len(set(output.outputs[0].token_ids)) > 16
