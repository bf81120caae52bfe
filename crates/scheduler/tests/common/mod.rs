//! A toy worker with a KV oracle, for every test of this crate.
//!
//! The value stored for a position is a hash of the whole history up to it, so any wrong slot, table entry, clone, hit or
//! early reuse is seen when a later row attends to it. The next token is a function of that hash, read back from the KV.

#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)]

mod host;
mod mover;

use deepinfer_scheduler::{
    Config, EngineType, FieldView, Finish, GroupSpec, Inbox, Limits, Outputs, Plan, Policy, Prepared, Reject, RingView,
    Root, Scheduler, Seq, SlotMap, Source, Status, StepId, header, out, seq_flag,
};
use std::collections::{BTreeMap, HashMap};

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

/// Device memory of the toy model.
pub struct Device {
    /// By slot map, then slot.
    kv: Vec<Vec<u64>>,
    maps: Vec<SlotMap>,
    /// Block table, by state slot then column.
    table: Vec<Vec<i32>>,
    columns: Vec<u32>,
    /// Value of the state of each slot: hash of what it has seen.
    pub states: Vec<u64>,
    /// Positions that the state has seen.
    pub seen: Vec<u32>,
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
    pub has_state: bool,
    /// State slices kept outside, by history value: models that restore state at hits.
    pub slices: Option<HashMap<u64, u64>>,
    pub steps: u64,
    pub last_rows: BTreeMap<Seq, u64>,
    pub host: host::Host,
}

/// What the test knows of a sequence.
#[derive(Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub seed: u64,
    pub max_new: u32,
    pub min_new: u32,
    pub stops: Vec<u32>,
}

impl Rig {
    pub fn new(config: &Config) -> Self {
        let mut scheduler = Scheduler::new(config).unwrap();
        let mut memory = Memory::new(&scheduler, config.ring_slots as usize);
        // SAFETY: the rig owns the memory, never resizes it, and touches it only between calls.
        unsafe { scheduler.register_ring(&memory.views()).unwrap() };
        let maps = scheduler.slot_maps().to_vec();
        let paged: Vec<u32> = config
            .groups
            .iter()
            .filter_map(|g| match g {
                GroupSpec::Paged { num_pages, .. } => Some(*num_pages),
                GroupSpec::State { .. } => None,
            })
            .collect();
        let rows = scheduler.state_slots() as usize;
        let device = Device {
            kv: maps.iter().map(|m| vec![0; (paged[m.group] * m.entries) as usize]).collect(),
            columns: scheduler.sections().iter().map(|s| s.column).collect(),
            table: vec![vec![0; scheduler.table_columns() as usize]; rows],
            states: vec![0; rows],
            seen: vec![0; rows],
            maps,
        };
        let host = host::Host::new(&scheduler, config);
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
            has_state,
            slices: None,
            steps: 0,
            last_rows: BTreeMap::new(),
            host,
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

    /// Schedules, executes on the toy device and completes one step. False if nothing could run.
    pub fn step(&mut self) -> bool {
        let Some(plan) = self.schedule() else {
            self.flush();
            return false;
        };
        self.execute(&plan);
        self.complete(plan.step);
        true
    }

    pub fn schedule(&mut self) -> Option<Plan> {
        self.clock += 1;
        let plan = self.scheduler.schedule(self.clock).unwrap();
        self.verify();
        plan
    }

    pub fn complete(&mut self, step: StepId) {
        let outputs = self.scheduler.complete(step, self.clock).unwrap();
        let read = read(&outputs);
        self.absorb(&read);
        self.steps += 1;
        self.verify();
    }

    pub fn fail(&mut self, step: StepId) {
        let outputs = self.scheduler.fail_step(step, self.clock).unwrap();
        let read = read(&outputs);
        self.absorb(&read);
        self.verify();
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

    /// KV of a slot map.
    pub fn device_mut(&mut self, map: usize) -> &mut Vec<u64> {
        &mut self.device.kv[map]
    }

    fn page(&self, group: usize, map: &SlotMap, row: usize, position: u32) -> i32 {
        self.device.table[row][(self.device.columns[group] + (position >> map.page_shift)) as usize]
    }

    fn kv_slot(&self, map: &SlotMap, row: usize, position: u32) -> usize {
        let within = position & ((1 << map.page_shift) - 1);
        let page = self.page(map.group, map, row, position);
        assert!(page > 0, "position {position} of row {row} has no page");
        (page as u32 * map.entries + (within >> map.ratio_shift)) as usize
    }

    /// Executes a planned step on the toy device and checks everything that its rows attend to.
    // One walk over the step, in the order a worker takes it.
    #[allow(clippy::too_many_lines)]
    pub fn execute(&mut self, plan: &Plan) {
        let slot = plan.slot;
        let head = self.memory.get(slot, "header").to_vec();
        let (rows, seqs) = (head[header::ROWS] as usize, head[header::SEQS] as usize);
        assert_eq!((rows as u32, seqs as u32), (plan.rows, plan.seqs));
        self.commands(slot, &head);
        let field = |name: &str| self.memory.get(slot, name).to_vec();
        let (ids, pos, cu_q, seq_len) = (field("ids"), field("pos"), field("cu_q"), field("seq_len"));
        let (state_row, flags) = (field("state_row"), field("seq_flags"));
        let (sample_off, sample_row, rng_pos) = (field("sample_off"), field("sample_row"), field("rng_pos"));
        let slots: Vec<Vec<i32>> = (0..self.device.maps.len()).map(|m| field(&format!("slots{m}"))).collect();
        assert_eq!((cu_q[0], cu_q[seqs] as usize), (0, rows));
        let mut written: Vec<HashMap<i32, usize>> = vec![HashMap::new(); slots.len()];
        let mut by_row = HashMap::new();
        let mut accepted = vec![0; seqs];
        let mut produced = vec![0; sample_off[seqs] as usize];
        let mut decoding = 0;
        for i in 0..seqs {
            let row = state_row[i] as usize;
            assert!(row > 0, "a live row owns a slot");
            let seq = self.owner(row);
            assert!(by_row.insert(row, seq).is_none(), "one entry per sequence");
            let (start, end) = (cu_q[i] as usize, cu_q[i + 1] as usize);
            assert!(end > start);
            let request = self.requests[&seq].clone();
            let info = self.scheduler.info(seq).unwrap();
            let history = self.scheduler.history(seq).unwrap().to_vec();
            let first = pos[start] as u32;
            assert_eq!(first, info.computed_tokens, "{seq:?} goes on where its KV ends");
            assert_eq!(seq_len[i] as u32, first + (end - start) as u32);
            let is_prefill = flags[i] & seq_flag::PREFILL != 0;
            assert_eq!(is_prefill, i >= plan.decoding as usize, "decoding sequences come first");
            decoding += usize::from(!is_prefill);
            if is_prefill {
                let in_prompt = (seq_len[i] as u32).min(request.prompt.len() as u32).saturating_sub(first);
                *self.prompt_rows.entry(seq).or_default() += in_prompt;
                self.prefill_rows += (end - start) as u64;
            }
            // Everything before the rows of this step must be in place.
            let mut tokens = history[..first as usize].to_vec();
            let before = values(&tokens);
            for map in self.device.maps.clone() {
                let index = self.device.maps.iter().position(|m| *m == map).unwrap();
                let ratio = 1u32 << map.ratio_shift;
                for p in (0..first).filter(|p| (p + 1).is_multiple_of(ratio)) {
                    let at = self.kv_slot(&map, row, p);
                    assert_eq!(self.device.kv[index][at], before[p as usize], "{seq:?} position {p} map {index}");
                }
            }
            if self.has_state {
                assert_eq!(self.device.seen[row], first, "{seq:?}: its state has seen what its KV has");
                assert_eq!(self.device.states[row], before.last().copied().unwrap_or(0), "{seq:?} state");
            }
            for r in start..end {
                assert_eq!(pos[r] as u32, first + (r - start) as u32);
                let position = pos[r] as u32;
                if is_prefill || r == start {
                    assert_eq!(ids[r] as u32, history[position as usize], "{seq:?} reads its own tokens");
                }
                tokens.push(ids[r] as u32);
                let h = mix(
                    if position == 0 { 7 } else { values(&tokens[..position as usize])[position as usize - 1] },
                    u64::from(ids[r] as u32),
                );
                for (m, map) in self.device.maps.clone().iter().enumerate() {
                    let ratio = 1u32 << map.ratio_shift;
                    if !(position + 1).is_multiple_of(ratio) {
                        assert_eq!(slots[m][r], -1);
                        continue;
                    }
                    let at = self.kv_slot(map, row, position);
                    assert_eq!(slots[m][r], at as i32, "slot array and table agree");
                    assert!(written[m].insert(slots[m][r], r).is_none(), "two rows write slot {at}");
                    self.device.kv[m][at] = h;
                }
            }
            let now = values(&tokens);
            let samples = (sample_off[i + 1] - sample_off[i]) as usize;
            assert_eq!(samples > 0, flags[i] & seq_flag::SAMPLES != 0);
            let mut kept = end - start;
            if samples > 0 {
                self.last_rows.insert(seq, self.steps);
                let mut count = 0;
                for s in 0..samples {
                    let at = sample_off[i] as usize + s;
                    let source = sample_row[at] as usize;
                    assert_eq!(rng_pos[at], pos[source] + 1);
                    assert_eq!(source, end - samples + s);
                    let token = draw(now[pos[source] as usize], request.seed, rng_pos[at] as u32);
                    produced[at] = token as i32;
                    count += 1;
                    // A draft row counts only if the draft before it was what the model draws.
                    if s + 1 < samples && ids[source + 1] as u32 != token {
                        break;
                    }
                }
                accepted[i] = count;
                if !is_prefill {
                    kept = count as usize;
                }
            }
            if self.has_state {
                let seen = first + kept as u32;
                self.device.seen[row] = seen;
                self.device.states[row] = now[seen as usize - 1];
                if let Some(slices) = &mut self.slices {
                    for &h in &now[first as usize..seen as usize] {
                        slices.insert(h, h);
                    }
                }
            }
        }
        assert_eq!(decoding as u32, plan.decoding);
        self.memory.get_mut(slot, "accepted")[..seqs].copy_from_slice(&accepted);
        let samples = produced.len();
        self.memory.get_mut(slot, "tokens")[..samples].copy_from_slice(&produced);
    }

    fn owner(&self, row: usize) -> Seq {
        let found = self
            .requests
            .keys()
            .find(|&&s| self.scheduler.info(s).is_some_and(|i| i.status == Status::Running && i.slot as usize == row));
        *found.unwrap_or_else(|| panic!("row {row} belongs to nobody"))
    }

    /// Applies deltas, clones, zeroes and admissions, in the order the contract states.
    fn commands(&mut self, slot: usize, head: &[i32]) {
        let field = |name: &str, n: i32, each: usize| -> Vec<Vec<i32>> {
            self.memory.get(slot, name)[..n as usize * each].chunks(each).map(<[i32]>::to_vec).collect()
        };
        let deltas = field("table_delta", head[header::DELTAS], 3);
        let clones = field("clone_blocks", head[header::CLONE_BLOCKS], 3);
        let state_clones = field("clone_states", head[header::CLONE_STATES], 2);
        let zeroes = field("zero_states", head[header::ZERO_STATES], 1);
        let admitted = field("admitted", head[header::ADMITTED], 4);
        self.swap_out(slot, head);
        let mut seen = HashMap::new();
        for d in &deltas {
            assert!(seen.insert((d[0], d[1]), d[2]).is_none(), "no table entry twice");
            assert!(d[2] > 0 && d[0] > 0);
            self.device.table[d[0] as usize][d[1] as usize] = d[2];
        }
        for z in zeroes {
            self.device.states[z[0] as usize] = 0;
            self.device.seen[z[0] as usize] = 0;
        }
        for c in state_clones {
            self.device.states[c[1] as usize] = self.device.states[c[0] as usize];
            self.device.seen[c[1] as usize] = self.device.seen[c[0] as usize];
        }
        for c in clones {
            for (m, map) in self.device.maps.clone().iter().enumerate().filter(|(_, m)| m.group == c[0] as usize) {
                let e = map.entries as usize;
                let (from, to) = (c[1] as usize * e, c[2] as usize * e);
                assert!(from > 0 && to > 0 && from != to);
                self.device.kv[m].copy_within(from..from + e, to);
            }
        }
        self.swap_in(slot, head);
        for a in admitted {
            let row = a[0] as usize;
            let computed = a[3] as u32;
            if self.has_state && computed > 0 && self.device.seen[row] == 0 {
                // A hit: the worker restores the state from a slice, or rebuilds it where no slices are kept.
                let seq = Seq { index: a[1] as u32, generation: a[2] as u32 };
                let history = self.scheduler.history(seq).unwrap()[..computed as usize].to_vec();
                let h = *values(&history).last().unwrap();
                let state = match &self.slices {
                    Some(slices) => *slices.get(&h).expect("a hit ends where a slice was stored"),
                    None => h,
                };
                self.device.states[row] = state;
                self.device.seen[row] = computed;
            }
        }
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
