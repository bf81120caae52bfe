"""Images of a prompt in a hand-over record: where they stand, what they are, and their pixels.

Owns: their form as bytes, and every check that needs no model. Never touches: what sizes a model takes.

Pixels travel because rows may have to be computed again where the sequence goes on: after a preemption, or if its KV is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.models.images import ImageInput, ImageSpan

_LONGEST_SIDE = 1 << 20


def describe_images(spans: Sequence[ImageSpan]) -> list[list[Any]]:
    """Of each image start, tokens, height, width and digest (hexadecimal), as JSON values."""
    return [[s.start, s.image.tokens, *s.image.pixels.shape[:2], s.image.digest.hex()] for s in spans]


def pack_pixels(spans: Sequence[ImageSpan]) -> bytes:
    """Pixels of all images, one after the other, row by row."""
    return b"".join(np.ascontiguousarray(s.image.pixels).tobytes() for s in spans)


def pixel_bytes(said: Any) -> int:
    """Bytes that the pixels of described images take.

    Raises:
        ValueError: this describes no images.
    """
    if not isinstance(said, list):
        raise ValueError("its images are no list")
    total = 0
    for place, image in enumerate(said):
        if not isinstance(image, list) or len(image) != 5 or not isinstance(image[4], str):
            raise ValueError(f"image {place} is not described by start, tokens, height, width and digest")
        if any(not isinstance(n, int) or isinstance(n, bool) for n in image[:4]):
            raise ValueError(f"image {place} has a number that is none")
        start, tokens, height, width = image[:4]
        if start < 0 or tokens < 1 or not (0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE):
            raise ValueError(f"image {place} takes {tokens} tokens from {start} on with {height} x {width} pixels")
        total += 3 * height * width
    return total


def unpack_images(said: list[list[Any]], pixels: memoryview, prompt: int) -> tuple[ImageSpan, ...]:
    """Images that :func:`pixel_bytes` has passed, from exactly so many bytes, in a prompt of ``prompt`` tokens.

    Raises:
        ValueError: they overlap, leave the prompt, or are not the pictures that their digests name.
    """
    spans: list[ImageSpan] = []
    behind = at = 0
    for place, (start, tokens, height, width, digest) in enumerate(said):
        if start < behind or start + tokens > prompt:
            raise ValueError(f"image {place} takes tokens {start} to {start + tokens - 1}, which overlaps another or leaves the prompt")
        behind, shape = start + tokens, (height, width, 3)
        picture = np.frombuffer(pixels, np.uint8, math.prod(shape), at).reshape(shape)
        at += picture.nbytes
        image = ImageInput.of(picture, tokens)
        if image.digest.hex() != digest:
            raise ValueError(f"the pixels of image {place} are not those that its digest names")
        spans.append(ImageSpan(start, image))
    return tuple(spans)
