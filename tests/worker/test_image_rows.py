"""Which rows of a step are those of images, from a ring slot as the core fills it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from deepinfer.models.images import ImageInput, ImageSpan
from deepinfer.worker.image_rows import ImageRows, without_images


def span(start: int, tokens: int) -> ImageSpan:
    return ImageSpan(start, ImageInput.of(np.full((tokens, 1, 3), start, np.uint8), tokens))


def pieces(images: ImageRows, *work: tuple[int, int, int]) -> list[tuple[ImageInput, int, int, int]]:
    """Of sequences (state slot, first position, rows)."""
    rows = [count for _, _, count in work]
    a = {
        "state_row": np.array([slot for slot, _, _ in work]),
        "cu_q": np.cumsum([0, *rows]),
        "pos": np.concatenate([np.arange(first, first + count) for _, first, count in work]),
    }
    slot: Any = SimpleNamespace(a=a)
    header: Any = SimpleNamespace(seqs=len(work))
    return [(piece.image, piece.row, piece.first, piece.count) for piece in images.pieces(slot, header)]


def test_rows_of_a_step_are_matched_by_position() -> None:
    images, first, second = ImageRows(), span(3, 4), span(7, 2)
    images.admit(5, [first, second])
    images.admit(6, [])
    assert pieces(images, (6, 0, 2), (5, 0, 3)) == []
    assert pieces(images, (5, 0, 8), (6, 2, 1)) == [(first.image, 3, 0, 4), (second.image, 7, 0, 1)]
    assert pieces(images, (6, 3, 2), (5, 5, 2)) == [(first.image, 2, 2, 2)], "behind a hit"
    assert pieces(images, (6, 5, 1), (5, 8, 3)) == [(second.image, 1, 1, 1)]
    assert pieces(images, (5, 0, 8)) == [], "past its last image nothing is remembered"
    images.admit(5, [first])
    assert pieces(images, (5, 0, 4)) == [(first.image, 3, 0, 1)], "computed again"
    images.admit(5, [])
    assert pieces(images, (5, 0, 4)) == [], "another sequence has the slot"


def test_ids_before_a_start_show_no_image() -> None:
    spans = [span(3, 4), span(9, 1)]
    assert without_images([11, 12, 13], 3, spans) == [11, 12, 13]
    assert without_images([11, 12, 13], 5, spans) == [11, -1, -1]
    assert without_images([11, 12, 13], 10, spans) == [11, 12, -1]
    assert without_images([11], 1, ()) == [11]
