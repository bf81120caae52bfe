"""Made checkpoints behind ``LLM``: text in, text out, the same from a directory as from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams

Load = Callable[..., dict[str, Any]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "quiet": True, "max_model_len": 1024, "max_num_seqs": 2, "num_threads": 2}


def test_a_made_checkpoint_answers_in_text(made: Path) -> None:
    values = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (read,) = LLM(model=str(made), **SETTINGS).generate(["Once upon a time"], values)
    (drawn,) = LLM(model=str(made), load_format="dummy", seed=3, **SETTINGS).generate(["Once upon a time"], values)
    assert read.prompt_token_ids is not None and read.prompt_token_ids[0] == 0 and len(read.prompt_token_ids) > 4
    assert len(read.outputs[0].token_ids) == 5 and read.outputs[0].text
    assert read.outputs[0].token_ids == drawn.outputs[0].token_ids and read.outputs[0].text == drawn.outputs[0].text
    assert len(set(read.outputs[0].token_ids)) > 1


@pytest.mark.nightly
def test_full_depth_runs_on_random_weights(load: Load, narrow: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    llm = LLM(model=str(tmp_path), load_format="dummy", seed=1, **SETTINGS)
    values = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 200))}], values)
    assert len(output.outputs[0].token_ids) == 64 and len(set(output.outputs[0].token_ids)) > 16
