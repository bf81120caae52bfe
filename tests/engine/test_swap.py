"""Victims that were swapped to host memory go on as if they had never been away."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.models.base import PagedGroup, Source, StateGroup
from deepinfer.platforms import host_memory
from deepinfer.sampling import SamplingParams
from deepinfer.worker import host_pages
from deepinfer.worker.host_pages import HostPages, sort_commands
from deepinfer.worker.kv_cache import KVCache
from engine_kit import generate, make_engine, random_prompts, same_bits, tiny_checkpoint

SMALL = {"block_size": 16, "num_kv_blocks": 10}
PROMPTS = random_prompts((20, 33, 18, 47, 9, 30), seed=2)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=-1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=-1, ignore_eos=True, repetition_penalty=1.2),
] * 3


def fix_rates(engine: Engine, swap: float, prefill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._rates, "note", lambda *_: None)
    engine._core.set_rates(swap, prefill)


@pytest.mark.parametrize(
    ("dtype", "overlap"),
    [("bfloat16", True), ("float32", False)]
    + [pytest.param(*v, marks=pytest.mark.nightly) for v in (("float32", True), ("bfloat16", False))],
)
def test_swapped_recomputed_and_never_preempted_are_the_same(
    device: str, dtype: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "zero_overhead": overlap, "enable_prefix_caching": False}
    with make_engine(tiny_checkpoint("qwen3"), device, **settings) as engine:
        want = generate(engine, PROMPTS, PARAMS)
        assert engine.core_stats()["preemptions"] == 0
    with make_engine(tiny_checkpoint("qwen3"), device, swap_space_gib=0, **SMALL, **settings) as engine:
        recomputed = generate(engine, PROMPTS, PARAMS)
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and stats["swapped_out"] == 0
    with make_engine(tiny_checkpoint("qwen3"), device, swap_space_gib=0.01, **SMALL, **settings) as engine:
        fix_rates(engine, 1e15, 1.0, monkeypatch)
        swapped = generate(engine, PROMPTS, PARAMS)
        stats = engine.core_stats()
        assert stats["swapped_out"] > 0 and stats["swapped_in"] > 0 and stats["swap_in_pages"] > 0
        for _ in range(3):
            engine.step()
        counts = engine.core_counts()
        assert not counts["host_blocks"]["held"] and not counts["groups"][0]["held"]
    assert all(map(same_bits, want, recomputed)) and all(map(same_bits, want, swapped))


def test_the_rates_alone_choose(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for swap, prefill in ((1e15, 1.0), (1.0, 1e15), (0.0, 0.0)):
        with make_engine(tiny_checkpoint("llama"), device, swap_space_gib=0.01, **SMALL) as engine:
            fix_rates(engine, swap, prefill, monkeypatch)
            generate(engine, PROMPTS, PARAMS)
            stats = engine.core_stats()
            assert stats["preemptions"] > 0
            found.append(stats["swapped_out"] > 0)
    assert found == [True, False, False]


def test_rates_are_measured(device: str) -> None:
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        assert engine._rates.bytes_per_s > 1e6 and engine._rates.prefill_tokens_per_s == 0
        generate(engine, random_prompts((200,)), PARAMS[:1])
        assert engine._rates.prefill_tokens_per_s > 1


def test_victims_are_computed_again_until_host_memory_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where page-locking takes longer than the rest of a start; answers are the same."""
    go = threading.Event()

    def lock(host: torch.Tensor, device: torch.device) -> int:
        go.wait(60)
        return 0

    monkeypatch.setattr(host_memory, "_lock", lock)
    monkeypatch.setattr(host_pages, "_plain", host_pages._locked_later)
    monkeypatch.setattr(HostPages, "copy_some", lambda self, pages: 1 << 40)  # through the memory itself on a CPU
    with make_engine(tiny_checkpoint("llama"), "cpu", enable_prefix_caching=False, swap_space_gib=0.01, **SMALL) as engine:
        first = generate(engine, PROMPTS, PARAMS)
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and not stats["swapped_out"] and not engine._runner.can_swap()
        go.set()
        assert engine._runner.moves.host is not None
        for rows in engine._runner.moves.host._groups:
            rows._memory.get()
        second = generate(engine, PROMPTS, PARAMS)
        assert engine._runner.can_swap() and engine.core_stats()["swapped_out"] > 0
    assert all(map(same_bits, first, second))


def test_memory_that_cannot_be_locked_is_a_warning_and_nobody_is_swapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_lock", lambda host, device: 2)
    monkeypatch.setattr(host_pages, "_plain", host_pages._locked_later)
    monkeypatch.setattr(HostPages, "copy_some", lambda self, pages: 1 << 40)
    with make_engine(tiny_checkpoint("llama"), "cpu", swap_space_gib=0.01, **SMALL) as engine:
        assert all(answer.finish == "length" for answer in generate(engine, PROMPTS, PARAMS))
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and not stats["swapped_out"] and not engine._runner.can_swap()
    assert len(caplog.records) == 1 and "computed again; lower swap_space_gib" in caplog.text


def test_the_host_pool_is_bounded(device: str) -> None:
    with make_engine(tiny_checkpoint("llama"), device, swap_space_gib=0, **SMALL) as engine:
        assert engine.swap.blocks == 0 and engine._runner.moves.host is None
    with make_engine(tiny_checkpoint("llama"), device, **SMALL) as engine:
        assert engine.swap.blocks == 10  # not more than the device has
    with pytest.raises(CapacityError, match="swap_space_gib"):
        make_engine(tiny_checkpoint("llama"), device, swap_space_gib=1 << 19)
    for wrong in (-1, float("nan"), "much", True):
        with pytest.raises(ConfigError, match="swap_space_gib"):
            make_engine(tiny_checkpoint("llama"), device, swap_space_gib=wrong)


def two_groups(device: str) -> KVCache:
    first = PagedGroup(8, (Source(("k", "v"), 8, (2, 4), torch.float32), Source(("pooled",), 4, (3,), torch.bfloat16)))
    second = PagedGroup(4, (Source(("w",), 4, (5,), torch.float32),))
    state = [StateGroup(stored=10, dropped=6, replicas=1), StateGroup(stored=7, dropped=0)]
    return KVCache([first, second], [20, 40], state, 6, torch.device(device))


def test_pages_and_states_come_back_bit_for_bit_in_other_places(device: str) -> None:
    kv = two_groups(device)
    generator = torch.Generator().manual_seed(0)
    for t in (*kv.tensors.values(),):
        raw = t.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))  # any bits, NaNs too
    before = {n: t.clone() for n, t in kv.tensors.items()}
    host = HostPages(kv, [12, 24], 4, pinned=device != "cpu")
    rng = np.random.default_rng(1)
    out, back, moved = [], [], []
    for group, (pages, places) in enumerate(((20, 12), (40, 24))):
        source = rng.permutation(np.arange(1, pages))[: places - 2]
        there = rng.permutation(places)[: places - 2]
        target = rng.permutation(np.arange(1, pages))[: places - 2]
        out += [[group, int(s), int(h)] for s, h in zip(source, there, strict=True)]
        back += [[group, int(h), int(t)] for h, t in zip(there, target, strict=True)]
        moved.append((source, target))
    rng.shuffle(out)
    rng.shuffle(back)
    commands = [np.array(c, np.int32) for c in (out, back)]
    sort_commands(commands[0], 2)
    sort_commands(commands[1], 1)
    states_out, states_back = np.array([[1, 3], [4, 1]], np.int32), np.array([[3, 5], [1, 2]], np.int32)

    def on(c: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(c.copy()).to(device)

    host.swap_out(commands[0], on(commands[0]))
    host.swap_out_states(states_out, on(states_out))
    for t in kv.tensors.values():
        t.view(torch.uint8).fill_(7)  # others use the memory meanwhile
    host.swap_in(commands[1], on(commands[1]))
    host.swap_in_states(states_back, on(states_back))
    for name, group in {"k": 0, "v": 0, "pooled": 0, "w": 1}.items():
        source, target = moved[group]
        now, then = kv.tensors[name].view(torch.uint8).cpu(), before[name].view(torch.uint8).cpu()
        assert torch.equal(now[target], then[source])
        rest = np.setdiff1d(np.arange(len(now)), target)
        assert bool((now[rest] == 7).all())
    for name in ("state0", "state1"):
        now, then = kv.tensors[name].cpu(), before[name].cpu()
        assert torch.equal(now[[5, 2]], then[[1, 4]]) and bool((now[[0, 1, 3, 4]] == 7).all())
    row_bytes = [sum(t[0].numel() * t.itemsize for t in g) for g in kv.groups]
    assert host.num_bytes(commands[0], 2) == 10 * row_bytes[0] + 22 * row_bytes[1] + 2 * (26 + 7)
