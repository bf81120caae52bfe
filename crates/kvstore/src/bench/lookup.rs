//! Checks of a long chain, in this process and over sockets; memory of the index.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{Figure, disk, key, meta, micros, must};
use crate::checksum::checksum;
use crate::client::{Client, ClientConfig};
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::{Place, Record};
use crate::net::Address;
use crate::object::{Meta, TenantId};
use crate::policy::{Lifetimes, PolicyKind, Retention};
use crate::server::{Server, ServerConfig};
use crate::store::{Put, Rule, Upkeep};

/// Blocks of the chain that is asked for.
const CHAIN: u64 = 1000;

/// Chains beside it.
const CHAINS: u64 = 100;

/// Calls of a round.
const CALLS: usize = 400;

pub(super) fn check(base: &Path) -> Result<Vec<Figure>, Error> {
    let (store, _) = disk::open(&base.join("check"))?;
    let data = [7u8; 16];
    let sum = checksum(&data);
    let pieces = [&data[..]];
    for first in (0..CHAIN * CHAINS).step_by(CHAIN as usize) {
        let before = |number: u64| (number > first).then(|| number - 1);
        let metas: Vec<Meta> =
            (first..first + CHAIN).map(|number| meta(number, before(number), data.len(), sum)).collect();
        let records: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
        must(store.put(&records, Rule::Exact).iter().all(Put::is_there), "put a chain")?;
    }
    // As an engine leaves it: with a slice at its end.
    for first in (0..CHAIN * CHAINS).step_by(CHAIN as usize) {
        let block = meta(first + CHAIN - 1, None, data.len(), sum);
        let id = ObjectId { kind: Kind::Slice, ..block.id };
        let slice = Meta { id, parent: Some(id.key), ..block };
        must(store.put(&[Record { meta: slice, pieces: &pieces }], Rule::Exact)[0].is_there(), "put a slice")?;
    }
    let upkeep = Upkeep::start(&store, Duration::from_secs(1))?;
    let chain: Vec<Key> = (50 * CHAIN..51 * CHAIN).map(key).collect();
    let mut figures = vec![micros(format!("CHECK of {CHAIN} blocks, in process"), CALLS, || {
        must(store.check(TenantId(0), &chain, 1)?.blocks as u64 == CHAIN, "find a chain")
    })?];
    let half = |chain: u64| -> Vec<Key> {
        let first = chain * CHAIN;
        (first..first + CHAIN / 2)
            .chain(CHAIN * (CHAINS + chain)..CHAIN * (CHAINS + chain) + CHAIN / 2)
            .map(key)
            .collect()
    };
    let halves: Vec<Vec<Key>> = (0..CHAINS).map(half).collect();
    let mut turn = 0;
    figures.push(micros(
        format!("CHECK of {CHAIN} blocks, half of them there, {CHAINS} chains in turn"),
        CALLS,
        || {
            turn = (turn + 1) % halves.len();
            must(store.check(TenantId(0), &halves[turn], 1)?.blocks as u64 == CHAIN / 2, "find half of a chain")
        },
    )?);
    drop(upkeep);
    let socket = Address::Unix(base.join("s"));
    let listen = vec![socket, "127.0.0.1:0".parse()?];
    let server = Server::start(store, ServerConfig { listen, ..ServerConfig::default() })?;
    for (address, over) in server.addresses().into_iter().zip(["a Unix socket", "TCP on loopback"]) {
        let client = Client::new(ClientConfig::new(address))?;
        figures.push(micros(format!("CHECK of {CHAIN} blocks, over {over}"), CALLS, || {
            must(u64::from(client.check(&chain, 1)?.blocks) == CHAIN, "find a chain")
        })?);
    }
    Ok(figures)
}

pub(super) fn index(entries: u64) -> Result<Vec<Figure>, Error> {
    let mut kept = Retention::new(PolicyKind::default().build(Lifetimes::default()), Lifetimes::default());
    let entries = entries / CHAIN * CHAIN;
    let begun = Instant::now();
    for first in (0..entries).step_by(100) {
        let place = |number: u64| Place { segment: 1, offset: number as u32 };
        let before = |number: u64| (!number.is_multiple_of(CHAIN)).then(|| number - 1);
        let batch: Vec<(Meta, Place)> = (first..first + 100)
            .map(|number| (meta(number, before(number), super::SIZES[1], 1), place(number)))
            .collect();
        must(kept.insert(&batch, (first / 4000) as u32).iter().all(Result::is_ok), "fill the index")?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let (index, policy) = kept.memory();
    let plain = |name: String, unit, value| Figure { name, unit, value, beside: None, ratio: None };
    Ok(vec![
        plain(format!("index and policy, an entry of {entries}"), "B", (index + policy) as f64 / entries as f64),
        plain(format!("insert, an entry of {entries}"), "us", seconds * 1e6 / entries as f64),
    ])
}
