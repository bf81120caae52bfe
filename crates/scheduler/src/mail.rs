//! What other threads sent, applied before any scan: a completion is never lost behind an unschedulable head.

use crate::inbox::{Message, Outcome};
use crate::pool::{Cold, Finish, Status};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::Seq;

impl Scheduler {
    /// Applies every queued message, then the leases that have run out.
    pub(crate) fn read_mail(&mut self) {
        let mut mail = std::mem::take(&mut self.mail);
        self.shared.drain(&mut mail);
        let before = self.lanes.len();
        let mut left = false;
        for message in mail.drain(..) {
            match message {
                Message::Add(seq, cold) => self.add(seq, cold),
                Message::Abort(seq) => {
                    left = true;
                    if self.seqs.contains(seq) {
                        self.end_outside(seq, Finish::Abort);
                    } else {
                        self.metrics.stale += 1;
                    }
                }
                Message::Grammar(seq, ok) => self.grammar(seq, ok),
                Message::Transfer(id, outcome) => {
                    self.close_transfer(id, outcome == Outcome::Done);
                }
                Message::StopAt(seq, len, reason) => {
                    left = true;
                    self.stop_at(seq, len, reason);
                }
            }
        }
        self.mail = mail;
        self.end_leases();
        if left && before > 0 {
            self.lanes.settle(&mut self.seqs);
        }
    }

    fn add(&mut self, seq: Seq, mut cold: Box<Cold>) {
        let parent = cold.parent.and_then(|p| self.seqs.get(p)).map(|p| p.arrival);
        let given = Some(cold.arrival).filter(|&arrival| arrival > 0);
        cold.arrival = parent.or(given).unwrap_or(self.arrivals.saturating_add(1));
        self.arrivals = self.arrivals.max(cold.arrival);
        cold.times.arrived = self.now;
        self.metrics.added += 1;
        self.live += 1;
        let status = cold.first_status();
        self.seqs.insert(seq, status, cold);
        self.settle_status(seq, status);
    }

    fn grammar(&mut self, seq: Seq, ok: bool) {
        if self.seqs.status(seq) != Some(Status::WaitGrammar) {
            self.metrics.stale += 1;
            return;
        }
        if !ok {
            self.end_outside(seq, Finish::Error);
            return;
        }
        let Some(cold) = self.seqs.get(seq) else { return };
        let status = cold.second_status();
        self.settle_status(seq, status);
    }

    fn settle_status(&mut self, seq: Seq, status: Status) {
        match status {
            Status::Ready => self.enqueue(seq),
            Status::WaitKv => {
                self.seqs.set_status(seq, status);
                let fetch = self.seqs.get(seq).is_some_and(|cold| cold.flags.fetch);
                let lasts = if fetch { self.policy.fetch_lease_ns } else { self.policy.kv_lease_ns };
                self.start_lease(seq, lasts);
            }
            Status::WaitFork => {
                self.seqs.set_status(seq, status);
                self.wait_for_parent(seq);
            }
            _ => {}
        }
    }

    /// Cuts the output to `len` tokens and ends the sequence; a length it has not reached yet only ends it.
    fn stop_at(&mut self, seq: Seq, len: u32, reason: Finish) {
        if matches!(self.seqs.status(seq), None | Some(Status::Finished | Status::Handover)) {
            self.metrics.stale += 1;
            return;
        }
        self.end_outside(seq, reason);
        if let Some(cold) = self.seqs.get_mut(seq) {
            let keep = (cold.prompt as usize).saturating_add(len as usize);
            cold.history.truncate(keep);
        }
    }
}
