//! Fixed buckets: recording is an index and two additions, a snapshot is a copy.

/// Buckets of a [`Histogram`].
pub const TIME_BUCKETS: usize = 24;

/// Values of [`Shares`]: tenths, and the whole.
pub const SHARE_BUCKETS: usize = 11;

/// Nanoseconds in buckets whose bounds double: bucket `i` counts values below `1024 << i`, the last one everything above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// Values in each bucket.
    pub counts: [u64; TIME_BUCKETS],
    /// Sum of the values.
    pub sum: u64,
}

impl Histogram {
    /// Counts a value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        let bucket = (u64::BITS - (value >> 10).leading_zeros()) as usize;
        self.counts[bucket.min(TIME_BUCKETS - 1)] += 1;
        self.sum = self.sum.saturating_add(value);
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// First value above bucket `index`; the last bucket has no such value.
    pub const fn bound(index: usize) -> Option<u64> {
        if index + 1 < TIME_BUCKETS { Some(1024 << index) } else { None }
    }
}

/// Parts of a whole: bucket `i` counts those from `i` tenths up, the last one the wholes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Values in each bucket.
    pub counts: [u64; SHARE_BUCKETS],
    /// Sum of the parts.
    pub part: u64,
    /// Sum of the wholes.
    pub whole: u64,
}

impl Shares {
    /// Counts a part of a whole; an empty whole is not counted.
    #[inline]
    pub fn record(&mut self, part: u64, whole: u64) {
        if whole == 0 {
            return;
        }
        let tenths = part.saturating_mul(10) / whole;
        self.counts[(tenths as usize).min(SHARE_BUCKETS - 1)] += 1;
        self.part += part;
        self.whole += whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_below_the_bound_of_its_bucket_and_not_below_the_one_before() {
        for value in [0, 1, 1023, 1024, 1025, 2047, 2048, 999_999, 1 << 32, (1 << 33) - 1, 1 << 33, u64::MAX] {
            let mut histogram = Histogram::default();
            histogram.record(value);
            let bucket = histogram.counts.iter().position(|&n| n == 1).unwrap_or(usize::MAX);
            assert!(Histogram::bound(bucket).is_none_or(|bound| value < bound), "{value}");
            assert!(bucket == 0 || Histogram::bound(bucket - 1).is_some_and(|bound| value >= bound), "{value}");
            assert_eq!((histogram.count(), histogram.sum), (1, value));
        }
        assert_eq!(Histogram::bound(TIME_BUCKETS - 1), None);
    }

    #[test]
    fn shares_fall_into_tenths_and_the_whole_has_its_own() {
        let mut shares = Shares::default();
        for part in [0, 99, 100, 999, 1000, 1001] {
            shares.record(part, 1000);
        }
        shares.record(5, 0);
        assert_eq!(shares.counts, [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!((shares.part, shares.whole), (3199, 6000));
    }
}
