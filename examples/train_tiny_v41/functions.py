"""The formulas of the model on batches, differentiable: what ``model.py`` and ``drafts.py`` are put together from.

Owns: arithmetic. Never touches: parameters by name. Shapes start with any leading dimensions ``[...]``; sums are float32.

Formulas: docs/architecture.md. Rounding to a storage format is straight-through: the backward takes it for the identity.
``compile_leaves()`` compiles the bandwidth-bound ones with ``torch.compile``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F

from deepinfer.kernels.block_formats import FP4_ROWS, FP8_ROWS, MXFP4_ROWS, WEIGHT_BLOCK, RowFormat, fake_quantise
from deepinfer.kernels.block_formats.grids import E4M3_MAX, power_of_two_scale, to_e4m3

LEAVES = ("mixes", "collapse_norm", "expand", "swiglu", "index_scores", "probabilities", "probabilities_near", "engram_mix")
_PLAIN = dict[str, Any]()


def compile_leaves(backend: str = "inductor") -> None:
    """Replaces the functions of ``LEAVES`` in this module by compiled ones; what does not compile runs as it is."""
    here = sys.modules[__name__]
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    for name in LEAVES:
        _PLAIN.setdefault(name, getattr(here, name))
        setattr(here, name, torch.compile(_PLAIN[name], dynamic=False, backend=backend))


def undo_compile() -> None:
    """Puts the functions back: new shapes would be compiled anew."""
    for name, function in _PLAIN.items():
        setattr(sys.modules[__name__], name, function)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in the dtype of ``x``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def mixes(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, mix_eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of a site from streams ``[..., n, d]``: pre and post ``[..., n]``, comb ``[..., from, to]``, float32."""
    n = streams.shape[-2]
    flat = streams.flatten(-2).float()
    m = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + mix_eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + mix_eps
    comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + mix_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    return pre, post, comb


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """``[..., n, d]`` → ``[..., d]``."""
    return (pre[..., None] * streams.float()).sum(-2).to(streams.dtype)


def collapse_norm(streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What a sublayer reads: the collapsed streams, normed."""
    return norm(collapse(streams, pre), weight, eps)


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Streams after a sublayer: stream ``k`` gets ``post_k y`` and ``comb[j, k]`` of stream ``j``."""
    wide = streams.float()
    # a sum over four streams written out: as a batch of 4 × 4 products it would be bound by launches
    mixed = sum(comb[..., j, :, None] * wide[..., j : j + 1, :] for j in range(streams.shape[-2]))
    return (post[..., None] * y.float()[..., None, :] + mixed).to(streams.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the last channels, neighbours as complex numbers; ``cos`` and ``sin`` broadcast to ``[..., pairs]``. ``−sin`` turns back."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, limit: float) -> torch.Tensor:
    """``silu(gate) up``, both clamped, times the routing weight ``[..., 1]`` if there is one."""
    wide, other = gate.float(), up.float()
    if limit > 0:
        wide, other = wide.clamp_max(limit), other.clamp(-limit, limit)
    result = F.silu(wide) * other
    return (result if weight is None else result * weight).to(gate.dtype)


def index_scores(dots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``dots`` ``[B, S, heads, E]`` and ``weights`` ``[B, S, heads]`` → float32 ``[B, S, E]``."""
    return (dots.float().relu() * weights[..., None]).sum(2)


def probabilities(
    near: torch.Tensor, near_mask: torch.Tensor, far: torch.Tensor, far_mask: torch.Tensor, sink: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over two sources and the sink, which gets no value.

    Dot products ``near`` ``[..., H, R, n]`` and ``far`` ``[..., H, R, m]`` with masks of what is present that broadcast to them;
    ``sink`` ``[H]``. Gives the two parts in the dtype of the products.
    """
    here = (near.float() * scale).masked_fill(~near_mask, -torch.inf)
    there = (far.float() * scale).masked_fill(~far_mask, -torch.inf)
    lone = sink.float()[:, None, None]
    top = torch.maximum(torch.maximum(here.amax(-1, keepdim=True), there.amax(-1, keepdim=True)), lone).detach()
    here, there = (here - top).exp(), (there - top).exp()
    total = here.sum(-1, keepdim=True) + there.sum(-1, keepdim=True) + (lone - top).exp()
    return (here / total).to(near.dtype), (there / total).to(near.dtype)


def probabilities_near(near: torch.Tensor, near_mask: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """``probabilities`` with one source."""
    here = (near.float() * scale).masked_fill(~near_mask, -torch.inf)
    lone = sink.float()[:, None, None]
    top = torch.maximum(here.amax(-1, keepdim=True), lone).detach()
    here = (here - top).exp()
    return (here / (here.sum(-1, keepdim=True) + (lone - top).exp())).to(near.dtype)


def lowest_ties(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the ``count`` highest of each row that are above −inf; of equal ones, those of the lower index."""
    if count >= scores.shape[-1]:
        return scores > -torch.inf
    least = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > least, scores == least
    left = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= left))) & (scores > -torch.inf)


def round_rows(x: torch.Tensor, form: str) -> torch.Tensor:
    """``x`` rounded to rows of ``fp8``, ``fp4`` or ``mxfp4``; left alone if its width is no multiple of a block."""
    layout = FORMS[form]
    if not layout.fits(x.shape[-1]):
        return x
    return x + (fake_quantise(x.detach(), layout) - x.detach())


FORMS: dict[str, RowFormat] = {"fp8": FP8_ROWS, "fp4": FP4_ROWS, "mxfp4": MXFP4_ROWS}


def round_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A weight ``[N, K]`` as FP8 with a scale per 32 × 32 holds it: what ``decode(encode(weight))`` gives."""
    rows, columns = weight.shape
    plain = weight.detach().float()
    padded = F.pad(plain, (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    blocks = padded.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK))
    scale = power_of_two_scale(blocks.abs().amax((1, 3), keepdim=True).clamp_min(E4M3_MAX * 2.0**-126), E4M3_MAX)
    rounded = (to_e4m3(blocks / scale).float() * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return weight + (rounded - plain)


def engram_mix(
    streams: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Streams ``[..., n, d]`` plus the gated value ``[..., d]``; ``key`` ``[..., n, d]``."""
    x, k = streams.float(), key.float()
    dot = (x * query_weight * key_weight * k).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps) * streams.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    return (x + gate[..., None] * value.float()[..., None, :]).to(streams.dtype)
