//! The rank group of threads under a checker that runs every interleaving of its locks: the same source on other types.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic)]

/// What `src/thread_vote.rs` finds in its own crate.
mod sync {
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
}
mod vote {
    pub(crate) use deepinfer_scheduler::{GroupError, StepVote, VOTE_WORDS, VoteWords};
}
#[path = "../src/thread_vote.rs"]
mod thread_vote;

use loom::thread;
use thread_vote::ThreadVote;
use vote::{GroupError, StepVote, VOTE_WORDS, VoteWords};

/// Words of a rank in a round; the minimum of each word comes from another rank.
fn words(rank: usize, round: usize, ranks: usize) -> VoteWords {
    std::array::from_fn(|word| (100 * round + (rank + word + round) % ranks) as i64)
}

fn minimum(round: usize) -> VoteWords {
    [(100 * round) as i64; VOTE_WORDS]
}

/// `rounds` rounds of one rank; each is started well before it is read.
fn vote(mut end: ThreadVote, rank: usize, ranks: usize, rounds: usize) {
    end.start(words(rank, 0, ranks)).unwrap();
    for round in 0..rounds {
        assert_eq!(end.wait().unwrap(), minimum(round), "rank {rank} round {round}");
        if round + 1 < rounds {
            end.start(words(rank, round + 1, ranks)).unwrap();
        }
    }
    // A rank that is done must not end the rounds of those that still read.
    drop(end);
}

fn check(ranks: usize, rounds: usize, preemptions: Option<usize>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let mut ends = ThreadVote::group(ranks);
        let own = ends.remove(0);
        let others: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(at, end)| thread::spawn(move || vote(end, at + 1, ranks, rounds)))
            .collect();
        vote(own, 0, ranks, rounds);
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn two_ranks_read_the_same_rounds() {
    check(2, 3, Some(3));
}

#[test]
#[ignore = "a minute: every interleaving, without a bound"]
fn every_interleaving_of_two_ranks_reads_the_same_rounds() {
    check(2, 3, None);
}

#[test]
fn three_ranks_read_the_same_rounds() {
    check(3, 2, Some(2));
}

#[test]
fn a_rank_that_leaves_is_reported_and_nobody_waits_for_it() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let mut ends = ThreadVote::group(2);
        let mut own = ends.remove(0);
        let mut leaving = ends.remove(0);
        let other = thread::spawn(move || {
            leaving.start(words(1, 0, 2)).unwrap();
            leaving.wait().unwrap();
        });
        own.start(words(0, 0, 2)).unwrap();
        assert_eq!(own.wait().unwrap(), minimum(0), "the round that both started counts");
        let lost = own.start(words(0, 1, 2)).and_then(|()| own.wait());
        assert_eq!(lost, Err(GroupError::Lost("rank 1 has left".to_owned())));
        other.join().unwrap();
    });
}
