//! Random operations against the KV oracle and a naive model of what must hold after each of them.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, SpansSeen, config, paged, prompt, spans, state, values};
use deepinfer_scheduler::{
    Block, BlockHash, ChainSave, ChunkPolicy, Config, Fetch, Finish, HitRule, Load, Metrics, Outcome, PrepFlags,
    Prepared, Reject, Save, Saves, Seq, Status, Tier, TransferError, TransferId, WindowRule,
};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestRng, TestRunner};

const OPS: usize = 420;
const CASES: u32 = 600;
const MAX_LEN: u32 = 96;

#[derive(Clone, Debug)]
enum Op {
    Step,
    Add {
        family: u8,
        len: u32,
        max_new: u32,
        forks: u32,
        min_new: u32,
        priority: i32,
        flags: u8,
        /// How long spans of the prompt are at most, and what they are drawn from; none for 0.
        spans: (u32, u8),
    },
    Abort(u16),
    StopAt(u16, u32),
    Propose(u16, u32, bool),
    Grammar(u16, bool),
    Load(u16, u32),
    Save(u16),
    /// Of a waiting sequence if there is one.
    Fetch(u16, u32),
    EndWait(u16),
    TakeSaves,
    Close(u16, bool, bool),
    Release(u16),
    Slice(u16, u32),
    FailStep,
    Dummy,
    Late,
    /// Whether swapping is the cheaper way back from now on.
    Rates(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        70 => Just(Op::Step),
        14 => (
            0..4u8, 1..60u32, 1..48u32, prop_oneof![6 => Just(1u32), 2 => 2..4u32], 0..4u32, -1..2i32, any::<u8>(),
            (prop_oneof![1 => Just(0), 1 => 1..24u32], any::<u8>()),
        ).prop_map(
            |(family, len, max_new, forks, min_new, priority, flags, spans)|
                Op::Add { family, len, max_new, forks, min_new, priority, flags, spans }
        ),
        2 => any::<u16>().prop_map(Op::Abort),
        1 => (any::<u16>(), 0..10u32).prop_map(|(k, n)| Op::StopAt(k, n)),
        8 => (any::<u16>(), 1..5u32, prop::bool::weighted(0.7)).prop_map(|(k, n, right)| Op::Propose(k, n, right)),
        3 => (any::<u16>(), prop::bool::weighted(0.8)).prop_map(|(k, ok)| Op::Grammar(k, ok)),
        3 => (any::<u16>(), 1..60u32).prop_map(|(k, n)| Op::Load(k, n)),
        2 => any::<u16>().prop_map(Op::Save),
        9 => (any::<u16>(), 1..62u32).prop_map(|(k, n)| Op::Fetch(k, n)),
        3 => any::<u16>().prop_map(Op::EndWait),
        10 => Just(Op::TakeSaves),
        7 => (any::<u16>(), prop::bool::weighted(0.7), prop::bool::weighted(0.2)).prop_map(|(k, ok, twice)| Op::Close(k, ok, twice)),
        1 => any::<u16>().prop_map(Op::Release),
        4 => (any::<u16>(), 1..8u32).prop_map(|(k, n)| Op::Slice(k, n)),
        1 => Just(Op::FailStep),
        1 => Just(Op::Dummy),
        1 => Just(Op::Late),
        2 => prop::bool::weighted(0.8).prop_map(Op::Rates),
    ]
}

#[derive(Clone, Debug)]
struct Shape {
    block: u32,
    pages: u32,
    seqs: u32,
    tokens: u32,
    draft: u32,
    chunk: u32,
    align: u32,
    headroom: u32,
    bits: u8,
    overlapped: bool,
    host: u32,
    /// Used with a state group.
    windows: Option<(WindowRule, u32)>,
    /// How much is saved, and the blocks of a grain.
    saves: (u8, u32),
}

/// A rule for blocks of one token, and places for snapshots.
fn windows() -> impl Strategy<Value = (WindowRule, u32)> {
    ((0..3u32, 0..3u32), 1..6u32, 1..3u32, any::<[bool; 2]>(), 0..12u32, 0..5u32).prop_map(
        |((encoder, decoder), window, grain, [exact, truncated], more, places)| {
            let (decoder, backtrack) = (decoder.max(u32::from(encoder == 0)), 3);
            let keep = window + backtrack + more;
            (WindowRule { encoder, decoder, window, grain, backtrack, exact, keep, truncated }, places)
        },
    )
}

fn shape() -> impl Strategy<Value = Shape> {
    (
        2..5u32,
        25..55u32,
        1..9u32,
        10..64u32,
        0..4u32,
        (0..12u32, 1..9u32, 0..20u32),
        any::<u8>(),
        any::<bool>(),
        (0..60u32, prop::option::of(windows()), (0..3u8, 1..4u32)),
    )
        .prop_map(|(shift, pages, seqs, tokens, draft, (chunk, align, headroom), bits, overlapped, rest)| Shape {
            block: 1 << shift,
            pages: (pages * 4 / (1 << shift)).max(8),
            seqs,
            tokens: tokens.max(seqs),
            draft,
            chunk,
            align,
            headroom,
            bits,
            overlapped,
            host: rest.0,
            windows: rest.1,
            saves: rest.2,
        })
}

impl Shape {
    fn config(&self) -> Config {
        let mut c = config(self.block, self.pages, self.seqs, self.tokens);
        c.limits.max_model_len = MAX_LEN;
        c.limits.max_draft = self.draft;
        if self.bits & 128 != 0 {
            c.device_drafts = self.draft;
        }
        c.policy.chunk = ChunkPolicy::Tokens(self.chunk);
        c.policy.chunk_align = self.align;
        c.policy.headroom_tokens = self.headroom;
        c.policy.bypass = u32::from(self.bits % 3);
        c.policy.kv_lease_ns = 40;
        c.policy.fetch_lease_ns = 60;
        c.host_blocks = self.host;
        c.host_slots = self.host / 8;
        c.max_in_flight = 1 + u32::from(self.overlapped);
        c.device_ordered = self.bits & 1 == 0;
        c.prefix_caching = self.bits & 6 != 0;
        c.event_capacity = usize::from(self.bits & 8 != 0) * 64;
        if self.bits & 16 != 0 {
            c.groups = vec![
                paged(self.block, self.pages, &[self.block / 2, self.block]),
                paged(self.block / 2, self.pages * 2 - 3, &[self.block / 4]),
            ];
        }
        if self.bits & 32 != 0 {
            c.groups.push(state());
            if let Some((rule, places)) = self.windows {
                c.policy.hit_rule = HitRule::Window(WindowRule { grain: rule.grain * self.block, ..rule });
                c.snapshot_slots = places;
            } else if self.bits & 64 != 0 {
                c.policy.hit_rule = HitRule::StateSlice;
            }
        }
        c
    }
}

enum Open {
    Save { save: Save, expected: Vec<u64> },
    Load { seq: Seq, load: Load },
    Fetch { seq: Seq, fetch: Fetch },
    Chain { save: ChainSave, expected: Vec<u64> },
}

struct World {
    rig: Rig,
    live: Vec<Seq>,
    open: Vec<Open>,
    /// Slices of states are stored at random boundaries.
    slices: bool,
    loads: u64,
    saves: u64,
    grain: u32,
    device_ordered: bool,
    /// Names of the blocks that open fetches bring.
    coming: Vec<(TransferId, Vec<BlockHash>)>,
    /// Fetches that ended after their sequence had begun or ended.
    late: u64,
    /// Requests refused for the length of a span.
    too_long: u64,
    bypass: u32,
    device_drafts: bool,
}

/// What a world went through.
struct Ended {
    metrics: Metrics,
    loads: u64,
    saves: u64,
    late: u64,
    spans: SpansSeen,
    too_long: u64,
}

impl World {
    fn new(shape: &Shape) -> Self {
        let config = shape.config();
        let mut rig = Rig::new(&config);
        rig.scheduler.set_rates(1e12, 1.0);
        let restores = rig.has_state && config.policy.hit_rule == HitRule::StateSlice;
        let slices = restores || rig.windows.is_some();
        if restores {
            rig.slices = Some(std::collections::HashMap::new());
        }
        let device_drafts = config.device_drafts > 0;
        let bypass = config.policy.bypass;
        let (saves, grain) = shape.saves;
        let saves = if config.prefix_caching { saves } else { 0 };
        let mode = [Saves::Off, Saves::OnFinish, Saves::Through][saves as usize];
        rig.scheduler.set_saves(mode, grain).unwrap();
        Self {
            rig,
            live: Vec::new(),
            open: Vec::new(),
            slices,
            loads: 0,
            saves: 0,
            grain,
            device_ordered: config.device_ordered,
            coming: Vec::new(),
            late: 0,
            too_long: 0,
            bypass,
            device_drafts,
        }
    }

    fn pick(&self, k: u16) -> Option<Seq> {
        (!self.live.is_empty()).then(|| self.live[k as usize % self.live.len()])
    }

    /// One of the live sequences in a status.
    fn pick_in(&self, k: u16, status: Status) -> Option<Seq> {
        let those: Vec<Seq> = self.live.iter().copied().filter(|&s| self.rig.status(s) == Some(status)).collect();
        (!those.is_empty()).then(|| those[k as usize % those.len()])
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Step => self.step(),
            Op::Add { .. } => self.add(op),
            Op::Abort(k) => {
                if let Some(seq) = self.pick(k) {
                    self.rig.inbox.abort(seq).unwrap();
                }
            }
            Op::StopAt(k, n) => {
                if let Some(seq) = self.pick(k) {
                    // Whoever cuts has worlds the tokens he cuts at.
                    let made = self.rig.scheduler.info(seq).map_or(0, |i| i.output_tokens);
                    self.rig.inbox.stop_at(seq, n.min(made), Finish::Abort).unwrap();
                }
            }
            Op::Propose(k, n, right) => self.propose(k, n, right),
            Op::Grammar(k, ok) => {
                if let Some(seq) = self.pick(k) {
                    self.rig.inbox.grammar_ready(seq, ok).unwrap();
                }
            }
            Op::Load(k, tokens) => self.load(k, tokens),
            Op::Save(k) => self.save(k),
            Op::Fetch(k, tokens) => self.fetch(k, tokens),
            Op::EndWait(k) => {
                if let Some(seq) = self.pick_in(k, Status::WaitKv).or(self.pick(k)) {
                    let waits = self.rig.status(seq);
                    let ended = self.rig.scheduler.end_wait(seq);
                    let may = [None, Some(Status::WaitKv), Some(Status::WaitGrammar)];
                    assert!(!ended || may.contains(&waits), "{waits:?}");
                    assert!(!self.rig.scheduler.end_wait(seq), "once");
                }
            }
            Op::TakeSaves => self.take_saves(),
            Op::Close(k, ok, twice) => self.close(k, ok, twice),
            Op::Release(k) => {
                if let Some(seq) = self.pick(k) {
                    let handover = self.rig.status(seq) == Some(Status::Handover);
                    assert_eq!(self.rig.scheduler.release(seq), handover);
                }
            }
            Op::Slice(k, blocks) => {
                if let Some(seq) = self.pick(k).filter(|_| self.slices) {
                    let boundary = blocks * self.rig.scheduler.block_tokens();
                    self.rig.scheduler.note_state_slice(seq, boundary, Tier::Host, true);
                }
            }
            Op::FailStep => {
                let plan = if self.rig.queue.is_empty() { self.rig.schedule() } else { None };
                self.rig.queue.extend(plan);
                self.rig.fail_oldest();
            }
            Op::Dummy => {
                if self.rig.queue.len() == self.rig.scheduler_depth() {
                    self.rig.finish_oldest();
                }
                let plan = self.rig.dummy();
                let slots = self.rig.memory.get(plan.slot, "slots0")[0];
                assert!(slots < self.rig.scheduler.slot_maps()[0].entries as i32, "writes the null page only");
                assert_eq!(self.rig.memory.get(plan.slot, "state_row")[0], 0);
                if self.rig.queue.len() == self.rig.scheduler_depth() {
                    self.rig.finish_oldest();
                }
            }
            Op::Late => self.rig.clock += 25,
            Op::Rates(swap) => {
                let (bytes, tokens) = if swap { (1e12, 1.0) } else { (1.0, 1e12) };
                self.rig.scheduler.set_rates(bytes, tokens);
            }
        }
        self.rig.verify();
        let rig = &self.rig;
        self.live.retain(|&s| {
            rig.status(s) != Some(Status::Finished) && !rig.finished.contains_key(&s)
                || rig.status(s) == Some(Status::Handover)
        });
    }

    fn step(&mut self) {
        if !self.rig.step() {
            self.progress();
        }
    }

    /// Nothing runs and a ready sequence fits what is there: then the plan must not be idle.
    fn progress(&self) {
        let s = &self.rig.scheduler;
        let metrics = s.snapshot();
        if metrics.running > 0 {
            return;
        }
        let slots = s.counts().slots;
        let free_slots = slots.free + slots.parked - u32::try_from(self.open.len()).unwrap().min(slots.parked);
        for &seq in &self.live {
            let Some(info) = s.info(seq).filter(|i| matches!(i.status, Status::Ready | Status::Swapped)) else {
                continue;
            };
            let need = (info.prompt_tokens + info.output_tokens).div_ceil(s.block_tokens());
            let fits = u64::from(need) <= metrics.available_blocks && free_slots > 0 && self.open.is_empty();
            assert!(!fits, "{seq:?} needs {need} blocks, {metrics:?}, bypass {}", self.bypass);
        }
    }

    fn add(&mut self, op: &Op) {
        let Op::Add { family, len, max_new, forks, min_new, priority, flags, spans: (longest, drawn) } = *op else {
            return;
        };
        let flags = PrepFlags {
            stream: flags & 1 != 0,
            prompt_logprobs: flags & 0b1_1110 == 2,
            grammar: flags & 0b111_0000 == 0b111_0000,
            wait_kv: flags & 0b1_1100 == 0b1_1100 && forks == 1,
            fetch: flags & 0b0100_1000 == 0b0100_0000,
            hold: flags & 0b1111_1000 == 0b1010_0000 && forks == 1,
        };
        let flags = PrepFlags { prompt_logprobs: flags.prompt_logprobs && !flags.wait_kv, ..flags };
        let fetch = flags.fetch && !flags.wait_kv && !flags.prompt_logprobs;
        let flags = PrepFlags { fetch, ..flags };
        let prepared = Prepared {
            eos: vec![EOS],
            stop_ids: if len % 3 == 0 { vec![7, 9, 11, 13, 17] } else { Vec::new() },
            ignore_eos: len % 5 == 0,
            min_new: min_new.min(max_new),
            priority,
            forks,
            flags,
            salt: if family == 3 { b"tenant".to_vec() } else { Vec::new() },
            spans: spans(drawn.into(), len, longest),
            ..Prepared::new(prompt(family.into(), len), max_new)
        };
        let seed = self.rig.requests.len() as u64 * 10;
        match self.rig.submit(&prepared, seed) {
            Ok(seqs) => self.live.extend(seqs),
            Err(Reject::SpanTooLong { .. }) => self.too_long += 1,
            Err(_) => (),
        }
    }

    fn propose(&mut self, k: u16, n: u32, right: bool) {
        if self.device_drafts {
            return self.rig.scheduler.set_draft_budget(if n == 1 { u32::MAX } else { u32::from(k) % (3 * n + 1) });
        }
        let Some(seq) = self.pick_in(k, Status::Running) else { return };
        // The token of the next planned row is not for the drafter to guess, even where the host does not know it yet.
        let next = self.rig.planned(seq) as usize + 1;
        let mut drafts = self.rig.stream(seq, next + n as usize).tokens[next..next + n as usize].to_vec();
        if !right && let Some(last) = drafts.last_mut() {
            *last = (*last + 1) % common::VOCAB;
        }
        self.rig.scheduler.propose(seq, &drafts).unwrap();
    }

    fn positions(&self, blocks: &[Block], tokens: u32, mut each: impl FnMut(usize, usize, u32)) {
        let s = &self.rig.scheduler;
        let (bt, maps) = (s.block_tokens(), s.slot_maps().to_vec());
        for (m, map) in maps.iter().enumerate() {
            for p in (0..tokens).filter(|p| (p + 1) % (1 << map.ratio_shift) == 0) {
                let block = blocks[(p / bt) as usize];
                let page = s.page(map.group, block, ((p % bt) >> map.page_shift) as usize);
                let within = p & ((1 << map.page_shift) - 1);
                each(m, (page * map.entries + (within >> map.ratio_shift)) as usize, p);
            }
        }
    }

    fn load(&mut self, k: u16, tokens: u32) {
        let Some(seq) = self.pick_in(k, Status::WaitKv).or(self.pick(k)) else { return };
        let most = self.rig.requests[&seq].prompt.len() as u32 - 1;
        let Ok(load) = self.rig.scheduler.begin_load(seq, if most > 0 { 1 + tokens % most } else { 1 }) else { return };
        self.open.push(Open::Load { seq, load });
    }

    fn deliver(&mut self, seq: Seq, load: &Load) {
        let prompt = self.rig.requests[&seq].prompt.clone();
        let h = values(&prompt);
        let mut writes = Vec::new();
        self.positions(&load.blocks, load.tokens, |m, at, p| {
            if p >= load.present {
                writes.push((m, at, h[p as usize]));
            }
        });
        for (m, at, value) in writes {
            self.rig.device_mut(m)[at] = value;
        }
        if self.rig.has_state {
            self.rig.device.states[load.slot.index()] = h[load.tokens as usize - 1];
            self.rig.device.seen[load.slot.index()] = load.tokens;
            self.rig.load_windows(load.slot.index(), seq, load.tokens);
        }
    }

    fn save(&mut self, k: u16) {
        let Some(seq) = self.pick(k) else { return };
        let Ok(save) = self.rig.scheduler.begin_save(seq) else { return };
        let history = self.rig.scheduler.history(seq).unwrap().to_vec();
        self.open.push(Open::Save { expected: values(&history[..save.tokens as usize]), save });
    }

    /// Need of the oldest sequence that lacks nothing but resources.
    fn oldest_needs(&self) -> u64 {
        let waiting = self.live.iter().filter_map(|&seq| self.rig.scheduler.info(seq));
        let waiting = waiting.filter(|i| matches!(i.status, Status::Ready | Status::Swapped));
        let bt = self.rig.scheduler.block_tokens();
        let need = |i: &deepinfer_scheduler::Info| u64::from((i.prompt_tokens + i.output_tokens).div_ceil(bt));
        let oldest = waiting.min_by_key(|i| (i.priority, i.preemptions == 0, i.arrival));
        oldest.map_or(0, |oldest| need(&oldest))
    }

    fn fetch(&mut self, k: u16, tokens: u32) {
        let seq = [Status::WaitKv, Status::Ready].into_iter().find_map(|status| self.pick_in(k, status));
        let Some(seq) = seq.or(self.pick(k)) else { return };
        let bt = self.rig.scheduler.block_tokens();
        let chain = self.rig.scheduler.chain(seq);
        // Now and then more than there is, or not one block.
        let tokens = tokens * (chain.len() as u32 * bt + 2) / 60;
        let before = self.rig.scheduler.snapshot();
        let status = self.rig.status(seq);
        match self.rig.scheduler.begin_fetch(seq, tokens) {
            Ok(fetch) => {
                let need = (fetch.tokens - fetch.present) / bt;
                assert_eq!((fetch.tokens, fetch.blocks.len()), (tokens / bt * bt, need as usize));
                let after = self.rig.scheduler.snapshot();
                assert!(need == 0 || after.available_blocks >= self.oldest_needs(), "room for the oldest");
                assert_eq!(after.preemptions, before.preemptions);
                // The same blocks are not brought twice, whatever their sequences are.
                let names = chain[(fetch.present / bt) as usize..(fetch.tokens / bt) as usize].to_vec();
                assert!(names.iter().all(|name| !self.coming.iter().any(|(_, names)| names.contains(name))), "twice");
                self.coming.push((fetch.transfer, names));
                self.open.push(Open::Fetch { seq, fetch });
            }
            Err(TransferError::NoBlocks { .. }) => {
                assert!(tokens < bt || (tokens / bt) as usize > chain.len());
            }
            Err(TransferError::Status(_) | TransferError::Stale(_)) => {
                let waits = [Status::WaitGrammar, Status::WaitKv, Status::WaitFork, Status::Ready, Status::Swapped];
                assert!(status.is_some_and(|status| !waits.contains(&status)));
            }
            Err(TransferError::UnderWay { transfer, .. }) => {
                assert!(self.open.iter().any(|o| matches!(o, Open::Fetch { fetch, .. } if fetch.transfer == transfer)));
            }
            Err(_) => {}
        }
    }

    fn take_saves(&mut self) {
        let bt = self.rig.scheduler.block_tokens();
        for save in self.rig.scheduler.take_saves() {
            let (keys, end) = (&save.keys, save.first + save.keys.len() as u32 * self.grain * bt);
            assert_eq!((save.blocks.len() as u32) * bt, end - save.first);
            let given =
                |open: &Open| matches!(open, Open::Chain { save, .. } if save.keys.iter().any(|k| keys.contains(k)));
            assert!(!keys.is_empty() && !self.open.iter().any(given), "given twice");
            let chain = self.rig.scheduler.chain(save.seq);
            let named = |at: u32| at.checked_sub(1).and_then(|at| chain.get(at as usize));
            if !chain.is_empty() {
                assert_eq!(*named(save.first / bt).unwrap_or(&BlockHash(0)), save.parent);
                for (nth, key) in (1..).zip(keys) {
                    assert_eq!(named(save.first / bt + nth * self.grain), Some(key));
                }
            }
            let expected = self.rig.stream(save.seq, end as usize).values[save.first as usize..end as usize].to_vec();
            self.open.push(Open::Chain { save, expected });
        }
    }

    fn close(&mut self, k: u16, ok: bool, twice: bool) {
        if self.open.is_empty() {
            return;
        }
        let at = k as usize % self.open.len();
        if let Open::Fetch { fetch, .. } = &self.open[at]
            && !self.device_ordered
            && fetch.after.0 > self.rig.completed
        {
            return;
        }
        // A mover waits for what may still use the memory that it was given.
        if let Open::Load { load, .. } = &self.open[at]
            && load.after.0 > self.rig.completed
        {
            return;
        }
        let open = self.open.swap_remove(at);
        let transfer = match &open {
            Open::Save { save, expected } => {
                // What is being saved has not been written by anybody, however long ago its sequence ended.
                let mut reads = Vec::new();
                self.positions(&save.blocks, save.tokens, |m, at, p| reads.push((m, at, p)));
                for (m, at, p) in reads {
                    assert_eq!(self.rig.device_mut(m)[at], expected[p as usize], "saved position {p}");
                }
                self.saves += 1;
                save.transfer
            }
            Open::Load { seq, load } => {
                if ok {
                    self.loads += 1;
                    self.deliver(*seq, load);
                }
                load.transfer
            }
            Open::Fetch { seq, fetch } => return self.end_fetch(*seq, fetch, k, ok, twice),
            Open::Chain { save, expected } => {
                // What a device runs before the copy out.
                self.rig.execute_queued();
                let mut reads = Vec::new();
                self.positions(&save.blocks, expected.len() as u32, |m, at, p| reads.push((m, at, p)));
                for (m, at, p) in reads {
                    assert_eq!(self.rig.device_mut(m)[at], expected[p as usize], "saved position {p}");
                }
                if !k.is_multiple_of(3) {
                    assert!(!self.rig.scheduler.end_fetch(save.transfer, 0));
                    assert!(self.rig.scheduler.end_save(save.transfer, ok));
                    assert!(!twice || !self.rig.scheduler.end_save(save.transfer, !ok));
                    return;
                }
                save.transfer
            }
        };
        let outcome = if ok { Outcome::Done } else { Outcome::Failed };
        self.rig.inbox.transfer(transfer, outcome).unwrap();
        if twice {
            self.rig.inbox.transfer(transfer, Outcome::Done).unwrap();
        }
    }

    fn end_fetch(&mut self, seq: Seq, fetch: &Fetch, k: u16, ok: bool, twice: bool) {
        let prompt = self.rig.requests[&seq].prompt.clone();
        let bt = self.rig.scheduler.block_tokens();
        // All of it, or up to somewhere, or nothing.
        let arrived = if ok { fetch.tokens } else { u32::from(k) % (fetch.tokens + 1) };
        let waits = [Status::WaitGrammar, Status::WaitKv, Status::WaitFork, Status::Ready];
        self.late += u64::from(self.rig.status(seq).is_none_or(|status| !waits.contains(&status)));
        let history = &prompt[..prompt.len().min(fetch.tokens as usize)];
        // A sequence that ran and was preempted has tokens of its own in its chain.
        let made = self.rig.stream(seq, fetch.tokens as usize).tokens[..fetch.tokens as usize].to_vec();
        assert_eq!(made[..history.len()], *history);
        self.rig.fill_fetch(fetch, &made, arrived / bt * bt);
        self.coming.retain(|(transfer, _)| *transfer != fetch.transfer);
        assert!(!self.rig.scheduler.end_save(fetch.transfer, true));
        assert!(self.rig.scheduler.end_fetch(fetch.transfer, arrived));
        assert!(!twice || !self.rig.scheduler.end_fetch(fetch.transfer, fetch.tokens));
    }

    fn finish(mut self) -> Ended {
        self.rig.drain();
        while !self.open.is_empty() {
            self.close(0, true, false);
        }
        for &seq in &self.live.clone() {
            self.rig.inbox.grammar_ready(seq, true).unwrap();
            if self.rig.scheduler.info(seq).is_some_and(|i| i.status == Status::WaitKv) {
                self.rig.inbox.abort(seq).unwrap();
            }
        }
        for _ in 0..30_000 {
            if !self.rig.step() {
                if !self.rig.scheduler.has_work() {
                    break;
                }
                self.rig.clock += 50;
                for seq in self.live.iter().copied().chain(self.rig.outputs.keys().copied().collect::<Vec<_>>()) {
                    self.rig.scheduler.release(seq);
                }
            }
        }
        assert!(!self.rig.scheduler.has_work(), "everything ends: {:?}", self.rig.scheduler.snapshot());
        for &seq in &self.live {
            self.rig.scheduler.release(seq);
        }
        self.rig.flush();
        self.rig.verify_streams(MAX_LEN);
        self.rig.schedule();
        self.rig.verify_empty();
        assert_eq!(self.rig.finished.len(), self.rig.outputs.len(), "each sequence ended once");
        let metrics = self.rig.scheduler.snapshot();
        let (loads, saves, late, too_long) = (self.loads, self.saves, self.late, self.too_long);
        Ended { metrics, loads, saves, late, spans: self.rig.spans, too_long }
    }
}

#[test]
fn random_operations_keep_every_invariant() {
    run(CASES);
}

#[test]
#[ignore = "more than a million operations"]
fn a_million_random_operations_keep_every_invariant() {
    run(CASES * 5);
}

fn run(cases: u32) {
    // The same operations every time; another seed or more cases on request.
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    let cases = number("SCHEDULER_FUZZ_CASES").unwrap_or(cases);
    let seed = number("SCHEDULER_FUZZ_SEED").unwrap_or(1);
    let cases = Cases {
        cases,
        failure_persistence: None,
        max_shrink_iters: number("SCHEDULER_FUZZ_SHRINK").unwrap_or(600),
        ..Cases::default()
    };
    let rng =
        TestRng::from_seed(RngAlgorithm::ChaCha, &std::array::from_fn::<u8, 32, _>(|i| (seed >> (8 * (i % 4))) as u8));
    let mut runner = TestRunner::new_with_rng(cases, rng);
    let worlds = std::cell::RefCell::new(Vec::new());
    runner
        .run(&(shape(), prop::collection::vec(op(), OPS)), |(shape, ops)| {
            let mut world = World::new(&shape);
            for op in &ops {
                world.apply(op);
            }
            worlds.borrow_mut().push(world.finish());
            Ok(())
        })
        .unwrap();
    // The operations reach what they are meant to reach.
    let sum = |of: fn(&Ended) -> u64| worlds.borrow().iter().map(of).sum::<u64>();
    let total = |of: fn(&Metrics) -> u64| worlds.borrow().iter().map(|w| of(&w.metrics)).sum::<u64>();
    let reached = [
        ("output tokens", total(|m| m.output_tokens), 20_000),
        ("preemptions", total(|m| m.preemptions), 500),
        ("swapped out", total(|m| m.swapped_out), 300),
        ("swapped in", total(|m| m.swapped_in), 200),
        ("swaps refused", total(|m| m.swaps_refused), 50),
        ("hit tokens", total(|m| m.hit_tokens), 5_000),
        ("forks", total(|m| m.forks), 200),
        ("accepted drafts", total(|m| m.accepted), 500),
        ("rejected drafts", total(|m| m.drafted - m.accepted), 500),
        ("added", total(|m| m.added), 1),
        ("admitted", total(|m| m.admitted), 1),
        ("steps", total(|m| m.steps), 20_000),
        ("ended", total(|m| m.finished[2] + m.finished[3]), 1),
        ("loads", sum(|w| w.loads), 100),
        ("saves", sum(|w| w.saves), 500),
        ("fetches", total(|m| m.fetches), 3_000),
        ("fetched tokens", total(|m| m.fetched_tokens), 4_000),
        ("fetched twice", total(|m| m.fetch_duplicates), 100),
        ("fetches cut short", total(|m| m.fetches_failed), 100),
        ("fetches without room", total(|m| m.fetches_no_room), 300),
        ("fetches under way", total(|m| m.fetches_under_way), 200),
        ("late fetches", sum(|w| w.late), 500),
        ("waits ended", total(|m| m.fetch_waits_ended), 300),
        ("waits run out", total(|m| m.fetch_leases_ended), 100),
        ("chains saved", total(|m| m.saves_given), 1_000),
        ("chains not saved", total(|m| m.saves_failed), 200),
        ("chains lost", total(|m| m.saves_lost), 100),
        ("row waits", total(|m| m.row_waits), 1),
        ("failed steps", total(|m| m.failed_steps), 200),
        ("ghost rows", total(|m| m.ghost_rows), 1_000),
        ("stale handles", total(|m| m.stale), 100),
        ("mixed steps", total(|m| m.mixed_steps), 1_000),
        ("begins with snapshots", total(|m| m.starts[1]), 100),
        ("begins with slices", total(|m| m.starts[2]), 5),
        ("reruns", total(|m| m.starts[3]), 500),
        ("tokens computed again", total(|m| m.rerun_tokens), 5_000),
        ("snapshots taken", total(|m| m.snapshots_taken), 1_000),
        ("snapshots evicted", total(|m| m.snapshots_evicted), 500),
        ("spans computed whole", sum(|w| w.spans.whole), 2_000),
        ("rests of spans", sum(|w| w.spans.rests), 50),
        ("chunks before spans", sum(|w| w.spans.before), 1_000),
        ("spans too long", sum(|w| w.too_long), 50),
        ("stops", total(|m| m.finished[0]), 500),
        ("lengths", total(|m| m.finished[1]), 500),
    ];
    println!("{:?}", reached.map(|(what, count, _)| (what, count)));
    for (what, count, least) in reached {
        assert!(count >= least, "{what}: {count} of at least {least}");
    }
}
