"""The few names whose meaning differs between a GPU and TileLang's CPU target ``c``, so that one source serves both.

On the CPU target there are no threads to spread a fragment over: accumulators are local arrays, loops over them are plain loops, and
bfloat16 has no C type. A kernel written with these names is tested there on any machine, with the same arithmetic in the same order
within a thread; what that cannot show is races, barriers and rounding to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dialect:
    """``cpu``: whether the kernel is for the target ``c``. ``T`` is TileLang's language, imported when first asked for."""

    cpu: bool = False

    @property
    def T(self) -> Any:
        """``tilelang.language``."""
        from tilelang import language

        return language

    def acc(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Registers of a block: a fragment over its threads, or a local array."""
        return (self.T.alloc_local if self.cpu else self.T.alloc_fragment)(shape, dtype)

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory shared by the threads of a block."""
        return (self.T.alloc_local if self.cpu else self.T.alloc_shared)(shape, dtype)

    def par(self, *extents: int) -> Any:
        """A loop whose iterations are independent."""
        return (self.T.grid if self.cpu else self.T.Parallel)(*extents)

    def stored(self, dtype: str) -> str:
        """The type a tensor has: on the CPU target bfloat16 tensors are float32."""
        return "float32" if self.cpu and dtype == "bfloat16" else dtype
