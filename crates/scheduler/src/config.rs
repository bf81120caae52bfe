//! What a scheduler is built for: KV groups, limits, policy; checked once, with an error that says what to change.

use crate::chunk_policy::ChunkPolicy;
use crate::hits::WindowRule;
use crate::roles::EngineType;
use crate::step_type::StepPolicy;
use deepinfer_kvindex::{Event, Root};
use thiserror::Error;

/// Most extra pages a block may own in all groups together; bounds the delta list of a step.
const MAX_PAGES_PER_BLOCK: u32 = 64;

/// Most tokens of a block: two blocks of tokens are kept for every running sequence.
const MAX_BLOCK_TOKENS: u32 = 1 << 16;

/// What a running sequence and a page take beside rows of the block table, rounded up.
const BYTES_PER_SEQUENCE: u64 = 1024;
const BYTES_PER_PAGE: u64 = 128;
const BYTES_PER_HOST_ID: u64 = 32;

/// One tensor family that shares the page ids of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Entries stored per page; divides the group's `page_tokens`.
    pub entries_per_page: u32,
    /// Bytes of one entry.
    pub entry_bytes: u64,
}

/// One KV group, declared by the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupSpec {
    /// Paged KV: every source of the group is addressed by one page id.
    Paged {
        /// Tokens a page covers; group 0's is the hash block.
        page_tokens: u32,
        /// Pages of this group's pool, the null page 0 included.
        num_pages: u32,
        /// What a page stores.
        sources: Vec<Source>,
    },
    /// Bytes per sequence that do not page; the core hands out the slot only.
    State {
        /// Bytes worth storing beyond the sequence.
        stored: u64,
        /// Bytes that die with the sequence.
        dropped: u64,
        /// Copies of the stored region kept during decode.
        replicas: u8,
        /// Entries of the ring, 0 when it is not one.
        ring: u32,
        /// Boundaries at which the state can be cut, in tokens; 0 when it cannot.
        cut: u32,
    },
}

/// Which prefix may be taken from the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HitRule {
    /// Plain attention: any full block.
    #[default]
    All,
    /// The boundary must have a stored state slice (recurrent or window state restored by the worker).
    StateSlice,
    /// Windows of tokens beside block KV: restored, or made up by computing rows again.
    Window(WindowRule),
}

/// Sizes of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Running sequences at once.
    pub max_num_seqs: u32,
    /// Token rows of one step.
    pub max_num_batched_tokens: u32,
    /// Prompt and output of one sequence together.
    pub max_model_len: u32,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// Draft rows beyond the first, per sequence and step.
    pub max_draft: u32,
}

/// Choices that change order and timing, never tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// How prompt and decode rows share steps; by default mixed without a rank group, decode first with one.
    pub step_policy: Option<StepPolicy>,
    /// Decode-first: decode steps after which prefill is tried if every rank wants it.
    pub all_interval: u32,
    /// Decode-first: decode steps after which prefill is tried if any rank wants it.
    pub any_interval: u32,
    /// Size of prefill chunks.
    pub chunk: ChunkPolicy,
    /// Chunk cuts end on a multiple of this; 1 = anywhere.
    pub chunk_align: u32,
    /// Others that may pass a waiting head which lacks resources, before resources are kept for it.
    pub bypass: u32,
    /// Tokens of growth kept free per running sequence when another is admitted, so that it is not preempted at once.
    pub headroom_tokens: u32,
    /// Longest wait for inbound KV, in nanoseconds, counted from the first schedule that saw the request.
    pub kv_lease_ns: u64,
    /// Longest wait for blocks that are fetched, in nanoseconds; then the sequence is admitted with what is there.
    pub fetch_lease_ns: u64,
    /// Longest time that a sequence in status `Handover` keeps its blocks and slot, in nanoseconds.
    pub handover_lease_ns: u64,
    /// Which prefix may be reused.
    pub hit_rule: HitRule,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            step_policy: None,
            all_interval: 70,
            any_interval: 100,
            chunk: ChunkPolicy::default(),
            chunk_align: 1,
            bypass: 16,
            headroom_tokens: 16,
            kv_lease_ns: 60_000_000_000,
            fetch_lease_ns: 10_000_000_000,
            handover_lease_ns: 60_000_000_000,
            hit_rule: HitRule::All,
        }
    }
}

/// Everything a [`crate::Scheduler`] is built from.
#[derive(Clone, Debug)]
pub struct Config {
    /// What this engine does of a request.
    pub engine: EngineType,
    /// KV groups; the first paged one is group 0, whose page is the hash block.
    pub groups: Vec<GroupSpec>,
    /// Sizes.
    pub limits: Limits,
    /// Order and timing.
    pub policy: Policy,
    /// Work of step n + 1 starts on the device after that of step n: resources are reusable one step earlier.
    pub device_ordered: bool,
    /// Publish filled blocks and reuse them.
    pub prefix_caching: bool,
    /// Entries of the block event log; 0 = none.
    pub event_capacity: usize,
    /// What the hash chain is rooted in; `block_tokens` must be group 0's `page_tokens`.
    pub root: Root,
    /// Slots of the step ring, at least 3.
    pub ring_slots: u32,
    /// Blocks of host memory that victims can be swapped to; 0 = victims are computed again.
    pub host_blocks: u32,
    /// State slots of host memory; a model with per-sequence state is swapped only if there are some.
    pub host_slots: u32,
    /// Places for snapshots of sequences' states, of a model whose hit rule is [`HitRule::Window`]; 0 = none are kept.
    pub snapshot_slots: u32,
    /// Steps that may be planned and not completed: 1 = serial, 2 = the next one is planned while the device runs one.
    pub max_in_flight: u32,
    /// Draft rows of each decoding sequence whose ids the worker has on the device; 0 = off, then drafts come by `propose`.
    pub device_drafts: u32,
}

/// Why a configuration cannot work.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// There is nothing to page.
    #[error("declare at least one paged KV group: its page is the unit of paging and hashing")]
    NoPagedGroup,
    /// A state group came before group 0.
    #[error("the first KV group must be paged")]
    FirstGroupNotPaged,
    /// A size must be a power of two.
    #[error("{what} is {value}; make it a power of two of at least {least}")]
    PowerOfTwo {
        /// Name of the size.
        what: &'static str,
        /// Given value.
        value: u32,
        /// Smallest allowed value.
        least: u32,
    },
    /// A page size or an entry count does not divide what contains it.
    #[error("{what} ({value}) must divide {of}")]
    Divides {
        /// Name of the value.
        what: &'static str,
        /// Given value.
        value: u32,
        /// What it must divide.
        of: u32,
    },
    /// A group without sources stores nothing.
    #[error("paged KV group {0} has no source")]
    NoSource(usize),
    /// More drafts than the rings of a model's windows can take back.
    #[error("max_draft is {value}; this model's windows can take back at most {most} rows: lower it")]
    Drafts {
        /// Given value.
        value: u32,
        /// Largest allowed value.
        most: u32,
    },
    /// The hit rule is about state and there is none.
    #[error("hit_window needs a state group: windows are what a sequence keeps beside its pages")]
    NoState,
    /// Nothing can be copied, or nothing asks for it.
    #[error("snapshot_slots is {0}; snapshots need a hit_window and a replica of every state group: set it to 0")]
    NoSnapshots(u32),
    /// Nothing can be cut.
    #[error(
        "state slices need a hit_window, a replica of every state group and prefix caching: leave set_state_slices out"
    )]
    NoSlices,
    /// Nothing enters the index.
    #[error(
        "saves need prefix caching: what is saved are blocks of the prefix index; leave set_saves out or turn it on"
    )]
    NoSaves,
    /// A limit is below what one step needs.
    #[error("{what} is {value}; it must be at least {least}")]
    TooSmall {
        /// Name of the limit.
        what: &'static str,
        /// Given value.
        value: u64,
        /// Smallest allowed value.
        least: u64,
    },
    /// A value does not fit the 32-bit words of the ring.
    #[error("{what} is {value}; slots and ids are 32-bit words, so it must stay below {below}")]
    TooLarge {
        /// Name of the value.
        what: &'static str,
        /// Given value.
        value: u64,
        /// First value that does not fit.
        below: u64,
    },
    /// A coefficient of the chunk cost that no cost has.
    #[error("chunk_cost {what} is {value}; give four finite numbers of nanoseconds, none below 0, and a or d above 0")]
    ChunkCost {
        /// Name of the coefficient.
        what: &'static str,
        /// Given value.
        value: String,
    },
    /// Drafts have one origin.
    #[error("drafts are made on the device (device_drafts is {0}): propose none, or set device_drafts to 0")]
    DeviceDrafts(u32),
    /// The tables alone would not fit the memory of this machine.
    #[error(
        "the scheduler's own tables would take {0} bytes, which cannot be had: lower max_num_seqs, max_model_len, num_pages, \
         host_blocks or event_capacity"
    )]
    Memory(u64),
}

/// One slot array of the ring: entries of `e` per page of group `group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMap {
    /// Index among the paged groups.
    pub group: usize,
    /// Entries per page.
    pub entries: u32,
    /// log2 of the page's tokens.
    pub page_shift: u32,
    /// log2 of tokens per entry.
    pub ratio_shift: u32,
}

/// One section of the block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// First column.
    pub column: u32,
    /// log2 of the pages a block owns in this group.
    pub pages_shift: u32,
    /// log2 of the page's tokens.
    pub page_shift: u32,
    /// Pages of the pool.
    pub num_pages: u32,
}

/// Sizes derived from a checked configuration.
#[derive(Clone, Debug)]
pub(crate) struct Geometry {
    pub block_tokens: u32,
    pub shift: u32,
    pub mask: u32,
    /// Blocks of one table row.
    pub row_blocks: u32,
    /// Columns of the block table over all groups.
    pub columns: u32,
    /// Pages one block owns over all groups.
    pub pages_per_block: u32,
    pub sections: Vec<Section>,
    pub maps: Vec<SlotMap>,
    pub has_state: bool,
    /// Every state group has a replica.
    pub has_replicas: bool,
    /// Bytes of a page, by group.
    pub page_bytes: Vec<u64>,
    /// Bytes of a state slot over all state groups.
    pub state_bytes: u64,
    /// Blocks a sequence can hold in an empty pool.
    pub usable_blocks: u32,
}

impl Geometry {
    /// Pages of a group with positions of the `index`-th block of a row, of which `computed` positions count.
    pub fn pages_of(&self, group: usize, index: u32, computed: u32) -> u32 {
        let used = (computed - (index << self.shift)).min(self.block_tokens);
        used.div_ceil(1 << self.sections[group].page_shift)
    }
}

fn power_of_two(what: &'static str, value: u32, least: u32) -> Result<(), ConfigError> {
    if value.is_power_of_two() && value >= least { Ok(()) } else { Err(ConfigError::PowerOfTwo { what, value, least }) }
}

fn at_least(what: &'static str, value: u64, least: u64) -> Result<(), ConfigError> {
    if value >= least { Ok(()) } else { Err(ConfigError::TooSmall { what, value, least }) }
}

fn below(what: &'static str, value: u64, below: u64) -> Result<(), ConfigError> {
    if value < below { Ok(()) } else { Err(ConfigError::TooLarge { what, value, below }) }
}

impl Config {
    /// Checks every value and derives the sizes that the rest uses.
    pub(crate) fn geometry(&self) -> Result<Geometry, ConfigError> {
        self.check_limits()?;
        let mut sections: Vec<Section> = Vec::new();
        let mut maps: Vec<SlotMap> = Vec::new();
        let (mut has_state, mut has_replicas) = (false, true);
        let mut page_bytes = Vec::new();
        let mut state_bytes: u64 = 0;
        let mut block_tokens = 0;
        let mut column: u64 = 0;
        let mut pages_per_block = 0;
        let mut row_blocks = 0;
        let mut usable = u32::MAX;
        for (index, group) in self.groups.iter().enumerate() {
            let (page_tokens, num_pages, sources) = match group {
                GroupSpec::Paged { page_tokens, num_pages, sources } => (page_tokens, num_pages, sources),
                GroupSpec::State { stored, dropped, replicas, .. } => {
                    has_state = true;
                    has_replicas &= *replicas > 0;
                    let kept = stored.saturating_mul(1 + u64::from(*replicas));
                    state_bytes = state_bytes.saturating_add(kept).saturating_add(*dropped);
                    continue;
                }
            };
            if sources.is_empty() {
                return Err(ConfigError::NoSource(index));
            }
            power_of_two("page_tokens", *page_tokens, 1)?;
            if sections.is_empty() {
                if index != 0 {
                    return Err(ConfigError::FirstGroupNotPaged);
                }
                power_of_two("page_tokens of KV group 0", *page_tokens, 4)?;
                below("page_tokens of KV group 0", u64::from(*page_tokens), u64::from(MAX_BLOCK_TOKENS) + 1)?;
                block_tokens = *page_tokens;
                row_blocks = self.limits.max_model_len.div_ceil(block_tokens);
            } else if *page_tokens > block_tokens {
                return Err(ConfigError::Divides { what: "page_tokens", value: *page_tokens, of: block_tokens });
            }
            let pages = block_tokens / page_tokens;
            at_least("num_pages", u64::from(*num_pages), u64::from(1 + pages))?;
            for source in sources {
                power_of_two("entries_per_page", source.entries_per_page, 1)?;
                if source.entries_per_page > *page_tokens {
                    let (value, of) = (source.entries_per_page, *page_tokens);
                    return Err(ConfigError::Divides { what: "entries_per_page", value, of });
                }
                below("pages × entries", u64::from(*num_pages) * u64::from(source.entries_per_page), 1 << 31)?;
                let map = SlotMap {
                    group: sections.len(),
                    entries: source.entries_per_page,
                    page_shift: page_tokens.trailing_zeros(),
                    ratio_shift: (page_tokens / source.entries_per_page).trailing_zeros(),
                };
                if !maps.contains(&map) {
                    maps.push(map);
                }
            }
            below("pages of one block", pages.into(), u64::from(MAX_PAGES_PER_BLOCK) + 1)?;
            let width = u64::from(row_blocks) * u64::from(pages);
            below("columns of the block table", column + width, 1 << 31)?;
            sections.push(Section {
                column: column as u32,
                pages_shift: pages.trailing_zeros(),
                page_shift: page_tokens.trailing_zeros(),
                num_pages: *num_pages,
            });
            let bytes = |s: &Source| s.entry_bytes.saturating_mul(s.entries_per_page.into());
            page_bytes.push(sources.iter().map(bytes).fold(0, u64::saturating_add));
            below("host_blocks × pages of a block", u64::from(self.host_blocks) * u64::from(pages), 1 << 31)?;
            column += width;
            pages_per_block += pages;
            usable = usable.min((num_pages - 1) / pages);
        }
        if sections.is_empty() {
            return Err(ConfigError::NoPagedGroup);
        }
        below("pages of one block over all KV groups", pages_per_block.into(), u64::from(MAX_PAGES_PER_BLOCK) + 1)?;
        if self.root.block_tokens != block_tokens {
            let (value, of) = (self.root.block_tokens, block_tokens);
            return Err(ConfigError::Divides { what: "root.block_tokens, equal to group 0's page_tokens,", value, of });
        }
        self.check_hits(block_tokens)?;
        Ok(Geometry {
            block_tokens,
            shift: block_tokens.trailing_zeros(),
            mask: block_tokens - 1,
            row_blocks,
            columns: column as u32,
            pages_per_block,
            sections,
            maps,
            has_state,
            has_replicas: has_state && has_replicas,
            page_bytes,
            state_bytes,
            usable_blocks: usable,
        })
    }

    /// Whether the tables that [`crate::Scheduler::new`] takes can be had: an allocation that fails there would end the process.
    pub(crate) fn check_memory(&self, geometry: &Geometry) -> Result<(), ConfigError> {
        let (slots, block) = (u64::from(self.limits.max_num_seqs) + 1, u64::from(geometry.block_tokens));
        let rows = slots.saturating_mul(4 * (u64::from(geometry.row_blocks) + 2 * block) + BYTES_PER_SEQUENCE);
        let pages =
            geometry.sections.iter().map(|s| u64::from(s.num_pages)).sum::<u64>().saturating_mul(BYTES_PER_PAGE);
        let events = (self.event_capacity as u64).saturating_mul(size_of::<Event>() as u64);
        let host_ids = [self.host_blocks, self.host_slots, self.snapshot_slots].map(u64::from);
        let host = host_ids.iter().sum::<u64>() * BYTES_PER_HOST_ID;
        let bytes = rows.saturating_add(pages).saturating_add(events).saturating_add(host);
        let mut probe: Vec<u8> = Vec::new();
        usize::try_from(bytes)
            .ok()
            .and_then(|wanted| probe.try_reserve_exact(wanted).ok())
            .ok_or(ConfigError::Memory(bytes))
    }

    /// Whether the hit rule and its snapshots have what they need of the state groups.
    fn check_hits(&self, block_tokens: u32) -> Result<(), ConfigError> {
        let states = self.groups.iter().filter_map(|group| match group {
            GroupSpec::State { cut, replicas, .. } => Some((*cut, *replicas)),
            GroupSpec::Paged { .. } => None,
        });
        let (cuts, replicas): (Vec<u32>, Vec<u8>) = states.unzip();
        let mut can_keep = false;
        if let HitRule::Window(rule) = &self.policy.hit_rule {
            rule.check(block_tokens, &cuts, self.limits.max_draft)?;
            can_keep = replicas.iter().all(|&copies| copies > 0);
        }
        if self.snapshot_slots == 0 || can_keep { Ok(()) } else { Err(ConfigError::NoSnapshots(self.snapshot_slots)) }
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let limits = &self.limits;
        at_least("max_num_seqs", limits.max_num_seqs.into(), 1)?;
        below("max_num_seqs", limits.max_num_seqs.into(), 1 << 20)?;
        at_least("max_num_batched_tokens", limits.max_num_batched_tokens.into(), limits.max_num_seqs.into())?;
        below("max_num_batched_tokens", limits.max_num_batched_tokens.into(), 1 << 24)?;
        at_least("max_model_len", limits.max_model_len.into(), 2)?;
        below("max_model_len", limits.max_model_len.into(), 1 << 30)?;
        at_least("vocab_size", limits.vocab_size.into(), 1)?;
        below("vocab_size", limits.vocab_size.into(), 1 << 31)?;
        below("max_draft", limits.max_draft.into(), 256)?;
        below("device_drafts", self.device_drafts.into(), u64::from(limits.max_draft) + 1)?;
        at_least("ring_slots", self.ring_slots.into(), 3)?;
        below("ring_slots", self.ring_slots.into(), 64)?;
        below("host_slots", self.host_slots.into(), 1 << 31)?;
        below("snapshot_slots", self.snapshot_slots.into(), 1 << 24)?;
        at_least("max_in_flight", self.max_in_flight.into(), 1)?;
        below("max_in_flight", self.max_in_flight.into(), 3)?;
        at_least("chunk_align", self.policy.chunk_align.into(), 1)?;
        at_least("all_interval", self.policy.all_interval.into(), 1)?;
        at_least("any_interval", self.policy.any_interval.into(), 1)?;
        match self.policy.chunk {
            ChunkPolicy::Tokens(_) => Ok(()),
            ChunkPolicy::Time { budget_ns, cost } => cost.check(budget_ns),
        }
    }
}
