"""Log-probabilities of chosen and most likely tokens, from raw logits in float32.

They are those of the model, before bias, penalties, masks and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.worker.sampler import ranked


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


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> DeviceLogprobs:
    """Log-softmax of float32 ``[m, vocab]`` at ``tokens`` int64 ``[m]`` and at the ``count`` most likely ids of each row.

    The softmax operator works row by row; a sum over one long row may be split over threads, so it is not used here.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > chosen).sum(-1) + 1
    ids = torch.cat([tokens.unsqueeze(1), ranked(logits, count)], 1) if count else tokens.unsqueeze(1)
    return DeviceLogprobs(ids, logprobs.gather(1, ids), rank)


def _to_host(t: torch.Tensor, pinned: bool) -> NDArray[Any]:
    if not pinned:
        return t.numpy()
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True).numpy()
