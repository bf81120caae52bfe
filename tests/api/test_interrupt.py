"""Ctrl-C waits for the end of a block, but only once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from deepinfer.engine.interrupt import hold_interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_takes_effect_after_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with hold_interrupts():
            interrupt()
            done.append("the block's end")
        done.append("never")
    assert done == ["the block's end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_takes_effect_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():
        interrupt()
        done.append("first")
        interrupt()
        done.append("second")
    assert done == ["first"]


def test_the_blocks_own_error_is_kept() -> None:
    with pytest.raises(ValueError), hold_interrupts():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_just_run() -> None:
    done = []

    def work() -> None:
        with hold_interrupts():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]
