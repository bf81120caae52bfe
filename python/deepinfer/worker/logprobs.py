"""Log-probabilities of chosen and most likely tokens, from raw logits in float32.

They are those of the model, before bias, penalties, masks and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kernels.sample import weight_power
from deepinfer.kernels.sample.cuda import Logprobs
from deepinfer.worker.ranking import ranked


@dataclass(frozen=True)
class DeviceLogprobs:
    """Per row the token itself, then the most likely ones in falling order; on the device.

    ``ids`` int64 ``[m, 1 + k]``, ``values`` float32 ``[m, 1 + k]``, ``rank`` int64 ``[m]``, 1 = most likely.
    """

    ids: torch.Tensor
    values: torch.Tensor
    rank: torch.Tensor

    def to_host(self, pinned: bool) -> HostLogprobs:
        """Starts the copy to the host; on a GPU its memory is valid once the step's event has passed."""
        ids, rank = self.ids.to(torch.int32), self.rank.to(torch.int32)
        return HostLogprobs(_to_host(ids, pinned), _to_host(self.values, pinned), _to_host(rank, pinned))


@dataclass(frozen=True)
class HostLogprobs:
    """The same on the host, int32, float32, int32."""

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    rank: NDArray[np.int32]


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int, kernel: Logprobs | None = None) -> DeviceLogprobs:
    """Log-softmax of float32 ``[m, vocab]`` at ``tokens`` int64 ``[m]`` and at the ``count`` most likely ids of each row.

    The softmax operator works row by row; a sum over one long row may be split over threads, so it is not used here. ``kernel``: what reads
    the rows in its place.
    """
    if kernel is not None:
        return _by_kernel(logits, tokens, min(count, logits.shape[1]), kernel)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > chosen).sum(-1) + 1
    ids = torch.cat([tokens.unsqueeze(1), ranked(logits, count)], 1) if count else tokens.unsqueeze(1)
    return DeviceLogprobs(ids, logprobs.gather(1, ids), rank)


def _by_kernel(logits: torch.Tensor, tokens: torch.Tensor, count: int, kernel: Logprobs) -> DeviceLogprobs:
    """A value is the logit less the row's largest, less the logarithm of the row's weights, whose sum is exact: it does not depend on
    ``count``, although more ids than the kernel lists are found by sorting. Weights leave out what is below 2**-37 of the largest (at a
    vocabulary of 49152), all together less than 4e-7 of the sum."""
    rows, vocab = logits.shape
    listed = count if count <= kernel.MOST else 0
    largest, total = logits.new_empty(rows), tokens.new_empty(rows)
    rank, most_likely = tokens.new_empty(rows, dtype=torch.int32), tokens.new_empty((rows, listed), dtype=torch.int32)
    kernel(logits, tokens, largest, total, rank, most_likely)
    ids = torch.cat([tokens.unsqueeze(1), most_likely.long() if listed == count else ranked(logits, count)], 1)
    log_total = torch.log(total.to(torch.float64) * 2.0 ** -weight_power(vocab))  # NaN where the largest logit is not finite
    values = (logits.gather(1, ids) - largest.unsqueeze(1)).to(torch.float64) - log_total.unsqueeze(1)
    return DeviceLogprobs(ids, values.to(torch.float32), rank.long())


def _to_host(t: torch.Tensor, pinned: bool) -> NDArray[Any]:
    if not pinned:
        return t.numpy()
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True).numpy()
