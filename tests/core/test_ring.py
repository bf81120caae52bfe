"""The step ring: what memory is taken, what is refused, and that it is kept alive."""

from __future__ import annotations

import array
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from core_driver import Driver, make_config, make_ring, prompt
from deepinfer import _core
from deepinfer.errors import ConfigError, RingLayoutError, StepOrderError


def core_and_ring() -> tuple[_core.Core, list[dict[str, Any]]]:
    core = _core.Core(make_config())
    return core, [dict(slot) for slot in make_ring(core)]


@pytest.mark.parametrize(
    "make",
    [
        lambda words: torch.zeros(words, dtype=torch.int32),
        lambda words: np.zeros(words, np.int32),
        lambda words: array.array("i", bytes(4 * words)),
        lambda words: memoryview(bytearray(4 * words)).cast("i"),
    ],
    ids=["torch", "numpy", "array", "memoryview"],
)
def test_memory_is_written_in_place(make: Callable[[int], Any]) -> None:
    core = _core.Core(make_config())
    ring = [{name: make(words) for name, words in core.layout()} for _ in range(3)]
    core.register_ring(ring)
    core.add(prompt(5), max_new_tokens=3)
    slot = core.schedule(1)
    assert list(ring[slot]["ids"][:5]) == prompt(5)
    assert list(ring[slot]["pos"][:5]) == [0, 1, 2, 3, 4]
    assert int(ring[slot]["header"][3]) == 5


def test_views_into_one_tensor_are_taken() -> None:
    core = _core.Core(make_config())
    layout = core.layout()
    ring = []
    for _ in range(3):
        whole = torch.zeros(sum(words for _, words in layout), dtype=torch.int32)
        ring.append(dict(zip([name for name, _ in layout], whole.split([words for _, words in layout]), strict=True)))
    core.register_ring(ring)
    core.add(prompt(5), max_new_tokens=3)
    assert ring[core.schedule(1)]["ids"][:5].tolist() == prompt(5)


def _missing(ring: list[dict[str, Any]]) -> None:
    del ring[1]["pos"]


def _short(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = ring[1]["pos"][:-1]


def _long(ring: list[dict[str, Any]]) -> None:
    ring[0]["ids"] = np.zeros(len(ring[0]["ids"]) + 1, np.int32)


def _int64(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = np.zeros(len(ring[1]["pos"]), np.int64)


def _float_tensor(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = torch.zeros(len(ring[1]["pos"]))


def _strided(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = torch.zeros(2 * len(ring[1]["pos"]), dtype=torch.int32)[::2]


def _strided_array(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = np.zeros(2 * len(ring[1]["pos"]), np.int32)[::2]


def _read_only(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"].flags.writeable = False


def _not_memory(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = [0] * len(ring[1]["pos"])


def _elsewhere(ring: list[dict[str, Any]]) -> None:
    ring[1]["pos"] = torch.zeros(len(ring[1]["pos"]), dtype=torch.int32, device="meta")


def _shared(ring: list[dict[str, Any]]) -> None:
    ring[2]["pos"] = ring[1]["ids"]


def _unaligned(ring: list[dict[str, Any]]) -> None:
    words = len(ring[1]["pos"])
    ring[1]["pos"] = np.frombuffer(bytearray(4 * words + 1), np.uint8)[1:].view(np.int32)


def _two_slots(ring: list[dict[str, Any]]) -> None:
    ring.pop()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_missing, "no field .pos."),
        (_short, "pos of ring slot 1 has 63 words; the layout says 64"),
        (_long, "ids of ring slot 0 has 65 words; the layout says 64"),
        (_int64, "pos of ring slot 1"),
        (_float_tensor, "torch.float32; it must be torch.int32"),
        (_strided, "not contiguous"),
        (_strided_array, "pos of ring slot 1"),
        (_read_only, "read-only"),
        (_not_memory, "pos of ring slot 1"),
        (_elsewhere, "on meta; it must be in host memory"),
        (_shared, "overlap"),
        (_unaligned, "align"),
        (_two_slots, "2 slots; the configuration says 3"),
    ],
)
def test_memory_that_does_not_fit_is_refused(spoil: Callable[[list[dict[str, Any]]], None], said: str) -> None:
    core, ring = core_and_ring()
    spoil(ring)
    with pytest.raises(RingLayoutError, match=said) as raised:
        core.register_ring(ring)
    assert isinstance(raised.value, ConfigError)
    core.register_ring(make_ring(core))  # nothing of the refused ring was kept


def test_second_ring_is_refused() -> None:
    core, ring = core_and_ring()
    core.register_ring(ring)
    with pytest.raises(RingLayoutError, match="registered already"):
        core.register_ring(make_ring(core))


def test_no_ring_no_step() -> None:
    core = _core.Core(make_config())
    core.add(prompt(5), max_new_tokens=3)
    with pytest.raises(StepOrderError, match="register_ring"):
        core.schedule(1)


def test_core_keeps_the_memory_until_it_is_closed() -> None:
    core = _core.Core(make_config())
    ring = make_ring(core)
    alive = [weakref.ref(view) for slot in ring for view in slot.values()]
    core.register_ring(ring)
    del ring
    gc.collect()
    assert all(ref() is not None for ref in alive)
    core.add(prompt(40), max_new_tokens=2)
    assert core.schedule(1) >= 0
    core.close()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_buffer_cannot_be_resized_under_the_core() -> None:
    core = _core.Core(make_config())
    owner = array.array("i", bytes(4 * 64))
    core.register_ring([{**slot, "ids": owner} if i == 0 else slot for i, slot in enumerate(make_ring(core))])
    with pytest.raises(BufferError):
        owner.append(1)
    core.close()
    owner.append(1)


def test_steps_from_several_threads_do_not_mix() -> None:
    driver = Driver()
    handles = [driver.core.add(prompt(20, start=i), max_new_tokens=20)[0] for i in range(8)]
    turn, ended, errors = threading.Lock(), [], []

    def work() -> None:
        try:
            while True:
                with turn:
                    rows = driver.step()
                    if rows is None:
                        return
                    ended.extend(row for row in rows if row[5])
        except Exception as error:
            errors.append(error)

    def watch(stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                driver.check_counts()
                for handle in handles:
                    driver.core.info(handle)
        except Exception as error:
            errors.append(error)

    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(stop,))
    workers = [threading.Thread(target=work) for _ in range(3)]
    for thread in [watcher, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    watcher.join()
    assert errors == []
    assert sorted(row[1] << 32 | row[0] for row in ended) == sorted(handles)
    driver.check_counts()
