"""CUDA graphs of decode steps on a GPU: a replay has the bits of the same operations launched one by one, whatever was in its memory.

Of two decode steps: the Llama family's own, of fused kernels, and one made of its forward, as `graphs_kit` does it on a CPU. In both,
prompts run on fused kernels: a fault of a step that is no graph fails either.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.kernels.begin_step.words import DELTAS, HEAD, IDS, POS, ROWS, SEQ_LEN, SLOTS, SOURCE, TABLE_ROW
from deepinfer.models.base import row_buckets
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.sampling import SamplingParams
from deepinfer.worker.decode_step import DecodeGraphs
from engine_kit import generate, make_engine, random_prompts, request, same_bits, tiny_checkpoint
from graphs_kit import decode_of_references, wide_decode
from play_kit import play, same_play

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("checked")]

MOST = 40
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_num_seqs": MOST, "max_model_len": 256, "dtype": "bfloat16"}


@pytest.fixture(params=["own", "forward"])
def decode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decode step the family has."""
    if request.param == "forward":
        decode_of_references(monkeypatch)
    return str(request.param)


@cache
def fused_model() -> str:
    """Configuration of a model that the family's kernels are made for: SmolLM2's widths, and two layers."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    more = {"num_hidden_layers": 2, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    where = Path(mkdtemp(prefix="fused-"))
    (where / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes, **more}))
    return str(where)


def engine_of(decode: str, **settings: Any) -> Engine:
    own = decode == "own"
    settings = {**SETTINGS, **settings, "load_format": "dummy" if own else "auto"}
    engine = make_engine(fused_model() if own else tiny_checkpoint("llama"), "cuda", **settings)
    assert bool(engine.metrics().graphs) == (settings.get("cuda_graphs") != "off"), "see the warning"
    assert not own or engine.model._fused is not None, "see the warning"  # type: ignore[attr-defined]
    return engine


def recorded(engine: Engine) -> DecodeGraphs:
    made = engine._runner.graphs
    assert made is not None
    return made


def write_step(graphs: DecodeGraphs, rows: int, bucket: int, seed: int) -> None:
    """Some decode step's words, put on the device by hand: sequences of all lengths on pages of their own."""
    layout, table = graphs._layout, graphs._table
    cpu = torch.Generator().manual_seed(seed)
    page_tokens = next(iter(graphs._kv.values())).shape[1]
    pages = min(table.shape[1], (next(iter(graphs._kv.values())).shape[0] - 1) // MOST)
    lengths = torch.randint(1, pages * page_tokens + 1, (rows,), generator=cpu)
    slots = 1 + torch.randperm(MOST, generator=cpu)[:rows]
    own = torch.arange(1, MOST * pages + 1, dtype=torch.int32).view(MOST, pages)
    full = torch.zeros(table.shape, dtype=torch.int32)
    full[1 : MOST + 1, :pages] = own
    table.copy_(full)
    words = torch.zeros(layout.total, dtype=torch.int32)
    fields = words[HEAD : layout.first_delta].view(layout.num_fields, layout.stride)
    words[ROWS], words[DELTAS] = rows, min(rows, 2)
    position = lengths - 1
    fields[SOURCE, :rows] = torch.where(torch.rand(rows, generator=cpu) < 0.5, torch.arange(rows), -1)
    fields[IDS, :rows] = torch.randint(3, 300, (rows,), generator=cpu)
    fields[SEQ_LEN, :rows], fields[POS, :rows], fields[TABLE_ROW, :rows] = lengths.int(), position.int(), slots.int()
    fields[SLOTS, :rows] = (full[slots, position // page_tokens] * page_tokens + position % page_tokens).int()
    deltas = layout.deltas(words)
    for i in range(int(words[DELTAS])):  # cells that the graph has to store before it reads them
        row, column = int(slots[i]), int(position[i]) // page_tokens
        deltas[i] = torch.tensor([row, column, int(full[row, column])])
        table[row, column] = 0
    graphs._words.copy_(words)
    graphs._newest.copy_(torch.randint(3, 300, (len(graphs._newest),), generator=cpu))


def fill_pages(graphs: DecodeGraphs, seed: int, null_page: float) -> None:
    """Random KV, and in every entry of the null page one value."""
    device = torch.Generator("cuda").manual_seed(seed)
    for tensor in graphs._kv.values():
        tensor.normal_(0, 1, generator=device)
        tensor[0].fill_(null_page)


def spoil(graphs: DecodeGraphs) -> None:
    """Garbage wherever a replay is to write before it reads."""
    graphs._fields.wide.fill_(-(2**40))
    graphs._fields.seq_len.fill_(2**30)
    assert graphs._hidden is not None
    graphs._hidden.fill_(torch.nan)


@torch.inference_mode()
def test_a_replay_has_the_bits_of_its_operations_for_every_bucket(decode: str) -> None:
    with engine_of(decode) as engine:
        graphs = recorded(engine)
        assert graphs.buckets == row_buckets(MOST)
        for nth, bucket in enumerate(graphs.buckets):
            below = graphs.buckets[nth - 1] + 1 if nth else 1
            for rows in sorted({below, min(bucket, MOST)}):
                found = []
                for turn in range(3):
                    write_step(graphs, rows, bucket, seed=bucket + rows)
                    fill_pages(graphs, seed=bucket, null_page=(0.0, torch.nan, 3e38)[turn])
                    spoil(graphs)
                    drawn = graphs._replays[True, bucket] if turn else lambda b=bucket: graphs._run(True, b)
                    drawn()
                    hidden = graphs._hidden[:rows].clone()  # type: ignore[index]
                    kv = [tensor[1:].clone() for tensor in graphs._kv.values()]
                    write_step(graphs, rows, bucket, seed=bucket + rows)
                    fill_pages(graphs, seed=bucket, null_page=(0.0, torch.nan, 3e38)[turn])
                    spoil(graphs)
                    tokens = graphs._replays[False, bucket] if turn else lambda b=bucket: graphs._run(False, b)
                    tokens()
                    found.append([hidden, graphs._newest[:rows].clone(), graphs._table.clone(), *kv])
                assert torch.isfinite(found[0][0]).all()
                for other in found[1:]:
                    assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), (bucket, rows)


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_bucket(decode: str) -> None:
    with engine_of(decode) as engine:
        graphs = recorded(engine)
        want = None
        for bucket in graphs.buckets:
            write_step(graphs, 1, bucket, seed=4)
            fill_pages(graphs, seed=9, null_page=0.0)
            graphs._replays[True, bucket]()
            got = graphs._hidden[0].clone()  # type: ignore[index]
            want = got if want is None else want
            assert torch.equal(got, want), bucket


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_answers_are_those_without_graphs(decode: str, overlap: bool) -> None:
    """Tokens of greedy steps, and log-probabilities of others, which are read from the graph's hidden states."""
    for count in (1, 3, 9, 17, MOST):
        prompts = random_prompts([5 + 7 * i % 90 for i in range(count)], seed=count)
        found = []
        for graphs in ("off", "auto"):
            with engine_of(decode, cuda_graphs=graphs, zero_overhead=overlap) as engine:
                greedy = generate(engine, prompts, GREEDY)
                told = generate(engine, prompts, GREEDY.clone(logprobs=50, max_tokens=6))
                drawn = generate(engine, prompts, GREEDY.clone(temperature=0.8, top_k=40, seed=3, repetition_penalty=1.1))
                found.append([*greedy, *told, *drawn])
                if graphs == "auto":
                    metrics = engine.metrics()
                    assert metrics.graphs["replays"] == metrics.steps["decode"] > 20
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True)), count


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
def test_the_same_under_aborts_stops_forks_and_preemption(decode: str, overlap: bool) -> None:
    settings = {"block_size": 64, "num_kv_blocks": 4, "max_num_seqs": 6, "max_num_batched_tokens": 40, "zero_overhead": overlap}
    with engine_of(decode, cuda_graphs="off", **settings) as engine:
        want = play(engine, 0)
    with engine_of(decode, **settings) as engine:
        same_play(want, play(engine, 0))
        assert engine.metrics().graphs["replays"] > 10 and engine._core.check() is None


def test_memory_in_which_nothing_is_kept_may_hold_anything(decode: str) -> None:
    prompts = random_prompts([5, 70, 33])
    with engine_of(decode, cuda_graphs="off") as engine:
        want = generate(engine, prompts, GREEDY)
    with engine_of(decode) as engine:
        graphs = recorded(engine)
        for key, replay in list(graphs._replays.items()):

            @torch.inference_mode()
            def spoiled(replay: Any = replay) -> None:
                spoil(graphs)
                graphs._newest[len(prompts) :].fill_(12_345_678)
                for tensor in graphs._kv.values():
                    tensor[0].fill_(torch.nan)
                replay()

            graphs._replays[key] = spoiled
        got = generate(engine, prompts, GREEDY)
    assert all(same_bits(a, b) for a, b in zip(want, got, strict=True))


def test_steps_take_no_memory(decode: str) -> None:
    with engine_of(decode) as engine:
        for i, prompt in enumerate(random_prompts([20] * 5)):
            engine.add_request(request(str(i), prompt, GREEDY.clone(max_tokens=150)))
        for _ in range(10):
            engine.step()
        before = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_allocated()
        for _ in range(30):
            engine.step()
        assert (torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_allocated()) == before


# What fails while decode steps are recorded leaves a GPU that works


def still_works() -> None:
    with make_engine(tiny_checkpoint("llama"), "cuda", cuda_graphs="off", **SETTINGS) as engine:
        assert len(generate(engine, [[5, 6]], GREEDY)[0].tokens) == 12


def test_no_memory_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_of_references(monkeypatch)

    def decode(self: LlamaModel, rows: Any, kv: Any) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(LlamaModel, "decode", decode)
    with pytest.raises(CapacityError, match="kv_memory_fraction"):
        make_engine(tiny_checkpoint("llama"), "cuda", **SETTINGS)
    still_works()


def test_a_decode_step_that_waits_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_of_references(monkeypatch)

    def decode(self: LlamaModel, rows: Any, kv: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            int(rows.seq_len[0])
        return wide_decode(self, rows, kv)

    monkeypatch.setattr(LlamaModel, "decode", decode)
    with (
        pytest.warns(RuntimeWarning, match="could not be recorded"),
        make_engine(tiny_checkpoint("llama"), "cuda", **SETTINGS) as engine,
    ):
        assert not engine.metrics().graphs and len(generate(engine, [[5, 6]], GREEDY)[0].tokens) == 12
    with pytest.raises(ConfigError, match="cuda_graphs='off'"):
        make_engine(tiny_checkpoint("llama"), "cuda", cuda_graphs="on", **SETTINGS)
    still_works()
