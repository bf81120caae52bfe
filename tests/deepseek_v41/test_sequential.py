"""The reference against itself and against what can be said without another implementation."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepinfer.kernels.block_formats import FP4_ROWS, FP8_ROWS, MXFP4_ROWS, RowFormat, fake_quantise
from deepinfer.kernels.engram_hash import engram_hash
from deepinfer.kernels.rope import RopeTable
from deepinfer.models.deepseek_v41.engram import compress_ids
from deepinfer.models.deepseek_v41.parameters import checkpoint_parameters
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology
from deepseek_v41 import arithmetic
from deepseek_v41.drafts import draft
from deepseek_v41.sequential import Forward, Run, Sequential
from deepseek_v41.weights_kit import RandomWeights, full_width, plan, random_ids


@cache
def narrow() -> DeepseekV41Topology:
    """A window of 4, so that a few dozen tokens are longer than what any window can carry through all layers."""
    return plan("tiny", sliding_window=4)


@cache
def model(caches: bool = True) -> Sequential:
    return Sequential(narrow(), RandomWeights(narrow(), 3), Run(caches=caches))


@cache
def ids() -> torch.Tensor:
    return random_ids(narrow(), 72, 3)


@cache
def full() -> Forward:
    return model(False).forward(ids())


@pytest.mark.parametrize(
    ("form", "ours"), [(FP8_ROWS, arithmetic.round_fp8), (FP4_ROWS, arithmetic.round_fp4), (MXFP4_ROWS, arithmetic.round_mxfp4)]
)
def test_roundings_agree_with_the_operators(form: RowFormat, ours: object) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2000, 64, generator=generator) * torch.exp2(torch.randint(-12, 13, (2000, 1), generator=generator))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8) * torch.tensor([1.0, -1.0]).repeat(32)
    rows[:200] = ties * torch.exp2(torch.arange(-100, 100))[:, None]
    rows[200:210] = 0
    rows[210:220, 5] = 1e30
    assert callable(ours)
    for given in (rows, rows.bfloat16()):
        assert torch.equal(ours(given), fake_quantise(given, form))


def test_angles_agree_with_the_operator() -> None:
    for t in (narrow(), plan("full")):
        for rope in (t.rope_main, t.rope_compress):
            table = RopeTable(rope, torch.device("cpu"))
            assert table.scale == 1.0
            # the blend of YaRN may round in another order
            torch.testing.assert_close(arithmetic.frequencies(rope), table.frequencies, rtol=3e-7, atol=0)


def test_engram_rows_by_hand() -> None:
    t = plan(
        "tiny", vocab_size=512, engram_compressed_vocab_size=512, engram_vocab_size=97, engram_num_embeddings=[630, 834],
        engram_layer_ids=[1, 4], dspark_noise_token_id=501, image_token_id=500,
    )  # fmt: skip
    small = Sequential(t, {})
    rows = small.engram_rows(0, torch.tensor([8, 6, 7, 8]))
    assert rows[0].tolist() == [86, 135, 221, 335, 447, 529]
    rows = small.engram_rows(0, torch.tensor([5, 6, 7, 8]))
    assert rows[3].tolist() == [8, 184, 279, 337, 509, 601]


def test_engram_rows_agree_with_the_operator() -> None:
    t, span = narrow(), torch.zeros(72, dtype=torch.bool)
    span[[0, 20, 21, 40]] = True
    assert t.engram is not None
    compressed = compress_ids(ids(), torch.arange(t.vocab), span)
    before = torch.full((1, t.engram.longest - 1), -1)
    theirs = engram_hash(compressed, before, torch.tensor([0, 72], dtype=torch.int32), *t.engram.tensors(), t.engram.pad_token)
    for table in range(2):
        assert torch.equal(model().engram_rows(table, ids(), span), theirs[table])


def test_a_token_depends_on_earlier_ones_only() -> None:
    other = ids().clone()
    other[60:] = (other[60:] + 7) % 2000
    changed = model(False).forward(other)
    assert torch.allclose(changed.logits[:60], full().logits[:60], atol=1e-4)
    assert (changed.logits[60:] - full().logits[60:]).abs().amax(1).min() > 0.1


def test_truncation_is_exact_from_its_bound_on() -> None:
    bound = narrow().exact_decoder_tokens
    assert bound == 16
    errors = {}
    for keep in (4, 10, bound - 1, bound, 40):
        cut = model(False).forward(ids(), keep=keep)
        assert cut.first_row == 72 - keep and cut.logits.shape[0] == keep
        assert all(torch.equal(cut.shared.entries[layer], full().shared.entries[layer]) for layer in (2, 4))
        errors[keep] = float((cut.logits[-1] - full().logits[-1]).abs().max())
    # float32 sums over another number of rows differ in their last bits
    assert max(errors[bound], errors[40]) < 1e-5
    assert errors[4] > 1e-2 and errors[10] > 1e-5


def test_replay_behind_a_hit_is_exact_from_its_bound_on() -> None:
    hit, bound = 64, narrow().exact_tokens
    assert bound == 31
    ratios = narrow().shared.ratios
    restored = {
        layer: (rows[: hit // ratios[layer]], full().shared.index_keys[layer][: hit // ratios[layer]])
        for layer, rows in full().shared.entries.items()
    }
    for first, exact in ((hit - 4, False), (72 - bound - 1, True)):
        replay = model(False).forward(ids(), first=first, restored=restored)
        assert replay.logits.shape[0] == 72 - first
        for layer, (rows, _) in restored.items():
            assert torch.equal(replay.shared.entries[layer][: rows.shape[0]], rows)
        error = float((replay.logits[-1] - full().logits[-1]).abs().max())
        assert error < 1e-5 if exact else error > 1e-2


def test_image_spans_have_a_bias_rows_and_no_ngrams_of_their_own() -> None:
    span = torch.zeros(72, dtype=torch.bool)
    span[30:34] = True
    rows = torch.randn(4, narrow().hidden, generator=torch.Generator().manual_seed(2))
    seen = model(False).forward(ids(), image=span, span_rows=rows)
    assert torch.allclose(seen.logits[:30], full().logits[:30], atol=1e-5)
    assert torch.equal(seen.inputs[0][0][31, 2], rows[1])
    x, pre = full().inputs[2]
    text, picture = (
        model(False).layer(2, x, pre, full().shared.copy(), image=mask).experts for mask in (torch.zeros_like(span), torch.ones_like(span))
    )
    assert (text != picture).any(1).float().mean() > 0.2
    table = model(False).engram_rows(0, ids(), span)
    plain = model(False).engram_rows(0, ids())
    assert (table[30:34] == -1).all() and torch.equal(table[37:], plain[37:]) and not (table[34:37] == plain[34:37]).all(1).any()
    _, gate = model(False).engram_gate(full().inputs[1][0], 1, table)
    assert (gate[30:34] == 0).all() and (gate[:30] > 0).all()


def test_given_values_are_used() -> None:
    seen = full()
    again = model(False).forward(ids(), forced=dict(enumerate(seen.inputs[:-1])), given=seen.shared)
    assert torch.equal(again.logits, seen.logits)
    forced = dict(enumerate(seen.inputs[:-1]))
    x, pre = forced[9]
    forced[9] = (x + 1, pre)
    assert not torch.allclose(model(False).forward(ids(), forced=forced).logits, seen.logits, atol=1e-2)


def test_rounding_caches_changes_little_and_only_that() -> None:
    seen = model(True).forward(ids())
    for layer, rows in seen.shared.windows.items():
        assert torch.equal(fake_quantise(rows, FP8_ROWS), rows), layer
    for rows in seen.shared.entries.values():
        assert torch.equal(fake_quantise(rows, FP4_ROWS), rows)
    off = (seen.inputs[1][0] - full().inputs[1][0]).abs()
    assert 1e-3 < float(off.mean()) < 0.1


def test_selections_follow_from_scores() -> None:
    seen = model(False).forward(ids(), keep_scores=True)
    sizes, shared = narrow().attention, seen.shared
    assert set(shared.selections) == set(narrow().shared.index_sources)
    assert shared.pool is not None and int(shared.pool.sum(1).max()) == sizes.candidate_blocks
    for layer, chosen in shared.selections.items():
        scores = shared.scores[layer]
        for t in (0, 1, 5, 30, 71):
            order = sorted((j for j in range(scores.shape[1]) if scores[t, j] > -torch.inf), key=lambda j: (-float(scores[t, j]), j))
            wanted = sorted(order[: sizes.index_topk])
            assert chosen[t].tolist() == wanted + [-1] * (chosen.shape[1] - len(wanted)), (layer, t)
            if narrow().layers[layer].candidates:
                assert all(shared.pool[t, j // sizes.candidate_block] for j in wanted)


def test_drafts_follow_the_tokens_before_them() -> None:
    call = draft(model(), full().taps, 17)
    assert call.logits.shape == (5, 2048) and torch.equal(call.tokens, call.logits.argmax(1))
    again = draft(model(), full().taps, 17, forced=call.tokens)
    assert torch.equal(again.logits, call.logits) and torch.equal(again.confidence, call.confidence)
    other = draft(model(), full().taps, 17, forced=torch.tensor([5, 6, 7, 8, 9]))
    assert torch.equal(other.base, call.base) and torch.equal(other.logits[0], call.logits[0])
    assert not torch.allclose(other.logits[1], call.logits[1])
    window = narrow().attention.window
    late = draft(model(), full().taps[-window:], 17, first=72 - window)
    assert torch.allclose(late.logits, call.logits, atol=1e-5)
    early = draft(model(), full().taps[-window + 1 :], 17, first=72 - window + 1)
    assert not torch.allclose(early.logits, call.logits, atol=1e-3)
    accepted = call.accepted(torch.tensor([1.0, 2.0, 1.0, 1.0, 4.0]))
    assert torch.allclose(accepted.logit() * torch.tensor([1.0, 2.0, 1.0, 1.0, 4.0]), call.confidence, atol=1e-3)


def test_weights_depend_on_seed_and_name_only() -> None:
    t = plan("tiny", num_hidden_layers=6, compress_ratios=[0, 0, 2, 2, 2, 1], num_nextn_predict_layers=0, kv_source_layer_ids=[2, 4, 5],
             index_source_layer_ids=[2, 4, 5])  # fmt: skip
    fewer, name = RandomWeights(t, 3), "layers.4.attn.wq_b.weight"
    assert torch.equal(fewer[name], RandomWeights(narrow(), 3)[name])
    assert not torch.equal(fewer[name], RandomWeights(t, 4)[name])
    assert abs(float(fewer["embed.weight"].std()) - 1) < 0.01 and abs(float(fewer["embed.weight"].mean())) < 0.01
    assert all(bool((value != 0).any()) for value in fewer.values())


def test_released_weights_are_values_of_their_formats() -> None:
    weights, plain = RandomWeights(narrow(), 3, released=True), RandomWeights(narrow(), 3)
    assert set(weights) == {spec.name for spec in checkpoint_parameters(narrow()) if not spec.name.endswith(".scale")}
    for name in ("layers.2.attn.wkv.weight", "layers.2.ffn.experts.1.w2.weight", "layers.1.engram.embed.weight"):
        assert 0.7 < float(torch.corrcoef(torch.stack((weights[name].flatten(), plain[name].flatten())))[0, 1]) < 1
    assert torch.equal(fake_quantise(weights["layers.1.engram.embed.weight"], FP8_ROWS), weights["layers.1.engram.embed.weight"])


def test_harsh_weights_leave_numbers_finite() -> None:
    weights, harsh = RandomWeights(narrow(), 3, harsh=True), ids()[:40].clone()
    harsh[[0, 1, 9, 10, 11, 30]] = torch.tensor([5, 5, 6, 6, 7, 5])
    seen = Sequential(narrow(), weights).forward(harsh)
    assert bool(seen.logits.isfinite().all()) and float(seen.inputs[1][0].abs().max()) > 200
    # nothing precedes the first token: with an embedding of zero it stays zero until something is added to it
    assert torch.equal(seen.shared.windows[0][0], torch.zeros(narrow().attention.head_dim))
    assert torch.equal(seen.inputs[0][0][0], torch.zeros(4, 256)) and float(seen.inputs[0][0][9].abs().max()) < 1e-10
    assert float(weights["layers.2.attn.wkv.weight"].abs().sum(1).min()) == 0


def test_bfloat16_runs_stay_near() -> None:
    weights = RandomWeights(narrow(), 3, released=True)
    exact, short = (
        Sequential(narrow(), weights, Run(caches=False, dtype=dtype)).forward(ids()[:32]) for dtype in (torch.float32, torch.bfloat16)
    )
    assert short.inputs[5][0].dtype == torch.bfloat16 and short.logits.dtype == torch.float32
    error = (short.logits - exact.logits).abs()
    assert 1e-3 < float(error.median()) < 0.1


def test_a_layer_goes_on_behind_a_given_context() -> None:
    """Two halves of a sequence, the second with the first one's rows as its past, make what the whole makes."""
    cut = 40
    for layer in (2, 3, 4, 5, 6, 7):
        streams, pre = full().inputs[layer]
        shared = full().shared.without(layer, 5)
        shared.history[layer] = full().shared.windows[layer][:cut]
        for values in (shared.selections, shared.windows):
            values.update({other: rows[cut:] for other, rows in values.items()})
        if shared.pool is not None:
            shared.pool = shared.pool[cut:]
        ratio, past = narrow().shared.ratios[layer], None
        if layer in full().shared.entries:
            past = (full().shared.entries[layer][: cut // ratio], full().shared.index_keys[layer][: cut // ratio])
        rows = model(False).engram_rows(1, ids())[cut:] if layer == 3 else None
        out = model(False).layer(layer, streams[cut:], pre[cut:], shared, first=cut, restored=past, rows=rows)
        assert torch.allclose(out.streams, full().inputs[layer + 1][0][cut:], atol=1e-5), layer


def test_full_width_has_every_kind_of_layer() -> None:
    t = full_width()
    assert [plan.kind.value for plan in t.layers] == ["window", "full", "reuse", "full", "reindex"]
    assert t.hidden == 5120 and t.attention.head_dim == 512 and t.moe.chosen == 6 and t.drafts.stages == 1
    assert t.engram is not None and t.engram.width == 6144


def test_unknown_names_are_errors() -> None:
    with pytest.raises(KeyError):
        RandomWeights(narrow())["layers.0.attn.compressor.wkv.weight"]
    with pytest.raises(KeyError):
        RandomWeights(narrow())["layers.10.attn.wkv.weight"]
