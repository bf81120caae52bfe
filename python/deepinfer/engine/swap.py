"""How much host memory victims of preemption may be swapped to, and the rates that decide whether one is.

Owns: the size of the host pool, and the measured rates that the core compares (bytes to copy against tokens to compute again).
Never touches: the copies, and the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer import _core
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.planner import KvPlan
from deepinfer.errors import CapacityError
from deepinfer.models.base import PagedGroup, StateGroup
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.worker.device_queue import StepTimes
from deepinfer.worker.kv_cache import state_bytes
from deepinfer.worker.step_ring import Header

_DEFAULT_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
_FREE_SHARE = 8  # without a setting, at most one part in so many of the free host memory
_KEEP = 0.8  # share of an old rate in the new one
_NEWS = 0.05  # relative change of a rate that the core is told
_LEAST_ROWS = 16  # a shorter prefill says little about a rate


@dataclass(frozen=True)
class SwapPlan:
    """Host blocks and host slots as the core counts them, and host pages of each paged group."""

    blocks: int = 0
    slots: int = 0
    pages: tuple[int, ...] = ()


def plan_swap(config: EngineConfig, run: RunConfig, kv: KvPlan, paged: Sequence[PagedGroup], state: Sequence[StateGroup]) -> SwapPlan:
    """Sizes the host pool: what was asked for, or a modest share of the free host memory; never more than the device's own pool.

    Raises:
        CapacityError: what was asked for is not free.
    """
    free = CpuPlatform().memory_available()
    if config.swap_space_gib is None:
        room = min(_DEFAULT_BYTES[run.platform.name], free // _FREE_SHARE)
    else:
        room = int(config.swap_space_gib * 2**30)
        if room > free:
            raise CapacityError(
                f"swap_space_gib {config.swap_space_gib:g} asks for more host memory than the {free / 2**30:.2f} GiB that are free; "
                "lower it, or set 0 for no swapping"
            )
    slot_bytes = sum(map(state_bytes, state))
    slots = min(run.max_num_seqs, room // (2 * slot_bytes)) if slot_bytes else 0
    blocks = min(kv.num_blocks, (room - slots * slot_bytes) // kv.block_bytes)
    if blocks < 1 or (slot_bytes and not slots):
        return SwapPlan()
    return SwapPlan(blocks, slots, tuple(blocks * (kv.block_tokens // g.page_tokens) for g in paged))


class SwapRates:
    """Tells a core how fast this machine copies and computes.

    Args:
        core: who is told.
        bytes_per_s: of a copy out and back, measured at the start.
        ready: whether copies can begin; before, the core is told of none and computes victims again.
    """

    def __init__(self, core: _core.Core, bytes_per_s: float, ready: Callable[[], bool]) -> None:
        self._core, self._ready = core, ready
        self.bytes_per_s = bytes_per_s
        self.prefill_tokens_per_s = 0.0
        self._told = (0.0, 0.0)

    def note(self, header: Header, times: StepTimes, swapped_bytes: int) -> None:
        """Takes in a completed step."""
        snapshots = header.snapshot_out + header.snapshot_in  # they take part of the same time
        if swapped_bytes and not snapshots and times.commands > 0:
            self.bytes_per_s = _mean(self.bytes_per_s, swapped_bytes / times.commands / 2)
        rows = header.rows - header.decodes
        if rows >= max(_LEAST_ROWS, 3 * header.decodes) and not header.draft_rows:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, rows / (times.forward + times.sample))
        new = (self.bytes_per_s if self._ready() else 0.0, self.prefill_tokens_per_s)
        if any(abs(a - b) > _NEWS * b for a, b in zip(new, self._told, strict=True)):
            self._core.set_rates(*new)
            self._told = new


def _mean(old: float, new: float) -> float:
    return new if not old else _KEEP * old + (1 - _KEEP) * new
