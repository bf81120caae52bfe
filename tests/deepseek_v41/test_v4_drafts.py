"""Draft stages by the plain reference against mlx-vlm's for DeepSeek-V4.

For V4.1's stages no other implementation was found. They share ``drafts.draft`` with V4's, where the block, its context, its positions
and the Markov head are the same; what differs (mixes, the norm of queries, the head's collapse) the layers' comparisons cover.
"""

from __future__ import annotations

import pytest
import torch

from deepseek_v41 import v4_kit
from deepseek_v41.drafts import draft
from deepseek_v41.v4 import SequentialV4
from deepseek_v41.weights_kit import bell

POSITIONS = 24
"""More than the window of 16."""


def _model(seed: int) -> SequentialV4:
    plan = v4_kit.read_plan(v4_kit.config(**v4_kit.DRAFTS))
    return SequentialV4(plan, v4_kit.weights(plan, seed))


@pytest.mark.oracle
@pytest.mark.parametrize("seed", [1, 2])
def test_drafts_agree_at_every_position(seed: int) -> None:
    for needed in ("mlx.core", "PIL"):
        pytest.importorskip(needed, reason="needs mlx and Pillow, which `make oracle` installs")
    try:
        from deepseek_v41.mlx_vlm_drafts_kit import Drafter

        theirs = Drafter(v4_kit.config(**v4_kit.DRAFTS), _model(seed).topology, _model(seed).weights)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs mlx-vlm 0.7, which `make oracle` installs: {error}")
    model = _model(seed)
    taps = bell(seed, "taps", (POSITIONS, 3, model.topology.hidden))
    for position in range(POSITIONS):
        anchor = (position * 37 + seed) % 500
        tokens, base = theirs.step(taps[position], anchor)
        ours = draft(model, taps[: position + 1], anchor)
        assert float((ours.base - base).abs().max()) <= 1e-5, position
        assert torch.equal(ours.tokens, tokens), position


def test_drafts_depend_on_the_window_and_on_the_whole_block() -> None:
    model = _model(1)
    taps = bell(1, "taps", (POSITIONS, 3, model.topology.hidden))
    seen, window = draft(model, taps, 9), model.topology.attention.window
    assert torch.allclose(draft(model, taps[-window:], 9, first=POSITIONS - window).base, seen.base, atol=1e-5)
    assert float((draft(model, taps[1 - window :], 9, first=POSITIONS - window + 1).base - seen.base).abs().max()) > 1e-3
    # the first place sees the noise behind it
    other = {**model.weights, "embed.weight": model.weights["embed.weight"].clone()}
    other["embed.weight"][511] += 1
    assert float((draft(SequentialV4(model.topology, other), taps, 9).base[0] - seen.base[0]).abs().max()) > 1e-2
