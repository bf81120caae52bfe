"""Rotation of queries and keys and the write to the paged caches, in one kernel.

A thread holds 8 channels of a head and the 8 they turn with, half a head further on: ``head_dim / 16`` neighbouring lanes a head, rounded
up to a power of two, so that a head's sum of squares is a sum over lanes. A block holds some heads of one row.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer.errors import KernelBuildError

from ..fp8_cache.device import FILE as FP8_FILE
from ..fp8_cache.device import byte_type, encoded, prelude
from ..toolchain import Dialect, ModelShape, Program, shape_config
from ..toolchain.device_code import FILE, lanes_sum, let_next_start, wait_for_previous
from ..toolchain.driver import Launchable
from ..toolchain.loading import require
from ..toolchain.shapes import run_dtype

_WIDE = 8  # channels of a read
_BLOCK = 128  # threads of a block, at most


def lanes_of(head_dim: int) -> int:
    """Neighbouring threads that hold a head."""
    return 1 << (head_dim // (2 * _WIDE) - 1).bit_length()


def block_heads_of(heads: int, lanes: int) -> int:
    """Heads of a block that share out ``heads`` of all kinds evenly, in whole warps."""
    blocks = -(-heads * lanes // _BLOCK)
    of_warp = 32 // lanes
    return -(-heads // (blocks * of_warp)) * of_warp


def rope_kv(
    d: Dialect, heads: int, kv_heads: int, head_dim: int, block_heads: int, lanes: int, qk_norm: bool, dtype: str, fp8: bool = False
) -> Any:
    """See ``reference.rope_kv``; caches ``[entries, kv_heads, head_dim]``. ``weights`` and ``eps`` are read with ``qk_norm`` only. ``fp8``:
    caches are 8-bit floats; ``scales``, read then only, are the reciprocals of those of keys and of values."""
    T = d.T
    rows, entries = T.dynamic("rows"), T.dynamic("entries")
    stored, half = d.stored(dtype), head_dim // 2
    kept = byte_type(d) if fp8 else stored
    turning, every = heads + kv_heads, heads + 2 * kv_heads
    blocks = -(-every // block_heads)
    shape = (block_heads, lanes, _WIDE)
    add = lanes_sum(d, block_heads, lanes)

    @T.macro
    def normalise(a, b, low_weight, high_weight, eps):
        square = d.acc(shape, "float32")
        of_low = d.acc((block_heads, lanes), "float32")
        of_high = d.acc((block_heads, lanes), "float32")
        scale = d.acc((block_heads, lanes), "float32")
        for h, i, v in d.par(*shape):
            square[h, i, v] = a[h, i, v] * a[h, i, v]
        T.reduce_sum(square, of_low, dim=2)
        for h, i, v in d.par(*shape):
            square[h, i, v] = b[h, i, v] * b[h, i, v]
        T.reduce_sum(square, of_high, dim=2)
        for h, i in d.par(block_heads, lanes):
            of_low[h, i] = of_low[h, i] + of_high[h, i]
        add(of_low, scale)
        for h, i in d.par(block_heads, lanes):
            scale[h, i] = T.rsqrt(scale[h, i] / head_dim + eps)
        for h, i, v in d.par(*shape):
            a[h, i, v] = a[h, i, v] * scale[h, i] * low_weight[h, i, v]
            b[h, i, v] = b[h, i, v] * scale[h, i] * high_weight[h, i, v]

    @T.macro
    def keep(slot, first, low, high, k_cache, v_cache):
        for h, i, v in d.par(*shape):
            if first + h >= heads and first + h < turning and i * _WIDE + v < half:
                k_cache[slot, first + h - heads, i * _WIDE + v] = low[h, i, v]
                k_cache[slot, first + h - heads, half + i * _WIDE + v] = high[h, i, v]
        for h, i, v in d.par(*shape):
            if first + h >= turning and first + h < every and i * _WIDE + v < half:
                v_cache[slot, first + h - turning, i * _WIDE + v] = low[h, i, v]
                v_cache[slot, first + h - turning, half + i * _WIDE + v] = high[h, i, v]

    @T.prim_func
    def rope_kv(
        qkv: T.Tensor((rows, every, head_dim), stored),
        cosines: T.Tensor((rows, half), "float32"),
        sines: T.Tensor((rows, half), "float32"),
        slots: T.Tensor((rows,), "int64"),
        q: T.Tensor((rows, heads, head_dim), stored),
        k_cache: T.Tensor((entries, kv_heads, head_dim), kept),
        v_cache: T.Tensor((entries, kv_heads, head_dim), kept),
        scales: T.Tensor((2,), "float32"),
        weights: T.Tensor((2, head_dim), "float32"),
        eps: T.float32,
    ):
        with T.Kernel(rows, blocks, threads=block_heads * lanes, prelude=prelude(d)) as (row, part):
            first = part * block_heads
            low, high = d.acc(shape, stored), d.acc(shape, stored)
            c, s = d.acc(shape, "float32"), d.acc(shape, "float32")
            a, b = d.acc(shape, "float32"), d.acc(shape, "float32")
            low_weight, high_weight = d.acc(shape, "float32"), d.acc(shape, "float32")
            if qk_norm:
                for h, i, v in d.par(*shape):
                    if i * _WIDE + v < half:
                        low_weight[h, i, v] = weights[T.if_then_else(first + h < heads, 0, 1), i * _WIDE + v]
                        high_weight[h, i, v] = weights[T.if_then_else(first + h < heads, 0, 1), half + i * _WIDE + v]
            wait_for_previous(d)
            # not before that: attention fetches older keys before it waits for this kernel, so what they follow from has to be there
            let_next_start(d)
            # a loop a read: numbers of one width only, so that a thread keeps its channels
            for h, i, v in d.par(*shape):
                if first + h < every and i * _WIDE + v < half:
                    low[h, i, v] = qkv[row, first + h, i * _WIDE + v]
                else:
                    low[h, i, v] = T.cast(0.0, stored)
            for h, i, v in d.par(*shape):
                if first + h < every and i * _WIDE + v < half:
                    high[h, i, v] = qkv[row, first + h, half + i * _WIDE + v]
                else:
                    high[h, i, v] = T.cast(0.0, stored)
            for h, i, v in d.par(*shape):
                if i * _WIDE + v < half:
                    c[h, i, v] = cosines[row, i * _WIDE + v]
                    s[h, i, v] = sines[row, i * _WIDE + v]
            slot = T.if_then_else(slots[row] >= 0 and slots[row] < entries, slots[row], T.int64(0))
            for h, i, v in d.par(*shape):
                a[h, i, v] = T.cast(low[h, i, v], "float32")
                b[h, i, v] = T.cast(high[h, i, v], "float32")
            if qk_norm:
                normalise(a, b, low_weight, high_weight, eps)
            for h, i, v in d.par(*shape):
                low[h, i, v] = T.if_then_else(
                    first + h < turning, T.cast(a[h, i, v] * c[h, i, v] - b[h, i, v] * s[h, i, v], stored), low[h, i, v]
                )
                high[h, i, v] = T.if_then_else(
                    first + h < turning, T.cast(b[h, i, v] * c[h, i, v] + a[h, i, v] * s[h, i, v], stored), high[h, i, v]
                )
            for h, i, v in d.par(*shape):
                if first + h < heads and i * _WIDE + v < half:
                    q[row, first + h, i * _WIDE + v] = low[h, i, v]
                    q[row, first + h, half + i * _WIDE + v] = high[h, i, v]
            if fp8:
                low_byte, high_byte = d.acc(shape, kept), d.acc(shape, kept)
                for h, i, v in d.par(*shape):
                    a[h, i, v] = scales[T.if_then_else(first + h < turning, 0, 1)]
                for h, i, v in d.par(*shape):
                    low_byte[h, i, v] = encoded(d, T.cast(low[h, i, v], "float32") * a[h, i, v])
                for h, i, v in d.par(*shape):
                    high_byte[h, i, v] = encoded(d, T.cast(high[h, i, v], "float32") * a[h, i, v])
                keep(slot, first, low_byte, high_byte, k_cache, v_cache)
            else:
                keep(slot, first, low, high, k_cache, v_cache)

    return rope_kv


class RopeKv:
    """Rotates queries and keys and writes keys and values to the caches; see ``reference.rope_kv``.

    Args:
        heads: query heads.
        kv_heads: key (and value) heads.
        head_dim: channels of a head, a multiple of 16 up to 512.
        dtype: of ``qkv``, ``q`` and the caches: bfloat16 or float16.
        device: a GPU.
        qk_norm: whether heads are normalised first.
        eps: of that norm.
        after: see ``toolchain.driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.
        fp8: caches are 8-bit floats, not of ``dtype``.

    Raises ``KernelBuildError`` if there is no such kernel.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        qk_norm: bool = False,
        eps: float = 0.0,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
        fp8: bool = False,
    ) -> None:
        programs = self.programs(heads, kv_heads, head_dim, run_dtype(dtype), qk_norm, fp8)
        (self._kernel,) = require(programs, device, after) if kernels is None else kernels
        constants = dict(programs[0].constants)
        self._blocks = -(-(heads + 2 * kv_heads) // int(constants["block_heads"]))
        self._eps = eps

    @staticmethod
    def programs(heads: int, kv_heads: int, head_dim: int, dtype: str, qk_norm: bool = False, fp8: bool = False) -> list[Program]:
        """What it launches."""
        if head_dim % (2 * _WIDE) or head_dim > 512:
            raise KernelBuildError(f"heads of {head_dim} channels cannot be read 16 bytes at a time in the lanes of a warp")
        lanes = lanes_of(head_dim)
        constants = shape_config(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_heads=block_heads_of(heads + 2 * kv_heads, lanes),
            lanes=lanes,
            qk_norm=qk_norm,
            dtype=dtype,
            **({"fp8": True} if fp8 else {}),  # left out of the constants of others, whose names stay
        )
        return [Program("rope_kv", "rope_kv", constants, (FILE, FP8_FILE))]

    def __call__(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        norm: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Arguments of ``reference.rope_kv``, ``out`` its ``q``, all contiguous; ``norm`` if the operator was made for one, and ``scales``
        for caches in 8 bits, float32 ``[2]``: the reciprocals of those of keys and of values."""
        rows = qkv.shape[0]
        if not rows:
            return
        entries = k_cache.shape[0] * k_cache.shape[1]
        grid = (rows, self._blocks)
        of_cache = () if scales is None else (scales,)
        of_norm = () if norm is None else (norm, self._eps)
        self._kernel.launch(grid, qkv, cos, sin, slots, out, k_cache, v_cache, *of_cache, *of_norm, rows, entries)


def programs_for(shape: ModelShape) -> list[Program]:
    """What a model of ``shape`` launches."""
    return RopeKv.programs(shape.heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.qk_norm, shape.kv == "fp8")
