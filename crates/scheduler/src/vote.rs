//! How the ranks of a group agree: one vector of words for each round, read by its element-wise minimum.

use thiserror::Error;

/// Words of a round.
pub const VOTE_WORDS: usize = 8;

/// What a rank gives to a round, and what it gets back.
pub type VoteWords = [i64; VOTE_WORDS];

/// One rank's way to the others. A round is a `start` and the `wait` that follows it; a rank has at most one round open.
///
/// After an error the group is lost to this rank: it is not called again.
pub trait StepVote: Send {
    /// Gives this rank's words to the next round. Does not wait for anybody.
    ///
    /// # Errors
    /// [`GroupError`] if the others cannot be reached.
    fn start(&mut self, words: VoteWords) -> Result<(), GroupError>;

    /// Minimum of every word over all ranks, once each of them has started the round.
    ///
    /// # Errors
    /// [`GroupError`] if a rank does not come: within a time that the back end states, never later.
    fn wait(&mut self) -> Result<VoteWords, GroupError>;
}

/// Why a step was not agreed upon.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GroupError {
    /// A rank met an error and said so. The ranks are still in step: the next `schedule` opens the next round.
    #[error("rank group: a step failed on at least one rank, so that no rank has a step; its own log says why")]
    Failed,
    /// A rank is gone or late. The group cannot go on.
    #[error("rank group: contact with a rank is lost ({0}); start the group anew")]
    Lost(String),
    /// The group answered something that no rank may send. The group cannot go on.
    #[error(
        "rank group: word {word} of a round is {value}, which no rank may send; check that all ranks run one version"
    )]
    Malformed {
        /// Position in the round.
        word: usize,
        /// What came back.
        value: i64,
    },
    /// Two ranks would read the same words differently. The group cannot go on.
    #[error("rank group: {what} is {least} on one rank and {most} on another; give every rank the same")]
    Mismatch {
        /// Name of the setting.
        what: &'static str,
        /// Smallest value in the group.
        least: i64,
        /// Largest value in the group.
        most: i64,
    },
    /// Steps of a group hold one kind of rows.
    #[error("rank group: step_policy is mixed, which no group can have; make it decode_first, or leave it out")]
    Mixed,
    /// A round was started twice, or waited for before it was started.
    #[error("rank group: {0}")]
    Order(&'static str),
}

impl GroupError {
    /// Whether the ranks are still in step after it.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Failed)
    }
}

/// A group of one: whatever it says is agreed.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneRank {
    open: Option<VoteWords>,
}

impl StepVote for OneRank {
    fn start(&mut self, words: VoteWords) -> Result<(), GroupError> {
        match self.open.replace(words) {
            None => Ok(()),
            Some(_) => Err(GroupError::Order("a round is open already")),
        }
    }

    fn wait(&mut self) -> Result<VoteWords, GroupError> {
        self.open.take().ok_or(GroupError::Order("no round is open"))
    }
}
