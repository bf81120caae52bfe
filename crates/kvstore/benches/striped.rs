//! Time of a read of one object from twelve domains, with and without one that answers 50 ms late, and gigabytes a second of appending.
//! `cargo bench -p deepinfer-kvstore --bench striped`
//!
//! Domains are directories of this machine, read from its page cache, each call 2 ms late as over a network. Reads are one at a time, the two
//! kinds in turns, so that what else the machine does meets both.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::backend::{Backend, Faulty, MountedDir};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::striped::{Config, Striped};
use deepinfer_kvstore::media::{Media, Place, Read, Record};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

/// Reads of each kind.
const READS: usize = 600;
/// Objects, so that the slow domain has each position.
const OBJECTS: usize = 24;

fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort();
    times[(times.len() * percent / 100).min(times.len() - 1)].as_secs_f64() * 1e3
}

fn main() {
    for len in [1_415_040usize, 114_000] {
        let folder = tempfile::tempdir().unwrap();
        let domains: Vec<Arc<Faulty>> = (0..12)
            .map(|at| Arc::new(Faulty::new(Arc::new(MountedDir::open(&folder.path().join(at.to_string())).unwrap()))))
            .collect();
        let striped =
            Striped::new(std::array::from_fn(|at| domains[at].clone() as Arc<dyn Backend>), Config::default()).unwrap();
        striped.recover(&mut |_, _| ()).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| ((at * 2_654_435_761) >> 7) as u8).collect();
        let meta = |key: usize| Meta {
            id: ObjectId { kind: Kind::Block, key: Key(key as u128) },
            parent: None,
            tenant: TenantId(0),
            class: Class::Chat,
            len: len as u32,
            checksum: checksum(&bytes),
            written: 0,
        };
        let pieces = [bytes.as_slice()];
        let batch: Vec<Record<'_>> = (0..OBJECTS).map(|key| Record { meta: meta(key), pieces: &pieces }).collect();
        let mut rates = Vec::new();
        let mut places: Vec<Place> = Vec::new();
        for _ in 0..5 {
            let start = Instant::now();
            places = striped.append(&batch).unwrap();
            rates.push((len * OBJECTS) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        rates.sort_by(f64::total_cmp);
        println!("objects of {len} B");
        println!("  append of {OBJECTS}, synced in 11 of 12   median {:>6.2} GB/s", rates[2]);
        let mut into = vec![0; len];
        let mut once = |key: usize, late: bool| {
            for domain in &domains {
                domain.set_delay(Duration::from_millis(2));
            }
            if late {
                domains[5].set_delay(Duration::from_millis(50));
            }
            let start = Instant::now();
            let read = Read { place: places[key], meta: meta(key), start: 0, into: &mut into };
            striped.read(&mut [read]).pop().unwrap().unwrap();
            start.elapsed()
        };
        let (mut even, mut late) = (Vec::new(), Vec::new());
        for at in 0..READS {
            even.push(once(at % OBJECTS, false));
            late.push(once(at % OBJECTS, true));
        }
        for percent in [50, 99] {
            let (even, late) = (percentile(&mut even, percent), percentile(&mut late, percent));
            println!(
                "  read p{percent}: {even:>7.3} ms   one domain 50 ms late {late:>7.3} ms   ratio {:.2}",
                late / even
            );
        }
    }
}
