"""What a token weighs when one is drawn: whole numbers whose sums are exact, from an exponential of our own.

Libraries' exponentials differ in their last bits between machines and versions. This one is built from float32 sums and products, each
rounded once, so that whoever computes it gets the same bits: torch operators and kernels on a GPU and on the CPU target. Method: Cody and
Waite's reduction by ``ln 2`` in two parts, then the polynomial of Cephes' ``expf`` (Moshier); about one unit in the last place.
"""

from __future__ import annotations

import torch

LOWEST = -64.0
"""Exponents below are cut to this: ``exp(-64) · 2**53 < 1``."""

LOG2_E = 1.44269504
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def weight_power(vocab_size: int) -> int:
    """Largest ``n ≤ 53`` at which the sum of ``vocab_size`` weights of at most ``2**n`` is exact in float64."""
    return 53 - (vocab_size - 1).bit_length() if vocab_size > 1 else 53


def weights(x: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, power: int) -> torch.Tensor:
    """``floor(exp((x - largest) / temperature) · 2**power)``, whole numbers in float32, of ``x`` float32 ``[m, V]``.

    ``largest`` float32 ``[m, 1]``, at least every number of its row; ``temperature`` float32 ``[m, 1]``, positive. A row whose largest is
    NaN or infinite has NaN where the difference is.
    """
    y = (x - largest).div_(temperature).clamp_(min=LOWEST)
    n = (y * LOG2_E).round_()
    r = y.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    p = r * POLYNOMIAL[0]
    for c in POLYNOMIAL[1:-1]:
        p.add_(c).mul_(r)
    p.add_(POLYNOMIAL[-1]).mul_(r * r).add_(r).add_(1.0)
    two_to_n = ((n + float(power + 127)).to(torch.int32) << 23).view(torch.float32)
    return p.mul_(two_to_n).floor_()
