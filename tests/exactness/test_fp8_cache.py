"""Engines whose KV is 8-bit floats, with a checkpoint's scales: the same bits whatever runs beside a request, however it is cut, cached,
preempted or drafted for; half the bytes in every tier; and never a page of another kind of engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.kv_store.identity import identity_of
from deepinfer.errors import ConfigError, KvLayoutError
from deepinfer.kernels.fp8_cache import FP8
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from engine_kit import collect, generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from exact_kit import KINDS, VOCAB, Trail, alone, check_same, config_of, engine_of, run
from fp8_cache_kit import scaled_model, scales_of, weights_of, write
from graphs_kit import graphs_on_cpu
from roles_kit import Pair
from scripted_kit import Scripted
from store_kit import Tier, ask

ON_GPU = [pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in KINDS]
PLACES = [pytest.param("cpu", "window_bias"), *[pytest.param("cpu", k, marks=pytest.mark.nightly) for k in ("llama", "qk_norm")], *ON_GPU]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
TOLD = GREEDY.clone(logprobs=-1)


@pytest.fixture(autouse=True)
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU steps take the code of graphs."""
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("place") == "cpu":
        graphs_on_cpu(monkeypatch)
        monkeypatch.setattr(LlamaModel, "prompt_rows", lambda self, most: [*(rows for rows in (16, 64) if rows < most), most])
    yield


def of(place: str, kind: str) -> dict[str, Any]:
    """Settings of an engine with 8-bit KV and scales."""
    return {"model": scaled_model(kind, place), "load_format": "auto", "kv_cache_dtype": "fp8"}


def wanted(place: str, kind: str, prompts: list[list[int]], params: Any) -> list[Trail]:
    """Each prompt by itself."""
    return alone(place, kind, prompts, params, **of(place, kind))


def prompts_of(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    return random_prompts(lengths, seed, VOCAB)


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_mates_and_cuts(place: str, kind: str) -> None:
    """A chunk of a prompt reads the rows it has written itself as later ones do: as the 8-bit numbers."""
    prompts = prompts_of((5, 64, 190, 1, 30, 130), 1)
    want = wanted(place, kind, prompts, TOLD)
    assert want[0].kv is not None and want[0].kv[0][1].shape[1] == SIZES_OF[kind] * config_of(kind, place)["head_dim"], "a byte a number"
    for chunk in (1, 7, 64, 300):
        seqs = min(chunk, 6)
        with engine_of(
            place, kind, max_num_batched_tokens=chunk, max_num_seqs=seqs, enable_prefix_caching=False, **of(place, kind)
        ) as engine:
            check_same(want, run(engine, prompts, TOLD), chunk)


SIZES_OF = {kind: settings["num_key_value_heads"] for kind, settings in KINDS.items()}


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_prefix_hits(place: str, kind: str) -> None:
    blocks = 4
    prompt, other = prompts_of((blocks * 16 + 3,) * 2, 8)
    want = wanted(place, kind, [prompt], TOLD)
    with engine_of(place, kind, **of(place, kind)) as engine:
        for hit in (0, 1, blocks):
            tenant = {"salt": f"tenant {hit}".encode()}
            run(engine, [[*prompt[: hit * 16], *other]], GREEDY.clone(max_tokens=1), **tenant)
            got = run(engine, [prompt], TOLD, **tenant)
            assert got[0].answer.cached_tokens == hit * 16
            check_same(want, got, f"a hit of {hit} blocks")


@pytest.mark.parametrize(("place", "kind"), PLACES)
@pytest.mark.parametrize("swap", [0.0, 0.25], ids=["recomputed", "swapped"])
def test_preemption(place: str, kind: str, swap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of((20, 33, 18, 47, 9, 30), 2)
    params = TOLD.clone(max_tokens=40)
    want = wanted(place, kind, prompts, params)
    small: dict[str, Any] = {"num_kv_blocks": 13, "max_model_len": 112, "swap_space_gib": swap, "enable_prefix_caching": False}
    with engine_of(place, kind, **small, **of(place, kind)) as engine:
        monkeypatch.setattr(engine._rates, "note", lambda *_: None)
        engine._core.set_rates(1e15 if swap else 0.0, 1.0)
        check_same(want, run(engine, prompts, params))
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and (stats["swapped_in"] > 0) == (swap > 0) and engine._core.check() is None


@pytest.mark.parametrize(("place", "kind"), PLACES)
def test_drafts_and_several_answers(place: str, kind: str) -> None:
    """Drafts right and wrong by script; and answers that share a prompt's pages, of which the last is copied."""
    prompts = prompts_of((5, 40, 18), 14)
    params = TOLD.clone(max_tokens=16)
    want = wanted(place, kind, prompts, params)
    truth = {str(i): t.answer.tokens for i, t in enumerate(wanted(place, kind, prompts, params.clone(max_tokens=32)))}
    with engine_of(place, kind, speculative="ngram", num_draft_tokens=4, **of(place, kind)) as engine:
        script = Scripted(engine, truth, lambda name, turn: [(turn * 7 + int(name)) >> i & 1 == 1 for i in range(turn % 5)])
        engine._loop.drafting = script
        check_same(want, run(engine, prompts, params))
        assert max(script.accepted[4]) > 1 and min(script.accepted[4]) == 0
    several, answers = params.clone(n=3, temperature=1.0, seed=5, ignore_eos=True), []
    for more in ({}, {"max_num_seqs": 1, "enable_prefix_caching": False}):
        with engine_of(place, kind, **more, **of(place, kind)) as engine:
            engine.add_request(request("several", prompts[1], several))
            answers.append([answer for _, answer in sorted(collect(engine).items())])
    assert len(answers[0]) == 3 and all(map(same_bits, *answers)) and not same_bits(*answers[0][:2])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_nobody_owns_may_hold_anything(kind: str) -> None:
    prompts = prompts_of((100, 37, 16, 1), 16)
    want = wanted("cuda", kind, prompts, TOLD)
    with engine_of("cuda", kind, enable_prefix_caching=False, **of("cuda", kind)) as engine:

        def spoil(turn: int) -> None:
            def work() -> None:
                for tensor in engine._runner.kv.tensors.values():
                    (tensor if turn == 0 else tensor[:1]).view(torch.uint8).fill_(0x7F)  # NaN

            engine._runner.in_order(work)

        check_same(want, run(engine, prompts, TOLD, around=spoil))


# What it takes


def test_a_byte_a_number_in_every_pool(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same memory twice the blocks of a 16-bit cache, on the device and behind it."""
    room = 1 << 22
    monkeypatch.setattr("deepinfer.engine.planner.kv_budget", lambda run, vocab_size: room)
    settings: dict[str, Any] = {"num_kv_blocks": None, "dtype": "bfloat16", "swap_space_gib": 0.001}
    found = {}
    for form in ("auto", "fp8"):
        with make_engine(tiny_checkpoint("qwen3"), device, kv_cache_dtype=form, **settings) as engine:
            host, tensors = engine._runner.moves.host, engine._runner.kv.tensors.values()
            assert host is not None and {t.dtype for t in tensors} == {FP8 if form == "fp8" else torch.bfloat16}
            assert sum(t.nbytes for t in tensors) == engine.plan.kv_bytes <= room
            found[form] = engine.plan.block_bytes, engine.plan.num_blocks + 1, host._groups[0].row_bytes, engine.swap.blocks
    wide, narrow = found["auto"], found["fp8"]
    assert narrow[0] * 2 == wide[0] and narrow[2] * 2 == wide[2]
    assert narrow[1] // 2 == wide[1] == room // wide[0] and narrow[3] // 2 == wide[3] > 0


def test_a_store_never_mixes_kinds(device: str, tmp_path: Path) -> None:
    """What one engine has stored its like finds, bit for bit; an engine with whole KV, or one of other scales, finds nothing."""
    (prompt,) = random_prompts((300,), seed=4, vocab=VOCAB)
    config = config_of("llama", "cpu")
    models = [
        write(tmp_path / f"{n}", config, {**weights_of(config), **{k: v * s for k, v in scales_of(3).items()}})
        for n, s in enumerate((1.0, 1.5))
    ]
    params = TOLD.clone(max_tokens=6, ignore_eos=True)
    tier = Tier()

    def make(model: str, form: str) -> Engine:
        small: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 64, "max_num_batched_tokens": 96, "quiet": True}
        return Engine(EngineConfig(model=model, device=device, kv_cache_dtype=form, num_threads=1, **small), store=tier)  # type: ignore[arg-type]

    answers = []
    for model, form, hit in (
        (models[0], "fp8", 0),
        (models[0], "fp8", 256),
        (models[0], "auto", 0),
        (models[1], "fp8", 0),
        (models[0], "fp8", 256),
    ):
        with make(model, form) as engine:
            answers.append(ask(engine, prompt, params))
            assert answers[-1].cached_tokens == hit, (model, form)
    assert same_bits(answers[0], answers[1]) and same_bits(answers[0], answers[4])
    assert not same_bits(answers[0], answers[2]) and not same_bits(answers[0], answers[3])
    names = [
        identity_of(EngineConfig(model=model, device=device, dtype="float32", block_size=16, kv_cache_dtype=form))  # type: ignore[arg-type]
        for model, form in ((models[0], "auto"), (models[0], "fp8"), (models[1], "fp8"))
    ]
    assert names[0]["kv_format"] != names[1]["kv_format"] == names[2]["kv_format"]
    assert names[0]["revision"] == names[1]["revision"] != names[2]["revision"], "scales are in the checkpoint"


def test_sequences_are_handed_over_as_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts((40, 17), seed=9)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=-1, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    with make_engine(tiny_checkpoint("llama"), device, block_size=16, **settings) as engine:
        want = generate(engine, prompts, params)
    with make_engine(tiny_checkpoint("llama"), device, block_size=16) as engine:
        whole = generate(engine, prompts, params)
    pair = Pair(monkeypatch, device, **settings)
    answers = pair.generate([request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    assert not pair.refused
    for answer, right, other in zip(answers, want, whole, strict=True):
        assert same_bits(answer, right) and not same_bits(other, right)
    pair.check_rest()
    pair.close()


def test_engines_of_two_kinds_do_not_hand_over(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, device, completion={"kv_cache_dtype": "fp8"})
    pair.prompt.add_request(request("a", random_prompts((20,))[0], GREEDY))
    pair.run(until=lambda: bool(pair.refused))
    assert isinstance(pair.refused["a"], KvLayoutError) and "float8_e4m3fn" in str(pair.refused["a"])
    pair.close()


def test_what_is_refused(device: str) -> None:
    for form in ("packed", "bfloat16", "float32"):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype='{form}' is a setting of models with compressed caches"):
            make_engine(tiny_checkpoint("llama"), device, kv_cache_dtype=form)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, packed"):
        make_engine(tiny_checkpoint("llama"), device, kv_cache_dtype="fp4")
