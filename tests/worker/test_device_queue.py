"""The device's queue: order, whose failure it is, and that its thread never stays behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from deepinfer.errors import EngineDeadError
from deepinfer.worker.device_queue import DeviceQueue, InlineQueue, ThreadQueue, Ticket, make_queue, run_in_order

KINDS: list[Callable[[], DeviceQueue]] = [ThreadQueue, InlineQueue]


def queue_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "deepinfer-device-queue"]


@pytest.mark.parametrize("kind", KINDS)
def test_work_runs_in_the_order_it_was_handed_over(kind: Callable[[], DeviceQueue]) -> None:
    queue, done, tickets = kind(), [], []
    for step in range(20):
        tickets.append(Ticket())
        for half in range(2):
            queue.submit(tickets[-1], lambda at=(step, half): done.append(at), last=half == 1)  # type: ignore[misc]
    queue.wait(tickets[9])
    assert done[:20] == [(step, half) for step in range(10) for half in range(2)]
    queue.wait(tickets[-1])
    assert len(done) == 40
    queue.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_belongs_to_its_step_and_skips_the_rest_of_it(kind: Callable[[], DeviceQueue]) -> None:
    queue, done = kind(), []

    def broken() -> None:
        raise RuntimeError("out of luck")

    first, second, third = Ticket(), Ticket(), Ticket()
    queue.submit(first, lambda: done.append(1), last=True)
    queue.submit(second, broken, last=False)
    queue.submit(second, lambda: done.append(2), last=True)
    queue.submit(third, lambda: done.append(3), last=True)
    queue.wait(third)
    queue.wait(first)
    for _ in range(2):  # nor is it lost by being raised once
        with pytest.raises(RuntimeError, match="out of luck"):
            queue.wait(second)
    assert done == [1, 3] and queue.times(second, first) is None
    queue.close()


def test_the_thread_computes_while_the_caller_goes_on() -> None:
    queue, ticket, released = ThreadQueue(), Ticket(), threading.Event()
    queue.submit(ticket, lambda: released.wait(10) and None, last=True)
    assert not ticket.done.is_set()
    released.set()
    queue.wait(ticket)
    queue.close()


def test_an_interrupt_in_the_work_of_the_thread_is_the_waiters() -> None:
    queue, ticket = ThreadQueue(), Ticket()

    def interrupted() -> None:
        raise KeyboardInterrupt

    queue.submit(ticket, interrupted, last=True)
    with pytest.raises(KeyboardInterrupt):
        queue.wait(ticket)
    assert run_in_order(queue, lambda: 5) == 5  # the thread lives
    queue.close()


def test_closing_ends_the_thread_and_fails_what_was_left() -> None:
    before = len(queue_threads())
    queue, working, left = ThreadQueue(), Ticket(), Ticket()
    begun, done = threading.Event(), []

    def slow() -> None:
        begun.set()
        time.sleep(0.05)
        done.append("slow")

    queue.submit(working, slow, last=True)
    queue.submit(left, lambda: done.append("left"), last=True)
    begun.wait(10)
    queue.close()
    queue.close()
    assert len(queue_threads()) == before and done == ["slow"]
    queue.wait(working)
    late = Ticket()
    queue.submit(late, lambda: done.append("late"), last=True)
    for ticket in (left, late):
        with pytest.raises(EngineDeadError):
            queue.wait(ticket)
    assert done == ["slow"]


def test_the_thread_ends_with_its_owner() -> None:
    before = len(queue_threads())
    queue = ThreadQueue()
    assert len(queue_threads()) == before + 1
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    assert gone() is None and len(queue_threads()) == before


def test_the_thread_holds_nothing_of_the_work_it_has_done() -> None:
    class Held: ...

    queue, held = ThreadQueue(), Held()
    gone = weakref.ref(held)
    ticket = Ticket()
    queue.submit(ticket, lambda kept=held: None, last=True)  # type: ignore[misc]
    queue.wait(ticket)
    run_in_order(queue, lambda: None)
    del held
    gc.collect()
    assert gone() is None
    queue.close()


def test_times_of_a_step_and_of_the_gap_before_it() -> None:
    queue, first, second = InlineQueue(), Ticket(), Ticket()
    for ticket in (first, second):
        queue.submit(ticket, lambda: time.sleep(0.02), last=False)
        queue.submit(ticket, lambda: time.sleep(0.01), last=True)
        time.sleep(0.03)
    times = queue.times(second, first)
    assert times is not None
    assert times.forward >= 0.02 and times.sample >= 0.01 and times.idle >= 0.03
    alone = queue.times(first, None)
    assert alone is not None and alone.idle == 0.0


def test_threads_of_the_queue_compute_with_as_many_threads_as_the_caller() -> None:
    queue = make_queue(torch.device("cpu"), overlap=True)
    assert run_in_order(queue, torch.get_num_threads) == torch.get_num_threads()
    queue.close()
    assert isinstance(make_queue(torch.device("cpu"), overlap=False), InlineQueue)


@pytest.mark.gpu
def test_a_stream_keeps_failures_and_times_apart() -> None:
    queue = make_queue(torch.device("cuda"), overlap=True)
    x = torch.randn(2048, 2048, device="cuda")
    tickets = []
    for step in range(4):
        ticket = Ticket()
        queue.submit(ticket, lambda: x @ x, last=False)  # type: ignore[arg-type, return-value]
        if step == 2:
            queue.submit(ticket, lambda: 1 / 0, last=True)  # type: ignore[arg-type, return-value]
        else:
            queue.submit(ticket, lambda: x + x, last=True)  # type: ignore[arg-type, return-value]
        tickets.append(ticket)
    queue.wait(tickets[0])
    queue.wait(tickets[1])
    times = queue.times(tickets[1], tickets[0])
    assert times is not None and times.forward > 0 and times.sample > 0
    with pytest.raises(ZeroDivisionError):
        queue.wait(tickets[2])
    queue.wait(tickets[3])
    queue.close()
