"""Random weights from a seed, in the form a checkpoint stores them, of a size that a model runs on.

A byte is a function of (seed, name, place) in integers, so every machine and library version draws the same ones, and any rows
of a tensor can be had without the others: tables and checkpoints larger than memory are drawn piece by piece. Packed weights
are drawn packed (encoding half a trillion numbers would take hours); their scales differ from block to block.
"""

from __future__ import annotations

import hashlib
from functools import cache
from math import log2, sqrt
from statistics import NormalDist

import numpy as np
import torch

from ...kernels.block_formats import FP8_ROWS, WEIGHT_BLOCK, decode_fp8_weight, decode_mxfp4_weight, decode_rows
from .parameters import Form, ParameterSpec, Part, Weight

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FP8_DEVIATION = 128.0
_FP4_DEVIATION = sqrt(sum(value**2 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
"""Deviation of an FP4 number whose 16 codes are equally likely."""
_SCALE_STEPS = np.array([-1, 0, 0, 1], np.int16)
_SCALE_DEVIATION = sqrt(sum(4.0**step for step in (-1, 0, 0, 1)) / 4)


def _mix(words: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014): uint64 → uint64, every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _words(key: np.uint64, rows: np.ndarray, count: int) -> np.ndarray:
    """uint64 ``[len(rows), count]``: the random words of these rows, ``count`` to a row."""
    places = rows.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
    return _mix(key + places * _STEP)


def _bytes(key: np.uint64, rows: np.ndarray, count: int) -> np.ndarray:
    """uint8 ``[len(rows), count]``."""
    return _words(key, rows, -(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:, :count]


def _normal(words: np.ndarray) -> np.ndarray:
    """float64, nearly normal with mean 0 and deviation 1: the sum of a word's eight bytes."""
    pairs = (words & np.uint64(0x00FF00FF00FF00FF)) + ((words >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    total = (pairs * np.uint64(0x0001000100010001)) >> np.uint64(48)
    return (total.astype(np.float64) - 8 * 127.5) / sqrt(8 * (256**2 - 1) / 12)


@cache
def _fp8_codes() -> np.ndarray:
    """e4m3 codes uint8 ``[256]`` at the middles of 256 equal parts of a normal distribution of deviation 128."""
    normal = NormalDist(0.0, _FP8_DEVIATION)
    values = torch.tensor([normal.inv_cdf((place + 0.5) / 256) for place in range(256)])
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def spread(weight: Weight) -> tuple[float, float]:
    """Mean and deviation of a weight's numbers: products keep the size of what enters, nothing is neutral by accident."""
    name, last = weight.name, weight.name.rpartition(".")[2]
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) or last in ("q_weight", "k_weight"):
        return 1.0, 0.1
    if last == "attn_sink":
        return 0.0, 1.0
    if last in ("bias", "bias_vl"):
        return 0.0, 0.1 if ".gate." in name else 0.02
    if last.startswith("hc_"):
        return {"fn": (0.0, weight.shape[-1] ** -0.5), "base": (0.0, 0.5), "scale": (0.5, 0.1)}[last.rpartition("_")[2]]
    if name.endswith("embed.weight") or last.startswith("image_"):
        return 0.0, 1.0
    return 0.0, weight.shape[-1] ** -0.5


class Drawn:
    """One weight drawn from ``seed``, by rows; a tensor of one dimension has a single row."""

    def __init__(self, weight: Weight, seed: int) -> None:
        self.weight = weight
        self.mean, self.deviation = spread(weight)
        digest = hashlib.sha256(f"{seed}\0{weight.name}".encode()).digest()
        self._key, self._scale_key = np.frombuffer(digest[:16], "<u8")
        self._table = weight.stored.part is Part.ENGRAM_TABLE

    @property
    def rows(self) -> int:
        """Rows of the stored tensor."""
        shape = self.weight.stored.shape
        return shape[0] if len(shape) > 1 else 1

    @property
    def rows_per_scale(self) -> int:
        """Rows that share a row of scales."""
        return WEIGHT_BLOCK if self.weight.stored.form is Form.FP8 and not self._table else 1

    def _floats(self, rows: np.ndarray) -> np.ndarray:
        shape = self.weight.shape
        values = _normal(_words(self._key, rows, shape[-1])) * self.deviation + self.mean
        if self.weight.name.endswith("_base"):
            # streams that all mix alike stay alike: each keeps more of itself than of the others
            streams = round(sqrt(shape[0] + 1)) - 1
            values[0, 2 * streams :: streams + 1] += 2.0
        return values.astype(np.float32)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """What is stored of ``rows`` (int64 ``[n]``): packed bytes uint8 ``[n, bytes]``, or float32 ``[n, width]``.

        Plain numbers that a checkpoint keeps in bfloat16 are bfloat16 numbers here, too.
        """
        spec = self.weight.stored
        if spec.form is Form.FP8:
            return _fp8_codes()[_bytes(self._key, rows, spec.shape[1])]
        if spec.form is Form.FP4_PAIRS:
            return _bytes(self._key, rows, spec.shape[1])
        floats = self._floats(rows)
        return floats if spec.form is Form.FLOAT32 else torch.from_numpy(floats).bfloat16().float().numpy()

    def scales(self, rows: np.ndarray) -> np.ndarray:
        """Scale bytes uint8 ``[n, blocks]`` of rows of the scale tensor."""
        if self.weight.scale is None:
            raise ValueError(f"{self.weight.name} is not packed")
        elements = _FP8_DEVIATION if self.weight.stored.form is Form.FP8 else _FP4_DEVIATION
        base = 127 + round(log2(self.deviation / (elements * _SCALE_DEVIATION)))
        steps = _SCALE_STEPS[_bytes(self._scale_key, rows, self.weight.scale.shape[1]) & 3]
        return (base + steps).clip(0, 254).astype(np.uint8)

    def decoded(self, first: int, count: int) -> torch.Tensor:
        """float32 ``[count, width]`` of rows ``first …``, which start a block of scales."""
        rows = np.arange(first, first + count)
        values = torch.from_numpy(np.ascontiguousarray(self.values(rows)))
        if self.weight.scale is None:
            return values
        share = self.rows_per_scale
        scales = torch.from_numpy(self.scales(np.arange(first // share, -(-(first + count) // share))))
        name, shape = self.weight.name, (count, self.weight.shape[1])
        if self._table:
            return decode_rows(torch.cat((values, scales), 1), FP8_ROWS, shape[1])
        if self.weight.stored.form is Form.FP8:
            return decode_fp8_weight(values.view(torch.float8_e4m3fn), scales, shape, name=name)
        return decode_mxfp4_weight(values, scales, shape, name=name)


class DrawnRows:
    """Rows of a drawn table by number, made when they are read: in place of an array that may be larger than any memory."""

    dtype = np.dtype(np.uint8)

    def __init__(self, drawn: Drawn, spec: ParameterSpec) -> None:
        """``spec`` is the drawn weight's stored tensor or its scales."""
        self._drawn, self._scales = drawn, spec is drawn.weight.scale
        width = spec.shape[1] * (4 if spec.form is Form.PLAIN else 1)
        self.shape = (spec.shape[0], width)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if self._scales:
            return self._drawn.scales(rows)
        return np.ascontiguousarray(self._drawn.values(rows)).view(np.uint8)
