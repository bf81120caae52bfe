"""Images for DeepSeek-V4.1 before its tower: the size they are brought to, and the tokens this takes.

Sizes are those of the release's own processing: small images are scaled up to a least number of pixels, both sides go up to whole
patches, and what would take too many tokens is scaled down. The picture is fitted into that size and padded with grey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...errors import ImageError
from ..images import ImageInput, Pixels
from .vision import VisionTopology

_GREY = (127, 127, 127)
NEEDS_PILLOW = "images need Pillow, which is not installed; install it with: pip install 'deepinfer[images]'"


@dataclass(frozen=True)
class ImageSizes:
    """See ``models.images.ImageProcessor``."""

    token: int
    max_tokens: int
    patch: int
    merge: int
    min_pixels: int

    @classmethod
    def of(cls, topology: VisionTopology) -> ImageSizes:
        """For a tower."""
        t = topology
        return cls(t.image_token, t.max_tokens, t.patch, t.merge, t.min_pixels)

    @property
    def cell(self) -> int:
        """Pixels a side of what becomes one row of the language model."""
        return self.patch * self.merge

    def tokens(self, height: int, width: int) -> int:
        """Tokens of an image of whole patches: a line per row of cells with one token behind it, and one at either end."""
        return -(-height // self.cell) * (-(-width // self.cell) + 1) + 2

    def final_tokens(self, height: int, width: int) -> int:
        """See ``models.images.ImageProcessor``: sides in whole patches, and not too many tokens."""
        whole = height > 0 and width > 0 and not height % self.patch and not width % self.patch
        tokens = self.tokens(height, width)
        return tokens if whole and tokens <= self.max_tokens else 0

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Pixels (height, width), whole patches, that a picture of this size is brought to."""
        if height * width < self.min_pixels:
            up = (self.min_pixels / (width * height)) ** 0.5
            height, width = int(height * up), int(width * up)
        whole = [-(-side // self.patch) * self.patch for side in (height, width)]
        if self.tokens(*whole) <= self.max_tokens:
            return whole[0], whole[1]
        return self._smaller(height, width)

    def _smaller(self, height: int, width: int) -> tuple[int, int]:
        """The largest size of about these proportions that takes at most ``max_tokens``.

        With ``h = r w`` cells a side, ``h (w + 1) = max_tokens - 2`` gives ``w = sqrt((max_tokens - 2) / r + 1/4) - 1/2``. What would be
        narrower than a cell is one line of cells.
        """
        ratio = height / width
        across = math.sqrt((self.max_tokens - 2) / ratio + 0.25) - 0.5
        down = across * ratio
        if across < 1:
            return (self.max_tokens - 2) // 2 * self.cell, self.cell
        if down < 1:
            return self.cell, (self.max_tokens - 3) * self.cell
        scale = min(math.floor(across) * self.cell / width, math.floor(down) * self.cell / height)
        return math.floor(height * scale / self.patch) * self.patch, math.floor(width * scale / self.patch) * self.patch

    def prepare(self, pixels: Pixels) -> ImageInput:
        """Bicubic scaling to fit, in the middle of grey. A picture that has its size already needs no Pillow.

        Raises:
            ImageError: Pillow is not installed, or the picture is so thin that scaling leaves nothing of it.
        """
        high, wide = pixels.shape[:2]
        height, width = self.target(high, wide)
        if (high, wide) != (height, width):
            if round(min(high, wide) * min(height / high, width / wide)) < 1:
                raise ImageError(
                    f"an image of {wide} x {high} pixels is brought to {width} x {height}, where its shorter side would be less than a "
                    "pixel: crop it, or scale it to a shape that is less extreme"
                )
            try:
                from PIL import Image, ImageOps
            except ImportError:
                raise ImageError(NEEDS_PILLOW) from None
            pixels = np.asarray(ImageOps.pad(Image.fromarray(pixels), (width, height), color=_GREY))
        return ImageInput.of(pixels, self.tokens(height, width))
