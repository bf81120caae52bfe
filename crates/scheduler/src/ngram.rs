//! Prompt lookup: drafts copied from where the newest tokens of a sequence occurred before.
//!
//! One pass proposes for all decoding sequences. Every position is entered once in its sequence's index, keyed by the `shortest`
//! tokens that end there, with a link to the previous position of the same key. A lookup follows the links of the newest key
//! from the newest occurrence on and takes the first whose match is `longest` tokens long, else the longest, newest first.
//!
//! Cost of a pass: at most [`NgramConfig::catch_up`] positions entered over all sequences, at most [`NgramConfig::candidates`]
//! links with `longest` comparisons each per sequence. Memory: 12 to 24 bytes per token that a running sequence may ever have.

use crate::config::ConfigError;
use crate::lanes::flag;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::Seq;

/// How drafts are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramConfig {
    /// Shortest suffix that may be looked up; also the key of the index.
    pub shortest: u32,
    /// Longest suffix that is compared: a match this long ends the search.
    pub longest: u32,
    /// Drafts per sequence, at most `Limits::max_draft`.
    pub tokens: u32,
    /// Most earlier occurrences looked at per sequence and step.
    pub candidates: u32,
    /// Most positions entered per step, over all sequences; those behind wait for the next step.
    pub catch_up: u32,
}

impl Default for NgramConfig {
    fn default() -> Self {
        Self { shortest: 2, longest: 4, tokens: 4, candidates: 16, catch_up: 16_384 }
    }
}

impl NgramConfig {
    /// # Errors
    /// [`ConfigError`]: which value to change.
    pub fn check(&self, max_draft: u32) -> Result<(), ConfigError> {
        let at_least = |what, value: u32, least: u32| {
            if value >= least {
                Ok(())
            } else {
                Err(ConfigError::TooSmall { what, value: value.into(), least: least.into() })
            }
        };
        let below = |what, value: u32, below: u32| {
            if value < below {
                Ok(())
            } else {
                Err(ConfigError::TooLarge { what, value: value.into(), below: below.into() })
            }
        };
        at_least("the shortest n-gram", self.shortest, 1)?;
        at_least("the longest n-gram", self.longest, self.shortest)?;
        below("the longest n-gram", self.longest, 65)?;
        at_least("the drafts of a sequence", self.tokens, 1)?;
        below("the drafts of a sequence", self.tokens, max_draft.saturating_add(1))?;
        at_least("the candidates of a lookup", self.candidates, 1)?;
        at_least("the positions entered in a step", self.catch_up, 1)
    }
}

const NONE: u32 = u32::MAX;

/// Buckets tried for a key before it is left out.
const PROBES: usize = 16;

/// Where each key of one sequence occurred, newest first.
#[derive(Default)]
pub struct NgramIndex {
    /// Last position of the newest occurrence of a key, by open addressing; a power of two, at most half full.
    head: Vec<u32>,
    /// For the last position of a key, that of its previous occurrence.
    before: Vec<u32>,
}

impl NgramIndex {
    /// Forgets everything and makes room for a sequence of up to `tokens` tokens.
    pub fn reset(&mut self, tokens: usize) {
        let buckets = (2 * tokens.max(8)).next_power_of_two();
        self.head.clear();
        self.head.resize(buckets, NONE);
        self.before.clear();
        self.before.reserve(tokens);
    }

    /// Bucket of the key that ends at `end`: its own, or an empty one. None: all that may be tried are taken by others.
    fn bucket(&self, tokens: &[u32], end: usize, shortest: usize) -> Option<usize> {
        let key = &tokens[end + 1 - shortest..=end];
        let mask = self.head.len() - 1;
        let mut hash = 0u64;
        for &token in key {
            hash = (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
        let start = (hash ^ (hash >> 32)) as usize;
        (0..PROBES).map(|probe| (start + probe) & mask).find(|&at| {
            let last = self.head[at];
            last == NONE || tokens[last as usize + 1 - shortest..=last as usize] == *key
        })
    }

    /// Enters up to `most` positions of `tokens`, which only ever grow. Returns how many.
    pub fn enter(&mut self, tokens: &[u32], shortest: usize, most: usize) -> usize {
        let from = self.before.len();
        let to = tokens.len().min(from + most);
        for end in from..to {
            let mut previous = NONE;
            if end + 1 >= shortest
                && 2 * (end + 1) <= self.head.len()
                && let Some(at) = self.bucket(tokens, end, shortest)
            {
                previous = self.head[at];
                self.head[at] = end as u32;
            }
            self.before.push(previous);
        }
        to - from
    }

    /// Where to copy from: the position after the best earlier occurrence of the newest tokens.
    pub fn find(&self, tokens: &[u32], config: &NgramConfig) -> Option<usize> {
        let (shortest, longest) = (config.shortest as usize, config.longest as usize);
        let len = tokens.len();
        if self.before.len() != len || len < shortest {
            return None;
        }
        let end = len - 1;
        let mut at = self.before[end];
        let mut best = None;
        let mut record = 0;
        for _ in 0..config.candidates {
            if at == NONE {
                break;
            }
            let last = at as usize;
            let mut length = shortest;
            while length < longest && length <= last && tokens[last - length] == tokens[end - length] {
                length += 1;
            }
            if length > record {
                (best, record) = (Some(last + 1), length);
                if length == longest {
                    break;
                }
            }
            at = self.before[last];
        }
        best
    }
}

/// Token `nth` of the copy from `source` on; beyond the newest token the copy goes on reading itself.
#[inline]
fn copied(tokens: &[u32], source: usize, nth: usize) -> u32 {
    let period = tokens.len() - source;
    tokens[source + nth % period]
}

/// Drafts for the rows after the next planned one.
///
/// `flying` are the drafts of the step in flight, `unknown` the tokens that the next planned row stands behind and the host
/// does not know (0 without a step in flight, else 1: each step makes one token beyond the drafts it accepts). Drafts in flight are
/// expected to be accepted as far as they agree with today's copy; what follows goes on from there.
pub fn draft(tokens: &[u32], source: usize, flying: &[u32], unknown: usize, most: usize, into: &mut Vec<u32>) {
    into.clear();
    let agreed = flying.iter().enumerate().take_while(|&(nth, &token)| copied(tokens, source, nth) == token).count();
    into.extend((0..most).map(|nth| copied(tokens, source, agreed + unknown + nth)));
}

/// The drafter of one scheduler: an index for every state slot.
pub(crate) struct Ngram {
    pub config: NgramConfig,
    slots: Vec<(Seq, NgramIndex)>,
    drafts: Vec<u32>,
    flying: Vec<u32>,
}

impl Ngram {
    pub fn new(config: NgramConfig, slots: usize) -> Self {
        let nobody = Seq { index: u32::MAX, generation: u32::MAX };
        Self {
            slots: (0..slots).map(|_| (nobody, NgramIndex::default())).collect(),
            drafts: Vec::with_capacity(config.tokens as usize),
            flying: Vec::with_capacity(config.tokens as usize),
            config,
        }
    }
}

impl Scheduler {
    /// Turns prompt lookup on.
    ///
    /// # Errors
    /// [`ConfigError`]: a value is out of range; nothing has changed then.
    pub fn set_ngram(&mut self, config: NgramConfig) -> Result<(), ConfigError> {
        config.check(self.limits.max_draft)?;
        if self.device_drafts > 0 {
            return Err(ConfigError::DeviceDrafts(self.device_drafts));
        }
        self.ngram = Some(Box::new(Ngram::new(config, self.limits.max_num_seqs as usize + 1)));
        Ok(())
    }

    /// Proposes drafts for every decoding sequence whose newest tokens occurred before; to be called between `complete` and
    /// `schedule`. Returns the number of drafts. Without [`Scheduler::set_ngram`] it does nothing.
    pub fn propose_ngram(&mut self) -> u32 {
        let Some(mut ngram) = self.ngram.take() else { return 0 };
        let mut left = ngram.config.catch_up as usize;
        let mut total = 0;
        // With two steps in flight nothing is known of what the first one accepted.
        let lanes = if self.in_flight() < 2 { 0..self.lanes.decoding } else { 0..0 };
        for lane in lanes {
            if self.lanes.has_newest(lane) && self.lanes.flags[lane] & flag::DEAD == 0 {
                total += self.propose_for(&mut ngram, lane, &mut left);
            }
        }
        self.ngram = Some(ngram);
        total
    }

    fn propose_for(&mut self, ngram: &mut Ngram, lane: usize, left: &mut usize) -> u32 {
        let seq = self.lanes.seq[lane];
        self.flush_tokens(seq);
        let Ngram { config, slots, drafts, flying } = ngram;
        let state = self.lanes.state[lane];
        // Rows of the step in flight: one, and its drafts. It makes one token beyond those it accepts.
        let rows = (self.lanes.planned[lane] - self.lanes.confirmed[lane]) as usize;
        flying.clear();
        flying.extend(self.kv.tables.drafts(state).iter().take(rows.saturating_sub(1)));
        let room = self.lanes.limit[lane].saturating_sub(self.lanes.planned[lane] + 2);
        let most = room.min(config.tokens) as usize;
        let (owner, index) = &mut slots[state as usize];
        let Some(cold) = self.seqs.get_mut(seq) else { return 0 };
        if *owner != seq {
            *owner = seq;
            index.reset(cold.limit as usize);
        }
        *left -= index.enter(&cold.history, config.shortest as usize, *left);
        let source = if most > 0 { index.find(&cold.history, config) } else { None };
        match source {
            Some(source) => draft(&cold.history, source, flying, rows.min(1), most, drafts),
            None => drafts.clear(),
        }
        self.kv.tables.set_drafts(state, drafts);
        self.lanes.drafts[lane] = drafts.len() as u32;
        self.proposed |= !drafts.is_empty();
        drafts.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config(shortest: u32, longest: u32, candidates: u32) -> NgramConfig {
        NgramConfig { shortest, longest, tokens: 4, candidates, ..NgramConfig::default() }
    }

    /// The definition: among the newest `candidates` earlier occurrences of the last `shortest` tokens, the longest match up to `longest`.
    fn by_hand(tokens: &[u32], config: &NgramConfig) -> Option<usize> {
        let (shortest, longest) = (config.shortest as usize, config.longest as usize);
        let len = tokens.len();
        if len < shortest {
            return None;
        }
        let mut best: Option<(usize, usize)> = None;
        let earlier = (shortest..len).rev().filter(|&end| tokens[end - shortest..end] == tokens[len - shortest..]);
        for end in earlier.take(config.candidates as usize) {
            let length = (1..=longest.min(end)).take_while(|&n| tokens[end - n] == tokens[len - n]).count();
            if best.is_none_or(|(record, _)| length > record) {
                best = Some((length, end));
            }
        }
        best.map(|(_, end)| end)
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_scan_finds(
            tokens in prop::collection::vec(0u32..4, 0..200),
            (shortest, more) in (1u32..4, 0u32..4),
            candidates in 1u32..40,
            step in 1usize..9,
        ) {
            let config = config(shortest, shortest + more, candidates);
            let mut index = NgramIndex::default();
            index.reset(tokens.len());
            let mut at = 0;
            while at <= tokens.len() {
                while index.enter(&tokens[..at], shortest as usize, 3) > 0 {}
                prop_assert_eq!(index.find(&tokens[..at], &config), by_hand(&tokens[..at], &config));
                at += step;
            }
        }
    }

    #[test]
    fn a_copy_reads_itself_beyond_the_newest_token() {
        let tokens = [9, 1, 2, 3, 1, 2, 3];
        let mut drafts = Vec::new();
        draft(&tokens, 4, &[], 0, 7, &mut drafts);
        assert_eq!(drafts, [1, 2, 3, 1, 2, 3, 1]);
    }

    #[test]
    fn with_a_step_in_flight_the_copy_goes_on_behind_the_drafts_that_still_agree() {
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2];
        let mut drafts = Vec::new();
        // In flight are 3, 4; the step makes one more token (5), which no draft stands for.
        draft(&tokens, 2, &[3, 4], 1, 2, &mut drafts);
        assert_eq!(drafts, [6, 7]);
        // In flight are wrong guesses: the step will make 3 alone.
        draft(&tokens, 2, &[8, 8], 1, 2, &mut drafts);
        assert_eq!(drafts, [4, 5]);
    }

    #[test]
    fn an_index_that_lags_behind_proposes_nothing() {
        let tokens = [1, 2, 1, 2, 1, 2];
        let config = config(1, 2, 8);
        let mut index = NgramIndex::default();
        index.reset(6);
        assert_eq!(index.enter(&tokens, 1, 4), 4);
        assert_eq!(index.find(&tokens, &config), None);
        assert_eq!(index.enter(&tokens, 1, 4), 2);
        assert_eq!(index.find(&tokens, &config), Some(4));
    }

    #[test]
    fn a_newer_occurrence_wins_among_equal_matches_and_a_longer_one_over_a_newer() {
        let config = config(1, 3, 8);
        let find = |tokens: &[u32]| {
            let mut index = NgramIndex::default();
            index.reset(tokens.len());
            index.enter(tokens, 1, tokens.len());
            index.find(tokens, &config)
        };
        assert_eq!(find(&[5, 1, 6, 1, 7, 1]), Some(4));
        assert_eq!(find(&[5, 1, 6, 1, 5, 1]), Some(2));
    }

    #[test]
    fn every_value_out_of_range_is_named() {
        let ok = NgramConfig::default();
        assert!(ok.check(4).is_ok());
        for bad in [
            NgramConfig { shortest: 0, ..ok },
            NgramConfig { longest: 1, ..ok },
            NgramConfig { longest: 65, ..ok },
            NgramConfig { tokens: 0, ..ok },
            NgramConfig { tokens: 5, ..ok },
            NgramConfig { candidates: 0, ..ok },
            NgramConfig { catch_up: 0, ..ok },
        ] {
            assert!(bad.check(4).is_err(), "{bad:?}");
        }
    }
}
