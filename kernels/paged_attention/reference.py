"""Paged attention with torch operations; a row's bits depend on its own sequence only.

Why, step by step. Scores of a row against a 64-key tile are one small matrix product of fixed depth ``d`` and fixed width
64 whose row count is a multiple of 8 (on a GPU of 64); the row maximum is free of order; exponentials are elementwise; sums
and the product with V are again per tile; tiles are added in a binary tree over the tile's place, and a tile the row does not see
contributes an exact zero, so a taller tree gives the same bits. Nothing else mixes rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..fp8_cache import FP8, decode
from .plan import KEY_TILE, AttentionPlan, Unit

_ROWS = 8  # query rows of a product are padded to a multiple of this on a CPU
_GPU_ROWS = 64  # and of this on a GPU: below it cuBLAS picks the order of additions by the number of products in a batch


def row_quantum(device: torch.device) -> int:
    """Query rows of a product are padded to a multiple of this on ``device``."""
    return _ROWS if device.type == "cpu" else _GPU_ROWS


def tree_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over ``dim`` as a binary tree over the index, padded with zeros to a power of two."""
    size, every_second = x.shape[dim], torch.ops.aten.slice.Tensor
    while size > 1:
        even = size - size % 2
        added = every_second(x, dim, 0, even, 2) + every_second(x, dim, 1, even, 2)
        x = torch.cat((added, x.narrow(dim, size - 1, 1)), dim) if size % 2 else added
        size = x.shape[dim]
    return x.squeeze(dim)


def _gather(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Head rows ``[..., d]`` of a KV tensor ``[pages, entries, heads, d]`` in float32; of one in ``FP8`` the stored numbers."""
    if cache.dtype == FP8:
        return decode(F.embedding(rows, cache.view(-1, cache.shape[-1]).view(torch.uint8)))
    return F.embedding(rows, cache.view(-1, cache.shape[-1])).float()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax attention of ``q`` ``[B, H, M, d]`` (scaled) over tiles ``k``, ``v`` ``[B, H, n, 64, d]``.

    ``mask`` ``[B, 1, m, M or 1, 64]`` is added to the last ``m`` tiles. Float32 in and out, ``[B, H, M, d]``.
    """
    b, h, m, d = q.shape
    n = k.shape[2]
    left = q.unsqueeze(2).expand(b, h, n, m, d).reshape(-1, m, d)
    scores = torch.bmm(left, k.reshape(-1, KEY_TILE, d).transpose(1, 2)).view(b, h, n, m, KEY_TILE)
    scores[:, :, n - mask.shape[2] :].add_(mask)
    top = scores.amax((2, 4), keepdim=True)
    weights = scores.sub_(top).exp_()
    total = tree_sum(weights.sum(-1), 2)
    parts = torch.bmm(weights.view(-1, m, KEY_TILE), v.reshape(-1, KEY_TILE, d)).view(b, h, n, m, d)
    # adding +0 turns −0 into +0: the two differ by how many empty tiles were added
    return tree_sum(parts, 2).div_(total.unsqueeze(-1)).add_(0.0)


def _run_unit(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, unit: Unit) -> torch.Tensor:
    """``q`` ``[B * r, H, d]`` (scaled, float32) → ``[B * r, H, d]``."""
    b, r = unit.problems, unit.rows
    heads, d = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    used = r * group
    quantum = row_quantum(q.device)
    m = -(-used // quantum) * quantum
    grouped = q.view(b, r, kv_heads, group, d).transpose(1, 2).reshape(b, kv_heads, used, d)
    if m != used:
        grouped = F.pad(grouped, (0, 0, 0, m - used))
    rows, mask = unit.by_heads(kv_heads, group, m)
    out = _attend(grouped, _gather(k_cache, rows), _gather(v_cache, rows), mask)
    return out[:, :, :used].view(b, kv_heads, r, group, d).transpose(1, 2).reshape(b * r, heads, d)


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> torch.Tensor:
    """Causal attention of a step's rows over their sequences' KV, which already holds the rows themselves.

    ``q`` ``[R, H, d]`` with ``R ≥ T`` (rows beyond the plan's are padding and give zeros), ``k_cache`` and ``v_cache``
    ``[pages, entries, H_kv, d]``, ``H`` a multiple of ``H_kv``; query head ``h`` reads KV head ``h // (H / H_kv)``.
    ``window``: a row sees only the last ``window`` positions, its own included. Scores and sums are float32; the answer
    is ``[R, H, d]`` float32. Caches in ``FP8`` are read as the numbers they hold: the scale of keys belongs in ``scale``, that of values
    multiplies the answer (``fp8_cache``). Block size, block numbers, chunk cuts and batch mates do not change a row's bits.
    """
    wide = q.float() * scale
    units = plan.units(window)
    if len(units) == 1 and units[0].start == 0 and units[0].stop == q.shape[0]:
        return _run_unit(wide, k_cache, v_cache, units[0])
    out = torch.zeros_like(wide)
    for unit in units:
        out[unit.start : unit.stop] = _run_unit(wide[unit.start : unit.stop], k_cache, v_cache, unit)
    return out
