"""8-bit floats (e4m3) in TileLang, of caches and of weights: on a GPU the type and the hardware's conversions, on the CPU target bytes
and functions in C."""

from __future__ import annotations

from typing import Any

from ..toolchain.device_code import prelude as device_prelude
from ..toolchain.dialect import Dialect

FILE = "fp8_cache/device.py"
"""For ``Program.uses`` of every kernel that takes something from here."""

# Encoded to nearest, ties to even, what is too large as the largest; numbers below 2^-6 in steps of 2^-9.
_ON_CPU = """
#include <stdint.h>
#include <math.h>
extern "C" unsigned char fp8_encoded(float x) {
  if (isnan(x)) return 0x7f;
  unsigned char sign = signbit(x) ? 0x80 : 0;
  float size = fabsf(x);
  if (size >= 448) return sign | 0x7e;
  if (size < 0x1p-6f) return sign | (unsigned char)rintf(ldexpf(size, 9));
  int exponent;
  frexpf(size, &exponent);
  return sign | (unsigned char)((int)rintf(ldexpf(size, 4 - exponent)) + 8 * (exponent + 5));
}
extern "C" float fp8_decoded(unsigned char b) {
  float size = (b & 0x78) ? ldexpf(8 + (b & 7), ((b >> 3) & 15) - 10) : ldexpf(b & 7, -9);
  return b & 0x80 ? -size : size;
}
"""


def byte_type(d: Dialect) -> str:
    """The type of stored numbers."""
    return "uint8" if d.cpu else "float8_e4m3fn"


def prelude(d: Dialect) -> str | None:
    """What ``T.Kernel`` is given as ``prelude``, in place of that of ``device_code``."""
    return _ON_CPU if d.cpu else device_prelude(d)


def encoded(d: Dialect, x: Any) -> Any:
    """A float32 number as it is stored, see ``reference.encode``: the hardware's conversion clamps."""
    return d.T.call_extern("uint8", "fp8_encoded", x) if d.cpu else d.T.cast(x, "float8_e4m3fn")


def decoded(d: Dialect, stored: Any) -> Any:
    """What a stored number other than NaN is, float32 without a scale."""
    return d.T.call_extern("float32", "fp8_decoded", stored) if d.cpu else d.T.cast(stored, "float32")
