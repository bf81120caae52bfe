"""Batch-invariant linear layer: the meaning, and the rules on row counts every form of it shares.

Libraries pick a kernel by the number of rows: one row takes a matrix-vector path with another order of additions, and
row counts that are not a multiple of the register tile take a tail path. So rows come in multiples of a quantum,
only few row counts are ever used, and those are compared once per weight (``row_classes``) before they may be used.
On a GPU the quantum is 32: float32 products of up to 16 rows, and means over up to 8 rows, add in another order than those
of more rows (seen on an H200).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

ROW_QUANTUM = 8
"""Rows on a CPU are padded to a multiple of this."""

GPU_ROW_QUANTUM = 32
"""The same on a GPU."""

_BUCKETS = (8, 16, 32, 64)


def row_quantum(device: torch.device) -> int:
    """Rows are padded to a multiple of this on ``device``."""
    return ROW_QUANTUM if device.type == "cpu" else GPU_ROW_QUANTUM


def row_bucket(rows: int, quantum: int = ROW_QUANTUM) -> int:
    """Padded number of rows: 8, 16, 32, 64 or a multiple of 64, at least ``quantum``, so that few row counts exist."""
    rows = max(rows, quantum)
    for bucket in _BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // 64) * 64


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Appends zero rows to ``x`` ``[T, ...]`` up to ``rows``; ``x`` itself if there is nothing to add."""
    missing = rows - x.shape[0]
    if missing == 0:
        return x
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def row_classes(
    apply: Callable[[torch.Tensor], torch.Tensor], in_features: int, dtype: torch.dtype, device: torch.device, largest: int
) -> tuple[int, ...]:
    """Row counts (descending powers of two) for which ``apply`` gives a row the bits it has among ``row_quantum`` rows.

    ``apply`` maps ``[M, in_features]`` to ``[M, out_features]``. Probes every power of two up to ``largest`` with random
    rows, reads the first and the last quantum of them. The quantum is the definition and always the last of the answer.
    """
    quantum = row_quantum(device)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(largest, in_features, generator=generator).to(device=device, dtype=dtype)
    found = [quantum]
    first = apply(probe[:quantum].contiguous())
    rows = quantum * 2
    while rows <= largest:
        out = apply(probe[:rows].contiguous())
        last = apply(probe[rows - quantum : rows].contiguous())
        if torch.equal(out[:quantum], first) and torch.equal(out[-quantum:], last):
            found.append(rows)
        rows *= 2
    return tuple(reversed(found))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, classes: Sequence[int] = (ROW_QUANTUM,)
) -> torch.Tensor:
    """``x`` ``[T, in]`` times ``weight`` ``[out, in]`` transposed plus ``bias`` ``[out]``; gives ``[T, out]`` in ``x.dtype``.

    ``T`` may be any number ≥ 1; it is padded to a multiple of the last of ``classes`` and cut into pieces whose row counts are
    in ``classes`` (descending). Accumulation is at least float32. Raises nothing.
    """
    return apply_in_classes(lambda piece: F.linear(piece, weight, bias), x, classes)


def apply_in_classes(apply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, classes: Sequence[int]) -> torch.Tensor:
    """Runs ``apply`` over the rows of ``x`` in pieces of verified row counts, largest first."""
    total = x.shape[0]
    padded = -(-total // classes[-1]) * classes[-1]
    x = pad_rows(x, padded)
    if padded in classes:
        out = apply(x)
    else:
        pieces = []
        start = 0
        while start < padded:
            size = next(c for c in classes if c <= padded - start)
            pieces.append(apply(x[start : start + size]))
            start += size
        out = torch.cat(pieces)
    return out if padded == total else out[:total]
