"""The reference against numbers of mlx-lm and mlx-vlm that are kept here, so that they need not be installed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from deepseek_v41 import arithmetic, golden, v4_kit, vision
from deepseek_v41.drafts import draft
from deepseek_v41.sequential import Forward, Run, Sequential
from deepseek_v41.v4 import SequentialV4
from deepseek_v41.weights_kit import bell, plan


@cache
def text() -> tuple[Sequential, Forward]:
    model = Sequential(plan("tiny", engram_layer_ids=[]), golden.weights(False), Run(caches=False))
    return model, model.forward(golden.text_ids())


@cache
def engram() -> Sequential:
    return Sequential(plan("tiny"), golden.weights(True), Run(caches=False), golden.SHUFFLED)


def test_they_were_made_from_these_weights() -> None:
    assert int(golden.numbers()["checksum"]) == golden.checksum(), (
        "weights or prompts have changed: run `python -m deepseek_v41.make_golden`"
    )
    assert golden.FILE.stat().st_size < 200 * 1024


@pytest.mark.parametrize("depth", golden.DEPTHS)
def test_logits_by_depth(depth: int) -> None:
    model, seen = text()
    wanted = golden.numbers()["mlx_lm.logits"][golden.DEPTHS.index(depth)]
    ours = model.head(*seen.inputs[depth])[list(golden.POSITIONS)][:, golden.COLUMNS]
    assert float((ours - wanted).abs().max()) <= golden.TOLERANCE


def test_logits_of_a_chunked_prompt() -> None:
    ours = text()[1].logits[list(golden.POSITIONS)][:, golden.COLUMNS]
    assert float((ours - golden.numbers()["mlx_lm.logits_in_chunks"]).abs().max()) <= golden.TOLERANCE


def test_roundings() -> None:
    rows, wanted = golden.rows_to_round(), golden.numbers()
    assert torch.equal(arithmetic.round_fp8(rows), wanted["mlx_lm.rounded_window"])
    assert torch.equal(arithmetic.round_fp4(rows), wanted["mlx_lm.rounded_entries"])
    assert torch.equal(arithmetic.round_mxfp4(rows), wanted["mlx_lm.rounded_index"])


def test_engram() -> None:
    ids, image, _ = golden.picture()
    streams = bell(golden.SEED, "streams", (golden.LENGTH, 4, 256))
    for table, layer in enumerate((1, 3)):
        rows = engram().engram_rows(table, ids, image)
        assert torch.equal(rows[~image], golden.numbers()["mlx_vlm.rows"][~image, table].long()) and (rows[image] == -1).all()
        added, gates = engram().engram_gate(streams, layer, rows)
        assert float((gates - golden.numbers()[f"mlx_vlm.gates_{layer}"])[~image].abs().max()) <= 2e-6
        kept = added[list(golden.POSITIONS)][:, :, golden.COLUMNS]
        assert float((kept - golden.numbers()[f"mlx_vlm.streams_{layer}"]).abs().max()) <= golden.TOLERANCE


def test_logits_with_engram_and_images() -> None:
    ids, image, span_rows = golden.picture()
    ours = engram().forward(ids, image=image, span_rows=span_rows).logits[list(golden.POSITIONS)][:, golden.COLUMNS]
    assert float((ours - golden.numbers()["mlx_vlm.logits_with_images"]).abs().max()) <= golden.TOLERANCE


def test_logits_with_engram() -> None:
    ours = Sequential(plan("tiny"), golden.weights(True), Run(caches=False)).forward(golden.text_ids())
    kept = ours.logits[list(golden.POSITIONS)][:, golden.COLUMNS]
    assert float((kept - golden.numbers()["mlx_vlm.logits"]).abs().max()) <= golden.TOLERANCE


@pytest.mark.parametrize(("high", "wide"), golden.GRIDS)
def test_rows_of_images(high: int, wide: int) -> None:
    sizes = plan("tiny").vision
    assert sizes is not None
    ours = vision.image_rows(golden.patches(high, wide), high, wide, golden.weights(True), sizes)
    assert float((ours - golden.numbers()[f"mlx_vlm.image_{high}x{wide}"]).abs().max()) <= golden.TOLERANCE


@pytest.mark.parametrize("name", ["full", "tiny"])
def test_grids_of_images(name: str) -> None:
    sizes = plan(name).vision
    assert sizes is not None
    for (width, height), wanted in zip(golden.SIZES, golden.numbers()[f"mlx_vlm.grids_{name}"].tolist(), strict=True):
        high, wide = vision.patch_grid(width, height, sizes)
        merged = (-(-high // sizes.merge), -(-wide // sizes.merge))
        assert [*merged, high * sizes.patch, wide * sizes.patch] == wanted, (width, height)
        assert vision.span_length(*merged) <= sizes.max_tokens


def test_drafts_of_v4() -> None:
    layout = v4_kit.read_plan(v4_kit.config(**v4_kit.DRAFTS))
    model = SequentialV4(layout, v4_kit.weights(layout, golden.SEED))
    for place, position in enumerate(golden.DRAFT_POSITIONS):
        call = draft(model, golden.draft_taps()[: position + 1], position)
        assert torch.equal(call.tokens, golden.numbers()["mlx_vlm.drafts"][place].long())
        assert float((call.base[:, golden.COLUMNS] - golden.numbers()["mlx_vlm.draft_logits"][place]).abs().max()) <= golden.TOLERANCE
