"""The vision tower and the aligner: from an image's pixels to the rows that stand in its prompt.

Each image is computed by itself, whatever else a step holds, so its rows have the same bits every time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...kernels.grid_attention import grid_angles, grid_attention, grid_table
from ...kernels.rms_norm import rms_norm
from ...kernels.swiglu import swiglu
from ...platforms import to_device
from ..images import ImageInput, ImagePiece
from .containers import DeepseekV41Parameters
from .vision import VisionTopology

_EPS = 1e-6
"""Of the tower's norms; the language model's is another."""
ROW_CACHE_BYTES = 1 << 28
"""Rows of images kept for requests that come back or show the same image: 25 of the largest in the full model."""


def image_patches(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """uint8 ``[H, W, 3]``, sides in whole patches → float32 ``[H W / patch², 3 patch²]`` in −1 … 1.

    Patches in reading order; numbers of one by channel, then row, then column.
    """
    scaled = (pixels.float() / 255 - 0.5) / 0.5
    grid = scaled.unflatten(1, (-1, patch)).unflatten(0, (-1, patch))  # down, y, across, x, channel
    return grid.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


def merge_patches(x: torch.Tensor, high: int, wide: int, merge: int) -> torch.Tensor:
    """``[high * wide, C]`` → ``[ceil(high / merge) * ceil(wide / merge), C merge²]``, zeros beyond the image's edge.

    Numbers of a merged row by channel, then row, then column of the patch.
    """
    grid = F.pad(x.view(high, wide, -1), (0, 0, 0, -wide % merge, 0, -high % merge))
    cells = grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # down, y, across, x, channel
    return cells.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)


class VisionTower:
    """In runtime layout; keeps the rows of the latest images. ``cache_bytes`` bounds these."""

    def __init__(self, p: DeepseekV41Parameters, topology: VisionTopology, dtype: torch.dtype, cache_bytes: int = ROW_CACHE_BYTES) -> None:
        if p.vision is None or p.image_start is None or p.image_newline is None or p.image_end is None:
            raise ValueError("the parameters have no vision tower")
        self._t, self._w, self._dtype = topology, p.vision, dtype
        self._angles = grid_table(topology.hidden // topology.heads, topology.rope_theta, p.image_start.device)
        self._ends = p.image_start, p.image_newline, p.image_end
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._left = cache_bytes
        self.computed = 0
        """Images that went through the tower."""

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._w[f"{name}.weight"], self._w.tensors.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._w[f"{name}.weight"], _EPS)

    def patches(self, pixels: torch.Tensor) -> torch.Tensor:
        """The tower alone: uint8 ``[H, W, 3]`` on its device → ``[patches, hidden]`` in the run dtype."""
        t = self._t
        high, wide = pixels.shape[0] // t.patch, pixels.shape[1] // t.patch
        cos, sin = grid_angles(high, wide, self._angles)
        x = self._linear(image_patches(pixels, t.patch).to(self._dtype), "vision.patch_embed.proj")
        for index in range(t.layers):
            block = f"vision.blocks.{index}"
            q, k, v = self._linear(self._norm(x, f"{block}.norm1"), f"{block}.attn.wqkv").unflatten(1, (3, t.heads, -1)).unbind(1)
            x = x + self._linear(grid_attention(q, k, v, cos, sin).flatten(1), f"{block}.attn.wo")
            x = x + self._linear(swiglu(self._linear(self._norm(x, f"{block}.norm2"), f"{block}.mlp.w1")), f"{block}.mlp.w2")
        return self._norm(x, "vision.norm")

    def align(self, x: torch.Tensor, high: int, wide: int) -> torch.Tensor:
        """Patches ``[high * wide, hidden]`` → rows ``[cells, d]`` of the language model."""
        return self._linear(F.gelu(self._linear(merge_patches(x, high, wide, self._t.merge), "aligner.w1")), "aligner.w2")

    def span(self, image: ImageInput) -> torch.Tensor:
        """Rows ``[tokens, d]`` in the run dtype of all of an image's positions: start, each line of cells and its end, end."""
        known = self._rows.get(image.digest)
        if known is not None:
            self._rows.move_to_end(image.digest)
            return known
        start, newline, end = self._ends
        t, device = self._t, start.device
        high, wide = image.pixels.shape[0] // t.patch, image.pixels.shape[1] // t.patch
        # a copy, since what came from another process or library may be read-only
        cells = self.align(self.patches(to_device(torch.from_numpy(image.pixels.copy()), device)), high, wide)
        lines = cells.unflatten(0, (-(-high // t.merge), -1))
        lines = torch.cat((lines, newline.expand(lines.shape[0], 1, -1)), 1).flatten(0, 1)
        rows = torch.cat((start[None], lines, end[None]))
        self.computed += 1
        self._keep(image.digest, rows)
        return rows

    def _keep(self, digest: bytes, rows: torch.Tensor) -> None:
        if rows.nbytes > self._left + sum(kept.nbytes for kept in self._rows.values()):
            return  # larger than the whole cache
        self._rows[digest] = rows
        self._left -= rows.nbytes
        while self._left < 0:
            self._left += self._rows.popitem(last=False)[1].nbytes

    def place(self, embedded: torch.Tensor, pieces: Sequence[ImagePiece]) -> torch.Tensor:
        """Puts the rows of images into ``embedded`` ``[T, d]``, in place; bool ``[T]``: which rows these are."""
        image = torch.zeros(embedded.shape[0], dtype=torch.bool, device=embedded.device)
        for piece in pieces:
            rows = slice(piece.row, piece.row + piece.count)
            embedded[rows] = self.span(piece.image)[piece.first : piece.first + piece.count]
            image[rows] = True
        return image
