//! Which kind of step comes next, as a function of agreed values only.

use crate::agreed::{Agreed, Tally};

/// How prompt rows and decode rows share steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPolicy {
    /// Both in one step: decode rows first, prompt chunks in what is left. Without a rank group only.
    Mixed,
    /// A step is either; decode steps go first, prefill is tried at stated intervals.
    DecodeFirst,
}

/// Kind of a step that the group agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum StepType {
    /// No step: nobody has anything to run.
    #[default]
    Idle = 0,
    /// Prompt rows only.
    Prefill = 1,
    /// Decode rows only.
    Decode = 2,
}

/// Decode steps since the last prefill, and what they are held against. Moved by agreed values only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Attempts {
    all: u64,
    any: u64,
    since: u64,
}

impl Attempts {
    /// Prefill is tried after `all` decode steps if every rank wants it, after `any` if one does.
    pub fn new(all: u32, any: u32) -> Self {
        Self { all: u64::from(all.max(1)), any: u64::from(any.max(1)), since: 0 }
    }

    /// Kind of the next step.
    pub fn decide(&self, tally: &Agreed<Tally>) -> Agreed<StepType> {
        // `since` moves in `made` only, which takes agreed values: that is what makes this function of it agreed.
        let attempt = match (
            self.since > 0 && self.since.is_multiple_of(self.all),
            self.since > 0 && self.since.is_multiple_of(self.any),
        ) {
            (_, true) => |t: &Tally| t.any_mid || t.any_wants,
            (true, false) => |t: &Tally| t.any_mid || (t.all_want && t.all_can),
            (false, false) if self.since > 0 => |t: &Tally| t.any_mid,
            // A decode step lies between two prefills.
            (false, false) => |_: &Tally| false,
        };
        tally.map(attempt).with(tally, |&attempt, tally| match (tally.any_runs, tally.any_wants) {
            (false, false) => StepType::Idle,
            (false, true) => StepType::Prefill,
            (true, _) if attempt => StepType::Prefill,
            (true, _) => StepType::Decode,
        })
    }

    /// What an agreed prefill becomes after its second round: if nobody found anything to compute, all decode.
    pub fn settle(first: &Agreed<Tally>, second: &Agreed<Tally>) -> Agreed<StepType> {
        first.with(second, |first, second| match (second.any_wants, first.any_runs) {
            (true, _) => StepType::Prefill,
            (false, true) => StepType::Decode,
            (false, false) => StepType::Idle,
        })
    }

    /// Counts the step that came of it.
    pub fn made(&mut self, step: Agreed<StepType>) {
        match step.get() {
            StepType::Idle => {}
            StepType::Prefill => self.since = 0,
            StepType::Decode => self.since += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    // A test that meets an error stops there.
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::agreed::Ballot;
    use crate::vote::{OneRank, StepVote, VoteWords};

    const QUIET: Ballot =
        Ballot { want: false, runs: false, ok: true, rows: 0, budget_ns: i64::MAX, can: false, mid: false };
    const RUNS: Ballot = Ballot { runs: true, ..QUIET };
    const WANTS: Ballot = Ballot { want: true, can: true, ..QUIET };
    const BOTH: Ballot = Ballot { want: true, can: true, ..RUNS };

    fn agreed(ranks: &[Ballot]) -> Agreed<Tally> {
        let words: VoteWords = std::array::from_fn(|w| ranks.iter().map(|b| b.words()[w]).min().unwrap());
        let mut vote = OneRank::default();
        vote.start(words).unwrap();
        Agreed::wait(&mut vote).unwrap()
    }

    fn after(since: u64, ranks: &[Ballot]) -> StepType {
        *Attempts { since, ..Attempts::new(70, 100) }.decide(&agreed(ranks)).get()
    }

    #[test]
    fn while_nobody_runs_every_step_is_an_attempt() {
        for since in [0, 1, 69, 70, 99, 100, 101] {
            assert_eq!(after(since, &[QUIET, QUIET]), StepType::Idle);
            assert_eq!(after(since, &[WANTS, QUIET]), StepType::Prefill);
            assert_eq!(after(since, &[WANTS, Ballot { can: false, ..WANTS }]), StepType::Prefill);
        }
    }

    #[test]
    fn while_somebody_runs_prefill_comes_at_its_points_only() {
        for since in 0..400 {
            let (all, any) = (since > 0 && since % 70 == 0, since > 0 && since % 100 == 0);
            let expect = |prefill| if prefill { StepType::Prefill } else { StepType::Decode };
            assert_eq!(after(since, &[BOTH, BOTH]), expect(all || any), "{since}");
            assert_eq!(after(since, &[RUNS, WANTS]), expect(any), "{since}: one wants");
            assert_eq!(after(since, &[BOTH, Ballot { can: false, ..BOTH }]), expect(any), "{since}: one cannot");
            assert_eq!(after(since, &[RUNS, RUNS]), StepType::Decode, "{since}: nobody wants");
            assert_eq!(after(since, &[RUNS, QUIET]), StepType::Decode, "{since}");
        }
    }

    #[test]
    fn a_half_computed_prompt_goes_on_after_each_decode_step() {
        let mid = Ballot { mid: true, ..WANTS };
        assert_eq!(after(0, &[RUNS, mid]), StepType::Decode);
        for since in 1..150 {
            assert_eq!(after(since, &[RUNS, mid]), StepType::Prefill);
        }
    }

    #[test]
    fn the_counter_moves_with_what_came_of_the_step() {
        use StepType::{Decode, Prefill};
        let mut attempts = Attempts::new(2, 3);
        let mut made = Vec::new();
        for _ in 0..8 {
            let first = agreed(&[BOTH, BOTH]);
            let mut step = attempts.decide(&first);
            if *step.get() == StepType::Prefill {
                // Every other attempt finds nothing anywhere.
                let found = made.len() % 4 == 2;
                step = Attempts::settle(&first, &agreed(&[Ballot { want: found, ..QUIET }, QUIET]));
            }
            attempts.made(step);
            made.push(*step.get());
        }
        assert_eq!(made, [Decode, Decode, Prefill, Decode, Decode, Decode, Prefill, Decode]);
    }

    #[test]
    fn an_empty_handed_prefill_is_a_decode_step_or_none() {
        let empty = agreed(&[QUIET, QUIET]);
        let full = agreed(&[QUIET, WANTS]);
        assert_eq!(*Attempts::settle(&agreed(&[RUNS, WANTS]), &empty).get(), StepType::Decode);
        assert_eq!(*Attempts::settle(&agreed(&[QUIET, WANTS]), &empty).get(), StepType::Idle);
        assert_eq!(*Attempts::settle(&agreed(&[RUNS, WANTS]), &full).get(), StepType::Prefill);
        assert_eq!(*Attempts::settle(&agreed(&[QUIET, WANTS]), &full).get(), StepType::Prefill);
    }
}
