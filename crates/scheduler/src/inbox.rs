//! How other threads talk to the scheduler: messages are queued here and drained whole at the head of `schedule`.
//!
//! Checks and prompt hashing happen on the caller's thread, so that the step loop never waits for them.

use crate::config::{Config, Geometry, Limits};
use crate::hits::Begin;
use crate::kv::Holding;
use crate::lanes::LANE_STOPS;
use crate::pool::{Cold, Finish, Status, Times};
use crate::prepared::{Prepared, Reject};
use crate::roles::EngineType;
use crate::spans;
use crate::waiting::Class;
use deepinfer_kvindex::{Block, BlockHash, ChainHasher, Seq, TransferId};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most sequences of one request: each takes memory when it is queued, before anything runs.
const MAX_FORKS: u32 = 1 << 14;

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything arrived or was saved.
    Done,
    /// Something is missing: what arrived counts as nothing.
    Failed,
}

pub(crate) enum Message {
    Add(Seq, Box<Cold>),
    Abort(Seq),
    Grammar(Seq, bool),
    Transfer(TransferId, Outcome),
    StopAt(Seq, u32, Finish),
}

#[derive(Default)]
struct State {
    messages: Vec<Message>,
    free: Vec<u32>,
    generations: Vec<u32>,
    /// Callers' numbers of the requests turned away whose KV lies elsewhere.
    refused: Vec<u64>,
    closed: bool,
}

/// What the inbox and the scheduler share.
pub(crate) struct Shared {
    engine: EngineType,
    limits: Limits,
    longest_span: u32,
    usable_blocks: u32,
    block_tokens: u32,
    prefix_caching: bool,
    hasher: ChainHasher,
    state: Mutex<State>,
    dirty: AtomicBool,
}

impl Shared {
    pub fn new(config: &Config, geometry: &Geometry) -> Self {
        Self {
            engine: config.engine,
            limits: config.limits.clone(),
            longest_span: spans::longest(&config.limits, &config.policy.chunk),
            usable_blocks: geometry.usable_blocks,
            block_tokens: geometry.block_tokens,
            prefix_caching: config.prefix_caching,
            hasher: ChainHasher::new(&config.root),
            state: Mutex::default(),
            dirty: AtomicBool::new(false),
        }
    }

    pub fn hasher(&self) -> &ChainHasher {
        &self.hasher
    }

    // A panic of another caller cannot leave the lists half changed: every critical section is a few pushes.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: Message) -> Result<(), Reject> {
        let mut state = self.lock();
        if state.closed {
            return Err(Reject::Closed);
        }
        state.messages.push(message);
        self.dirty.store(true, Ordering::Release);
        Ok(())
    }

    /// Swaps the queued messages into `into`, which must be empty. Takes no lock when nothing is queued.
    pub fn drain(&self, into: &mut Vec<Message>) {
        if self.dirty.load(Ordering::Acquire) {
            let mut state = self.lock();
            std::mem::swap(&mut state.messages, into);
            self.dirty.store(false, Ordering::Release);
        }
    }

    pub fn has_mail(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    /// Makes the places of ended sequences usable again, under the next generation.
    pub fn recycle(&self, ended: &mut Vec<Seq>) {
        if ended.is_empty() {
            return;
        }
        let mut state = self.lock();
        for seq in ended.drain(..) {
            if let Some(generation) = state.generations.get_mut(seq.index as usize)
                && *generation == seq.generation
            {
                *generation = generation.wrapping_add(1).max(1);
                state.free.push(seq.index);
            }
        }
    }

    pub fn refuse(&self, user: u64) {
        self.lock().refused.push(user);
    }

    /// Moves out the numbers of the requests turned away whose KV lies elsewhere.
    pub fn take_refused(&self) -> Vec<u64> {
        std::mem::take(&mut self.lock().refused)
    }

    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// What `f` makes of a sequence whose request has not been drained yet.
    pub fn queued<T>(&self, seq: Seq, f: impl FnOnce(&mut Cold) -> T) -> Option<T> {
        let mut state = self.lock();
        let cold = state.messages.iter_mut().find_map(|message| match message {
            Message::Add(added, cold) if *added == seq => Some(cold),
            _ => None,
        })?;
        Some(f(cold))
    }

    fn check(&self, p: &Prepared) -> Result<(), Reject> {
        let Limits { max_model_len, vocab_size: vocab, .. } = self.limits;
        if p.tokens.is_empty() {
            return Err(Reject::Empty);
        }
        let len = u32::try_from(p.tokens.len()).unwrap_or(u32::MAX);
        if len >= max_model_len {
            return Err(Reject::TooLong { len, max: max_model_len - 1 });
        }
        if let Some(&token) = p.tokens.iter().chain(&p.eos).chain(&p.stop_ids).find(|&&t| t >= vocab) {
            return Err(Reject::BadToken { token, vocab });
        }
        let conflicts: [(bool, &'static str); 15] = [
            (p.max_new == 0, "max_tokens is 0: ask for at least one token"),
            (p.produced >= len, "every token is output already: give at least one token of the prompt"),
            (p.produced >= p.max_new, "as many tokens as max_tokens were produced already: nothing is left to do"),
            (p.produced > 0 && p.forks > 1, "a request that goes on after produced tokens cannot have n > 1"),
            (p.min_new > p.max_new, "min_tokens is greater than max_tokens"),
            (p.forks == 0, "n is 0: ask for at least one sequence"),
            (p.forks > MAX_FORKS, "n is above 16384: send the prompt several times instead"),
            (p.flags.wait_kv && p.forks > 1, "a request whose KV arrives from elsewhere cannot have n > 1"),
            (p.flags.wait_kv && p.flags.prompt_logprobs, "prompt_logprobs needs every prompt row: KV cannot be loaded"),
            (
                p.flags.fetch && p.flags.wait_kv,
                "fetch and wait_kv are both set: KV comes from one place, set one of them",
            ),
            (
                p.flags.fetch && p.flags.prompt_logprobs,
                "prompt_logprobs needs every prompt row: do not wait for a fetch",
            ),
            (
                p.flags.fetch && !self.prefix_caching,
                "a fetch goes through the prefix index, which is off: leave fetch out",
            ),
            (
                p.forks > 1 && (p.flags.hold || self.engine == EngineType::Prompt),
                "a request that is handed over cannot have n > 1: send the prompt several times instead",
            ),
            (
                p.produced > 0 && p.flags.prompt_logprobs,
                "prompt_logprobs are made where the prompt is computed, not after produced tokens",
            ),
            (
                !p.flags.wait_kv && self.engine == EngineType::Completion,
                "a completion engine takes requests whose KV arrives from elsewhere only: set wait_kv, or send the prompt \
                 to a prompt engine first",
            ),
        ];
        if let Some(&(_, why)) = conflicts.iter().find(|(bad, _)| *bad) {
            return Err(Reject::Conflict(why));
        }
        spans::check(&p.spans, len - p.produced, self.longest_span)?;
        // The KV of the last token is never written.
        let positions = (len - p.produced).saturating_add(p.max_new).min(max_model_len) - 1;
        let need = positions.div_ceil(self.block_tokens);
        if need > self.usable_blocks {
            return Err(Reject::NeverFits { need, have: self.usable_blocks });
        }
        Ok(())
    }

    fn cold(&self, p: &Prepared, own: Option<&ChainHasher>, hashes: &[BlockHash], fork: u32) -> Cold {
        let prompt = p.tokens.len() as u32 - p.produced;
        let limit = prompt.saturating_add(p.max_new).min(self.limits.max_model_len);
        let mut ids: Vec<u32> = if p.ignore_eos { Vec::new() } else { p.eos.clone() };
        ids.extend_from_slice(&p.stop_ids);
        ids.sort_unstable();
        ids.dedup();
        let mut lane_stops = [-1; LANE_STOPS];
        let stops = if ids.len() <= LANE_STOPS {
            for (to, id) in lane_stops.iter_mut().zip(&ids) {
                *to = *id as i32;
            }
            Box::default()
        } else {
            ids.into_boxed_slice()
        };
        // Room for the whole answer, within reason: the step loop does not allocate.
        let mut history = Vec::with_capacity((limit as usize).min(p.tokens.len() + (1 << 14)));
        history.extend_from_slice(&p.tokens);
        let mut list = Vec::with_capacity((history.capacity() / self.block_tokens as usize) + 1);
        list.extend_from_slice(hashes);
        Cold {
            history,
            prompt,
            hashes: list,
            published: 0,
            cursor: Block::NULL,
            duplicates: Vec::new(),
            limit,
            least: prompt.saturating_add(p.min_new),
            lane_stops,
            stops,
            priority: p.priority,
            arrival: p.arrival,
            fork,
            class: Class::New,
            hasher: own.cloned(),
            extras: p.extras.clone(),
            spans: p.spans.as_slice().into(),
            flags: p.flags,
            remote: p.flags.wait_kv,
            user: p.user,
            begin: Begin::default(),
            cached_tokens: 0,
            holding: None::<Holding>,
            admitted_by: 0,
            swap: None,
            parent: None,
            children: Vec::new(),
            passed: 0,
            preemptions: 0,
            lease: 0,
            load: None,
            save: None,
            queued: false,
            finish: None,
            times: Times::default(),
        }
    }
}

/// Sending end: `Clone + Send`, one per thread that adds or aborts.
#[derive(Clone)]
pub struct Inbox {
    shared: Arc<Shared>,
}

impl Inbox {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Checks and hashes a request on this thread and queues it. One handle per fork, the prompt's own first.
    ///
    /// # Errors
    /// [`Reject`]; nothing is queued then. If the request came with `wait_kv`, whoever holds its KV is told to let go
    /// ([`crate::Scheduler::drain_remote_releases`]).
    pub fn add(&self, prepared: &Prepared) -> Result<Vec<Seq>, Reject> {
        let added = self.try_add(prepared);
        if added.is_err() && prepared.flags.wait_kv {
            self.refuse(prepared.user);
        }
        added
    }

    /// Notes that a request with `wait_kv` was turned away before it became a [`Prepared`], under its caller's number.
    pub fn refuse(&self, user: u64) {
        self.shared.refuse(user);
    }

    fn try_add(&self, prepared: &Prepared) -> Result<Vec<Seq>, Reject> {
        let shared = &*self.shared;
        shared.check(prepared)?;
        let own = (!prepared.salt.is_empty()).then(|| shared.hasher.with_salt(&prepared.salt));
        let hashes = if shared.prefix_caching {
            own.as_ref().unwrap_or(&shared.hasher).hash_all(&prepared.tokens, &prepared.extras)
        } else {
            Vec::new()
        };
        let mut colds: Vec<Cold> =
            (0..prepared.forks).map(|fork| shared.cold(prepared, own.as_ref(), &hashes, fork)).collect();
        // They wait for the first one.
        for cold in colds.iter_mut().skip(1) {
            cold.flags.prompt_logprobs = false;
            cold.flags.fetch = false;
        }
        let mut state = shared.lock();
        if state.closed {
            return Err(Reject::Closed);
        }
        let seqs: Vec<Seq> = colds
            .iter()
            .map(|_| {
                let index = state.free.pop().unwrap_or_else(|| {
                    state.generations.push(1);
                    state.generations.len() as u32 - 1
                });
                Seq { index, generation: state.generations[index as usize] }
            })
            .collect();
        colds[0].children = seqs[1..].to_vec();
        for (fork, (seq, mut cold)) in seqs.iter().zip(colds).enumerate() {
            cold.parent = (fork > 0).then(|| seqs[0]);
            state.messages.push(Message::Add(*seq, Box::new(cold)));
        }
        shared.dirty.store(true, Ordering::Release);
        Ok(seqs)
    }

    /// Ends a sequence in whatever status it is. A stale handle is counted and otherwise ignored.
    ///
    /// # Errors
    /// [`Reject::Closed`].
    pub fn abort(&self, seq: Seq) -> Result<(), Reject> {
        self.shared.send(Message::Abort(seq))
    }

    /// The grammar of a sequence is compiled (`true`) or cannot be (`false`: the sequence ends with an error).
    ///
    /// # Errors
    /// [`Reject::Closed`].
    pub fn grammar_ready(&self, seq: Seq, ok: bool) -> Result<(), Reject> {
        self.shared.send(Message::Grammar(seq, ok))
    }

    /// The mover of a transfer is done with its memory. Duplicates and late calls are counted and otherwise ignored.
    ///
    /// # Errors
    /// [`Reject::Closed`].
    pub fn transfer(&self, transfer: TransferId, outcome: Outcome) -> Result<(), Reject> {
        self.shared.send(Message::Transfer(transfer, outcome))
    }

    /// Ends a sequence after `len` output tokens; what was made beyond is dropped.
    ///
    /// # Errors
    /// [`Reject::Closed`]; [`Reject::Conflict`] for a hand-over, which only a prompt engine's first token is.
    pub fn stop_at(&self, seq: Seq, len: u32, reason: Finish) -> Result<(), Reject> {
        if reason == Finish::Handover {
            return Err(Reject::Conflict("a sequence cannot be handed over from outside: stop it for another reason"));
        }
        self.shared.send(Message::StopAt(seq, len, reason))
    }
}

impl Cold {
    /// Status right after the request was drained.
    pub(crate) fn first_status(&self) -> Status {
        if self.flags.grammar { Status::WaitGrammar } else { self.second_status() }
    }

    /// Status once it has what it needs beside KV and resources.
    pub(crate) fn second_status(&self) -> Status {
        if self.flags.wait_kv || self.flags.fetch {
            Status::WaitKv
        } else if self.parent.is_some() {
            Status::WaitFork
        } else {
            Status::Ready
        }
    }
}
