"""What is raised out of a turn of the step loop, whatever it is and wherever: requests end with a clear status, nothing stays held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.engine.interrupt import to_the_end
from deepinfer.errors import EngineDeadError, RankGroupError, StepOrderError
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_queue import ThreadQueue, Ticket
from engine_kit import collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from roles_kit import Pair

P = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True)
PROMPTS = random_prompts((70, 20, 5))


class Odd(BaseException):
    """Neither an error nor an interrupt that anybody knows."""


class Around:
    """A core one of whose calls is made by somebody else."""

    def __init__(self, core: Any, name: str, call: Callable[..., Any]) -> None:
        self._around = core, name, call

    def __getattr__(self, name: str) -> Any:
        core, chosen, call = self._around
        real = getattr(core, name)
        return (lambda *a, **k: call(real, *a, **k)) if name == chosen else real


def make(device: str, overlap: bool) -> Engine:
    return make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap, max_num_batched_tokens=48)


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "serial"])
def engine(request: pytest.FixtureRequest, device: str) -> Iterator[Engine]:
    """For all tests whose engine goes on."""
    with make(device, request.param) as made:
        yield made


def nothing_held(engine: Engine) -> bool:
    for _ in range(3):  # opens the fences of the last real step
        engine.step()
    counts, stats = engine.core_counts(), engine.core_stats()
    held = any(c["held"] or c["parked"] for c in [*counts["groups"], counts["slots"]])
    return not held and not stats["running"] and not stats["waiting"] and engine._core.check() is None


def raises_once(error: BaseException, at: int = 3) -> Callable[[], None]:
    left = [at]

    def hit() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    return hit


def arm(engine: Engine, monkeypatch: pytest.MonkeyPatch, point: str, hit: Callable[[], None]) -> None:
    """Has ``hit`` called at a point of each turn."""
    when, _, name = point.partition(" ")
    if when in ("before", "after"):

        def call(real: Callable[..., Any], *args: Any) -> Any:
            if when == "before":
                hit()
            result = real(*args)
            if when == "after":
                hit()
            return result

        monkeypatch.setattr(engine._loop, "_core", Around(engine._loop._core, name, call))
        return
    owner: Any = {"forward": engine.model, "logits": engine.model, "wait": engine._runner, "_find_sources": engine._runner}.get(
        point, engine
    )
    real = getattr(owner, point)

    def around(*args: Any, **kwargs: Any) -> Any:
        hit()
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, point, around)


POINTS = ["forward", "logits", "wait", "post_schedule", "_find_sources", "before schedule", "after schedule"]
POINTS += ["before complete", "after complete", "step_completed"]


@pytest.mark.parametrize(
    ("point", "error"), [*((point, SystemExit(3)) for point in POINTS), ("forward", Odd("odd")), ("post_schedule", Odd("odd"))], ids=str
)
def test_what_is_no_exception_leaves_an_empty_engine_that_works(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, point: str, error: BaseException
) -> None:
    """Also when it comes from the thread that is the device of a CPU. What was in flight is dropped once."""
    want = generate(engine, PROMPTS, P)
    drained, drain = [0], engine._runner.drain

    def counted() -> None:
        drained[0] += 1
        drain()

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "drain", counted)
        arm(engine, patch, point, raises_once(error))
        with pytest.raises(type(error)) as raised:
            generate(engine, PROMPTS, P)
    assert raised.value is error and drained == [1]
    assert not engine.has_unfinished() and nothing_held(engine) and engine.fault is None
    assert all(map(same_bits, want, generate(engine, PROMPTS, P)))


def test_a_completion_that_the_core_refuses_fails_its_step_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    want = generate(engine, PROMPTS, P)
    with monkeypatch.context() as patch:
        arm(engine, patch, "before complete", raises_once(StepOrderError("not now")))
        answers = generate(engine, PROMPTS, P)
    failed = [a for a in answers if a.finish == "error"]
    assert failed and all("StepOrderError: not now" in (a.error or "") for a in failed)
    assert all(same_bits(a, b) for a, b in zip(want, answers, strict=True) if b.finish != "error")
    assert nothing_held(engine)
    assert all(map(same_bits, want, generate(engine, PROMPTS, P)))


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("after complete", "does not take it back"),
        ("step_completed", "ZeroDivisionError: lost"),
        ("before schedule", "ZeroDivisionError: lost"),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_error_that_belongs_to_no_step_ends_the_engine_and_says_why(
    device: str, monkeypatch: pytest.MonkeyPatch, overlap: bool, point: str, why: str
) -> None:
    engine = make(device, overlap)
    threads = threading.active_count()
    with monkeypatch.context() as patch:
        arm(engine, patch, point, raises_once(ZeroDivisionError("lost")))
        with pytest.raises(EngineDeadError, match=why) as raised:
            generate(engine, PROMPTS, P)
    assert "ZeroDivisionError: lost" in str(raised.value) and engine.fault is not None and not engine.has_unfinished()
    for call in (engine.step, lambda: engine.add_request(request("later", [5], P)), lambda: engine.logits([5])):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: lost"):
            call()
    counts = engine.core_counts()
    assert not any(c["held"] for c in [*counts["groups"], counts["slots"]])
    engine.close()
    assert threading.active_count() == threads - overlap


def test_a_rank_group_that_does_not_agree_costs_no_news(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed when a round fails: what the turn had to tell before comes with the next one."""
    want = generate(engine, PROMPTS, P, stream=True)
    with monkeypatch.context() as patch:
        arm(engine, patch, "before schedule", raises_once(RankGroupError("a rank is lost"), at=5))
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(request(str(i), prompt, P, stream=True))
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
        lost = 0
        while engine.has_unfinished():
            try:
                for delta in engine.step():
                    tokens[delta.request_id] += delta.new_token_ids
            except RankGroupError:
                lost += 1
    assert lost == 1 and list(tokens.values()) == [a.tokens for a in want] and nothing_held(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_thread_that_ends_is_an_error_and_no_wait_for_ever() -> None:
    queue, behind, late = ThreadQueue(), Ticket(), Ticket()
    queue._shared.tasks.put("no work at all")  # type: ignore[arg-type]
    queue._shared.tasks.put((behind, lambda: None, True))
    queue._thread.join(20)
    queue._shared.tasks.put((late, lambda: None, True))  # by somebody who had looked just before the end
    told: list[str] = []

    def wait_for_both() -> None:
        for ticket in (behind, late):
            try:
                queue.wait(ticket)
            except EngineDeadError as e:
                told.append(str(e))

    waiting = threading.Thread(target=wait_for_both, daemon=True)
    waiting.start()
    waiting.join(20)
    assert len(told) == 2 and all("has ended" in each for each in told)
    after = Ticket()
    queue.submit(after, lambda: None, last=True)
    with pytest.raises(EngineDeadError):
        queue.wait(after)
    queue.close()


def test_an_end_of_the_device_ends_the_engine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device, True) as engine:
        generate(engine, PROMPTS[:1], P)
        monkeypatch.setattr(engine._runner, "wait", lambda step: (_ for _ in ()).throw(EngineDeadError("the device queue has ended")))
        with pytest.raises(EngineDeadError, match="the device queue has ended"):
            generate(engine, PROMPTS, P)
        assert not engine.has_unfinished()


@pytest.mark.parametrize("hook", ["pe_prepare_save_kvcache", "do_save_kvcache"])
def test_a_hand_over_that_is_broken_off_holds_nothing(device: str, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Of two sequences handed over by one step, the second one has not even been looked at."""
    pair = Pair(monkeypatch, device)
    try:
        ask = [request(f"r{i}", PROMPTS[1], P.clone(logprobs=None), stream=True) for i in range(2)]
        want = pair.generate(ask)
        with monkeypatch.context() as patch:
            patch.setattr(pair.prompt, hook, lambda save: raises_once(SystemExit(2), at=1)())
            for each in ask:
                pair.prompt.add_request(each)
            with pytest.raises(SystemExit):
                pair.run()
        pair.answers.clear()
        pair.run()
        pair.check_rest()
        assert [a.tokens for a in pair.generate(ask)] == [a.tokens for a in want]
        pair.check_rest()
    finally:
        pair.close()


def test_a_mover_outlives_whatever_its_job_raises(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More jobs than it has threads: each is told, and the next hand-overs come through."""
    pair = Pair(monkeypatch, device)
    try:
        plain = P.clone(logprobs=None)
        pair.first.break_offer = SystemExit("offer")
        broken = pair.generate([request(f"o{i}", PROMPTS[1], plain) for i in range(3)])
        assert all(a.finish == "error" and "offer" in (a.error or "") for a in broken)
        pair.first.break_offer = None
        pair.second.break_pull = Odd("pull")
        broken = pair.generate([request(f"p{i}", PROMPTS[1], plain) for i in range(9)])
        assert all(a.finish == "error" and "pull" in (a.error or "") for a in broken)
        pair.second.break_pull = None
        assert pair.generate([request("good", PROMPTS[1], plain)])[0].finish == "length"
        pair.check_rest()
    finally:
        pair.close()


def test_a_request_that_cannot_be_taken_in_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._grammars, "add", lambda *a: (_ for _ in ()).throw(MemoryError("no room for masks")))
        with pytest.raises(MemoryError):
            engine.add_request(request("a", PROMPTS[1], P, grammar=object))
    assert collect(engine, 5) == {} and nothing_held(engine)  # the core hears of its end with the next plan
    engine.add_request(request("a", PROMPTS[1], P))
    assert collect(engine)["a", 0].finish == "length"


def test_work_that_must_come_to_its_end_does_and_the_first_interrupt_is_told() -> None:
    tries: list[BaseException] = [KeyboardInterrupt(), SystemExit(1)]
    done = []

    def work() -> None:
        if tries:
            raise tries.pop(0)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    assert done == [True]
    with pytest.raises(ZeroDivisionError):
        to_the_end(lambda: [][1 // 0])
