//! What an engine sees of the store: one thing behind one address, with flat buffers for the bytes of many objects.
//!
//! Owns: what an address means, how objects lie in an engine's buffers, letters for what became of them.
//! Never touches: how objects are kept and where ([`crate::upstream`]), what their bytes mean.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::agent;
use crate::client::MAX_TENANT;
use crate::cluster::{Cluster, ClusterConfig};
use crate::error::Error;
use crate::index::MAX_CHAIN;
use crate::key::{Key, Kind, ObjectId};
use crate::media::local::{Local, LocalConfig};
use crate::net::Address;
use crate::object::Class;
use crate::root::Root;
use crate::store::{Rule, Store, StoreConfig, Upkeep};
use crate::tls::ClientTls;
use crate::upstream::{Embedded, Found, Load, Save, Upstream};
use crate::wire::{Outcome, Role};

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
    /// How servers are known; none: connections are plain.
    pub tls: Option<ClientTls>,
    /// Whether bytes of one name may differ between writers: the first write stays, without an alarm.
    pub first_stays: bool,
    /// Of an embedded store.
    pub store: StoreConfig,
    /// Of an embedded store.
    pub local: LocalConfig,
}

impl Default for TierConfig {
    /// Everybody's, with nothing told.
    fn default() -> Self {
        Self {
            tenant: String::new(),
            fingerprint: [0; 16],
            block_tokens: 0,
            tokens: Vec::new(),
            tls: None,
            first_stays: false,
            store: StoreConfig::default(),
            local: LocalConfig::default(),
        }
    }
}

/// The store behind an address. All calls are safe from any thread.
pub struct Tier {
    upstream: Arc<dyn Upstream>,
    /// There if it is in this process.
    own: Option<(Arc<Store>, Upkeep)>,
}

/// Objects to be put, as an engine has them: `keys[i]` has `lengths[i]` bytes, which follow those of `keys[i - 1]` in `data`.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Block or slice: all of one kind.
    pub kind: Kind,
    /// Their names; of blocks, neighbours in one chain.
    pub keys: &'a [Key],
    /// Of blocks: all keys of the chain before them, from its first block on. Slices need none.
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
        let (count, lengths) = (self.keys.len(), self.lengths.len());
        if lengths != count {
            return Err(Error::Invalid(format!("{count} keys and {lengths} lengths: give one of each for an object")));
        }
        let total: u64 = self.lengths.iter().map(|&len| u64::from(len)).sum();
        if total > self.data.len() as u64 {
            return Err(Error::Invalid(format!("{total} bytes are announced, the buffer has {}", self.data.len())));
        }
        let chain = self.parents.len() + count;
        if chain > MAX_CHAIN {
            return Err(Error::Invalid(format!("a chain of {chain} objects: give {MAX_CHAIN} at most")));
        }
        Ok(())
    }
}

/// One letter for what became of a put.
fn letter(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Stored => b's',
        Outcome::Exists => b'e',
        Outcome::Conflict => b'c',
        Outcome::NoParent => b'p',
        Outcome::Full | Outcome::Invalid | Outcome::Failed => b'f',
    }
}

fn no_address(text: &str) -> Error {
    let known = "dir:/path, tcp://host:port[,host:port], unix:/path or agent:/path";
    Error::Invalid(format!("{text:?} is no address of a KV store: give {known}"))
}

/// The entry points that an address names.
///
/// # Errors
/// [`Error::Invalid`] for what names none.
pub fn entry_points(address: &str) -> Result<Vec<Address>, Error> {
    let bad = |_| no_address(address);
    match address.strip_prefix("tcp://") {
        Some(names) => names
            .split(',')
            .map(|name| name.parse().map_err(bad))
            .map(|one| {
                one.and_then(|one| if matches!(one, Address::Tcp(_)) { Ok(one) } else { Err(no_address(address)) })
            })
            .collect(),
        None if address.starts_with("unix:") => Ok(vec![address.parse().map_err(bad)?]),
        None => Err(no_address(address)),
    }
}

impl Tier {
    /// Opens what `address` names: `dir:/path`, a store in this process; `tcp://host:port[,host:port…]` or `unix:/path`, entry points;
    /// `agent:/path`, the agent of this host.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is no address or a configuration out of bounds, and those of a store's open.
    pub fn open(address: &str, config: TierConfig) -> Result<Self, Error> {
        if config.tenant.len() > MAX_TENANT {
            return Err(Error::Invalid(format!("a tenant's name has {MAX_TENANT} bytes at most")));
        }
        match address.strip_prefix("dir:") {
            Some(path) if !path.is_empty() => Self::embedded(Path::new(path), config),
            _ => match address.strip_prefix("agent:").filter(|path| path.starts_with('/')) {
                Some(path) => Self::shared(path, config),
                None => Self::remote(entry_points(address)?, config),
            },
        }
    }

    fn embedded(path: &Path, config: TierConfig) -> Result<Self, Error> {
        let root = Root::open(path)?;
        let media = Arc::new(Local::open(&root, config.local)?);
        let store = Arc::new(Store::open(root, media, config.store)?);
        let rule = if config.first_stays { Rule::FirstStays } else { Rule::Exact };
        let upstream = Arc::new(Embedded::new(Arc::clone(&store), &config.tenant, rule)?);
        let upkeep = Upkeep::start(&store, TEND)?;
        Ok(Self { upstream, own: Some((store, upkeep)) })
    }

    fn shared(socket: &str, config: TierConfig) -> Result<Self, Error> {
        let config = agent::ClientConfig {
            tenant: config.tenant,
            fingerprint: config.fingerprint,
            block_tokens: config.block_tokens,
            first_stays: config.first_stays,
            ..agent::ClientConfig::new(socket)
        };
        Ok(Self { upstream: Arc::new(agent::Client::new(config)?), own: None })
    }

    fn remote(addresses: Vec<Address>, config: TierConfig) -> Result<Self, Error> {
        let base = ClusterConfig::new(addresses);
        let token = |role: Role| config.tokens.iter().find(|(of, _)| *of == role).map(|(_, token)| token.clone());
        let config = ClusterConfig {
            roles: base.roles.iter().map(|(role, _)| (*role, token(*role))).collect(),
            tenant: config.tenant,
            fingerprint: config.fingerprint,
            block_tokens: config.block_tokens,
            first_stays: config.first_stays,
            tls: config.tls,
            ..base
        };
        Ok(Self { upstream: Arc::new(Cluster::new(&config)?), own: None })
    }

    /// What is there of a chain.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain that is too long, [`Error::Unavailable`] where nobody answers in time.
    pub fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error> {
        self.upstream.check(chain, slices)
    }

    /// Reads whole objects of `each` bytes, object `i` to `into[i * each..]`: which of them are there. One of another length is not.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a buffer that is too short.
    pub fn get(&self, kind: Kind, keys: &[Key], into: &mut [u8], each: usize) -> Result<Vec<bool>, Error> {
        let needed = keys.len().checked_mul(each);
        if each == 0 || needed.is_none_or(|needed| needed > into.len()) {
            return Err(Error::Invalid(format!(
                "{} objects of {each} bytes do not fit a buffer of {}",
                keys.len(),
                into.len()
            )));
        }
        let mut loads: Vec<Load<'_>> = keys
            .iter()
            .zip(into.chunks_exact_mut(each))
            .map(|(&key, into)| Load { id: ObjectId { kind, key }, into })
            .collect();
        Ok(self.upstream.get(&mut loads).iter().map(Option::is_some).collect())
    }

    /// Writes objects, one letter for each: `s`tored, `e`xists, `c`onflict, no `p`arent, `f`ailed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for buffers that do not fit each other.
    pub fn put(&self, batch: &Batch<'_>) -> Result<Vec<u8>, Error> {
        batch.check()?;
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
        let chain = [batch.parents, batch.keys].concat();
        let saves: Vec<Save<'_>> = pieces
            .iter()
            .enumerate()
            .map(|(at, pieces)| Save { kind: batch.kind, at: batch.parents.len() + at, pieces, checksum: None })
            .collect();
        Ok(self.upstream.put(&chain, &saves, batch.class).into_iter().map(letter).collect())
    }

    /// Waits until what was put is in the store: whether it is, by then.
    pub fn flush(&self, patience: Duration) -> bool {
        self.upstream.flush(patience)
    }

    /// Names and values of what is counted. `other_block_tokens`: another size of blocks under which engines of this fingerprint write.
    pub fn stats(&self) -> Vec<(String, u64)> {
        let mut all = self.upstream.stats();
        all.push(("other_block_tokens".to_owned(), self.upstream.other_block_tokens().into()));
        all
    }

    /// See [`Upstream::trouble`].
    pub fn trouble(&self) -> Option<String> {
        self.upstream.trouble()
    }

    /// Takes no more writes and leaves a store of its own as a clean end does. Reads go on until this is dropped.
    ///
    /// # Errors
    /// As [`Store::drain`].
    pub fn close(&self) -> Result<(), Error> {
        self.own.as_ref().map_or(Ok(()), |(store, _)| store.drain())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::server::{Server, ServerConfig};

    fn config() -> TierConfig {
        let store = StoreConfig { capacity: 1 << 30, ..StoreConfig::default() };
        TierConfig { tenant: "one".into(), store, ..TierConfig::default() }
    }

    fn batch<'a>(keys: &'a [Key], parents: &'a [Key], lengths: &'a [u32], data: &'a [u8]) -> Batch<'a> {
        Batch { kind: Kind::Block, keys, parents, lengths, data, class: Class::Agent }
    }

    fn stat(tier: &Tier, name: &str) -> u64 {
        tier.stats().into_iter().find(|(found, _)| found == name).unwrap().1
    }

    /// What every kind of tier does.
    fn keeps_the_contract(tier: &Tier) {
        let keys = [Key(1), Key(2), Key(3)];
        let data: Vec<u8> = (0..300u16).map(|at| at as u8).collect();
        let put = batch(&keys[..2], &[], &[100, 100], &data);
        assert_eq!(tier.put(&put).unwrap(), b"ss");
        assert_eq!(tier.put(&put).unwrap(), b"ee");
        assert_eq!(tier.put(&batch(&keys[2..], &keys[..2], &[100], &data[200..])).unwrap(), b"s");
        assert_eq!(tier.put(&batch(&keys[..1], &[], &[100], &data[1..])).unwrap(), b"c");
        let slice = Batch { kind: Kind::Slice, ..batch(&keys[1..2], &[], &[7], &data) };
        assert_eq!(tier.put(&slice).unwrap(), b"s");
        assert!(tier.flush(Duration::from_secs(1)));
        let found = tier.check(&[Key(1), Key(2), Key(3), Key(4)], 4).unwrap();
        assert_eq!(found, Found { blocks: 3, slices: vec![1], near: 0 });
        let mut into = vec![0; 400];
        let hits = tier.get(Kind::Block, &[Key(3), Key(7), Key(1)], &mut into, 100).unwrap();
        assert_eq!(hits, [true, false, true]);
        assert_eq!((&into[..100], &into[200..300]), (&data[200..], &data[..100]));
        // Of another length: a miss, however short or long.
        for each in [99, 101] {
            assert_eq!(tier.get(Kind::Block, &[Key(1)], &mut into, each).unwrap(), [false]);
        }
        assert_eq!((stat(tier, "stored"), stat(tier, "hits"), stat(tier, "misses")), (4, 2, 3));
    }

    #[test]
    fn a_directory_is_a_store_that_outlives_its_tier() {
        let base = tempfile::tempdir().unwrap();
        let address = format!("dir:{}", base.path().join("kv").display());
        {
            let tier = Tier::open(&address, config()).unwrap();
            keeps_the_contract(&tier);
            assert_eq!(tier.put(&batch(&[Key(9)], &[Key(8)], &[9], &[0; 9])).unwrap(), b"p");
            assert!(matches!(Tier::open(&address, config()), Err(Error::Unavailable(_))));
            tier.close().unwrap();
        }
        let tier = Tier::open(&address, config()).unwrap();
        assert_eq!(tier.check(&[Key(1), Key(2), Key(3)], 1).unwrap().blocks, 3);
        assert_eq!(stat(&tier, "store_blocks"), 3);
    }

    #[test]
    fn entry_points_are_one_tier() {
        let base = tempfile::tempdir().unwrap();
        let servers: Vec<Server> = (0..3)
            .map(|at| {
                let root = Root::open(&base.path().join(at.to_string())).unwrap();
                let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
                let store = Arc::new(Store::open(root, media, config().store).unwrap());
                let listen = vec!["127.0.0.1:0".parse().unwrap()];
                Server::start(store, ServerConfig { listen, ..ServerConfig::default() }).unwrap()
            })
            .collect();
        let names: Vec<String> = servers.iter().map(|server| server.addresses()[0].to_string()).collect();
        keeps_the_contract(&Tier::open(&format!("tcp://{}", names[..2].join(",")), config()).unwrap());
        // A third one that has none of these keys yet: who owns which of the others' follows from their ports.
        keeps_the_contract(&Tier::open(&format!("tcp://{}", names[2]), config()).unwrap());
    }

    #[test]
    fn buffers_are_held_to_their_lengths_before_anything_is_read_or_written() {
        let base = tempfile::tempdir().unwrap();
        let tier = Tier::open(&format!("dir:{}", base.path().display()), config()).unwrap();
        let refused = |put: Batch<'_>| assert!(matches!(tier.put(&put), Err(Error::Invalid(_))));
        refused(batch(&[Key(1)], &[], &[11], &[0; 10]));
        refused(batch(&[Key(1)], &[], &[5, 5], &[0; 10]));
        refused(batch(&[Key(1), Key(2)], &[], &[u32::MAX, u32::MAX], &[0; 10]));
        refused(batch(&vec![Key(1); 9000], &[], &vec![0; 9000], &[]));
        refused(batch(&[Key(1)], &vec![Key(1); 9000], &[0], &[]));
        for (keys, each, room) in [(2, 50, 99), (1, 0, 10), (2, usize::MAX, 10)] {
            assert!(tier.get(Kind::Block, &vec![Key(1); keys], &mut vec![0; room], each).is_err());
        }
        assert_eq!(stat(&tier, "stored"), 0);
    }

    #[test]
    fn what_is_no_address_is_refused_by_name() {
        for address in
            ["", "dir:", "/tmp/x", "file:/tmp/x", "dir", "tcp://", "tcp://host", "tcp://a:1,unix:/x", "unix:x"]
        {
            let refused = Tier::open(address, config()).err().unwrap();
            assert!(refused.to_string().contains("no address of a KV store"), "{refused}");
        }
        let long = TierConfig { tenant: "t".repeat(MAX_TENANT + 1), ..config() };
        assert!(Tier::open("dir:/tmp/x", long).is_err());
    }
}
