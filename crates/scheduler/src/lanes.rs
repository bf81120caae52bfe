//! Lanes: what a steady step reads of the running sequences, as dense arrays.
//!
//! Decoding lanes come first, then those still in prefill in the order they were admitted. A lane moves when another
//! ends, so it never leaves the core; whoever needs a stable row uses the state slot.

use crate::pool::SeqPool;
use deepinfer_kvindex::Seq;

/// Bits of a lane's flags. Any of [`flag::SLOW`] leaves the vector path of `complete`.
pub(crate) mod flag {
    /// More stop ids than a lane holds, or a minimum length not reached yet.
    pub const STOPS: u8 = 1;
    /// Its tokens are read in every step.
    pub const STREAM: u8 = 2;
    /// A grammar constrains it.
    pub const GRAMMAR: u8 = 4;
    /// Never planned ahead of its results: its state is handed over as it stands at its end.
    pub const ALONE: u8 = 8;
    /// Wants prompt logprobs.
    pub const LOGPROBS: u8 = 16;
    /// Preempted or ended; removed when the pass ends.
    pub const DEAD: u8 = 32;
    /// Its prefill is computed or in flight; moved to the decoding lanes when the pass ends.
    pub const PROMOTE: u8 = 64;
    /// Found no block in this step and waits for one that is coming back.
    pub const WAITS: u8 = 128;
    /// What the vector path cannot do.
    pub const SLOW: u8 = STOPS;
}

/// In `sent`: no row in that step.
pub(crate) const NOT_SENT: u32 = u32::MAX;

/// Stop ids a lane compares without leaving the vector path.
pub(crate) const LANE_STOPS: usize = 4;

/// What a lane starts from.
pub(crate) struct NewLane {
    pub seq: Seq,
    pub state: u32,
    pub confirmed: u32,
    pub target: u32,
    pub limit: u32,
    pub blocks: u32,
    pub stops: [i32; LANE_STOPS],
    pub flags: u8,
    pub priority: i32,
    pub arrival: u64,
}

/// Dense arrays of the running sequences, all of one length.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Handle.
    pub seq: Vec<Seq>,
    /// State slot.
    pub state: Vec<u32>,
    /// Positions launched; an upper bound while a step with drafts is in flight.
    pub planned: Vec<u32>,
    /// Positions completed: their KV is written.
    pub confirmed: Vec<u32>,
    /// Positions to compute before the first token is sampled; decoding lanes do not use it.
    pub target: Vec<u32>,
    /// Tokens (prompt and output) at which the sequence ends.
    pub limit: Vec<u32>,
    /// Newest token of a decoding lane; −1 while it is being drawn.
    pub last: Vec<i32>,
    /// Block that position `planned` lies in, once the row has it.
    pub open: Vec<u32>,
    /// Blocks in the table row.
    pub blocks: Vec<u32>,
    /// Blocks of the row that the device knows.
    pub told: Vec<u32>,
    /// Tokens that the history has; the newer ones are in the open pages.
    pub flushed: Vec<u32>,
    /// Rows in the step being planned.
    pub rows: Vec<u32>,
    /// Index in the newest even and the newest odd step, [`NOT_SENT`] without a row there: how results find their lane. A
    /// lane given after a step was launched is not meant by it.
    pub sent: [Vec<u32>; 2],
    /// Proposed tokens for the next step.
    pub drafts: Vec<u32>,
    /// Up to four stop ids, −1 where unused.
    pub stops: Vec<[i32; LANE_STOPS]>,
    pub flags: Vec<u8>,
    pub priority: Vec<i32>,
    pub arrival: Vec<u64>,
    /// Lanes that decode; the rest is in prefill.
    pub decoding: usize,
    /// Raised whenever a decoding lane moves.
    pub version: u64,
}

macro_rules! each_array {
    ($lanes:expr, $array:ident => $body:expr) => {{
        let lanes = $lanes;
        {
            let $array = &mut lanes.seq;
            $body;
        }
        {
            let $array = &mut lanes.state;
            $body;
        }
        {
            let $array = &mut lanes.planned;
            $body;
        }
        {
            let $array = &mut lanes.confirmed;
            $body;
        }
        {
            let $array = &mut lanes.target;
            $body;
        }
        {
            let $array = &mut lanes.limit;
            $body;
        }
        {
            let $array = &mut lanes.last;
            $body;
        }
        {
            let $array = &mut lanes.open;
            $body;
        }
        {
            let $array = &mut lanes.blocks;
            $body;
        }
        {
            let $array = &mut lanes.told;
            $body;
        }
        {
            let $array = &mut lanes.flushed;
            $body;
        }
        {
            let $array = &mut lanes.rows;
            $body;
        }
        {
            let $array = &mut lanes.sent[0];
            $body;
        }
        {
            let $array = &mut lanes.sent[1];
            $body;
        }
        {
            let $array = &mut lanes.drafts;
            $body;
        }
        {
            let $array = &mut lanes.stops;
            $body;
        }
        {
            let $array = &mut lanes.flags;
            $body;
        }
        {
            let $array = &mut lanes.priority;
            $body;
        }
        {
            let $array = &mut lanes.arrival;
            $body;
        }
    }};
}

impl Lanes {
    pub fn with_capacity(n: usize) -> Self {
        let mut lanes = Self::default();
        each_array!(&mut lanes, array => array.reserve_exact(n));
        lanes
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.seq.len()
    }

    /// Adds a lane at the end of the prefill ones.
    pub fn push(&mut self, new: &NewLane, seqs: &mut SeqPool) -> usize {
        let lane = self.len();
        self.seq.push(new.seq);
        self.state.push(new.state);
        self.planned.push(new.confirmed);
        self.confirmed.push(new.confirmed);
        self.target.push(new.target);
        self.limit.push(new.limit);
        self.last.push(0);
        self.open.push(0);
        self.blocks.push(new.blocks);
        self.told.push(0);
        self.flushed.push(new.target);
        self.rows.push(0);
        self.sent[0].push(NOT_SENT);
        self.sent[1].push(NOT_SENT);
        self.drafts.push(0);
        self.stops.push(new.stops);
        self.flags.push(new.flags);
        self.priority.push(new.priority);
        self.arrival.push(new.arrival);
        seqs.set_lane(new.seq, lane);
        lane
    }

    /// Whether the newest token of a lane is known: it decodes, and its prompt is not in flight.
    #[inline]
    pub fn has_newest(&self, lane: usize) -> bool {
        (lane < self.decoding || self.flags[lane] & flag::PROMOTE != 0) && self.confirmed[lane] >= self.target[lane]
    }

    /// Moves what passes mark: prefill lanes that ended their prompt join the decoding ones, dead lanes go.
    pub fn settle(&mut self, seqs: &mut SeqPool) {
        for lane in self.decoding..self.len() {
            if self.flags[lane] & flag::PROMOTE != 0 {
                self.flags[lane] &= !flag::PROMOTE;
                let to = self.decoding;
                // The order of those still in prefill is their order of service: shift, do not swap.
                each_array!(&mut *self, array => array[to..=lane].rotate_right(1));
                self.decoding += 1;
                self.index(to, lane + 1, seqs);
            }
        }
        for lane in (0..self.len()).rev() {
            if self.flags[lane] & flag::DEAD != 0 {
                self.remove(lane, seqs);
            }
        }
    }

    fn remove(&mut self, lane: usize, seqs: &mut SeqPool) {
        seqs.clear_lane(self.seq[lane]);
        let mut hole = lane;
        if lane < self.decoding {
            self.version += 1;
            self.decoding -= 1;
            hole = self.decoding;
            each_array!(&mut *self, array => array.swap(lane, hole));
            if lane != hole {
                seqs.set_lane(self.seq[lane], lane);
            }
        }
        each_array!(&mut *self, array => { array.remove(hole); });
        let len = self.len();
        self.index(hole, len, seqs);
    }

    fn index(&self, from: usize, to: usize, seqs: &mut SeqPool) {
        for lane in from..to {
            seqs.set_lane(self.seq[lane], lane);
        }
    }
}
