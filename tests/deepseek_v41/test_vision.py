"""Images in DeepSeek-V4.1: the tower against the plain one, the model with images against the plain one, and against itself in every
other arrangement of the same rows.

Towers differ in the order of their sums: 1e-5 in float32 of numbers about 1. The paged forward is compared without rounding, as in
``test_forward``; everything else is bit for bit.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.errors import ImageError
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.image_input import ImageSizes
from deepinfer.models.deepseek_v41.vision import VisionTopology
from deepinfer.models.deepseek_v41.vision_forward import VisionTower, image_patches
from deepinfer.models.images import ImageInput, ImagePiece, ImageSpan, Pixels
from deepseek_v41 import vision
from deepseek_v41.forward_kit import Bench, make_model
from deepseek_v41.sequential import Run, Sequential
from deepseek_v41.weights_kit import RandomWeights, plan, random_ids

SEED = 3
SIZES = ((42, 42), (56, 70), (14, 126), (98, 56))


@cache
def exact_plan() -> Any:
    """Plain weights, nothing is rounded."""
    return plan("tiny", x_cache_quant="none", quantization_config=None)


@cache
def weights(released: bool = False) -> RandomWeights:
    return RandomWeights(plan("tiny") if released else exact_plan(), SEED, released=released)


def of_tower() -> VisionTopology:
    t: VisionTopology = exact_plan().vision
    return t


@cache
def tower(dtype: torch.dtype, device: str) -> VisionTower:
    """Only the tower's weights are filled in."""
    parameters = DeepseekV41Parameters(exact_plan(), dtype, torch.device(device))
    for name in parameters.parameter_shapes():
        if name.startswith(("vision.", "aligner.", "image_")):
            parameters.parameter(name).copy_(weights()[name])
    return VisionTower(parameters, of_tower(), dtype)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    """Some pixels."""
    return np.random.RandomState([seed, height, width]).randint(0, 256, (height, width, 3)).astype(np.uint8)


def image(height: int, width: int, seed: int = 0) -> ImageInput:
    """A picture that has a size of whole patches already."""
    return ImageInput.of(picture(height, width, seed), ImageSizes.of(of_tower()).tokens(height, width))


def plain_patches(pixels: Pixels) -> torch.Tensor:
    """Numbers of each patch in reading order, by channel, row and column: from −1 (0) to 1 (255)."""
    size, found = of_tower().patch, []
    for down in range(0, pixels.shape[0], size):
        for across in range(0, pixels.shape[1], size):
            part = pixels[down : down + size, across : across + size]
            found.append([int(value) / 127.5 - 1 for channel in range(3) for row in part for value in row[:, channel]])
    return torch.tensor(found)


def plain_span(pixels: Pixels) -> torch.Tensor:
    """Rows of all positions of an image, by the plain tower."""
    high, wide = pixels.shape[0] // of_tower().patch, pixels.shape[1] // of_tower().patch
    rows = vision.image_rows(plain_patches(pixels), high, wide, weights(), of_tower())
    return vision.span_rows(rows, -(-wide // of_tower().merge), weights())


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_those_of_the_plain_tower(size: tuple[int, int], device: str) -> None:
    pixels, patch = picture(*size), of_tower().patch
    ours = tower(torch.float32, device)
    assert (image_patches(torch.from_numpy(pixels), patch) - plain_patches(pixels)).abs().max() < 1e-6
    theirs = vision.tower(plain_patches(pixels), size[0] // patch, size[1] // patch, weights(), of_tower())
    assert (ours.patches(torch.from_numpy(pixels).to(device)).cpu() - theirs).abs().max() < 1e-5
    rows = ours.span(image(*size)).cpu()
    assert rows.shape == (ImageSizes.of(of_tower()).tokens(*size), exact_plan().hidden)
    plainly = plain_span(pixels)
    assert (rows - plainly).abs().max() < 1e-5 * plainly.abs().max()
    rounded = tower(torch.bfloat16, device).span(image(*size)).float().cpu()
    assert (rounded - plainly).abs().max() < 0.05 * plainly.abs().max() and (rounded != plainly).any()


def test_where_a_patch_stands_and_what_it_shows_matter(device: str) -> None:
    ours, pixels = tower(torch.float32, device), picture(42, 84)
    rows = ours.span(ImageInput.of(pixels, 8))
    assert torch.equal(rows[[0, 3, 4]].cpu(), torch.stack([weights()[f"image_{name}"] for name in ("start", "newline", "end")]))
    swapped = pixels.copy()
    swapped[:, :42], swapped[:, 42:] = pixels[:, 42:], pixels[:, :42]
    assert not torch.equal(ours.span(ImageInput.of(swapped, 8))[[2, 1]], rows[[1, 2]])
    assert ImageInput.of(swapped, 8).digest != ImageInput.of(pixels, 8).digest == ImageInput.of(pixels.copy(), 8).digest
    assert ImageInput.of(pixels.reshape(84, 42, 3), 8).digest != ImageInput.of(pixels, 8).digest, "size is part of it"


def test_the_latest_images_are_kept_within_a_bound() -> None:
    parameters = DeepseekV41Parameters(exact_plan(), torch.float32, "cpu")
    for name in parameters.parameter_shapes():
        parameters.parameter(name).zero_()
    row = exact_plan().hidden * 4
    ours = VisionTower(parameters, of_tower(), torch.float32, cache_bytes=9 * row)
    first, second, third, large = image(42, 42), image(42, 42, 1), image(42, 42, 2), image(84, 126)
    for wanted, computed in ((first, 1), (first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4), (large, 5), (second, 5)):
        ours.span(wanted)
        assert ours.computed == computed


@cache
def model(released: bool, dtype: torch.dtype, device: str) -> DeepseekV41Model:
    return make_model(plan("tiny") if released else exact_plan(), weights(released), dtype, device)


def prompt(seed: int = 0, behind: int = 12) -> tuple[torch.Tensor, list[ImageSpan]]:
    """10 tokens, an image of 8, five tokens, one of 4 and right behind it one of 12, then ``behind`` tokens."""
    ids, spans, at = [random_ids(exact_plan(), 10, seed)], [], 10
    for between, size in ((0, (56, 70)), (5, (42, 42)), (0, (14, 126))):
        ids.append(random_ids(exact_plan(), between, seed + 1) if between else torch.empty(0, dtype=torch.int64))
        shown = image(*size, seed)
        spans.append(ImageSpan(at + between, shown))
        ids.append(torch.full((shown.tokens,), of_tower().image_token))
        at = spans[-1].end
    return torch.cat([*ids, random_ids(exact_plan(), behind, seed + 2)]), spans


def mask(ids: torch.Tensor, spans: list[ImageSpan]) -> torch.Tensor:
    shown = torch.zeros(len(ids), dtype=torch.bool)
    for span in spans:
        shown[span.start : span.end] = True
    return shown


def test_logits_with_images_are_those_of_the_reference(device: str) -> None:
    ids, spans = prompt()
    rows = torch.cat([plain_span(span.image.pixels) for span in spans])
    plainly = Sequential(exact_plan(), weights(), Run(caches=False))
    theirs = plainly.forward(ids, image=mask(ids, spans), span_rows=rows).logits
    ours = Bench(model(False, torch.float32, device)).prefill(ids, images=spans)[1].cpu()
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max().clamp_min(3)
    # the rows, the bias of the router and the end of n-grams matter: with neither of the last two it is far off
    as_text = plainly.forward(ids, image=None).logits
    assert (as_text - theirs)[-1].abs().max() > 1e-2


@pytest.mark.parametrize(
    ("released", "dtype"),
    [
        pytest.param(False, torch.float32, marks=pytest.mark.nightly),
        pytest.param(True, torch.float32, marks=pytest.mark.nightly),
        (True, torch.bfloat16),
    ],
)
def test_bits_do_not_depend_on_chunks_and_neighbours(released: bool, dtype: torch.dtype, device: str) -> None:
    m = model(released, dtype, device)
    prompts = [prompt(seed, behind=3 + 5 * seed) for seed in range(2)]
    alone = [Bench(m).prefill(ids, images=spans)[1] for ids, spans in prompts]
    for chunk, (ids, spans), whole in zip((7, 15), prompts, alone, strict=True):
        assert torch.equal(Bench(m, shuffle=chunk).prefill(ids, chunk, images=spans)[1], whole), chunk
    rng, bench = random.Random(1), Bench(m, shuffle=5)
    text = random_ids(exact_plan(), 25, 9)
    runs = [bench.start(ids, images=spans) for ids, spans in prompts] + [bench.start(text)]
    out: list[list[torch.Tensor]] = [[] for _ in runs]
    while work := [
        (k, min(len(run.tokens) - run.done, rng.choice([2, 6, 19]))) for k, run in enumerate(runs) if run.done < len(run.tokens)
    ]:
        for (k, _), logits in zip(work, bench.step([(runs[k], count) for k, count in work]), strict=True):
            out[k].append(logits)
    for rows, whole in zip(out, [*alone, Bench(m).prefill(text)[1]], strict=True):
        assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("truncation", ["mask", "compact"])
def test_truncated_prefill_shows_images_too(truncation: Any) -> None:
    ids, spans = prompt()
    m = model(True, torch.float32, "cpu")
    last = []
    for keep, chunk in ((len(ids), None), (31, None), (31, 11)):
        bench = Bench(m, truncation=truncation, keep=keep)
        last.append(bench.prefill(ids, chunk, images=spans)[1][-1])
    assert torch.equal(last[1], last[2])
    assert torch.equal(last[0], Bench(m).prefill(ids, images=spans)[1][-1])


def test_pieces_of_images_may_lie_anywhere_in_a_step() -> None:
    ours, shown = tower(torch.float32, "cpu"), image(56, 70)
    embedded = torch.zeros(12, exact_plan().hidden)
    marked = ours.place(embedded, [ImagePiece(shown, 2, 3, 2), ImagePiece(shown, 6, 0, 6)])
    assert marked.nonzero().flatten().tolist() == [2, 3, 6, 7, 8, 9, 10, 11]
    assert torch.equal(embedded[2:4], ours.span(shown)[3:5]) and torch.equal(embedded[6:], ours.span(shown)[:6])
    assert not embedded[[0, 1, 4, 5]].any()


def test_sizes_are_those_of_the_plain_rule() -> None:
    draw = np.random.RandomState(0)
    for name in ("tiny", "full"):
        t = plan(name).vision
        assert t is not None
        sizes = ImageSizes.of(t)
        for height, width in np.exp(draw.uniform(0, 11, (2000, 2))).astype(int).tolist():
            high, wide = sizes.target(height, width)
            assert (high // t.patch, wide // t.patch) == vision.patch_grid(width, height, t), (height, width)
            assert sizes.tokens(high, wide) == vision.span_length(-(-high // sizes.cell), -(-wide // sizes.cell))


@pytest.mark.parametrize("name", ["tiny", "full"])
@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (100, 43_000), (43_000, 100), (2000, 2000)])
def test_pictures_of_any_shape_come_to_a_size_that_fits(name: str, size: tuple[int, int]) -> None:
    """One pixel, lines, and what is larger than any image may be: at most as many tokens as allowed, and something to see."""
    t = plan(name).vision
    assert t is not None
    sizes = ImageSizes.of(t)
    made = sizes.prepare(np.full((*size, 3), 255, np.uint8))
    assert 4 <= made.tokens <= sizes.max_tokens and sizes.final_tokens(*made.pixels.shape[:2]) == made.tokens
    assert int(made.pixels.max()) == 255


@pytest.mark.parametrize("size", [(1, 4_000_000), (4_000_000, 1), (2, 2_000_000)])
def test_a_picture_of_which_nothing_would_be_left_is_refused(size: tuple[int, int]) -> None:
    t = plan("full").vision
    assert t is not None
    with pytest.raises(ImageError, match=f"{size[1]} x {size[0]} pixels .* less than a pixel: crop it"):
        ImageSizes.of(t).prepare(np.zeros((*size, 3), np.uint8))
