"""The vision tower, the aligner and the rows of an image span, for one image in plain torch, float32.

``R`` patches in reading order of a grid of ``high × wide``. Names as in the checkpoint: ``vision.*``, ``aligner.*``, ``image_*``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from deepinfer.models.deepseek_v41.vision import VisionTopology
from deepseek_v41 import arithmetic

NORM_EPS = 1e-6
"""Of the tower's norms; the language model has another."""

Weights = Mapping[str, torch.Tensor]


def patch_grid(width: int, height: int, v: VisionTopology) -> tuple[int, int]:
    """Patches (high, wide) of an image of ``width × height`` pixels.

    Small images are scaled up to ``min_pixels``, then both sides are rounded up to whole patches. If the span were longer than
    ``max_tokens``, the image is shrunk: with ``r = height / width``, rows of ``w`` merged patches fit up to the ``w`` that solves
    ``r w (w + 1) + 2 = max_tokens``; both sides take the smaller of the two scales that whole merged patches allow and are rounded down.
    """
    if 0 < width * height < v.min_pixels:
        scale = math.sqrt(v.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    high, wide = math.ceil(height / v.patch), math.ceil(width / v.patch)
    merged_high, merged_wide = math.ceil(high / v.merge), math.ceil(wide / v.merge)
    if span_length(merged_high, merged_wide) <= v.max_tokens:
        return high, wide
    ratio, cell = height / width, v.patch * v.merge
    most_wide = math.sqrt((v.max_tokens - 2) / ratio + 0.25) - 0.5
    most_high = most_wide * ratio
    if most_wide < 1:
        return (v.max_tokens - 2) // 2 * v.merge, v.merge
    if most_high < 1:
        return v.merge, (v.max_tokens - 3) * v.merge
    scale = min(math.floor(most_wide) * cell / width, math.floor(most_high) * cell / height)
    return math.floor(height * scale / v.patch), math.floor(width * scale / v.patch)


def span_length(merged_high: int, merged_wide: int) -> int:
    """Tokens of an image: its start, every row with a newline, its end."""
    return merged_high * (merged_wide + 1) + 2


def _turned(x: torch.Tensor, high: int, wide: int, theta: float) -> torch.Tensor:
    """Heads ``[R, H, D]``: pairs are one half of a head apart; the first half of the angles goes by row, the second by column."""
    pairs = x.shape[-1] // 2
    inverse = 1.0 / theta ** (torch.arange(0, pairs, 2).float() / pairs)
    row, column = torch.arange(high).repeat_interleave(wide).float(), torch.arange(wide).repeat(high).float()
    angle = torch.cat((row[:, None] * inverse, column[:, None] * inverse), -1)[:, None]
    first, second = x[..., :pairs], x[..., pairs:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def tower(patches: torch.Tensor, high: int, wide: int, weights: Weights, v: VisionTopology) -> torch.Tensor:
    """Patches ``[R, 3 patch²]`` (channel by channel) → ``[R, hidden]``."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"vision.{name}.weight"], weights.get(f"vision.{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return arithmetic.norm(x, weights[f"vision.{name}.weight"], NORM_EPS, torch.float32)

    x, width = linear(patches.flatten(1), "patch_embed.proj"), v.hidden // v.heads
    for index in range(v.layers):
        block = f"blocks.{index}."
        q, k, value = (part.view(-1, v.heads, width) for part in linear(norm(x, f"{block}norm1"), f"{block}attn.wqkv").chunk(3, -1))
        q, k = _turned(q, high, wide, v.rope_theta), _turned(k, high, wide, v.rope_theta)
        scores = torch.einsum("qhd,khd->hqk", q, k) * width**-0.5
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + linear(seen, f"{block}attn.wo")
        gate, up = linear(norm(x, f"{block}norm2"), f"{block}mlp.w1").chunk(2, -1)
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{block}mlp.w2")
    return norm(x, "norm")


def align(x: torch.Tensor, high: int, wide: int, weights: Weights, v: VisionTopology) -> torch.Tensor:
    """Tower rows ``[R, hidden]`` → rows of the language model, one per ``merge × merge`` patches; what is missing at the edges is zero."""
    down, across = math.ceil(high / v.merge), math.ceil(wide / v.merge)
    grid = torch.zeros(down * v.merge, across * v.merge, v.hidden)
    grid[:high, :wide] = x.view(high, wide, v.hidden)
    # a merged row holds all patches of one channel before the next channel
    merged = grid.view(down, v.merge, across, v.merge, v.hidden).permute(0, 2, 4, 1, 3).reshape(down * across, -1)
    inner = F.gelu(F.linear(merged, weights["aligner.w1.weight"], weights["aligner.w1.bias"]))
    return F.linear(inner, weights["aligner.w2.weight"], weights["aligner.w2.bias"])


def image_rows(patches: torch.Tensor, high: int, wide: int, weights: Weights, v: VisionTopology) -> torch.Tensor:
    """Patches ``[R, 3 patch²]`` → aligned rows ``[merged, d]`` in reading order."""
    return align(tower(patches, high, wide, weights, v), high, wide, weights, v)


def span_rows(rows: torch.Tensor, merged_wide: int, weights: Weights) -> torch.Tensor:
    """Embeddings of an image's whole span: start, each row of ``merged_wide`` aligned rows with a newline behind it, end."""
    parts = [weights["image_start"][None]]
    for line in rows.split(merged_wide):
        parts += [line, weights["image_newline"][None]]
    return torch.cat((*parts, weights["image_end"][None]))
