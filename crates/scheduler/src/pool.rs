//! Sequence pool: everything a steady step does not read, by handle.

use crate::hits::Begin;
use crate::kv::Holding;
use crate::lanes::LANE_STOPS;
use crate::prepared::PrepFlags;
use crate::swap::Swap;
use crate::waiting::{Class, Place};
use deepinfer_kvindex::{Block, BlockHash, ChainHasher, Extra, Seq, TransferId};
use std::ops::Range;

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Its grammar is being compiled.
    WaitGrammar,
    /// Its KV is on the way, or blocks of its prompt are being fetched; bounded by a lease.
    WaitKv,
    /// A further sample of a request whose prompt another sequence is computing.
    WaitFork,
    /// Lacks nothing but resources; also preempted ones, with their history and place.
    Ready,
    /// Owns a lane.
    Running,
    /// Preempted, and its KV is being copied to host memory.
    SwappingOut,
    /// Its KV lies in host memory; it lacks nothing but resources.
    Swapped,
    /// Ended, its KV and slot are kept for whoever takes them over.
    Handover,
    /// Ended.
    Finished,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Finish {
    /// A stop id, or a stop string found outside.
    Stop = 1,
    /// The longest allowed length.
    Length = 2,
    /// The caller gave it up.
    Abort = 3,
    /// Its step, grammar or transfer failed.
    Error = 4,
    /// A prompt engine computed its prompt and first token; another engine goes on.
    Handover = 5,
}

/// Times of a sequence, in the caller's nanoseconds; 0 = not yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// First schedule that saw it.
    pub arrived: u64,
    /// First admission.
    pub admitted: u64,
    /// First output token.
    pub first_token: u64,
    /// End.
    pub finished: u64,
}

/// Cold data of one sequence.
pub(crate) struct Cold {
    /// Prompt and the output flushed so far; [`crate::kv::Tables`] has the newest tokens of a decoding one.
    pub history: Vec<u32>,
    pub prompt: u32,
    /// Hashes of the leading full blocks, as far as they were computed.
    pub hashes: Vec<BlockHash>,
    /// Leading blocks that are in the index, through `cursor`.
    pub published: u32,
    pub cursor: Block,
    /// Blocks of the row that someone else had published first; kept until the end.
    pub duplicates: Vec<Block>,
    /// Prompt + output tokens at which it ends.
    pub limit: u32,
    /// Prompt + output tokens before which stop ids do not count.
    pub least: u32,
    pub lane_stops: [i32; LANE_STOPS],
    /// Every stop id, sorted, when a lane cannot hold them.
    pub stops: Box<[u32]>,
    pub priority: i32,
    pub arrival: u64,
    pub fork: u32,
    pub class: Class,
    pub hasher: Option<ChainHasher>,
    pub extras: Vec<Extra>,
    /// Positions that a chunk computes together.
    pub spans: Box<[Range<u32>]>,
    pub flags: PrepFlags,
    /// Its KV lies elsewhere and whoever holds it has not been told to let go.
    pub remote: bool,
    pub user: u64,
    /// How its newest lane began.
    pub begin: Begin,
    /// Tokens that came from the index, a fork or a load at the first admission.
    pub cached_tokens: u32,
    /// Blocks and slot it holds without a lane.
    pub holding: Option<Holding>,
    /// Step that gave it its newest lane.
    pub admitted_by: u64,
    /// What it has in host memory.
    pub swap: Option<Swap>,
    pub parent: Option<Seq>,
    pub children: Vec<Seq>,
    /// Others admitted while it was the refused head.
    pub passed: u32,
    pub preemptions: u32,
    /// Time at which waiting for KV, or for being taken over, ends; 0 = no lease.
    pub lease: u64,
    pub load: Option<TransferId>,
    pub save: Option<TransferId>,
    pub queued: bool,
    pub finish: Option<Finish>,
    pub times: Times,
}

impl Cold {
    pub fn place(&self, seq: Seq) -> Place {
        Place {
            priority: self.priority,
            class: self.class,
            arrival: self.arrival,
            fork: self.fork,
            index: seq.index,
            generation: seq.generation,
        }
    }

    /// Positions whose KV it has without a lane.
    pub fn computed(&self) -> u32 {
        let held = self.holding.as_ref().map(|holding| holding.computed);
        held.or(self.swap.as_ref().map(|swap| swap.computed)).unwrap_or(0)
    }

    /// Whether `token`, as the `len`-th token of the sequence, ends it.
    pub fn stops_at(&self, token: u32, len: u32) -> bool {
        len >= self.least
            && if self.stops.is_empty() {
                self.lane_stops.contains(&(token as i32))
            } else {
                self.stops.binary_search(&token).is_ok()
            }
    }
}

const NO_LANE: u32 = u32::MAX;

/// Sequences by index.
#[derive(Default)]
pub(crate) struct SeqPool {
    generation: Vec<u32>,
    status: Vec<Status>,
    lane: Vec<u32>,
    cold: Vec<Option<Box<Cold>>>,
}

impl SeqPool {
    pub fn insert(&mut self, seq: Seq, status: Status, cold: Box<Cold>) {
        let index = seq.index as usize;
        if index >= self.generation.len() {
            self.generation.resize(index + 1, 0);
            self.status.resize(index + 1, Status::Finished);
            self.lane.resize(index + 1, NO_LANE);
            self.cold.resize_with(index + 1, || None);
        }
        self.generation[index] = seq.generation;
        self.status[index] = status;
        self.lane[index] = NO_LANE;
        self.cold[index] = Some(cold);
    }

    /// Forgets a sequence; its handle names nothing from here on.
    pub fn remove(&mut self, seq: Seq) {
        if self.contains(seq) {
            let index = seq.index as usize;
            self.cold[index] = None;
            self.status[index] = Status::Finished;
            self.lane[index] = NO_LANE;
        }
    }

    #[inline]
    pub fn contains(&self, seq: Seq) -> bool {
        let index = seq.index as usize;
        self.generation.get(index) == Some(&seq.generation) && self.cold[index].is_some()
    }

    pub fn status(&self, seq: Seq) -> Option<Status> {
        self.contains(seq).then(|| self.status[seq.index as usize])
    }

    pub fn set_status(&mut self, seq: Seq, status: Status) {
        if self.contains(seq) {
            self.status[seq.index as usize] = status;
        }
    }

    #[inline]
    pub fn lane(&self, seq: Seq) -> Option<usize> {
        let index = seq.index as usize;
        if self.generation.get(index) != Some(&seq.generation) {
            return None;
        }
        let lane = self.lane[index];
        (lane != NO_LANE).then_some(lane as usize)
    }

    #[inline]
    pub fn set_lane(&mut self, seq: Seq, lane: usize) {
        self.lane[seq.index as usize] = lane as u32;
    }

    pub fn clear_lane(&mut self, seq: Seq) {
        self.lane[seq.index as usize] = NO_LANE;
    }

    pub fn get(&self, seq: Seq) -> Option<&Cold> {
        if self.contains(seq) { self.cold[seq.index as usize].as_deref() } else { None }
    }

    pub fn get_mut(&mut self, seq: Seq) -> Option<&mut Cold> {
        if self.contains(seq) { self.cold[seq.index as usize].as_deref_mut() } else { None }
    }

    /// Every live sequence with its status.
    pub fn iter(&self) -> impl Iterator<Item = (Seq, Status, &Cold)> {
        self.cold.iter().enumerate().filter_map(|(index, cold)| {
            let cold = cold.as_deref()?;
            let seq = Seq { index: index as u32, generation: self.generation[index] };
            Some((seq, self.status[index], cold))
        })
    }
}
