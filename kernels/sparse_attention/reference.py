"""Attention of DeepSeek-V4.1: every row sees its window and a list of compressed entries, whose rows are keys and values at once.

``o_h = sum_j p_j row_j`` with ``p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink_h))``, ``s_j = scale q_h · row_j``: one softmax over both
sources; the sink is a learned logit per head that takes weight and gives no value. A row with nothing to see gives 0.

In V4's long-window layers every row sees all entries that have ended instead of a list.

A row's places are ``W`` window positions and ``k`` list entries, the same numbers for every row of a layer, so its two products have fixed
shapes and its sum a fixed tree: nothing depends on the other rows. The list must be in one order for this (ascending). All entries are
seen in tiles of 64, whose parts are added in a fixed tree over the tile's number, so that nothing depends on how many tiles there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..cache_rows import PagedRows
from ..paged_attention import row_quantum, tree_sum
from ..window_rows import WindowRows

ENTRY_TILE = 64


def _bytes_at_once(device: torch.device) -> int:
    """Bytes of gathered rows held at once."""
    return 16 << 20 if device.type == "cpu" else 512 << 20


def _attend(q: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """``q`` ``[r, M, D]`` (scaled), ``rows`` ``[r, N, D]``, ``mask`` ``[r, N]``, ``sink`` ``[M, 1]`` → ``[r, M, D]``."""
    scores = torch.bmm(q, rows.transpose(1, 2)).masked_fill_(~mask.unsqueeze(1), -torch.inf)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink).clamp_min_(torch.finfo(torch.float32).min)
    weights = scores.sub_(top).exp_()
    # the largest of weights and sink is 1, so a total below 1 means that there is neither
    total = tree_sum(weights, 2).unsqueeze(-1).add_((sink - top).exp_()).clamp_min_(1.0)
    return torch.bmm(weights, rows).div_(total).add_(0.0)  # −0 + 0 = 0


def two_source_attention(
    q: torch.Tensor,
    window: WindowRows,
    entries: PagedRows | None,
    selected: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``q`` ``[T, H, D]`` of any float dtype → float32 ``[T, H, D]``.

    ``window`` and ``entries`` hold rows of width ``D``, ``selected`` int32 ``[T, k]`` names each row's entries in ascending order, −1 =
    none; ``entries`` and ``selected`` are None together. ``sink`` float32 ``[H]``. Rows that are not seen may hold anything.
    """
    step = window.plan.step
    heads, width = q.shape[1:]
    padding = -heads % row_quantum(q.device)
    sinks = F.pad(sink.float(), (0, padding)).unsqueeze(-1)
    places = window.plan.window + (0 if selected is None else selected.shape[1])
    at_once = max(1, _bytes_at_once(q.device) // (places * width * 4))
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for first in range(0, q.shape[0], at_once):
        last = min(first + at_once, q.shape[0])
        rows, mask = window.gather(first, last)
        if entries is not None and selected is not None:
            listed = selected[first:last].long()
            real = listed >= 0
            found = entries.gather(step.row_seq[first:last, None], listed.clamp_min(0)).masked_fill_(~real.unsqueeze(-1), 0.0)
            rows, mask = torch.cat((rows, found), 1), torch.cat((mask, real), 1)
        wide = F.pad(q[first:last].float() * scale, (0, 0, 0, padding))
        out[first:last] = _attend(wide, rows, mask, sinks)[:, :heads]
    return out


def _attend_tiles(
    q: torch.Tensor, window: torch.Tensor, window_mask: torch.Tensor, tiles: torch.Tensor, mask: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """As ``_attend``, over ``window`` ``[r, W, D]`` and ``tiles`` ``[r, n, 64, D]`` (``mask`` ``[r, n, 64]``): products of fixed shapes."""
    (r, n), (heads, width) = tiles.shape[:2], q.shape[1:]
    flat = tiles.flatten(0, 1)
    near = torch.bmm(q, window.transpose(1, 2)).masked_fill_(~window_mask.unsqueeze(1), -torch.inf)
    wide = q.unsqueeze(1).expand(r, n, heads, width).reshape(r * n, heads, width)
    far = torch.bmm(wide, flat.transpose(1, 2)).view(r, n, heads, ENTRY_TILE).masked_fill_(~mask.unsqueeze(2), -torch.inf)
    top = torch.maximum(torch.maximum(near.amax(-1, keepdim=True), far.amax((1, 3)).unsqueeze(-1)), sink)
    top = top.clamp_min_(torch.finfo(torch.float32).min)
    near, far = near.sub_(top).exp_(), far.sub_(top.unsqueeze(1)).exp_()
    total = tree_sum(far.transpose(1, 2).flatten(2), 2).add_(tree_sum(near, 2)).unsqueeze(-1).add_((sink - top).exp_()).clamp_min_(1.0)
    summed = tree_sum(torch.bmm(far.flatten(0, 1), flat).view(r, n, heads, width), 1).add_(torch.bmm(near, window))
    return summed.div_(total).add_(0.0)


def full_attention(
    q: torch.Tensor, window: WindowRows, entries: PagedRows, ratio: int, bound: int, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """``q`` ``[T, H, D]`` of any float dtype → float32 ``[T, H, D]``: over the window and every entry ``j < (t + 1) // ratio``.

    ``bound``: at least the largest number of such entries; it changes no bit. Other arguments as for ``two_source_attention``.
    """
    step = window.plan.step
    heads, width = q.shape[1:]
    padding = -heads % row_quantum(q.device)
    sinks = F.pad(sink.float(), (0, padding)).unsqueeze(-1)
    tiles = max(1, -(-bound // ENTRY_TILE))
    entry = torch.arange(tiles * ENTRY_TILE, device=q.device)
    visible = torch.div(step.pos + 1, ratio, rounding_mode="floor")
    at_once = max(1, _bytes_at_once(q.device) // ((window.plan.window + tiles * (ENTRY_TILE + heads + padding)) * width * 4))
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for first in range(0, q.shape[0], at_once):
        last = min(first + at_once, q.shape[0])
        mask = entry < visible[first:last, None]
        found = entries.gather(step.row_seq[first:last, None], entry.expand(last - first, -1)).masked_fill_(~mask.unsqueeze(-1), 0.0)
        rows, present = window.gather(first, last)
        wide = F.pad(q[first:last].float() * scale, (0, 0, 0, padding))
        shape = (last - first, tiles, ENTRY_TILE)
        out[first:last] = _attend_tiles(wide, rows, present, found.view(*shape, width), mask.view(shape), sinks)[:, :heads]
    return out
