//! Admission: from the head of the queue, everything a sequence needs at once or nothing.

use crate::config::HitRule;
use crate::fork::Sharing;
use crate::hits::{Begin, StartKind};
use crate::lanes::{NewLane, flag};
use crate::pool::Status;
use crate::scheduler::Scheduler;
use crate::waiting::{Class, Place, Room};
use deepinfer_kvindex::{Block, Fence, Hit, Owner, Part, Seq, StateSlot};

/// Candidates behind a refused head that one step looks at.
const SCAN: u32 = 8;

pub(crate) enum Try {
    /// Admitted with this many rows.
    In(u32),
    /// Lacks blocks.
    NoRoom,
    /// The step's command lists are full: next step.
    Later,
}

/// Where the leading blocks of a sequence come from.
#[derive(Clone, Copy)]
enum Start {
    Hit { blocks: u32, leaf: Block, begin: Begin, snapshot: Block },
    Fork(Sharing),
}

impl Scheduler {
    /// Admits waiting sequences while rows, lanes and resources last.
    pub(crate) fn admit(&mut self, budget: u32) {
        if self.waiting.is_empty()
            || !self.room_for_one(budget)
            || !self.waiting.worth_a_scan(self.room(), self.step + 1)
        {
            return;
        }
        self.commands.deltas = (0..self.lanes.len())
            .filter(|&lane| self.lanes.rows[lane] > 0)
            .map(|lane| (self.lanes.blocks[lane] - self.lanes.told[lane]) * self.geometry.pages_per_block)
            .sum();
        self.scan(budget);
        // Nothing runs and nothing fits: waiting sequences that hold loaded KV give it up, newest first.
        while self.lanes.len() == 0 && self.reclaim_held() {
            self.scan(budget);
        }
    }

    /// One pass over the queue.
    fn scan(&mut self, mut budget: u32) {
        self.waiting.forget_refusal();
        let mut refused = None;
        let mut tried = 0;
        let mut at = self.waiting.head();
        let barrier = self.first_leaving();
        while let Some(place) = at
            && self.room_for_one(budget)
            && (self.lanes.len() == 0 || barrier.is_none_or(|first| place < first))
        {
            match self.try_admit(&place, budget) {
                Try::In(rows) => {
                    budget -= rows;
                    if let Some(head) = refused {
                        self.count_pass(head);
                        at = self.waiting.after(&place);
                    } else {
                        at = self.waiting.head();
                    }
                }
                Try::Later => break,
                Try::NoRoom => {
                    if refused.is_none() {
                        refused = Some(place);
                        self.waiting.refuse(self.room(), self.step + 1);
                    }
                    tried += 1;
                    at = self.waiting.after(&place);
                }
            }
            if let Some(head) = refused
                && !self.may_pass(&head, tried)
            {
                break;
            }
        }
    }

    /// Place of the first sequence whose copy to host memory is under way: it is in the queue as soon as that is done, and
    /// nobody passes a preempted one.
    fn first_leaving(&self) -> Option<Place> {
        let place = |&seq: &Seq| self.seqs.get(seq).map(|cold| cold.place(seq));
        self.swaps.leaving().iter().filter_map(place).min()
    }

    fn room(&self) -> Room {
        let slots = self.kv.states.available(self.kv.now);
        Room { blocks: self.kv.available(), slots, running: self.lanes.len() }
    }

    fn room_for_one(&self, budget: u32) -> bool {
        budget > 0
            && !self.chunks.is_spent()
            && self.lanes.len() < self.limits.max_num_seqs as usize
            && self.kv.available() + self.held_waiting() > 0
            && self.kv.states.available(self.kv.now) + self.held_waiting() > 0
    }

    /// Whether a scan of the queue could admit anyone.
    pub(crate) fn may_admit(&self) -> bool {
        self.lanes.len() < self.limits.max_num_seqs as usize
            && self.kv.available() + self.held_waiting() > 0
            && self.kv.states.available(self.kv.now) + self.held_waiting() > 0
            && self.waiting.worth_a_scan(self.room(), self.step + 1)
    }

    /// Waiting sequences that own blocks and a slot already.
    fn held_waiting(&self) -> u32 {
        self.transfers.delivered()
    }

    /// Whether others may be admitted past a refused head. Nobody passes a preempted one; while nothing runs the whole queue
    /// is looked at, so that whatever fits goes.
    fn may_pass(&self, head: &Place, tried: u32) -> bool {
        if self.lanes.len() == 0 {
            return true;
        }
        let passed = self.seqs.get(head.seq()).map_or(0, |c| c.passed);
        head.class == Class::New && tried <= SCAN && passed < self.policy.bypass
    }

    fn count_pass(&mut self, head: Place) {
        if let Some(cold) = self.seqs.get_mut(head.seq()) {
            cold.passed += 1;
        }
    }

    /// The newest waiting sequence that holds loaded KV gives it up. False if there is none.
    fn reclaim_held(&mut self) -> bool {
        let last = self.last_held();
        if let Some(seq) = last {
            self.drop_delivered(seq);
        }
        last.is_some()
    }

    /// Last in the queue of those that hold loaded KV.
    pub(crate) fn last_held(&self) -> Option<Seq> {
        if self.held_waiting() == 0 {
            return None;
        }
        let holds = |seq: &Seq| self.seqs.get(*seq).is_some_and(|cold| cold.holding.is_some());
        self.waiting.iter().rev().map(Place::seq).find(holds)
    }

    fn try_admit(&mut self, place: &Place, budget: u32) -> Try {
        let seq = place.seq();
        let Some(cold) = self.seqs.get(seq) else {
            self.waiting.remove(place);
            return Try::NoRoom;
        };
        let target = cold.history.len() as u32;
        let all = target.div_ceil(self.geometry.block_tokens);
        if !self.commands.has_room(all * self.geometry.pages_per_block, &self.layout, &self.geometry) {
            return Try::Later;
        }
        if cold.holding.is_some() {
            return self.admit_held(seq, all, budget);
        }
        if cold.swap.is_some() {
            return self.admit_swapped(seq, all, budget);
        }
        let start = self.sharing(seq).map_or_else(|| self.prefix_of(seq, target), Start::Fork);
        let (blocks, leaf) = match start {
            Start::Hit { blocks, leaf, .. } => (blocks, leaf),
            Start::Fork(sharing) => (sharing.blocks, sharing.leaf),
        };
        let mut row = std::mem::take(&mut self.scratch);
        row.clear();
        let Some(slot) = self.reserve(leaf, all - blocks, &mut row) else {
            self.scratch = row;
            return Try::NoRoom;
        };
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.published = blocks;
            cold.cursor = leaf;
        }
        let (begin, cloned) = match start {
            Start::Hit { begin, snapshot, .. } => {
                self.note_start(&begin);
                if !snapshot.is_null() {
                    self.restore_snapshot(snapshot, slot.0);
                }
                (begin, false)
            }
            Start::Fork(sharing) => {
                self.clone_from_parent(&sharing, row.get(blocks as usize).copied(), slot);
                let parent = self.seqs.get(self.lanes.seq[sharing.lane]);
                (parent.map(|cold| cold.begin).unwrap_or_default().go_on(sharing.computed), true)
            }
        };
        let rows = self.take_lane(seq, slot, &row, begin, cloned, budget);
        self.scratch = row;
        Try::In(rows)
    }

    /// Takes the chain that ends at `leaf`, `need` blocks after it, and a slot: all of it or nothing.
    pub(crate) fn reserve(&mut self, leaf: Block, need: u32, row: &mut Vec<Block>) -> Option<StateSlot> {
        let cost = need + self.kv.blocks.pin_cost(leaf) + self.headroom();
        if cost > self.kv.available() {
            return None;
        }
        let slot = self.kv.states.alloc(self.kv.now)?;
        if !leaf.is_null() {
            self.kv.pin_chain(leaf, Owner::Sequence, row);
        }
        if self.kv.blocks.alloc_many(self.kv.now, Owner::Sequence, need, row) {
            return Some(slot);
        }
        // Cannot happen: the cost was compared with what is available. Undo it rather than trust that.
        self.kv.misuse += 1;
        if !leaf.is_null() {
            self.kv.unpin(leaf, Owner::Sequence, Fence::Step(self.kv.launched));
        }
        self.kv.release_slot(slot, Fence::Open);
        None
    }

    /// Longest usable prefix in the index: whole blocks, at most all but one token of the history.
    fn prefix_of(&self, seq: Seq, target: u32) -> Start {
        let hashes = match self.seqs.get(seq) {
            Some(cold) if self.prefix_caching && !cold.flags.prompt_logprobs => &*cold.hashes,
            _ => &[],
        };
        let most = (((target - 1) >> self.geometry.shift) as usize).min(hashes.len());
        let hit = self.kv.blocks.find_prefix(&hashes[..most]);
        let tokens = |hit: Hit| (hit.blocks as u32) << self.geometry.shift;
        let (hit, begin, snapshot) = match &self.policy.hit_rule {
            HitRule::All => (hit, Begin::whole(tokens(hit)), Block::NULL),
            HitRule::StateSlice => {
                let hit = self.kv.blocks.shorten_to(hit, Part::StateSlice);
                let kind = if hit.blocks > 0 { StartKind::Slice } else { StartKind::Nothing };
                (hit, Begin { kind, ..Begin::whole(tokens(hit)) }, Block::NULL)
            }
            HitRule::Window(rule) => self.begin_with_windows(rule, hit, target),
        };
        Start::Hit { blocks: hit.blocks as u32, leaf: hit.leaf, begin, snapshot }
    }

    /// Blocks kept free for the growth of those who run, so that an admission does not preempt them at once.
    pub(crate) fn headroom(&self) -> u32 {
        let running = self.lanes.len() as u32;
        if running == 0 {
            0
        } else {
            ((running + 1) * self.policy.headroom_tokens).div_ceil(self.geometry.block_tokens)
        }
    }

    /// Admits a sequence whose KV was loaded: its blocks and slot are its own already.
    fn admit_held(&mut self, seq: Seq, all: u32, budget: u32) -> Try {
        let held = self.seqs.get(seq).and_then(|c| c.holding.as_ref()).map_or(0, |h| h.row.len() as u32);
        let need = all.saturating_sub(held);
        if need > 0 && need + self.headroom() > self.kv.available() {
            return Try::NoRoom;
        }
        let Some(mut holding) = self.seqs.get_mut(seq).and_then(|c| c.holding.take()) else { return Try::NoRoom };
        self.kv.blocks.alloc_many(self.kv.now, Owner::Sequence, need, &mut holding.row);
        let begin = Begin::whole(holding.computed);
        let rows = self.take_lane(seq, holding.slot, &holding.row, begin, true, budget);
        Try::In(rows)
    }

    /// Gives a sequence its lane and table row. Returns the rows of its first chunk.
    pub(crate) fn take_lane(
        &mut self,
        seq: Seq,
        slot: StateSlot,
        row: &[Block],
        begin: Begin,
        keeps_state: bool,
        budget: u32,
    ) -> u32 {
        self.unqueue(seq);
        self.seqs.set_status(seq, Status::Running);
        for (index, &block) in row.iter().enumerate() {
            self.kv.tables.set(slot.0, index as u32, block);
        }
        let now = self.now;
        let step = self.step + 1;
        let Some(cold) = self.seqs.get_mut(seq) else { return 0 };
        cold.admitted_by = step;
        cold.begin = begin;
        let target = cold.history.len() as u32;
        let mut flags = 0;
        if !cold.stops.is_empty() || cold.least > target {
            flags |= flag::STOPS;
        }
        for (on, bit) in [
            (cold.flags.stream, flag::STREAM),
            (cold.flags.grammar, flag::GRAMMAR),
            (cold.flags.prompt_logprobs, flag::LOGPROBS),
        ] {
            flags |= if on { bit } else { 0 };
        }
        if cold.flags.hold && self.geometry.has_state {
            flags |= flag::ALONE;
        }
        cold.passed = 0;
        let recomputed = cold.preemptions > 0;
        if cold.times.admitted == 0 {
            cold.times.admitted = now;
            cold.cached_tokens = begin.hit;
        }
        let new = NewLane {
            seq,
            state: slot.0,
            confirmed: begin.start,
            target,
            limit: self.engine.lane_limit(cold.limit, target),
            blocks: row.len() as u32,
            stops: cold.lane_stops,
            flags,
            priority: cold.priority,
            arrival: cold.arrival,
        };
        let lane = self.lanes.push(&new, &mut self.seqs);
        let rows = self.first_chunk(lane, budget);
        self.lanes.rows[lane] = rows;
        let Begin { start, hit, kind, .. } = begin;
        let handle = [slot.0, seq.index, seq.generation].map(|word| word as i32);
        let [slot_word, index, generation] = handle;
        self.commands.admitted.push([slot_word, index, generation, start as i32, hit as i32, kind as i32]);
        if self.geometry.has_state && !keeps_state {
            self.commands.zero_states.push(slot.0 as i32);
        }
        self.commands.deltas += row.len() as u32 * self.geometry.pages_per_block;
        self.metrics.admitted += 1;
        self.metrics.hit_tokens += u64::from(hit);
        self.metrics.asked_tokens += u64::from(target);
        if recomputed {
            self.metrics.recomputed_tokens += u64::from(target - start);
        }
        rows
    }

    /// Commands that copy what a fork shares and cannot only point at.
    fn clone_from_parent(&mut self, sharing: &Sharing, own: Option<Block>, slot: StateSlot) {
        self.metrics.forks += 1;
        if self.geometry.has_state {
            let from = self.lanes.state[sharing.lane];
            self.commands.clone_states.push([from as i32, slot.0 as i32]);
        }
        let Some(own) = own.filter(|_| !sharing.tail.is_null()) else { return };
        let used = sharing.computed & self.geometry.mask;
        for (group, section) in self.geometry.sections.iter().enumerate() {
            let pages = used.div_ceil(1 << section.page_shift) as usize;
            for j in 0..pages {
                let from = self.kv.blocks.page(group, sharing.tail, j) as i32;
                let to = self.kv.blocks.page(group, own, j) as i32;
                self.commands.clone_blocks.push([group as i32, from, to]);
            }
        }
    }
}
