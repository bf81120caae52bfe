//! Engine types: which part of a request's life an engine does, and what it owes to the engine at the other side.
//!
//! A prompt engine ends a sequence with its first token and keeps its KV until it is taken over; a completion engine goes on
//! with KV that arrives from elsewhere. Every wait has a lease. Whoever holds KV for a request is told to let go exactly
//! once: when it has arrived, cannot arrive, or is not wanted any more.

use crate::pool::{Finish, Status};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::Seq;

/// What an engine does of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineType {
    /// All of it.
    #[default]
    Normal,
    /// The prompt and the first token; then the sequence is handed over ([`Finish::Handover`]).
    Prompt,
    /// What follows: it takes requests whose KV arrives from elsewhere only.
    Completion,
}

impl EngineType {
    /// Length at which a lane's sequence ends here, given where the request ends and what is computed before the first draw.
    pub(crate) fn lane_limit(self, limit: u32, target: u32) -> u32 {
        if self == Self::Prompt { limit.min(target + 1) } else { limit }
    }
}

impl Scheduler {
    /// Sequences whose KV elsewhere is not needed any more since the last call, with the callers' numbers: it arrived, could
    /// not arrive, or the request ended first. Each request that came with `wait_kv` is named once; one that was turned away
    /// has no handle and is named by `Seq::default()`.
    pub fn drain_remote_releases(&mut self) -> Vec<(Seq, u64)> {
        let mut releases = std::mem::take(&mut self.remote_releases);
        releases.extend(self.shared.take_refused().into_iter().map(|user| (Seq::default(), user)));
        releases
    }

    /// When the next lease ends, if nothing ends it before: `schedule` should run then, even if there is nothing else to do.
    pub fn next_lease(&self) -> Option<u64> {
        self.leases.first().map(|&(deadline, _)| deadline)
    }

    /// The KV elsewhere is not needed any more.
    pub(crate) fn release_remote(&mut self, seq: Seq) {
        if let Some(cold) = self.seqs.get_mut(seq)
            && std::mem::take(&mut cold.remote)
        {
            self.remote_releases.push((seq, cold.user));
        }
    }

    pub(crate) fn start_lease(&mut self, seq: Seq, lasts: u64) {
        let deadline = self.now.saturating_add(lasts).max(1);
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.lease = deadline;
            self.leases.insert((deadline, seq));
        }
    }

    pub(crate) fn stop_lease(&mut self, seq: Seq) {
        if let Some(cold) = self.seqs.get_mut(seq) {
            let lease = (std::mem::take(&mut cold.lease), seq);
            self.leases.remove(&lease);
        }
    }

    /// Ends what waited too long, or only its wait, if it was for a fetch. Memory that a mover may still touch comes back when its transfer is closed.
    pub(crate) fn end_leases(&mut self) {
        while let Some(&(deadline, seq)) = self.leases.first()
            && deadline <= self.now
        {
            self.leases.pop_first();
            self.stop_lease(seq);
            if self.stop_waiting(seq) {
                self.metrics.fetch_leases_ended += 1;
            } else if self.seqs.status(seq) == Some(Status::Handover) {
                self.metrics.handover_leases_ended += 1;
                self.dismiss(seq);
            } else {
                self.metrics.kv_leases_ended += 1;
                self.end_outside(seq, Finish::Error);
            }
        }
    }

    /// What it means that a sequence of `len` tokens has reached the length of its lane.
    pub(crate) fn length_reached(&self, seq: Seq, len: u32) -> Finish {
        if self.seqs.get(seq).is_some_and(|cold| len < cold.limit) { Finish::Handover } else { Finish::Length }
    }
}
