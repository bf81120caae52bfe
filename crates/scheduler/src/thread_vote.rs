//! A rank group of threads in one process: for simulators, benches and tests.
//!
//! What the ranks share is one lock around two rounds. A rank starts round n + 1 only after it has read round n, and no
//! rank reads n + 1 before all have started it: so two places, by the parity of the round, are enough.

use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::vote::{GroupError, StepVote, VOTE_WORDS, VoteWords};
use std::sync::PoisonError;

/// One round on the board.
#[derive(Clone, Copy)]
struct Round {
    words: VoteWords,
    started: usize,
    read: usize,
}

const CLEAR: Round = Round { words: [i64::MAX; VOTE_WORDS], started: 0, read: 0 };

struct Board {
    rounds: [Round; 2],
    /// A rank that left.
    gone: Option<usize>,
}

struct Shared {
    board: Mutex<Board>,
    moved: Condvar,
    ranks: usize,
}

impl Shared {
    // A panic of another rank cannot leave a round half written.
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank's end. Dropping it tells the others at once.
pub struct ThreadVote {
    shared: Arc<Shared>,
    rank: usize,
    round: u64,
    open: bool,
}

impl ThreadVote {
    /// Ends of a group of `ranks` ranks, to be moved to their threads. No rank, no ends.
    pub fn group(ranks: usize) -> Vec<Self> {
        let board = Mutex::new(Board { rounds: [CLEAR; 2], gone: None });
        let shared = Arc::new(Shared { board, moved: Condvar::new(), ranks });
        (0..ranks).map(|rank| Self { shared: Arc::clone(&shared), rank, round: 0, open: false }).collect()
    }

    fn at(&self) -> usize {
        (self.round % 2) as usize
    }

    fn lost(rank: usize) -> GroupError {
        GroupError::Lost(format!("rank {rank} has left"))
    }
}

impl StepVote for ThreadVote {
    fn start(&mut self, words: VoteWords) -> Result<(), GroupError> {
        if self.open {
            return Err(GroupError::Order("a round is open already"));
        }
        let mut board = self.shared.lock();
        if let Some(rank) = board.gone {
            return Err(Self::lost(rank));
        }
        let round = &mut board.rounds[self.at()];
        for (kept, word) in round.words.iter_mut().zip(words) {
            *kept = word.min(*kept);
        }
        round.started += 1;
        let complete = round.started == self.shared.ranks;
        drop(board);
        self.open = true;
        if complete {
            self.shared.moved.notify_all();
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<VoteWords, GroupError> {
        if !self.open {
            return Err(GroupError::Order("no round is open"));
        }
        let (at, ranks) = (self.at(), self.shared.ranks);
        let mut board = self.shared.lock();
        // A round that all have started counts, whoever left since.
        while board.rounds[at].started < ranks {
            if let Some(rank) = board.gone {
                return Err(Self::lost(rank));
            }
            board = self.shared.moved.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        let round = &mut board.rounds[at];
        let words = round.words;
        round.read += 1;
        if round.read == ranks {
            *round = CLEAR;
        }
        drop(board);
        self.round += 1;
        self.open = false;
        Ok(words)
    }
}

impl Drop for ThreadVote {
    fn drop(&mut self) {
        self.shared.lock().gone = Some(self.rank);
        self.shared.moved.notify_all();
    }
}
