"""The order that ids have by their logits: falling, ties to the lowest id."""

from __future__ import annotations

import torch


def falling_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 keys whose falling order is that of falling logits with ties to the lowest id; all keys of a row differ."""
    bits = (logits + 0.0).view(torch.int32)  # −0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    vocab = logits.shape[-1]
    return (ordered << 32) | torch.arange(vocab - 1, -1, -1, dtype=torch.int64, device=logits.device)


def ranked(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the ``count`` largest logits per row in falling order, ties to the lowest id: int64 ``[m, count]``."""
    vocab = logits.shape[-1]
    count = min(count, vocab)
    if logits.device.type == "cpu" and 4 * count < vocab:
        # Only a tie at the border or among the chosen makes the plain operator's order a matter of chance.
        values, ids = torch.topk(logits, count + 1, dim=-1, sorted=True)
        if not bool((values[:, 1:] == values[:, :-1]).any()):
            return ids[:, :count]
    keys = falling_keys(logits)
    top = torch.topk(keys, count, dim=-1, sorted=True).values if count < vocab else torch.sort(keys, dim=-1, descending=True).values
    return vocab - 1 - (top & 0xFFFFFFFF)
