//! From times of completed steps to one number: how many draft rows the next step should have.
//!
//! More draft rows make more tokens a step and longer steps. The runtime keeps two tables, both of completed steps only: time by
//! step size (at the sizes steps are padded to) and the share of drafts that make a token by their place in the sequence. The
//! budget is the size with the most tokens per time, over all sizes: costs are stairs, where going downhill stops at the first.
//!
//! The budget must not know the step it is for: a length that depends on that step's drafts bends sampled distributions.

use crate::config::ConfigError;

/// Weight of a new time in its average.
const TIME_WEIGHT: f64 = 0.15;
/// A time is believed up to this factor from what was expected; one far outside is left out.
const CLAMP: f64 = 2.0;
const OUTLIER: f64 = 4.0;
/// So many times in a row far outside are no outliers: the machine has changed.
const CHANGED: u32 = 5;
/// How much of the acceptance counts is kept from step to step.
const MEMORY: f64 = 0.99;
/// Drafts that are assumed to have been seen, half of them accepted, before any was.
const PRIOR: f64 = 2.0;
/// Another size is chosen if it promises this much more.
const HYSTERESIS: f64 = 1.01;

/// What a runtime is built for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MtpConfig {
    /// Drafts per sequence.
    pub max_draft: u32,
    /// Row counts that steps are padded to (graph sizes), rising; a step of another size counts for the next one.
    pub sizes: Vec<u32>,
    /// Up to so many sequences every draft is verified: weights are read once, whatever the rows.
    pub full_below: u32,
    /// Steps between two looks at the size that was measured longest ago, 0 = never.
    pub explore_every: u32,
}

impl MtpConfig {
    /// For engines without fixed graph sizes: sizes rising by about a quarter up to `rows`.
    pub fn with_rows(max_draft: u32, rows: u32) -> Self {
        let mut sizes = Vec::new();
        let mut size = 1;
        while size < rows {
            sizes.push(size);
            size += (size / 4).max(1);
        }
        sizes.push(rows.max(1));
        Self { max_draft, sizes, full_below: 4, explore_every: 200 }
    }
}

/// Time of steps of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Time {
    /// Average of what was measured, in the caller's unit; 0 = never.
    mean: f64,
    samples: u32,
    /// Times in a row that were left out, and the one of them closest to the mean.
    refused: u32,
    closest: f64,
    /// Update that measured it last.
    seen: u64,
}

/// See the module's note.
#[derive(Clone, Debug)]
pub struct MtpRuntime {
    config: MtpConfig,
    times: Vec<Time>,
    /// Time of each size, never falling; filled in where nothing was measured.
    cost: Vec<f64>,
    /// Drafts verified, and accepted together with all before them, by place; fading.
    verified: Vec<f64>,
    accepted: Vec<f64>,
    /// Size chosen by the newest update, as an index; `sizes.len()` = every draft.
    choice: usize,
    updates: u64,
    pools: Vec<(f64, f64, usize)>,
}

impl MtpRuntime {
    /// # Errors
    /// [`ConfigError`]: which value to change.
    pub fn new(config: MtpConfig) -> Result<Self, ConfigError> {
        let too_small =
            |what, value: u32, least: u32| ConfigError::TooSmall { what, value: value.into(), least: least.into() };
        if config.max_draft == 0 {
            return Err(too_small("the drafts of a sequence", 0, 1));
        }
        let mut previous = 0;
        for &size in &config.sizes {
            if size <= previous {
                return Err(too_small("a step size (they rise)", size, previous + 1));
            }
            previous = size;
        }
        if config.sizes.is_empty() {
            return Err(too_small("the number of step sizes", 0, 1));
        }
        let (sizes, places) = (config.sizes.len(), config.max_draft as usize);
        Ok(Self {
            times: vec![Time::default(); sizes],
            cost: vec![0.0; sizes],
            verified: vec![0.0; places],
            accepted: vec![0.0; places],
            choice: sizes,
            updates: 0,
            pools: Vec::with_capacity(sizes),
            config,
        })
    }

    /// Takes in what a completed step verified and accepted by place: `drafted[k]` sequences had a draft `k`, `accepted[k]` of
    /// them accepted it and all before it.
    pub fn note_accepted(&mut self, drafted: &[u32], accepted: &[u32]) {
        for (place, (&drafted, &accepted)) in drafted.iter().zip(accepted).take(self.verified.len()).enumerate() {
            if drafted > 0 {
                // A step with few drafts says little and makes little be forgotten.
                self.verified[place] = self.verified[place] * MEMORY + f64::from(drafted);
                self.accepted[place] = self.accepted[place] * MEMORY + f64::from(accepted.min(drafted));
            }
        }
    }

    /// Estimated probability that draft `place` of a sequence makes a token; never rises with the place.
    pub fn survival(&self, place: usize) -> f64 {
        (0..=place.min(self.verified.len() - 1))
            .map(|k| (self.accepted[k] + PRIOR / 2.0) / (self.verified[k] + PRIOR))
            .fold(1.0, f64::min)
    }

    /// Expected time of a step of `rows` rows, in the unit of what was fed; 0 while nothing was.
    pub fn expected_time(&self, rows: u32) -> f64 {
        let sizes = &self.config.sizes;
        let at = sizes.partition_point(|&size| size < rows);
        if let Some(&cost) = self.cost.get(at) {
            return cost;
        }
        // Larger than any size: as from the two largest on.
        let (last, largest) = (self.cost[sizes.len() - 1], f64::from(sizes[sizes.len() - 1]));
        last * f64::from(rows) / largest
    }

    /// Takes in a completed step of `num_seqs` decoding sequences and nothing else, of `graph_size` rows, whose forward (with the
    /// drafter's) and sampling took so long; gives the budget of draft rows for a step of as many sequences. Times that are no
    /// positive numbers are left out.
    pub fn update(&mut self, num_seqs: u32, graph_size: u32, forward_ms: f64, sampler_ms: f64) -> u32 {
        self.updates += 1;
        self.measure(graph_size, forward_ms + sampler_ms);
        let full = num_seqs.saturating_mul(self.config.max_draft);
        if num_seqs == 0 || num_seqs <= self.config.full_below || self.cost[0] <= 0.0 {
            self.choice = self.config.sizes.len();
            return full;
        }
        let best = self.best(num_seqs, full);
        let current = self.budget_of(self.choice, num_seqs, full);
        if self.rate(num_seqs, self.budget_of(best, num_seqs, full)) > self.rate(num_seqs, current) * HYSTERESIS {
            self.choice = best;
        }
        let budget = self.budget_of(self.choice, num_seqs, full);
        let every = u64::from(self.config.explore_every);
        if every > 0 && self.updates.is_multiple_of(every) {
            return self.explore(num_seqs, full);
        }
        budget
    }

    fn measure(&mut self, rows: u32, time: f64) {
        let at = self.config.sizes.partition_point(|&size| size < rows);
        if !(time.is_finite() && time > 0.0) || at == self.times.len() || rows == 0 {
            return;
        }
        let slot = &mut self.times[at];
        slot.seen = self.updates;
        if slot.samples == 0 {
            (slot.mean, slot.samples) = (time, 1);
        } else {
            let far = |time: f64| (time / slot.mean).ln().abs();
            if far(time) <= OUTLIER.ln() {
                slot.samples = slot.samples.saturating_add(1);
                slot.refused = 0;
                // The first ones count alike, later ones fade.
                let weight = TIME_WEIGHT.max(1.0 / f64::from(slot.samples));
                slot.mean += weight * (time.clamp(slot.mean / CLAMP, slot.mean * CLAMP) - slot.mean);
            } else if slot.samples < CHANGED && time < slot.mean {
                // What came first was the outlier: first uses of a size are slow.
                (slot.mean, slot.samples, slot.refused) = (time, 1, 0);
            } else {
                if slot.refused == 0 || far(time) < far(slot.closest) {
                    slot.closest = time;
                }
                slot.refused += 1;
                if slot.refused < CHANGED {
                    return;
                }
                // The other sizes will have changed with it: what is left of the difference shows when they are measured.
                let ratio = slot.closest / slot.mean;
                for other in &mut self.times {
                    (other.mean, other.refused) = (other.mean * ratio, 0);
                }
            }
        }
        self.fit();
    }

    /// The never falling table closest to the measured times, and a guess where there are none.
    fn fit(&mut self) {
        let Self { config, times, cost, pools, .. } = self;
        pools.clear();
        for time in times.iter().filter(|t| t.samples > 0) {
            // Neighbours in the wrong order share their weighted mean.
            let mut pool = (time.mean, f64::from(time.samples.min(32)), 1);
            while let Some(&(mean, weight, count)) = pools.last()
                && mean > pool.0
            {
                pools.pop();
                pool = ((mean * weight + pool.0 * pool.1) / (weight + pool.1), weight + pool.1, count + pool.2);
            }
            pools.push(pool);
        }
        let mut values = pools.iter().flat_map(|&(mean, _, count)| std::iter::repeat_n(mean, count));
        let mut below: Option<(f64, f64)> = None;
        let mut gap = 0;
        for at in 0..times.len() {
            if times[at].samples == 0 {
                continue;
            }
            let Some(value) = values.next() else { break };
            let size = f64::from(config.sizes[at]);
            // Half of a step is taken to be the same for any size where one side is unknown, else a line between the two.
            let (from, start) = below.unwrap_or((0.0, value / 2.0));
            for (guess, &between) in cost[gap..at].iter_mut().zip(&config.sizes[gap..at]) {
                *guess = start + (value - start) * (f64::from(between) - from) / (size - from);
            }
            cost[at] = value;
            (below, gap) = (Some((size, value)), at + 1);
        }
        if let Some((size, value)) = below {
            for (guess, &larger) in cost[gap..].iter_mut().zip(&config.sizes[gap..]) {
                *guess = value * (0.5 + 0.5 * f64::from(larger) / size);
            }
        }
    }

    /// Draft rows that fill the size `choice` beside one row for each sequence.
    fn budget_of(&self, choice: usize, num_seqs: u32, full: u32) -> u32 {
        self.config.sizes.get(choice).map_or(full, |&size| size.saturating_sub(num_seqs).min(full))
    }

    /// Expected tokens per time of a step with that budget, its rows given to earlier drafts first.
    fn rate(&self, num_seqs: u32, budget: u32) -> f64 {
        let mut tokens = f64::from(num_seqs);
        let mut left = budget;
        let mut survival = 1.0f64;
        for place in 0..self.verified.len() {
            survival = survival.min((self.accepted[place] + PRIOR / 2.0) / (self.verified[place] + PRIOR));
            let rows = left.min(num_seqs);
            tokens += survival * f64::from(rows);
            left -= rows;
        }
        tokens / self.expected_time(num_seqs + budget)
    }

    /// The size with the best rate; every draft is a candidate of its own.
    fn best(&self, num_seqs: u32, full: u32) -> usize {
        let sizes = &self.config.sizes;
        let first = sizes.partition_point(|&size| size < num_seqs);
        let end = sizes.partition_point(|&size| size < num_seqs + full);
        let mut best = (sizes.len(), self.rate(num_seqs, full));
        for choice in first..end {
            let rate = self.rate(num_seqs, self.budget_of(choice, num_seqs, full));
            if rate > best.1 {
                best = (choice, rate);
            }
        }
        best.0
    }

    /// Budget of the size that was measured longest ago.
    fn explore(&self, num_seqs: u32, full: u32) -> u32 {
        let sizes = &self.config.sizes;
        let first = sizes.partition_point(|&size| size < num_seqs);
        let end = sizes.partition_point(|&size| size < num_seqs + full);
        let oldest = (first..=end.min(sizes.len() - 1)).min_by_key(|&at| self.times[at].seen);
        self.budget_of(oldest.unwrap_or(sizes.len()), num_seqs, full)
    }
}

#[cfg(test)]
// A test that meets an error stops there.
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A machine whose steps cost stairs, and sequences that accept drafts with fixed probabilities.
    struct Plant {
        stairs: Vec<(u32, f64)>,
        survival: Vec<f64>,
        noise: f64,
        state: u64,
    }

    impl Plant {
        fn new(noise: f64, seed: u64) -> Self {
            let stairs =
                vec![(8, 2.0), (16, 2.05), (32, 2.2), (64, 2.9), (96, 3.0), (128, 4.4), (192, 4.6), (256, 6.8)];
            Self { stairs, survival: vec![0.8, 0.62, 0.45, 0.3, 0.15], noise, state: seed }
        }

        fn sizes(&self) -> Vec<u32> {
            self.stairs.iter().map(|s| s.0).collect()
        }

        fn uniform(&mut self) -> f64 {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }

        fn size(&self, rows: u32) -> (u32, f64) {
            let largest = self.stairs[self.stairs.len() - 1];
            let beyond = || (rows, largest.1 * f64::from(rows) / f64::from(largest.0));
            self.stairs.iter().copied().find(|s| s.0 >= rows).unwrap_or_else(beyond)
        }

        /// Tokens per time of a budget, without noise.
        fn rate(&self, seqs: u32, budget: u32) -> f64 {
            let mut left = budget;
            let mut tokens = f64::from(seqs);
            for s in &self.survival {
                let rows = left.min(seqs);
                tokens += s * f64::from(rows);
                left -= rows;
            }
            tokens / self.size(seqs + budget).1
        }

        fn oracle(&self, seqs: u32) -> f64 {
            (0..=seqs * self.survival.len() as u32).map(|b| self.rate(seqs, b)).fold(0.0, f64::max)
        }

        /// Runs a step with that budget; the next one's.
        fn step(&mut self, runtime: &mut MtpRuntime, seqs: u32, budget: u32) -> u32 {
            let (mut drafted, mut accepted) = ([0u32; 5], [0u32; 5]);
            for seq in 0..seqs {
                let rows = (budget + seqs - 1 - seq) / seqs;
                let u = self.uniform();
                for place in 0..(rows as usize).min(5) {
                    drafted[place] += 1;
                    accepted[place] += u32::from(u < self.survival[place]);
                }
            }
            let (size, time) = self.size(seqs + budget);
            let mut factor = 1.0 + self.noise * (self.uniform() + self.uniform() + self.uniform() - 1.5);
            if self.noise > 0.0 && self.uniform() < 0.02 {
                factor *= 10.0;
            }
            runtime.note_accepted(&drafted, &accepted);
            runtime.update(seqs, size, 0.9 * time * factor, 0.1 * time * factor)
        }
    }

    fn runtime(plant: &Plant) -> MtpRuntime {
        MtpRuntime::new(MtpConfig { max_draft: 5, sizes: plant.sizes(), full_below: 4, explore_every: 50 }).unwrap()
    }

    #[test]
    fn the_budget_comes_within_two_percent_of_the_oracle_and_stays() {
        for noise in [0.0, 0.1] {
            for seqs in [6, 12, 16, 30, 48, 64, 100] {
                let mut plant = Plant::new(noise, u64::from(seqs));
                let mut runtime = runtime(&plant);
                let mut budget = 0;
                for _ in 0..2000 {
                    budget = plant.step(&mut runtime, seqs, budget);
                }
                let (mut reached, mut changes, mut previous, steps) = (0.0, 0, runtime.choice, 2000);
                for _ in 0..steps {
                    reached += plant.rate(seqs, budget);
                    budget = plant.step(&mut runtime, seqs, budget);
                    changes += u32::from(runtime.choice != previous);
                    previous = runtime.choice;
                }
                let share = reached / f64::from(steps) / plant.oracle(seqs);
                assert!(share > 0.98, "{seqs} sequences, noise {noise}: {share} of the oracle");
                assert!(changes <= steps / 50, "{seqs} sequences, noise {noise}: {changes} changes");
            }
        }
    }

    #[test]
    fn it_follows_a_load_that_changes_and_a_machine_that_slows_down() {
        let mut plant = Plant::new(0.05, 3);
        let mut runtime = runtime(&plant);
        let mut budget = 0;
        for phase in 0..6 {
            let seqs = [12, 64, 30, 100, 16, 48][phase];
            if phase == 3 {
                for stair in &mut plant.stairs {
                    stair.1 *= 6.0;
                }
            }
            for _ in 0..1500 {
                budget = plant.step(&mut runtime, seqs, budget);
            }
            let mut reached = 0.0;
            for _ in 0..500 {
                reached += plant.rate(seqs, budget) / 500.0;
                budget = plant.step(&mut runtime, seqs, budget);
            }
            assert!(reached > 0.97 * plant.oracle(seqs), "{seqs}: {reached} of {}", plant.oracle(seqs));
        }
    }

    #[test]
    fn few_sequences_verify_everything_and_none_nothing() {
        let plant = Plant::new(0.0, 1);
        let mut runtime = runtime(&plant);
        assert_eq!(runtime.update(4, 8, 1.0, 0.1), 20);
        assert_eq!(runtime.update(0, 0, 1.0, 0.1), 0);
        assert_eq!(runtime.update(3, 8, f64::NAN, 0.1), 15);
    }

    #[test]
    fn times_that_are_no_times_and_single_outliers_are_left_out() {
        let plant = Plant::new(0.0, 1);
        let mut runtime = runtime(&plant);
        for _ in 0..20 {
            runtime.update(10, 16, 2.0, 0.0);
        }
        for bad in [f64::NAN, f64::INFINITY, -1.0, 0.0, 90.0] {
            runtime.update(10, 16, bad, 0.0);
            assert!((runtime.expected_time(16) - 2.0).abs() < 1e-9, "{bad}");
        }
        for _ in 0..10 {
            runtime.update(10, 16, 20.0, 0.0);
        }
        assert!((runtime.expected_time(16) - 20.0).abs() < 1e-9, "what lasts is no outlier");
    }

    #[test]
    fn the_table_never_falls_whatever_was_measured() {
        let plant = Plant::new(0.0, 1);
        let mut runtime = runtime(&plant);
        let times = [(16, 5.0), (64, 3.0), (128, 4.0), (8, 4.5), (192, 2.0)];
        for (rows, time) in times {
            for _ in 0..8 {
                runtime.update(6, rows, time, 0.0);
            }
            let table: Vec<f64> = (1..400).map(|rows| runtime.expected_time(rows)).collect();
            assert!(table.windows(2).all(|w| w[0] <= w[1] + 1e-9) && table[0] > 0.0, "{table:?}");
        }
    }

    #[test]
    fn survival_never_rises_with_the_place() {
        let plant = Plant::new(0.0, 1);
        let mut runtime = runtime(&plant);
        runtime.note_accepted(&[100, 50, 2], &[40, 45, 2]);
        let survival: Vec<f64> = (0..5).map(|k| runtime.survival(k)).collect();
        assert!(survival.windows(2).all(|w| w[0] >= w[1]), "{survival:?}");
        assert!((survival[0] - 41.0 / 102.0).abs() < 1e-9);
    }

    #[test]
    fn impossible_configurations_are_refused() {
        let sizes = |sizes: &[u32]| MtpConfig { max_draft: 2, sizes: sizes.to_vec(), full_below: 4, explore_every: 0 };
        assert!(MtpRuntime::new(sizes(&[1, 2, 4])).is_ok());
        assert!(MtpRuntime::new(sizes(&[])).is_err());
        assert!(MtpRuntime::new(sizes(&[2, 2])).is_err());
        assert!(MtpRuntime::new(sizes(&[0])).is_err());
        assert!(MtpRuntime::new(MtpConfig { max_draft: 0, ..sizes(&[1]) }).is_err());
        let own = MtpConfig::with_rows(4, 300);
        assert!(own.sizes.last() == Some(&300) && MtpRuntime::new(own).is_ok());
    }
}
