"""What an engine is put together from, so that the core and the runner are told the same sizes.

Owns: settings as they hold on this machine, the model, the pools, and from them the core's configuration, the runner and what KV values
depend on. Never touches: requests, steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer import _core
from deepinfer.distributed import spread_experts
from deepinfer.engine import environ
from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.engine.data_parallel.membership import Membership
from deepinfer.engine.decode_graphs import wanted_buckets, wanted_prompt_rows
from deepinfer.engine.hooks import EngineHooks
from deepinfer.engine.kv_store import NamesOfKv, StoredSlices, StorePlan, StoreTraffic, open_tier, plan_store
from deepinfer.engine.kv_store.identity import names_of, salt_of, values_of
from deepinfer.engine.memory import for_pools, memory_for
from deepinfer.engine.model_options import block_tokens, configure_model, drafting_of
from deepinfer.engine.mover import Bell
from deepinfer.engine.planner import KvPlan, check_weights, plan_kv, report, weight_bytes
from deepinfer.engine.state_hits import SnapshotPlan, hit_rule, modest_bytes, plan_snapshots
from deepinfer.engine.state_slices import SlicePlan, StateSlices, plan_slices
from deepinfer.engine.step_loop import RING_SLOTS
from deepinfer.engine.swap import SwapPlan, plan_swap
from deepinfer.errors import ConfigError
from deepinfer.kvcache.block_tier import BlockTier
from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.state_slices import HostSlices, SliceTier
from deepinfer.models import ResolvedModel, load_model, resolve_model
from deepinfer.models.base import Model, ModelOptions, PagedGroup, RemarkingModel, StateGroup
from deepinfer.models.contract import checked_groups
from deepinfer.sampling import TrafficClass
from deepinfer.speculative import Drafting, ModelDrafting, NgramDrafting, SpeculativeSettings
from deepinfer.worker import sync_guard
from deepinfer.worker.device_queue import make_queue
from deepinfer.worker.runner import Lookup, ModelRunner, Restore, RunnerLimits
from deepinfer.worker.slice_copies import SliceCopies


@dataclass
class Assembly:
    """A loaded model with its settings and sizes.

    Attributes:
        config, run: settings as given, and as they hold on this machine; ``options``: those of the model.
        resolved: where the checkpoint, its configuration and tokenizer are.
        speculative: drafting as it holds for the model, ``None`` = none.
        paged, state: the model's groups.
        plan: KV pools; ``swap``: host memory for preempted sequences; ``snapshots``, ``slices``: for states and slices of them.
        group: this process's part in a group of ranks that step together; ``None`` for an engine that steps by itself.
        store, tier: what holds for the KV store, and itself; ``None`` without one.
    """

    config: EngineConfig
    run: RunConfig
    resolved: ResolvedModel
    model: Model
    speculative: SpeculativeSettings | None
    options: ModelOptions
    paged: Sequence[PagedGroup]
    state: Sequence[StateGroup]
    plan: KvPlan
    swap: SwapPlan
    snapshots: SnapshotPlan
    slices: SlicePlan
    group: Membership | None = None
    store: StorePlan | None = None
    tier: BlockTier | None = None

    @property
    def depth(self) -> int:
        """Most steps in flight. A prompt engine plans one at a time: what it makes goes elsewhere after the first token."""
        return 2 if self.run.zero_overhead and self.config.engine_type != "prompt" else 1

    @property
    def max_draft(self) -> int:
        """Most draft rows of a sequence in a step."""
        return _max_draft(self.speculative)

    @property
    def device_drafts(self) -> int:
        """Drafts that the model makes of each sequence."""
        return _device_drafts(self.speculative)

    @property
    def num_slots(self) -> int:
        """State slots, the null slot included."""
        return self.run.max_num_seqs + 1

    def core_config(self) -> _core.CoreConfig:
        """What the core is configured with."""
        groups: list[_core.PagedGroup | _core.StateGroup] = [
            _core.PagedGroup(page_tokens=g.page_tokens, num_pages=pages, sources=[(s.entries_per_page, s.entry_bytes) for s in g.sources])
            for g, pages in zip(self.paged, self.plan.num_pages, strict=True)
        ]
        groups += [_core.StateGroup(stored=s.stored, dropped=s.dropped, replicas=s.replicas, ring=s.ring, cut=s.cut) for s in self.state]
        lease_ns = int(self.config.handover_lease * 1e9)
        return _core.CoreConfig(
            groups=groups,
            max_num_seqs=self.run.max_num_seqs,
            max_num_batched_tokens=self.run.max_num_batched_tokens,
            max_model_len=self.plan.max_model_len,
            vocab_size=self.model.vocab_size,
            max_draft=self.max_draft,
            device_drafts=self.device_drafts,
            ring_slots=RING_SLOTS,
            max_in_flight=self.depth,
            host_blocks=self.swap.blocks,
            host_slots=self.swap.slots,
            snapshot_slots=self.snapshots.places,
            hit_rule=hit_rule(self.config, self.options, self.state),
            device_ordered=True,
            step_policy=self.config.step_policy,
            prefix_caching=self.config.enable_prefix_caching,
            engine_type=self.config.engine_type,
            kv_lease_ns=lease_ns,
            handover_lease_ns=lease_ns,
            fetch_lease_ns=lease_ns if self.store is None else self.store.lease_ns,
            **self.names_of_kv(),
        )

    def names_of_kv(self) -> NamesOfKv:
        """What the names of this engine's KV are made of besides tokens and the size of a block."""
        return names_of(self._values, self.run, self.paged, self.state, self.store is not None, self.salt)

    @property
    def salt(self) -> bytes:
        """What every chain begins with: who shares a KV store. A request's own salt stands behind it."""
        return b"" if self.store is None else salt_of(self.config)

    @property
    def _truncation(self) -> str:
        """What a sequence's state depends on besides; its pages do not."""
        o = self.options
        return "off" if o.truncation == "off" else f"{o.truncation} {o.keep_tokens}"

    @property
    def _values(self) -> dict[str, str]:
        return values_of(self.config, self.run, self.resolved, self.state)

    def layout(self) -> KvLayout:
        """What the bytes of a sequence mean here."""
        return KvLayout({**self._values, "prefill truncation": self._truncation}, self.paged, self.state)

    def make_runner(self, core: _core.Core, lookup: Lookup, restore: Restore) -> ModelRunner:
        """The device side, sized as the core is, with its memory; ``lookup``, ``restore``: what it asks and tells.

        Raises ``CapacityError`` if there is not enough.
        """
        paged = self.paged
        block = paged[0].page_tokens
        row_blocks = -(-self.plan.max_model_len // block)
        limits = RunnerLimits(
            max_num_seqs=self.run.max_num_seqs,
            max_num_batched_tokens=self.run.max_num_batched_tokens,
            max_draft=self.max_draft,
            num_slots=self.num_slots,
            columns=[row_blocks * (block // g.page_tokens) for g in paged],
            slot_maps=[(m[0], m[1]) for m in core.slot_maps()],
            keep_tokens=None if self.options.truncation == "off" else self.options.keep_tokens,
            compact=self.options.truncation == "compact",
            # A prompt engine keeps what stages read, for who goes on; drafts behind its first tokens would go nowhere.
            device_drafts=0 if self.config.engine_type == "prompt" else self.device_drafts,
            draft_temperatures=() if self.speculative is None else self.speculative.temperatures,
        )
        experts = None if self.group is None else self.group.experts
        common = (self.run, self.model, self.state, limits.device_drafts, experts)
        graph_rows: Sequence[int] = []
        if self.config.engine_type != "prompt":  # whose sequences go elsewhere to decode
            graph_rows = wanted_buckets(*common)
        with memory_for("KV and step buffers", self.run, for_pools(self.run)):
            return ModelRunner(
                self.model,
                paged,
                self.plan.num_pages,
                self.state,
                limits,
                core.layout(),
                self.run.device,
                self.run.platform.pinned,
                lookup,
                restore,
                make_queue(self.run.device, self.depth > 1),
                RING_SLOTS,
                self.swap.pages,
                self.swap.slots,
                self.snapshots.places,
                experts,
                graph_rows,
                wanted_prompt_rows(*common),
            )

    def make_slices(
        self, core: _core.Core, runner: ModelRunner, hooks: EngineHooks, given: SliceTier | None, name_of: Callable[[int], str]
    ) -> StateSlices | None:
        """What cuts slices of states and puts them back, and takes them to the KV store where there is one; ``None`` without a tier,
        ``given`` or of its own."""
        near = HostSlices(self.slices.room) if self.slices.room else given
        if near is None:
            return None
        tier = near if self.store is None else StoredSlices(near)
        copies = SliceCopies(runner.kv, self.state, runner.queue, self.run.platform.pinned)
        return StateSlices(core, hooks, copies, tier, name_of)

    def make_store(
        self,
        core: _core.Core,
        runner: ModelRunner,
        hooks: EngineHooks,
        slices: StateSlices | None,
        bell: Bell,
        whose: Callable[[int], tuple[str, TrafficClass]],
    ) -> StoreTraffic | None:
        """What brings KV from the store and takes it there; ``None`` without one."""
        if self.store is None or self.tier is None:
            return None
        stored = slices.tier if slices is not None and isinstance(slices.tier, StoredSlices) else None
        if stored is not None and not self.store.keeps_slices:
            stored = None
        owned = self.config.kv_store is not None
        sizes = (self.plan.num_blocks, self.plan.max_model_len, self.run.max_num_seqs)
        near, size = (None, 0) if stored is None else (stored.near, self.slices.slice_bytes)
        name = "" if self.run.quiet else self.config.kv_store or ""
        made = StoreTraffic(core, runner, hooks, self.store, self.tier, owned, bell, sizes, near, size, whose, name)
        if stored is not None:
            stored.offered = made.offer_slice
        return made

    def make_drafting(self, core: _core.Core) -> Drafting | None:
        """What proposes drafts, or bounds those of the model; ``None`` without drafts."""
        if self.speculative is None:
            return None
        make = NgramDrafting if self.speculative.method == "ngram" else ModelDrafting
        return make(core, self.speculative, self.run.max_num_batched_tokens)


def assemble(
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    slices: SliceTier | None = None,
    store: BlockTier | None = None,
) -> Assembly:
    """Settles settings, loads the model and sizes the pools, after saying on stderr what fits. No KV is allocated yet.

    Args:
        config: settings.
        progress: called with (bytes loaded, bytes in all) while weights load.
        slices: a tier of state slices that the engine is to use; ``store``: a tier of KV beyond it.

    Raises:
        ConfigError, CapacityError, ModelNotFoundError, UnsupportedModelError, CheckpointError: see `Engine`.
    """
    run = config.resolve()
    if config.rank is None and config.data_parallel_size > 1:
        raise ConfigError("an Engine is one rank; LLM and AsyncLLM start data_parallel_size of them")
    with memory_for("a process", run, "end another process that has memory there, or take another device"):
        run.platform.prepare(run.num_threads, run.batch_invariant)
    sync_guard.configure(enabled=not environ.get("DEEPINFER_DISABLE_SYNC_GUARD"))
    resolved = resolve_model(config.model, config.revision, config.load_format)
    _check_quantization(config.quantization, resolved)
    weights = weight_bytes(resolved, config, run)
    check_weights(run, weights)
    group = Membership(config.rank, run.device) if config.rank is not None and config.steps_together else None
    smaller = "take a smaller model, dtype='bfloat16', packed weights of an FP8 checkpoint (weights='packed'), or another device"
    with spread_experts(None if group is None else group.experts), memory_for("the weights", run, smaller):
        how = (config.load_format, config.seed, progress, run.batch_invariant, config.weights, config.kv_cache_dtype == "fp8")
        model = load_model(resolved, run.dtype, run.device, *how)
    if group is not None and group.experts is not None and not group.experts.banks:
        raise ConfigError(f"expert_parallel: {config.model} has no experts to spread over the ranks; leave it out")
    speculative = drafting_of(config, model)
    options = configure_model(config, model, _max_draft(speculative), _device_drafts(speculative) > 0)
    paged, state = checked_groups(model, block_tokens(config, model))
    plan = plan_kv(config, run, paged, state, model.max_position, model.vocab_size)
    swap = plan_swap(config, run, plan, paged, state)
    snapshots = plan_snapshots(config, run, plan, state)
    has_store = config.kv_store is not None or store is not None
    kept = plan_slices(config, state, slices, modest_bytes(run) if has_store else 0)
    made = Assembly(config, run, resolved, model, speculative, options, paged, state, plan, swap, snapshots, kept, group)
    layout = made.layout()
    made.store = plan_store(config, layout, state, hit_rule(config, options, state), store)
    if not run.quiet:
        print(report(run, plan, config.model, weights, snapshots.amount, kept.amount, config.data_parallel_size), file=sys.stderr)
        for remark in model.remarks if isinstance(model, RemarkingModel) else ():
            print(f"  {remark}", file=sys.stderr)
    if made.store is not None:
        made.tier = open_tier(config, layout, made.names_of_kv()["numerics"]) if store is None else store
    return made


def _max_draft(speculative: SpeculativeSettings | None) -> int:
    return 0 if speculative is None else speculative.num_draft_tokens or 0


def _device_drafts(speculative: SpeculativeSettings | None) -> int:
    return 0 if speculative is None or speculative.method == "ngram" else _max_draft(speculative)


def _check_quantization(asked: str | None, found: ResolvedModel) -> None:
    if asked is not None and asked != found.weight_format:
        raise ConfigError(
            f"quantization={asked!r}, but {found.name} holds {found.weight_format} weights; leave quantization out: "
            "what a checkpoint declares is read"
        )
