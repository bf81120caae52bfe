//! What is remembered of entries that were evicted: 8 bytes each, never more of them than there are entries.
//!
//! Sets of eight, one cache line each; where a set is full the lowest rank gives way, so what is remembered longest is what was worth most.
//! An evicted key is known by 32 bits of it and its place: of 10 M strangers fewer than a thousand are taken for a ghost, and then only their
//! rank is wrong.

use crate::key::Key;

/// Ghosts of a set.
const WAYS: usize = 8;

/// Parts that grow one by one, so that no growth moves more than a 16th.
const PARTS: usize = 16;

/// Fingerprint and rank; rank 0 is an empty place.
#[derive(Clone, Copy, Debug, Default)]
struct Ghost {
    fingerprint: u32,
    rank: u32,
}

type Set = [Ghost; WAYS];

/// The ghosts of one class.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    parts: [Box<[Set]>; PARTS],
}

// Other bits than those that lead the index to a table and within it.
fn fingerprint(key: Key) -> u32 {
    (key.0 >> 64) as u32
}

fn part(key: Key) -> usize {
    (key.0 >> 96) as usize % PARTS
}

fn set(sets: &mut [Set], fingerprint: u32) -> Option<&mut Set> {
    let at = (u64::from(fingerprint) * sets.len() as u64) >> 32;
    sets.get_mut(at as usize)
}

fn remember(sets: &mut [Set], ghost: Ghost) {
    let Some(set) = set(sets, ghost.fingerprint) else { return };
    let same = set.iter().position(|other| other.rank > 0 && other.fingerprint == ghost.fingerprint);
    let lowest = (0..WAYS).min_by_key(|&way| set[way].rank).unwrap_or(0);
    match same {
        Some(way) => set[way] = ghost,
        None if set[lowest].rank < ghost.rank => set[lowest] = ghost,
        None => {}
    }
}

impl Ghosts {
    /// Remembers the rank of an evicted key, with room for at most `room` ghosts.
    pub(super) fn add(&mut self, key: Key, rank: u32, room: usize) {
        let sets = &mut self.parts[part(key)];
        let wanted = room / (WAYS * PARTS);
        if wanted > sets.len() + sets.len() / 8 || wanted < sets.len() - sets.len() / 4 {
            let old = std::mem::replace(sets, vec![Set::default(); wanted].into_boxed_slice());
            for ghost in old.iter().flatten().filter(|ghost| ghost.rank > 0) {
                remember(sets, *ghost);
            }
        }
        remember(sets, Ghost { fingerprint: fingerprint(key), rank: rank.max(1) });
    }

    /// The rank of a key that was evicted, which is forgotten with this.
    pub(super) fn take(&mut self, key: Key) -> Option<u32> {
        let fingerprint = fingerprint(key);
        let set = set(&mut self.parts[part(key)], fingerprint)?;
        let found = set.iter_mut().find(|ghost| ghost.rank > 0 && ghost.fingerprint == fingerprint)?;
        Some(std::mem::take(found).rank)
    }

    /// Bytes held.
    pub(super) fn memory(&self) -> usize {
        self.parts.iter().map(|sets| size_of_val::<[Set]>(sets)).sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn key(number: u32) -> Key {
        Key(u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    #[test]
    fn they_are_bounded_and_the_lowest_go() {
        let mut ghosts = Ghosts::default();
        let room = 4096;
        for number in 1..=20_000 {
            ghosts.add(key(number), number, room);
        }
        assert!(ghosts.memory() <= room * 8);
        let kept: Vec<u32> = (1..=20_000).filter(|&number| ghosts.take(key(number)) == Some(number)).collect();
        assert!(kept.len() <= room && kept.len() > room * 9 / 10, "{}", kept.len());
        let late = kept.iter().filter(|&&number| number > 20_000 - 2 * room as u32).count();
        assert!(late > kept.len() * 95 / 100, "{late} of {}", kept.len());
        assert_eq!(ghosts.take(key(20_000)), None, "taken once");
    }

    #[test]
    fn growth_forgets_little_and_shrinking_keeps_the_best() {
        let mut ghosts = Ghosts::default();
        for number in 1..=10_000 {
            ghosts.add(key(number), number, 2 * number as usize);
        }
        let memory = ghosts.memory();
        // Lower ranks than those that are remembered: nothing comes in, and the room is halved twice on the way.
        for number in 10_001..=20_000 {
            ghosts.add(key(number), 1, 5_000);
        }
        assert!(ghosts.memory() <= 5_000 * 8 && ghosts.memory() < memory);
        let kept = (1..=10_000).filter(|&number| ghosts.take(key(number)) == Some(number)).count();
        assert!(kept > 4_400, "{kept}");
    }

    #[test]
    fn without_room_nothing_is_remembered() {
        let mut ghosts = Ghosts::default();
        ghosts.add(key(1), 5, 0);
        assert_eq!(ghosts.take(key(1)), None);
        assert_eq!(ghosts.memory(), 0);
    }
}
