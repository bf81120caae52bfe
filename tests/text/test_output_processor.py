"""Text, ids and logprobs end where the stop string says, however the tokens fall and however many a delta brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import text_kit
from deepinfer.engine.output_processor import OutputMode, OutputProcessor
from deepinfer.engine.request import SequenceDelta
from deepinfer.outputs import RequestOutput
from deepinfer.sampling import SamplingParams

TOKENIZER = text_kit.byte_level()


class Run:
    """Recorded deltas through a processor; what was given out and what the engine was told."""

    def __init__(self, deltas: Sequence[SequenceDelta], params: SamplingParams, mode: OutputMode = "delta", **request: Any) -> None:
        self.stops: list[tuple[str, int, int]] = []
        self.outputs: list[RequestOutput] = []
        self.processor = OutputProcessor(TOKENIZER)
        self.processor.add(text_kit.request(params, **request), "prompt", mode)
        for delta in deltas:
            self.outputs += self.processor.process([delta], lambda *stop: self.stops.append(stop))

    @property
    def text(self) -> str:
        return "".join(a.text for o in self.outputs for a in o.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [i for o in self.outputs for a in o.outputs for i in a.token_ids]

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


def tokens_of(text: str, joins: list[int]) -> list[int]:
    """Ids of a text cut in tokens at random byte positions, as far as the vocabulary has such tokens."""
    ids, at, data = [], 0, text
    for width in [*joins, *[1] * len(text)]:
        if at >= len(data):
            break
        ids += TOKENIZER.encode(data[at : at + width], add_special_tokens=False)
        at += width
    return ids


STOP_TEXTS = st.text("ab 세é.", max_size=12)
STOPS = st.lists(st.text("ab 세é.", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


@settings(max_examples=400, deadline=None)
@given(
    before=STOP_TEXTS,
    after=STOP_TEXTS,
    stops=STOPS,
    joins=st.lists(st.integers(1, 5), max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    spell=st.booleans(),
    include=st.booleans(),
)
def test_streamed_text_never_contains_the_stop_and_equals_the_text_given_at_once(
    before: str, after: str, stops: list[str], joins: list[int], cuts: list[int], spell: bool, include: bool
) -> None:
    text = before + stops[0] + after
    ids = text_kit.spelled(text) if spell else tokens_of(text, joins)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    streamed = Run(text_kit.recorded(ids, cuts), params)
    whole = Run(text_kit.recorded(ids), params, "final")
    end, stop = min((text.index(s) + len(s), -len(s), s) for s in stops if s in text)[::2]
    assert streamed.text == whole.text == (text[:end] if include else text[: end - len(stop)])
    assert streamed.token_ids == whole.token_ids
    for run in (streamed, whole):
        answer = run.last.outputs[0]
        assert (answer.finish_reason, answer.stop_reason, run.last.finished) == ("stop", stop, True)
    if not include:
        assert not any(s in streamed.text for s in stops)
    # Ids end with the token that completed the match: without it there would be none.
    assert text[:end] in TOKENIZER.decode(streamed.token_ids)
    assert not any(s in TOKENIZER.decode(streamed.token_ids[:-1]) for s in stops)


@settings(max_examples=300, deadline=None)
@given(text=STOP_TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=10))
def test_only_a_suffix_that_may_begin_a_stop_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    if any(s in text for s in stops):
        return
    ids = text_kit.spelled(text)
    run = Run(text_kit.recorded(ids, range(len(ids)), finish=None) if ids else [], SamplingParams(stop=stops))
    # All text the tokens have completed is out, but for the longest suffix that is a proper prefix of a stop.
    held = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
    assert run.text == text[: len(text) - held]


def test_the_final_flush_goes_the_same_road() -> None:
    # "sto" is held back; at the end it is text after all.
    ids = text_kit.spelled("go sto")
    run = Run(text_kit.recorded(ids, range(20)), SamplingParams(stop="stop"))
    assert run.text == "go sto"
    assert run.last.outputs[0].finish_reason == "length"
    # An unfinished character becomes U+FFFD at the flush, and may complete a stop string there.
    run = Run(text_kit.recorded(text_kit.spelled("x😀")[:-1], range(20)), SamplingParams(stop="\ufffd"))
    assert run.text == "x"
    assert run.last.outputs[0].stop_reason == "\ufffd"


def test_the_engine_is_told_where_to_stop_and_what_it_made_beyond_is_dropped() -> None:
    ids = text_kit.spelled("one stop two three")
    deltas = text_kit.recorded(ids, (5, 10, 12), logprobs=True)
    run = Run(deltas, SamplingParams(stop="stop", logprobs=1))
    assert run.stops == [("r", 0, 8)]  # "one stop"
    assert run.text == "one "
    assert len(run.token_ids) == 8
    assert sum(len(a.logprobs or ()) for o in run.outputs for a in o.outputs) == 8
    assert run.last.outputs[0].cumulative_logprob == -4.0
    assert len(run.processor) == 0
    assert len(run.outputs) == 2  # deltas after the stop give nothing


def test_an_answer_that_the_engine_ended_itself_is_not_stopped_again() -> None:
    run = Run(text_kit.recorded(text_kit.spelled("a stop")), SamplingParams(stop="stop"))
    assert run.stops == []
    assert run.last.outputs[0].stop_reason == "stop"


def test_no_stop_string_takes_effect_before_min_tokens() -> None:
    ids = text_kit.spelled("ab ab ab")
    run = Run(text_kit.recorded(ids, range(20)), SamplingParams(stop="ab", min_tokens=3))
    assert run.text == "ab "
    assert run.token_ids == ids[:5]


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_the_token_that_ended_an_answer_counts_but_is_text_only_on_request(include: bool, text: str) -> None:
    ids = text_kit.spelled("hi!")
    params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
    run = Run(text_kit.recorded(ids, finish="stop"), params)
    answer = run.last.outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (text, ids, ids[-1])


def test_the_models_own_end_is_no_stop_reason() -> None:
    run = Run(text_kit.recorded([*text_kit.spelled("hi"), 2], finish="stop"), SamplingParams(skip_special_tokens=False))
    answer = run.last.outputs[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == ("hi", 2, "stop", None)


def test_without_detokenizing_there_are_ids_only() -> None:
    run = Run(text_kit.recorded([7, 8, 2], finish="stop", logprobs=True), SamplingParams(detokenize=False, logprobs=1), "final")
    answer = run.last.outputs[0]
    assert (answer.text, answer.token_ids) == ("", [7, 8, 2])
    assert answer.logprobs is not None and answer.logprobs[0][7].decoded_token is None


def test_logprobs_hold_the_chosen_token_first_and_once() -> None:
    run = Run(text_kit.recorded([9, 7], logprobs=True), SamplingParams(logprobs=1), "final")
    answer = run.last.outputs[0]
    assert answer.logprobs is not None
    assert [list(position) for position in answer.logprobs] == [[9], [7, 9]]
    assert answer.logprobs[1][7].logprob == -0.5 and answer.logprobs[1][9].rank == 1
    assert answer.logprobs[1][7].decoded_token == TOKENIZER.token_text(7)
    assert answer.cumulative_logprob == -1.0


@pytest.mark.parametrize("mode", ["cumulative", "delta", "final"])
def test_modes_give_the_same_text(mode: OutputMode) -> None:
    text = "세계 hello"
    run = Run(text_kit.recorded(text_kit.spelled(text), range(40)), SamplingParams(), mode)
    if mode == "cumulative":
        texts = [o.outputs[0].text for o in run.outputs]
        assert texts[-1] == text and all(b.startswith(a) for a, b in pairwise(texts))
    else:
        assert run.text == text
    assert len(run.outputs) == (1 if mode == "final" else len(text.encode()))
    assert [o.finished for o in run.outputs] == [False] * (len(run.outputs) - 1) + [True]


def test_each_of_several_answers_ends_once_and_the_request_with_the_last() -> None:
    first, second = text_kit.spelled("a stop b"), text_kit.spelled("no end")
    deltas = [*text_kit.recorded(first, (3, 7)), *text_kit.recorded(second, (2,), index=1)]
    run = Run(deltas, SamplingParams(n=2, stop="stop"), "delta")
    ends = [(a.index, a.finish_reason) for o in run.outputs for a in o.outputs if a.finished]
    assert ends == [(0, "stop"), (1, "length")]
    assert [o.finished for o in run.outputs] == [False, False, False, True]
    assert run.stops == [("r", 0, 6)]


def test_an_aborted_request_keeps_what_it_had_and_takes_no_more() -> None:
    deltas = text_kit.recorded(text_kit.spelled("hello world"), (5,))
    run = Run(deltas[:1], SamplingParams(), "cumulative")
    last = run.processor.drop("r")
    assert last is not None and last.finished
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("hello", "abort")
    assert run.processor.process(deltas[1:], lambda *_: None) == []
    assert run.processor.drop("r") is None


def test_a_failed_request_says_why() -> None:
    run = Run([SequenceDelta("r", 0, [], "error", error="out of memory")], SamplingParams())
    assert (run.last.outputs[0].finish_reason, run.last.outputs[0].error) == ("error", "out of memory")


def test_metrics_come_from_the_engines_timing() -> None:
    run = Run(text_kit.recorded(text_kit.spelled("abcd"), (2,)), SamplingParams())
    m = run.last.metrics
    assert (m.time_in_queue, m.time_to_first_token, m.end_to_end) == (1.0, 2.0, 7.0)
    assert run.last.num_cached_tokens == 3


def test_what_further_answers_find_of_their_own_prompt_is_no_hit() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add(text_kit.request(SamplingParams(n=2, temperature=1.0)), mode="delta")
    (early,) = processor.process([SequenceDelta("r", 1, [6], cached_tokens=48)], lambda *_: None)
    (first,) = processor.process([SequenceDelta("r", 0, [5], cached_tokens=16)], lambda *_: None)
    (again,) = processor.process([SequenceDelta("r", i, [7], "length", cached_tokens=48) for i in (0, 1)], lambda *_: None)
    assert [o.num_cached_tokens for o in (early, first, again)] == [0, 16, 16]


def test_one_answer_of_several_is_ended_where_it_is_and_the_others_go_on() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.add(text_kit.request(SamplingParams(n=2, temperature=1.0)), mode="delta")
    stops: list[tuple[str, int, int]] = []

    def stop_at(*told: Any) -> None:
        stops.append(told)

    for index in (0, 1):
        processor.process(_begun(index), stop_at)
    cut, output = processor.end_answer("r", 0)
    assert cut == 2 and output is not None and not output.finished
    assert [(a.index, a.finish_reason, a.token_ids) for a in output.outputs] == [(0, "stop", [])]  # nothing is new but the end
    assert processor.end_answer("r", 0) == (None, None) and processor.end_answer("other", 0) == (None, None)
    assert processor.process(_begun(0), stop_at) == []  # made beyond the end
    cut, output = processor.end_answer("r", 1)
    assert cut == 2 and output is not None and output.finished and len(processor) == 0 and stops == []


def _begun(index: int) -> list[SequenceDelta]:
    """Two tokens of an answer that goes on."""
    return [replace(text_kit.recorded(text_kit.spelled("ab"), index=index)[0], finish_reason=None)]
