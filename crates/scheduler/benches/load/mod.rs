//! The load of the benches: sequences with 512-token prompts, half of each shared, and a worker that costs nothing.

#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)]

use deepinfer_scheduler::{
    Config, EngineType, FieldView, GroupSpec, Inbox, Limits, Plan, Policy, Prepared, RingView, Root, Scheduler, Seq,
    Source, header,
};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Tokens of a prompt; the first half is the same in all.
pub const PROMPT: u32 = 512;
const VOCAB: u32 = 32_000;

/// What to build.
#[derive(Clone, Copy)]
pub struct Shape {
    pub seqs: u32,
    pub block: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Token rows of a step.
    pub tokens: u32,
    pub draft: u32,
    /// Growth kept free at admission, in tokens per running sequence.
    pub headroom: u32,
    /// Steps in flight.
    pub depth: u32,
    /// Longest sequence.
    pub length: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { seqs: 256, block: 64, blocks: 0, tokens: 8192, draft: 0, headroom: 16, depth: 1, length: 16_384 }
    }
}

pub struct Load {
    pub scheduler: Scheduler,
    pub inbox: Inbox,
    memory: Vec<Vec<Vec<i32>>>,
    header: usize,
    flags: usize,
    tokens: usize,
    accepted: usize,
    offsets: usize,
    pub sent: u64,
    /// Handles of everything submitted, in order.
    pub handles: Vec<Seq>,
    flight: VecDeque<Plan>,
    depth: usize,
    clock: u64,
    token: u32,
}

/// Times of one step.
#[derive(Clone, Copy, Default)]
pub struct Step {
    pub schedule: Duration,
    pub complete: Duration,
    pub finished: usize,
}

impl Load {
    pub fn new(shape: &Shape) -> Self {
        let source = Source { entries_per_page: shape.block, entry_bytes: 1024 };
        let config = Config {
            engine: EngineType::Normal,
            groups: vec![GroupSpec::Paged { page_tokens: shape.block, num_pages: shape.blocks, sources: vec![source] }],
            limits: Limits {
                max_num_seqs: shape.seqs,
                max_num_batched_tokens: shape.tokens,
                max_model_len: shape.length,
                vocab_size: VOCAB,
                max_draft: shape.draft,
            },
            policy: Policy { headroom_tokens: shape.headroom, ..Policy::default() },
            device_ordered: true,
            prefix_caching: true,
            event_capacity: 0,
            root: Root { model: "bench".into(), block_tokens: shape.block, ..Root::default() },
            ring_slots: 3,
            max_in_flight: shape.depth,
            host_blocks: 0,
            host_slots: 0,
            snapshot_slots: 0,
            device_drafts: 0,
        };
        let mut scheduler = Scheduler::new(&config).unwrap();
        let fields = scheduler.layout();
        let mut memory: Vec<Vec<Vec<i32>>> =
            (0..3).map(|_| fields.iter().map(|f| vec![0; f.words]).collect()).collect();
        let at = |name: &str| fields.iter().position(|f| f.name == name).unwrap();
        let (header, flags, tokens) = (at("header"), at("seq_flags"), at("tokens"));
        let (accepted, offsets) = (at("accepted"), at("sample_off"));
        let views: Vec<RingView> = memory
            .iter_mut()
            .map(|slot| RingView {
                fields: slot.iter_mut().map(|f| FieldView { words: f.as_mut_ptr(), len: f.len() }).collect(),
            })
            .collect();
        // SAFETY: the vectors live as long as the scheduler, are never resized, and are touched between calls only.
        unsafe { scheduler.register_ring(&views).unwrap() };
        let inbox = scheduler.inbox();
        let (flight, depth) = (VecDeque::with_capacity(3), shape.depth as usize);
        Self {
            scheduler,
            inbox,
            memory,
            header,
            flags,
            tokens,
            accepted,
            offsets,
            sent: 0,
            handles: Vec::new(),
            flight,
            depth,
            clock: 0,
            token: 100,
        }
    }

    /// Submits a request of `prompt` tokens for `max_new` tokens.
    pub fn add(&mut self, prompt: u32, max_new: u32) {
        self.sent += 1;
        let mut state = self.sent.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let tokens = (0..prompt)
            .map(|i| {
                if i < PROMPT / 2 {
                    return 100 + i;
                }
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                100 + (state >> 40) as u32 % (VOCAB - 100)
            })
            .collect();
        let seqs = self.inbox.add(&Prepared { eos: vec![2], ..Prepared::new(tokens, max_new) }).unwrap();
        self.handles.extend(seqs);
    }

    /// One step: what the worker would write is written between the two timed calls. With two steps in flight the oldest is
    /// completed and the next one planned, as the engine's loop does it.
    pub fn step(&mut self, keep: impl Fn(u64) -> i32) -> Step {
        self.clock += 1;
        let mut step = Step::default();
        if self.flight.len() == self.depth {
            self.finish(&keep, &mut step);
        }
        let start = Instant::now();
        let plan = self.scheduler.schedule(self.clock).unwrap();
        step.schedule = start.elapsed();
        match plan {
            Some(plan) => self.flight.push_back(plan),
            None if self.flight.is_empty() => return Step::default(),
            None => {}
        }
        if self.depth == 1 || plan.is_none() {
            self.finish(&keep, &mut step);
        }
        step
    }

    fn finish(&mut self, keep: &impl Fn(u64) -> i32, step: &mut Step) {
        let Some(plan) = self.flight.pop_front() else { return };
        self.work(&plan, keep);
        let start = Instant::now();
        let outputs = self.scheduler.complete(plan.step, self.clock).unwrap();
        step.complete += start.elapsed();
        step.finished += outputs.notify.len();
    }

    /// Five drafts for every sequence.
    pub fn propose(&mut self) {
        for &seq in &self.handles {
            self.scheduler.propose(seq, &[101, 102, 103, 104, 105]).unwrap();
        }
    }

    fn work(&mut self, plan: &Plan, keep: &impl Fn(u64) -> i32) {
        let slot = &mut self.memory[plan.slot];
        let seqs = slot[self.header][header::SEQS] as usize;
        // A different token each step; never the end.
        self.token = 100 + (self.token * 31 + 7) % (VOCAB - 100);
        let samples = plan.samples as usize;
        let token = self.token as i32;
        slot[self.tokens][..samples].fill(token);
        for seq in 0..seqs {
            let rows = slot[self.offsets][seq + 1] - slot[self.offsets][seq];
            slot[self.accepted][seq] = rows.min(keep(self.clock + seq as u64));
        }
    }

    /// Runs until every sequence decodes.
    pub fn warm(&mut self) {
        loop {
            self.step(|_| 1);
            let m = self.scheduler.snapshot();
            if m.waiting == 0 && m.running == m.decoding {
                return;
            }
        }
    }
}

/// `seqs` sequences that decode. `even` spreads their block ends over the steps; otherwise all cross together.
pub fn decoding(shape: &Shape, even: bool, max_new: u32) -> Load {
    let mut load = Load::new(shape);
    for i in 0..shape.seqs {
        let more = if even { i * 7 % shape.block } else { 0 };
        load.add(PROMPT + more, max_new);
    }
    load.warm();
    load
}

/// Sequences that end one a step, and another that comes for each.
pub struct Churn {
    pub load: Load,
    ages: VecDeque<u32>,
}

impl Churn {
    pub fn new(shape: &Shape) -> Self {
        let mut load = Load::new(shape);
        for i in 0..shape.seqs {
            load.add(PROMPT, 40 + i);
        }
        load.warm();
        Self { load, ages: VecDeque::new() }
    }

    pub fn step(&mut self, seqs: u32) -> Step {
        let step = self.load.step(|_| 1);
        for _ in 0..step.finished {
            self.load.add(PROMPT, seqs);
        }
        step
    }
}
