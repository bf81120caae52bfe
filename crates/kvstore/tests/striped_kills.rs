//! A writer over twelve directories is killed at any point: what it was told is stored is read by the next one, what was not is whole or gone.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use deepinfer_kvstore::backend::{Backend, MountedDir};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::striped::{Config, Striped};
use deepinfer_kvstore::media::{Media, Place, Read, Record};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

const FOLDER: &str = "DEEPINFER_TEST_STRIPED_FOLDER";
const FIRST: &str = "DEEPINFER_TEST_STRIPED_FIRST";
const ROUNDS: u128 = 6;

fn open(folder: &Path) -> Striped {
    let domain = |at: usize| Arc::new(MountedDir::open(&folder.join(at.to_string())).unwrap()) as Arc<dyn Backend>;
    Striped::new(std::array::from_fn(domain), Config::default()).unwrap()
}

fn bytes(key: u128) -> Vec<u8> {
    (0..3000 + key as usize % 5000).map(|at| (at as u128 * 31 + key) as u8).collect()
}

fn meta(key: u128) -> Meta {
    let bytes = bytes(key);
    let id = ObjectId { kind: Kind::Block, key: Key(key) };
    Meta {
        id,
        parent: None,
        tenant: TenantId(0),
        class: Class::Chat,
        len: bytes.len() as u32,
        checksum: checksum(&bytes),
        written: 1,
    }
}

/// Not a test by itself: the writer, in a process of its own.
#[test]
fn writer() {
    let (Ok(folder), Ok(first)) = (std::env::var(FOLDER), std::env::var(FIRST)) else { return };
    let striped = open(Path::new(&folder));
    striped.recover(&mut |_, _| ()).unwrap();
    println!("ready");
    for key in (first.parse::<u128>().unwrap()..).step_by(2) {
        let (one, two) = (bytes(key), bytes(key + 1));
        let batch = [Record { meta: meta(key), pieces: &[&one] }, Record { meta: meta(key + 1), pieces: &[&two] }];
        striped.append(&batch).unwrap();
        println!("stored {key}");
    }
}

#[test]
fn what_was_acknowledged_survives_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let mut stored = Vec::new();
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture", "--test-threads=1"])
            .env(FOLDER, folder.path())
            .env(FIRST, (round * 1_000_000).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (told, heard) = std::sync::mpsc::channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reader = std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(told.send(line))));
        while !heard.recv_timeout(Duration::from_secs(60)).unwrap().ends_with("ready") {}
        // Every round at another point of a batch.
        std::thread::sleep(Duration::from_millis(40 + 17 * round as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap();
        stored.extend(heard.try_iter().filter_map(|line| line.strip_prefix("stored ")?.parse::<u128>().ok()));
        let striped = open(folder.path());
        let mut found: Vec<(Place, Meta)> = Vec::new();
        striped.recover(&mut |place, meta| found.push((place, meta))).unwrap();
        let mut into = vec![0; 10_000];
        for (place, meta) in &found {
            let key = meta.id.key.0;
            let into = &mut into[..meta.len as usize];
            striped.read(&mut [Read { place: *place, meta: *meta, start: 0, into }]).pop().unwrap().unwrap();
            assert!(into == bytes(key), "{key}");
            // All of a batch or nothing.
            assert!(found.iter().any(|(_, other)| other.id.key.0 == key ^ 1), "{key} without the other of its batch");
        }
        assert!(stored.iter().all(|key| found.iter().any(|(_, meta)| meta.id.key.0 == *key)), "round {round}");
        // What the kill left short is made whole.
        while striped.repair_step(100).unwrap().left > 0 {}
        assert!(striped.segments().iter().all(|(segment, _)| striped.scrub(*segment).unwrap().sound == 12));
    }
    assert!(stored.len() > 5, "{} batches in all rounds", stored.len());
}
