"""Rotation of queries and keys and the write of keys and values to the paged caches, as one operator."""

from __future__ import annotations

import torch

from ..fp8_cache import CacheScales
from ..kv_write import kv_write
from ..rms_norm import rms_norm
from ..rope import apply_rope


def rope_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: CacheScales | None = None,
) -> None:
    """Fills ``q`` ``[R, H, d]`` and the entries ``slots`` (int64 ``[R]``) of the caches ``[pages, page_tokens, Hkv, d]`` from ``qkv``
    ``[R, (H + 2 Hkv) d]``: queries, keys, values, in the dtype of the answers.

    Channels ``i`` and ``i + d / 2`` turn together (``apply_rope``) by float32 ``cos`` and ``sin`` ``[R, d / 2]`` of
    ``RopeTable.pair_cos_sin``. ``norm`` float32 ``[2, d]``: weights of an RMS norm of every query head and of every key head before that.
    All in float32, rounded once. A slot is ``page * page_tokens + offset``; one below 0 or beyond the cache means entry 0, which no
    sequence reads. Slots other than those must be distinct. Caches in ``FP8`` hold what ``fp8_cache.encode`` makes of the numbers that
    caches of ``qkv``'s dtype would hold, with ``scales``.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    split = qkv.view(rows, heads + 2 * kv_heads, head_dim)
    both = split[:, : heads + kv_heads].float()
    if norm is not None:
        both = rms_norm(both, torch.cat((norm[:1].expand(heads, -1), norm[1:].expand(kv_heads, -1))), eps)
    turned = apply_rope(both, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    q.copy_(turned[:, :heads])
    entries = k_cache.shape[0] * k_cache.shape[1]
    slots = torch.where((slots >= 0) & (slots < entries), slots, 0)
    scales = scales or CacheScales()
    kv_write(k_cache, turned[:, heads:].to(qkv.dtype), slots, scales.key)
    kv_write(v_cache, split[:, heads + kv_heads :], slots, scales.value)
