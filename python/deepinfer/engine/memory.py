"""What running out of memory at a start becomes: an error that says what to lower.

Owns: which errors mean it, and what is said. Never touches: memory, devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepinfer.engine.config import RunConfig
from deepinfer.errors import CapacityError

_SAID = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")
"""What CUDA, cuBLAS and torch's allocator for a CPU write in errors that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it means that an allocation found no room, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


@contextmanager
def memory_for(what: str, run: RunConfig, change: str) -> Iterator[None]:
    """A block that allocates ``what``; ``change``: what to lower where there is no room for it.

    Raises:
        CapacityError: there was none.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, CapacityError) or not is_out_of_memory(e):
            raise
        raise CapacityError(f"no memory is left for {what} on {run.device}{_free(run)}: {change}") from e


def for_pools(run: RunConfig) -> str:
    """What to lower where there is no room beside the weights."""
    return f"lower kv_memory_fraction (now {run.kv_memory_fraction:g}), num_kv_blocks or max_num_seqs (now {run.max_num_seqs})"


def _free(run: RunConfig) -> str:
    """How much there is, where the device still tells."""
    try:
        free, total = run.platform.memory_available(), run.platform.memory_total()
    except Exception:  # of any kind: a device without memory may not answer at all
        return ", which others may be using"
    return f" ({free / 2**30:.2f} of {total / 2**30:.2f} GiB are free, others may be using the rest)"
