"""How sequences of models with windows begin behind a prefix hit, and how much host memory their snapshots take.

Owns: the rule the core is given, and the number of places. Never touches: the copies, and where a sequence begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer import _core
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.planner import KvPlan
from deepinfer.errors import CapacityError
from deepinfer.models.base import ModelOptions, StateGroup, WindowHits
from deepinfer.platforms.cpu import CpuPlatform

_DEFAULT_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
_FREE_SHARE = 16  # without a setting, at most one part in so many of the free host memory


@dataclass(frozen=True)
class SnapshotPlan:
    """Places for snapshots of states in host memory, and the bytes of one over all state groups."""

    places: int = 0
    place_bytes: int = 0

    @property
    def amount(self) -> tuple[int, int]:
        """How many, and the bytes of all."""
        return self.places, self.places * self.place_bytes


def window_hits(state: Sequence[StateGroup]) -> WindowHits | None:
    """What the state groups allow behind a hit; all of them say the same."""
    return state[0].hits if state else None


def hit_rule(config: EngineConfig, options: ModelOptions, state: Sequence[StateGroup]) -> _core.WindowRule | Literal["all", "state_slice"]:
    """The core's rule. ``options``: what holds of the model.

    State that nothing makes up has hits only where a slice was stored.
    """
    hits = window_hits(state)
    if hits is None:
        return "state_slice" if state else "all"
    return _core.WindowRule(
        encoder=hits.encoder,
        decoder=hits.decoder,
        window=hits.window,
        grain=hits.grain,
        backtrack=hits.backtrack,
        exact=config.hit_policy == "exact",
        keep=options.keep_tokens or hits.window + hits.backtrack,
        truncated=options.truncation != "off",
    )


def modest_bytes(run: RunConfig) -> int:
    """Host memory that states may take without a setting, each kind of what is kept of them."""
    return min(_DEFAULT_BYTES[run.platform.name], CpuPlatform().memory_available() // _FREE_SHARE)


def plan_snapshots(config: EngineConfig, run: RunConfig, kv: KvPlan, state: Sequence[StateGroup]) -> SnapshotPlan:
    """Sizes the places: what was asked for, or a modest share of the free host memory; at most one for each boundary in the KV pool.
    None for models without windows, and none while nothing is looked up.

    Raises:
        CapacityError: what was asked for is not free, or holds no snapshot.
    """
    place = sum(group.replica_at for group in state)
    hits = window_hits(state)
    if hits is None or not all(group.replica_at for group in state) or not config.enable_prefix_caching:
        return SnapshotPlan()
    most = kv.tokens // hits.grain
    free = CpuPlatform().memory_available()
    if config.state_snapshot_gib is None:
        return SnapshotPlan(min(most, modest_bytes(run) // place), place)
    room = int(config.state_snapshot_gib * 2**30)
    if room > free:
        raise CapacityError(
            f"state_snapshot_gib {config.state_snapshot_gib:g} asks for more host memory than the {free / 2**30:.2f} GiB that are free; "
            "lower it, or set 0 for no snapshots"
        )
    if 0 < room < place:
        raise CapacityError(
            f"state_snapshot_gib {config.state_snapshot_gib:g} holds no snapshot, which takes {place / 2**20:.1f} MiB; raise it, or set 0"
        )
    return SnapshotPlan(min(most, room // place), place)
