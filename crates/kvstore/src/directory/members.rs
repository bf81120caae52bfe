//! Which entry point owns a key: the one with the highest weight of (entry point, key). When the set changes, only keys of those that came or
//! went change their owner.

use crate::checksum::checksum;
use crate::error::Error;
use crate::key::Key;

/// The entry points that share a table, up or down: the cut follows the list, not their health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    names: Vec<String>,
    seeds: Vec<u64>,
}

/// The keys of a chain that one entry point owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which one, by its place in the list.
    pub owner: usize,
    /// Its keys, in the order of the chain.
    pub keys: Vec<Key>,
    /// Where they stand in the chain.
    pub positions: Vec<usize>,
}

impl Members {
    /// Entry points by names that are the same for every client; their order does not matter for who owns what.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty list, an empty name or a name given twice.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, Error> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        if names.is_empty() || names.iter().any(String::is_empty) {
            return Err(Error::Invalid("name at least one entry point, and none with an empty name".into()));
        }
        if let Some(twice) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            return Err(Error::Invalid(format!("entry point {} is named twice", twice.1)));
        }
        let seeds = names.iter().map(|name| checksum(name.as_bytes())).collect();
        Ok(Self { names, seeds })
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Never: there is at least one.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Their names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Who owns a key, by its place in the list.
    pub fn owner(&self, key: Key) -> usize {
        let weight = |&at: &usize| (weight(self.seeds[at], key), self.seeds[at]);
        (0..self.len()).max_by_key(weight).unwrap_or(0)
    }

    /// A chain cut by owner: one part for each entry point that owns any of it, in the order of their first keys.
    pub fn cut(&self, keys: &[Key]) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut part_of = vec![usize::MAX; self.len()];
        for (position, &key) in keys.iter().enumerate() {
            let owner = self.owner(key);
            if part_of[owner] == usize::MAX {
                part_of[owner] = parts.len();
                parts.push(Part { owner, keys: Vec::new(), positions: Vec::new() });
            }
            let part = &mut parts[part_of[owner]];
            part.keys.push(key);
            part.positions.push(position);
        }
        parts
    }

    /// For each block of a chain its nearest ancestor with the same owner: what its record names as parent.
    pub fn parents(&self, keys: &[Key]) -> Vec<Option<Key>> {
        let mut last = vec![None; self.len()];
        keys.iter().map(|&key| last[self.owner(key)].replace(key)).collect()
    }
}

// Both halves of the key take part; multiplication folded to 64 bits mixes them with the name.
fn weight(seed: u64, key: Key) -> u64 {
    let (low, high) = (key.0 as u64, (key.0 >> 64) as u64);
    let folded = u128::from(low ^ seed) * u128::from(high ^ seed.rotate_left(32) | 1);
    let mut word = (folded as u64) ^ ((folded >> 64) as u64) ^ seed;
    word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    word ^ (word >> 33)
}
