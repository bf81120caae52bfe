"""Sampling values: what is refused, and what the message says to change."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from deepinfer.errors import InvalidRequestError, SamplingParamsError
from deepinfer.sampling import SamplingParams, derive_seed


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n": 0}, "n must be an integer of at least 1, got 0"),
        ({"n": True}, "n must be an integer"),
        ({"n": 16385}, "n must be at most 16384, got 16385; send the prompt several times"),
        ({"n": 2, "temperature": 0}, "use n=1 or raise the temperature"),
        ({"temperature": -0.1}, r"temperature must be a number in \[0, inf\)"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0; leave it out"),
        ({"min_tokens": 5, "max_tokens": 4}, "lower min_tokens or raise max_tokens"),
        ({"stop": ""}, "stop must hold non-empty strings"),
        ({"stop": ["a", 3]}, "stop must hold non-empty strings"),
        ({"stop": 5}, "stop must be a list or None, got 5"),
        ({"bad_words": 5}, "bad_words must be a list"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"stop": "x", "detokenize": False}, "use stop_token_ids instead"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\]"),
        ({"logit_bias": {"x": 1}}, "logit_bias key"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias key"),
        ({"logit_bias": {1: -(10**400)}}, r"logit_bias\[1\]"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"bad_words": [""]}, "bad_words must hold non-empty strings"),
        ({"truncate_prompt_tokens": 0}, "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a\udc80"}, "cache_salt must be valid Unicode"),
        ({"traffic_class": "bulk"}, "traffic_class must be one of agent, chat"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_a_wrong_value_says_what_to_change(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SamplingParamsError, match=says) as caught:
        SamplingParams(**values)
    assert isinstance(caught.value, InvalidRequestError)


def test_forms_that_mean_the_same_are_stored_as_one() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"]) == SamplingParams(stop=("a", "a"))
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logit_bias={}) == SamplingParams()
    assert SamplingParams(logit_bias={"7": 1}) == SamplingParams(logit_bias={7: 1.0})  # type: ignore[dict-item]


def test_params_cannot_be_changed_but_cloned_with_checks() -> None:
    params = SamplingParams(max_tokens=4)
    with pytest.raises(AttributeError):
        params.max_tokens = 5  # type: ignore[misc]
    assert params.clone(max_tokens=5).max_tokens == 5
    with pytest.raises(SamplingParamsError):
        params.clone(max_tokens=0)


def test_params_cross_a_process_boundary() -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={3: 1}, seed=5)
    assert pickle.loads(pickle.dumps(params)) == params


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0, stop="x")) == "SamplingParams(temperature=0, stop=('x',))"


def test_seeds_of_several_answers_follow_the_documented_formula() -> None:
    seeds = SamplingParams(n=4, seed=42).seeds(0)
    assert seeds[0] == 42 == SamplingParams(seed=42).seeds(0)[0]
    assert len(set(seeds)) == 4 and all(0 <= s < 2**63 for s in seeds)
    # SplitMix64 (the finaliser of seed + i * golden): first outputs of the generator started at 0, known values.
    assert [derive_seed(0, i) for i in (1, 2, 3)] == [v & (2**63 - 1) for v in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)]
    assert SamplingParams(n=2).seeds(9)[0] == 9


def test_defaults_come_from_the_generation_config_and_are_overridden() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "eos_token_id": [1, 2], "do_sample": True}
    params = SamplingParams.from_generation_config(config, top_p=0.5, seed=1)
    assert params == SamplingParams(temperature=0.6, top_p=0.5, top_k=20, max_tokens=7, seed=1)
    assert SamplingParams.from_generation_config(None) == SamplingParams()
