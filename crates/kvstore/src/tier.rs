//! What an engine sees of the store: one thing behind one address, with flat buffers for the bytes of many objects.
//!
//! Owns: what an address means, how objects lie in an engine's buffers, letters for what became of them.
//! Never touches: how objects are kept ([`crate::store`]), what their bytes mean.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::checksum::checksum;
use crate::client::MAX_TENANT;
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Record;
use crate::media::local::{Local, LocalConfig};
use crate::object::{Class, Meta, TenantId};
use crate::root::Root;
use crate::store::{Found, Put, Rule, Store, StoreConfig, Upkeep, Want};
use crate::wire::Role;

/// Pause between two rounds of upkeep of an embedded store.
const TEND: Duration = Duration::from_secs(1);

/// Who asks, and how much a store of its own may take.
#[derive(Clone)]
pub struct TierConfig {
    /// Name of the tenant; empty: the public one.
    pub tenant: String,
    /// What its keys mean apart from the size of their blocks; zero: not told. Only servers are told.
    pub fingerprint: [u8; 16],
    /// Tokens of the blocks that its keys name; 0: not told. Only servers are told.
    pub block_tokens: u32,
    /// Tokens of roles, for servers that want them.
    pub tokens: Vec<(Role, Vec<u8>)>,
    /// Whether bytes of one name may differ between writers: the first write stays, without an alarm.
    pub first_stays: bool,
    /// Of an embedded store.
    pub store: StoreConfig,
    /// Of an embedded store.
    pub local: LocalConfig,
}

/// A store in this process.
struct Embedded {
    store: Arc<Store>,
    tenant: TenantId,
    _upkeep: Upkeep,
}

/// The store behind an address. All calls are safe from any thread.
pub struct Tier {
    embedded: Embedded,
    rule: Rule,
}

/// Objects to be put, as an engine has them: `keys[i]` has `lengths[i]` bytes, which follow those of `keys[i - 1]` in `data`.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Block or slice: all of one kind.
    pub kind: Kind,
    /// Their names.
    pub keys: &'a [Key],
    /// Of blocks: the one before it in its chain; zero for the first. Slices have none to name: it is their own block.
    pub parents: &'a [Key],
    /// Their bytes.
    pub lengths: &'a [u32],
    /// All bytes; there may be more.
    pub data: &'a [u8],
    /// What kind of traffic they came with.
    pub class: Class,
}

impl Batch<'_> {
    fn check(&self) -> Result<(), Error> {
        let count = self.keys.len();
        let parents = if self.kind == Kind::Slice { 0 } else { count };
        if self.lengths.len() != count || (self.parents.len() != parents && self.parents.len() != count) {
            return Err(Error::Invalid(format!(
                "{count} keys, {} parents and {} lengths: give one of each for an object",
                self.parents.len(),
                self.lengths.len()
            )));
        }
        let total: u64 = self.lengths.iter().map(|&len| u64::from(len)).sum();
        if total > self.data.len() as u64 {
            return Err(Error::Invalid(format!("{total} bytes are announced, the buffer has {}", self.data.len())));
        }
        Ok(())
    }

    fn parent(&self, at: usize) -> Option<Key> {
        match self.kind {
            Kind::Slice => Some(self.keys[at]),
            Kind::Block => self.parents.get(at).copied().filter(|&parent| parent != Key(0)),
        }
    }
}

/// One letter for what became of a put.
fn letter(put: &Put) -> u8 {
    match put {
        Put::Stored => b's',
        Put::Exists => b'e',
        Put::Conflict => b'c',
        Put::NoParent => b'p',
        Put::Failed(_) => b'f',
    }
}

impl Tier {
    /// Opens what `address` names: `dir:/path`, a store in this process.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is no address or a configuration out of bounds, and those of a store's open.
    pub fn open(address: &str, config: TierConfig) -> Result<Self, Error> {
        if config.tenant.len() > MAX_TENANT {
            return Err(Error::Invalid(format!("a tenant's name has {MAX_TENANT} bytes at most")));
        }
        let rule = if config.first_stays { Rule::FirstStays } else { Rule::Exact };
        let Some(path) = address.strip_prefix("dir:").filter(|path| !path.is_empty()) else {
            return Err(Error::Invalid(format!("{address:?} is no address of a KV store: give dir:/path")));
        };
        let root = Root::open(Path::new(path))?;
        let media = Arc::new(Local::open(&root, config.local)?);
        let store = Arc::new(Store::open(root, media, config.store)?);
        let tenant = if config.tenant.is_empty() { TenantId(0) } else { store.tenant(&config.tenant)?.id };
        let upkeep = Upkeep::start(&store, TEND)?;
        Ok(Self { embedded: Embedded { store, tenant, _upkeep: upkeep }, rule })
    }

    /// What is there of a chain, and how many of its first blocks are in memory shared with this process.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain that is too long, [`Error::Unavailable`] where nobody answers in time.
    pub fn check(&self, chain: &[Key], slices: usize) -> Result<(Found, usize), Error> {
        Ok((self.embedded.store.check(self.embedded.tenant, chain, slices)?, 0))
    }

    /// Reads whole objects of `each` bytes, object `i` to `into[i * each..]`: which of them are there. One of another length is not.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a buffer that is too short, [`Error::Unavailable`] where nobody answers in time.
    pub fn get(&self, kind: Kind, keys: &[Key], into: &mut [u8], each: usize) -> Result<Vec<bool>, Error> {
        let needed = keys.len().checked_mul(each);
        if each == 0 || needed.is_none_or(|needed| needed > into.len()) {
            return Err(Error::Invalid(format!(
                "{} objects of {each} bytes do not fit a buffer of {}",
                keys.len(),
                into.len()
            )));
        }
        let Embedded { store, tenant, .. } = &self.embedded;
        let mut hits = vec![false; keys.len()];
        let mut wants = Vec::with_capacity(keys.len());
        let mut at = Vec::with_capacity(keys.len());
        for (index, (&key, into)) in keys.iter().zip(into.chunks_exact_mut(each)).enumerate() {
            let id = ObjectId { kind, key };
            // A part of an object would not be held to its checksum.
            if store.length(*tenant, id).is_none_or(|len| len as usize == each) {
                wants.push(Want { id, start: 0, into });
                at.push(index);
            }
        }
        for (&index, got) in at.iter().zip(store.get(*tenant, &mut wants)) {
            hits[index] = got.is_hit();
        }
        Ok(hits)
    }

    /// Writes objects, one letter for each: `s`tored, `e`xists, `c`onflict, no `p`arent, `f`ailed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for buffers that do not fit each other, [`Error::Unavailable`] where nobody answers in time.
    pub fn put(&self, batch: &Batch<'_>) -> Result<Vec<u8>, Error> {
        batch.check()?;
        let Embedded { store, tenant, .. } = &self.embedded;
        let written = store.now();
        let mut rest = batch.data;
        let pieces: Vec<[&[u8]; 1]> = batch
            .lengths
            .iter()
            .map(|&len| {
                let (bytes, behind) = rest.split_at(len as usize);
                rest = behind;
                [bytes]
            })
            .collect();
        let records: Vec<Record<'_>> = pieces
            .iter()
            .enumerate()
            .map(|(at, pieces)| Record {
                meta: Meta {
                    id: ObjectId { kind: batch.kind, key: batch.keys[at] },
                    parent: batch.parent(at),
                    tenant: *tenant,
                    class: batch.class,
                    len: batch.lengths[at],
                    checksum: checksum(pieces[0]),
                    written,
                },
                pieces,
            })
            .collect();
        Ok(store.put(&records, self.rule).iter().map(letter).collect())
    }

    /// Waits until what was put is durable: whether it is, by then.
    ///
    /// # Errors
    /// [`Error::Unavailable`] where nobody answers in time.
    pub fn flush(&self, _until: Instant) -> Result<bool, Error> {
        // A put of an embedded store is durable when it returns.
        Ok(true)
    }

    /// Names and values of what is counted.
    pub fn stats(&self) -> Vec<(&'static str, u64)> {
        let stats = self.embedded.store.stats();
        let sizes = [
            ("blocks", stats.blocks),
            ("slices", stats.slices),
            ("bytes", stats.bytes),
            ("live", stats.live),
            ("sealed", stats.sealed),
            ("segments", stats.segments),
            ("memory", stats.memory),
        ];
        sizes.into_iter().chain(stats.counts.each()).collect()
    }

    /// Takes no more writes and leaves the store as a clean end does. Reads go on until this is dropped.
    ///
    /// # Errors
    /// As [`Store::drain`].
    pub fn close(&self) -> Result<(), Error> {
        self.embedded.store.drain()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn config() -> TierConfig {
        TierConfig {
            tenant: "one".into(),
            fingerprint: [0; 16],
            block_tokens: 0,
            tokens: Vec::new(),
            first_stays: false,
            store: StoreConfig { capacity: 1 << 30, ..StoreConfig::default() },
            local: LocalConfig::default(),
        }
    }

    fn batch<'a>(keys: &'a [Key], parents: &'a [Key], lengths: &'a [u32], data: &'a [u8]) -> Batch<'a> {
        Batch { kind: Kind::Block, keys, parents, lengths, data, class: Class::Agent }
    }

    #[test]
    fn a_directory_is_a_store_that_outlives_its_tier() {
        let base = tempfile::tempdir().unwrap();
        let address = format!("dir:{}", base.path().join("kv").display());
        let keys = [Key(1), Key(2), Key(3)];
        let data: Vec<u8> = (0..300u16).map(|at| at as u8).collect();
        {
            let tier = Tier::open(&address, config()).unwrap();
            let put = batch(&keys, &[Key(0), Key(1), Key(2)], &[100, 100, 100], &data);
            assert_eq!(tier.put(&put).unwrap(), b"sss");
            assert_eq!(tier.put(&put).unwrap(), b"eee");
            let orphan = batch(&[Key(9)], &[Key(8)], &[100], &data);
            assert_eq!(tier.put(&orphan).unwrap(), b"p");
            let other = batch(&keys[..1], &[Key(0)], &[100], &data[1..]);
            assert_eq!(tier.put(&other).unwrap(), b"c");
            let slice = Batch { kind: Kind::Slice, ..batch(&keys[1..2], &[], &[7], &data) };
            assert_eq!(tier.put(&slice).unwrap(), b"s");
            assert!(matches!(Tier::open(&address, config()), Err(Error::Unavailable(_))));
            tier.close().unwrap();
        }
        let tier = Tier::open(&address, config()).unwrap();
        let (found, shared) = tier.check(&[Key(1), Key(2), Key(3), Key(4)], 4).unwrap();
        assert_eq!((found, shared), (Found { blocks: 3, slices: vec![1] }, 0));
        let mut into = vec![0; 400];
        let hits = tier.get(Kind::Block, &[Key(3), Key(7), Key(1)], &mut into, 100).unwrap();
        assert_eq!(hits, [true, false, true]);
        assert_eq!((&into[..100], &into[200..300]), (&data[200..], &data[..100]));
        // Of another length: a miss, however short or long.
        for each in [99, 101] {
            assert_eq!(tier.get(Kind::Block, &[Key(1)], &mut into, each).unwrap(), [false]);
        }
        assert_eq!(tier.stats().iter().find(|(name, _)| *name == "blocks"), Some(&("blocks", 3)));
    }

    #[test]
    fn buffers_are_held_to_their_lengths_before_anything_is_read_or_written() {
        let base = tempfile::tempdir().unwrap();
        let tier = Tier::open(&format!("dir:{}", base.path().display()), config()).unwrap();
        let refused = |put: Batch<'_>| assert!(matches!(tier.put(&put), Err(Error::Invalid(_))));
        refused(batch(&[Key(1)], &[Key(0)], &[11], &[0; 10]));
        refused(batch(&[Key(1)], &[], &[10], &[0; 10]));
        refused(batch(&[Key(1)], &[Key(0)], &[5, 5], &[0; 10]));
        refused(batch(&[Key(1), Key(2)], &[Key(0), Key(1)], &[u32::MAX, u32::MAX], &[0; 10]));
        for (keys, each, room) in [(2, 50, 99), (1, 0, 10), (2, usize::MAX, 10)] {
            assert!(tier.get(Kind::Block, &vec![Key(1); keys], &mut vec![0; room], each).is_err());
        }
        assert_eq!(tier.stats().iter().find(|(name, _)| *name == "stored"), Some(&("stored", 0)));
    }

    #[test]
    fn what_is_no_address_is_refused_by_name() {
        for address in ["", "dir:", "/tmp/x", "file:/tmp/x", "dir"] {
            let refused = Tier::open(address, config()).err().unwrap();
            assert!(refused.to_string().contains("no address of a KV store"), "{refused}");
        }
        let long = TierConfig { tenant: "t".repeat(MAX_TENANT + 1), ..config() };
        assert!(Tier::open("dir:/tmp/x", long).is_err());
    }
}
