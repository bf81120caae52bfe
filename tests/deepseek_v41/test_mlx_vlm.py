"""The reference against mlx-vlm with the same random weights: Engram, image spans, and the roundings of activations.

mlx-vlm rounds caches and the inputs of quantised products, or neither. Without roundings logits agree to float32 noise; with them
layers are compared one by one, since a last-bit difference may flip a rounding (see ``test_mlx_lm``).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from deepseek_v41 import vision
from deepseek_v41.compare import check_shared
from deepseek_v41.sequential import Run, Sequential, Shared
from deepseek_v41.weights_kit import RandomWeights, bell, config, full_width, full_width_config, plan, random_ids

if TYPE_CHECKING:
    from deepseek_v41.mlx_vlm_kit import Oracle

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5
SHUFFLED = (torch.arange(2048) * 37 + 5) % 2048
"""A token map that is not the identity, so that the pad's compressed id differs from its token id."""


@cache
def oracle(name: str, seed: int) -> Oracle:
    for needed in ("mlx.core", "PIL"):
        pytest.importorskip(needed, reason="needs mlx and Pillow, which `make oracle` installs")
    from deepseek_v41 import mlx_vlm_kit

    try:
        mlx_vlm_kit.module("language")
    except ModuleNotFoundError as error:
        pytest.skip(f"needs mlx-vlm 0.7, which `make oracle` installs: {error}")
    return mlx_vlm_kit.Oracle(config(name), weights(name, seed), SHUFFLED.tolist())


@cache
def weights(name: str, seed: int) -> RandomWeights:
    return RandomWeights(plan(name), seed, released=True)


def reference(name: str, seed: int, rounded: bool) -> Sequential:
    return Sequential(plan(name), weights(name, seed), Run(caches=rounded, activations=rounded), SHUFFLED)


@cache
def prompt(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, where two images are, and rows for these."""
    length = {"tiny": 90, "tiny128": 300}[name]
    ids, image = random_ids(plan(name), length, seed), torch.zeros(length, dtype=torch.bool)
    image[1:4] = image[30:42] = True
    ids[image] = config(name)["image_token_id"]
    return ids, image, torch.randn(15, plan(name).hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunks", [None, (7, 1, 12, 70), (89, 1)])
@pytest.mark.parametrize("images", [False, True])
def test_hashes_are_equal(chunks: tuple[int, ...] | None, images: bool) -> None:
    ids, image, _ = prompt("tiny", 1)
    span = image if images else None
    theirs = oracle("tiny", 1).hashes(ids, span, chunks)
    for table in range(2):
        ours = reference("tiny", 1, False).engram_rows(table, ids, span)
        alive = torch.ones_like(image) if span is None else ~image
        assert torch.equal(ours[alive], theirs[alive, table])
        # theirs has rows for dead tokens too, and never uses them
        assert (ours[~alive] == -1).all()


@pytest.mark.parametrize("rounded", [False, True])
def test_gated_values_are_close(rounded: bool) -> None:
    theirs, model = oracle("tiny", 1), reference("tiny", 1, rounded)
    from deepseek_v41.mlx_vlm_kit import roundings

    ids, image, rows = prompt("tiny", 1)
    seen = model.forward(ids, image=image, span_rows=rows)
    for table, layer in enumerate((1, 3)):
        found, streams = model.engram_rows(table, ids, image), seen.inputs[layer][0]
        with roundings(rounded):
            wanted = theirs.engram(layer, streams, found.clamp_min(0), image)
        ours = model.add_engram(streams, layer, found)
        assert float((ours - wanted).abs().max()) <= TOLERANCE
        assert torch.equal(ours[image], streams[image]) and float((ours - streams)[~image].abs().mean()) > 0.1


@cache
def full_width_engram() -> dict[str, torch.Tensor]:
    made = RandomWeights(full_width(), 1, released=True)
    return {name: made[name] for name in made if name.startswith("layers.1.engram.")}


@pytest.mark.parametrize("rounded", [False, True])
def test_gated_values_at_full_width_are_close(rounded: bool) -> None:
    oracle("tiny", 1)  # skips where there is none
    from deepseek_v41.mlx_vlm_kit import engram_alone, roundings

    layout, fields, used = full_width(), full_width_config(), full_width_engram()
    model = Sequential(layout, used, Run(activations=rounded))
    rows = model.engram_rows(0, random_ids(layout, 12, 1))
    streams = bell(1, "streams", (12, layout.streams, layout.hidden))
    with roundings(rounded):
        wanted = engram_alone(fields, 1, used, streams, rows)
    assert rows.shape == (12, 24) and float((model.add_engram(streams, 1, rows) - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("name", "chunks"), [("tiny", None), ("tiny", (45, 45)), ("tiny", (29, 14, *[1] * 47)), ("tiny128", (140, 160))])
def test_logits_agree(name: str, seed: int, chunks: tuple[int, ...] | None) -> None:
    theirs = oracle(name, seed)
    from deepseek_v41.mlx_vlm_kit import roundings

    ids, image, rows = prompt(name, seed)
    with roundings(False):
        wanted = theirs.logits(ids, rows, chunks)
    ours = reference(name, seed, False).forward(ids, image=image, span_rows=rows).logits
    assert float((ours - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_layers_agree_with_all_roundings(name: str) -> None:
    theirs, model = oracle(name, 1), reference(name, 1, True)
    from deepseek_v41.mlx_vlm_kit import roundings

    ids, image, rows = prompt(name, 1)
    seen = model.forward(ids, image=image, span_rows=rows)
    state, shared, source = theirs.text.make_cache()[0], Shared(), model.topology.shared.candidate_source
    with roundings(True):
        for layer, (streams, pre) in enumerate(seen.inputs[:-1]):
            table = model.topology.layers[layer].engram
            if table is not None:
                streams = model.add_engram(streams, layer, model.engram_rows(table, ids, image))
            wanted, wanted_pre = theirs.layer(layer, streams, pre, image, state, shared)
            out = model.layer(layer, streams, pre, shared.copy(), image=image)
            error = torch.maximum((out.streams - wanted).abs().amax((1, 2)), (out.pre - wanted_pre).abs().amax(1))
            # what remains are flips in the inputs of products, which stay within their token
            assert float((error > TOLERANCE).float().mean()) <= 0.05, layer
            assert float(error.max()) < 0.5, layer
            made = shared.without(layer, source)
            model.layer(layer, streams, pre, made, image=image)
            check_shared(made, shared, layer, layer == source, values=0.02)


@pytest.mark.parametrize(("high", "wide"), [(1, 1), (2, 7), (9, 9), (10, 4)])
def test_images_give_the_same_rows_and_spans(high: int, wide: int) -> None:
    theirs, sizes = oracle("tiny", 1), plan("tiny").vision
    from deepseek_v41.mlx_vlm_kit import module

    assert sizes is not None
    patches = bell(high, f"patches {wide}", (high * wide, sizes.patch_values)).clamp(-1, 1)
    rows = vision.image_rows(patches, high, wide, weights("tiny", 1), sizes)
    assert float((rows - theirs.image_rows(patches, high, wide)).abs().max()) <= TOLERANCE
    merged = (-(-high // sizes.merge), -(-wide // sizes.merge))
    span = vision.span_rows(rows, merged[1], weights("tiny", 1))
    assert span.shape[0] == vision.span_length(*merged)
    assert (
        float((span - theirs.span_rows(patches, high, wide, module("processing_deepseek_v41").image_token_types(*merged))).abs().max())
        <= TOLERANCE
    )
