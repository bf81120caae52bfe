//! How long things took, in buckets.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper ends of the buckets, microseconds: from what a check takes in memory to what ends a patient client's wait.
const ENDS: [u64; 18] = [
    10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 10_000_000,
];

/// Counts of times by length; the last one is of those above every end.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; ENDS.len() + 1],
    nanos: AtomicU64,
}

impl Histogram {
    /// One more.
    pub fn add(&self, time: Duration) {
        let micros = time.as_nanos().div_ceil(1000);
        let at = ENDS.partition_point(|&end| u128::from(end) < micros);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Lines of Prometheus' text format, `labels` (`a="b"`) on each.
    pub fn write(&self, to: &mut String, name: &str, labels: &str) {
        let mut sum = 0;
        for (at, count) in self.counts.iter().enumerate() {
            sum += count.load(Ordering::Relaxed);
            let end = ENDS.get(at).map_or_else(|| "+Inf".to_owned(), |&end| (end as f64 / 1e6).to_string());
            // Writing to a string cannot fail.
            let _ = writeln!(to, "{name}_bucket{{{labels},le=\"{end}\"}} {sum}");
        }
        let seconds = self.nanos.load(Ordering::Relaxed) as f64 / 1e9;
        let _ = writeln!(to, "{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {sum}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_buckets_that_end_at_or_above_it() {
        let histogram = Histogram::default();
        for micros in [0, 10, 11, 1000, 3_000_000, 60_000_000] {
            histogram.add(Duration::from_micros(micros));
        }
        let mut text = String::new();
        histogram.write(&mut text, "t", "op=\"check\"");
        for line in [
            "t_bucket{op=\"check\",le=\"0.00001\"} 2",
            "t_bucket{op=\"check\",le=\"0.000025\"} 3",
            "t_bucket{op=\"check\",le=\"0.001\"} 4",
            "t_bucket{op=\"check\",le=\"2.5\"} 4",
            "t_bucket{op=\"check\",le=\"10\"} 5",
            "t_bucket{op=\"check\",le=\"+Inf\"} 6",
            "t_sum{op=\"check\"} 63.001021",
            "t_count{op=\"check\"} 6",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        // Cumulative, and one line for each end.
        assert_eq!(text.lines().count(), ENDS.len() + 3);
    }
}
