//! Stripes over twelve buckets of a real S3 service. Skipped, with the reason on stderr, where its program is not installed.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod weed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use deepinfer_kvstore::backend::{Backend, Name, S3, S3Config};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::striped::{Config, Repaired, Scrubbed, Striped};
use deepinfer_kvstore::media::{Media, Read, Record};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

#[test]
fn twelve_buckets_lose_any_two() {
    let Some(program) = weed::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = weed::Weed::start(&program, folder.path());
    // A client's connections live in the runtime that made them: the test and the stripes have their own.
    let client = |at: usize| {
        let config = S3Config {
            endpoint: server.endpoint.clone(),
            bucket: format!("domain-{at}"),
            access_key: weed::ACCESS_KEY.into(),
            secret_key: weed::SECRET_KEY.into(),
            ..S3Config::default()
        };
        Arc::new(S3::new(&config).unwrap())
    };
    let buckets: Vec<Arc<S3>> = (0..12).map(client).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    for bucket in &buckets {
        // The first write to a bucket makes it, once the server has volumes.
        while let Err(error) = runtime.block_on(bucket.put_segment(&Name::segment(0), vec![Bytes::from_static(b"x")])) {
            assert!(Instant::now() < end, "{error}");
            std::thread::sleep(Duration::from_millis(200));
        }
        runtime.block_on(bucket.delete_many(&[Name::segment(0)])).unwrap();
    }
    let open = || {
        let striped = Striped::new(
            std::array::from_fn(|at| client(at) as Arc<dyn Backend>),
            Config { media: 3, ..Config::default() },
        )
        .unwrap();
        let mut found = Vec::new();
        striped.recover(&mut |place, meta| found.push((place, meta))).unwrap();
        (striped, found)
    };
    let all: Vec<(Meta, Vec<u8>)> = (0..12u128)
        .map(|key| {
            let bytes: Vec<u8> = (0..114_000 + key as usize).map(|at| ((at as u128 * (key + 7)) >> 3) as u8).collect();
            let id = ObjectId { kind: Kind::Block, key: Key(key) };
            let meta = Meta {
                id,
                parent: None,
                tenant: TenantId(1),
                class: Class::Chat,
                len: bytes.len() as u32,
                checksum: checksum(&bytes),
                written: 5,
            };
            (meta, bytes)
        })
        .collect();
    let (striped, _) = open();
    let pieces: Vec<[&[u8]; 1]> = all.iter().map(|(_, bytes)| [bytes.as_slice()]).collect();
    let batch: Vec<Record<'_>> =
        all.iter().zip(&pieces).map(|((meta, _), pieces)| Record { meta: *meta, pieces }).collect();
    let places = striped.append(&batch).unwrap();
    let all_right = |striped: &Striped| {
        let mut into: Vec<Vec<u8>> = all.iter().map(|(_, bytes)| vec![0; bytes.len()]).collect();
        let reads = all.iter().zip(&places).zip(&mut into).map(|(((meta, _), place), into)| Read {
            place: *place,
            meta: *meta,
            start: 0,
            into,
        });
        let done = striped.read(&mut reads.collect::<Vec<_>>());
        assert!(done.iter().all(Result::is_ok), "{done:?}");
        assert!(all.iter().zip(&into).all(|((_, bytes), into)| bytes == into));
    };
    all_right(&striped);
    drop(striped);
    let (striped, found) = open();
    assert_eq!(found, places.iter().copied().zip(all.iter().map(|(meta, _)| *meta)).collect::<Vec<_>>());
    let segment = Name::segment(places[0].segment);
    for (a, b) in [(0, 1), (4, 11)] {
        for lost in [a, b] {
            runtime.block_on(buckets[lost].delete_many(std::slice::from_ref(&segment))).unwrap();
        }
        all_right(&striped);
        // Both are queued by the reads.
        assert_eq!(striped.repair_step(10).unwrap(), Repaired { made: 2, ..Repaired::default() });
        assert_eq!(striped.scrub(places[0].segment).unwrap(), Scrubbed { sound: 12, damaged: 0, away: 0 });
    }
    striped.delete(places[0].segment).unwrap();
    assert!(buckets.iter().all(|bucket| runtime.block_on(bucket.list("")).unwrap().is_empty()));
}
