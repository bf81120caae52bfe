"""Images in a hand-over record: pixels come as they were, and what cannot be is refused before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.image_input import check_handed_images
from deepinfer.errors import HandoverError
from deepinfer.kvcache.handover import _HEAD, Handover
from deepinfer.models.deepseek_v41.image_input import ImageSizes
from deepinfer.models.images import ImageInput, ImageSpan
from deepinfer.sampling import SamplingParams

TOKEN = 9
SIZES = ImageSizes(token=TOKEN, max_tokens=20, patch=2, merge=2, min_pixels=1)


def image(high: int, wide: int, seed: int) -> ImageInput:
    return SIZES.prepare(np.random.RandomState(seed).randint(0, 256, (high, wide, 3)).astype(np.uint8))


FIRST, SECOND = ImageSpan(1, image(4, 6, 0)), ImageSpan(8, image(2, 2, 1))


def record(images: tuple[ImageSpan, ...] = (FIRST, SECOND)) -> Handover:
    ids = [5] * 20
    for span in images:
        ids[span.start : span.end] = [TOKEN] * span.image.tokens
    return Handover("r", ids, [8], 20, SamplingParams(), 3, 20, {"model": "tiny"}, images=images, ticket=b"ticket")


def spoilt(change: Callable[[dict[str, Any]], None]) -> bytes:
    """The record with its JSON part changed, lengths made right."""
    data = record().to_bytes()
    magic, version, zero, size, prompt, produced = _HEAD.unpack_from(data)
    said = json.loads(data[_HEAD.size : _HEAD.size + size])
    change(said)
    text = json.dumps(said).encode()
    return _HEAD.pack(magic, version, zero, len(text), prompt, produced) + text + data[_HEAD.size + size :]


def test_images_come_as_they_went() -> None:
    found = Handover.from_bytes(record().to_bytes())
    assert [(s.start, s.image.tokens, s.image.digest) for s in found.images] == [
        (s.start, s.image.tokens, s.image.digest) for s in (FIRST, SECOND)
    ]
    for span, given_span in zip(found.images, (FIRST, SECOND), strict=True):
        assert np.array_equal(span.image.pixels, given_span.image.pixels)
    assert found.digest() == record().digest()
    others = (record(()), record((FIRST,)), record((FIRST, ImageSpan(9, SECOND.image))), record((FIRST, ImageSpan(8, image(2, 2, 2)))))
    assert len({r.digest() for r in (found, *others)}) == 5
    check_handed_images(found.images, found.prompt_ids, SIZES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["images"][0].__setitem__(0, -1), "takes"),
        (lambda s: s["images"][1].__setitem__(0, 2), "overlaps"),
        (lambda s: s["images"][1].__setitem__(0, 18), "leaves the prompt"),
        (lambda s: s["images"].reverse(), "digest"),
        (lambda s: s["images"][0].__setitem__(1, 0), "takes 0 tokens"),
        (lambda s: s["images"][0].__setitem__(2, 2**40), "pixels"),
        (lambda s: s["images"][0].__setitem__(2, 6), "cut, or something"),
        (lambda s: s["images"][0].__setitem__(3, True), "number"),
        (lambda s: s["images"][0].__setitem__(3, 6.0), "number"),
        (lambda s: s["images"][0].__setitem__(slice(2, 4), [6, 4]), "digest"),
        (lambda s: s["images"][0].__setitem__(4, SECOND.image.digest.hex()), "digest"),
        (lambda s: s["images"][0].__setitem__(4, 7), "described"),
        (lambda s: s["images"].pop(), "cut, or something"),
        (lambda s: s["images"].append("x"), "described"),
        (lambda s: s.__setitem__("images", {}), "no list"),
        (lambda s: s.pop("images"), "images"),
    ],
)
def test_images_that_cannot_be_are_refused(change: Callable[[dict[str, Any]], None], said: str) -> None:
    with pytest.raises(HandoverError, match=said):
        Handover.from_bytes(spoilt(change))


def test_pixels_that_are_cut_or_added_to_are_refused() -> None:
    data = record().to_bytes()
    for bad in (data[:-1], data + b"\0", data[: -SECOND.image.pixels.nbytes], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(HandoverError):
            Handover.from_bytes(bad)


@given(st.integers(0, len(record().to_bytes()) - 1), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_changed_byte_is_another_record_or_a_typed_error(at: int, change: int) -> None:
    data = bytearray(record().to_bytes())
    data[at] ^= change
    try:
        found = Handover.from_bytes(bytes(data))
    except HandoverError:
        return
    assert found.digest() != record().digest() or found.ticket != record().ticket or found.to_bytes() == record().to_bytes()


def test_images_must_be_such_as_the_model_takes() -> None:
    ids = record().prompt_ids
    with pytest.raises(HandoverError, match="takes none"):
        check_handed_images((FIRST,), ids, None)
    for high, wide, tokens in ((5, 6, 8), (4, 6, 6), (2, 2, 5), (40, 40, 112)):
        odd = ImageInput.of(np.zeros((high, wide, 3), np.uint8), tokens)
        with pytest.raises(HandoverError, match="no size"):
            check_handed_images((ImageSpan(0, odd),), [TOKEN] * 200, SIZES)
    with pytest.raises(HandoverError, match="at token 8, where the prompt shows none"):
        check_handed_images((FIRST, SECOND), [*ids[:9], 5, *ids[10:]], SIZES)
    check_handed_images((), ids, None)
