"""The model's formulas one by one, written for reading: float32 inside, one cast where a value is stored.

Nothing here is shared with the operators under ``kernels/``; where both compute the same thing they do it in different ways.
``R`` rows (tokens) of one sequence throughout, ``dtype`` is the type a run keeps its values in.
"""

from __future__ import annotations

import math

import torch

from deepinfer.kernels.rope import RopeParameters

E2M1 = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
"""Sizes an e2m1 number can have, those with an even code first: the first of two equally near ones wins."""


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """RMSNorm over the last axis; ``weight`` None = unweighted."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x weight^T`` with the weight in ``dtype``, summed in float32."""
    return (x.float() @ weight.to(dtype).float().T).to(dtype)


def _power_of_two(largest: torch.Tensor, top: float) -> torch.Tensor:
    # in float64, where a quotient just above a power of two stays above it
    return torch.exp2(torch.ceil(torch.log2(largest.double() / top))).float()


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """e4m3 with a power of two per 32: window rows, draft rows, activations of quantised products."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0)
    elements = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    return (elements * scale).flatten(-2).to(x.dtype)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    grid = torch.tensor(E2M1)
    nearest = (x.abs()[..., None] - grid).abs().argmin(-1)
    return torch.copysign(grid[nearest], x)


def round_fp4(x: torch.Tensor) -> torch.Tensor:
    """e2m1 with an e4m3 scale per 16: compressed entries."""
    blocks = x.float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    scale = (largest / 6).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    return (_round_e2m1((blocks / scale).clamp(-6.0, 6.0)) * scale).flatten(-2).to(x.dtype)


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """e2m1 with a power of two per 32: index keys and queries."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scale = _power_of_two(blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126), 6.0)
    return (_round_e2m1((blocks / scale).clamp(-6.0, 6.0)) * scale).flatten(-2).to(x.dtype)


def frequencies(rope: RopeParameters) -> torch.Tensor:
    """Turns per token of each pair of channels, in radians; YaRN if the parameters say so, amplitudes always 1."""
    width, half = rope.head_dim, rope.head_dim // 2
    f = 1.0 / rope.theta ** (torch.arange(0, width, 2).float() / width)
    if rope.rope_type == "default":
        return f

    def pair_of(turns: float) -> float:
        return width * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(pair_of(rope.beta_fast)), 0), min(math.ceil(pair_of(rope.beta_slow)), width - 1)
    ramp = ((torch.arange(half).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return f / rope.factor * ramp + f * (1 - ramp)


def turn(x: torch.Tensor, positions: torch.Tensor, rope: RopeParameters, back: bool = False) -> torch.Tensor:
    """Rotates the last channels, neighbours ``(2 i, 2 i + 1)`` as complex numbers. ``x`` ``[R, ..., D]``, ``positions`` ``[R]``."""
    width = rope.head_dim
    angle = positions.float()[:, None] * frequencies(rope)
    spin = torch.polar(torch.ones_like(angle), -angle if back else angle)
    spin = spin.reshape(x.shape[0], *[1] * (x.ndim - 2), width // 2)
    tail = torch.view_as_complex(x[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(tail * spin).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def mixes(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, mix_eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of a site from the streams ``[R, n, d]``: pre ``[R, n]``, post ``[R, n]``, comb ``[R, from, to]``."""
    n = streams.shape[1]
    flat = streams.flatten(1).float()
    m = (flat @ fn.float().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + mix_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + mix_eps
    comb = comb / (comb.sum(1, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + mix_eps)
        comb = comb / (comb.sum(1, keepdim=True) + mix_eps)
    return pre, post, comb


def collapse(streams: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[R, n, d]`` → ``[R, d]``."""
    return (pre[..., None] * streams.float()).sum(1).to(dtype)


def expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Streams after a site: stream ``k`` gets ``post_k y`` and ``comb[j, k]`` of stream ``j``."""
    mixed = torch.einsum("rjk,rjd->rkd", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


def attend(q: torch.Tensor, rows: torch.Tensor, present: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """Heads ``[R, H, D]`` over each token's own ``rows`` ``[R, n, D]`` (keys and values in one), of those ``present`` ``[R, n]``.

    ``sink`` ``[H]`` takes part in the denominator only; a token without rows gets 0.
    """
    scores = torch.einsum("rhd,rnd->rhn", q.float(), rows.float()) * scale
    scores = scores.masked_fill(~present[:, None], -math.inf)
    top = torch.maximum(scores.amax(-1), sink.float())[..., None]
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (sink.float()[:, None] - top).exp()
    return torch.einsum("rhn,rnd->rhd", weights / total, rows.float()).to(q.dtype)


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest of each row ``[R, n]`` that are above −inf, ascending, −1 behind them; ties to the lower index."""
    order = scores.sort(dim=-1, descending=True, stable=True)
    absent = scores.shape[-1]
    chosen = torch.where(order.values > -math.inf, order.indices, absent)[:, :count].sort(-1).values
    return torch.where(chosen == absent, -1, chosen)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(gate) up`` in float32, both clamped (the gate from above only) unless ``limit`` is 0."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up
