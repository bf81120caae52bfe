//! State slices: where the encoder's windows are worth keeping beyond the sequence, and admissions that named one which is gone.
//!
//! A slice is the stored region of a sequence's replica at a boundary, named by the chain hash of the block that ends there. Its
//! bytes, and where they lie, are the keeper's: the core says which replicas to copy, and is told which slices there are.

use crate::config::{ConfigError, HitRule};
use crate::end::Leave;
use crate::hits::StartKind;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Block, BlockHash, Part, Seq, Tier};

/// A replica to copy from: right until the next step is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceCut {
    /// Whose it is. It may have ended.
    pub seq: Seq,
    /// State slot with the replica.
    pub slot: u32,
    /// Tokens before the boundary.
    pub boundary: u32,
    /// Chain hash of the block that ends there.
    pub hash: BlockHash,
}

/// Cuts that nobody has taken yet.
#[derive(Default)]
pub(crate) struct Slices {
    /// Whether anybody wants them.
    pub on: bool,
    /// With the newest step planned when each was noted.
    cuts: Vec<(SliceCut, u64)>,
}

impl Slices {
    /// A slot is written before the next step: what was to be read from it is not.
    pub fn drop_cuts_of(&mut self, slot: u32) {
        self.cuts.retain(|(cut, _)| cut.slot != slot);
    }
}

impl Scheduler {
    /// Whether [`Scheduler::take_slices`] has cuts from now on: at the last boundary of a prompt, and where a request ends by itself or
    /// is handed over.
    ///
    /// # Errors
    /// [`ConfigError::NoSlices`]: the model has no windows or no replica of them.
    pub fn set_state_slices(&mut self, on: bool) -> Result<(), ConfigError> {
        let kept =
            matches!(self.policy.hit_rule, HitRule::Window(_)) && self.geometry.has_replicas && self.prefix_caching;
        if on && !kept {
            return Err(ConfigError::NoSlices);
        }
        self.slices.on = on;
        if !on {
            self.slices.cuts.clear();
        }
        Ok(())
    }

    /// Notes a replica whose windows of the encoder are right; each boundary of a sequence once.
    pub(crate) fn note_cut(&mut self, seq: Seq, slot: u32, boundary: u32, block: Block) {
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.begin.slice_from = boundary + 1;
        }
        if !self.kv.blocks.parts(block).has_any(Part::StateSlice) {
            let hash = self.kv.blocks.hash(block);
            self.slices.cuts.push((SliceCut { seq, slot, boundary, hash }, self.step));
        }
    }

    /// What to copy out of replicas since the last call. To be asked after each `complete` and `schedule`, before anything more is
    /// launched, since a launched step may overwrite them: what has waited longer is not given.
    pub fn take_slices(&mut self) -> impl Iterator<Item = SliceCut> {
        let step = self.step;
        self.slices.cuts.drain(..).filter(move |&(_, noted)| step <= noted + 1).map(|(cut, _)| cut)
    }

    /// Notes that the state at a boundary was stored, or is gone; see [`Scheduler::chain_hash`] for its name. False if it was not noted:
    /// no name, or too many slices.
    pub fn note_slice(&mut self, hash: BlockHash, tier: Tier, present: bool) -> bool {
        self.kv.blocks.note_slice(hash, tier, present)
    }

    /// Name of the boundary after the first `tokens` tokens of a sequence: the chain hash of the block that ends there. None if that is
    /// no boundary or the block has not been hashed.
    pub fn chain_hash(&self, seq: Seq, tokens: u32) -> Option<BlockHash> {
        let index = (tokens >> self.geometry.shift).checked_sub(1)? as usize;
        if tokens & self.geometry.mask != 0 {
            return None;
        }
        self.seqs.get(seq)?.hashes.get(index).copied()
    }

    /// Takes back the begin of a sequence whose slice is gone: what it has in the newest step counts for nothing, and it is admitted
    /// again. To be called before that step is launched or while it is in flight. False if the sequence did not begin at a slice
    /// in that step.
    pub fn give_up_start(&mut self, seq: Seq) -> bool {
        let Some(lane) = self.seqs.lane(seq) else { return false };
        let Some(begin) = self
            .seqs
            .get(seq)
            .filter(|cold| cold.begin.kind == StartKind::Slice && cold.admitted_by == self.step && self.in_flight() > 0)
            .map(|cold| cold.begin)
        else {
            return false;
        };
        self.leave_lane(lane, Leave::Release);
        self.lanes.settle(&mut self.seqs);
        self.enqueue(seq);
        let target = self.seqs.get(seq).map_or(0, |cold| cold.history.len() as u32);
        let m = &mut self.metrics;
        m.slices_gone += 1;
        m.starts[StartKind::Slice as usize] -= 1;
        m.rerun_tokens -= u64::from(begin.hit - begin.start);
        m.hit_tokens -= u64::from(begin.hit);
        m.asked_tokens -= u64::from(target);
        m.admitted -= 1;
        true
    }
}
