"""KV bytes from process to process through ``_core.KvTransfer``: tensors and buffers, errors, leases, threads, killed peers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import _core
from deepinfer.errors import (
    ConfigError,
    DeepInferError,
    InvalidRequestError,
    KvCorruptError,
    KvFullError,
    KvGoneError,
    KvRefusedError,
    KvTooLargeError,
    KvTransferError,
    KvUnreachableError,
)

BACK_ENDS = ("shm", "tcp")
LAYOUT = b"test"


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pair(back_end: Any) -> Iterator[tuple[_core.KvTransfer, _core.KvTransfer]]:
    owner, puller = (_core.KvTransfer(back_end, layout=LAYOUT) for _ in range(2))
    yield owner, puller
    owner.close()
    puller.close()


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "never"
        time.sleep(0.002)


def test_tensors_and_buffers_of_any_type_arrive_bit_for_bit(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(7, 33, 64, generator=generator).to(torch.bfloat16)
    state = np.arange(1000, dtype=np.float64)
    ticket = owner.offer(b'{"tokens": 33}', [keys, state, b"tail", bytearray(), torch.empty(0)], 60.0)
    assert ticket.length == keys.nbytes + state.nbytes + 4
    got_keys, got_state, tail = torch.zeros_like(keys), np.zeros_like(state), bytearray(4)
    assert puller.pull_into(ticket, [got_keys, got_state, tail]) == b'{"tokens": 33}'
    assert torch.equal(got_keys.view(torch.int16), keys.view(torch.int16))
    assert np.array_equal(got_state, state) and tail == b"tail"
    meta, payload = puller.pull(ticket)
    assert meta == b'{"tokens": 33}'
    assert payload == keys.view(torch.int16).numpy().tobytes() + state.tobytes() + b"tail"


def test_a_ticket_travels_as_bytes_text_and_pickle(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    ticket = owner.offer(b"", [b"abc"], 60.0)
    for copy in (_core.KvTicket(ticket.to_bytes()), _core.KvTicket(str(ticket)), pickle.loads(pickle.dumps(ticket))):
        assert copy == ticket and hash(copy) == hash(ticket)
        assert puller.pull(copy)[1] == b"abc"
    assert ticket.address == owner.address != puller.address
    assert len(ticket.id) == 16 and ticket.id.hex() in str(ticket) and ticket.id.hex() not in repr(ticket)
    for bad in (b"", ticket.to_bytes()[:-1], ticket.to_bytes() + b"\0", str(ticket)[1:], "é" * 40):
        with pytest.raises(KvRefusedError):
            _core.KvTicket(bad)
    with pytest.raises(TypeError):
        _core.KvTicket(3)  # type: ignore[arg-type]


def test_the_owner_learns_what_happened(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    pulled, expired = owner.offer(b"", [b"abc"], 60.0), owner.offer(b"", [b"abc"], 0.05)
    told: list[tuple[bytes, str]] = []
    puller.pull(pulled)
    eventually(lambda: told.extend(owner.poll()) or len(told) == 2)
    assert puller.release(pulled) and not puller.release(pulled) and not owner.release(pulled)
    told.extend(owner.poll())
    assert sorted(told) == sorted([(pulled.id, "pulled"), (pulled.id, "released"), (expired.id, "expired")])
    with pytest.raises(KvGoneError):
        puller.pull(expired)
    assert owner.counts() == {"offers": 0, "bytes": 0, "pulls": 0, "events_lost": 0}
    assert puller.poll() == []


def test_bad_arguments_name_what_to_change(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    ticket = owner.offer(b"", [b"abcd"], 60.0)
    for lease in (0.0, -1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigError, match="lease"):
            owner.offer(b"", [], lease)
    strided, twice = torch.zeros(4, 4).t(), bytearray(4)
    for call, said in (
        (lambda: owner.offer(b"", [strided], 1.0), "contiguous"),
        (lambda: owner.offer(b"", [np.zeros((4, 4)).T], 1.0), "contiguous"),
        (lambda: owner.offer(b"", [torch.zeros(4, device="meta")], 1.0), "host memory"),
        (lambda: puller.pull_into(ticket, [b"abcd"]), "read-only"),
        (lambda: puller.pull_into(ticket, [memoryview(twice)[:2], memoryview(twice)[1:3]]), "overlap"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            call()
    with pytest.raises(TypeError):
        owner.offer(b"", [3], 1.0)
    with pytest.raises(KvTooLargeError):
        puller.pull_into(ticket, [bytearray(3)])
    with pytest.raises(KvRefusedError, match="equal"):
        puller.pull_into(ticket, [bytearray(5)])
    with pytest.raises(KvTooLargeError):
        owner.offer(bytes(1 << 20), [], 1.0)
    assert owner.counts()["offers"] == 1


def test_bad_settings_name_what_to_change() -> None:
    for settings, said in (
        ({"back_end": "rdma"}, "back end"),
        ({"back_end": "shm", "listen": "127.0.0.1:0"}, "TCP"),
        ({"back_end": "tcp", "listen": "localhost"}, "listen"),
        ({"back_end": "tcp", "listen": "0.0.0.0:0"}, "advertise"),
        ({"back_end": "tcp", "listen": "0.0.0.0:0", "advertise": "127.0.0.1:0"}, "token"),
        ({"back_end": "tcp", "token": b"short"}, "token"),
        ({"back_end": "tcp", "pull_timeout": -1.0}, "pull_timeout"),
        ({"back_end": "tcp", "max_connections": 0}, "connections"),
    ):
        with pytest.raises(ConfigError, match=said):
            _core.KvTransfer(**settings)  # type: ignore[arg-type]


def test_limits_tokens_and_layouts_hold(back_end: Any) -> None:
    owner = _core.KvTransfer(back_end, layout=LAYOUT, token=b"0123456789abcdef", max_offers=1, max_bytes=10)
    with pytest.raises(KvFullError, match="bytes"):
        owner.offer(b"", [bytes(11)], 1.0)
    ticket = owner.offer(b"", [bytes(10)], 60.0)
    with pytest.raises(KvFullError, match="offers"):
        owner.offer(b"", [], 1.0)
    for settings in ({"layout": LAYOUT}, {"layout": b"other", "token": b"0123456789abcdef"}, {"layout": LAYOUT, "token": bytes(16)}):
        stranger = _core.KvTransfer(back_end, **settings)
        for call in (stranger.pull, stranger.release):
            with pytest.raises(KvRefusedError):
                call(ticket)
    assert owner.counts()["offers"] == 1


def test_a_closed_end_says_so(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    ticket = owner.offer(b"", [b"abc"], 60.0)
    owner.close()
    owner.close()
    for call in (lambda: owner.offer(b"", [], 1.0), lambda: owner.pull(ticket), lambda: owner.release(ticket), owner.poll, owner.counts):
        with pytest.raises(KvTransferError, match="closed"):
            call()
    with pytest.raises((KvGoneError, KvUnreachableError)):
        puller.pull(ticket)
    assert issubclass(KvCorruptError, DeepInferError)


def test_the_interpreter_runs_on_while_bytes_move(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    payload, into = torch.ones(64 << 20, dtype=torch.uint8), torch.zeros(64 << 20, dtype=torch.uint8)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    other.start()
    try:
        for _ in range(3):
            begin = time.perf_counter()
            ticket = owner.offer(b"", [payload], 60.0)
            middle = time.perf_counter()
            puller.pull_into(ticket, [into])
            end = time.perf_counter()
            owner.release(ticket)
            inside = [sum(a < t < b for t in ticks) for a, b in ((begin, middle), (middle, end))]
            if min(inside) >= 3:
                break
        assert min(inside) >= 3, inside
    finally:
        done.set()
        other.join()
    assert torch.equal(into, payload)


def test_threads_may_share_an_end(pair: tuple[_core.KvTransfer, _core.KvTransfer]) -> None:
    owner, puller = pair
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(20):
                payload = bytes([seed, turn]) * 5000
                ticket = owner.offer(bytes([seed]), [payload], 60.0)
                assert puller.pull(ticket) == (bytes([seed]), payload)
                assert puller.release(ticket)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    eventually(lambda: owner.counts()["offers"] == owner.counts()["pulls"] == 0)


OWNER = """
import sys
from deepinfer import _core
end = _core.KvTransfer(sys.argv[1], layout=b"test")
for line in sys.stdin:
    print(end.offer(b"from elsewhere", [bytes.fromhex(line)], 60.0), flush=True)
"""


def test_another_process_offers_and_is_killed(back_end: Any) -> None:
    puller = _core.KvTransfer(back_end, layout=LAYOUT)
    tickets = []
    for life in range(2):
        process = subprocess.Popen([sys.executable, "-c", OWNER, back_end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        payload = os.urandom(1 << 20)
        print(payload.hex(), file=process.stdin, flush=True)
        tickets.append(_core.KvTicket(process.stdout.readline().strip()))
        assert puller.pull(tickets[life]) == (b"from elsewhere", payload)
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()
        for ticket in tickets:
            with pytest.raises((KvGoneError, KvUnreachableError)):
                puller.pull(ticket)
            if back_end == "shm":  # its name died with it
                assert puller.release(ticket) is False
            else:
                with pytest.raises((KvGoneError, KvUnreachableError)):
                    puller.release(ticket)


def test_a_forked_child_that_ends_leaves_the_owner_alone(back_end: Any) -> None:
    code = f"""
import os, sys
from deepinfer import _core
from deepinfer.errors import DeepInferError
end = _core.KvTransfer({back_end!r})
ticket = end.offer(b"", [b"abc"], 60.0)
child = os.fork()
if child == 0:
    try:
        end.offer(b"", [], 1.0)
    except DeepInferError as error:
        assert "forked" in str(error)
    else:
        os._exit(1)
    end.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert end.pull(ticket)[1] == b"abc"
assert end.release(end.offer(b"", [], 1.0))
end.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
