"""Argmax through its kernels, with the scratch they need."""

from __future__ import annotations

from typing import Protocol, Self

import torch

from ..toolchain.loading import load
from .cuda import FEW_CHUNK, FEW_ROWS, MANY_CHUNK, NOTHING, programs


class Launchable(Protocol):
    """What is launched: a grid, then arguments in the order of the kernel's signature, numbers of dynamic shapes behind them."""

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None: ...


class Argmax:
    """``reference.argmax`` on a GPU, for logits of one width and type. Can be captured in a graph; one stream at a time.

    Args:
        vocab: width of a row.
        max_rows: most rows of a call.
        few, many: the kernels of ``cuda.programs``.
        device: where they are.
    """

    def __init__(self, vocab: int, max_rows: int, few: Launchable, many: Launchable, device: torch.device) -> None:
        self._vocab, self.max_rows, self._few, self._many = vocab, max_rows, few, many
        self._keys = torch.full((max_rows,), NOTHING, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    @classmethod
    def on(cls, device: torch.device, vocab: int, dtype: torch.dtype, max_rows: int) -> Self | None:
        """For logits of ``dtype``; ``None`` (and one warning) if the kernels cannot be had."""
        kernels = load(programs(vocab, str(dtype).removeprefix("torch.")), device)
        return None if kernels is None else cls(vocab, max_rows, kernels[0], kernels[1], device)

    def __call__(self, x: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
        """Writes ``index`` int32 ``[R]`` and ``value`` float32 ``[R]`` of the largest of each row of ``x`` ``[R, vocab]``; all
        contiguous, ``R`` at most ``max_rows``."""
        rows = x.shape[0]
        if not rows:
            return
        kernel, chunk = (self._few, FEW_CHUNK) if rows <= FEW_ROWS else (self._many, MANY_CHUNK)
        kernel.launch((-(-self._vocab // chunk), rows), x, self._keys, self._arrived, index, value, rows)
