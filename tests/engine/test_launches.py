"""What a step hands to kernels by address has the type, the place and the order that they were made for: whole engines on a fake GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deepinfer.engine.engine import Engine
from deepinfer.kernels.paged_attention.cuda import PagedAttention, Scratch
from deepinfer.kernels.paged_attention.units import step_units
from deepinfer.kernels.rms_norm.cuda import RmsNorm
from deepinfer.sampling import SamplingParams
from engine_kit import collect, random_prompts, request
from exact_kit import KINDS, VOCAB, engine_of
from fake_cuda import FakeRecorder, Operations
from kernel_kit import need_tilelang
from launch_kit import Checked, checked_launches

SAID: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0, "logprobs": -1, "prompt_logprobs": 3},
    {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "min_tokens": 4, "stop_token_ids": [9]},
]
"""Every kind of row that the sampler knows."""


def factories(launches: Counter[str]) -> set[str]:
    """Of the kernels launched."""
    return {name.split("[")[0] for name in launches}


class Anything:
    """A grammar that allows every token."""

    def __init__(self) -> None:
        self.position, self.complete = 0, False

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        row[:] = -1

    def accept(self, token: int) -> bool:
        self.position += 1
        return True

    def rollback(self, count: int) -> None:
        self.position -= count


def load(kind: str, said: list[dict[str, Any]], values: dict[str, Any] | None = None, **settings: Any) -> Counter[str]:
    """An engine's launches while prompts of all lengths come, decode together and end one after another. ``values``: of every second
    request."""
    need_tilelang()
    ends: list[tuple[str | None, str | None]] = []
    with checked_launches() as launches:
        with engine_of("cuda", kind, max_num_seqs=20, max_num_batched_tokens=96, **settings) as engine:
            for nth, prompt in enumerate(random_prompts([3, 200, 17, 64, 40, 5] * 3, vocab=VOCAB)):
                params = SamplingParams(max_tokens=6 + nth % 5, ignore_eos=True, seed=nth, **said[nth % len(said)])
                engine.add_request(request(str(nth), prompt, params, **(values or {} if nth % 2 else {})))
                ends += [(d.finish_reason, d.error) for d in engine.step()]
            while engine.has_unfinished():
                ends += [(d.finish_reason, d.error) for d in engine.step()]
            assert Counter(end for end in ends if end[0] is not None) == {("length", None): 18}
        return launches.copy()


MODEL = {"argmax/argmax", "embedding/embedding", "rms_norm/rms_norm", "rms_norm/add_rms_norm", "rope_kv/rope_kv", "swiglu/swiglu"}


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        pytest.param(kind, graphs, marks=[pytest.mark.nightly] if graphs == "off" and kind != "llama" else [])
        for kind in KINDS
        for graphs in ("off", "auto")
    ],
)
def test_steps_launch_with_what_kernels_were_made_for(kind: str, graphs: str) -> None:
    found = factories(load(kind, SAID, cuda_graphs=graphs))
    few = set() if kind == "window_bias" else {"linear/few_rows"}
    drawing = {f"sample/{name}" for name in ("edit_rows", "draw_plain", "draw_ranked", "logprob_rows")}
    want = MODEL | few | drawing
    want |= {"paged_attention/paged_attention"}
    if graphs == "off":
        want |= {"paged_attention/wide_attention"}
    else:
        want |= {"begin_step/begin_step", "paged_attention/decode_attention", "paged_attention/add_segments"}
    assert want <= found, want - found


def test_overlapped_steps_do_so_too() -> None:
    load("llama", SAID, zero_overhead=True)
    load("llama", [{"temperature": 0}], zero_overhead=True, cuda_graphs="off")


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_grammars_and_words_not_to_be_said_do_so_too(graphs: str) -> None:
    found = load("llama", SAID, {"grammar": Anything, "bad_word_ids": ((5, 6), (7,))}, cuda_graphs=graphs)
    assert "sample/mask_rows" in factories(found)


def test_rows_of_drafts_do_so_too() -> None:
    load("llama", SAID, {"grammar": Anything, "bad_word_ids": ((5, 6), (7,))}, speculative="ngram", num_draft_tokens=3, ngram_min=1)


def launched(engine: Engine, launches: Counter[str], prompt: int, **said: Any) -> tuple[int, int, int]:
    """What the host launches for a step of three decoding sequences and a new prompt: kernels, other operations, graphs."""
    for i in range(3):
        engine.add_request(request(str(i), random_prompts([9], vocab=VOCAB)[0], SamplingParams(max_tokens=50, ignore_eos=True, **said)))
    for _ in range(6):
        engine.step()
    engine.add_request(request("new", random_prompts([prompt], vocab=VOCAB)[0], SamplingParams(max_tokens=50, ignore_eos=True, **said)))
    mixed, before, graphs = engine.metrics().steps["mixed"], launches.total(), FakeRecorder.replays
    with Operations() as operations:
        engine.step()
    found = launches.total() - before, operations.seen.total(), FakeRecorder.replays - graphs
    for _ in range(2):
        engine.step()
    assert engine.metrics().steps["mixed"] == mixed + 1
    return found


@pytest.mark.parametrize("said", [{"temperature": 0}, {"temperature": 0.8, "top_k": 20}], ids=["greedy", "drawn"])
def test_a_step_with_a_prompt_is_one_graph_and_a_handful_of_launches(said: dict[str, Any]) -> None:
    need_tilelang()
    found = {}
    for graphs in ("off", "auto"):
        with checked_launches() as launches, engine_of("cuda", "llama", cuda_graphs=graphs) as engine:
            found[graphs] = launched(engine, launches, 200, **said)
    layers = 4
    without, with_graph = found["off"], found["auto"]
    assert without[0] >= 5 * layers and without[2] == 0
    assert with_graph[0] <= 3 and with_graph[1] <= 20 and with_graph[2] == 1, found


def test_more_rows_than_one_product_takes() -> None:
    need_tilelang()
    with checked_launches(), engine_of("cuda", "llama", max_num_batched_tokens=9000, max_model_len=4096, num_kv_blocks=1200) as engine:
        for nth in range(5):
            engine.add_request(
                request(str(nth), random_prompts([1950 + nth], vocab=VOCAB)[0], SamplingParams(max_tokens=2, ignore_eos=True))
            )
        assert all(a.error is None for a in collect(engine).values())


# Negative controls


def norm() -> RmsNorm:
    (kernel,) = (Checked(p) for p in RmsNorm.programs(64, "bfloat16"))
    return RmsNorm(64, 1e-5, torch.bfloat16, torch.device("cuda"), kernels=[kernel])


def test_what_is_wrong_with_a_tensor_is_told() -> None:
    need_tilelang()
    with checked_launches():
        op = norm()
        x, weight, out = (
            torch.empty(4, 64, device="cuda"),
            torch.empty(64, device="cuda"),
            torch.empty(4, 64, dtype=torch.bfloat16, device="cuda"),
        )
        op(x, weight, out)
        with pytest.raises(AssertionError, match=r"rms_norm.*: x has strides \(128, 1\)"):
            op(torch.empty(4, 128, device="cuda")[:, :64], weight, out)
        with pytest.raises(AssertionError, match=r"x is torch\.float64, wanted float32"):
            op(x.double(), weight, out)
        with pytest.raises(AssertionError, match="weight is on cpu"):
            op(x, torch.empty(64), out)
        with pytest.raises(AssertionError, match="y has 128 numbers, 256 are used"):
            op(x, weight, out[:2])
        with pytest.raises(AssertionError, match=r"no grid of \(0,\)"):
            op._kernel.launch((0,), x, weight, out, 1e-5, 4)


def test_a_table_taken_for_as_wide_as_it_is_cut_is_told() -> None:
    need_tilelang()
    device = torch.device("cuda")
    with checked_launches():
        op = PagedAttention(4, 2, 64, 16, None, torch.bfloat16, device, Scratch(4, 64, device))
        table = torch.zeros(3, 9, dtype=torch.int32, device=device)[:, :2]
        units = step_units(table, torch.zeros(5, dtype=torch.int64, device=device), [0, 2, 3, 5], op.tokens)
        q, cache = (
            torch.empty(8, 4, 64, dtype=torch.bfloat16, device=device),
            torch.empty(7, 16, 2, 64, dtype=torch.bfloat16, device=device),
        )
        op(q, cache, cache, units, torch.empty_like(q))
        common = (q, cache, cache, table, units.position, units.first, units.count, units.row, torch.empty_like(q), 0.1)
        with pytest.raises(AssertionError, match=r"table has strides \(9, 1\)"):
            op._units.launch((3, 2), *common, table.shape[1], 3)
