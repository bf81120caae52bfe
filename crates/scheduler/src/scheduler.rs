//! The scheduler itself: its parts, and what can be asked of it between steps.

use crate::chunk_policy::ChunkBudget;
use crate::config::{Config, ConfigError, Geometry, Limits, Policy, Section, SlotMap};
use crate::error::StepError;
use crate::fill::Commands;
use crate::group::Group;
use crate::host_pool::HostPool;
use crate::inbox::{Inbox, Message, Shared};
use crate::kv::{Kv, Tables};
use crate::lanes::Lanes;
use crate::layout::{Field, Layout};
use crate::metrics::Metrics;
use crate::ngram::Ngram;
use crate::output::{OutputPool, Outputs};
use crate::plan::Launch;
use crate::pool::{Finish, SeqPool, Status, Times};
use crate::publish::HashQueue;
use crate::ring::{LayoutError, Ring, RingView};
use crate::roles::EngineType;
use crate::slices::Slices;
use crate::snapshots::Snapshots;
use crate::store::StoreSide;
use crate::swap::Swaps;
use crate::transfers::Transfers;
use crate::waiting::Waiting;
use deepinfer_kvindex::{Block, BlockPool, Counts, Event, PoolConfig, PoolGroup, Seq, StateSlots, StepId, Tier};
use std::collections::BTreeSet;
use std::sync::Arc;

/// States of the pages of each paged group, and of the state slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// One entry for each paged group.
    pub groups: Vec<Counts>,
    /// State slots.
    pub slots: Counts,
    /// Blocks of host memory; all zero without.
    pub host_blocks: Counts,
    /// State slots of host memory; all zero without.
    pub host_slots: Counts,
    /// Places of snapshots: `cached` = ready, `held` = being filled or read; none is reserved.
    pub snapshots: Counts,
}

impl Counters {
    /// The counts identity, everywhere.
    pub fn add_up(&self) -> bool {
        self.groups
            .iter()
            .chain([&self.slots, &self.host_blocks, &self.host_slots, &self.snapshots])
            .all(Counts::adds_up)
    }
}

/// What is known of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Where it is in its life.
    pub status: Status,
    /// How it ended.
    pub finish: Option<Finish>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens it produced.
    pub output_tokens: u32,
    /// Positions whose KV is written, on the device or in host memory.
    pub computed_tokens: u32,
    /// Prompt tokens whose KV was in place at its first admission: found in the index, shared with a fork, or loaded. Of a model
    /// with windows some of them may be computed again.
    pub cached_tokens: u32,
    /// State slot, 0 when it has none.
    pub slot: u32,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Priority, arrival and times.
    pub priority: i32,
    /// Order of arrival.
    pub arrival: u64,
    /// Times.
    pub times: Times,
    /// The caller's own number.
    pub user: u64,
}

/// Plain `&mut self` state machine; see the crate's note.
pub struct Scheduler {
    pub(crate) engine: EngineType,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
    pub(crate) device_ordered: bool,
    pub(crate) prefix_caching: bool,
    pub(crate) ring_slots: usize,
    pub(crate) geometry: Geometry,
    pub(crate) layout: Layout,
    pub(crate) kv: Kv,
    pub(crate) host: HostPool,
    pub(crate) swaps: Swaps,
    pub(crate) snapshots: Snapshots,
    pub(crate) slices: Slices,
    pub(crate) store: StoreSide,
    pub(crate) seqs: SeqPool,
    pub(crate) lanes: Lanes,
    pub(crate) waiting: Waiting,
    /// Sequences that wait for KV or to be taken over, by the time their lease ends.
    pub(crate) leases: BTreeSet<(u64, Seq)>,
    /// Sequences whose KV elsewhere is not needed any more, with the caller's numbers.
    pub(crate) remote_releases: Vec<(Seq, u64)>,
    pub(crate) transfers: Transfers,
    pub(crate) hash_queue: HashQueue,
    pub(crate) ring: Ring,
    pub(crate) outputs: OutputPool,
    pub(crate) commands: Commands,
    /// Of the steps in flight: that of step `n` at `n mod 2`.
    pub(crate) launches: [Launch; 2],
    pub(crate) max_in_flight: u64,
    /// What is left of the prompt rows of the step being planned.
    pub(crate) chunks: ChunkBudget,
    /// What agrees on the kind of each step; none while steps are mixed.
    pub(crate) group: Option<Box<Group>>,
    /// Newest planned step.
    pub(crate) step: u64,
    /// Newest step that completed or failed.
    pub(crate) completed: u64,
    /// Sequences that ended and whose rows no reader has seen yet.
    pub(crate) ended: Vec<Seq>,
    /// Sequences whose last row is in the current outputs.
    pub(crate) reported: Vec<Seq>,
    pub(crate) recycled: Vec<Seq>,
    pub(crate) mail: Vec<Message>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) arrivals: u64,
    pub(crate) live: usize,
    pub(crate) metrics: Metrics,
    pub(crate) now: u64,
    pub(crate) scratch: Vec<Block>,
    pub(crate) produced: Vec<i32>,
    /// Lanes, with their output row, that a pass over the arrays leaves to be handled one by one.
    pub(crate) irregular: Vec<[u32; 2]>,
    /// Something was proposed since the last plan.
    pub(crate) proposed: bool,
    /// Most draft rows of one step.
    pub(crate) draft_budget: u32,
    /// Draft rows of a decoding lane whose ids the device has.
    pub(crate) device_drafts: u32,
    /// Draft rows of the step being planned that are verified.
    pub(crate) verified: u32,
    pub(crate) ngram: Option<Box<Ngram>>,
}

impl Scheduler {
    /// Builds a scheduler; takes all memory that a steady step needs.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let geometry = config.geometry()?;
        config.check_memory(&geometry)?;
        let layout = Layout::new(&config.limits, &geometry);
        let seqs = config.limits.max_num_seqs as usize;
        let groups = geometry
            .sections
            .iter()
            .map(|s| PoolGroup { num_pages: s.num_pages, pages_per_block: 1 << s.pages_shift })
            .collect();
        let pool = PoolConfig { groups, prefix_caching: config.prefix_caching, event_capacity: config.event_capacity };
        let too_small = |what, value: u32| ConfigError::TooSmall { what, value: value.into(), least: 2 };
        let mut blocks = BlockPool::new(&pool).map_err(|_| too_small("num_pages", geometry.usable_blocks))?;
        blocks.set_snapshot_places(config.snapshot_slots);
        let states =
            StateSlots::new(seqs as u32 + 1).map_err(|_| too_small("max_num_seqs", config.limits.max_num_seqs))?;
        let tables = Tables::new(
            seqs + 1,
            geometry.row_blocks as usize,
            geometry.block_tokens as usize,
            config.limits.max_draft as usize,
            config.device_drafts > 0,
        );
        Ok(Self {
            engine: config.engine,
            limits: config.limits.clone(),
            policy: config.policy.clone(),
            device_ordered: config.device_ordered,
            prefix_caching: config.prefix_caching,
            ring_slots: config.ring_slots as usize,
            kv: Kv { blocks, states, tables, now: StepId(1), launched: StepId(0), misuse: 0 },
            host: HostPool::new(config.host_blocks, config.host_slots),
            snapshots: Snapshots::new(if config.prefix_caching { config.snapshot_slots } else { 0 }),
            slices: Slices::default(),
            store: StoreSide::default(),
            swaps: Swaps::with_capacity(seqs, if config.host_blocks > 0 { layout.deltas } else { 0 }),
            seqs: SeqPool::default(),
            lanes: Lanes::with_capacity(seqs),
            waiting: Waiting::default(),
            leases: BTreeSet::new(),
            remote_releases: Vec::new(),
            transfers: Transfers::default(),
            hash_queue: HashQueue::with_capacity(4 * seqs),
            ring: Ring::default(),
            outputs: OutputPool::with_capacity(seqs),
            commands: Commands::with_capacity(seqs, layout.clones),
            launches: [Launch::with_capacity(seqs), Launch::with_capacity(seqs)],
            max_in_flight: config.max_in_flight.into(),
            chunks: config.policy.chunk.begin(i64::MAX),
            group: Self::own_group(&config.policy),
            step: 0,
            completed: 0,
            ended: Vec::with_capacity(seqs),
            reported: Vec::with_capacity(seqs),
            recycled: Vec::with_capacity(seqs),
            mail: Vec::new(),
            shared: Arc::new(Shared::new(config, &geometry)),
            arrivals: 0,
            live: 0,
            metrics: Metrics::default(),
            now: 0,
            scratch: Vec::with_capacity(geometry.row_blocks as usize),
            produced: Vec::with_capacity(config.limits.max_draft as usize + 1),
            irregular: Vec::with_capacity(seqs),
            proposed: false,
            draft_budget: u32::MAX,
            device_drafts: config.device_drafts,
            verified: 0,
            ngram: None,
            geometry,
            layout,
        })
    }

    /// A sending end for other threads.
    pub fn inbox(&self) -> Inbox {
        Inbox::new(Arc::clone(&self.shared))
    }

    /// Turns later requests away; what is in stays.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Names and sizes of a ring slot's fields, in the order that [`RingView`] must follow.
    pub fn layout(&self) -> &[Field] {
        &self.layout.fields
    }

    /// Slot maps in the order of the fields `slots0`, `slots1`, …
    pub fn slot_maps(&self) -> &[SlotMap] {
        &self.geometry.maps
    }

    /// Sections of the block table, one for each paged group.
    pub fn sections(&self) -> &[Section] {
        &self.geometry.sections
    }

    /// Columns of the block table.
    pub fn table_columns(&self) -> u32 {
        self.geometry.columns
    }

    /// State slots, the null slot included: rows of the block table.
    pub fn state_slots(&self) -> u32 {
        self.limits.max_num_seqs + 1
    }

    /// Blocks that one sequence can hold in an empty pool.
    pub fn usable_blocks(&self) -> u32 {
        self.geometry.usable_blocks
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.geometry.block_tokens
    }

    /// Takes the caller's memory as the step ring.
    ///
    /// # Errors
    /// [`LayoutError`]; nothing is kept then.
    ///
    /// # Safety
    /// Every view must stay valid for reads and writes until the scheduler is dropped. While one of its calls runs, nobody
    /// else may access that memory.
    pub unsafe fn register_ring(&mut self, slots: &[RingView]) -> Result<(), LayoutError> {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { self.ring.register(slots, &self.layout, self.ring_slots) }
    }

    /// Sequences that have not ended, as far as the inbox has been read.
    pub fn unfinished(&self) -> usize {
        self.live
    }

    /// True if a sequence has not ended, a message is unread, an end has not been reported, or a step is in flight.
    pub fn has_work(&self) -> bool {
        self.live > 0 || self.in_flight() > 0 || !self.ended.is_empty() || self.shared.has_mail()
    }

    /// Rows of sequences that ended outside of a step: to be called when `schedule` had nothing to run. Takes back the
    /// previous outputs.
    pub fn flush(&mut self) -> Outputs<'_> {
        self.begin_outputs();
        self.report_ended();
        self.outputs.view(StepId(0))
    }

    /// The newest outputs once more, until they are taken back. Their step is not named here.
    pub fn outputs(&self) -> Outputs<'_> {
        self.outputs.view(StepId(0))
    }

    /// Prompt and output tokens of a sequence, until the outputs that report its end are taken back.
    pub fn history(&mut self, seq: Seq) -> Option<&[u32]> {
        self.flush_tokens(seq);
        self.seqs.get(seq).map(|cold| &*cold.history)
    }

    /// Output tokens of a sequence, as long as [`Scheduler::history`].
    pub fn output_tokens(&mut self, seq: Seq) -> Option<&[u32]> {
        self.flush_tokens(seq);
        self.seqs.get(seq).map(|cold| &cold.history[cold.prompt as usize..])
    }

    pub(crate) fn flush_tokens(&mut self, seq: Seq) {
        if let Some(lane) = self.seqs.lane(seq)
            && self.lanes.has_newest(lane)
            && let Some(cold) = self.seqs.get_mut(seq)
        {
            let len = self.lanes.confirmed[lane] + 1;
            self.kv.tables.flush(self.lanes.state[lane], &mut cold.history, len);
            self.lanes.flushed[lane] = len;
        }
    }

    /// What is known of a sequence.
    pub fn info(&self, seq: Seq) -> Option<Info> {
        let status = self.seqs.status(seq)?;
        let cold = self.seqs.get(seq)?;
        let lane = self.seqs.lane(seq);
        let decoding = lane.is_some_and(|lane| self.lanes.has_newest(lane));
        let computed = lane.map_or_else(|| cold.computed(), |lane| self.lanes.confirmed[lane]);
        let len = if decoding { computed + 1 } else { cold.history.len() as u32 };
        Some(Info {
            status,
            finish: cold.finish,
            prompt_tokens: cold.prompt,
            output_tokens: len - cold.prompt,
            computed_tokens: computed,
            cached_tokens: cold.cached_tokens,
            slot: lane.map_or_else(|| cold.holding.as_ref().map_or(0, |h| h.slot.0), |lane| self.lanes.state[lane]),
            preemptions: cold.preemptions,
            priority: cold.priority,
            arrival: cold.arrival,
            times: cold.times,
            user: cold.user,
        })
    }

    /// Blocks of a running sequence's table row, first block first.
    pub fn block_row(&self, seq: Seq) -> Option<&[Block]> {
        let lane = self.seqs.lane(seq)?;
        Some(&self.kv.tables.row(self.lanes.state[lane])[..self.lanes.blocks[lane] as usize])
    }

    /// Page `j` of a block in a paged group: what a mover of KV reads or writes.
    pub fn page(&self, group: usize, block: Block, j: usize) -> u32 {
        self.kv.blocks.page(group, block, j)
    }

    /// Proposes tokens for a decoding sequence: guesses for the positions after its next planned row, verified in the next
    /// step that has room for them. While a step is in flight that row is not known either. False if the handle is stale or
    /// the sequence is not decoding. Proposals beyond the configured number are cut.
    ///
    /// # Errors
    /// [`ConfigError::DeviceDrafts`]: drafts are made on the device.
    pub fn propose(&mut self, seq: Seq, drafts: &[u32]) -> Result<bool, ConfigError> {
        if self.device_drafts > 0 {
            return Err(ConfigError::DeviceDrafts(self.device_drafts));
        }
        let Some(lane) = self.seqs.lane(seq).filter(|&lane| lane < self.lanes.decoding) else {
            self.metrics.stale += 1;
            return Ok(false);
        };
        let drafts = &drafts[..drafts.len().min(self.limits.max_draft as usize)];
        let usable = drafts.iter().position(|&t| t >= self.limits.vocab_size).unwrap_or(drafts.len());
        self.kv.tables.set_drafts(self.lanes.state[lane], &drafts[..usable]);
        self.lanes.drafts[lane] = usable as u32;
        self.proposed |= usable > 0;
        Ok(true)
    }

    /// Most draft rows of one step over all sequences, from the next plan on; without a call there is no bound but the
    /// configured number per sequence. Drafts of the device have rows beyond it: the worker chooses which are verified.
    pub fn set_draft_budget(&mut self, rows: u32) {
        self.draft_budget = rows;
    }

    /// [`Scheduler::note_slice`] of a boundary of a running sequence. Prefix hits of models whose hit rule is
    /// [`crate::HitRule::StateSlice`] end at such boundaries only. False if that block is not in the index.
    pub fn note_state_slice(&mut self, seq: Seq, boundary_tokens: u32, tier: Tier, present: bool) -> bool {
        let index = boundary_tokens >> self.geometry.shift;
        let Some(lane) = self.seqs.lane(seq) else { return false };
        if index == 0 || boundary_tokens & self.geometry.mask != 0 || boundary_tokens > self.lanes.confirmed[lane] {
            return false;
        }
        self.publish_filled(lane);
        let Some(cold) = self.seqs.get(seq).filter(|c| c.published >= index) else { return false };
        let mut at = cold.cursor;
        for _ in index..cold.published {
            at = self.kv.blocks.parent(at);
        }
        let hash = self.kv.blocks.hash(at);
        self.note_slice(hash, tier, present)
    }

    /// States of all pages and slots.
    pub fn counts(&self) -> Counters {
        let [host_blocks, host_slots] = self.host.counts();
        Counters {
            groups: (0..self.geometry.sections.len()).map(|g| self.kv.blocks.counts(g)).collect(),
            slots: self.kv.states.counts(),
            host_blocks,
            host_slots,
            snapshots: self.kv.blocks.snapshot_counts(),
        }
    }

    /// Full recount of pools and holders, for tests.
    ///
    /// # Errors
    /// What disagrees.
    pub fn check(&self) -> Result<(), String> {
        self.kv.states.check()?;
        self.host.check()?;
        let misuse = self.kv.misuse + self.host.misuse;
        if misuse > 0 {
            return Err(format!("{misuse} calls were refused by a pool"));
        }
        let (users, known) = (self.kv.blocks.snapshot_users(), self.snapshots.users());
        if users != known {
            return Err(format!("{users} copies use snapshots, {known} are known"));
        }
        self.check_holders()
    }

    /// Appends what changed in the prefix index since the last call.
    pub fn events(&mut self, into: &mut Vec<Event>) {
        self.kv.blocks.drain_events(into);
    }

    /// Steps planned and not completed.
    #[inline]
    pub(crate) fn in_flight(&self) -> u64 {
        self.step - self.completed
    }

    pub(crate) fn step_error(&self) -> Option<StepError> {
        if !self.ring.is_registered() {
            return Some(StepError::NoRing);
        }
        if self.is_half_planned() {
            return Some(StepError::HalfPlanned);
        }
        if self.in_flight() >= self.max_in_flight {
            return Some(StepError::InFlight(StepId(self.completed + 1)));
        }
        let (slot, user) = self.ring.slot_of(self.step + 1);
        user.map(|step| StepError::RingBusy { slot, step: StepId(step) })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shared.close();
    }
}
