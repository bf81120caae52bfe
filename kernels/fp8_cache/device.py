"""8-bit floats in TileLang: on a GPU the type and the hardware's conversions, on the CPU target bytes and functions in C."""

from __future__ import annotations

from typing import Any

from ..toolchain.device_code import prelude as device_prelude
from ..toolchain.dialect import Dialect

FILE = "fp8_cache/device.py"
"""For ``Program.uses`` of every kernel that takes something from here."""

# To nearest, ties to even, what is too large the largest; numbers below 2^-6 in steps of 2^-9.
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
