"""How rows spread over experts: what is counted, and how even it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.sampling import SamplingParams
from deepinfer.worker.expert_loads import ExpertLoads
from deepseek_v41.draft_kit import deepseek, engine_of
from engine_kit import collect, random_prompts, request


def test_every_choice_of_every_row_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    with engine_of(monkeypatch, tmp_path, "tiny", device, speculative="off") as engine:
        topology = deepseek(engine).topology
        before = engine.metrics()
        for i, prompt in enumerate(random_prompts([40, 9])):
            engine.add_request(request(str(i), prompt, SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)))
        collect(engine)
        for _ in range(3):  # on a GPU a reading is the one begun before
            after = engine.metrics()
        rows = after.totals["prefill_tokens"] + after.totals["decode_rows"]
        layers = len(deepseek(engine).expert_loads())
        assert after.moe["choices"] - before.moe["choices"] == rows * layers * topology.moe.chosen > 0
        assert 0 < after.moe["balance_worst_ratio"] <= after.moe["balance_ratio"] <= 1
        assert after.moe["balance_ratio"] == engine.metrics().moe["balance_ratio"], "without new rows it stays"


def test_balance_is_that_of_what_came_since_the_reading_before(device: str) -> None:
    loads = [torch.tensor([4, 0], device=device), torch.tensor([2, 2], device=device)]
    reader = ExpertLoads(loads)

    def read() -> dict[str, float]:
        for _ in range(3):
            made = reader.counts()
            if device == "cuda":
                torch.cuda.synchronize()
        return made

    assert read() == {"choices": 8, "balance_ratio": 0.75, "balance_worst_ratio": 0.5}
    loads[0] += torch.tensor([1, 3], device=device)
    assert read() == {"choices": 12, "balance_ratio": pytest.approx((2 / 3 + 1) / 2), "balance_worst_ratio": pytest.approx(2 / 3)}
