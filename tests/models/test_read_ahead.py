"""Tensors read side by side: the same values as one by one, no more than there is room for, and errors that end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from checkpoint_kit import save
from deepinfer.errors import CheckpointError
from deepinfer.models import resolve_model
from deepinfer.models.loaders.ahead import read_ahead
from deepinfer.models.loaders.dummy import DummySource
from deepinfer.models.loaders.safetensors_source import SafetensorsSource
from deepinfer.models.loaders.source import WeightSource, fill

SIZES = {f"t{i}": size for i, size in enumerate((10, 30, 5, 90, 20, 20, 10, 40, 15, 60))}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Shelf:
    """Places for tensors, and nothing that is done with them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.shapes = dict(shapes)
        self.places = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self.finished = 0

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def optional_tensors(self) -> tuple[str, ...]:
        return ()

    def parameter(self, name: str) -> torch.Tensor:
        return self.places[name]

    def finish_loading(self) -> None:
        self.finished += 1


def source_of(kind: str) -> WeightSource:
    stored = SafetensorsSource(resolve_model(str(save("qwen2", shard_size="60KB"))).weight_files)
    return stored if kind == "safetensors" else DummySource({name: stored.shape(name) for name in stored.names()}, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dummy", "safetensors"])
def test_weights_are_the_same_however_many_threads_read_them(kind: str, dtype: torch.dtype) -> None:
    source = source_of(kind)
    filled = []
    for threads in (1, 4):
        told: list[tuple[int, int]] = []
        shelf = Shelf({name: source.shape(name) for name in source.names()}, dtype)
        with torch_threads(threads):
            fill(shelf, source, lambda *at, told=told: told.append(at))
        filled.append(shelf)
        assert shelf.finished == 1 and len(told) == len(shelf.places)
        assert [done for done, _ in told] == sorted({done for done, _ in told}) and told[-1][0] == told[-1][1]
    one, several = filled
    assert all(torch.equal(one.places[name], several.places[name]) and one.places[name].any() for name in one.places)


def test_a_dummy_tensor_is_what_its_seed_and_name_say() -> None:
    shapes = {f"layers.{i}.weight": (64, 300 + i) for i in range(12)}
    source = DummySource(shapes, 3)
    alone = {name: source.read(name) for name in reversed(shapes)}
    for name, tensor in read_ahead(dict.fromkeys(shapes, 1), source.read, 4, 100):
        assert torch.equal(tensor, alone.pop(name))
    assert not alone


@pytest.mark.parametrize("threads", [1, 3])
def test_everything_comes_once_and_large_ones_first(threads: int) -> None:
    begun: list[str] = []
    lock = threading.Lock()

    def read(name: str) -> torch.Tensor:
        with lock:
            begun.append(name)
        return torch.tensor(SIZES[name])

    found = dict(read_ahead(SIZES, read, threads, 320))
    assert {name: int(tensor) for name, tensor in found.items()} == SIZES
    assert begun[:2] == ["t3", "t9"] or set(begun[:3]) >= {"t3", "t9"}  # above an eighth of the room: 90 and 60


@pytest.mark.parametrize("room", [0, 95, 130, 1000])
def test_no_more_is_read_than_there_is_room_for(room: int) -> None:
    lock, held, most = threading.Lock(), 0, 0

    def read(name: str) -> torch.Tensor:
        nonlocal held, most
        with lock:
            held += SIZES[name]
            most = max(most, held)
        time.sleep(0.002)
        return torch.empty(0)

    for name, _ in read_ahead(SIZES, read, 3, room):
        with lock:
            held -= SIZES[name]
    assert most <= max(room, 90) and held == 0
    assert not any(t.name.startswith("deepinfer-load") for t in threading.enumerate())


def test_several_are_read_at_once() -> None:
    together = threading.Barrier(3, timeout=20)

    def read(name: str) -> torch.Tensor:
        together.wait()
        return torch.empty(0)

    assert len(list(read_ahead(dict.fromkeys("abc", 1), read, 3, 100))) == 3


def test_an_error_ends_it_and_leaves_no_thread() -> None:
    begun = 0

    def read(name: str) -> torch.Tensor:
        nonlocal begun
        begun += 1
        if name == "bad":
            raise CheckpointError("tensor 'bad' is damaged")
        time.sleep(0.005)
        return torch.empty(0)

    with pytest.raises(CheckpointError, match="'bad'"):
        list(read_ahead({"a": 1, "bad": 1, **{f"t{i}": 1 for i in range(200)}}, read, 2, 1000))
    assert begun < 20
    assert not any(t.name.startswith("deepinfer-load") for t in threading.enumerate())


def test_a_source_is_read_by_one_thread_unless_it_says_otherwise() -> None:
    shelf = Shelf({f"t{i}": (7, i + 1) for i in range(9)}, torch.float32)
    seen: set[str] = set()

    class Plain(DummySource):
        reads_ahead = False

        def read(self, name: str) -> torch.Tensor:
            seen.add(threading.current_thread().name)
            return super().read(name)

    with torch_threads(4):
        fill(shelf, Plain(shelf.shapes, 0))
        assert seen == {threading.current_thread().name}
        Plain.reads_ahead = True
        seen.clear()
        fill(shelf, Plain(shelf.shapes, 0))
    assert seen and all(name.startswith("deepinfer-load") for name in seen)
