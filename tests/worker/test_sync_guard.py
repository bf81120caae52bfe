"""Regions in which waiting for the device is an error: their nesting, what they refuse, and the launch path inside them.

What needs a device runs on a fake one everywhere and, unchanged, on a GPU with ``--device cuda -m "gpu or not gpu"``.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import HiddenSyncError
from deepinfer.models.base import ForwardBatch
from deepinfer.sampling import SamplingParams
from deepinfer.worker.sync_guard import allow_device_sync, configure, forbid_device_sync, forbidden
from engine_kit import collect, make_engine, random_prompts, request, tiny_checkpoint
from fake_cuda import ones_land, watched_cuda

needs_mode = pytest.mark.skipif(not hasattr(torch._C, "_cuda_get_sync_debug_mode"), reason="this torch is a build without CUDA")


def mode() -> int:
    """Torch's process-wide mode: 0 default, 1 warn, 2 error."""
    return torch._C._cuda_get_sync_debug_mode()


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device called "cuda", copies checked."""
    with watched_cuda(request.param, ones_land):
        yield request.param


# Regions


@needs_mode
def test_the_innermost_region_holds_and_leaving_restores_the_one_around_it() -> None:
    seen = []
    with forbid_device_sync():
        seen.append((forbidden(), mode()))
        with allow_device_sync():
            seen.append((forbidden(), mode()))
            with forbid_device_sync(), forbid_device_sync():
                seen.append((forbidden(), mode()))
            seen.append((forbidden(), mode()))
        seen.append((forbidden(), mode()))
    seen.append((forbidden(), mode()))
    assert seen == [(True, 2), (False, 0), (True, 2), (False, 0), (True, 2), (False, 0)]


@needs_mode
def test_an_exception_at_any_depth_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError, match="mine"), forbid_device_sync(), allow_device_sync(), forbid_device_sync():
        raise KeyError("mine")
    assert (forbidden(), mode()) == (False, 0)
    with forbid_device_sync():
        with pytest.raises(KeyError), allow_device_sync():
            raise KeyError
        assert (forbidden(), mode()) == (True, 2)
    assert (forbidden(), mode()) == (False, 0)


@needs_mode
def test_a_mode_that_was_set_before_comes_back() -> None:
    torch._C._cuda_set_sync_debug_mode(1)
    try:
        with forbid_device_sync(), allow_device_sync():
            assert mode() == 1
        assert mode() == 1
    finally:
        torch._C._cuda_set_sync_debug_mode(0)


@needs_mode
def test_scopes_belong_to_threads_and_one_cannot_lift_anothers() -> None:
    entered, leave = threading.Event(), threading.Event()
    seen: list[tuple[bool, int]] = []

    def other() -> None:
        seen.append((forbidden(), mode()))
        with allow_device_sync():
            seen.append((forbidden(), mode()))
        with forbid_device_sync():
            seen.append((forbidden(), mode()))
            entered.set()
            assert leave.wait(10)
        seen.append((forbidden(), mode()))

    with forbid_device_sync():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
        with allow_device_sync():  # the other still forbids
            assert (forbidden(), mode()) == (False, 2)
        leave.set()
        thread.join(10)
        assert (forbidden(), mode()) == (True, 2)
    assert seen == [(False, 2), (False, 2), (True, 2), (False, 2)]
    assert mode() == 0


@needs_mode
def test_many_threads_leave_no_trace() -> None:
    def work() -> None:
        for i in range(300):
            with forbid_device_sync():
                assert mode() == 2 and forbidden()
                if i % 3 == 0:
                    with allow_device_sync():
                        assert not forbidden()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures and not any(t.is_alive() for t in threads)
    assert mode() == 0


def test_as_decorators() -> None:
    @forbid_device_sync()
    def launch(depth: int) -> bool:
        return forbidden() and (depth == 0 or launch(depth - 1)) and not wait()

    @allow_device_sync()
    def wait() -> bool:
        return forbidden()

    assert launch(3) and not forbidden()
    assert launch.__name__ == "launch"

    def steps() -> Iterator[int]:
        yield 1

    async def later() -> None: ...

    for body in (steps, later):
        with pytest.raises(TypeError, match="after the call has returned"):
            forbid_device_sync()(body)


@needs_mode
def test_switched_off_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(enabled=False)
    try:
        with forbid_device_sync():
            assert (forbidden(), mode()) == (False, 0)
            configure(enabled=True)  # while a region is open
            with forbid_device_sync():
                assert (forbidden(), mode()) == (True, 2)
        assert (forbidden(), mode()) == (False, 0)
    finally:
        configure(enabled=True)


@needs_mode
def test_an_interrupt_while_entering_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.worker import sync_guard

    def interrupted(change: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sync_guard._process, "add", interrupted)
    with pytest.raises(KeyboardInterrupt), forbid_device_sync():
        raise AssertionError("entered")
    monkeypatch.undo()
    assert (forbidden(), mode(), sync_guard._thread.here.outer) == (False, 0, [])


# What they refuse. Each entry makes a call that must raise from a float32 tensor of 8 on the device.

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "assign to mask": lambda x: x.__setitem__(x > 0, torch.ones(8, device="cuda")),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat by tensor": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "host index": lambda x: x[torch.tensor([1, 2])],
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.to("cpu").numpy(),
    "tensor on device": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "blocking copy to": lambda x: x.copy_(torch.zeros(8)),
    "blocking copy to, pinned": lambda x: x.copy_(torch.zeros(8).pin_memory()),
    "blocking copy from": lambda x: torch.zeros(8).copy_(x),
    "non-blocking from pageable": lambda x: x.copy_(torch.zeros(8), non_blocking=True),
    "non-blocking to pageable": lambda x: torch.zeros(8).copy_(x, non_blocking=True),
    "non-blocking move of pageable": lambda x: torch.zeros(8).to("cuda", non_blocking=True),
    "non-blocking move, cuda()": lambda x: torch.zeros(8).cuda(non_blocking=True),
    "non-blocking move to the host": lambda x: x.to("cpu", non_blocking=True),
    "pinned, with gaps": lambda x: x[:4].copy_(torch.zeros(8).pin_memory()[::2], non_blocking=True),
    "pinned, expanded": lambda x: x.copy_(torch.zeros(1).pin_memory(), non_blocking=True),
    "device synchronize": lambda x: torch.cuda.synchronize(),
    "accelerator synchronize": lambda x: torch.accelerator.synchronize(),
    "stream synchronize": lambda x: torch.cuda.Stream.synchronize(None),  # refused before it looks
    "event synchronize": lambda x: torch.cuda.Event().synchronize(),
    "elapsed time": lambda x: torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True)),
    "empty cache": lambda x: torch.cuda.empty_cache(),
}


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_raises(cuda: str, name: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = torch.ones(8, device="cuda")
        with pytest.raises(HiddenSyncError), forbid_device_sync():
            WAITS[name](x)
        assert not forbidden()


def test_what_does_not_wait_is_let_through(cuda: str) -> None:
    x = torch.ones(8, device="cuda")
    host, back = torch.arange(8.0).pin_memory(), torch.zeros(8, pin_memory=True)
    done = torch.cuda.Event()
    with forbid_device_sync():
        x.copy_(host, non_blocking=True)
        y = host.to("cuda", non_blocking=True)
        x[2:6].copy_(host[:4], non_blocking=True)
        z = torch.where(x > 1, x, y)[torch.ones(3, dtype=torch.int64, device="cuda")]
        z = z.repeat_interleave(torch.ones(3, dtype=torch.int64, device="cuda"), output_size=3)
        x.masked_fill_(x > 2, 0.0)
        torch.argmax(x).to(torch.int32)
        back.copy_(x, non_blocking=True)
        done.record()
        with allow_device_sync():
            done.synchronize()
            if cuda == "gpu":
                assert x.sum().item() == back.sum().item()
    assert z.shape == (3,)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in WAITS if not n.startswith(("non-blocking", "pinned"))])
def test_without_debugging_torch_itself_refuses_on_a_gpu(name: str) -> None:
    x = torch.ones(8, device="cuda")
    with pytest.raises(HiddenSyncError), forbid_device_sync():
        WAITS[name](x)


SECOND_NET = """
import torch
from deepinfer.errors import HiddenSyncError
from deepinfer.worker.sync_guard import allow_device_sync, configure, forbid_device_sync
configure(debug=True, record=True)
event = torch.cuda.Event()
event.record()
for wait in (torch._C._cuda_synchronize, lambda: torch._C._CudaEventBase.synchronize(event)):
    try:
        with forbid_device_sync():
            wait()
    except HiddenSyncError as e:
        print(str(e).splitlines()[1])
    with forbid_device_sync(), allow_device_sync():
        wait()
"""


@pytest.mark.gpu
def test_the_second_net_tells_of_waits_that_no_rule_knows() -> None:
    # In a process of its own: torch's record cannot be switched off again.
    found = subprocess.run([sys.executable, "-c", SECOND_NET], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["device synchronised at", "event synchronised at"]


# The launch path


def engine_with(lengths: list[int], params: SamplingParams, **settings: Any) -> Engine:
    """An engine on "cuda" with prompts that wait."""
    engine = make_engine(tiny_checkpoint("llama", layers=1), "cuda", max_num_seqs=8, **settings)
    for i, prompt in enumerate(random_prompts(lengths)):
        engine.add_request(request(str(i), prompt, params))
    return engine


LAUNCHES = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "edited": {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 3, "stop_token_ids": [4]},
    "logprobs": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
    "several answers": {"temperature": 1.0, "n": 3},
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_of_an_engine_runs_without_waiting(cuda: str, name: str) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, **LAUNCHES[name])
    with engine_with([20, 33], params) as engine:
        answers = collect(engine)
    assert len(answers) == 2 * params.n
    assert [(a.finish, a.error, len(a.tokens)) for a in answers.values()] == [("length", None, 4)] * len(answers)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_draft_rows_launch_without_waiting(cuda: str, overlap: bool) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logprobs=1)
    with engine_with([], params, speculative="ngram", num_draft_tokens=3, zero_overhead=overlap) as engine:
        engine.add_request(request("a", [5, 6, 7, 8] * 6, params))
        engine.add_request(request("b", [9, 6, 3] * 5, params))
        answers = collect(engine)
        assert engine.core_stats()["drafted"] > 0
    assert {(a.finish, a.error) for a in answers.values()} == {("length", None)}


def test_preempted_and_readmitted_sequences_launch_without_waiting(cuda: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, frequency_penalty=0.5)
    with engine_with([30, 30, 30], params, num_kv_blocks=10, block_size=16, max_model_len=64) as engine:
        answers = collect(engine)
        assert engine.core_stats()["preemptions"] > 0
    assert {(a.finish, a.error) for a in answers.values()} == {("length", None)}


FORBIDDEN_IN_A_LAUNCH = ("item", "nonzero", "mask", "cpu", "blocking copy to", "non-blocking from pageable", "device synchronize")


@pytest.mark.parametrize("half", ["forward", "logits"])
def test_a_model_that_waits_fails_its_step(cuda: str, half: str) -> None:
    with engine_with([], SamplingParams()) as engine:
        plain = getattr(engine.model, half)
        for name in FORBIDDEN_IN_A_LAUNCH:

            def waits(batch: ForwardBatch | torch.Tensor, *rest: Any, wait: Any = WAITS[name]) -> torch.Tensor:
                wait(torch.ones(8, device="cuda"))
                return plain(batch, *rest)

            setattr(engine.model, half, waits)
            engine.add_request(request(name, [5, 6, 7], SamplingParams(max_tokens=4)))
            assert collect(engine)[name, 0].finish == "error", name
            assert engine.last_failure is not None and isinstance(engine.last_failure.__cause__, HiddenSyncError), name
            assert not forbidden()
        setattr(engine.model, half, plain)
        engine.add_request(request("next", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
        assert collect(engine)["next", 0].finish == "length"
