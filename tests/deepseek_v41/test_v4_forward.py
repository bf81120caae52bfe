"""DeepSeek-V4 as the engine computes it: the numbers of the plain reference and of transformers, and the same bits in every cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.models.base import ModelOptions
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepseek_v41 import v4_kit
from deepseek_v41.forward_kit import Bench, play
from deepseek_v41.v4 import SequentialV4, V4Forward

TOLERANCE = 1e-5
LENGTHS = (68, 23, 41)
BLOCK = 32
BACK = 6
"""Rows of a step that may be taken back."""


def ids(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def weights(seed: int = 1) -> dict[str, torch.Tensor]:
    return v4_kit.weights(v4_kit.read_plan(v4_kit.config()), seed)


@cache
def reference(length: int) -> V4Forward:
    return SequentialV4(v4_kit.read_plan(v4_kit.config()), weights()).forward(ids(length))


@cache
def model(dtype: torch.dtype, device: str) -> DeepseekV4Model:
    made = v4_kit.production_model(v4_kit.config(), weights(), dtype, device)
    made.configure(ModelOptions(max_draft=BACK - 1))
    return made


@cache
def whole(length: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits of every position, one sequence in one step."""
    return Bench(model(dtype, device), block=BLOCK).prefill(ids(length))[1]


@pytest.mark.parametrize("length", [1, 4, 100])
def test_logits_are_those_of_the_reference(length: int, device: str) -> None:
    assert float((whole(length, torch.float32, device).cpu() - reference(length).logits).abs().max()) <= TOLERANCE


def test_every_layer_is_that_of_the_reference(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, seen = model(torch.float32, device), []

    def watched(layer: Any) -> Any:
        def run(*args: Any) -> torch.Tensor:
            seen.append(layer(*args))
            return seen[-1]

        return run

    monkeypatch.setattr(m, "layers", [watched(layer) for layer in m.layers])
    Bench(m, block=BLOCK).prefill(ids(100))
    for depth, (ours, theirs) in enumerate(zip(seen, reference(100).inputs[1:], strict=True)):
        assert float((ours[:100].cpu() - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max()), depth


def test_logits_are_those_of_transformers_in_chunks_and_decoding(device: str) -> None:
    pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers with deepseek_v4 (5.24)")
    from transformers import DynamicCache

    theirs = v4_kit.transformers_model(v4_kit.config(), weights())
    past, bench = DynamicCache(config=theirs.config), Bench(model(torch.float32, device), block=BLOCK)
    run = bench.start(ids(100))
    with torch.inference_mode():
        for count in (37, 29, *[1] * 8, 26):
            wanted = theirs(ids(100)[None, run.done : run.done + count], cache=past, use_cache=True).logits[0]
            (ours,) = bench.step([(run, count)])
            assert float((ours.cpu() - wanted).abs().max()) <= TOLERANCE, run.done


@pytest.mark.parametrize(("dtype", "drafts"), [(torch.float32, True), (torch.bfloat16, False)])
def test_cuts_mates_and_drafts_do_not_change_bits(dtype: torch.dtype, drafts: bool, device: str) -> None:
    bench = Bench(model(dtype, device), block=BLOCK, shuffle=5)
    for k, logits in enumerate(play(bench, [ids(length) for length in LENGTHS], 7 + drafts, drafts)):
        assert torch.equal(logits, whole(LENGTHS[k], dtype, device)), k


def test_pages_of_any_size_give_the_same_bits(device: str) -> None:
    for block in (64, 128):
        _, logits = Bench(model(torch.float32, device), block=block).prefill(ids(100), chunk=50)
        assert torch.equal(logits, whole(100, torch.float32, device)), block


def test_a_position_sees_only_earlier_ones(device: str) -> None:
    changed = ids(100)
    changed[60:] = (changed[60:] + 7) % 500
    _, logits = Bench(model(torch.float32, device), block=BLOCK).prefill(changed)
    seen = whole(100, torch.float32, device)
    assert torch.equal(logits[:60], seen[:60]) and (logits[60:] != seen[60:]).any(1).all()


def test_rows_of_released_ratios(device: str) -> None:
    """Entries of 4 and of 128 tokens, on the pages that the model chooses by itself."""
    fields = v4_kit.config(compress_rates={v4_kit.CSA: 4, v4_kit.HCA: 128})
    plan = v4_kit.read_plan(fields)
    given = v4_kit.weights(plan, 2)
    m, prompt = v4_kit.production_model(fields, given, device=device), ids(300, 2)
    assert m.block_tokens == 128
    _, logits = Bench(m, block=128).prefill(prompt)
    assert float((logits.cpu() - SequentialV4(plan, given).forward(prompt).logits).abs().max()) <= TOLERANCE
    _, again = Bench(m, block=128, shuffle=1).prefill(prompt, chunk=77)
    assert torch.equal(again, logits)


@cache
def narrow(device: str) -> DeepseekV4Model:
    fields = v4_kit.config(sliding_window=4)
    return v4_kit.production_model(fields, v4_kit.weights(v4_kit.read_plan(fields), 1), device=device)


@pytest.mark.parametrize(("start", "exact"), [(80, True), (82, False)])
def test_rows_computed_again_behind_a_hit(start: int, exact: bool, device: str) -> None:
    """Layer 4 is right 4 · 3 rows behind the start, and its entry of tokens 96 … 99 pools the four before it."""
    bench, prompt = Bench(narrow(device), block=BLOCK), ids(128)
    first, _ = bench.prefill(prompt)
    wanted = bench.written(first)
    again = bench.resume(first, start, 96)
    bench.step([(again, 7)])
    bench.step([(again, 128 - start - 7)])
    made = bench.written(again)
    same = {}
    for name, rows in wanted.items():
        kept = rows.shape[0] * 96 // 128
        assert torch.equal(made[name][:kept], rows[:kept]), name
        same[name] = torch.equal(made[name], rows)
    assert all(same.values()) is exact and all(same[name] for name in ("layers.2.kv", "layers.2.index", "layers.3.kv"))


def test_the_rule_of_hits_covers_what_is_pooled(device: str) -> None:
    bench = Bench(narrow(device), block=BLOCK)
    hits = bench.model.caches.hits
    assert 96 - hits.encoder * (hits.window - 1) <= 80 and hits.decoder == 1 and hits.grain == BLOCK
    prompt = ids(160)
    first, logits = bench.prefill(prompt)
    start = min(160 - ((hits.encoder + hits.decoder) * 3 + 1), 128 - hits.encoder * 3)
    again = bench.resume(first, start, 128)
    assert torch.equal(bench.step([(again, 160 - start)])[0][-1], logits[-1])
    assert all(torch.equal(bench.written(again)[name], rows) for name, rows in bench.written(first).items())


def test_a_replica_is_the_state_of_a_run_that_stopped_there(device: str) -> None:
    """Whether the boundary is passed by a chunk, by decoding or by drafts that are taken back; what is not needed is zero."""
    m, prompt = model(torch.float32, device), ids(100)
    bench = Bench(m, block=BLOCK)
    stopped, _ = bench.prefill(prompt[:64])
    wanted = bench.replica(stopped)
    assert int((wanted["layers.2.pending"] != 0).any(-1).any(-1).sum()) == 4 and not wanted["layers.3.pending"].any()
    for counts, taken_back in (((66,), 0), ((62, 1, 1, 1), 0), ((60, 6), 1), ((62, 6), 4), ((62, 6), 5)):
        run = bench.start(prompt)
        for count in counts[:-1]:
            bench.step([(run, count)])
        bench.step([(run, counts[-1])], [taken_back])
        if run.done < 64:
            bench.step([(run, 1)])
        kept = bench.replica(run)
        assert [name for name, rows in wanted.items() if not torch.equal(kept[name], rows)] == [], (counts, taken_back)
        bench.release(run)


def test_settings_that_do_not_fit(device: str) -> None:
    m = v4_kit.production_model(v4_kit.config(), weights(), device=device)
    for options, message in (
        (ModelOptions(truncation="compact"), "yoco_prefill_truncation='compact' .* leave it 'off'"),
        (ModelOptions(cache_form="packed"), "kv_cache_dtype='packed' is not implemented"),
        (ModelOptions(table_cache_bytes=5), "engram_cache_gib is a setting of models with Engram tables"),
        (ModelOptions(table_place="host"), "engram_tables is a setting of models with Engram tables"),
        (ModelOptions(max_draft=5, max_backtracking=5), "max_backtracking_tokens 5 .* at least 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            m.configure(options)
    with pytest.raises(ConfigError, match=r"pages of 48 tokens cut the entries of layer 3, .* leave block_size out for pages of 128"):
        m.kv_groups(48)
