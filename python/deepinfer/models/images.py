"""An image between a request and the model that looks at it.

Owns: the prepared image, its place in a prompt and in a step, and what a family offers that takes images. Never touches: files, limits,
scheduling.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""``[height, width, 3]``, red, green, blue."""


@dataclass(frozen=True, eq=False)
class ImageInput:
    """An image as its model takes it. Pickles, so that it may go to another process.

    Attributes:
        pixels: of the final size.
        tokens: how many tokens of a prompt it takes.
        digest: 32 bytes that stand for size and pixels: equal ones are the same image.
    """

    pixels: Pixels
    tokens: int
    digest: bytes

    @classmethod
    def of(cls, pixels: Pixels, tokens: int) -> ImageInput:
        """With its digest: SHA-256 of height and width (8 bytes each, little endian) and the pixels row by row."""
        kept = np.ascontiguousarray(pixels)
        size = b"".join(int(n).to_bytes(8, "little") for n in kept.shape[:2])
        return cls(kept, tokens, hashlib.sha256(size + kept.tobytes()).digest())


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """An image and the first of the positions that it takes in a prompt."""

    start: int
    image: ImageInput

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + self.image.tokens


@dataclass(frozen=True, eq=False)
class ImagePiece:
    """Rows of a step that belong to an image: ``count`` of them from ``row`` on are the image's rows from ``first`` on."""

    image: ImageInput
    row: int
    first: int
    count: int


class ImageProcessor(Protocol):
    """How a family prepares images, on the host and without its weights. Must pickle: it is used in the caller's process.

    ``token`` is the id that all positions of an image have in a prompt, ``max_tokens`` the most that an image takes.
    """

    token: int
    max_tokens: int

    def final_tokens(self, height: int, width: int) -> int:
        """Tokens of a picture of this size as it is, for one that came prepared from elsewhere; 0 if the model cannot take it so."""

    def prepare(self, pixels: Pixels) -> ImageInput:
        """Scales and pads a picture of any size from 1 × 1 up. Raises ``ImageError`` where something needed is not installed."""


@runtime_checkable
class VisionModel(Protocol):
    """A model that takes images: its ``forward`` reads ``ForwardBatch.images``."""

    @property
    def image_processor(self) -> ImageProcessor | None:
        """``None`` where the checkpoint has no part for images."""
