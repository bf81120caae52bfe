"""What an engine keeps in, and takes from, a store of KV that outlives it (docs/kvstore.md).

Owns: `StoreTraffic`, the step thread's side: what prompts are looked up and fetched (`fetches`), what is saved (`saves`), host memory in
between (`staging`), the slices of states that go along (`slices`), its settings (`plan`) and what its keys are made of
(`identity`). Never touches: how a tier keeps what it is
given (`deepinfer.kvcache.block_tier`), what the scheduler does with blocks on their way (docs/kvstore.md), steps.

Nothing here waits for the tier: it is asked on threads, and what they bring is taken in between two steps. Whatever fails there is a miss
and a counter.
"""

from __future__ import annotations

from deepinfer.engine.kv_store.identity import NamesOfKv, identity_of
from deepinfer.engine.kv_store.plan import StorePlan, open_tier, plan_store
from deepinfer.engine.kv_store.slices import StoredSlices
from deepinfer.engine.kv_store.traffic import StoreTraffic

__all__ = ["NamesOfKv", "StorePlan", "StoreTraffic", "StoredSlices", "identity_of", "open_tier", "plan_store"]
