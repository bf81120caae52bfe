//! A toy worker with a KV oracle, for every test of this crate.
//!
//! The value stored for a position is a hash of the whole history up to it, so any wrong slot, table entry, clone, hit or
//! early reuse is seen when a later row attends to it. The next token is a function of that hash, read back from the KV.

#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)]

mod device;
mod host;
mod mover;
mod window;

use deepinfer_scheduler::{
    Config, EngineType, FieldView, Finish, GroupSpec, Inbox, Limits, Outputs, Plan, Policy, Prepared, Reject, RingView,
    Root, Scheduler, Seq, Source, Status, StepId, StepKind, out,
};
use device::{Device, Flight, Stream};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;

/// Vocabulary of the toy model; token 0 is the end.
pub const VOCAB: u32 = 50;
/// End-of-sequence id.
pub const EOS: u32 = 0;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Value of a position: the hash of the tokens up to it.
pub fn values(tokens: &[u32]) -> Vec<u64> {
    let mut h = 7;
    tokens
        .iter()
        .map(|&t| {
            h = mix(h, u64::from(t));
            h
        })
        .collect()
}

/// Token drawn at `position` after a history of value `h`, by sample `seed`.
pub fn draw(h: u64, seed: u64, position: u32) -> u32 {
    (mix(mix(h, seed), u64::from(position)) % u64::from(VOCAB)) as u32
}

/// What one request alone produces, without a pool.
pub fn reference(prompt: &[u32], seed: u64, max_new: u32, min_new: u32, stops: &[u32], max_len: u32) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut made = Vec::new();
    loop {
        let h = *values(&tokens).last().unwrap();
        let token = draw(h, seed, tokens.len() as u32);
        tokens.push(token);
        made.push(token);
        let n = made.len() as u32;
        if (n >= min_new && stops.contains(&token)) || n >= max_new || tokens.len() as u32 >= max_len {
            return made;
        }
    }
}

pub fn paged(page_tokens: u32, num_pages: u32, entries: &[u32]) -> GroupSpec {
    GroupSpec::Paged {
        page_tokens,
        num_pages,
        sources: entries.iter().map(|&e| Source { entries_per_page: e, entry_bytes: 64 }).collect(),
    }
}

pub fn state() -> GroupSpec {
    GroupSpec::State { stored: 64, dropped: 64, replicas: 1, ring: 0, cut: 0 }
}

pub fn root(block_tokens: u32) -> Root {
    Root { model: "toy".into(), block_tokens, ..Root::default() }
}

/// One paged group of `block` tokens with `pages` pages, room for `seqs` sequences and `tokens` rows.
pub fn config(block: u32, pages: u32, seqs: u32, tokens: u32) -> Config {
    Config {
        engine: EngineType::Normal,
        groups: vec![paged(block, pages, &[block])],
        limits: Limits {
            max_num_seqs: seqs,
            max_num_batched_tokens: tokens,
            max_model_len: 256,
            vocab_size: VOCAB,
            max_draft: 0,
        },
        policy: Policy { headroom_tokens: 0, ..Policy::default() },
        device_ordered: true,
        prefix_caching: true,
        event_capacity: 0,
        root: root(block),
        ring_slots: 3,
        max_in_flight: 1,
        host_blocks: 0,
        host_slots: 0,
        snapshot_slots: 0,
        device_drafts: 0,
    }
}

/// The toy of the hybrid caches: 128-token pages with sources of 64, 64 and 128 entries, 64-token pages, one state.
pub fn hybrid(pages: u32, seqs: u32, tokens: u32) -> Config {
    let mut config = config(128, pages, seqs, tokens);
    config.groups = vec![paged(128, pages, &[64, 64, 128]), paged(64, 2 * pages, &[64]), state()];
    config.limits.max_model_len = 2048;
    config
}

/// Caller-owned ring memory.
pub struct Memory {
    words: Vec<Vec<Vec<i32>>>,
    names: Vec<String>,
}

impl Memory {
    pub fn new(scheduler: &Scheduler, slots: usize) -> Self {
        let fields = scheduler.layout();
        let words = (0..slots).map(|_| fields.iter().map(|f| vec![0; f.words]).collect()).collect();
        Self { words, names: fields.iter().map(|f| f.name.clone()).collect() }
    }

    pub fn views(&mut self) -> Vec<RingView> {
        self.words
            .iter_mut()
            .map(|slot| RingView {
                fields: slot.iter_mut().map(|f| FieldView { words: f.as_mut_ptr(), len: f.len() }).collect(),
            })
            .collect()
    }

    pub fn index(&self, name: &str) -> usize {
        self.names.iter().position(|n| n == name).unwrap()
    }

    pub fn get(&self, slot: usize, name: &str) -> &[i32] {
        &self.words[slot][self.index(name)]
    }

    pub fn get_mut(&mut self, slot: usize, name: &str) -> &mut Vec<i32> {
        let index = self.index(name);
        &mut self.words[slot][index]
    }
}

/// A scheduler, its ring, its device, and what is known of every request.
pub struct Rig {
    pub scheduler: Scheduler,
    pub inbox: Inbox,
    pub memory: Memory,
    pub device: Device,
    pub clock: u64,
    pub requests: HashMap<Seq, Request>,
    /// Outputs by sequence, as rows told them.
    pub outputs: BTreeMap<Seq, Vec<u32>>,
    pub finished: BTreeMap<Seq, i32>,
    pub prefill_rows: u64,
    /// Prompt rows computed of each sequence.
    pub prompt_rows: HashMap<Seq, u32>,
    pub spans: SpansSeen,
    pub has_state: bool,
    /// State slices kept outside, by history value: models that restore state at hits.
    pub slices: Option<HashMap<u64, u64>>,
    pub steps: u64,
    pub last_rows: BTreeMap<Seq, u64>,
    pub host: host::Host,
    /// Of a model with windows.
    pub windows: Option<window::Windows>,
    /// Steps planned and not completed, oldest first, when `step` drives.
    pub queue: VecDeque<Plan>,
    max_in_flight: usize,
    /// Copies into pages that the device has not run.
    copies: Vec<mover::QueuedCopy>,
    /// Newest step that the device has run.
    executed: u64,
    /// What each planned step was launched with, until the device has run it.
    flights: HashMap<u64, Flight>,
    /// Newest step of which the host has read the results.
    pub completed: u64,
    /// What each sequence goes through if nothing ends it.
    streams: HashMap<Seq, Stream>,
    /// Sequences that go on from the results of a step that failed.
    poisoned: HashSet<Seq>,
}

/// How chunks met the spans of their prompts.
#[derive(Clone, Copy, Default)]
pub struct SpansSeen {
    /// Spans that one chunk computed from their first position on.
    pub whole: u64,
    /// Those that a hit left the end of.
    pub rests: u64,
    /// Chunks that ended where one begins.
    pub before: u64,
}

/// What the test knows of a sequence.
#[derive(Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub seed: u64,
    pub max_new: u32,
    pub min_new: u32,
    pub stops: Vec<u32>,
    pub spans: Vec<Range<u32>>,
}

impl Rig {
    pub fn new(config: &Config) -> Self {
        let mut scheduler = Scheduler::new(config).unwrap();
        let mut memory = Memory::new(&scheduler, config.ring_slots as usize);
        // SAFETY: the rig owns the memory, never resizes it, and touches it only between calls.
        unsafe { scheduler.register_ring(&memory.views()).unwrap() };
        let device = Device::new(&scheduler, config);
        let host = host::Host::new(&scheduler, config);
        let windows = window::Windows::new(&scheduler, config);
        let has_state = config.groups.iter().any(|g| matches!(g, GroupSpec::State { .. }));
        Self {
            inbox: scheduler.inbox(),
            scheduler,
            memory,
            device,
            clock: 0,
            requests: HashMap::new(),
            outputs: BTreeMap::new(),
            finished: BTreeMap::new(),
            prefill_rows: 0,
            prompt_rows: HashMap::new(),
            spans: SpansSeen::default(),
            has_state,
            slices: None,
            steps: 0,
            last_rows: BTreeMap::new(),
            host,
            windows,
            queue: VecDeque::new(),
            max_in_flight: config.max_in_flight as usize,
            copies: Vec::new(),
            executed: 0,
            flights: HashMap::new(),
            completed: 0,
            streams: HashMap::new(),
            poisoned: HashSet::new(),
        }
    }

    /// Submits a request whose samples draw with seeds `seed`, `seed + 1`, …
    pub fn submit(&mut self, prepared: &Prepared, seed: u64) -> Result<Vec<Seq>, Reject> {
        let seqs = self.inbox.add(prepared)?;
        let mut stops = prepared.stop_ids.clone();
        if !prepared.ignore_eos {
            stops.extend(&prepared.eos);
        }
        let (prompt, produced) = prepared.tokens.split_at(prepared.tokens.len() - prepared.produced as usize);
        for (fork, seq) in seqs.iter().enumerate() {
            let request = Request {
                prompt: prompt.to_vec(),
                seed: seed + fork as u64,
                max_new: prepared.max_new,
                min_new: prepared.min_new,
                stops: stops.clone(),
                spans: prepared.spans.clone(),
            };
            self.requests.insert(*seq, request);
            self.outputs.insert(*seq, produced.to_vec());
        }
        Ok(seqs)
    }

    /// A plain request.
    pub fn add(&mut self, prompt: &[u32], max_new: u32) -> Seq {
        let prepared = Prepared { eos: vec![EOS], ..Prepared::new(prompt.to_vec(), max_new) };
        let seed = self.requests.len() as u64 * 100;
        self.submit(&prepared, seed).unwrap()[0]
    }

    /// A plain request that only its length ends.
    pub fn add_long(&mut self, prompt: &[u32], max_new: u32) -> Seq {
        let seed = self.requests.len() as u64 * 100;
        self.submit(&Prepared::new(prompt.to_vec(), max_new), seed).unwrap()[0]
    }

    pub fn status(&self, seq: Seq) -> Option<Status> {
        self.scheduler.info(seq).map(|i| i.status)
    }

    /// One turn of the engine's loop: plans a step and, when as many are in flight as may be or there is nothing to plan,
    /// has the device run the oldest and completes it. False if nothing could run.
    pub fn step(&mut self) -> bool {
        if self.queue.len() == self.max_in_flight {
            return self.finish_oldest();
        }
        let plan = self.schedule();
        self.queue.extend(plan);
        // A device is done at once or only when it is waited for; the host must not see the difference.
        if plan.is_some() && mix(self.clock, 5).is_multiple_of(2) {
            self.execute_queued();
        }
        if plan.is_some() && self.queue.len() < self.max_in_flight {
            return true;
        }
        if self.finish_oldest() {
            return true;
        }
        self.flush();
        false
    }

    /// Has the device run the oldest step in flight, and completes it. False if there is none.
    pub fn finish_oldest(&mut self) -> bool {
        let Some(plan) = self.queue.pop_front() else { return false };
        if self.flights.contains_key(&plan.step.0) {
            self.execute(&plan);
        }
        self.complete(plan.step);
        true
    }

    /// Steps that may be in flight.
    pub fn scheduler_depth(&self) -> usize {
        self.max_in_flight
    }

    /// Completes every step in flight.
    pub fn drain(&mut self) {
        while self.finish_oldest() {}
    }

    /// Has the device run everything that is in its queue.
    pub fn execute_queued(&mut self) {
        for plan in self.queue.clone() {
            if self.flights.contains_key(&plan.step.0) {
                self.execute(&plan);
            }
        }
        self.copy_queued(u64::MAX);
    }

    pub fn schedule(&mut self) -> Option<Plan> {
        self.clock += 1;
        let plan = self.scheduler.schedule(self.clock).unwrap();
        if let Some(plan) = plan {
            // A rank group may have agreed on a step without rows of this rank.
            let dummy = plan.kind == StepKind::Dummy;
            let flight = if dummy { Flight::default() } else { self.launch(&plan) };
            self.flights.insert(plan.step.0, flight);
        }
        self.verify();
        plan
    }

    /// Plans a dummy step; it goes through the queue like any other.
    pub fn dummy(&mut self) -> Plan {
        let plan = self.scheduler.plan_dummy(self.clock).unwrap();
        self.flights.insert(plan.step.0, Flight::default());
        self.queue.push_back(plan);
        self.verify();
        plan
    }

    pub fn complete(&mut self, step: StepId) {
        let outputs = self.scheduler.complete(step, self.clock).unwrap();
        let read = read(&outputs);
        self.absorb(&read);
        self.steps += 1;
        self.completed = step.0;
        self.verify();
    }

    pub fn fail(&mut self, step: StepId) {
        let outputs = self.scheduler.fail_step(step, self.clock).unwrap();
        let read = read(&outputs);
        self.absorb(&read);
        self.completed = step.0;
        self.verify();
    }

    /// The oldest step in flight fails, after the device wrote nonsense for all of its rows if nothing ran behind it. False if there is none.
    pub fn fail_oldest(&mut self) -> bool {
        let Some(plan) = self.queue.pop_front() else { return false };
        if self.flights.contains_key(&plan.step.0) {
            self.execute(&plan);
        }
        let spoilt = self.spoil(&plan);
        self.fail(plan.step);
        let ended = spoilt.into_iter().filter(|seq| self.finished.contains_key(seq));
        self.poisoned.extend(ended.collect::<Vec<_>>());
        true
    }

    pub fn flush(&mut self) {
        let outputs = self.scheduler.flush();
        let read = read(&outputs);
        self.absorb(&read);
        self.verify();
    }

    /// Counts, holders and pools after every call.
    pub fn verify(&self) {
        self.scheduler.check().unwrap();
        let counts = self.scheduler.counts();
        assert!(counts.add_up(), "{counts:?}");
        let metrics = self.scheduler.snapshot();
        assert_eq!((metrics.misuse, metrics.count_faults), (0, 0));
    }

    fn absorb(&mut self, rows: &[Vec<i32>]) {
        for row in rows {
            let seq = Seq { index: row[out::SEQ] as u32, generation: row[out::GENERATION] as u32 };
            let known = self.outputs.entry(seq).or_default().len();
            let made = self.scheduler.output_tokens(seq).unwrap().to_vec();
            if row[out::COUNT] > 0 {
                assert_eq!(made.len(), known + row[out::COUNT] as usize, "rows and history agree");
                assert_eq!(made[known], row[out::TOKEN] as u32);
            }
            self.outputs.insert(seq, made);
            if row[out::FINISH] != 0 {
                assert!(self.finished.insert(seq, row[out::FINISH]).is_none(), "one terminal row per sequence");
            }
        }
    }

    /// Steps until nothing is left, at most `most` steps.
    pub fn run(&mut self, most: usize) {
        for _ in 0..most {
            if !self.step() && !self.scheduler.has_work() {
                return;
            }
        }
        panic!("not done after {most} steps: {:?}", self.scheduler.snapshot());
    }

    /// What `seq` produces alone.
    pub fn expected(&self, seq: Seq, max_len: u32) -> Vec<u32> {
        let r = &self.requests[&seq];
        reference(&r.prompt, r.seed, r.max_new, r.min_new, &r.stops, max_len)
    }

    /// Every sequence that ended by itself produced what it produces alone; every other one a beginning of it.
    pub fn verify_streams(&self, max_len: u32) {
        for (seq, made) in &self.outputs {
            let Some(&finish) = self.finished.get(seq) else { continue };
            let expected = self.expected(*seq, max_len);
            if finish == Finish::Stop as i32 || finish == Finish::Length as i32 {
                assert_eq!(made, &expected, "{seq:?}");
            } else {
                assert_eq!(made[..], expected[..made.len()], "{seq:?}");
            }
        }
    }

    /// Pool and slots hold nothing.
    pub fn verify_empty(&self) {
        let counts = self.scheduler.counts();
        for group in &counts.groups {
            assert_eq!((group.held, group.sequence_refs, group.transfer_refs), (0, 0, 0), "{group:?}");
        }
        assert_eq!((counts.slots.held, counts.host_blocks.held, counts.host_slots.held), (0, 0, 0));
    }
}

/// Rows as owned vectors.
pub fn read(outputs: &Outputs<'_>) -> Vec<Vec<i32>> {
    let rows: Vec<Vec<i32>> = (0..outputs.len()).map(|i| outputs.row(i).to_vec()).collect();
    for (i, row) in rows.iter().enumerate() {
        let told = row[out::FINISH] != 0 || row[out::FLAGS] & deepinfer_scheduler::STREAMS != 0;
        assert_eq!(told, outputs.notify.contains(&(i as u32)), "notify names what is to be read");
    }
    rows
}

/// Some prompt of `len` tokens from family `seed`.
pub fn prompt(seed: u64, len: u32) -> Vec<u32> {
    (0..len).map(|i| 1 + (mix(seed, u64::from(i)) % u64::from(VOCAB - 1)) as u32).collect()
}

/// Some spans of up to `longest` positions within a prompt of `len` tokens.
pub fn spans(seed: u64, len: u32, longest: u32) -> Vec<Range<u32>> {
    let mut found = Vec::new();
    let mut at = 0;
    for i in 0.. {
        let start = at + (mix(seed, 2 * i) % 9) as u32;
        let end = start + 1 + (mix(seed, 2 * i + 1) % u64::from(longest.max(1))) as u32;
        if longest == 0 || end > len {
            return found;
        }
        found.push(start..end);
        at = end;
    }
    found
}
