//! Time as the store counts it: forward only, whatever the machine's clock does.
//!
//! While a store is open its time moves with the monotonic clock, so that a jump of the wall clock neither ends leases nor lives. At an
//! open the wall clock counts only where it is believable: not behind what the store has already seen, and not further ahead than a store
//! stays closed. Otherwise time goes on where it stood.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

/// Longest time between two opens that is believed, seconds: 30 days.
pub const LONGEST_REST: u32 = 30 * 24 * 3600;

/// Where times come from. Tests bring their own.
pub trait Clock: Send + Sync {
    /// Unix seconds; may jump.
    fn wall(&self) -> u32;
    /// Time since some moment; never goes back.
    fn monotonic(&self) -> Duration;
}

/// The machine's.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn wall(&self) -> u32 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
    }

    fn monotonic(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }
}

/// The time of an open store.
#[derive(Clone, Copy, Debug)]
pub struct StoreTime {
    base: u32,
    from: Duration,
}

impl StoreTime {
    /// Begins at an open; `seen` is the latest time the store knows of, 0 for a new one.
    pub fn begin(clock: &dyn Clock, seen: u32) -> Self {
        let wall = clock.wall();
        let believable = seen == 0 || wall.saturating_sub(seen) <= LONGEST_REST;
        Self { base: if believable { wall.max(seen) } else { seen }, from: clock.monotonic() }
    }

    /// Now, Unix seconds as far as the wall clock was believed.
    pub fn now(&self, clock: &dyn Clock) -> u32 {
        let passed = clock.monotonic().saturating_sub(self.from).as_secs();
        self.base.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(u32, u64);

    impl Clock for Fixed {
        fn wall(&self) -> u32 {
            self.0
        }

        fn monotonic(&self) -> Duration {
            Duration::from_secs(self.1)
        }
    }

    #[test]
    fn time_goes_forward_only_and_believably() {
        let cases = [
            (1_000_000, 0, 1_000_000),
            (1_000_000, 999_000, 1_000_000),
            (1_000, 999_000, 999_000),
            (999_000 + LONGEST_REST, 999_000, 999_000 + LONGEST_REST),
            (999_001 + LONGEST_REST, 999_000, 999_000),
            (u32::MAX, 999_000, 999_000),
        ];
        for (wall, seen, base) in cases {
            let time = StoreTime::begin(&Fixed(wall, 7), seen);
            assert_eq!(time.now(&Fixed(wall, 7)), base);
            assert_eq!(time.now(&Fixed(0, 17)), base + 10);
            assert_eq!(time.now(&Fixed(u32::MAX, 7)), base);
        }
        assert_eq!(StoreTime::begin(&Fixed(u32::MAX, 0), 0).now(&Fixed(0, u64::MAX)), u32::MAX);
    }
}
