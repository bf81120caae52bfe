//! How much memory this machine still has for us.
//!
//! Where the system hands out more than it has, taking memory that is not there ends some process, not necessarily this one: so it is looked
//! before.

use std::path::Path;

use crate::error::Error;
use crate::sizes::in_words;

/// Limits of a control group and what of them is used, of either version, where a container has its own mounted.
const GROUPS: [(&str, &str); 2] = [
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
];

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(Path::new(path)).ok()?.trim().parse().ok()
}

/// What `/proc/meminfo` says is available, in bytes.
fn available_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Bytes that can be taken without ending somebody, within the control group's limit; none where the system does not say.
pub fn available() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_of(&text));
    let group = |(limit, used): (&str, &str)| Some(number(limit)?.saturating_sub(number(used)?));
    machine.into_iter().chain(GROUPS.into_iter().filter_map(group)).min()
}

/// Whether an arena may be taken where so much is left.
///
/// # Errors
/// [`Error::Invalid`] if not.
pub fn fits(arena: u64, left: Option<u64>) -> Result<(), Error> {
    let Some(left) = left.filter(|&left| arena > left) else { return Ok(()) };
    let (arena, left) = (in_words(arena), in_words(left));
    Err(Error::Invalid(format!(
        "arena: {arena} is more than the {left} of memory that this machine has left: give less"
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_arena_takes_no_more_than_there_is() {
        assert!(fits(1 << 30, Some(1 << 30)).is_ok() && fits(1 << 40, None).is_ok());
        let said = fits(64 << 30, Some(21 << 30)).unwrap_err().to_string();
        assert!(said.starts_with("arena: 64 GiB is more than the 21 GiB"), "{said}");
    }

    #[test]
    fn what_is_available_is_read() {
        assert_eq!(available_of("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(available_of("MemTotal: 9 kB\n"), None);
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
