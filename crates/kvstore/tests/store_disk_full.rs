//! A real file system that is full: puts are refused, what was acknowledged stays, and all goes on when there is room again. It is a small one in
//! memory, mounted in a namespace of the test's own; skipped, with the reason on stderr, where that may not be made.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)]

mod kit;
mod skips;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use deepinfer_kvstore::Error;
use deepinfer_kvstore::media::Media;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Put, Store, StoreConfig};
use kit::{Object, TENANT, block, has, put};

const FOLDER: &str = "DEEPINFER_TEST_SMALL_DISK";
const DISK: u64 = 6 << 20;
const LENGTH: usize = 30_000;

fn open(folder: &Path) -> Store {
    let root = Root::open(&folder.join("root")).unwrap();
    let config = LocalConfig { segment_bytes: 1 << 20, ..LocalConfig::default() };
    let media = Arc::new(Local::open(&root, config).unwrap()) as Arc<dyn Media>;
    Store::open(root, media, StoreConfig::default()).unwrap()
}

fn all_there(store: &Store, objects: &[Object]) -> bool {
    objects.iter().all(|object| has(store, object))
}

/// Not a test by itself: runs where the small disk is.
#[test]
fn on_a_small_disk() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let folder = Path::new(&folder);
    // Somebody else's, and in the end the room that is made.
    std::fs::write(folder.join("other"), vec![1; 2 << 20]).unwrap();
    let store = open(folder);
    assert_eq!(store.tenant("small").unwrap().id, TENANT);
    let mut stored: Vec<Object> = Vec::new();
    let mut refused = 0;
    // Each is a chain of its own, so that a refusal says nothing of the next one.
    for chain in 0..DISK / LENGTH as u64 {
        let object = block(chain, 0, LENGTH);
        match put(&store, std::slice::from_ref(&object)).pop().unwrap() {
            Put::Stored => stored.push(object),
            Put::Failed(Error::Full(_)) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(stored.len() > 40 && refused > 40, "{} stored, {refused} refused", stored.len());
    assert!(all_there(&store, &stored));
    assert_eq!(store.stats().counts.full, refused);
    drop(store);
    // Still full: a start reads what is there.
    let store = open(folder);
    assert!(all_there(&store, &stored));
    std::fs::remove_file(folder.join("other")).unwrap();
    for chain in 1000..1020 {
        let object = block(chain, 0, LENGTH);
        assert!(matches!(put(&store, std::slice::from_ref(&object)).pop().unwrap(), Put::Stored));
        stored.push(object);
    }
    drop(store);
    assert!(all_there(&open(folder), &stored));
    println!("all went on");
}

#[test]
fn a_full_disk_refuses_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size={DISK} tmpfs \"$0\"");
    let own = |then: &str| {
        let mut command = Command::new("unshare");
        command.args(["-Urm", "sh", "-c", &format!("{mount} && {then}")]).arg(folder.path());
        command
    };
    if !own("true").output().is_ok_and(|made| made.status.success()) {
        skips::skip("no file system may be mounted in a namespace of one's own (unshare -Urm)");
        return;
    }
    let run = own("exec \"$@\"")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "on_a_small_disk", "--nocapture"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("all went on"), "{said}{}", String::from_utf8_lossy(&run.stderr));
}
