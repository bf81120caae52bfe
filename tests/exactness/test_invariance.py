"""Same request, same bits: tokens, log-probabilities of the whole vocabulary and the KV of every layer, whatever runs beside a request,
however it is cut, cached, preempted, drafted for, recorded or overlapped.

What is compared with is computed one request, one chunk and one step at a time. Without a GPU the same tests run small models on the
operators' references, with graphs that are run again instead of being replayed.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.kernels import registry
from deepinfer.models.base import row_buckets
from deepinfer.models.kernel_shape import read_kernel_shape
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from engine_kit import random_prompts
from exact_kit import KINDS, VOCAB, Trail, alone, check_same, config_of, difference, engine_of, run
from graphs_kit import graphs_on_cpu
from scripted_kit import Scripted

ON_GPU = [pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in KINDS]
EVERY_KIND = [*[pytest.param("cpu", kind) for kind in KINDS], *ON_GPU]
ONE_KIND = [pytest.param("cpu", "window_bias"), *ON_GPU]
AT_NIGHT = [*[pytest.param("cpu", kind, marks=pytest.mark.nightly) for kind in KINDS], *ON_GPU]
"""What the engine's fast tests look at on a CPU, too, if not at KV."""

GREEDY = SamplingParams(temperature=0, max_tokens=10)
"""Nothing but tokens: on a GPU such steps are graphs to the end."""
TOLD = GREEDY.clone(logprobs=-1)
"""With every log-probability, so that every logit is compared."""
DRAWN = [
    TOLD,
    SamplingParams(temperature=1.0, max_tokens=10, logprobs=-1),
    SamplingParams(temperature=0.8, top_k=20, max_tokens=10, logprobs=-1),
    SamplingParams(temperature=1.1, top_p=0.8, max_tokens=10, logprobs=-1),
    SamplingParams(temperature=0.9, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=10, logprobs=-1),
]

TARGETS = random_prompts((5, 64, 190), seed=1, vocab=VOCAB)


def drawn(count: int) -> list[SamplingParams]:
    """All kinds of drawing side by side, a seed each."""
    return [DRAWN[i % len(DRAWN)].clone(seed=500 + i) for i in range(count)]


@pytest.fixture(autouse=True)
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU steps take the code of graphs."""
    place = request.node.callspec.params.get("place") if hasattr(request.node, "callspec") else None
    if place == "cpu":
        graphs_on_cpu(monkeypatch)
        monkeypatch.setattr(LlamaModel, "prompt_rows", lambda self, most: [*(rows for rows in (16, 64) if rows < most), most])
    yield
    if place == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def mates(lengths: list[int], seed: int = 77) -> list[list[int]]:
    return random_prompts(lengths, seed, VOCAB)


# P1, P2, P3: who else is in the batch


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
@pytest.mark.parametrize("params", [GREEDY, TOLD], ids=["tokens", "logits"])
def test_batch_size_position_and_mates(place: str, kind: str, params: SamplingParams) -> None:
    """Alone, and as first, middle or last of 2 … 45, beside mates of one token and of a hundred times as many."""
    want = alone(place, kind, TARGETS, params)
    sizes = (2, 5, 17, 45) if place == "cuda" else (2, 17)
    with engine_of(place, kind, enable_prefix_caching=False) as engine:
        for size in sizes:
            for place_of in ("first", "middle", "last") if place == "cuda" else ("middle",):
                others = mates([(1, 30, 600, 7)[i % 4] if place == "cuda" else (1, 30, 100)[i % 3] for i in range(size - 1)], size)
                at = {"first": 0, "middle": len(others) // 2, "last": len(others)}[place_of]
                for i, target in enumerate(TARGETS):
                    prompts = [*others[:at], target, *others[at:]]
                    got = run(engine, prompts, params, mates=[j for j in range(len(prompts)) if j != at])
                    check_same(want[i : i + 1], got, (size, place_of, len(target)))


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
def test_drawing_rows_beside_each_other(place: str, kind: str) -> None:
    """P14: a seed draws the same at a position whatever its neighbours draw by."""
    count = 23 if place == "cuda" else 9
    prompts = mates([1 + i * 13 % 90 for i in range(count)], 5)
    want = alone(place, kind, prompts, drawn(count))
    with engine_of(place, kind) as engine:
        check_same(want, run(engine, prompts, drawn(count)), "together")
        check_same(want[::-1], run(engine, prompts[::-1], drawn(count)[::-1]), "the other way round, with prefix hits")
    with engine_of(place, kind, max_num_seqs=3) as engine:
        check_same(want, run(engine, prompts, drawn(count)), "three at a time")


# P4: chunks


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 300])
def test_chunk_cuts(place: str, kind: str, chunk: int) -> None:
    lengths = (5, 130, 420) if place == "cuda" else (5, 70)
    prompts = mates([*lengths], 3)
    want = alone(place, kind, prompts, TOLD)
    with engine_of(place, kind, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 3), enable_prefix_caching=False) as engine:
        check_same(want, run(engine, prompts, TOLD), "all at once")
        for i in range(len(prompts)):
            check_same(want[i : i + 1], run(engine, prompts[i : i + 1], TOLD), "by itself")


# P5: prefix hits


@pytest.mark.parametrize(("place", "kind"), ONE_KIND)
@pytest.mark.parametrize("block", [16, pytest.param(64, marks=pytest.mark.gpu)])
def test_a_hit_at_every_block_boundary(place: str, kind: str, block: int) -> None:
    """As many blocks of the prompt as a sequence before it had in common with it, from none to all."""
    blocks = 6
    (prompt, other) = mates([blocks * block + 3] * 2, 8)
    want = alone(place, kind, [prompt], TOLD)
    with engine_of(place, kind, block_size=block) as engine:
        for hit in range(blocks + 1):
            tenant = {"salt": f"tenant {hit}".encode()}
            run(engine, [[*prompt[: hit * block], *other]], GREEDY.clone(max_tokens=1), **tenant)
            got = run(engine, [prompt], TOLD, **tenant)
            assert got[0].answer.cached_tokens == hit * block
            check_same(want, got, f"a hit of {hit} blocks")
            again = run(engine, [prompt], TOLD, **tenant)
            assert again[0].answer.cached_tokens == blocks * block
            check_same(want, again, "a hit of its own blocks")


# P6: preemption


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
@pytest.mark.parametrize("swap", [0.0, 0.25], ids=["recomputed", "swapped"])
def test_preemption(place: str, kind: str, swap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = mates([20, 33, 18, 47, 9, 30], 2)
    params = [p.clone(max_tokens=40) for p in drawn(6)]
    want = alone(place, kind, prompts, params)
    small: dict[str, Any] = {"num_kv_blocks": 13, "max_model_len": 112, "swap_space_gib": swap, "enable_prefix_caching": False}
    with engine_of(place, kind, **small) as engine:
        monkeypatch.setattr(engine._rates, "note", lambda *_: None)
        engine._core.set_rates(1e15 if swap else 0.0, 1.0)
        check_same(want, run(engine, prompts, params))
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and (stats["swapped_in"] > 0) == (swap > 0) and engine._core.check() is None


# P7, P11, P12: graphs, overlap, once more


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_graphs_of_every_bucket(place: str, kind: str, overlap: bool) -> None:
    """Decode steps of each number of rows that pads a graph, and of those that fill one."""
    most = 40 if place == "cuda" else 9
    buckets = row_buckets(most)
    counts = sorted({n for i, b in enumerate(buckets) for n in (min(b, most), (buckets[i - 1] if i else 0) + 1)})
    prompts = mates([3 + i * 29 % 80 for i in range(most)], 6)
    want = alone(place, kind, prompts, GREEDY)
    for graphs in ("off", "auto"):
        with engine_of(place, kind, max_num_seqs=most, cuda_graphs=graphs, zero_overhead=overlap, enable_prefix_caching=False) as engine:
            for count in counts:
                check_same(want[:count], run(engine, prompts[:count], GREEDY), (graphs, count))
            assert (engine.metrics().graphs.get("replays", 0) > len(counts)) == (graphs == "auto")


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
def test_once_more(place: str, kind: str) -> None:
    """The same engine twice, and two engines; with steps that overlap and without."""
    prompts = mates([40, 3, 77, 16], 12)
    want = alone(place, kind, prompts, drawn(4))
    for overlap in (False, True, True):
        with engine_of(place, kind, zero_overhead=overlap, enable_prefix_caching=False) as engine:
            for _ in range(2):
                check_same(want, run(engine, prompts, drawn(4)), overlap)


# P8, P9: drafts


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
def test_drafts_right_and_wrong(place: str, kind: str) -> None:
    """By script, so that every number of drafts is taken: rows that verify are those of single steps."""
    prompts = mates([5, 40, 18, 66], 14)
    params = [p.clone(max_tokens=24) for p in drawn(4)]
    want = alone(place, kind, prompts, params)
    more = [p.clone(max_tokens=40) for p in params]  # what the script goes on with
    truth = {str(i): t.answer.tokens for i, t in enumerate(alone(place, kind, prompts, more))}
    with engine_of(place, kind, speculative="ngram", num_draft_tokens=4) as engine:
        script = Scripted(engine, truth, lambda name, turn: [(turn * 7 + int(name)) >> i & 1 == 1 for i in range(turn % 5)])
        engine._loop.drafting = script
        check_same(want, run(engine, prompts, params))
        assert max(script.accepted[4]) > 1 and min(script.accepted[4]) == 0


@pytest.mark.parametrize(("place", "kind"), AT_NIGHT)
def test_prompt_lookup(place: str, kind: str) -> None:
    """The drafter itself, on prompts that say things twice."""
    prompts = [p * 3 for p in mates([9, 20, 33], 15)]
    params = [TOLD.clone(max_tokens=30), TOLD.clone(max_tokens=30, repetition_penalty=0.5), GREEDY.clone(max_tokens=30)]
    want = alone(place, kind, prompts, params)
    with engine_of(place, kind, speculative="ngram", num_draft_tokens=3, ngram_min=1) as engine:
        check_same(want, run(engine, prompts, params))
        assert sum(engine.metrics().drafts_asked) > 0


# P10: pages


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_which_pages_does_not_matter(place: str) -> None:
    prompts = mates([100, 37], 16)
    want = alone(place, "window_bias", prompts, TOLD)
    seen = [tuple(t.pages) for t in want]
    with engine_of(place, "window_bias") as engine:
        for seed in range(4):
            run(engine, mates([90 - 20 * seed, 35, 50], 100 + seed), GREEDY)  # leaves its blocks in the cache
            got = run(engine, prompts, TOLD, salt=str(seed).encode())
            check_same(want, got, seed)
            seen += [tuple(t.pages) for t in got]
    assert len(set(seen)) == len(seen), "the pages were meant to be others each time"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_nobody_owns_may_hold_anything(kind: str) -> None:
    """Every page full of NaN before the first request and between later ones; the null page, to which padding writes, all the time."""
    prompts = mates([100, 37, 16, 1], 16)
    want = alone("cuda", kind, prompts, TOLD)
    with engine_of("cuda", kind, enable_prefix_caching=False) as engine:
        for garbage in (torch.nan, 3e38):

            def spoil(turn: int, garbage: float = garbage, engine: Engine = engine) -> None:
                def work() -> None:
                    for tensor in engine._runner.kv.tensors.values():
                        (tensor if turn == 0 else tensor[:1]).fill_(garbage)

                engine._runner.in_order(work)

            check_same(want, run(engine, prompts, TOLD, around=spoil), garbage)


# P13, P15: decode and prefill


@pytest.mark.parametrize(("place", "kind"), EVERY_KIND)
def test_a_decode_step_is_the_prefill_that_ends_there(place: str, kind: str) -> None:
    """Token by token: logits behind a prompt to which the answer so far was added are those of the step that drew the next one."""
    (prompt,) = mates([58], 18)
    (whole,) = alone(place, kind, [prompt], TOLD.clone(max_tokens=12))
    assert whole.kv is not None
    with engine_of(place, kind) as engine:
        for t, told in enumerate(whole.answer.logprobs):
            for tenant in (b"one for all", str(t).encode()):  # with a hit of what came before, and without
                (got,) = run(engine, [prompt + whole.answer.tokens[:t]], TOLD.clone(max_tokens=1), salt=tenant)
                want = Trail("decode", got.positions, kv=[(name, x[: got.positions]) for name, x in whole.kv])
                want.answer.tokens, want.answer.logprobs = [whole.answer.tokens[t]], [told]
                check_same([want], [got], t)


@pytest.mark.parametrize(("place", "kind"), ONE_KIND)
def test_steps_that_mix_prefill_and_decode(place: str, kind: str) -> None:
    """Requests that come while others decode, and chunks that share their steps with both."""
    prompts = mates([50, 90, 12, 70, 1, 128], 3)
    want = alone(place, kind, prompts, drawn(6))
    for chunk in (24, 200):
        with engine_of(place, kind, max_num_batched_tokens=chunk, max_num_seqs=6) as engine:
            check_same(want, run(engine, prompts, drawn(6), turns=[0, 3, 5, 6, 9, 11]), chunk)
            assert engine.metrics().steps["mixed"] > 2


# P17, and all at once


@pytest.mark.nightly
def test_threads_of_a_cpu() -> None:
    prompts = mates([50, 9, 130], 21)
    want = alone("cpu", "qk_norm", prompts, drawn(3))
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            with engine_of("cpu", "qk_norm", num_threads=threads) as engine:
                check_same(want, run(engine, prompts, drawn(3)), threads)
    finally:
        torch.set_num_threads(before)


def schedule(seed: int) -> tuple[dict[str, Any], list[int]]:
    """Settings of an engine, and the turns in which nine requests come."""
    rng = random.Random(seed)
    block = rng.choice((16, 16, 64))
    settings: dict[str, Any] = {
        "block_size": block,
        "num_kv_blocks": rng.choice((14, 25, 600)) if block == 16 else rng.choice((6, 200)),
        "max_model_len": 192,
        "max_num_batched_tokens": rng.choice((9, 33, 64, 500)),
        "max_num_seqs": rng.choice((2, 5, 9)),
        "enable_prefix_caching": rng.random() < 0.6,
        "zero_overhead": rng.random() < 0.6,
        "cuda_graphs": rng.choice(("auto", "auto", "off")),
        "swap_space_gib": rng.choice((0, 0.05)),
    }
    if rng.random() < 0.4:
        settings |= {"speculative": "ngram", "num_draft_tokens": rng.choice((1, 4)), "ngram_min": 1}
    return settings, [rng.randrange(25) for _ in range(9)]


@pytest.mark.parametrize(
    ("place", "seed"),
    [
        *[pytest.param("cpu", seed, marks=[pytest.mark.nightly] if seed > 3 else []) for seed in range(24)],
        *[pytest.param("cuda", seed, marks=pytest.mark.gpu) for seed in range(24)],
    ],
)
def test_schedules_at_random(place: str, seed: int) -> None:
    """Everything above at once: pools too small for all, chunks, hits, drafts, graphs, overlap, arrivals at any time."""
    kind = list(KINDS)[seed % len(KINDS)]
    (shared,) = mates([70], 30)
    tails = zip((70, 64, 33, 70, 16), mates([5, 1, 20, 40, 9], 32), strict=True)
    prompts = [*mates([3, 40, 90, 17], 31), *[shared[:n] + tail for n, tail in tails]]
    params = [p.clone(max_tokens=14) for p in drawn(9)]
    want = alone(place, kind, prompts, params)
    settings, turns = schedule(seed)
    with engine_of(place, kind, **settings) as engine:
        check_same(want, run(engine, prompts, params, turns), settings)
        assert engine._core.check() is None


# The tests themselves


class _Planted:
    """A projection that gives a row other bits among many rows than among few."""

    def __init__(self, real: Any, more_than: int) -> None:
        self._real, self._more_than = real, more_than

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._real(x)
        return out if x.shape[0] <= self._more_than else out * (1 + 2.0**-7)


@pytest.mark.parametrize(("place", "kind"), ONE_KIND)
def test_an_operator_that_depends_on_the_batch_is_found_with_its_layer(place: str, kind: str) -> None:
    """Negative control: the last projection of layer 1 follows the number of rows, so that layer 2 is given something else."""
    prompts = mates([4, 6, *[3] * 20], 20)
    want = alone(place, kind, prompts[:1], TOLD)
    with engine_of(place, kind, cuda_graphs="off", enable_prefix_caching=False) as engine:
        model: Any = engine.model
        layer = (model._layers if model.__dict__.get("_fused") is None else model._fused._layers)[1]
        layer.down = _Planted(layer.down, 8)
        (few,) = run(engine, prompts[:1], TOLD)
        assert difference(want[0], few) == ""
        (many,) = run(engine, prompts, TOLD, mates=range(1, len(prompts)))
    told = difference(want[0], many)
    assert "layers.2.k is the first to differ" in told and "log-probabilities differ from token 0 on" in told


def test_a_difference_is_told_where_it_is() -> None:
    one, other = alone("cpu", "llama", TARGETS[:1], TOLD)[0], alone("cpu", "llama", TARGETS[:1], DRAWN[1].clone(seed=3))[0]
    assert difference(one, one) == ""
    told = difference(one, other)
    at = next(i for i, (a, b) in enumerate(zip(one.answer.tokens, other.answer.tokens, strict=True)) if a != b)
    assert f"layers.0.k is the first to differ, at {len(one.kv[0][1]) - 5 - at} of 14 positions from {5 + at} on" in told  # type: ignore[index]
    assert f"token {at} is" in told and f"log-probabilities differ from token {at} on" in told


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_the_gpu_have_their_kernels(kind: str) -> None:
    for block in (16, 64):
        assert registry.refusals(read_kernel_shape(config_of(kind, "cuda"), page_tokens=block)) == {}
