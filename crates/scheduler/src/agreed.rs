//! What a round says, and the type that only a round can make.
//!
//! Whether there is a further round, and what kind of step comes, may depend on [`Agreed`] values and on counters that
//! only they move. Then every rank makes the same rounds, whatever happens to it alone.

use crate::vote::{GroupError, StepVote, VOTE_WORDS, VoteWords};

/// Most rows that a rank may announce; as `max_num_batched_tokens`.
const MAX_ROWS: i64 = 1 << 24;

/// Version of the words and of how they are read.
const PROTOCOL: i64 = 1;

/// What one rank says in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// Yes-or-no answers, each of them a word of its own.
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Ballot {
    /// It has prompt rows to compute: in the first round a wish, in the second a fact.
    pub want: bool,
    /// A sequence decodes.
    pub runs: bool,
    /// No step failed since the last round.
    pub ok: bool,
    /// Token rows of its step.
    pub rows: u32,
    /// Longest prefill it allows, in nanoseconds.
    pub budget_ns: i64,
    /// It could place prompt rows now.
    pub can: bool,
    /// A prompt is half computed.
    pub mid: bool,
}

impl Ballot {
    pub fn words(self) -> VoteWords {
        [
            self.want.into(),
            (!self.want).into(),
            (!self.runs).into(),
            self.ok.into(),
            -i64::from(self.rows),
            self.budget_ns,
            self.can.into(),
            (!self.mid).into(),
        ]
    }
}

/// What the ranks say together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// As above.
#[allow(clippy::struct_excessive_bools)]
pub(crate) struct Tally {
    pub all_want: bool,
    pub any_wants: bool,
    pub any_runs: bool,
    pub all_ok: bool,
    /// Most rows of a rank.
    pub rows: u32,
    /// Shortest budget of a rank.
    pub budget_ns: i64,
    pub all_can: bool,
    pub any_mid: bool,
}

impl Tally {
    /// Reads the minimum over the ranks. Peers may have sent anything.
    fn read(words: VoteWords) -> Result<Self, GroupError> {
        for (word, &value) in words.iter().enumerate() {
            let allowed = match word {
                4 => -MAX_ROWS..=0,
                5 => 1..=i64::MAX,
                _ => 0..=1,
            };
            if !allowed.contains(&value) {
                return Err(GroupError::Malformed { word, value });
            }
        }
        // A rank that wants does not also not want.
        if words[0] == 1 && words[1] == 1 {
            return Err(GroupError::Malformed { word: 1, value: 1 });
        }
        Ok(Self {
            all_want: words[0] == 1,
            any_wants: words[1] == 0,
            any_runs: words[2] == 0,
            all_ok: words[3] == 1,
            rows: (-words[4]) as u32,
            budget_ns: words[5],
            all_can: words[6] == 1,
            any_mid: words[7] == 0,
        })
    }
}

/// Settings that every rank must share, compared once before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub all_interval: u32,
    pub any_interval: u32,
}

impl Terms {
    pub fn words(self) -> VoteWords {
        let pair = |value: i64| [value, -value];
        let mut words = [0; VOTE_WORDS];
        words[..2].copy_from_slice(&pair(PROTOCOL));
        words[2..4].copy_from_slice(&pair(self.all_interval.into()));
        words[4..6].copy_from_slice(&pair(self.any_interval.into()));
        words
    }

    fn check(words: VoteWords) -> Result<(), GroupError> {
        for (at, what) in ["the version of the vote", "all_interval", "any_interval"].into_iter().enumerate() {
            let (least, most) = (words[2 * at], words[2 * at + 1].saturating_neg());
            if least != most {
                return Err(GroupError::Mismatch { what, least, most });
            }
        }
        Ok(())
    }
}

/// A value that is the same on every rank. Only a round makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreed<T>(T);

impl Agreed<Tally> {
    /// Waits for the open round.
    pub fn wait(vote: &mut dyn StepVote) -> Result<Self, GroupError> {
        Tally::read(vote.wait()?).map(Self)
    }
}

impl Agreed<()> {
    /// Waits for the round that compares the terms.
    pub fn wait_terms(vote: &mut dyn StepVote) -> Result<Self, GroupError> {
        Terms::check(vote.wait()?).map(Self)
    }
}

impl<T> Agreed<T> {
    pub fn get(&self) -> &T {
        &self.0
    }

    /// A function of agreed values is agreed. A plain function pointer, so that it can close over nothing of this rank.
    pub fn map<U>(&self, f: fn(&T) -> U) -> Agreed<U> {
        Agreed(f(&self.0))
    }

    /// The same of two agreed values.
    pub fn with<U, V>(&self, other: &Agreed<U>, f: fn(&T, &U) -> V) -> Agreed<V> {
        Agreed(f(&self.0, &other.0))
    }
}

#[cfg(test)]
mod tests {
    // A test that meets an error stops there.
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::vote::OneRank;

    fn ballot(bits: u32) -> Ballot {
        let bit = |n: u32| bits >> n & 1 == 1;
        Ballot {
            want: bit(0),
            runs: bit(1),
            ok: bit(2),
            rows: bits,
            budget_ns: 5 + i64::from(bits),
            can: bit(3),
            mid: bit(4),
        }
    }

    fn minimum(a: VoteWords, b: VoteWords) -> VoteWords {
        std::array::from_fn(|word| a[word].min(b[word]))
    }

    #[test]
    fn the_minimum_of_two_ballots_says_all_and_any_of_every_answer() {
        for one in 0..32 {
            for other in 0..32 {
                let (a, b) = (ballot(one), ballot(other));
                let tally = Tally::read(minimum(a.words(), b.words())).unwrap();
                assert_eq!((tally.all_want, tally.any_wants), (a.want && b.want, a.want || b.want));
                assert_eq!((tally.any_runs, tally.any_mid), (a.runs || b.runs, a.mid || b.mid));
                assert_eq!((tally.all_ok, tally.all_can), (a.ok && b.ok, a.can && b.can));
                assert_eq!((tally.rows, tally.budget_ns), (one.max(other), 5 + i64::from(one.min(other))));
            }
        }
    }

    #[test]
    fn words_that_no_rank_may_send_are_refused_and_named() {
        let sound = ballot(7).words();
        for (word, values) in [
            (0, [-1, 2]),
            (1, [-1, 2]),
            (2, [-1, i64::MAX]),
            (3, [-1, i64::MIN]),
            (4, [1, -MAX_ROWS - 1]),
            (5, [0, i64::MIN]),
            (6, [-1, 2]),
            (7, [-1, 2]),
        ] {
            for value in values {
                let mut words = sound;
                words[word] = value;
                assert_eq!(Tally::read(words), Err(GroupError::Malformed { word, value }));
            }
        }
        let mut both = sound;
        both[1] = 1;
        assert_eq!(Tally::read(both), Err(GroupError::Malformed { word: 1, value: 1 }));
    }

    #[test]
    fn terms_that_differ_are_named_with_both_values() {
        let terms = |all_interval, any_interval| Terms { all_interval, any_interval }.words();
        assert_eq!(Terms::check(minimum(terms(70, 100), terms(70, 100))), Ok(()));
        assert_eq!(
            Terms::check(minimum(terms(70, 100), terms(50, 100))),
            Err(GroupError::Mismatch { what: "all_interval", least: 50, most: 70 })
        );
        assert_eq!(
            Terms::check(minimum(terms(70, 100), terms(70, 1))),
            Err(GroupError::Mismatch { what: "any_interval", least: 1, most: 100 })
        );
        assert!(Terms::check([i64::MIN; VOTE_WORDS]).is_err());
    }

    #[test]
    fn a_round_is_what_makes_a_value_agreed() {
        let mut vote = OneRank::default();
        assert_eq!(Agreed::<Tally>::wait(&mut vote), Err(GroupError::Order("no round is open")));
        vote.start(ballot(7).words()).unwrap();
        assert_eq!(vote.start(ballot(7).words()), Err(GroupError::Order("a round is open already")));
        let agreed = Agreed::<Tally>::wait(&mut vote).unwrap();
        assert_eq!(*agreed.map(|t| t.rows).get(), 7);
    }
}
