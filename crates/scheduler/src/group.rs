//! Steps that hold one kind of rows, agreed with the rank group.
//!
//! The first round of a step is started when the step before it has been planned, and read here: it hides under that step.
//! The second one, of prefill steps only, is the sole wait. What a rank does in a round depends on agreed values and on
//! counters that only they move; a rank without work, or whose step failed, makes the same rounds as any other.

use crate::agreed::{Agreed, Ballot, Tally, Terms};
use crate::error::StepError;
use crate::lanes::flag;
use crate::layout::{F, header};
use crate::metrics::VoteOutcome;
use crate::plan::{Plan, Rows, StepKind};
use crate::pool::Finish;
use crate::scheduler::Scheduler;
use crate::step_type::{Attempts, StepPolicy, StepType};
use crate::vote::{GroupError, OneRank, StepVote};

/// The round that has been started and not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Open {
    Nothing,
    /// That which compares the terms.
    Terms,
    First,
}

/// A prefill that waits for its second round.
struct Trial {
    first: Agreed<Tally>,
    /// Lanes before it admitted anyone.
    lanes: usize,
    rows: u32,
}

/// What a scheduler keeps of its rank group; without one, of itself as a group of one.
pub(crate) struct Group {
    vote: Box<dyn StepVote>,
    /// Nobody else: rounds are made and read at once, so that they say what is so now.
    alone: bool,
    attempts: Attempts,
    open: Open,
    trial: Option<Trial>,
    /// A step failed here and the others do not know yet.
    failed: bool,
    dead: Option<GroupError>,
    /// Most rows of the next decode step, as the others were told.
    promised: u32,
    asleep: bool,
}

impl Group {
    fn new(vote: Box<dyn StepVote>, alone: bool, terms: Terms) -> Self {
        let attempts = Attempts::new(terms.all_interval, terms.any_interval);
        let (open, trial, dead) = (Open::Nothing, None, None);
        Self { vote, alone, attempts, open, trial, failed: false, dead, promised: u32::MAX, asleep: false }
    }

    /// Notes an error that ends the group.
    fn end(&mut self, error: GroupError) -> StepError {
        self.dead = Some(error.clone());
        StepError::Group(error)
    }

    /// What later steps depend on, for model checks.
    fn digest(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.attempts, self.open, self.failed, self.dead.is_some(), self.promised).hash(hasher);
    }
}

/// How far a schedule has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// All the way; as [`Scheduler::schedule`] gives it.
    Planned(Option<Plan>),
    /// To its second round: [`Scheduler::finish_schedule`] waits for the other ranks.
    Second,
}

impl Scheduler {
    /// Joins a rank group: from now on every step is agreed with the others, and prompt and decode rows do not share one.
    /// `schedule` must then be called as often as on any other rank, also when there is nothing to run here.
    ///
    /// # Errors
    /// [`GroupError`]: steps are in flight, the policy is mixed, or the others cannot be reached. Nothing has changed then.
    pub fn set_vote(&mut self, mut vote: Box<dyn StepVote>) -> Result<(), GroupError> {
        if self.policy.step_policy == Some(StepPolicy::Mixed) {
            return Err(GroupError::Mixed);
        }
        if self.in_flight() > 0 || self.is_half_planned() {
            return Err(GroupError::Order("steps are in flight: complete them before joining a group"));
        }
        vote.start(self.terms().words())?;
        let mut group = Group::new(vote, false, self.terms());
        group.open = Open::Terms;
        self.group = Some(Box::new(group));
        Ok(())
    }

    /// Tells the others in the next round that this rank failed, outside of a step. Nothing without a group.
    pub fn fail_group(&mut self) {
        if let Some(group) = &mut self.group {
            group.failed = !group.alone;
        }
    }

    /// Whether the group agreed that nobody has anything to run. Its ranks go on making rounds, but may take their time.
    pub fn is_group_asleep(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.asleep)
    }

    /// Decode-first steps without a group follow the same rules, as a group of one.
    pub(crate) fn own_group(policy: &crate::config::Policy) -> Option<Box<Group>> {
        let terms = Terms { all_interval: policy.all_interval, any_interval: policy.any_interval };
        (policy.step_policy == Some(StepPolicy::DecodeFirst))
            .then(|| Box::new(Group::new(Box::new(OneRank::default()), true, terms)))
    }

    pub(crate) fn in_group(&self) -> bool {
        self.group.as_ref().is_some_and(|group| !group.alone)
    }

    /// Between `begin_schedule` and `finish_schedule`.
    pub(crate) fn is_half_planned(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.trial.is_some())
    }

    fn terms(&self) -> Terms {
        Terms { all_interval: self.policy.all_interval, any_interval: self.policy.any_interval }
    }

    /// Plans the next step and writes it into its ring slot. `None`: nothing can run now; the slot then holds a dummy row.
    /// `now` is the caller's clock in nanoseconds.
    ///
    /// # Errors
    /// [`StepError`]; nothing has changed then, but for [`StepError::Group`], which ends what was admitted in that call.
    pub fn schedule(&mut self, now: u64) -> Result<Option<Plan>, StepError> {
        match self.begin_schedule(now)? {
            Begun::Planned(plan) => Ok(plan),
            Begun::Second => self.finish_schedule(),
        }
    }

    /// First half of [`Scheduler::schedule`], which never waits for what other ranks do only after their own first half: one
    /// thread can take several ranks through a step.
    ///
    /// # Errors
    /// As [`Scheduler::schedule`].
    pub fn begin_schedule(&mut self, now: u64) -> Result<Begun, StepError> {
        if let Some(error) = self.step_error() {
            return Err(error);
        }
        let Some(mut group) = self.group.take() else {
            self.begin_step(now);
            return Ok(Begun::Planned(self.plan_mixed()));
        };
        let begun =
            if group.alone { Ok(self.begin_alone(&mut group, now)) } else { self.begin_agreed(&mut group, now) };
        self.group = Some(group);
        begun
    }

    /// Second half of [`Scheduler::schedule`], after [`Begun::Second`].
    ///
    /// # Errors
    /// As [`Scheduler::schedule`]; [`StepError::NotBegun`] without a first half.
    pub fn finish_schedule(&mut self) -> Result<Option<Plan>, StepError> {
        let Some(mut group) = self.group.take() else { return Err(StepError::NotBegun) };
        let finished = match group.trial.take() {
            Some(trial) => self.finish_agreed(&mut group, &trial),
            None => Err(StepError::NotBegun),
        };
        self.group = Some(group);
        finished
    }

    /// A group of one.
    fn begin_alone(&mut self, group: &mut Group, now: u64) -> Begun {
        self.begin_step(now);
        let ballot = self.ballot(group);
        let (Ok(()), Ok(tally)) = (group.vote.start(ballot.words()), Agreed::<Tally>::wait(&mut *group.vote)) else {
            // A rank alone agrees with itself; if it does not, it plans nothing.
            return Begun::Planned(self.plan_nothing());
        };
        let mut step = group.attempts.decide(&tally);
        let decodes = *step.get() == StepType::Decode;
        if decodes {
            self.plan_rows(Rows::Decode, u32::MAX);
        }
        // Prompts also go on where every decoding sequence waits for blocks or for what is in flight.
        if *step.get() == StepType::Prefill || (decodes && self.planned_rows() == 0) {
            self.plan_rows(Rows::Prefill, u32::MAX);
            let found = Ballot { want: self.planned_rows() > 0, ..ballot };
            let (Ok(()), Ok(second)) = (group.vote.start(found.words()), Agreed::<Tally>::wait(&mut *group.vote))
            else {
                return Begun::Planned(self.plan_nothing());
            };
            step = Attempts::settle(&tally, &second);
            if *step.get() == StepType::Decode && !decodes {
                self.plan_rows(Rows::Decode, u32::MAX);
            }
        }
        if self.planned_rows() == 0 {
            return Begun::Planned(self.plan_nothing());
        }
        group.attempts.made(step);
        Begun::Planned(Some(self.fill()))
    }

    fn begin_agreed(&mut self, group: &mut Group, now: u64) -> Result<Begun, StepError> {
        if let Some(error) = &group.dead {
            return Err(StepError::Group(error.clone()));
        }
        let first = match std::mem::replace(&mut group.open, Open::Nothing) {
            Open::First => Agreed::<Tally>::wait(&mut *group.vote).map(Some),
            _ => Agreed::wait_terms(&mut *group.vote).map(|_| None),
        };
        let first = match first {
            Ok(first) => first,
            Err(error) => return Err(self.group_ended(group, error)),
        };
        self.begin_step(now);
        // Nothing is agreed before the first round.
        let Some(first) = first else { return Ok(Begun::Planned(self.agreed_idle(group))) };
        if !first.get().all_ok {
            self.metrics.votes.note(VoteOutcome::Error, false);
            self.start_first(group);
            return Err(StepError::Group(GroupError::Failed));
        }
        let step = group.attempts.decide(&first);
        if *step.get() != StepType::Prefill {
            let decodes = *step.get() == StepType::Decode;
            self.metrics.votes.note(if decodes { VoteOutcome::Decode } else { VoteOutcome::Idle }, false);
            return Ok(Begun::Planned(self.plan_agreed(group, &first, step)));
        }
        self.chunks = self.policy.chunk.begin(first.get().budget_ns);
        let lanes = self.lanes.len();
        self.plan_rows(Rows::Prefill, u32::MAX);
        let rows = self.planned_rows();
        let found = Ballot {
            want: rows > 0,
            runs: self.lanes.decoding > 0,
            ok: true,
            rows,
            budget_ns: i64::MAX,
            can: rows > 0,
            mid: false,
        };
        // A rank that is lost to the others is told so when it waits.
        if let Err(error) = group.vote.start(found.words()) {
            group.dead = Some(error);
        }
        group.trial = Some(Trial { first, lanes, rows });
        Ok(Begun::Second)
    }

    fn finish_agreed(&mut self, group: &mut Group, trial: &Trial) -> Result<Option<Plan>, StepError> {
        let second = match group.dead.clone() {
            Some(error) => Err(error),
            None => Agreed::<Tally>::wait(&mut *group.vote),
        };
        // Failures travel in the first round; and rows that are here cannot be unsaid by others.
        let second = second.and_then(|second| match second.get() {
            Tally { all_ok: false, .. } => Err(GroupError::Malformed { word: 3, value: 0 }),
            Tally { any_wants: false, .. } if trial.rows > 0 => Err(GroupError::Malformed { word: 1, value: 1 }),
            _ => Ok(second),
        });
        match second {
            Ok(second) => {
                let step = Attempts::settle(&trial.first, &second);
                let (tally, outcome) = match step.get() {
                    StepType::Prefill => (&second, VoteOutcome::Prefill),
                    StepType::Decode => (&trial.first, VoteOutcome::Fallback),
                    StepType::Idle => (&trial.first, VoteOutcome::Idle),
                };
                self.metrics.votes.note(outcome, true);
                Ok(self.plan_agreed(group, tally, step))
            }
            Err(error) => {
                self.drop_admitted(trial.lanes);
                Err(self.group_ended(group, error))
            }
        }
    }

    /// The group cannot go on.
    fn group_ended(&mut self, group: &mut Group, error: GroupError) -> StepError {
        self.metrics.votes.note(VoteOutcome::Error, false);
        group.end(error)
    }

    /// Ends those who were admitted to a step that will not be: their commands are dropped with it.
    fn drop_admitted(&mut self, lanes: usize) {
        for lane in lanes..self.lanes.len() {
            let seq = self.lanes.seq[lane];
            // Nothing beyond what it shares was computed.
            let shared = self.seqs.get(seq).map_or(0, |c| c.published) << self.geometry.shift;
            self.lanes.confirmed[lane] = self.lanes.confirmed[lane].min(shared);
            self.lanes.planned[lane] = self.lanes.confirmed[lane];
            self.end_outside(seq, Finish::Error);
        }
        self.lanes.settle(&mut self.seqs);
        // Only admissions order commands, and those of earlier steps are written.
        self.commands.clear();
        self.swaps.drop_back();
        self.drop_restores();
    }

    /// Fills the agreed step: rows of this rank, or a dummy row where it has none.
    fn plan_agreed(&mut self, group: &mut Group, tally: &Agreed<Tally>, step: Agreed<StepType>) -> Option<Plan> {
        let kind = *step.get();
        if kind == StepType::Idle {
            return self.agreed_idle(group);
        }
        group.asleep = false;
        group.attempts.made(step);
        if kind == StepType::Decode {
            self.plan_rows(Rows::Decode, group.promised);
        }
        let plan = if self.planned_rows() > 0 { self.fill() } else { self.fill_dummy_step() };
        let words = self.ring.get_mut(plan.slot, F::Header);
        words[header::GROUP_ROWS] = tally.get().rows as i32;
        words[header::GROUP_TYPE] = kind as i32;
        self.start_first(group);
        Some(plan)
    }

    fn agreed_idle(&mut self, group: &mut Group) -> Option<Plan> {
        group.asleep = true;
        let plan = self.plan_nothing();
        self.start_first(group);
        plan
    }

    /// Starts the round that the next step is decided by.
    fn start_first(&mut self, group: &mut Group) {
        let ballot = self.ballot(group);
        group.failed = false;
        group.promised = ballot.rows;
        group.open = Open::First;
        if let Err(error) = group.vote.start(ballot.words()) {
            group.dead = Some(error);
        }
    }

    /// What this rank says about the step after those that are planned.
    fn ballot(&self, group: &Group) -> Ballot {
        let decoding = self.lanes.decoding;
        let (mut finished, mut mid) = (0, false);
        for lane in decoding..self.lanes.len() {
            let done = self.lanes.planned[lane] >= self.lanes.target[lane];
            finished += u32::from(done);
            mid |= !done;
        }
        let lanes = decoding as u32 + finished;
        let budget = if self.device_drafts > 0 { u32::MAX } else { self.draft_budget };
        let drafts = lanes.saturating_mul(self.limits.max_draft).min(budget);
        let want = mid || !self.waiting.is_empty();
        Ballot {
            want,
            runs: self.runs_on(),
            ok: !group.failed,
            rows: lanes.saturating_add(drafts).min(self.limits.max_num_batched_tokens),
            budget_ns: self.policy.chunk.word(),
            can: want && (mid || self.may_admit()),
            mid,
        }
    }

    /// Whether a sequence will have a decode row in the next step, as far as lengths tell: none that a step in flight ends.
    fn runs_on(&self) -> bool {
        let ahead = self.max_in_flight > 1;
        let lanes = &self.lanes;
        (0..lanes.len()).any(|lane| {
            let (planned, confirmed) = (lanes.planned[lane], lanes.confirmed[lane]);
            let waits = ahead && planned > confirmed && lanes.flags[lane] & flag::ALONE != 0;
            // Drafts in flight may be refused.
            let least = if self.limits.max_draft > 0 { planned.min(confirmed + 1) } else { planned };
            let decodes = lane < lanes.decoding || planned >= lanes.target[lane];
            decodes && !waits && least + 1 < lanes.limit[lane]
        })
    }

    fn planned_rows(&self) -> u32 {
        self.lanes.rows.iter().sum()
    }

    /// No step: the slot of the next one holds an idle row.
    pub(crate) fn plan_nothing(&mut self) -> Option<Plan> {
        let slot = self.ring.slot_of(self.step + 1).0;
        self.fill_dummy(slot, StepKind::Idle, 0);
        self.metrics.idle_plans += 1;
        None
    }

    /// Hash of what the next steps depend on, step numbers taken relative to this one: equal worlds of a model check.
    #[doc(hidden)]
    pub fn digest(&self, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        let lanes = &self.lanes;
        (lanes.decoding, self.in_flight(), self.live, self.ended.len()).hash(hasher);
        for lane in 0..lanes.len() {
            (lanes.planned[lane], lanes.confirmed[lane], lanes.target[lane], lanes.limit[lane]).hash(hasher);
            (lanes.blocks[lane], lanes.flags[lane], lanes.priority[lane], lanes.drafts[lane]).hash(hasher);
            let older = lanes.arrival.iter().filter(|&&arrival| arrival < lanes.arrival[lane]).count();
            older.hash(hasher);
        }
        for place in self.waiting.iter() {
            (place.priority, place.class as u8).hash(hasher);
            if let Some(cold) = self.seqs.get(place.seq()) {
                (cold.history.len(), cold.limit, cold.prompt, cold.passed, cold.holding.is_some()).hash(hasher);
            }
        }
        self.waiting.digest(self.step + 1, hasher);
        for launch in self.launches.iter().filter(|launch| launch.step > self.completed) {
            launch.rows.hash(hasher);
            for &seq in &launch.seqs {
                self.seqs.lane(seq).hash(hasher);
            }
        }
        let counts = self.counts();
        for counts in counts.groups.iter().chain([&counts.slots]) {
            (counts.free, counts.held, counts.parked, counts.cached).hash(hasher);
        }
        (self.kv.blocks.coming_back(self.kv.now), self.kv.available()).hash(hasher);
        if let Some(group) = &self.group {
            group.digest(hasher);
        }
    }
}
