//! Where a sequence begins whose model keeps windows of tokens beside its paged KV.
//!
//! Block KV is found in the index as for any model: the hit. Windows are not in it. They come back whole from a snapshot, in part
//! from a stored slice, or rows are computed again from a start before the end of the hit on. Rows below the hit read block KV
//! and write none.
//!
//! With windows of `w` tokens the rows of a layer are right from `w − 1` tokens behind those of the layer before it, so that a start
//! at `s` without any state has the right inputs of layer `n` from `s + n·(w − 1)` on. The first decoder layer is the last that
//! writes block KV.

use crate::config::ConfigError;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Block, Hit, Part, SnapshotPlace};

/// How far back a model with windows must begin, and how much of it is exact. Lengths are in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowRule {
    /// Layers before the last one that writes block KV.
    pub encoder: u32,
    /// Layers from there on.
    pub decoder: u32,
    /// Tokens of a window, the own one included.
    pub window: u32,
    /// Hits, starts and snapshots are multiples of it; of the block and of every group's cut.
    pub grain: u32,
    /// Rows that a ring holds beyond its window: by so many a chunk may pass the boundary at which the state is copied.
    pub backtrack: u32,
    /// Rows are computed again until the result is that of the whole prompt; else as the model was trained to bear.
    pub exact: bool,
    /// Last tokens of a prompt that pass the decoder, where it is truncated, or at least where results are not exact.
    pub keep: u32,
    /// The decoder computes the last `keep` tokens of a prompt only.
    pub truncated: bool,
}

/// What a sequence begins with, as the word in `admitted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(i32)]
pub enum StartKind {
    /// Nothing.
    #[default]
    Nothing = 0,
    /// All it needs at its start: a snapshot, a fork's parent, host memory or another engine had it; or KV is all there is.
    Whole = 1,
    /// Windows of the encoder, from a stored slice that the worker puts back.
    Slice = 2,
    /// No windows: rows below the hit are computed again.
    Rerun = 3,
}

/// A begin of a sequence: rows from `start` on are computed, those below `hit` write no KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Begin {
    pub start: u32,
    pub hit: u32,
    pub kind: StartKind,
    /// From here on the state of the sequence is worth keeping: what it would be without the hit.
    pub whole_from: u32,
    /// The same of the encoder's windows alone.
    pub slice_from: u32,
}

impl Begin {
    /// With everything in place that `computed` positions have.
    pub fn whole(computed: u32) -> Self {
        let kind = if computed > 0 { StartKind::Whole } else { StartKind::Nothing };
        Self { start: computed, hit: computed, kind, whole_from: 0, slice_from: 0 }
    }
}

impl Begin {
    /// Of a sequence that goes on after `computed` positions with the state of one that began like this.
    pub fn go_on(self, computed: u32) -> Self {
        Self { whole_from: self.whole_from, slice_from: self.slice_from, ..Self::whole(computed) }
    }
}

impl WindowRule {
    /// Tokens by which the right rows of a layer lie behind those that many layers before it.
    const fn lag(&self, layers: u32) -> u32 {
        layers * (self.window - 1)
    }

    const fn floor(&self, tokens: u32) -> u32 {
        tokens / self.grain * self.grain
    }

    /// Longest hit that a sequence of `len` tokens may use.
    pub const fn longest_hit(&self, len: u32) -> u32 {
        let kept = if self.truncated { self.window + self.backtrack } else { 1 };
        self.floor(len.saturating_sub(kept))
    }

    /// Last start that needs the windows of the encoder only.
    pub const fn last_slice(&self, len: u32) -> u32 {
        let kept = if self.exact { self.lag(self.decoder) + 1 } else { self.keep };
        self.floor(len.saturating_sub(kept))
    }

    /// Start that needs no windows, for a hit of `hit` tokens: what is computed behind the hit is right, and so are the last
    /// token and the windows that it leaves. Without exactness one grain makes up the encoder's windows.
    pub fn rerun_start(&self, len: u32, hit: u32) -> u32 {
        let (kept, before) = if self.exact {
            (self.lag(self.encoder + self.decoder) + 1, self.lag(self.encoder))
        } else {
            (self.keep, self.grain)
        };
        self.floor(len.saturating_sub(kept).min(hit.saturating_sub(before)))
    }

    /// First position from which on the whole state is what it would be without a hit; without exactness, from which on no
    /// window lacks rows. `len` is the length of the prompt as it is computed now.
    pub fn whole_from(&self, kind: StartKind, start: u32, len: u32) -> u32 {
        let cut = if self.truncated { len.saturating_sub(self.keep) } else { 0 };
        let (encoder, decoder) = match kind {
            // Where a prompt is truncated, no row from the cut on sees one before it.
            StartKind::Nothing | StartKind::Whole => (0, cut),
            StartKind::Slice => (0, cut.max(start)),
            StartKind::Rerun => (start, cut.max(start)),
        };
        let encoder = if encoder > 0 && self.exact { encoder + self.lag(self.encoder) } else { encoder };
        match encoder.max(decoder) {
            0 => 0,
            from if self.exact => from + self.lag(self.decoder),
            from => from + self.window - 1,
        }
    }

    /// First position from which on the windows of the encoder are what they would be without a hit, every row of them; without
    /// exactness, from which on no row of them is missing.
    pub const fn slice_from(&self, kind: StartKind, start: u32) -> u32 {
        match kind {
            StartKind::Rerun if start > 0 && self.exact => start + self.lag(self.encoder) + 1,
            StartKind::Rerun if start > 0 => start + self.window,
            _ => 0,
        }
    }

    /// Rows of a chunk that would begin at `planned` and have `rows`, of a prompt of `len` tokens: it does not pass the last
    /// boundary by more rows than a ring holds beyond its window.
    pub const fn cut_chunk(&self, planned: u32, rows: u32, len: u32) -> u32 {
        match self.passed(planned, rows, len) {
            Some(last) => last - planned,
            None => rows,
        }
    }

    /// The last boundary of a prompt of `len` tokens, if such a chunk passes it by more rows than a ring holds beyond its window.
    pub const fn passed(&self, planned: u32, rows: u32, len: u32) -> Option<u32> {
        let last = self.floor(len);
        if planned < last && planned + rows > last + self.backtrack { Some(last) } else { None }
    }

    /// Checks the rule against what it is used with.
    pub(crate) fn check(&self, block: u32, cuts: &[u32], max_draft: u32) -> Result<(), ConfigError> {
        let at_least = |what, value: u32, least: u32| {
            let (value, least) = (value.into(), least.into());
            if value >= least { Ok(()) } else { Err(ConfigError::TooSmall { what, value, least }) }
        };
        at_least("hit_window encoder + decoder", self.encoder.saturating_add(self.decoder), 1)?;
        at_least("hit_window window", self.window, 1)?;
        at_least("hit_window grain", self.grain, block)?;
        let most = u64::from(self.encoder) + u64::from(self.decoder);
        let below = 1 << 30;
        for (what, value) in [
            ("hit_window layers × window", most * u64::from(self.window)),
            ("hit_window grain", self.grain.into()),
            ("hit_window backtrack", self.backtrack.into()),
            ("hit_window keep", self.keep.into()),
        ] {
            if value >= below {
                return Err(ConfigError::TooLarge { what, value, below });
            }
        }
        if cuts.is_empty() {
            return Err(ConfigError::NoState);
        }
        if !self.grain.is_multiple_of(block) {
            return Err(ConfigError::Divides { what: "page_tokens of KV group 0", value: block, of: self.grain });
        }
        for &cut in cuts.iter().filter(|&&cut| cut > 0) {
            if !self.grain.is_multiple_of(cut) {
                return Err(ConfigError::Divides { what: "cut of a state group", value: cut, of: self.grain });
            }
        }
        if self.truncated || !self.exact {
            at_least("hit_window keep", self.keep, self.window + self.backtrack)?;
        }
        if !self.exact {
            at_least("hit_window grain", self.grain, self.window - 1)?;
        }
        if max_draft > self.backtrack {
            return Err(ConfigError::Drafts { value: max_draft, most: self.backtrack });
        }
        Ok(())
    }
}

impl Scheduler {
    /// The rule of a model with windows.
    #[inline]
    pub(crate) fn window(&self) -> Option<&WindowRule> {
        match &self.policy.hit_rule {
            crate::config::HitRule::Window(rule) => Some(rule),
            _ => None,
        }
    }

    /// The best begin after a hit, for a sequence of `len` tokens: the one that computes fewest. With it the block whose snapshot
    /// it needs; null if none.
    pub(crate) fn begin_with_windows(&self, rule: &WindowRule, hit: Hit, len: u32) -> (Hit, Begin, Block) {
        let shift = self.geometry.shift;
        let hit = self.kv.blocks.truncate(hit, (rule.longest_hit(len) >> shift) as usize);
        let grain_blocks = (rule.grain >> shift) as usize;
        let hit = self.kv.blocks.truncate(hit, hit.blocks / grain_blocks * grain_blocks);
        let tokens = (hit.blocks as u32) << shift;
        if tokens == 0 {
            let whole_from = rule.whole_from(StartKind::Nothing, 0, len);
            return (hit, Begin { whole_from, ..Begin::default() }, Block::NULL);
        }
        let rerun = rule.rerun_start(len, tokens);
        let mut found = (rerun, StartKind::Rerun, Block::NULL);
        let (mut at, mut block) = (tokens, hit.leaf);
        // Every step is one grain: what lies further back than the start without windows is of no use.
        while at >= rerun.max(rule.grain) {
            if self.can_restore(block) {
                found = (at, StartKind::Whole, block);
                break;
            }
            if at <= rule.last_slice(len) && self.kv.blocks.parts(block).has_any(Part::StateSlice) {
                found = (at, StartKind::Slice, Block::NULL);
                break;
            }
            at -= rule.grain;
            for _ in 0..grain_blocks {
                block = self.kv.blocks.parent(block);
            }
        }
        let (start, kind, block) = found;
        let (whole_from, slice_from) = (rule.whole_from(kind, start, len), rule.slice_from(kind, start));
        (hit, Begin { start, hit: tokens, kind, whole_from, slice_from }, block)
    }

    /// Counts how a sequence begins that took nothing but the index.
    pub(crate) fn note_start(&mut self, begin: &Begin) {
        if self.window().is_some() {
            self.metrics.starts[begin.kind as usize] += 1;
            self.metrics.rerun_tokens += u64::from(begin.hit - begin.start);
        }
    }

    /// Orders the copy back of a block's snapshot into a slot that a sequence is given in the step being planned.
    pub(crate) fn restore_snapshot(&mut self, block: Block, slot: u32) {
        match self.kv.blocks.pin_snapshot(block) {
            Some(SnapshotPlace(place)) => self.snapshots.back.push([place as i32, slot as i32]),
            // Cannot happen: it was there when the begin was chosen, and the chain is pinned.
            None => self.kv.misuse += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DeepSeek-V4.1: 20 + 20 layers, windows of 128 tokens.
    const FULL: WindowRule = WindowRule {
        encoder: 20,
        decoder: 20,
        window: 128,
        grain: 128,
        backtrack: 6,
        exact: true,
        keep: 134,
        truncated: false,
    };
    const REPLAY: WindowRule = WindowRule { exact: false, ..FULL };

    #[test]
    fn starts_of_the_full_model_are_those_derived_by_hand() {
        // 40 · 127 + 1 = 5081 and 20 · 127 + 1 = 2541 tokens at least; 20 · 127 = 2540 before the end of the hit.
        let starts = |rule: &WindowRule, len: u32| {
            let hit = rule.longest_hit(len);
            (hit, rule.rerun_start(len, hit), rule.last_slice(len))
        };
        for (len, hit, rerun, slice) in [
            (100, 0, 0, 0),
            (5_080, 4_992, 0, 2_432),
            (5_208, 5_120, 0, 2_560),
            (5_209, 5_120, 128, 2_560),
            (8_192, 8_064, 3_072, 5_632),
            (8_193, 8_192, 3_072, 5_632),
            (100_000, 99_968, 94_848, 97_408),
        ] {
            assert_eq!(starts(&FULL, len), (hit, rerun, slice), "{len}");
        }
        // A long turn behind a short hit: its block KV must be right from the hit on.
        assert_eq!(FULL.rerun_start(20_000, 8_192), 5_632, "8192 − 2540 = 5652, rounded down");
        assert_eq!(FULL.rerun_start(20_000, 2_560), 0);
        for (len, hit, rerun, slice) in [
            (129, 128, 0, 0),
            (257, 256, 0, 0),
            (262, 256, 128, 128),
            (8_192, 8_064, 7_936, 7_936),
            (8_200, 8_192, 8_064, 8_064),
            (8_326, 8_320, 8_192, 8_192),
        ] {
            assert_eq!(starts(&REPLAY, len), (hit, rerun, slice), "{len}");
        }
        let truncated = WindowRule { truncated: true, ..REPLAY };
        assert_eq!(starts(&truncated, 8_325), (8_064, 7_936, 8_064), "a hit leaves 134 tokens");
        assert_eq!(starts(&truncated, 8_326), (8_192, 8_064, 8_192));
        assert_eq!(starts(&truncated, 134), (0, 0, 0));
    }

    #[test]
    fn a_state_is_worth_keeping_once_every_layer_of_it_is_right() {
        use StartKind::{Nothing, Rerun, Slice, Whole};
        for (kind, start, whole) in [
            (Nothing, 0, 0),
            (Whole, 3_072, 0),
            (Slice, 3_072, 3_072 + 2_540),
            (Rerun, 3_072, 3_072 + 5_080),
            (Rerun, 0, 0),
        ] {
            assert_eq!(FULL.whole_from(kind, start, 8_200), whole, "{kind:?}");
        }
        assert_eq!(REPLAY.whole_from(Slice, 3_072, 3_500), 3_072 + 127);
        assert_eq!(REPLAY.whole_from(Rerun, 3_072, 3_500), 3_072 + 127);
        // The decoder has rows of the last `keep` tokens only.
        let truncated = WindowRule { truncated: true, keep: 3_000, ..FULL };
        assert_eq!(truncated.whole_from(Nothing, 0, 8_000), 5_000 + 2_540);
        assert_eq!(truncated.whole_from(Nothing, 0, 3_000), 0);
        assert_eq!(truncated.whole_from(Whole, 5_120, 8_000), 5_000 + 2_540);
        assert_eq!(truncated.whole_from(Slice, 5_120, 8_000), 5_120 + 2_540);
        assert_eq!(truncated.whole_from(Rerun, 2_560, 8_000), 2_560 + 5_080);
        assert_eq!(truncated.whole_from(Rerun, 1_280, 8_000), 5_000 + 2_540);
    }

    #[test]
    fn the_last_token_and_all_behind_a_hit_are_right_wherever_it_begins() {
        // Right rows by layer, from what each start has.
        for exact in [
            FULL,
            WindowRule { encoder: 3, decoder: 2, window: 5, grain: 8, backtrack: 3, ..FULL },
            WindowRule { encoder: 1, decoder: 4, window: 16, grain: 16, ..FULL },
            WindowRule { encoder: 4, decoder: 0, window: 16, grain: 16, ..FULL },
        ] {
            let (e, d, back) = (exact.encoder, exact.decoder, exact.window - 1);
            for len in (1..40 * exact.grain).step_by(7) {
                for hit in (exact.grain..=exact.longest_hit(len)).step_by(exact.grain as usize) {
                    let start = exact.rerun_start(len, hit);
                    assert!(start.is_multiple_of(exact.grain) && start <= hit);
                    assert!(start == 0 || start + e * back <= hit, "block KV of the rows behind the hit");
                    assert!(start == 0 || start + (e + d) * back < len, "the last token");
                    // One grain later something would be wrong.
                    let later = start + exact.grain;
                    assert!(later + e * back > hit || later + (e + d) * back >= len);
                    let slice = exact.last_slice(len);
                    assert!(slice == 0 || slice + d * back < len);
                    assert!(slice + exact.grain + d * back >= len);
                }
            }
        }
    }

    #[test]
    fn chunks_end_where_the_state_can_still_be_copied() {
        for len in 128..384 {
            let last = len / 128 * 128;
            for planned in 0..len {
                for rows in [1, 5, 6, 7, 100, 128, 400] {
                    let rows = rows.min(len - planned);
                    let cut = FULL.cut_chunk(planned, rows, len);
                    assert!(cut >= 1 && cut <= rows);
                    assert!(planned >= last || planned + cut <= last + 6);
                    assert!(cut == rows || planned + cut == last, "only for the boundary's sake");
                }
            }
        }
    }

    #[test]
    fn rules_that_cannot_work_are_refused_by_name() {
        let refused =
            |rule: WindowRule, block, cuts: &[u32], drafts| rule.check(block, cuts, drafts).map_err(|e| e.to_string());
        assert_eq!(refused(FULL, 128, &[128], 6), Ok(()));
        for (rule, block, cuts, drafts, name) in [
            (WindowRule { encoder: 0, decoder: 0, ..FULL }, 128, &[128][..], 0, "encoder + decoder"),
            (WindowRule { window: 0, ..FULL }, 128, &[128], 0, "window"),
            (WindowRule { grain: 64, ..FULL }, 128, &[128], 0, "grain"),
            (WindowRule { grain: 192, ..FULL }, 128, &[0], 0, "page_tokens"),
            (FULL, 64, &[256], 0, "cut of a state group"),
            (FULL, 128, &[], 0, "state group"),
            (WindowRule { keep: 133, ..REPLAY }, 128, &[128], 0, "keep"),
            (WindowRule { keep: 100, truncated: true, ..FULL }, 128, &[128], 0, "keep"),
            (WindowRule { window: 200, keep: 300, ..REPLAY }, 128, &[128], 0, "grain"),
            (FULL, 128, &[128], 7, "max_draft"),
            (WindowRule { encoder: 1 << 31, decoder: 1 << 31, ..FULL }, 128, &[128], 0, "layers"),
        ] {
            assert!(refused(rule, block, cuts, drafts).is_err_and(|text| text.contains(name)), "{name}");
        }
    }
}
