//! One answer from those of all entry points.

use std::sync::Mutex;
use std::time::Duration;

use super::{EntryPoint, Members, Part};
use crate::error::Error;
use crate::index::check_chain;
use crate::key::Key;

/// What is there of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks present, from the first on.
    pub blocks: usize,
    /// Positions among them at which a slice is present, deepest first.
    pub slices: Vec<usize>,
}

/// Whom to ask for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Length of the chain.
    pub blocks: usize,
    /// Parts whose owner is to be asked.
    pub ask: Vec<Part>,
    /// Parts whose owner is down: misses.
    pub down: Vec<Part>,
}

/// The table over all entry points, as one client sees it. Time is any clock that does not go back.
#[derive(Debug)]
pub struct Directory {
    members: Members,
    retry: Duration,
    // When each may be asked again; none for those that are up.
    down_until: Mutex<Vec<Option<Duration>>>,
}

impl Directory {
    /// All up. One that does not answer is asked again after `retry`.
    pub fn new(members: Members, retry: Duration) -> Self {
        let down_until = Mutex::new(vec![None; members.len()]);
        Self { members, retry, down_until }
    }

    /// The entry points.
    pub fn members(&self) -> &Members {
        &self.members
    }

    fn states(&self) -> std::sync::MutexGuard<'_, Vec<Option<Duration>>> {
        self.down_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether one may be asked now: gets, puts and checks alike.
    pub fn is_up(&self, member: usize, now: Duration) -> bool {
        self.states().get(member).copied().flatten().is_none_or(|until| now >= until)
    }

    /// One has answered.
    pub fn up(&self, member: usize) {
        if let Some(state) = self.states().get_mut(member) {
            *state = None;
        }
    }

    /// One has not answered in time: it has none of its keys until it may be asked again.
    pub fn down(&self, member: usize, now: Duration) {
        if let Some(state) = self.states().get_mut(member) {
            *state = Some(now + self.retry);
        }
    }

    /// Cuts a chain. A part behind the first key of an owner that is down cannot lengthen the prefix and is not asked for.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain over [`crate::index::MAX_CHAIN`].
    pub fn plan(&self, keys: &[Key], now: Duration) -> Result<Plan, Error> {
        check_chain(keys)?;
        let parts = self.members.cut(keys);
        let (mut ask, down): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|part| self.is_up(part.owner, now));
        let end = down.iter().map(|part| part.positions[0]).min().unwrap_or(keys.len());
        for part in &mut ask {
            let keep = part.positions.partition_point(|&position| position < end);
            part.positions.truncate(keep);
            part.keys.truncate(keep);
        }
        ask.retain(|part| !part.keys.is_empty());
        Ok(Plan { blocks: end, ask, down })
    }

    /// Joins the answers to `plan.ask`, in its order: the prefix ends at the first key that anyone lacks. Who has not answered is down.
    pub fn merge(&self, plan: &Plan, answers: &[Option<Found>], now: Duration) -> Found {
        let mut blocks = plan.blocks;
        for (part, answer) in plan.ask.iter().zip(answers.iter().map(Option::as_ref).chain(std::iter::repeat(None))) {
            match answer {
                Some(_) => self.up(part.owner),
                None => self.down(part.owner, now),
            }
            // An answer longer than the question is no answer to it.
            let found = answer.map_or(0, |found| found.blocks);
            blocks = blocks.min(part.positions.get(found).copied().unwrap_or(plan.blocks));
        }
        let positions = plan.ask.iter().zip(answers).flat_map(|(part, answer)| {
            let slices = answer.iter().flat_map(|found| &found.slices);
            slices.filter_map(|&slice| part.positions.get(slice).copied())
        });
        let mut slices: Vec<usize> = positions.filter(|&position| position < blocks).collect();
        slices.sort_unstable_by(|a, b| b.cmp(a));
        Found { blocks, slices }
    }

    /// The longest prefix of a chain, one entry point asked after the other. A client that can ask them all at once uses [`Directory::plan`]
    /// and [`Directory::merge`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain over [`crate::index::MAX_CHAIN`]; entry points that fail are misses, not errors.
    pub fn check<E: EntryPoint>(&self, points: &[E], keys: &[Key], now: Duration) -> Result<Found, Error> {
        let plan = self.plan(keys, now)?;
        let ask = |part: &Part| points.get(part.owner).and_then(|point| point.check(&part.keys).ok());
        let answers: Vec<Option<Found>> = plan.ask.iter().map(ask).collect();
        Ok(self.merge(&plan, &answers, now))
    }
}
