//! The toy device: runs planned steps in their order, knowing only what is in the ring and what it keeps itself.
//!
//! It checks what every row attends to and that nobody writes where another one's KV lies.

use super::window::{Layers, StepRows};
use super::{Rig, VOCAB, draw, mix};
use deepinfer_scheduler::{Config, GroupSpec, Plan, Scheduler, Seq, SlotMap, Status, header, seq_flag};
use std::collections::{HashMap, HashSet};

/// Memory of the device.
pub struct Device {
    /// By slot map, then slot.
    pub kv: Vec<Vec<u64>>,
    maps: Vec<SlotMap>,
    /// Block table, by state slot then column.
    table: Vec<Vec<i32>>,
    columns: Vec<u32>,
    /// Value of the state of each slot: hash of what it has seen.
    pub states: Vec<u64>,
    /// Positions that the state has seen.
    pub seen: Vec<u32>,
    /// Results of the step it ran last.
    last: Results,
}

/// The device's own copy of a step's results.
#[derive(Default)]
struct Results {
    step: u64,
    seqs: Vec<Seq>,
    sample_off: Vec<i32>,
    tokens: Vec<i32>,
    accepted: Vec<i32>,
}

/// What a step was launched with, beside its ring slot.
#[derive(Default)]
pub struct Flight {
    seqs: Vec<Seq>,
    /// Positions completed at the launch.
    confirmed: Vec<u32>,
    /// Pages of each sequence, as (group, page).
    pages: Vec<HashSet<(usize, i32)>>,
    /// Whether another step was in flight.
    ahead: bool,
}

/// The tokens of a sequence that nothing ends, and the value of each position.
pub struct Stream {
    pub tokens: Vec<u32>,
    pub values: Vec<u64>,
    pub layers: Layers,
    seed: u64,
}

impl Stream {
    fn new(prompt: &[u32], seed: u64) -> Self {
        Self { tokens: prompt.to_vec(), values: super::values(prompt), layers: Layers::default(), seed }
    }

    /// Goes on until position `position` is known.
    fn extend_to(&mut self, position: usize) {
        while self.tokens.len() <= position {
            let h = *self.values.last().unwrap();
            let token = draw(h, self.seed, self.tokens.len() as u32);
            self.tokens.push(token);
            self.values.push(mix(h, u64::from(token)));
        }
    }
}

/// Draft rows that are not shared out yet, those that may be verified among them, and what decides.
struct Draws {
    left: i32,
    rows: i32,
    salt: u64,
}

impl Device {
    pub fn new(scheduler: &Scheduler, config: &Config) -> Self {
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
        Self {
            kv: maps.iter().map(|m| vec![0; (paged[m.group] * m.entries) as usize]).collect(),
            columns: scheduler.sections().iter().map(|s| s.column).collect(),
            table: vec![vec![0; scheduler.table_columns() as usize]; rows],
            states: vec![0; rows],
            seen: vec![0; rows],
            maps,
            last: Results::default(),
        }
    }

    fn page(&self, map: &SlotMap, row: usize, position: u32) -> i32 {
        self.table[row][(self.columns[map.group] + (position >> map.page_shift)) as usize]
    }

    fn kv_slot(&self, map: &SlotMap, row: usize, position: u32) -> usize {
        let within = position & ((1 << map.page_shift) - 1);
        let page = self.page(map, row, position);
        assert!(page > 0, "position {position} of row {row} has no page");
        (page as u32 * map.entries + (within >> map.ratio_shift)) as usize
    }
}

impl Rig {
    /// KV of a slot map.
    pub fn device_mut(&mut self, map: usize) -> &mut Vec<u64> {
        &mut self.device.kv[map]
    }

    /// Tokens and values of the first `len` positions that `seq` goes through if nothing ends it.
    pub fn stream(&mut self, seq: Seq, len: usize) -> &Stream {
        let request = &self.requests[&seq];
        let stream = self.streams.entry(seq).or_insert_with(|| Stream::new(&request.prompt, request.seed));
        stream.extend_to(len);
        stream
    }

    /// First position that has not been planned for `seq`, at most.
    pub fn planned(&self, seq: Seq) -> u32 {
        let known = self.scheduler.info(seq).map_or(0, |i| i.computed_tokens);
        let Some(plan) = self.queue.back() else { return known };
        let launched = self.launched_rows(plan, seq);
        launched.unwrap_or(known)
    }

    fn launched_rows(&self, plan: &Plan, seq: Seq) -> Option<u32> {
        let row = self.scheduler.info(seq)?.slot as i32;
        let index = self.memory.get(plan.slot, "state_row")[..plan.seqs as usize].iter().position(|&r| r == row)?;
        Some(self.memory.get(plan.slot, "seq_len")[index] as u32)
    }

    /// Notes what a planned step was launched with.
    pub fn launch(&mut self, plan: &Plan) -> Flight {
        let mut flight = Flight { ahead: plan.step.0 > self.completed + 1, ..Flight::default() };
        let running: HashMap<usize, Seq> = self
            .requests
            .keys()
            .filter_map(|&s| Some((s, self.scheduler.info(s).filter(|i| i.status == Status::Running)?)))
            .map(|(seq, info)| (info.slot as usize, seq))
            .collect();
        for i in 0..plan.seqs as usize {
            let row = self.memory.get(plan.slot, "state_row")[i] as usize;
            let seq = *running.get(&row).unwrap_or_else(|| panic!("row {row} belongs to nobody"));
            flight.seqs.push(seq);
            flight.confirmed.push(self.scheduler.info(seq).unwrap().computed_tokens);
            let mut pages = HashSet::new();
            for &block in self.scheduler.block_row(seq).unwrap() {
                for (group, section) in self.scheduler.sections().iter().enumerate() {
                    for j in 0..1 << section.pages_shift {
                        pages.insert((group, self.scheduler.page(group, block, j) as i32));
                    }
                }
            }
            flight.pages.push(pages);
        }
        flight
    }

    /// Runs a planned step and checks everything that its rows attend to.
    // One walk over the step, in the order a worker takes it.
    #[allow(clippy::too_many_lines)]
    pub fn execute(&mut self, plan: &Plan) {
        let slot = plan.slot;
        self.copy_queued(plan.step.0);
        self.executed = plan.step.0;
        let flight = match self.flights.remove(&plan.step.0) {
            Some(flight) => flight,
            None => self.launch(plan),
        };
        let head = self.memory.get(slot, "header").to_vec();
        let (rows, seqs) = (head[header::ROWS] as usize, flight.seqs.len());
        if seqs == 0 {
            self.device.last = Results { step: plan.step.0, ..Results::default() };
            return;
        }
        assert_eq!((rows as u32, seqs as u32), (plan.rows, plan.seqs));
        let hits = self.commands(slot, &head);
        let field = |name: &str| self.memory.get(slot, name).to_vec();
        let (mut ids, mut pos, cu_q, mut seq_len) = (field("ids"), field("pos"), field("cu_q"), field("seq_len"));
        let (state_row, flags, prev_seq) = (field("state_row"), field("seq_flags"), field("prev_seq"));
        let (sample_off, sample_row, mut rng_pos) = (field("sample_off"), field("sample_row"), field("rng_pos"));
        let mut slots: Vec<Vec<i32>> = (0..self.device.maps.len()).map(|m| field(&format!("slots{m}"))).collect();
        assert_eq!((cu_q[0], cu_q[seqs] as usize), (0, rows));
        let maps = self.device.maps.clone();
        let mut written: Vec<HashMap<i32, usize>> = vec![HashMap::new(); slots.len()];
        let mut writer: HashMap<(usize, i32), usize> = HashMap::new();
        let mut by_row = HashMap::new();
        let mut accepted = vec![0; seqs];
        let mut produced = vec![0; sample_off[seqs] as usize];
        let (mut decoding, mut drafts, mut placeholders) = (0, 0, 0);
        let mut verified = vec![0; seqs];
        let mut draws = Draws { left: head[header::VERIFIED], rows: head[header::DRAFT_ROWS], salt: plan.step.0 };
        for i in 0..seqs {
            let row = state_row[i] as usize;
            let seq = flight.seqs[i];
            assert!(row > 0, "a live row owns a slot");
            assert!(by_row.insert(row, seq).is_none(), "one entry per sequence");
            let (start, end) = (cu_q[i] as usize, cu_q[i + 1] as usize);
            let samples = sample_off[i] as usize..sample_off[i + 1] as usize;
            assert!(end > start);
            let is_prefill = flags[i] & seq_flag::PREFILL != 0;
            assert_eq!(is_prefill, i >= plan.decoding as usize, "decoding sequences come first");
            decoding += usize::from(!is_prefill);
            // What the host did not know.
            let sound = !self.poisoned.contains(&seq);
            if prev_seq[i] >= 0 {
                placeholders += 1;
                let (last, before) = (&self.device.last, prev_seq[i] as usize);
                assert_eq!(
                    (last.step + 1, last.seqs[before]),
                    (plan.step.0, seq),
                    "the step before, the same sequence"
                );
                let asked = last.sample_off[before + 1] - last.sample_off[before];
                let short = asked - last.accepted[before];
                assert_eq!(ids[start], -1, "what the last row draws that it samples there");
                ids[start] = last.tokens[(last.sample_off[before] + asked - 1 - short) as usize];
                seq_len[i] -= short;
                rng_pos[samples.clone()].iter_mut().for_each(|p| *p -= short);
                pos[start..end].iter_mut().for_each(|p| *p -= short);
                if short > 0 {
                    for (m, map) in maps.iter().enumerate() {
                        for r in start..end {
                            let stored = (pos[r] as u32 + 1).is_multiple_of(1 << map.ratio_shift);
                            slots[m][r] = if stored { self.device.kv_slot(map, row, pos[r] as u32) as i32 } else { -1 };
                        }
                    }
                }
            }
            let first = pos[start] as u32;
            let chosen =
                if is_prefill { end - start } else { self.place_drafts(seq, first, &mut ids[start..end], &mut draws) };
            verified[i] = chosen as i32 - 1;
            assert!(ids[start..end].iter().all(|&id| id >= 0), "{seq:?} has an id that nobody knows");
            assert_eq!(seq_len[i] as u32, first + (end - start) as u32);
            assert!(flight.ahead || first == flight.confirmed[i], "{seq:?} goes on where its KV ends");
            let request = self.requests[&seq].clone();
            if is_prefill {
                let in_prompt = (seq_len[i] as u32).min(request.prompt.len() as u32).saturating_sub(first);
                *self.prompt_rows.entry(seq).or_default() += in_prompt;
                self.prefill_rows += (end - start) as u64;
                let (behind, prompt) = (seq_len[i] as u32, request.prompt.len() as u32);
                for span in &request.spans {
                    let for_forks = span.end == prompt && behind + 1 == prompt;
                    let cut = span.start < behind && behind < span.end;
                    self.spans.whole += u64::from(first <= span.start && span.end <= behind);
                    self.spans.rests += u64::from(span.start < first && first < span.end && span.end <= behind);
                    self.spans.before += u64::from(behind == span.start);
                    assert!(!cut || for_forks, "{seq:?}: a chunk ends at {behind}, within {span:?}");
                }
            } else {
                drafts += end - start - 1;
            }
            self.stream(seq, seq_len[i] as usize);
            let stream = &self.streams[&seq];
            // Everything before the rows of this step must be in place.
            if sound {
                for (m, map) in maps.iter().enumerate() {
                    let ratio = 1u32 << map.ratio_shift;
                    for p in (0..first).filter(|p| (p + 1).is_multiple_of(ratio)) {
                        let at = self.device.kv_slot(map, row, p);
                        assert_eq!(self.device.kv[m][at], stream.values[p as usize], "{seq:?} position {p} map {m}");
                    }
                }
                if self.has_state {
                    assert_eq!(self.device.seen[row], first, "{seq:?}: its state has seen what its KV has");
                    let before = if first == 0 { 0 } else { stream.values[first as usize - 1] };
                    assert_eq!(self.device.states[row], before, "{seq:?} state");
                }
            }
            // Values of the rows, given what lies before them.
            let mut h = if first == 0 { 7 } else { stream.values[first as usize - 1] };
            let mut now = Vec::new();
            for r in start..end {
                assert_eq!(pos[r] as u32, first + (r - start) as u32);
                let position = pos[r] as u32;
                if sound && (is_prefill || r == start) {
                    assert_eq!(ids[r] as u32, stream.tokens[position as usize], "{seq:?} reads its own tokens");
                }
                h = mix(h, u64::from(ids[r] as u32));
                now.push(h);
                if r >= start + chosen {
                    continue;
                }
                for (m, map) in maps.iter().enumerate() {
                    let ratio = 1u32 << map.ratio_shift;
                    if !(position + 1).is_multiple_of(ratio) {
                        assert_eq!(slots[m][r], -1);
                        continue;
                    }
                    let at = self.device.kv_slot(map, row, position);
                    if position < hits[row] {
                        // Read and left as it is.
                        assert_eq!((slots[m][r], self.device.kv[m][at]), (-1, h), "{seq:?} position {position}");
                        continue;
                    }
                    assert_eq!(slots[m][r], at as i32, "slot array and table agree");
                    assert!(written[m].insert(slots[m][r], r).is_none(), "two rows write slot {at}");
                    let page = (map.group, self.device.page(map, row, position));
                    assert!(flight.pages[i].contains(&page), "{seq:?} writes a page that is not its own");
                    assert_eq!(*writer.entry(page).or_insert(i), i, "two sequences write page {page:?}");
                    self.device.kv[m][at] = h;
                }
            }
            assert_eq!(!samples.is_empty(), flags[i] & seq_flag::SAMPLES != 0);
            let mut kept = end - start;
            if !samples.is_empty() {
                self.last_rows.insert(seq, self.steps);
                for (s, at) in samples.clone().enumerate() {
                    let source = sample_row[at] as usize;
                    assert_eq!(rng_pos[at], pos[source] + 1);
                    assert_eq!(source, end - samples.len() + s);
                    let token = draw(now[source - start], request.seed, rng_pos[at] as u32);
                    produced[at] = token as i32;
                    accepted[i] += 1;
                    // A draft row counts only if the draft before it was what the model draws.
                    if s + 1 < samples.len() && (ids[source + 1] as u32 != token || s + 1 >= chosen) {
                        break;
                    }
                }
                if !is_prefill {
                    kept = accepted[i] as usize;
                }
            }
            self.run_windows(&StepRows {
                seq,
                slot: row,
                step: plan.step.0,
                first,
                ids: &ids[start..end],
                kept: kept as u32,
                samples: end - start - samples.len()..end - start,
                sound,
            });
            if self.has_state {
                self.device.seen[row] = first + kept as u32;
                self.device.states[row] = now[kept - 1];
                if let Some(slices) = self.slices.as_mut().filter(|_| sound) {
                    slices.extend(now[..kept].iter().map(|&h| (h, h)));
                }
            }
        }
        assert_eq!(decoding as u32, plan.decoding);
        assert_eq!((head[header::DRAFT_ROWS], head[header::PLACEHOLDERS]), (drafts as i32, placeholders));
        self.memory.get_mut(slot, "accepted")[..seqs].copy_from_slice(&accepted);
        if head[header::DRAFT_ROWS] != head[header::VERIFIED] {
            assert_eq!(draws.left, 0, "every row that was paid for is used");
            self.memory.get_mut(slot, "verified")[..seqs].copy_from_slice(&verified);
        }
        let samples = produced.len();
        self.memory.get_mut(slot, "tokens")[..samples].copy_from_slice(&produced);
        self.device.last = Results { step: plan.step.0, seqs: flight.seqs, sample_off, tokens: produced, accepted };
    }

    /// Puts the device's drafts in place of their placeholders, right or wrong, and says how many rows of the sequence are verified.
    fn place_drafts(&mut self, seq: Seq, first: u32, ids: &mut [i32], draws: &mut Draws) -> usize {
        if ids.get(1).is_none_or(|&id| id >= 0) {
            return ids.len();
        }
        let tokens = self.stream(seq, first as usize + ids.len()).tokens.clone();
        let luck = mix(mix(draws.salt, seq.to_u64()), u64::from(first));
        // A sequence whose drafts got lost has some token in their places.
        let right = if luck.is_multiple_of(5) { 0 } else { luck as usize / 5 % (ids.len() + 1) };
        for (nth, id) in ids.iter_mut().enumerate().skip(1) {
            assert_eq!(*id, -1 - nth as i32, "the place of a draft");
            let token = tokens[first as usize + nth];
            *id = (if nth <= right { token } else { (token + 1) % VOCAB }) as i32;
        }
        let asked = ids.len() as i32 - 1;
        draws.rows -= asked;
        // As many as can be, or as few as leave the others no more than they have.
        let (most, least) = (asked.min(draws.left), (draws.left - draws.rows).max(0));
        let mine = if luck.is_multiple_of(2) { most } else { least };
        draws.left -= mine;
        1 + mine as usize
    }

    /// The step that ran last turns out to have written nonsense: tokens, and KV and state of every row. Whose rows.
    pub fn spoil(&mut self, plan: &Plan) -> Vec<Seq> {
        if self.device.last.step != plan.step.0 {
            return Vec::new();
        }
        for m in 0..self.device.maps.len() {
            for &at in &self.memory.get(plan.slot, &format!("slots{m}"))[..plan.rows as usize] {
                if at >= self.device.maps[m].entries as i32 {
                    self.device.kv[m][at as usize] = 0xBAD;
                }
            }
        }
        self.spoil_swaps(plan.slot);
        let rows = self.memory.get(plan.slot, "state_row")[..plan.seqs as usize].to_vec();
        self.spoil_windows(plan.slot, plan.step.0, &rows);
        for row in rows {
            self.device.states[row as usize] = 0xBAD;
        }
        self.device.last.tokens.iter_mut().for_each(|t| *t = (*t + 1) % super::VOCAB as i32);
        self.device.last.seqs.clone()
    }

    /// Applies deltas, clones, zeroes and admissions, in the order the contract states.
    /// Returns the end of each slot's hit.
    fn commands(&mut self, slot: usize, head: &[i32]) -> Vec<u32> {
        let field = |name: &str, n: i32, each: usize| -> Vec<Vec<i32>> {
            self.memory.get(slot, name)[..n as usize * each].chunks(each).map(<[i32]>::to_vec).collect()
        };
        let deltas = field("table_delta", head[header::DELTAS], 3);
        let clones = field("clone_blocks", head[header::CLONE_BLOCKS], 3);
        let state_clones = field("clone_states", head[header::CLONE_STATES], 2);
        let zeroes = field("zero_states", head[header::ZERO_STATES], 1);
        let admitted = field("admitted", head[header::ADMITTED], 6);
        self.swap_out(slot, head);
        self.snapshot_out(slot, head);
        let mut seen = HashMap::new();
        for d in &deltas {
            assert!(seen.insert((d[0], d[1]), d[2]).is_none(), "no table entry twice");
            assert!(d[2] > 0 && d[0] > 0);
            self.device.table[d[0] as usize][d[1] as usize] = d[2];
        }
        for z in zeroes {
            self.device.states[z[0] as usize] = 0;
            self.device.seen[z[0] as usize] = 0;
            if let Some(windows) = &mut self.windows {
                windows.slots[z[0] as usize] = super::window::State::default();
            }
        }
        self.swap_in(slot, head);
        let restored = self.snapshot_in(slot, head);
        for c in state_clones {
            self.device.states[c[1] as usize] = self.device.states[c[0] as usize];
            self.device.seen[c[1] as usize] = self.device.seen[c[0] as usize];
            if let Some(windows) = &mut self.windows {
                windows.slots[c[1] as usize] = windows.slots[c[0] as usize].clone();
            }
        }
        for c in clones {
            for (m, map) in self.device.maps.clone().iter().enumerate().filter(|(_, m)| m.group == c[0] as usize) {
                let e = map.entries as usize;
                let (from, to) = (c[1] as usize * e, c[2] as usize * e);
                assert!(from > 0 && to > 0 && from != to);
                self.device.kv[m].copy_within(from..from + e, to);
            }
        }
        for a in &admitted {
            self.begin_windows(a, &restored);
            let row = a[0] as usize;
            let computed = a[3] as u32;
            if self.has_state && computed > 0 && self.device.seen[row] == 0 {
                // A hit: the worker restores the state from a slice, or rebuilds it where no slices are kept.
                let seq = Seq { index: a[1] as u32, generation: a[2] as u32 };
                let h = self.stream(seq, computed as usize).values[computed as usize - 1];
                let state = match &self.slices {
                    Some(slices) => *slices.get(&h).expect("a hit ends where a slice was stored"),
                    None => h,
                };
                self.device.states[row] = state;
                self.device.seen[row] = computed;
            }
        }
        self.windows.as_ref().map_or_else(|| vec![0; self.device.seen.len()], |windows| windows.hits.clone())
    }
}
