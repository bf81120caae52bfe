"""A prompt engine and a completion engine answer like one engine, and whatever ends a hand-over, every block comes back."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import engine_kit
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import Admission, KvSave
from deepinfer.errors import EmptyPromptError, HandoverError, InvalidRequestError, KvLayoutError, PromptTooLongError
from deepinfer.kvcache.handover import Handover
from deepinfer.sampling import SamplingParams
from engine_kit import make_engine, random_prompts, request, same_bits, tiny_checkpoint
from roles_kit import SETTINGS, Pair

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.9, seed=5, max_tokens=14, ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2
)
ODD = SamplingParams(
    temperature=1.2, seed=8, max_tokens=10, min_tokens=6, repetition_penalty=1.3, logit_bias={5: 3.0, 9: -50.0}, stop_token_ids=[11, 12]
)
KINDS = (GREEDY, SEEDED, ODD)


class Recorder(Engine):
    """Notes its hooks."""

    def init_pd_split(self) -> None:
        self.calls: Counter[str] = Counter()
        self.saves: list[KvSave] = []
        self.broken: str | None = None
        self._note("init_pd_split")

    def _note(self, name: str) -> None:
        self.calls[name] += 1
        if self.broken == name:
            raise RuntimeError(f"{name} broke")

    def pe_prepare_save_kvcache(self, save: KvSave) -> None:
        self._note("prepare")
        self.saves.append(save)

    def select_state_slice_to_store(self, save: KvSave) -> slice | None:
        self._note("select")
        return None

    def do_save_kvcache(self, save: KvSave) -> None:
        self._note("save")
        assert save is self.saves[-1]

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> None:
        self._note("load")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[Pair]:
    made = Pair(monkeypatch, device, Recorder)
    yield made
    made.close()


def requests(prompts: list[list[int]], **values: Any) -> list[Any]:
    return [
        request(f"r{i}", prompt, KINDS[i % len(KINDS)], seeds=KINDS[i % len(KINDS)].seeds(i), stream=i % 2 == 0, eos_ids=(2,), **values)
        for i, prompt in enumerate(prompts)
    ]


def alone(device: str, prompts: list[list[int]], **settings: Any) -> list[engine_kit.Answer]:
    """What one engine answers."""
    with make_engine(tiny_checkpoint("llama"), device, **{**SETTINGS, **settings}) as engine:
        for r in requests(prompts):
            engine.add_request(r)
        found = engine_kit.collect(engine)
    return [found[f"r{i}", 0] for i in range(len(prompts))]


@pytest.mark.parametrize("overlap", [True, False])
def test_two_engines_answer_like_one_bit_for_bit(monkeypatch: pytest.MonkeyPatch, device: str, overlap: bool) -> None:
    """Greedy and drawn, penalties, bias, stop ids, chunks, several at once, prompts that share a beginning."""
    pair = Pair(monkeypatch, device, completion={"zero_overhead": overlap})
    prompts = random_prompts((5, 16, 17, 150, 40, 33, 64, 3, 90))
    prompts += [prompts[3][:100] + p for p in random_prompts((9, 20), seed=4)]
    want = alone(device, prompts)
    for _ in range(2):  # the second time with every prefix in both indexes
        got = pair.generate(requests(prompts))
        assert all(map(same_bits, want, got)), [(a.tokens, b.tokens, b.finish, b.error) for a, b in zip(want, got, strict=True)]
        pair.answers.clear()
    pair.check_rest()
    assert pair.shelf.released and max(pair.shelf.released.values()) <= 2  # by who took over, and by who gave
    stats = pair.completion.core_stats()
    assert stats["prefill_tokens"] == 2 * len(prompts), "the completion engine computed more than the row of each first token"
    pair.close()


class Threes:
    """A grammar: token ids modulo 3 count up."""

    complete = False

    def __init__(self) -> None:
        self.position = 0

    def fill_mask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        bits = np.arange(len(row) * 32) % 3 == self.position % 3
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        if token % 3 != self.position % 3:
            return False
        self.position += 1
        return True

    def rollback(self, count: int) -> None:
        self.position -= count


def test_a_grammar_goes_on_where_it_stood(pair: Pair, device: str) -> None:
    prompts = random_prompts((20, 40))
    with make_engine(tiny_checkpoint("llama"), device, **SETTINGS) as engine:
        for r in requests(prompts, grammar=Threes):
            engine.add_request(r)
        found = engine_kit.collect(engine)
        want = [found[f"r{i}", 0] for i in range(2)]
    assert all([token % 3 for token in a.tokens] == [i % 3 for i in range(len(a.tokens))] for a in want)
    pair.grammars = {"r0": Threes, "r1": Threes}
    assert all(map(same_bits, want, pair.generate(requests(prompts, grammar=Threes))))
    assert Handover.from_bytes(pair.records["r0"]).grammar == "Threes"
    pair.grammars.clear()
    pair.answers.clear()
    pair.prompt.add_request(requests(prompts, grammar=Threes)[0])
    pair.run()
    assert isinstance(pair.refused["r0"], HandoverError) and "'Threes'" in str(pair.refused["r0"])
    pair.check_rest()


class Refusing(Threes):
    """Refuses every token, also those it has allowed."""

    def accept(self, token: int) -> bool:
        return False


def test_a_first_token_that_its_grammar_refuses_is_not_handed_over(pair: Pair) -> None:
    for r in requests(random_prompts((20, 40)), grammar=Refusing):
        pair.prompt.add_request(r)
    found = engine_kit.collect(pair.prompt)
    assert all(a.finish == "so_failed" and not a.tokens and "refuses token" in (a.error or "") for a in found.values()) and len(found) == 2
    assert not pair.records
    pair.check_rest()


def test_hooks_of_a_hand_over_are_called_once(pair: Pair) -> None:
    prompts = random_prompts((20, 40, 60))
    one = request("one", random_prompts([9])[0], GREEDY.clone(max_tokens=1))
    pair.generate([*requests(prompts), one])
    handed = len(pair.records)
    assert handed == 3 and pair.answers["one"].finish == "length"
    assert isinstance(pair.prompt, Recorder) and isinstance(pair.completion, Recorder)
    assert pair.prompt.calls["init_pd_split"] == pair.completion.calls["init_pd_split"] == 1
    assert pair.prompt.calls["prepare"] == pair.prompt.calls["save"] == handed
    assert pair.prompt.calls["select"] == 0  # no state to cut
    assert pair.completion.calls["load"] == handed and not pair.completion.saves
    for save in pair.prompt.saves:
        record = Handover.from_bytes(pair.records[save.request_id])
        assert save.tokens == record.computed == len(record.prompt_ids) and len(record.produced) == 1
        assert len(save.blocks) == -(-save.tokens // 16) and save.state_slot > 0


def test_prompt_logprobs_come_from_the_prompt_engine(pair: Pair, device: str) -> None:
    params = GREEDY.clone(prompt_logprobs=2)
    prompt = random_prompts([40])[0]
    with make_engine(tiny_checkpoint("llama"), device, **SETTINGS) as engine:
        want = engine_kit.generate(engine, [prompt], params)[0]
    got = pair.generate([request("p", prompt, params)])[0]
    assert same_bits(want, got) and want.prompt_logprobs is not None and got.prompt_logprobs is not None
    for a, b in zip(want.prompt_logprobs[1:], got.prompt_logprobs[1:], strict=True):
        assert a is not None and b is not None and np.array_equal(a.ids, b.ids) and a.values.tobytes() == b.values.tobytes()


@pytest.mark.parametrize("where", ["prepare", "save"])
def test_a_hook_that_raises_fails_its_request_only(pair: Pair, where: str) -> None:
    prompts = random_prompts((20, 40))
    assert isinstance(pair.prompt, Recorder)
    pair.prompt.broken = where
    got = pair.generate(requests(prompts[:1]))
    assert got[0].finish == "error" and f"{where} broke" in (got[0].error or "")
    pair.prompt.broken = None
    pair.answers.clear()
    assert [a.finish for a in pair.generate(requests(prompts))] == ["length", "length"]
    pair.check_rest()


def test_each_type_refuses_what_it_does_not_do(pair: Pair, device: str) -> None:
    with pytest.raises(InvalidRequestError, match="completion engine"):
        pair.completion.add_request(request("a", [3, 4], GREEDY))
    with pytest.raises(InvalidRequestError, match="n > 1"):
        pair.prompt.add_request(request("a", [3, 4], SEEDED.clone(n=2)))
    pair.generate([request("a", [3, 4, 5], GREEDY)])
    with pytest.raises(HandoverError, match="'prompt'"):
        pair.prompt.take_over(pair.records["a"])
    with pytest.raises(HandoverError, match="record"):
        pair.completion.take_over(b"nonsense")
    with make_engine(tiny_checkpoint("llama"), device) as plain, pytest.raises(HandoverError, match="'normal'"):
        plain.take_over(pair.records["a"])


# Every way a hand-over can end


@pytest.mark.parametrize(
    ("completion", "error", "said"),
    [
        ({"block_size": 32}, KvLayoutError, r"block size is \[16\] there and \[32\] here"),
        ({"dtype": "bfloat16"}, KvLayoutError, "dtype"),
        ({"max_model_len": 30}, PromptTooLongError, "at most 29"),
        ({"num_kv_blocks": 2, "max_model_len": 256}, InvalidRequestError, "blocks"),
    ],
)
def test_what_the_other_side_cannot_take_is_a_typed_refusal(
    monkeypatch: pytest.MonkeyPatch, device: str, completion: dict[str, Any], error: type[Exception], said: str
) -> None:
    pair = Pair(monkeypatch, device, completion=completion)
    try:
        pair.prompt.add_request(request("a", random_prompts([60])[0], GREEDY))
        pair.run()
        assert isinstance(pair.refused["a"], error), pair.refused
        assert re.search(said, str(pair.refused["a"]))
        pair.check_rest()
        assert not pair.shelf.pulls and pair.shelf.released
    finally:
        pair.close()


def test_a_second_request_under_the_same_id_is_refused_and_released(pair: Pair) -> None:
    pair.second.gate.clear()
    pair.prompt.add_request(request("a", random_prompts([20])[0], GREEDY))
    pair.run(lambda: "a" in pair.records)
    pair.pass_on("a")
    assert isinstance(pair.refused["a"], InvalidRequestError)
    pair.run(lambda: bool(pair.shelf.released))
    pair.second.gate.set()
    pair.run()
    assert pair.answers["a"].finish == "error"  # the offer was let go of by the refusal
    pair.check_rest()


@pytest.mark.parametrize("broken", [RuntimeError("no way"), HandoverError("gone"), b"another request's"])
def test_a_failed_pull_ends_the_request_and_returns_the_blocks(pair: Pair, broken: Any) -> None:
    prompts = random_prompts((40, 20))
    pair.second.break_pull = broken
    for r in requests(prompts):
        pair.prompt.add_request(r)
    pair.run()
    assert [pair.answers[i].finish for i in ("r0", "r1")] == ["error", "error"]
    assert all(pair.answers[i].error for i in ("r0", "r1"))
    pair.check_rest()
    assert pair.completion.core_stats()["prefill_tokens"] == 0  # nothing was computed in place of what did not come
    pair.second.break_pull = None
    pair.answers.clear()
    assert [a.finish for a in pair.generate(requests(prompts))] == ["length", "length"]


def test_a_failed_copy_on_either_side_ends_the_request_and_returns_the_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses: no sequence runs on pages that were not written."""
    prompts = random_prompts((40, 20))
    for engine in (pair.prompt, pair.completion):
        kv = engine._runner.kv
        kept, kv.groups = kv.groups, [[]]
        got = pair.generate(requests(prompts))
        assert [(a.finish, bool(a.error)) for a in got] == [("error", True)] * 2
        kv.groups = kept
        pair.check_rest()
        pair.answers.clear()
    assert [a.finish for a in pair.generate(requests(prompts))] == ["length", "length"]


def test_a_failed_offer_ends_the_request_and_returns_the_blocks(pair: Pair) -> None:
    pair.first.break_offer = RuntimeError("no memory")
    got = pair.generate(requests(random_prompts((40, 20))))
    assert [(a.finish, "no memory" in (a.error or "")) for a in got] == [("error", True)] * 2
    pair.check_rest()


@pytest.mark.parametrize("phase", ["offering", "offered", "pulling", "decoding"])
def test_an_abort_in_any_phase_returns_all_blocks(pair: Pair, device: str, phase: str) -> None:
    prompts = random_prompts((70, 20))
    want = alone(device, prompts)
    gate = {"offering": pair.first.gate, "pulling": pair.second.gate}.get(phase)
    if gate is not None:
        gate.clear()
    gone, stays = requests(prompts)
    pair.prompt.add_request(gone)
    if phase == "offering":
        for _ in range(8):
            pair.step()
        assert pair.prompt.core_counts()["groups"][0]["held"] > 0
    elif phase == "offered":
        pair.completion.take_over = lambda _: None  # type: ignore[method-assign, assignment]
        pair.run(lambda: "r0" in pair.records)
        del pair.completion.take_over
    elif phase == "pulling":
        pair.run(lambda: pair.completion.core_stats()["transfers"] == 1)
    else:
        pair.run(lambda: len(pair.answers.get("r0", engine_kit.Answer()).tokens) > 3)
    for engine in (pair.prompt, pair.completion):
        engine.abort("r0")
        engine.abort("r0")
        engine.abort("never was")
    if gate is not None:
        pair.step()
        gate.set()
    pair.prompt.add_request(stays)
    pair.run()
    assert same_bits(want[1], pair.answers["r1"]) and pair.answers.get("r0", engine_kit.Answer()).finish is None
    pair.check_rest()


def test_a_completion_engine_without_room_takes_over_when_there_is_some(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Two sequences that do not fit together: the second one's lease is long enough, and nothing is held for it until it has room."""
    pair = Pair(monkeypatch, device, completion={"num_kv_blocks": 6})
    try:
        prompts = random_prompts((60, 60, 60))
        want = alone(device, prompts)
        got = pair.generate(requests(prompts))
        assert all(map(same_bits, want, got)), [a.error for a in got]
        pair.check_rest()
    finally:
        pair.close()


def test_room_goes_to_the_oldest(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A large sequence that waits is not overtaken by small ones that would fit."""
    pair = Pair(monkeypatch, device, completion={"num_kv_blocks": 10}, handover_lease=20.0)
    try:
        lengths = {"a": (40, 6), "b": (40, 30), "large": (110, 6), "c": (40, 6), "d": (40, 6)}
        prompts = random_prompts([n for n, _ in lengths.values()])
        monkeypatch.setattr(pair, "pass_on", lambda _: None)
        for (name, (_, tokens)), prompt in zip(lengths.items(), prompts, strict=True):
            pair.prompt.add_request(request(name, prompt, GREEDY.clone(max_tokens=tokens)))
        pair.run(lambda: len(pair.records) == len(lengths))
        monkeypatch.undo()
        pair.answers.clear()
        for name in lengths:
            pair.pass_on(name)
        pair.run()
        assert list(pair.answers) == ["a", "b", "large", "c", "d"] and not pair.refused  # in the order of their ends
        pair.check_rest()
    finally:
        pair.close()


def test_a_request_that_is_made_again_keeps_its_place(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """In the queue of the prompt engine, and among those that wait for room in the other one, whatever came meanwhile."""
    pair = Pair(monkeypatch, device, completion={"max_num_seqs": 1, "num_kv_blocks": 6}, max_num_seqs=1, handover_lease=20.0)
    try:
        prompts = random_prompts([40] * 5, seed=5)
        orders = {"runs": 2, "new": 9, "newer": 10, "again": 4, "first": 3}
        handed: list[str] = []
        monkeypatch.setattr(pair, "pass_on", handed.append)
        for (name, order), prompt in zip(orders.items(), prompts, strict=True):
            pair.prompt.add_request(request(name, prompt, GREEDY.clone(max_tokens=20), order=order))
            for _ in range(2 if name == "runs" else 0):
                pair.step()
        gone: list[str] = []
        while len(gone) < len(orders):
            pair.run(lambda: len(handed) > len(gone))
            pair.prompt.abort(handed[len(gone)])  # each holds the only slot until it is let go of
            gone.append(handed[len(gone)])
        assert handed == ["runs", "first", "again", "new", "newer"]
        assert [Handover.from_bytes(pair.records[name]).order for name in handed] == sorted(orders.values())
    finally:
        pair.close()

    pair = Pair(monkeypatch, device, completion={"max_num_seqs": 1, "num_kv_blocks": 6}, handover_lease=20.0)
    try:
        monkeypatch.setattr(pair, "pass_on", lambda _: None)
        for (name, order), prompt in zip(orders.items(), prompts, strict=True):
            pair.prompt.add_request(request(name, prompt, GREEDY.clone(max_tokens=20), order=order))
        pair.run(lambda: len(pair.records) == len(orders))
        monkeypatch.undo()
        pair.answers.clear()
        for name in orders:
            pair.pass_on(name)
            for _ in range(2 if name == "runs" else 0):
                pair.completion.step()
        pair.run()
        assert list(pair.answers) == ["runs", "first", "again", "new", "newer"] and not pair.refused
        pair.check_rest()
    finally:
        pair.close()


def test_a_request_whose_kv_does_not_come_ends_with_its_lease(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pair = Pair(monkeypatch, device, handover_lease=0.4)
    try:
        pair.second.gate.clear()
        pair.prompt.add_request(request("a", random_prompts([40])[0], GREEDY))
        began = time.monotonic()
        pair.run(lambda: pair.answers.get("a", engine_kit.Answer()).finish == "error")
        assert 0.3 < time.monotonic() - began < 5 and "within 0.4 s" in (pair.answers["a"].error or "")
        assert pair.completion.core_counts()["groups"][0]["held"] == 3  # a thread may still write to what it fetches into, not to these
        pair.second.gate.set()
        pair.run()
        pair.check_rest()
        assert pair.shelf.released and pair.completion.core_stats()["kv_leases_ended"] == 1
    finally:
        pair.close()


def test_nobody_takes_over_and_the_lease_returns_the_blocks(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pair = Pair(monkeypatch, device, handover_lease=0.3)
    try:
        pair.completion.take_over = lambda _: None  # type: ignore[method-assign, assignment]
        pair.prompt.add_request(request("a", random_prompts([40])[0], GREEDY))
        pair.run(lambda: "a" in pair.records)
        assert pair.prompt.core_counts()["groups"][0]["held"] == 3
        began = time.monotonic()
        pair.run(seconds=5)
        assert time.monotonic() - began < 2
        del pair.completion.take_over
        pair.check_rest()
        pair.pass_on("a")  # too late: the offer is gone
        pair.run()
        assert pair.answers["a"].finish == "error"
        pair.check_rest()
    finally:
        pair.close()


def test_a_slow_completion_engine_holds_the_prompt_engine_back(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As many sequences as there are slots may be on offer; the others wait in the queue, and all are answered."""
    pair = Pair(monkeypatch, device, max_num_seqs=2)
    try:
        pair.second.gate.clear()
        prompts = random_prompts((20,) * 5)
        for r in requests(prompts):
            pair.prompt.add_request(r)
        pair.run(lambda: len(pair.records) == 2)
        for _ in range(20):
            pair.step()
        assert len(pair.records) == 2 and pair.prompt.core_stats()["waiting"] == 3
        pair.second.gate.set()
        pair.run()
        assert all(map(same_bits, alone(device, prompts, max_num_seqs=2), (pair.answers[f"r{i}"] for i in range(5))))
        pair.check_rest()
    finally:
        pair.close()


def test_closing_with_hand_overs_in_every_phase(pair: Pair) -> None:
    pair.second.gate.clear()
    for r in requests(random_prompts((20, 40, 60, 80))):
        pair.prompt.add_request(r)
    pair.run(lambda: len(pair.records) >= 2)
    pair.completion.close()
    pair.prompt.close()


def test_a_bad_request_disturbs_nobody(pair: Pair) -> None:
    with pytest.raises(EmptyPromptError):
        pair.prompt.add_request(request("e", [], GREEDY))
    assert [a.finish for a in pair.generate(requests(random_prompts((20, 30))))] == ["length", "length"]
    pair.check_rest()


def test_a_failed_step_on_either_side_fails_its_requests_only(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts((40, 20))
    for engine in (pair.prompt, pair.completion):
        forward, broken = engine.model.forward, [True]

        def once(*args: Any, forward: Any = forward, broken: list[bool] = broken) -> torch.Tensor:
            if broken and broken.pop():
                raise RuntimeError("out of luck")
            return forward(*args)

        monkeypatch.setattr(engine.model, "forward", once)
        pair.answers.clear()
        got = pair.generate(requests(prompts[:1]))
        assert got[0].finish == "error" and "out of luck" in (got[0].error or "")
        pair.check_rest()
    pair.answers.clear()
    assert [a.finish for a in pair.generate(requests(prompts))] == ["length", "length"]
