//! Snapshots of sequences' states: when one is taken (a slice is cut then, too), and the copies out and back that a step carries.
//!
//! A state is copied on the device to its replica at each boundary that the sequence passes; a snapshot is a copy of that replica.
//! It is noted when a step has completed, and is the first command of the next planned one: whoever is given the slot in that
//! step finds it read already. Noted is only what no launched row can have overwritten: rows that count for nothing, and drafts,
//! may have passed the next boundary. A step that fails takes what it copied with it.

use crate::layout::{F, header};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Block, BlockHash, SnapshotPlace};

/// A replica worth keeping, under the chain hash of the block that ends at its boundary.
#[derive(Clone, Copy, Debug)]
struct Want {
    slot: u32,
    block: Block,
    hash: BlockHash,
}

/// A copy out that has its place and goes with the next planned step.
#[derive(Clone, Copy, Debug)]
struct Out {
    slot: u32,
    block: Block,
    place: SnapshotPlace,
}

/// A copy of a step in flight.
#[derive(Clone, Copy, Debug)]
struct Flying {
    step: u64,
    place: SnapshotPlace,
    out: bool,
}

/// Copies that are noted, planned and in flight.
#[derive(Default)]
pub(crate) struct Snapshots {
    /// Whether there are places at all.
    pub on: bool,
    wants: Vec<Want>,
    out: Vec<Out>,
    /// (place, state slot) of the step being planned.
    pub back: Vec<[i32; 2]>,
    flying: Vec<Flying>,
}

impl Snapshots {
    pub fn new(places: u32) -> Self {
        Self { on: places > 0, ..Self::default() }
    }

    /// Copies that hold a place.
    pub fn users(&self) -> usize {
        self.out.len() + self.back.len() + self.flying.len()
    }
}

impl Scheduler {
    /// Notes the replica of a lane at the newest boundary that it has passed, if it is there, right and not overwritten; `slice`: also
    /// for a slice of it.
    #[inline]
    pub(crate) fn note_snapshot(&mut self, lane: usize, slice: bool) {
        if self.snapshots.on || (slice && self.slices.on) {
            self.note_replica(lane, slice && self.slices.on);
        }
    }

    #[inline(never)]
    fn note_replica(&mut self, lane: usize, slice: bool) {
        let Some(&rule) = self.window() else { return };
        let seq = self.lanes.seq[lane];
        let (confirmed, target) = (self.lanes.confirmed[lane], self.lanes.target[lane]);
        let boundary = confirmed / rule.grain * rule.grain;
        // While a prompt is computed, a chunk may have run further past a boundary than the ring reaches back.
        if boundary == 0 || (confirmed < target && confirmed - boundary > rule.backtrack) {
            return;
        }
        // Rows that were taken back started before `confirmed`.
        let drafted = if lane < self.lanes.decoding { confirmed + self.limits.max_draft } else { confirmed };
        if self.lanes.planned[lane].max(drafted) >= boundary + rule.grain {
            return;
        }
        self.publish_filled(lane);
        let blocks = boundary >> self.geometry.shift;
        let Some(cold) = self.seqs.get(seq).filter(|cold| boundary > cold.begin.start && cold.published >= blocks)
        else {
            return;
        };
        let (whole, sliced) = (boundary >= cold.begin.whole_from, boundary >= cold.begin.slice_from);
        let mut block = cold.cursor;
        for _ in blocks..cold.published {
            block = self.kv.blocks.parent(block);
        }
        let (slot, hash) = (self.lanes.state[lane], self.kv.blocks.hash(block));
        if whole && self.snapshots.on {
            self.snapshots.wants.push(Want { slot, block, hash });
        }
        if sliced && slice {
            self.note_cut(seq, slot, boundary, block);
        }
    }

    /// The same where the rows of a completed chunk have passed the last boundary of their prompt.
    #[inline]
    pub(crate) fn note_prompt_boundary(&mut self, lane: usize, rows: u32) {
        let Some(rule) = self.window().filter(|_| self.snapshots.on || self.slices.on) else { return };
        let (confirmed, last) = (self.lanes.confirmed[lane], self.lanes.target[lane] / rule.grain * rule.grain);
        if confirmed >= last && confirmed - rows < last {
            self.note_snapshot(lane, true);
        }
    }

    /// Gives places to what was noted. Nothing has been launched since then.
    #[inline]
    pub(crate) fn place_snapshots(&mut self) {
        if self.snapshots.on {
            self.place_noted();
        }
    }

    // Out of line, like the others below: a step of a model without windows is not to notice them.
    #[inline(never)]
    fn place_noted(&mut self) {
        let Self { snapshots, kv, .. } = self;
        for Want { slot, block, hash } in snapshots.wants.drain(..) {
            if snapshots.out.len() < self.limits.max_num_seqs as usize
                && kv.blocks.hash(block) == hash
                && let Some(place) = kv.blocks.begin_snapshot(block)
            {
                snapshots.out.push(Out { slot, block, place });
            }
        }
    }

    /// Whether a sequence that is admitted now can have the state at the end of a block: it lies there, or is copied there ahead
    /// of it in the step being planned.
    pub(crate) fn can_restore(&self, block: Block) -> bool {
        self.snapshots.on
            && self.kv.blocks.has_snapshot(block)
            && (self.kv.blocks.snapshot_of(block).is_some() || self.snapshots.out.iter().any(|out| out.block == block))
    }

    /// A slot is written before the next step: what was to be read from it is not.
    pub(crate) fn drop_snapshots_of(&mut self, slot: u32) {
        let Self { snapshots, slices, kv, .. } = self;
        slices.drop_cuts_of(slot);
        snapshots.wants.retain(|want| want.slot != slot);
        snapshots.out.retain(|out| {
            if out.slot == slot {
                kv.blocks.end_snapshot(out.place, false);
            }
            out.slot != slot
        });
    }

    /// The step that would have brought snapshots back will not be.
    pub(crate) fn drop_restores(&mut self) {
        for [place, _] in self.snapshots.back.drain(..) {
            self.kv.blocks.unpin_snapshot(SnapshotPlace(place as u32));
        }
    }

    /// Writes the copies of the step being planned into its ring slot.
    #[inline]
    pub(crate) fn fill_snapshots(&mut self, slot: usize) {
        if self.snapshots.on {
            self.fill_copies(slot);
        }
    }

    #[inline(never)]
    fn fill_copies(&mut self, slot: usize) {
        let Self { ring, snapshots, step, metrics, .. } = self;
        if snapshots.out.is_empty() && snapshots.back.is_empty() {
            return;
        }
        let (out, back) = (snapshots.out.len(), snapshots.back.len());
        for (to, from) in ring.get_mut(slot, F::SnapshotOut).as_chunks_mut::<2>().0.iter_mut().zip(&snapshots.out) {
            *to = [from.slot as i32, from.place.0 as i32];
        }
        ring.get_mut(slot, F::SnapshotIn)[..2 * back].copy_from_slice(snapshots.back.as_flattened());
        let head = ring.get_mut(slot, F::Header);
        (head[header::SNAPSHOT_OUT], head[header::SNAPSHOT_IN]) = (out as i32, back as i32);
        metrics.snapshots_taken += out as u64;
        let out = snapshots.out.drain(..).map(|out| Flying { step: *step, place: out.place, out: true });
        snapshots.flying.extend(out);
        let back = snapshots.back.drain(..).map(|[place, _]| (*step, SnapshotPlace(place as u32)));
        snapshots.flying.extend(back.map(|(step, place)| Flying { step, place, out: false }));
    }

    /// The copies of a step are done, or count for nothing.
    #[inline]
    pub(crate) fn end_snapshots(&mut self, step: u64, ok: bool) {
        if self.snapshots.on {
            self.end_copies(step, ok);
        }
    }

    #[inline(never)]
    fn end_copies(&mut self, step: u64, ok: bool) {
        let Self { snapshots, kv, .. } = self;
        snapshots.flying.retain(|flying| {
            if flying.step == step {
                if flying.out {
                    kv.blocks.end_snapshot(flying.place, ok);
                } else {
                    kv.blocks.unpin_snapshot(flying.place);
                }
            }
            flying.step != step
        });
    }
}
