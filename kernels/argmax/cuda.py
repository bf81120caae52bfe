"""Argmax on a GPU: blocks take chunks of a row, the last of a row's blocks to arrive writes its answer.

Values become integers of the same order with the index behind them, a lower index the larger: one maximum decides, and a maximum does not
depend on the order in which it is taken. So neither chunks nor the order of arrival can change an answer. A key is the value's order
<< 32 | vocabulary − 1 − index; where the type is narrow and the chunk short enough, both fit in 32 bits within a block.
"""

# Annotations of TileLang functions are values that it reads: no `from __future__ import annotations` here.

from collections.abc import Sequence
from typing import Any

import torch

from ..toolchain import Dialect, ModelShape, Program, device_code, imported, shape_config
from ..toolchain.driver import Launchable
from ..toolchain.loading import require

NOTHING = -(2**63)
"""What the scratch words ``keys`` hold between launches: below the key of any value."""

FEW_ROWS, FEW_CHUNK, MANY_CHUNK = 32, 4096, 8192
"""Up to ``FEW_ROWS`` rows chunks are short, so that one row still keeps many blocks busy; the answer is the same."""

_IMPORTED = """
DEVICE int argmax_merge(int64_t* keys, int* arrived, int* index, float* value, int64_t key, int chunks, int vocab) {
  if (THREAD == 0) {
    atomicMax((i64*)keys, (i64)key);
    __threadfence();
    if (atomicAdd(arrived, 1) == chunks - 1) {  // the row's last block leaves the scratch as it found it
      __threadfence();
      u64 best = atomicExch((u64*)keys, (u64)1 << 63);
      *arrived = 0;
      int order = (int)(best >> 32);
      *index = vocab - 1 - (int)best;
      *value = FLOAT_OF(order < 0 ? -order | (int)0x80000000u : order);
    }
  }
  return 0;
}
"""


def argmax(d: Dialect, vocab: int, chunk: int, threads: int, dtype: str) -> Any:
    """Index and value of the largest of each row of ``x`` ``[rows, vocab]`` in ``dtype``; see ``reference.argmax`` for ties and NaN.

    Grid: ``(ceil(vocab / chunk), rows)``. ``keys`` int64 and ``arrived`` int32, ``[rows]``, hold ``NOTHING`` and 0 before and after.
    """
    T = d.T
    rows = T.dynamic("rows")
    stored = d.stored(dtype)
    chunks = -(-vocab // chunk)
    spare = {"bfloat16": 16, "float16": 13, "float32": 0}[dtype]  # low bits of a value's order that are always 0
    within = chunk <= 1 << spare
    word = "int32" if within else "int64"
    text = imported.prelude(d, _IMPORTED)

    @T.prim_func
    def argmax(
        x: T.Tensor((rows, vocab), stored),
        keys: T.Tensor((rows,), "int64"),
        arrived: T.Tensor((rows,), "int32"),
        index: T.Tensor((rows,), "int32"),
        value: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(chunks, rows, threads=threads, prelude=text) as (part, row):
            values = d.acc((chunk,), stored)
            key = d.acc((chunk,), word)
            best = d.acc((1,), word)
            found = T.alloc_local((1,), "int64")
            device_code.let_next_start(d)
            device_code.wait_for_previous(d)
            for i in d.par(chunk):
                values[i] = T.if_then_else(part * chunk + i < vocab, x[row, part * chunk + i], T.cast(0, stored))
            for i in d.par(chunk):
                # In integers: comparisons of floats and additions of 0 are simplified away.
                bits = T.reinterpret(T.cast(values[i], "float32"), "int32")
                size = bits & T.int32(0x7FFFFFFF)
                number = T.if_then_else(bits < 0, -size, size)
                order = T.if_then_else(size > T.int32(0x7F800000), T.int32(0x7FFFFFFF & -(1 << spare)), number)
                if within:
                    key[i] = T.if_then_else(part * chunk + i < vocab, order + (chunk - 1 - i), T.min_value("int32"))
                else:
                    wide = (T.cast(order, "int64") << 32) + T.cast(vocab - 1 - part * chunk - i, "int64")
                    key[i] = T.if_then_else(part * chunk + i < vocab, wide, T.min_value("int64"))
            T.reduce_max(key, best, dim=0)
            if within:
                nth = chunk - 1 - (best[0] & T.int32((1 << spare) - 1))
                wide = (T.cast(best[0] >> spare, "int64") << (32 + spare)) + T.cast(vocab - 1 - part * chunk - nth, "int64")
                found[0] = wide
            else:
                found[0] = best[0]
            places = [T.address_of(t[row]) for t in (keys, arrived, index, value)]
            imported.call(d, "argmax_merge", *places, found[0], chunks, vocab)

    return argmax


class Argmax:
    """``reference.argmax`` on a GPU, for logits of one width and type.

    Args:
        vocab: width of a row.
        dtype: bfloat16, float16 or float32.
        max_rows: most rows of a call.
        device: where it runs; one stream at a time, the scratch is its own.
        after: see ``driver.Kernel``.
        kernels: those of ``programs``, loaded elsewhere.

    Raises ``KernelBuildError`` if there are no such kernels.
    """

    def __init__(
        self,
        vocab: int,
        dtype: torch.dtype,
        max_rows: int,
        device: torch.device,
        after: bool = True,
        kernels: Sequence[Launchable] | None = None,
    ) -> None:
        if kernels is None:
            kernels = require(self.programs(vocab, str(dtype).removeprefix("torch.")), device, after)
        self._few, self._many = kernels
        self._vocab, self.max_rows = vocab, max_rows
        self._keys = torch.full((max_rows,), NOTHING, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @staticmethod
    def programs(vocab: int, dtype: str) -> list[Program]:
        """What it launches: for few rows, for many."""
        return [
            Program("argmax", "argmax", shape_config(vocab=vocab, chunk=chunk, threads=256, dtype=dtype), imported.FILES)
            for chunk in (FEW_CHUNK, MANY_CHUNK)
        ]

    def __call__(self, x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
        """Writes ``index`` int32 ``[R]`` and ``value`` float32 ``[R]``, the largest of each row of ``x`` ``[R, vocab]``; all contiguous. An
        ``x`` that does not begin at a multiple of 16 bytes is copied: it is read 16 bytes at a time."""
        if rows := x.shape[0]:
            if x.storage_offset() * x.element_size() % 16:
                x = x.clone()
            kernel, chunk = (self._few, FEW_CHUNK) if rows <= FEW_ROWS else (self._many, MANY_CHUNK)
            kernel.launch((-(-self._vocab // chunk), rows), x, self._keys, self._arrived, index, value, rows)


def programs_for(shape: ModelShape) -> list[Program]:
    """For a model's own logits, and for those that were edited in float32."""
    return Argmax.programs(shape.vocab, shape.dtype) + Argmax.programs(shape.vocab, "float32")
