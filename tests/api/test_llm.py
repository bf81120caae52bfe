"""`LLM` from the outside: order, errors, interrupts, streams, steps by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import api_kit
import deepinfer
from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.errors import (
    CapacityError,
    ConfigError,
    EmptyPromptError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    SamplingParamsError,
    TokenOutOfRangeError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [f"prompt number {i} " + "x" * i for i in range(12)]


def idle(llm: LLM) -> bool:
    """Whether nothing is left of any request: every block is free or cached, every state slot free."""
    if llm.has_unfinished_requests() or llm.engine._answers.by_handle:
        return False
    for _ in range(3):  # completes what was in flight, then opens the fences of the last real step
        llm.engine.step()
    if llm.engine.has_unfinished():
        return False
    counts = llm.engine.core_counts()
    return not any(c["held"] or c["parked"] for c in [*counts["groups"], counts["slots"]])


def finish(llm: LLM) -> list[RequestOutput]:
    """Steps until nothing is left."""
    outputs: list[RequestOutput] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [1 + (7 * i) % 12 for i in range(12)]
    outputs = llm.generate(PROMPTS, [GREEDY.clone(max_tokens=n) for n in lengths], use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    tokenizer = llm.get_tokenizer()
    assert all(o.outputs[0].text == tokenizer.decode(o.outputs[0].token_ids) for o in outputs)
    alone = [llm.generate(p, GREEDY.clone(max_tokens=n))[0].outputs[0].token_ids for p, n in zip(PROMPTS, lengths, strict=True)]
    assert [o.outputs[0].token_ids for o in outputs] == alone


def test_prompts_may_be_text_ids_or_mappings(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    made = [llm.generate(p, GREEDY)[0] for p in ("hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids})]
    assert len({tuple(o.outputs[0].token_ids) for o in made}) == 1
    assert [o.prompt for o in made] == ["hello", None, "hello", None]
    assert llm.generate([], GREEDY) == []


def test_outputs_carry_timing_cached_tokens_and_logprobs(llm: LLM) -> None:
    prompt = "a prompt that is long enough to fill some blocks of sixteen tokens each"
    params = GREEDY.clone(logprobs=2, prompt_logprobs=1)
    llm.generate(prompt, GREEDY)
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens >= 16
    output = llm.generate(prompt, params)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    assert [next(iter(p)) for p in answer.logprobs] == answer.token_ids
    assert answer.cumulative_logprob == pytest.approx(sum(p[i].logprob for p, i in zip(answer.logprobs, answer.token_ids, strict=True)))
    assert all(p[i].rank == 1 for p, i in zip(answer.logprobs, answer.token_ids, strict=True))
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time <= time.monotonic()


def test_logprobs_agree_with_logits_of_one_forward(llm: LLM) -> None:
    output = llm.generate("what follows", GREEDY.clone(logprobs=0, prompt_logprobs=0))[0]
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    logits = llm.logits(ids)
    assert logits.shape == (len(ids), llm.vocab_size) and logits.dtype == np.float32
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    positions = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    given = [p[i].logprob for p, i in zip(positions, ids[1:], strict=True) if p is not None]
    np.testing.assert_allclose(given, logprobs[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)


def test_prompt_logprobs_do_not_depend_on_what_is_cached(llm: LLM) -> None:
    prompt = "prompt logprobs with a cached prefix must not hold rows that nobody computed, so reuse is skipped"
    params = GREEDY.clone(prompt_logprobs=1)
    cold = llm.generate(prompt, params)[0].prompt_logprobs
    llm.generate(prompt, GREEDY)
    warm = llm.generate(prompt, params)[0].prompt_logprobs
    crowd = llm.generate([prompt, *PROMPTS], params)[0].prompt_logprobs
    assert cold == warm == crowd


def test_a_stop_string_cuts_text_and_ids_and_is_never_counted(llm: LLM) -> None:
    free = llm.generate("stop strings", GREEDY.clone(max_tokens=24))[0].outputs[0]
    assert len(free.text) > 6
    stop = free.text[4:6]
    end = free.text.index(stop)
    answer = llm.generate("stop strings", GREEDY.clone(max_tokens=24, stop=stop))[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (free.text[:end], "stop", stop)
    assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
    assert stop not in llm.get_tokenizer().decode(answer.token_ids[:-1])
    streamed = "".join(a.text for o in llm.stream("stop strings", GREEDY.clone(max_tokens=24, stop=stop)) for a in o.outputs)
    assert streamed == free.text[:end]
    kept = llm.generate("stop strings", GREEDY.clone(max_tokens=24, stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == free.text[: end + len(stop)]
    assert idle(llm)


def test_stop_ids_and_the_list_of_eos_ids_end_an_answer(llm: LLM) -> None:
    assert llm.eos_token_ids == (2, 3)
    free = llm.generate("ids", GREEDY)[0].outputs[0].token_ids
    answer = llm.generate("ids", GREEDY.clone(stop_token_ids=[free[3]]))[0].outputs[0]
    assert answer.token_ids == free[: free.index(free[3]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", free[3])
    forced = llm.generate("ids", SamplingParams(temperature=0, max_tokens=4, logit_bias={3: 100.0}))[0].outputs[0]
    assert (forced.token_ids, forced.finish_reason, forced.stop_reason, forced.text) == ([3], "stop", None, "")


def test_bad_words_are_not_written(llm: LLM) -> None:
    free = llm.generate("bad words", GREEDY)[0].outputs[0]
    word = llm.get_tokenizer().token_text(free.token_ids[2])
    params = GREEDY.clone(bad_words=[word])
    assert free.token_ids[2] not in llm.generate("bad words", params)[0].outputs[0].token_ids[:3]


def test_several_answers_are_seeded_each_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate("several", params)[0] for _ in range(2))
    ids = [a.token_ids for a in first.outputs]
    assert [a.index for a in first.outputs] == [0, 1, 2] and len({tuple(i) for i in ids}) == 3
    assert ids == [a.token_ids for a in second.outputs]
    assert llm.generate("several", params.clone(n=1))[0].outputs[0].token_ids == ids[0]
    crowd = llm.generate([*PROMPTS, "several"], params)[-1]
    assert [a.token_ids for a in crowd.outputs] == ids


def test_model_defaults_come_from_its_generation_config(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_p=0.9)
    assert llm.default_sampling_params(top_p=1.0, max_tokens=3) == SamplingParams(temperature=0.5, max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("", EmptyPromptError), ([], EmptyPromptError), ([5, 99999], TokenOutOfRangeError), ([5] * 5000, PromptTooLongError)],
)
def test_one_bad_prompt_in_a_list_is_refused_before_anything_is_submitted(llm: LLM, prompt: Any, error: type[Exception]) -> None:
    requests = llm.engine.counters.requests
    with pytest.raises(error, match="prompt 1: "):
        llm.generate(["good", prompt, "good"], GREEDY)
    assert llm.engine.counters.requests == requests and idle(llm)
    assert llm.generate("good", GREEDY)[0].finished


def test_sampling_values_of_another_number_than_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="one for each of the 3 prompts, got 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(SamplingParamsError, match="max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=0))


def test_a_bad_request_leaves_those_in_flight_unchanged(llm: LLM) -> None:
    alone = llm.generate("in flight", GREEDY)[0].outputs[0].token_ids
    llm.add_request("in flight", GREEDY, request_id="good")
    llm.step()
    with pytest.raises(TokenOutOfRangeError):
        llm.add_request([99999], GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        llm.add_request("x", GREEDY, request_id="good")
    assert [(o.request_id, o.outputs[0].token_ids) for o in finish(llm)] == [("good", alone)]


def test_chat_answers_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    single = llm.chat(one, GREEDY)[0]
    assert single.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([one, [*one, {"role": "assistant", "content": "yes"}, *one]], GREEDY)
    assert both[0].outputs[0].token_ids == single.outputs[0].token_ids and len(both) == 2
    with pytest.raises(InvalidRequestError, match="'role'"):
        llm.chat([{"content": "hi"}], GREEDY)


def test_a_stream_gives_pieces_that_join_to_the_whole(llm: LLM) -> None:
    whole = llm.generate("streaming", GREEDY)[0].outputs[0]
    pieces = [o.outputs[0] for o in llm.stream("streaming", GREEDY)]
    assert "".join(p.text for p in pieces) == whole.text
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    cumulative = [o.outputs[0].token_ids for o in llm.stream("streaming", GREEDY, mode="cumulative")]
    assert cumulative == [whole.token_ids[: i + 1] for i in range(len(whole.token_ids))]


def test_an_unknown_mode_is_refused_before_anything_is_queued(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="cumulative, delta, final"):
        llm.stream("x", GREEDY, mode="whole")  # type: ignore[arg-type]
    assert idle(llm)


def test_a_stream_that_is_left_early_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("left early", GREEDY.clone(max_tokens=100))
    next(stream)
    del stream
    assert idle(llm)


def test_streams_and_other_requests_share_the_engine(llm: LLM) -> None:
    alone = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in ("first", "second", "third")]
    one, two = llm.stream("first", GREEDY), llm.stream("second", GREEDY)
    llm.add_request("third", GREEDY, request_id="3")
    got: list[list[int]] = [[], []]
    for a, b in zip(one, two, strict=True):
        got[0] += a.outputs[0].token_ids
        got[1] += b.outputs[0].token_ids
    assert got == alone[:2]
    assert [o.outputs[0].token_ids for o in llm.generate(["first", "second"], GREEDY)] == alone[:2]
    assert [(o.request_id, o.outputs[0].token_ids) for o in finish(llm)] == [("3", alone[2])]


def test_an_aborted_request_gives_what_it_had(llm: LLM) -> None:
    request_id = llm.add_request("to be aborted", GREEDY.clone(max_tokens=100), stream=True)
    while not llm.step():
        pass
    last = llm.abort(request_id)
    assert last is not None and last.finished and last.outputs[0].finish_reason == "abort" and last.outputs[0].token_ids
    assert llm.abort(request_id) is None
    assert idle(llm)


def test_a_stream_whose_request_was_aborted_ends(llm: LLM) -> None:
    stream = llm.stream("aborted by another", GREEDY.clone(max_tokens=100))
    llm.abort(next(stream).request_id)
    assert list(stream) == []
    assert idle(llm)


def test_a_dead_engine_is_said_once_and_can_be_closed(device: str) -> None:
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
        stream = llm.stream("x", GREEDY)
        llm.add_request("y", GREEDY)
        with pytest.raises(EngineDeadError):
            llm.engine._core.inject_fault("a fault in the core")
        for work in (lambda: llm.generate(["a", "b"], GREEDY), lambda: list(stream), llm.step):
            with pytest.raises(EngineDeadError, match="a fault in the core"):
                work()


def test_ctrl_c_twice_aborts_all_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = llm.engine._loop
    advance = loop.advance

    def interrupted() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return advance()

    llm.add_request("of another call", GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert idle(llm) and llm.generate("fits", GREEDY)[0].finished


def test_ctrl_c_leaves_a_clean_engine(llm: LLM) -> None:
    before = llm.generate(PROMPTS, GREEDY)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.generate(PROMPTS, GREEDY.clone(max_tokens=100))
    assert idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.outputs[0].token_ids for o in before]


def test_with_closes_and_a_closed_llm_says_so(device: str) -> None:
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
        llm.add_request("left behind", GREEDY)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", GREEDY)
    assert "closed" in repr(llm)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"trust_remote_code": True}, ConfigError, "refused"),
        ({"block_size": 48}, ConfigError, "block_size"),
        ({"num_kv_blocks": 10**9}, CapacityError, "num_kv_blocks"),
        ({"colour": "red"}, ConfigError, "colour"),
        ({"chat_template": "{% if %}"}, ConfigError, "syntax error"),
        ({"tokenizer": "/no/such/tokenizer"}, (ConfigError, ModelNotFoundError), "tokenizer"),
    ],
)
def test_settings_that_cannot_be_are_typed_errors(device: str, settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LLM(api_kit.tiny_model(), device=device, **{**api_kit.SETTINGS, **settings})


def test_a_request_that_could_never_fit_takes_those_of_its_call_with_it(device: str) -> None:
    settings = {**api_kit.SETTINGS, "num_kv_blocks": 3, "max_model_len": 300}
    with LLM(api_kit.tiny_model(), device=device, **settings) as llm:
        llm.add_request("another call", GREEDY, request_id="other")
        with pytest.raises(InvalidRequestError):
            llm.generate(["fits", [5] * 200], GREEDY)
        assert [o.request_id for o in finish(llm)] == ["other"]
        assert idle(llm) and llm.generate("fits", GREEDY)[0].finished


def test_an_unknown_model_is_a_typed_error() -> None:
    with pytest.raises(ModelNotFoundError):
        LLM("/no/such/model")


def test_importing_the_package_is_quick() -> None:
    code = "import sys, deepinfer; print(sorted({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]"
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
    with pytest.raises(AttributeError):
        _ = deepinfer.no_such_name
