"""What an engine counts of its KV store."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class StoreCounters:
    """Totals since the start; tokens where it says so, else objects of 128 tokens, requests or events.

    Attributes:
        lookups: prompts that the store was asked for; ``skipped``: that it was not, because what was asked before hangs.
        found_tokens: of them, present in the store.
        device_tokens, host_tokens, store_tokens: of looked up prompts, tokens in the index already, and fetched from this host's memory
            (an agent) and from the store.
        fetched: objects; ``lost``: found by a lookup and not there when they were read.
        too_few, no_room, late: fetches left out: they save too little, there is no room for them, the sequence has begun.
        waits: requests that waited for a fetch; ``leases``: that waited to the end of their patience.
        saved: objects stored; ``existed``: there already; ``conflicts``: with other bytes, an alarm under ``exact``.
        failed: objects that the store did not take; ``dropped``: given up because it takes them too slowly.
        slices_fetched, slices_saved: slices of states.
        faults: errors of the tier, of copies and of hooks.
    """

    lookups: int = 0
    skipped: int = 0
    found_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    store_tokens: int = 0
    fetched: int = 0
    lost: int = 0
    too_few: int = 0
    no_room: int = 0
    late: int = 0
    waits: int = 0
    leases: int = 0
    saved: int = 0
    existed: int = 0
    conflicts: int = 0
    failed: int = 0
    dropped: int = 0
    slices_fetched: int = 0
    slices_saved: int = 0
    faults: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)
