"""Prompts with images behind ``LLM``: answers, arrangements, refusals. Pictures have sizes of whole patches, so Pillow is not needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.errors import ImageError, InvalidRequestError
from deepinfer.models.images import Pixels

IMAGE = 2046
SETTINGS: dict[str, Any] = {"dtype": "float32", "quiet": True, "max_model_len": 512, "max_num_seqs": 2, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.RandomState([seed, height, width]).randint(0, 256, (height, width, 3)).astype(np.uint8)


def asking(*images: Pixels, before: int = 9, behind: int = 5) -> dict[str, Any]:
    """Text, the images with a token between them, text."""
    ids = list(range(100, 100 + before))
    for _ in images:
        ids += [IMAGE, 50]
    return {"prompt_token_ids": ids + list(range(200, 200 + behind)), "images": list(images)}


PROMPTS = [asking(picture(56, 70)), asking(picture(42, 42), picture(98, 56), before=3), asking(before=30)]


@pytest.fixture(scope="module")
def llm(made: Path) -> Iterator[LLM]:
    with LLM(model=str(made), **SETTINGS) as made_llm:
        yield made_llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Answers one by one, each in one chunk."""
    return [llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in PROMPTS]


def test_an_image_is_looked_at(llm: LLM, alone: list[list[int]]) -> None:
    (seen,) = llm.generate([PROMPTS[0]], GREEDY)
    assert seen.outputs[0].token_ids == alone[0] and len(alone[0]) == 10
    ids = seen.prompt_token_ids
    assert ids is not None and ids == [*range(100, 109), *[IMAGE] * 8, 50, *range(200, 205)]
    (whole,) = llm.generate([{"prompt_token_ids": ids, "images": PROMPTS[0]["images"]}], GREEDY)
    assert whole.outputs[0].token_ids == alone[0] and whole.prompt_token_ids == ids
    logprobs = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    first = [
        next(iter(llm.generate([asking(picture(56, 70, seed))], logprobs)[0].outputs[0].logprobs[0].values())).logprob  # type: ignore[index]
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


def test_answers_do_not_depend_on_arrangement(made: Path, llm: LLM, alone: list[list[int]]) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in together] == alone
    # few rows a step and few pages: chunks around the images, a second step in flight, sequences preempted and computed again
    settings = {**SETTINGS, "max_num_seqs": 3, "max_num_batched_tokens": 18, "num_kv_blocks": 7, "block_size": 16, "swap_space_gib": 0}
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], long)]
    assert [answer[:10] for answer in expected] == alone[:2]
    forked = SamplingParams(n=2, temperature=1, seed=5, max_tokens=3, ignore_eos=True, detokenize=False)
    ends_with_image = asking(picture(56, 70), behind=-1)
    ends_with_image["prompt_token_ids"].pop()
    with LLM(model=str(made), **settings) as small:
        assert [output.outputs[0].token_ids for output in small.generate(PROMPTS[:2], long)] == expected
        assert small.engine.core_stats()["preemptions"] > 0
        answers = [[answer.token_ids for answer in engine.generate([ends_with_image], forked)[0].outputs] for engine in (llm, small)]
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_only_the_same_image_is_found_again(made: Path) -> None:
    values = SamplingParams(temperature=0, max_tokens=2, logprobs=0, ignore_eos=True, detokenize=False)
    one, other = (asking(picture(98, 126, seed), before=20, behind=330) for seed in (1, 2))  # tokens 20 to 33: in two blocks of 16

    def told(engine: LLM, prompt: dict[str, Any]) -> tuple[int, list[tuple[int, float]]]:
        (output,) = engine.generate([prompt], values)
        found = output.outputs[0].logprobs
        assert found is not None
        return output.num_cached_tokens or 0, [(token, value.logprob) for each in found for token, value in each.items()]

    settings = {**SETTINGS, "block_size": 16, "max_num_batched_tokens": 200}
    with LLM(model=str(made), **settings, enable_prefix_caching=False) as cold:
        alone = [told(cold, prompt)[1] for prompt in (one, other)]
    assert alone[0] != alone[1]
    for snapshots, order in (
        (0.01, (0, 0, 1, 0)),
        (0, (0, 1, 1)),
    ):  # states come back, or windows are made up from rows behind or within the image
        with LLM(model=str(made), **settings, state_snapshot_gib=snapshots) as warm:
            seen = [told(warm, (one, other)[k]) for k in order]
        assert [answer for _, answer in seen] == [alone[k] for k in order]
        for place, (k, (cached, _)) in enumerate(zip(order, seen, strict=True)):
            assert cached >= 320 if k in order[:place] else cached <= 16, (place, cached)


def test_images_reach_an_engine_in_another_process(made: Path, alone: list[list[int]]) -> None:
    async def ask() -> list[int]:
        async with AsyncLLM(model=str(made), **SETTINGS) as there:
            with pytest.raises(ImageError, match="uint8"):
                async for _ in there.generate({"prompt_token_ids": [5, IMAGE], "images": [np.zeros((42, 42))]}, GREEDY):
                    pass
            async for output in there.generate(PROMPTS[1], GREEDY, mode="final"):
                answer = output.outputs[0].token_ids
            return answer

    assert asyncio.run(ask()) == alone[1]


def test_what_an_engine_cannot_hold_is_refused_alone(made: Path, llm: LLM, alone: list[list[int]]) -> None:
    with LLM(model=str(made), **{**SETTINGS, "max_num_batched_tokens": 9}) as small:
        with pytest.raises(InvalidRequestError, match=r"9 tokens.*room for 8.*max_num_batched_tokens.*max_num_seqs"):
            small.generate([asking(picture(42, 252))], GREEDY)
        assert small.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids == alone[0]
    settings = {**SETTINGS, "yoco_prefill_truncation": "compact", "yoco_prefill_keep_tokens": 30}
    with LLM(model=str(made), **settings) as truncating:
        with pytest.raises(ImageError, match=r"yoco_prefill_keep_tokens=30 .* within image 0 .* 1 more tokens"):
            truncating.generate([asking(picture(56, 70), behind=28)], GREEDY)
        for behind in (0, 21, 29):  # kept whole or left out whole
            assert len(truncating.generate([asking(picture(56, 70), behind=behind)], GREEDY)[0].outputs[0].token_ids) == 10
    refused = pytest.raises(InvalidRequestError, match="send the prompt to a prompt engine first")
    with LLM(model=str(made), **SETTINGS, engine_type="completion") as half, refused:
        half.add_request(PROMPTS[0], GREEDY)
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt has 3 placeholders"):
        llm.generate([PROMPTS[0], {"prompt_token_ids": [IMAGE] * 3, "images": [picture(42, 42)]}], GREEDY)
    assert not llm.has_unfinished_requests()
