//! The index against a plain map, over random orders of every operation.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};

use deepinfer_kvstore::index::{HasChildren, Index, Refused, Slot};
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};
use proptest::prelude::*;

/// Few keys, so that every kind of meeting happens; spread like hashes, with neighbours that share a table or the bits it looks at.
fn key(number: u8) -> Key {
    match number % 4 {
        0 => Key(u128::from(number)),
        1 => Key(u128::from(number) << 64),
        _ => Key(u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)),
    }
}

fn block(number: u8) -> ObjectId {
    ObjectId { kind: Kind::Block, key: key(number) }
}

fn slice(number: u8) -> ObjectId {
    ObjectId { kind: Kind::Slice, key: key(number) }
}

#[derive(Clone, Debug, PartialEq)]
struct Known {
    meta: Meta,
    place: Place,
    touched: u32,
    lost: bool,
}

/// What the index should do, said the slow way.
#[derive(Default)]
struct Model {
    objects: HashMap<ObjectId, Known>,
}

#[derive(Debug, PartialEq)]
enum Answer {
    Ok,
    NoParent,
    BadParent,
    Exists,
    Conflict,
}

impl Model {
    fn children(&self, key: Key) -> u32 {
        self.objects.values().filter(|o| o.meta.id.kind == Kind::Block && o.meta.parent == Some(key)).count() as u32
    }

    fn insert(&mut self, meta: Meta, place: Place) -> Answer {
        if (meta.id.kind == Kind::Slice) != (meta.parent == Some(meta.id.key)) {
            return Answer::BadParent;
        }
        if let Some(known) = self.objects.get_mut(&meta.id) {
            if !known.lost {
                let same = (known.meta.len, known.meta.checksum) == (meta.len, meta.checksum);
                return if same { Answer::Exists } else { Answer::Conflict };
            }
            known.lost = false;
            known.place = place;
            known.touched = known.touched.max(meta.written);
            (known.meta.len, known.meta.checksum) = (meta.len, meta.checksum);
            return Answer::Ok;
        }
        if meta.parent.is_some_and(|parent| !self.objects.contains_key(&ObjectId { kind: Kind::Block, key: parent })) {
            return Answer::NoParent;
        }
        self.objects.insert(meta.id, Known { meta, place, touched: meta.written, lost: false });
        Answer::Ok
    }

    fn remove(&mut self, id: ObjectId) -> Result<Vec<ObjectId>, u32> {
        if id.kind == Kind::Block && self.children(id.key) > 0 {
            return Err(self.children(id.key));
        }
        let mut gone = vec![id];
        if id.kind == Kind::Block {
            gone.push(ObjectId { kind: Kind::Slice, key: id.key });
        }
        gone.retain(|id| self.objects.remove(id).is_some());
        Ok(gone)
    }

    /// By the links, one after the other.
    fn longest(&self, keys: &[Key]) -> usize {
        let mut before = None;
        keys.iter()
            .take_while(|&&key| {
                let known = self.objects.get(&ObjectId { kind: Kind::Block, key });
                let follows = known.is_some_and(|known| known.meta.parent == before);
                before = Some(key);
                follows
            })
            .count()
    }

    /// The chain that ends at a key, from its first block.
    fn chain(&self, mut end: Key) -> Vec<Key> {
        let mut keys = vec![end];
        while let Some(known) = self.objects.get(&ObjectId { kind: Kind::Block, key: end }) {
            let Some(parent) = known.meta.parent else { break };
            keys.push(parent);
            end = parent;
        }
        keys.reverse();
        keys
    }
}

#[derive(Clone, Debug)]
enum Op {
    Block { number: u8, parent: Option<u8>, bytes: u8 },
    Slice { number: u8, bytes: u8 },
    Remove { number: u8, slice: bool },
    Lose { number: u8, slice: bool },
    Touch { number: u8, now: u32 },
    Relocate { number: u8, stale: bool },
    Longest { end: u8, more: Vec<u8> },
    Foreign { keys: Vec<u8> },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    const N: std::ops::Range<u8> = 0..24;
    let op = prop_oneof![
        6 => (N, prop::option::weighted(0.85, N), 0..3u8).prop_map(|(number, parent, bytes)| Op::Block { number, parent, bytes }),
        2 => (N, 0..3u8).prop_map(|(number, bytes)| Op::Slice { number, bytes }),
        3 => (N, prop::bool::weighted(0.3)).prop_map(|(number, slice)| Op::Remove { number, slice }),
        1 => (N, prop::bool::weighted(0.3)).prop_map(|(number, slice)| Op::Lose { number, slice }),
        1 => (N, 0..100u32).prop_map(|(number, now)| Op::Touch { number, now }),
        1 => (N, any::<bool>()).prop_map(|(number, stale)| Op::Relocate { number, stale }),
        3 => (N, prop::collection::vec(N, 0..4)).prop_map(|(end, more)| Op::Longest { end, more }),
        1 => prop::collection::vec(N, 0..8).prop_map(|keys| Op::Foreign { keys }),
    ];
    prop::collection::vec(op, 1..120)
}

fn answer(result: Result<Slot, Refused>) -> Answer {
    match result {
        Ok(_) => Answer::Ok,
        Err(Refused::NoParent) => Answer::NoParent,
        Err(Refused::BadParent) => Answer::BadParent,
        Err(Refused::Exists(_)) => Answer::Exists,
        Err(Refused::Conflict(_)) => Answer::Conflict,
        Err(Refused::Full) => unreachable!("a few dozen entries"),
    }
}

/// Everything the index says equals the model.
fn compare(index: &Index, model: &Model) {
    let mut seen = HashMap::new();
    for (slot, entry) in index.iter() {
        let known = &model.objects[&entry.id];
        assert_eq!(index.find(entry.id), Some(slot));
        assert_eq!((entry.place, entry.touched, entry.lost), (known.place, known.touched, known.lost));
        assert_eq!((entry.len, entry.checksum), (known.meta.len, known.meta.checksum));
        assert_eq!((entry.class, entry.tenant), (known.meta.class, known.meta.tenant));
        let parent = entry.parent.map(|parent| index.entry(parent).unwrap().id);
        assert_eq!(parent.map(|id| (id.kind, id.key)), known.meta.parent.map(|key| (Kind::Block, key)));
        let children = if entry.id.kind == Kind::Block { model.children(entry.id.key) } else { 0 };
        assert_eq!(entry.children, children);
        assert_eq!(index.is_leaf(slot), children == 0);
        let hangs = entry.slice.map(|slice| index.entry(slice).unwrap().id);
        let slice = ObjectId { kind: Kind::Slice, key: entry.id.key };
        let has = entry.id.kind == Kind::Block && model.objects.contains_key(&slice);
        assert_eq!(hangs, has.then_some(slice));
        assert_eq!(index.get(entry.id).is_some(), !known.lost);
        assert!(seen.insert(entry.id, slot).is_none());
    }
    assert_eq!(seen.len(), model.objects.len());
    assert_eq!(index.len(), model.objects.len());
    let mut bytes: BTreeMap<TenantId, (u64, u64)> = BTreeMap::new();
    for known in model.objects.values().filter(|known| !known.lost) {
        let usage = bytes.entry(known.meta.tenant).or_default();
        usage.0 += u64::from(known.meta.len);
        usage.1 += 1;
    }
    let used = index.tenants().map(|(tenant, usage)| (tenant, (usage.bytes, usage.blocks + usage.slices))).collect();
    assert_eq!(bytes, used);
    assert_eq!(index.total().bytes, bytes.values().map(|usage| usage.0).sum::<u64>());
}

fn meta(id: ObjectId, parent: Option<Key>, bytes: u8, written: u32) -> Meta {
    let tenant = TenantId((id.key.0 % 3) as u16);
    let class = Class::ALL[(id.key.0 % 2) as usize];
    Meta { id, parent, tenant, class, len: 100 + u32::from(bytes), checksum: u64::from(bytes), written }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn it_is_a_plain_map_with_links(ops in ops()) {
        let mut index = Index::new();
        let mut model = Model::default();
        for (at, op) in ops.into_iter().enumerate() {
            let at = at as u32;
            let place = Place { segment: 1, offset: at };
            match op {
                Op::Block { number, parent, bytes } => {
                    let meta = meta(block(number), parent.map(key), bytes, at);
                    prop_assert_eq!(answer(index.insert(&meta, place)), model.insert(meta, place));
                }
                Op::Slice { number, bytes } => {
                    let meta = meta(slice(number), Some(key(number)), bytes, at);
                    prop_assert_eq!(answer(index.insert(&meta, place)), model.insert(meta, place));
                }
                Op::Remove { number, slice: is_slice } => {
                    let id = if is_slice { slice(number) } else { block(number) };
                    let Some(slot) = index.find(id) else {
                        prop_assert!(!model.objects.contains_key(&id));
                        continue;
                    };
                    match (index.remove_leaf(slot), model.remove(id)) {
                        (Ok(removed), Ok(gone)) => {
                            let removed = removed.unwrap();
                            let went = std::iter::once(removed.entry.id).chain(removed.slice.map(|(_, entry)| entry.id));
                            prop_assert_eq!(went.collect::<Vec<_>>(), gone);
                            if let Some(parent) = removed.uncovered {
                                prop_assert_eq!(model.children(index.entry(parent).unwrap().id.key), 0);
                            }
                        }
                        (Err(HasChildren(count)), Err(expected)) => prop_assert_eq!(count, expected),
                        (got, expected) => prop_assert!(false, "{:?} but {:?}", got, expected),
                    }
                }
                Op::Lose { number, slice: is_slice } => {
                    let id = if is_slice { slice(number) } else { block(number) };
                    let Some(slot) = index.find(id) else { continue };
                    let removed = index.lose(slot);
                    if model.remove(id).is_ok() {
                        prop_assert_eq!(removed.map(|r| r.entry.id), Some(id));
                    } else {
                        prop_assert!(removed.is_none());
                        model.objects.get_mut(&id).unwrap().lost = true;
                    }
                }
                Op::Touch { number, now } => {
                    if let Some(slot) = index.find(block(number)) {
                        index.touch(slot, now);
                        let known = model.objects.get_mut(&block(number)).unwrap();
                        known.touched = known.touched.max(now);
                    }
                }
                Op::Relocate { number, stale } => {
                    let Some(slot) = index.find(block(number)) else { continue };
                    let entry = index.entry(slot).unwrap();
                    let from = if stale { Place { segment: 9, offset: 9 } } else { entry.place };
                    let moved = index.relocate(entry.id, from, place);
                    prop_assert_eq!(moved, !stale && !entry.lost);
                    if moved {
                        model.objects.get_mut(&entry.id).unwrap().place = place;
                    }
                }
                Op::Longest { end, more } => {
                    // A true chain goes on with keys that are not here.
                    let mut keys = model.chain(key(end));
                    keys.extend(more.iter().map(|&number| Key(!key(number).0)));
                    let found = index.longest(&keys);
                    prop_assert_eq!(found, model.longest(&keys));
                    let with_slice = |at: &usize| model.objects.contains_key(&ObjectId { kind: Kind::Slice, key: keys[*at] });
                    let slices: Vec<usize> = (0..found).rev().filter(with_slice).collect();
                    prop_assert_eq!(&index.slices(&keys[..found], usize::MAX), &slices);
                    prop_assert_eq!(&index.slices(&keys[..found], 1), &slices[..slices.len().min(1)]);
                }
                Op::Foreign { keys } => {
                    // Any keys in any order: what is found ends with a block that follows the one before it, directly or a few steps up.
                    let keys: Vec<Key> = keys.into_iter().map(key).collect();
                    let found = index.longest(&keys);
                    prop_assert!(found >= model.longest(&keys));
                    if found > 0 {
                        let chain = model.chain(keys[found - 1]);
                        assert!(model.objects.contains_key(&ObjectId { kind: Kind::Block, key: keys[found - 1] }));
                        let above = &chain[..chain.len() - 1];
                        let follows = if found == 1 { above.is_empty() } else { above.contains(&keys[found - 2]) };
                        prop_assert!(follows);
                    }
                }
            }
            compare(&index, &model);
        }
    }

    /// However the records lie, the entries are those whose ancestors are there.
    #[test]
    fn recovery_needs_no_order(parents in prop::collection::vec(prop::option::weighted(0.9, 0..40u8), 1..40), order in any::<u64>(), drop in 0..40usize) {
        use deepinfer_kvstore::index::{Added, Recovery};
        // A parent has a lower number, so there is no circle.
        let mut records: Vec<Meta> = parents.iter().enumerate().filter(|&(at, _)| at != drop).map(|(at, parent)| {
            let parent = parent.filter(|_| at > 0).map(|parent| key(parent % at as u8));
            meta(block(at as u8), parent, 0, at as u32)
        }).collect();
        let mut whole = Model::default();
        let mut left = 0;
        for record in &records {
            if whole.insert(*record, Place { segment: 1, offset: 0 }) == Answer::NoParent {
                left += 1;
            }
        }
        let mut state = order;
        for at in (1..records.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            records.swap(at, (state >> 33) as usize % (at + 1));
        }
        let mut index = Index::new();
        let mut recovery = Recovery::new();
        let mut told = Vec::new();
        for (offset, record) in records.iter().enumerate() {
            let place = Place { segment: 1, offset: offset as u32 };
            let added = recovery.add(&mut index, *record, place, &mut |slot, meta| told.push((slot, meta.id)));
            prop_assert!(matches!(added, Added::Inserted(_) | Added::Waiting));
        }
        // A second copy further on takes over.
        for (offset, record) in records.iter().enumerate() {
            if index.find(record.id).is_some() {
                let to = Place { segment: 2, offset: offset as u32 };
                let from = index.get(record.id).unwrap().1.place;
                prop_assert_eq!(recovery.add(&mut index, *record, to, &mut |_, _| {}), Added::Moved(from));
                prop_assert_eq!(index.get(record.id).unwrap().1.place, to);
            }
        }
        prop_assert_eq!(index.len(), whole.objects.len());
        prop_assert!(whole.objects.keys().all(|&id| index.find(id).is_some()));
        prop_assert_eq!(told.len(), whole.objects.len());
        let before_children = told.iter().enumerate().all(|(at, (slot, _))| {
            let parent = index.entry(*slot).unwrap().parent;
            parent.is_none_or(|parent| told[..at].iter().any(|(slot, _)| *slot == parent))
        });
        prop_assert!(before_children);
        prop_assert_eq!(recovery.orphans().count(), left);
    }
}

#[test]
fn a_shared_key_of_another_chain_does_not_count() {
    let mut index = Index::new();
    let place = Place { segment: 1, offset: 0 };
    for (number, parent) in [(1, None), (2, Some(1)), (3, Some(2)), (11, None), (12, Some(11))] {
        index.insert(&meta(block(number), parent.map(key), 0, 0), place).unwrap();
    }
    let keys = |numbers: &[u8]| numbers.iter().map(|&number| key(number)).collect::<Vec<_>>();
    assert_eq!(index.longest(&keys(&[1, 2, 3, 4])), 3);
    assert_eq!(index.longest(&keys(&[1, 12])), 1, "12 follows 11");
    assert_eq!(index.longest(&keys(&[2])), 0, "2 is no first block");
    assert_eq!(index.longest(&keys(&[1, 2, 12])), 2);
    assert_eq!(index.longest(&keys(&[1, 3])), 2, "cut anew: 2 belongs to another entry point now");
    assert_eq!(index.longest(&[]), 0);
}

#[test]
fn a_chain_of_more_than_a_million_tokens_is_refused() {
    use deepinfer_kvstore::index::{MAX_CHAIN, check_chain};
    let keys = vec![key(1); MAX_CHAIN + 1];
    assert!(check_chain(&keys[..MAX_CHAIN]).is_ok());
    assert!(check_chain(&keys).unwrap_err().to_string().contains("8192"));
}

#[test]
fn numbers_are_given_again_and_say_nothing_of_the_dead() {
    let mut index = Index::new();
    let place = Place { segment: 1, offset: 0 };
    let first = index.insert(&meta(block(1), None, 0, 0), place).unwrap();
    index.remove_leaf(first).unwrap().unwrap();
    assert_eq!(index.entry(first), None);
    assert_eq!(index.remove_leaf(first), Ok(None));
    let second = index.insert(&meta(block(2), None, 0, 0), place).unwrap();
    assert_eq!(first, second);
    assert_eq!(index.slots(), 1);
}
