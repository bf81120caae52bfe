"""Prefix hits of the real model: tokens and log-probabilities are those of a run that finds nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from engine_kit import generate, make_engine, random_prompts, same_bits

Load = Callable[..., dict[str, Any]]
PARAMS = SamplingParams(temperature=0, max_tokens=5, logprobs=-1, ignore_eos=True)


def engine(config: dict[str, Any], where: Path, **settings: Any) -> Engine:
    (where / "config.json").write_text(json.dumps(config))
    small = {"load_format": "dummy", "seed": 5, "max_model_len": 2048, "num_kv_blocks": 64, "swap_space_gib": 0}
    return make_engine(str(where), "cpu", **{**small, "max_num_seqs": 4, "max_num_batched_tokens": 200, **settings})


def turns(made: Engine, lengths: tuple[int, ...]) -> list[Any]:
    """Prompts with a common beginning, the same ones again, and what follows their answers."""
    prompts = [[t % 1900 for t in p] for p in random_prompts(lengths, seed=7)]
    prompts = [prompts[0][:140] + p[140:] for p in prompts]
    first = generate(made, prompts, [PARAMS] * len(prompts))
    again = generate(made, prompts, [PARAMS] * len(prompts))
    longer = [[*p, *a.tokens, *p[:150]] for p, a in zip(prompts, first, strict=True)]
    return [*first, *again, *generate(made, longer, [PARAMS] * len(prompts))]


def compare(config: dict[str, Any], lengths: tuple[int, ...], tmp_path: Path, cases: list[tuple[dict[str, Any], tuple[str, ...]]]) -> None:
    with engine(config, tmp_path, enable_prefix_caching=False) as made:
        want = turns(made, lengths)
        assert made.core_stats()["hit_tokens"] == 0
    for settings, reached in cases:
        with engine(config, tmp_path, **settings) as made:
            found = turns(made, lengths)
            stats = made.core_stats()
            assert all(stats[name] > 0 for name in reached), (settings, stats)
            assert made._core.check() is None
            assert all(map(same_bits, want, found)), settings


def test_hits_give_the_bits_of_the_whole_prompt(load: Load, tmp_path: Path) -> None:
    """Windows of 16 tokens on pages of 128: 10 · 15 + 1 = 151 tokens are computed again without a snapshot."""
    compare(
        load("tiny"),
        (290, 330),
        tmp_path,
        [
            ({}, ("start_snapshot", "snapshots_taken")),
            ({"state_snapshot_gib": 0, "zero_overhead": False}, ("start_rerun", "rerun_tokens")),
        ],
    )


@pytest.mark.nightly
@pytest.mark.parametrize("truncation", ["off", "mask", "compact"])
def test_hits_with_windows_as_long_as_a_page(load: Load, tmp_path: Path, truncation: str) -> None:
    """1271 tokens are computed again; above the exact bound of a truncated decoder nothing changes either. A page above it, so that the
    state is whole at the last boundary of a prompt, else there is no snapshot."""
    settings: dict[str, Any] = {"yoco_prefill_truncation": truncation} if truncation == "off" else {
        "yoco_prefill_truncation": truncation, "yoco_prefill_keep_tokens": 5 * 127 + 1 + 128,
    }  # fmt: skip
    torch.manual_seed(0)
    cases = [({**settings}, ("start_snapshot",)), ({"state_snapshot_gib": 0, **settings}, ("start_rerun", "rerun_tokens"))]
    compare(load("tiny", sliding_window=128), (1500, 1650), tmp_path, cases)
