//! The table cut over entry points against one table that holds everything.

#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use deepinfer_kvstore::directory::{Directory, EntryPoint, Found, Members};
use deepinfer_kvstore::index::{Index, MAX_CHAIN, Refused};
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::{Class, Error, Key, Kind, Meta, ObjectId, TenantId};
use proptest::prelude::*;

const PLACE: Place = Place { segment: 1, offset: 0 };
const RETRY: Duration = Duration::from_secs(5);

/// An entry point in this process, which can be switched off.
#[derive(Default)]
struct Point {
    index: Mutex<Index>,
    off: AtomicBool,
    asked: AtomicUsize,
}

impl EntryPoint for Point {
    fn check(&self, keys: &[Key]) -> Result<Found, Error> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        if self.off.load(Ordering::Relaxed) {
            return Err(Error::Unavailable("switched off".into()));
        }
        let index = self.index.lock().unwrap();
        let blocks = index.longest(keys);
        Ok(Found { blocks, slices: index.slices(&keys[..blocks], usize::MAX) })
    }
}

fn key(number: u32) -> Key {
    let mut word = (u128::from(number) + 1).wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15);
    word ^= word >> 64;
    Key(word.wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15))
}

fn meta(kind: Kind, key: Key, parent: Option<Key>) -> Meta {
    Meta {
        id: ObjectId { kind, key },
        parent,
        tenant: TenantId(0),
        class: Class::Chat,
        len: 1,
        checksum: 0,
        written: 0,
    }
}

/// Chains that share prefixes: chain `n` leaves chain `n / 2` after some blocks.
fn chain(number: u32, blocks: usize) -> Vec<Key> {
    let leaves = 3 + number as usize % 5;
    (0..blocks)
        .map(|at| {
            let mut of = number;
            while of > 0 && at < leaves {
                of /= 2;
            }
            key(of * 1000 + at as u32)
        })
        .collect()
}

struct World {
    whole: RefCell<Index>,
    points: Vec<Point>,
    directory: Directory,
}

impl World {
    fn new(count: usize) -> Self {
        let members = Members::new((0..count).map(|at| format!("kv-{at}:7000"))).unwrap();
        let points = (0..count).map(|_| Point::default()).collect();
        Self { whole: RefCell::new(Index::new()), points, directory: Directory::new(members, RETRY) }
    }

    fn put(&self, keys: &[Key], slice: bool) {
        let ok = |done: Result<_, Refused>| assert!(matches!(done, Ok(_) | Err(Refused::Exists(_))), "{done:?}");
        let members = self.directory.members();
        let mut whole = self.whole.borrow_mut();
        for (at, (&key, parent)) in keys.iter().zip(members.parents(keys)).enumerate() {
            ok(whole.insert(&meta(Kind::Block, key, at.checked_sub(1).map(|before| keys[before])), PLACE));
            let mut point = self.points[members.owner(key)].index.lock().unwrap();
            ok(point.insert(&meta(Kind::Block, key, parent), PLACE));
            if slice && at + 1 == keys.len() {
                ok(whole.insert(&meta(Kind::Slice, key, Some(key)), PLACE));
                ok(point.insert(&meta(Kind::Slice, key, Some(key)), PLACE));
            }
        }
    }

    fn check(&self, keys: &[Key], now: u64) -> Found {
        self.directory.check(&self.points, keys, Duration::from_secs(now)).unwrap()
    }

    /// What one table says that lacks some keys.
    fn expected(&self, keys: &[Key], lacks: impl Fn(Key) -> bool) -> Found {
        let whole = self.whole.borrow();
        let has = |kind, key| !lacks(key) && whole.get(ObjectId { kind, key }).is_some();
        let blocks = keys.iter().take_while(|&&key| has(Kind::Block, key)).count();
        let slices = (0..blocks).rev().filter(|&at| has(Kind::Slice, keys[at])).collect();
        Found { blocks, slices }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn it_is_one_table(
        count in 1..6usize,
        puts in prop::collection::vec((0..12u32, 1..40usize, any::<bool>()), 1..12),
        drops in prop::collection::vec((0..12u32, 0..40usize), 0..30),
        asks in prop::collection::vec((0..12u32, 0..50usize), 1..12),
        off in 0..6usize,
    ) {
        let world = World::new(count);
        for &(number, blocks, slice) in &puts {
            world.put(&chain(number, blocks), slice);
        }
        // The same blocks go on both sides: a leaf of the whole is one of its part.
        for &(number, blocks) in &drops {
            let key = chain(number, blocks + 1)[blocks];
            let id = ObjectId { kind: Kind::Block, key };
            let mut whole = world.whole.borrow_mut();
            if let Some(slot) = whole.find(id) && whole.remove_leaf(slot).is_ok() {
                let mut part = world.points[world.directory.members().owner(key)].index.lock().unwrap();
                let slot = part.find(id).unwrap();
                prop_assert!(part.remove_leaf(slot).is_ok());
            }
        }
        for &(number, blocks) in &asks {
            let keys = chain(number, blocks);
            let found = world.check(&keys, 0);
            prop_assert_eq!(found.blocks, world.whole.borrow().longest(&keys));
            prop_assert_eq!(found, world.expected(&keys, |_| false));
        }
        // One dies: its keys are missing, nothing else; when it may be asked again and answers, everything is there.
        let off = off % count;
        let lacks = |key| world.directory.members().owner(key) == off;
        world.points[off].off.store(true, Ordering::Relaxed);
        for &(number, blocks) in &asks {
            let keys = chain(number, blocks);
            prop_assert_eq!(world.check(&keys, 1), world.expected(&keys, lacks));
        }
        world.points[off].off.store(false, Ordering::Relaxed);
        for &(number, blocks) in &asks {
            let keys = chain(number, blocks);
            prop_assert_eq!(world.check(&keys, 7), world.expected(&keys, |_| false));
        }
    }

    /// Entry points evict on their own: the answer is the first key that is missing, wherever.
    #[test]
    fn evictions_of_one_are_holes_of_the_chain(
        count in 1..6usize,
        blocks in 1..60usize,
        drops in prop::collection::vec(0..60usize, 0..40),
    ) {
        let world = World::new(count);
        let keys = chain(5, blocks);
        world.put(&keys, false);
        let mut gone = HashSet::new();
        for at in drops.into_iter().filter(|&at| at < blocks) {
            let mut part = world.points[world.directory.members().owner(keys[at])].index.lock().unwrap();
            if let Some(slot) = part.find(ObjectId { kind: Kind::Block, key: keys[at] }) && part.remove_leaf(slot).is_ok() {
                gone.insert(keys[at]);
            }
        }
        prop_assert_eq!(world.check(&keys, 0).blocks, keys.iter().take_while(|key| !gone.contains(key)).count());
    }
}

#[test]
fn who_is_down_is_not_asked_until_it_may_be() {
    let world = World::new(3);
    let keys = chain(0, 30);
    world.put(&keys, false);
    let off = world.directory.members().owner(keys[0]);
    world.points[off].off.store(true, Ordering::Relaxed);
    let asked = || world.points[off].asked.load(Ordering::Relaxed);
    assert_eq!(world.check(&keys, 1).blocks, 0);
    assert_eq!(asked(), 1);
    assert_eq!(world.check(&keys, 5).blocks, 0);
    assert_eq!(asked(), 1, "still down");
    world.points[off].off.store(false, Ordering::Relaxed);
    assert_eq!(world.check(&keys, 6).blocks, 30);
    assert_eq!(asked(), 2);
    assert!(world.directory.is_up(off, Duration::ZERO));
}

#[test]
fn an_answer_beyond_the_question_adds_nothing() {
    let directory = Directory::new(Members::new(["one"]).unwrap(), RETRY);
    let plan = directory.plan(&chain(0, 4), Duration::ZERO).unwrap();
    let lie = Found { blocks: 1000, slices: vec![1000, 3, 9] };
    assert_eq!(directory.merge(&plan, &[Some(lie)], Duration::ZERO), Found { blocks: 4, slices: vec![3] });
    assert_eq!(directory.merge(&plan, &[], Duration::ZERO), Found::default(), "nobody answered");
    assert!(!directory.is_up(0, Duration::from_secs(4)));
}

#[test]
fn a_chain_that_is_too_long_is_refused() {
    let directory = Directory::new(Members::new(["one"]).unwrap(), RETRY);
    let keys = vec![key(1); MAX_CHAIN + 1];
    assert!(matches!(directory.plan(&keys, Duration::ZERO), Err(Error::Invalid(_))));
}

#[test]
fn names_are_held_to_being_names() {
    assert!(Members::new(Vec::<String>::new()).is_err());
    assert!(Members::new(["a", ""]).is_err());
    assert!(Members::new(["a", "b", "a"]).unwrap_err().to_string().contains("a is named twice"));
}

#[test]
fn keys_are_spread_and_stay_where_they_are() {
    let names = ["kv-0", "kv-1", "kv-2", "kv-3", "kv-4"];
    let (five, four) = (Members::new(names).unwrap(), Members::new(names[..4].iter().copied()).unwrap());
    let mut counts = [0_u32; 5];
    for number in 0..20_000 {
        let owner = five.owner(key(number));
        counts[owner] += 1;
        // Only the keys of the one that went are moved.
        assert!(owner == 4 || four.owner(key(number)) == owner);
        // Keys that differ in a few bits are spread as well.
        assert!(five.owner(Key(u128::from(number))) < 5);
    }
    // Binomial, 20,000 at 1/5: six standard deviations are 340.
    assert!(counts.iter().all(|&count| count.abs_diff(4000) < 340), "{counts:?}");
    let turned = Members::new(names.iter().rev().copied()).unwrap();
    assert!((0..100).all(|number| turned.owner(key(number)) == 4 - five.owner(key(number))), "the order of the list");
}

/// Every client and version has to cut alike.
#[test]
fn the_cut_is_part_of_the_format() {
    let members = Members::new(["kv-0", "kv-1", "kv-2", "kv-3", "kv-4"]).unwrap();
    let owners: Vec<usize> = (0..24).map(|number| members.owner(key(number))).collect();
    assert_eq!(owners, [2, 3, 2, 2, 4, 3, 1, 0, 3, 4, 3, 0, 4, 0, 4, 0, 0, 1, 0, 2, 3, 3, 3, 2]);
}
