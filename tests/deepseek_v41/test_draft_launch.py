"""Steps that make, choose and verify drafts never make the host wait for the device.

On a fake device everywhere, and unchanged on a GPU with ``--device cuda -m "gpu or not gpu"``. Without Engram, whose tables a fake device
cannot look rows up in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.sampling import SamplingParams
from deepseek_v41.draft_kit import write_config
from engine_kit import collect, make_engine, request
from fake_cuda import ones_land, watched_cuda

FEW_LAYERS: dict[str, Any] = {
    "vocab_size": 256, "image_token_id": 254, "num_hidden_layers": 4, "compress_ratios": [0, 2, 1, 1, 0], "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2], "candidate_source_layer_id": 2, "engram_layer_ids": [], "n_routed_experts": 4,
    "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [2, 3], "dspark_noise_token_id": 255,
}  # fmt: skip


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device called "cuda", copies checked."""
    with watched_cuda(request.param, ones_land):
        yield request.param


@pytest.mark.parametrize(
    ("overlap", "budget"),
    [pytest.param(False, None, id="serial", marks=pytest.mark.nightly), pytest.param(True, 3, id="overlapped and chosen")],
)
def test_steps_with_drafts_launch_without_waiting(cuda: str, overlap: bool, budget: int | None, tmp_path: Path) -> None:
    where = write_config(tmp_path, "tiny", **FEW_LAYERS)
    engine = make_engine(
        where, "cuda", load_format="dummy", speculative="dspark", draft_budget=budget, zero_overhead=overlap, max_num_seqs=4,
        num_kv_blocks=12, max_num_batched_tokens=96, max_model_len=256,
    )  # fmt: skip
    with engine:
        engine.add_request(request("a", [5, 6, 7, 8] * 2, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)))
        values = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.9, top_p=0.8, frequency_penalty=0.5, logprobs=1)
        engine.add_request(request("b", [9, 6, 3], values))
        answers = collect(engine)
        assert engine.core_stats()["drafted"] > 0
    assert {(a.finish, a.error) for a in answers.values()} == {("length", None)}
