//! Checks while the store evicts, seals, expires and collects, beside the same checks while it rests.
//!
//! Calls begin at fixed times, so that one that waits long does not hide those that it would have kept waiting.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Figure, ROUNDS, bytes, compared, key, meta, must};
use crate::checksum::checksum;
use crate::client::{Client, ClientConfig};
use crate::error::Error;
use crate::key::Key;
use crate::media::Record;
use crate::media::local::{Local, LocalConfig};
use crate::net::Address;
use crate::object::{Meta, TenantId};
use crate::root::Root;
use crate::server::{Server, ServerConfig};
use crate::store::{Put, Rule, Store, StoreConfig, Upkeep};

/// Blocks of the chain that is asked for.
const CHAIN: u64 = 1000;

/// Calls of a side in a round, and the time between their beginnings.
const CALLS: usize = 2000;
const EVERY: Duration = Duration::from_micros(100);

/// Objects that come meanwhile.
const OBJECT: usize = 16 << 10;
const BATCH: u64 = 64;

fn open(path: &Path) -> Result<Arc<Store>, Error> {
    let root = Root::open(path)?;
    let media = Local::open(&root, LocalConfig { segment_bytes: 4 << 20, ..LocalConfig::default() })?;
    let config = StoreConfig {
        capacity: 64 << 20,
        slack: 4 << 20,
        max_object: 64 << 10,
        batch_bytes: 2 << 20,
        piece_bytes: 1 << 20,
        ..StoreConfig::default()
    };
    Ok(Arc::new(Store::open(root, Arc::new(media), config)?))
}

fn put(store: &Store, metas: &[Meta], data: &[u8]) -> bool {
    let pieces = [data];
    let records: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
    store.put(&records, Rule::Exact).iter().all(Put::is_there)
}

/// Microseconds of each call, in order of size.
fn times(mut call: impl FnMut() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
    let mut times = Vec::with_capacity(CALLS);
    let mut due = Instant::now();
    for _ in 0..CALLS {
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        call()?;
        times.push(due.elapsed().as_secs_f64() * 1e6);
        // What was late is not caught up with: the next call is one of its own.
        due = (due + EVERY).max(Instant::now());
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Puts objects, three of four of which nobody ever asks for, until told to end.
fn write(store: &Store, stop: &AtomicBool, next: &AtomicU64) -> bool {
    let data = bytes(OBJECT);
    let sum = checksum(&data);
    let mut all = true;
    while !stop.load(Ordering::Relaxed) {
        let first = next.fetch_add(BATCH, Ordering::Relaxed);
        let metas: Vec<Meta> = (first..first + BATCH).map(|number| meta(number, None, OBJECT, sum)).collect();
        all &= put(store, &metas, &data);
        // One of four stays, so that segments are copied, not only deleted.
        let used: Vec<Key> = (first..first + BATCH).step_by(4).map(key).collect();
        all &= used.iter().all(|&key| store.check(TenantId(0), &[key], 0).is_ok());
    }
    all
}

pub(super) fn check(base: &Path) -> Result<Vec<Figure>, Error> {
    let store = open(&base.join("upkeep"))?;
    let data = [7u8; 16];
    let before = |number: u64| (number > 0).then(|| number - 1);
    let sum = checksum(&data);
    let metas: Vec<Meta> = (0..CHAIN).map(|number| meta(number, before(number), data.len(), sum)).collect();
    must(put(&store, &metas, &data), "put a chain")?;
    let chain: Vec<Key> = (0..CHAIN).map(key).collect();
    let server_config = ServerConfig { listen: vec![Address::Unix(base.join("s"))], ..ServerConfig::default() };
    let server = Server::start(Arc::clone(&store), server_config)?;
    let address = server.addresses().pop().ok_or_else(|| Error::Unavailable("it listens nowhere".to_owned()))?;
    let client = Client::new(ClientConfig { check: Duration::from_secs(30), ..ClientConfig::new(address) })?;
    let next = AtomicU64::new(CHAIN);
    let mut figures = Vec::new();
    let mut both = |name: &str, call: &mut dyn FnMut() -> Result<(), Error>| {
        let (mut busy, mut idle) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for round in 0..=ROUNDS {
            let resting = times(&mut *call)?;
            let stop = AtomicBool::new(false);
            let working = std::thread::scope(|scope| {
                let writer = scope.spawn(|| write(&store, &stop, &next));
                let upkeep = Upkeep::start(&store, Duration::from_millis(10));
                let working = times(&mut *call);
                stop.store(true, Ordering::Relaxed);
                must(writer.join().unwrap_or(false), "put objects meanwhile")?;
                upkeep.and(working)
            })?;
            if round > 0 {
                for (at, part) in [CALLS / 2, CALLS - CALLS / 100].into_iter().enumerate() {
                    busy[at].push(working[part]);
                    idle[at].push(resting[part]);
                }
            }
        }
        for (at, which) in ["p50", "p99"].into_iter().enumerate() {
            let name = format!("{which} of CHECK of {CHAIN} blocks {name}, with upkeep beside without");
            figures.push(compared(name, "us", &busy[at], &idle[at]));
        }
        Ok::<_, Error>(())
    };
    both("in process", &mut || must(store.check(TenantId(0), &chain, 1)?.blocks as u64 == CHAIN, "find a chain"))?;
    both("over a Unix socket", &mut || must(u64::from(client.check(&chain, 1)?.blocks) == CHAIN, "find a chain"))?;
    let counts = store.stats().counts;
    must(counts.evicted > 0 && counts.segments_deleted > 0, "have the store evict and collect")?;
    Ok(figures)
}
