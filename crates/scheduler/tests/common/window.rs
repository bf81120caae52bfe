//! A toy model with windows: every layer sees the rows that the layer before it made of the last tokens.
//!
//! What a layer makes of a token depends on every row in its window, so a row that is missing, stale or not yet right changes all
//! that follows from it. Rings, replicas and snapshots are really kept and copied; what must be exact is compared with the same
//! model without rings.

use super::{Rig, mix};
use deepinfer_scheduler::{Config, GroupSpec, HitRule, Plan, Scheduler, Seq, WindowRule, header};
use std::ops::Range;

/// The rows of every layer of a sequence, and what the encoder and the last layer make of each position.
#[derive(Default)]
pub struct Layers {
    rows: Vec<Vec<u64>>,
    pub encoded: Vec<u64>,
    pub last: Vec<u64>,
}

/// What a replica or a snapshot is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag {
    boundary: u32,
    history: u64,
    /// Every layer's window is that of the whole history.
    right: bool,
}

/// Rings at a boundary.
#[derive(Clone, Default)]
pub struct Copy {
    rings: Vec<Vec<u64>>,
    /// None: nothing that anybody may use.
    tag: Option<Tag>,
}

/// What a state slot holds.
#[derive(Clone, Default)]
pub struct State {
    rings: Vec<Vec<u64>>,
    /// First positions with rows in the encoder and in the decoder.
    floor: [u32; 2],
    /// First position that passes the decoder.
    decoder_from: u32,
    replica: Copy,
    /// A step that passed a boundary may have to be taken back.
    passed_in: u64,
}

/// Device, host and snapshots.
pub struct Windows {
    pub rule: WindowRule,
    pub slots: Vec<State>,
    pub host: Vec<State>,
    pub snapshots: Vec<Copy>,
    /// End of the hit of each slot's sequence.
    pub hits: Vec<u32>,
    /// Rows that were computed below a hit.
    pub reruns: u64,
    /// Whether rows are computed at all.
    pub computes: bool,
    pub restored: u64,
}

impl Windows {
    pub fn new(scheduler: &Scheduler, config: &Config) -> Option<Self> {
        let HitRule::Window(rule) = config.policy.hit_rule else { return None };
        assert!(config.groups.iter().any(|g| matches!(g, GroupSpec::State { .. })));
        let slots = scheduler.state_slots() as usize;
        Some(Self {
            rule,
            slots: vec![State::default(); slots],
            host: vec![State::default(); config.host_slots as usize],
            snapshots: vec![Copy::default(); config.snapshot_slots as usize],
            hits: vec![0; slots],
            reruns: 0,
            computes: true,
            restored: 0,
        })
    }
}

fn layers(rule: &WindowRule) -> usize {
    (rule.encoder + rule.decoder) as usize
}

/// Row of a layer, given what the layer before it made.
fn row(layer: usize, x: u64) -> u64 {
    mix(x, 1000 + layer as u64)
}

fn embed(token: u32, position: u32) -> u64 {
    mix(u64::from(token), u64::from(position))
}

impl Layers {
    /// Goes on until `len` positions are known.
    pub fn extend(&mut self, rule: &WindowRule, tokens: &[u32], len: usize) {
        let n = layers(rule);
        self.rows.resize(n, Vec::new());
        for (p, &token) in tokens.iter().enumerate().take(len).skip(self.last.len()) {
            let mut x = embed(token, p as u32);
            for layer in 0..n {
                if layer == rule.encoder as usize {
                    self.encoded.push(x);
                }
                self.rows[layer].push(row(layer, x));
                let first = (p + 1).saturating_sub(rule.window as usize);
                x = self.rows[layer][first..=p].iter().fold(x, |x, &r| mix(x, r));
            }
            if n == rule.encoder as usize {
                self.encoded.push(x);
            }
            self.last.push(x);
        }
    }

    /// Rings as they stand after `len` positions.
    fn rings(&self, rule: &WindowRule, len: u32, of: Range<usize>) -> Vec<Vec<u64>> {
        let ring = rule.window + rule.backtrack;
        let mut rings = vec![vec![0; ring as usize]; layers(rule)];
        for layer in of {
            for p in len.saturating_sub(rule.window)..len {
                rings[layer][(p % ring) as usize] = self.rows[layer][p as usize];
            }
        }
        rings
    }
}

/// What a sequence's rows in a step are.
pub struct StepRows<'a> {
    pub seq: Seq,
    pub slot: usize,
    pub step: u64,
    pub first: u32,
    pub ids: &'a [i32],
    /// Leading rows that count.
    pub kept: u32,
    /// Rows that sample.
    pub samples: Range<usize>,
    /// Nothing went wrong with this sequence before.
    pub sound: bool,
}

impl Rig {
    /// A step's `admitted` words after the handle: start, end of the hit, kind.
    pub fn begun(&self, plan: &Plan) -> Vec<[i32; 3]> {
        let n = self.memory.get(plan.slot, "header")[header::ADMITTED] as usize;
        self.memory.get(plan.slot, "admitted").chunks(6).take(n).map(|words| [words[3], words[4], words[5]]).collect()
    }

    /// Passes the rows of a sequence through the layers, compares what must be right, stores the rings and, behind a boundary, the
    /// replica.
    pub fn run_windows(&mut self, rows: &StepRows<'_>) {
        let Some(rule) = self.windows.as_ref().filter(|w| w.computes).map(|w| w.rule) else { return };
        let (first, end) = (rows.first, rows.first + rows.ids.len() as u32);
        self.stream(rows.seq, end as usize);
        let stream = self.streams.get_mut(&rows.seq).unwrap();
        stream.layers.extend(&rule, &stream.tokens, end as usize);
        let windows = self.windows.as_mut().unwrap();
        let (hit, ring) = (windows.hits[rows.slot], rule.window + rule.backtrack);
        windows.reruns += u64::from(hit.min(end).saturating_sub(first));
        let state = &mut windows.slots[rows.slot];
        state.rings.resize(layers(&rule), vec![0; ring as usize]);
        let mut x: Vec<u64> = rows.ids.iter().zip(first..).map(|(&id, p)| embed(id as u32, p)).collect();
        let (mut encoded, mut made) = (x.clone(), vec![Vec::new(); layers(&rule)]);
        let mut starts = vec![0; layers(&rule)];
        for layer in 0..layers(&rule) {
            let decodes = layer >= rule.encoder as usize;
            if layer == rule.encoder as usize {
                encoded.clone_from(&x);
            }
            // Rows that are left out of the decoder leave none in its windows.
            let from = if decodes { state.decoder_from } else { 0 };
            let floor = if decodes { state.floor[1].max(from) } else { state.floor[0] };
            made[layer] = x.iter().map(|&x| row(layer, x)).collect();
            starts[layer] = from.max(first);
            for (i, x) in x.iter_mut().enumerate() {
                let p = first + i as u32;
                if p < from {
                    continue;
                }
                for q in (p + 1).saturating_sub(rule.window).max(floor)..=p {
                    let own = q >= first;
                    let seen =
                        if own { made[layer][(q - first) as usize] } else { state.rings[layer][(q % ring) as usize] };
                    *x = mix(*x, seen);
                }
            }
        }
        if rule.encoder as usize == layers(&rule) {
            encoded.clone_from(&x);
        }
        for (layer, made) in made.iter().enumerate() {
            for p in starts[layer].max(end.saturating_sub(ring))..end {
                state.rings[layer][(p % ring) as usize] = made[(p - first) as usize];
            }
        }
        if rows.sound {
            for (i, p) in (first..first + rows.kept).enumerate().filter(|&(_, p)| rule.exact && p >= hit) {
                let right = stream.layers.encoded[p as usize];
                assert_eq!(encoded[i], right, "{:?}: block KV of position {p} behind a hit of {hit}", rows.seq);
            }
            let far = rule.decoder * (rule.window - 1) < rule.keep;
            for i in rows.samples.clone().filter(|&i| (i as u32) < rows.kept) {
                let p = first + i as u32;
                let lowest = (p + 1).saturating_sub(rule.window);
                // A half without layers has no windows either.
                let floors = [(rule.encoder, state.floor[0]), (rule.decoder, state.floor[1].max(state.decoder_from))];
                let gap = floors.iter().any(|&(layers, floor)| layers > 0 && floor > lowest);
                assert!(!gap, "{:?}: a gap at {p}", rows.seq);
                if rule.exact && (far || !rule.truncated) {
                    assert_eq!(x[i], stream.layers.last[p as usize], "{:?}: the row that draws behind {p}", rows.seq);
                }
            }
        }
        // The replica, once it is known which rows count.
        let after = first + rows.kept;
        let boundary = after / rule.grain * rule.grain;
        if boundary <= first {
            return;
        }
        state.passed_in = rows.step;
        state.replica = Copy::default();
        if after - boundary <= rule.backtrack && rows.sound {
            let whole = stream.layers.rings(&rule, boundary, 0..layers(&rule));
            let mut rings = state.rings.clone();
            let (mut right, window) = (true, boundary.saturating_sub(rule.window)..boundary);
            for (ring_of, whole) in rings.iter_mut().zip(&whole) {
                // What is in nobody's window is not copied.
                let mut kept = vec![0; ring as usize];
                for p in window.clone() {
                    let at = (p % ring) as usize;
                    kept[at] = ring_of[at];
                    right &= p + rule.window == boundary || kept[at] == whole[at];
                }
                *ring_of = kept;
            }
            let history = stream.values[boundary as usize - 1];
            state.replica = Copy { rings, tag: Some(Tag { boundary, history, right }) };
        }
    }

    /// Copies out of replicas, among the first commands of a step.
    pub fn snapshot_out(&mut self, slot: usize, head: &[i32]) {
        let pairs = self.pairs(slot, "snapshot_out", head[header::SNAPSHOT_OUT]);
        let Some(windows) = &mut self.windows else { return assert!(pairs.is_empty()) };
        for [row, place] in pairs {
            let copy = windows.slots[row].replica.clone();
            let tag = copy.tag.expect("the replica is of a boundary, and nobody has overwritten it");
            assert!(tag.right || !windows.rule.exact, "a snapshot of windows that are not right yet");
            windows.snapshots[place] = copy;
        }
    }

    /// Copies back to the live windows, once slots are cleared; to which slots.
    pub fn snapshot_in(&mut self, slot: usize, head: &[i32]) -> Vec<usize> {
        let pairs = self.pairs(slot, "snapshot_in", head[header::SNAPSHOT_IN]);
        assert!(self.windows.is_some() || pairs.is_empty());
        if let Some(windows) = &mut self.windows {
            for &[place, row] in &pairs {
                windows.slots[row].rings.clone_from(&windows.snapshots[place].rings);
                windows.slots[row].replica.tag = windows.snapshots[place].tag;
            }
        }
        pairs.into_iter().map(|[_, row]| row).collect()
    }

    fn pairs(&self, slot: usize, name: &str, n: i32) -> Vec<[usize; 2]> {
        let words = &self.memory.get(slot, name)[..2 * n as usize];
        words.as_chunks::<2>().0.iter().map(|pair| pair.map(|word| word as usize)).collect()
    }

    /// A slot was given to a sequence: what its windows begin with.
    pub fn begin_windows(&mut self, words: &[i32], restored: &[usize]) {
        let (slot, start, hit, kind) = (words[0] as usize, words[3] as u32, words[4] as u32, words[5]);
        let seq = Seq { index: words[1] as u32, generation: words[2] as u32 };
        let Some(rule) = self.windows.as_ref().map(|w| w.rule) else { return };
        self.stream(seq, start as usize + 1);
        let prompt = self.requests[&seq].prompt.len() as u32;
        let windows = self.windows.as_mut().unwrap();
        windows.hits[slot] = hit;
        if !windows.computes {
            return;
        }
        let stream = self.streams.get_mut(&seq).unwrap();
        stream.layers.extend(&rule, &stream.tokens, start as usize);
        let state = &mut windows.slots[slot];
        match kind {
            0 => assert_eq!((start, hit), (0, 0)),
            1 if restored.contains(&slot) => {
                let tag = state.replica.tag.take().expect("a snapshot was there");
                assert_eq!((tag.boundary, tag.history), (start, stream.values[start as usize - 1]), "{seq:?}");
                state.floor = [0, 0];
                windows.restored += 1;
            }
            // What was cloned, swapped or loaded has its floors.
            1 => return,
            2 => {
                assert!(start > 0 && start <= hit);
                state.rings = stream.layers.rings(&rule, start, 0..rule.encoder as usize);
                state.floor = [0, start];
            }
            _ => state.floor = [start, start],
        }
        state.decoder_from = if rule.truncated { prompt.saturating_sub(rule.keep) } else { 0 };
    }

    /// What a mover that has all of it brings.
    pub fn load_windows(&mut self, slot: usize, seq: Seq, tokens: u32) {
        let Some(rule) = self.windows.as_ref().map(|w| w.rule) else { return };
        self.stream(seq, tokens as usize);
        let stream = self.streams.get_mut(&seq).unwrap();
        stream.layers.extend(&rule, &stream.tokens, tokens as usize);
        let rings = stream.layers.rings(&rule, tokens, 0..layers(&rule));
        self.windows.as_mut().unwrap().slots[slot] = State { rings, ..State::default() };
    }

    /// A step that failed left nonsense.
    pub fn spoil_windows(&mut self, plan_slot: usize, step: u64, rows: &[i32]) {
        let head = self.memory.get(plan_slot, "header").to_vec();
        let out = self.pairs(plan_slot, "snapshot_out", head[header::SNAPSHOT_OUT]);
        let Some(windows) = &mut self.windows else { return };
        for [_, place] in out {
            windows.snapshots[place] = Copy::default();
        }
        for &row in rows {
            let state = &mut windows.slots[row as usize];
            state.rings.iter_mut().for_each(|ring| ring.fill(0xBAD));
            if state.passed_in == step {
                state.replica = Copy::default();
            }
        }
    }
}
