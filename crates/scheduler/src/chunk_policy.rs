//! How many prompt rows a step takes: a fixed number, or what fits a time.

use crate::config::ConfigError;

/// Longest chunk that a time budget gives.
pub const MAX_TIMED_ROWS: u32 = 32_768;

/// Size of prefill chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChunkPolicy {
    /// Longest chunk of one sequence and step in tokens; 0 = the token budget of the step.
    Tokens(u32),
    /// Chunks of a step may take this long together; with a rank group, the shortest budget of a rank.
    Time {
        /// Time of a step's prompt rows in nanoseconds.
        budget_ns: u64,
        /// What rows cost.
        cost: ChunkCost,
    },
}

impl Default for ChunkPolicy {
    fn default() -> Self {
        Self::Tokens(0)
    }
}

/// Nanoseconds of a chunk of `q` rows behind `c` computed positions: `a q² + b q c + d q + e`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkCost {
    /// Attention among the rows of the chunk.
    pub a: f64,
    /// Attention of a row to a computed position.
    pub b: f64,
    /// A row by itself.
    pub d: f64,
    /// A step by itself.
    pub e: f64,
}

impl ChunkCost {
    /// Cost of `rows` behind `computed`, in nanoseconds.
    pub fn of(&self, rows: u32, computed: u32) -> f64 {
        self.e + self.rows(rows, computed)
    }

    /// The same without what a step costs by itself.
    fn rows(&self, rows: u32, computed: u32) -> f64 {
        let (q, c) = (f64::from(rows), f64::from(computed));
        q * (self.a * q + self.b * c + self.d)
    }

    /// Most rows behind `computed` whose cost stays within `budget_ns`; at most [`MAX_TIMED_ROWS`].
    pub fn most_rows(&self, budget_ns: f64, computed: u32) -> u32 {
        let left = budget_ns - self.e;
        if left < 0.0 {
            return 0;
        }
        let linear = self.b * f64::from(computed) + self.d;
        // The larger root of a q² + linear q = left, written so that nothing cancels where `linear` is large.
        let root = 2.0 * left / (linear + (linear * linear + 4.0 * self.a * left).sqrt());
        // A cast of a float saturates, and takes what is not a number to 0.
        let mut rows = (root as u32).min(MAX_TIMED_ROWS);
        // Rounding may have gone one too far either way.
        while rows > 0 && self.rows(rows, computed) > left {
            rows -= 1;
        }
        while rows < MAX_TIMED_ROWS && self.rows(rows + 1, computed) <= left {
            rows += 1;
        }
        rows
    }

    pub(crate) fn check(&self, budget_ns: u64) -> Result<(), ConfigError> {
        for (what, value) in [("a", self.a), ("b", self.b), ("d", self.d), ("e", self.e)] {
            if !value.is_finite() || value < 0.0 {
                return Err(ConfigError::ChunkCost { what, value: value.to_string() });
            }
        }
        if self.a + self.d <= 0.0 {
            return Err(ConfigError::ChunkCost { what: "a and d", value: "0".to_owned() });
        }
        if budget_ns > i64::MAX as u64 {
            return Err(ConfigError::TooLarge { what: "chunk_budget_ns", value: budget_ns, below: 1 << 63 });
        }
        if self.most_rows(budget_ns as f64, 0) == 0 {
            let least = self.of(1, 0).ceil() as u64;
            return Err(ConfigError::TooSmall { what: "chunk_budget_ns", value: budget_ns, least });
        }
        Ok(())
    }
}

/// What is left of a step's prompt rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ChunkBudget {
    /// Longest chunk of a sequence.
    Tokens(u32),
    /// Nanoseconds that are left, and whether a chunk was given already.
    Time { left_ns: f64, cost: ChunkCost, given: bool },
}

impl ChunkPolicy {
    /// Time that this rank allows a prefill step, as a word of a vote.
    pub(crate) fn word(&self) -> i64 {
        match self {
            Self::Tokens(_) => i64::MAX,
            Self::Time { budget_ns, .. } => *budget_ns as i64,
        }
    }

    /// Budget of one step that takes at most `most_ns`.
    pub(crate) fn begin(&self, most_ns: i64) -> ChunkBudget {
        match *self {
            Self::Tokens(0) => ChunkBudget::Tokens(u32::MAX),
            Self::Tokens(most) => ChunkBudget::Tokens(most),
            Self::Time { budget_ns, cost } => {
                let left_ns = (budget_ns as i64).min(most_ns) as f64;
                ChunkBudget::Time { left_ns, cost, given: false }
            }
        }
    }
}

impl ChunkBudget {
    /// Rows that the next chunk may have. The first of a step has one at least, however deep it is.
    pub fn rows(&self, computed: u32) -> u32 {
        match self {
            Self::Tokens(most) => *most,
            Self::Time { left_ns, cost, given } => cost.most_rows(*left_ns, computed).max(u32::from(!given)),
        }
    }

    /// The same of a span that is not cut: the first chunk of a step takes it however long it takes.
    pub fn span_rows(&self, computed: u32) -> u32 {
        match self {
            Self::Time { given: false, .. } => u32::MAX,
            _ => self.rows(computed),
        }
    }

    /// Whether a sequence that is admitted now would have a row.
    pub fn is_spent(&self) -> bool {
        self.rows(0) == 0
    }

    /// Takes the rows of a chunk.
    pub fn take(&mut self, rows: u32, computed: u32) {
        if let Self::Time { left_ns, cost, given } = self
            && rows > 0
        {
            *left_ns -= cost.rows(rows, computed);
            *given = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COST: ChunkCost = ChunkCost { a: 0.5, b: 1.0, d: 2000.0, e: 3e6 };

    #[test]
    fn rows_within_a_budget_are_the_known_ones() {
        for (budget_ns, expected) in
            [(20e6, [4164, 902, 127, 16]), (100e6, [12_071, 4680, 726, 96]), (300e6, [22_454, 12_144, 2213, 296])]
        {
            for (computed, rows) in [0, 16_384, 131_072, 1_000_000].into_iter().zip(expected) {
                assert_eq!(COST.most_rows(budget_ns, computed), rows, "{budget_ns} ns behind {computed}");
            }
        }
        assert_eq!(COST.most_rows(3e6, 0), 0, "the step alone takes the budget");
        assert_eq!(COST.most_rows(1e6, 0), 0);
        assert_eq!(COST.most_rows(1e15, 0), MAX_TIMED_ROWS);
        let linear = ChunkCost { a: 0.0, b: 0.0, ..COST };
        assert_eq!(linear.most_rows(3e6 + 2000.0 * 55.5, 7), 55);
    }

    #[test]
    fn costs_that_are_no_costs_are_refused_by_name() {
        let refused = |cost: ChunkCost, budget| cost.check(budget).map_err(|e| e.to_string());
        assert_eq!(refused(COST, 20_000_000), Ok(()));
        for (cost, name) in [
            (ChunkCost { a: -1.0, ..COST }, "chunk_cost a"),
            (ChunkCost { b: f64::NAN, ..COST }, "chunk_cost b"),
            (ChunkCost { e: f64::INFINITY, ..COST }, "chunk_cost e"),
            (ChunkCost { a: 0.0, d: 0.0, ..COST }, "chunk_cost a and d"),
        ] {
            assert!(refused(cost, 20_000_000).is_err_and(|text| text.contains(name)), "{name}");
        }
        assert!(refused(COST, 3_000_000).is_err_and(|text| text.contains("3002001")), "what one row takes is named");
        assert!(refused(COST, 1 << 63).is_err());
    }

    #[test]
    fn chunks_of_a_step_share_its_time_and_the_first_has_a_row() {
        let policy = ChunkPolicy::Time { budget_ns: 20_000_000, cost: COST };
        let mut budget = policy.begin(i64::MAX);
        budget.take(4000, 0);
        let left = 20e6 - COST.of(4000, 0);
        assert_eq!(budget.rows(0), COST.most_rows(left + COST.e, 0));
        budget.take(budget.rows(0), 0);
        assert!(budget.is_spent());
        let mut deep = policy.begin(1);
        assert_eq!(deep.rows(1 << 29), 1, "a shorter budget of another rank never stops a prompt for good");
        deep.take(1, 1 << 29);
        assert_eq!(deep.rows(0), 0);
        assert_eq!(ChunkPolicy::Tokens(0).begin(1).rows(5), u32::MAX);
        assert_eq!(ChunkPolicy::Tokens(7).begin(1).rows(5), 7);
        assert_eq!((ChunkPolicy::Tokens(7).word(), policy.word()), (i64::MAX, 20_000_000));
    }

    proptest! {
        #[test]
        fn the_next_row_would_exceed_the_budget(
            a in prop_oneof![Just(0.0), 0.0..10.0], b in prop_oneof![Just(0.0), 0.0..10.0], d in 0.1..1e5, e in 0.0..1e7,
            budget in 0.0..1e10, computed in prop_oneof![0u32..100, 0u32..1 << 29],
        ) {
            let cost = ChunkCost { a, b, d, e };
            let rows = cost.most_rows(budget, computed);
            let within = |rows: u32| cost.rows(rows, computed) <= budget - e;
            prop_assert!(rows == 0 || within(rows));
            prop_assert!(rows == MAX_TIMED_ROWS || !within(rows + 1));
        }
    }
}
