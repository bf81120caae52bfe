"""Prompts in all their forms; what is wrong with a request is said before the engine hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import text_kit
from deepinfer.engine.chat_template import load_chat_template
from deepinfer.engine.input_processor import InputProcessor, ModelLimits, match_params, split_conversations, split_prompts
from deepinfer.errors import (
    ConfigError,
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParamsError,
    TokenOutOfRangeError,
)
from deepinfer.sampling import SamplingParams

TOKENIZER = text_kit.byte_level()
LIMITS = ModelLimits(max_model_len=20, vocab_size=TOKENIZER.vocab_size)


def processor(**values: Any) -> InputProcessor:
    return InputProcessor(TOKENIZER, load_chat_template(None, TOKENIZER), limits=LIMITS, eos_ids=(2, 0, 2), **values)


def test_all_forms_of_a_prompt_give_its_ids() -> None:
    ids = TOKENIZER.encode("hello")
    forms: list[Any] = ["hello", {"prompt": "hello"}, {"prompt": "hello", "prompt_token_ids": ids}]
    forms += [ids, tuple(ids), np.array(ids), list(np.array(ids)), {"prompt_token_ids": ids}]
    for place, prompt in enumerate(forms):
        request, text = processor().prepare(prompt, SamplingParams(), "r", stream=False)
        assert request.prompt_ids == ids and all(type(i) is int for i in request.prompt_ids)
        assert text == ("hello" if place < 3 else None)


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("", EmptyPromptError, "prompt is empty"),
        ([], EmptyPromptError, "no tokens"),
        ({"prompt": ""}, EmptyPromptError, "prompt is empty"),
        ([1, 99999], TokenOutOfRangeError, "token id 99999 at position 1 is outside the vocabulary of"),
        ([-1], TokenOutOfRangeError, "token id -1"),
        ([1.5], TokenOutOfRangeError, "must be integers"),
        ([1] * 20, PromptTooLongError, "maximum context length is 20 tokens.*prompt has 20.*truncate_prompt_tokens"),
        ({}, InvalidRequestError, "needs 'prompt'"),
        (7, InvalidRequestError, "must be text, a list of token ids or a mapping, got int"),
        ("a\ud800", InvalidRequestError, "not valid Unicode at character 1"),
    ],
)
def test_a_bad_prompt_is_a_typed_error(prompt: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        processor().prepare(prompt, SamplingParams(), "r", stream=False)


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    ids = list(range(3, 43))
    make = lambda **p: processor().prepare(ids, SamplingParams(**p), "r", stream=False)[0]  # noqa: E731
    assert make(truncate_prompt_tokens=5).prompt_ids == ids[-5:]
    assert make(truncate_prompt_tokens=-1, max_tokens=4).prompt_ids == ids[-16:]
    assert make(truncate_prompt_tokens=-1, max_tokens=None).prompt_ids == ids[-19:]
    with pytest.raises(PromptTooLongError):
        make(truncate_prompt_tokens=30)


def test_new_tokens_are_limited_by_the_models_length() -> None:
    make = lambda **p: processor().prepare([5] * 12, SamplingParams(**p), "r", stream=False)[0].max_new  # noqa: E731
    assert (make(max_tokens=3), make(max_tokens=100), make(max_tokens=None)) == (3, 8, 8)
    with pytest.raises(PromptTooLongError, match="min_tokens=9"):
        make(max_tokens=100, min_tokens=9)


@pytest.mark.parametrize(
    "values", [{"stop_token_ids": [99999]}, {"logit_bias": {99999: 1.0}}, {"logprobs": 99999}, {"prompt_logprobs": 99999}]
)
def test_sampling_values_outside_the_vocabulary_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SamplingParamsError, match=next(iter(values))):
        processor().prepare("hi", SamplingParams(**values), "r", stream=False)


def test_requests_with_stop_strings_stream_whoever_reads_them() -> None:
    prepare = processor().prepare
    assert [prepare("hi", p, "r", stream=False)[0].stream for p in (SamplingParams(), SamplingParams(stop="x"))] == [False, True]


def test_a_request_carries_what_the_engine_needs() -> None:
    params = SamplingParams(cache_salt="tenant", priority=3, bad_words=["quick"], seed=4, n=2)
    request, _ = processor().prepare("hi", params, "r", stream=True)
    assert (request.salt, request.priority, request.eos_ids, request.seeds) == (b"tenant", 3, (2, 0), params.seeds(0))
    assert [TOKENIZER.decode(w) for w in request.bad_word_ids] == ["quick", " quick"]
    assert request.arrival > 0


def test_unseeded_requests_differ_but_repeat_with_the_engines_seed() -> None:
    def seeds(seed: int) -> list[int]:
        p = processor(seed=seed)
        return [p.prepare("hi", SamplingParams(), "r", stream=False)[0].seeds[0] for _ in range(3)]

    assert len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0) != seeds(1)


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    p = InputProcessor(None, None, limits=LIMITS)
    assert p.prepare([5], SamplingParams(detokenize=False), "r", stream=False)[0].prompt_ids == [5]
    with pytest.raises(ConfigError, match="tokenizer="):
        p.prepare("hi", SamplingParams(detokenize=False), "r", stream=False)
    with pytest.raises(SamplingParamsError, match="detokenize=False"):
        p.prepare([5], SamplingParams(), "r", stream=False)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        p.chat_prompt([{"role": "user", "content": "x"}])


def test_a_chat_is_a_prompt_with_text_and_ids() -> None:
    prompt = processor().chat_prompt([{"role": "user", "content": "a <|im_end|>"}])
    assert prompt["prompt"] == "<|im_start|>user\na <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert [i for i in prompt["prompt_token_ids"] if i in (0, 1, 2)] == [1, 2, 1]


def test_one_prompt_or_several() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([np.int64(1), np.int32(2)]) == [[1, 2]]
    assert split_prompts(["a", [1], {"prompt": "b"}]) == ["a", [1], {"prompt": "b"}]
    assert split_prompts([]) == []
    with pytest.raises(InvalidRequestError):
        split_prompts(7)  # type: ignore[arg-type]
    one = [{"role": "user", "content": "x"}]
    assert split_conversations(one) == [one] and split_conversations([one, one]) == [one, one]


def test_sampling_values_match_prompts_in_number() -> None:
    one = SamplingParams()
    assert match_params(one, 2) == [one, one]
    assert match_params([one, one], 2) == [one, one]
    with pytest.raises(InvalidRequestError, match="one for each of the 3 prompts, got 2 of them"):
        match_params([one, one], 3)
