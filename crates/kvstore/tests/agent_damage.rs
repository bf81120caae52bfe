//! Memory that changes under an agent: alone in its process, since it looks for the agent's memory there.
#![allow(clippy::unwrap_used, missing_docs)]

mod agent_kit;
mod kit;

use std::sync::atomic::Ordering;

use agent_kit::*;
use deepinfer_kvstore::upstream::Upstream;
use deepinfer_kvstore::{Kind, ObjectId};
use kit::{bytes, chain};

#[test]
fn bytes_that_changed_in_memory_are_a_miss_and_put_out_of_sight() {
    let host = Host::new();
    let client = host.client();
    let keys = chain(77, 4);
    put(&client, &keys, Kind::Block, 0..4);
    assert!(client.flush(WAIT));
    let damaged = bytes(ObjectId { kind: Kind::Block, key: keys[2] }, LEN);
    flip_in_memory(&damaged);
    assert_eq!(get(&client, Kind::Block, &keys), [true, true, false, true]);
    assert_eq!((stat(&client, "mismatches"), host.stat("quarantined")), (1, 1));
    assert_eq!(host.over.damaged.load(Ordering::Relaxed), 1, "the store was told");
    // The store's own bytes are right: it is fetched again.
    assert_eq!(get(&client, Kind::Block, &keys), vec![true; 4]);
    assert_eq!(host.stat("fetched"), 1);
    // Damage before the store has it is not written: nothing wrong gets there.
    host.over.hold();
    let other = chain(78, 1);
    put(&client, &other, Kind::Block, 0..1);
    flip_in_memory(&bytes(ObjectId { kind: Kind::Block, key: other[0] }, LEN));
    host.over.go_on();
    assert!(!client.flush(WAIT));
    assert_eq!((host.over.found(&other), get(&client, Kind::Block, &other)), (0, vec![false]));
    assert_eq!(host.stat("quarantined"), 2);
}
