//! Random calls of a store against a model of it, with restarts in between, under every policy.
//!
//! The model hears from the policy what comes and goes and is told nothing of why it should: what it holds the store to is that nothing goes
//! otherwise, that answers and counts say what is there, that a restart loses nothing, and that what was removed stays away.
#![allow(clippy::unwrap_used)]

mod kit;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use deepinfer_kvstore::policy::{PolicyKind, Why};
use deepinfer_kvstore::record::span;
use deepinfer_kvstore::store::{Got, Put, Rule, Started, Store, Want};
use deepinfer_kvstore::{Class, Error, Key, Kind, ObjectId};
use kit::*;
use proptest::prelude::*;

const CHAINS: u64 = 6;
const LENGTH: u64 = 8;

#[derive(Clone, Debug)]
enum Op {
    Put {
        chain: u64,
        from: u64,
        to: u64,
        slices: u8,
        backwards: bool,
    },
    /// The three phases, some of them revoked.
    Phases {
        chain: u64,
        at: u64,
        revoke: bool,
    },
    Check {
        chain: u64,
        blocks: u64,
    },
    Range {
        chain: u64,
        at: u64,
        start: u32,
        bytes: u32,
    },
    Remove {
        chain: u64,
        at: u64,
        slice: bool,
    },
    Life {
        agents: bool,
        seconds: u32,
    },
    Wait {
        seconds: u32,
    },
    Collect {
        force: bool,
    },
    Tend,
    Reopen {
        capacity: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let at = 0..LENGTH;
    let chain = 0..CHAINS;
    prop_oneof![
        8 => (chain.clone(), at.clone(), 1..=LENGTH, any::<u8>(), any::<bool>()).prop_map(
            |(chain, from, blocks, slices, backwards)| Op::Put { chain, from, to: (from + blocks).min(LENGTH), slices, backwards }
        ),
        1 => (chain.clone(), at.clone(), any::<bool>()).prop_map(|(chain, at, revoke)| Op::Phases { chain, at, revoke }),
        2 => (chain.clone(), 1..=LENGTH).prop_map(|(chain, blocks)| Op::Check { chain, blocks }),
        1 => (chain.clone(), at.clone(), 0u32..3000, 0u32..3000)
            .prop_map(|(chain, at, start, bytes)| Op::Range { chain, at, start, bytes }),
        2 => (chain, at, any::<bool>()).prop_map(|(chain, at, slice)| Op::Remove { chain, at, slice }),
        1 => (any::<bool>(), 1u32..400).prop_map(|(agents, seconds)| Op::Life { agents, seconds }),
        2 => (1u32..60).prop_map(|seconds| Op::Wait { seconds }),
        3 => any::<bool>().prop_map(|force| Op::Collect { force }),
        1 => Just(Op::Tend),
        2 => (1u64..4).prop_map(|part| Op::Reopen { capacity: part * (40 << 10) }),
    ]
}

fn class(chain: u64) -> Class {
    if chain.is_multiple_of(2) { Class::Chat } else { Class::Agent }
}

fn a_block(chain: u64, at: u64) -> Object {
    let mut object = block(chain, at, ((chain * 977 + at * 401) % 3000) as usize);
    object.meta.class = class(chain);
    object
}

fn a_slice(chain: u64, at: u64) -> Object {
    let mut object = slice(chain, at, ((chain * 577 + at * 701) % 5000) as usize);
    object.meta.class = class(chain);
    object
}

struct Model {
    kit: Kit,
    events: Arc<Mutex<Vec<(ObjectId, Heard)>>>,
    objects: BTreeMap<ObjectId, Object>,
    /// With the time of the last use.
    present: HashMap<ObjectId, u32>,
    away: BTreeSet<ObjectId>,
    /// Of chats and of agents.
    lives: [u32; 2],
}

impl Model {
    fn new(policy: PolicyKind) -> Self {
        let mut kit = Kit::new();
        kit.config.policy = policy;
        kit.config.capacity = 60 << 10;
        kit.config.slack = 16 << 10;
        let all =
            (0..CHAINS).flat_map(|chain| (0..LENGTH).flat_map(move |at| [a_block(chain, at), a_slice(chain, at)]));
        Self {
            lives: [kit.config.lifetimes.chat, kit.config.lifetimes.agent],
            kit,
            events: Arc::default(),
            objects: all.map(|object| (object.meta.id, object)).collect(),
            present: HashMap::new(),
            away: BTreeSet::new(),
        }
    }

    /// Opens, and holds what is there then to what was before.
    fn open(&mut self) -> Store {
        let events = Arc::clone(&self.events);
        let tell = move |id, heard| events.lock().unwrap().push((id, heard));
        let policy = self.kit.config.policy.build(self.kit.config.lifetimes);
        let store = self.kit.open_with(Box::new(Telling(policy, tell)));
        let heard = self.events.lock().unwrap().clone();
        let found: BTreeSet<ObjectId> =
            heard.iter().filter(|(_, heard)| matches!(heard, Heard::In(_))).map(|&(id, _)| id).collect();
        for id in self.present.keys() {
            assert!(found.contains(id), "{id} is gone after a restart");
        }
        for id in &self.away {
            assert!(!found.contains(id), "{id} was removed and is back");
        }
        self.present.clear();
        self.hear();
        store
    }

    fn hear(&mut self) {
        for (id, heard) in std::mem::take(&mut *self.events.lock().unwrap()) {
            match heard {
                Heard::In(when) => {
                    self.away.remove(&id);
                    assert!(self.present.insert(id, when).is_none(), "{id} is there twice");
                }
                Heard::Used(when) => {
                    let last = self.present.get_mut(&id).unwrap();
                    *last = when.max(*last);
                }
                Heard::Out(why) => {
                    assert!(self.present.remove(&id).is_some(), "{id} went and was not there");
                    if why == Why::Removed {
                        self.away.insert(id);
                    }
                }
            }
        }
    }

    fn readable(&self, store: &Store, id: ObjectId) -> bool {
        let life = self.lives[usize::from(self.objects[&id].meta.class == Class::Agent)];
        self.present.get(&id).is_some_and(|&used| store.now().saturating_sub(used) <= life)
    }

    /// Answers and counts say what is there, and nothing else is.
    fn look(&mut self, store: &Store, read: u128) {
        self.hear();
        let stats = store.stats();
        let blocks = self.present.keys().filter(|id| id.kind == Kind::Block).count() as u64;
        assert_eq!((stats.blocks, stats.blocks + stats.slices), (blocks, self.present.len() as u64));
        assert_eq!(stats.bytes, self.present.keys().map(|id| self.objects[id].bytes.len() as u64).sum::<u64>());
        assert_eq!(stats.live, self.present.keys().map(|id| span(self.objects[id].meta.len)).sum::<u64>());
        assert!(stats.live <= self.kit.config.capacity, "{stats:?}");
        assert_eq!(stats.counts.quarantined, 0);
        for (id, object) in &self.objects {
            assert_eq!(store.length(TENANT, *id), self.readable(store, *id).then_some(object.meta.len), "{id}");
        }
        // A read is a use: of a few, so that others grow old.
        let ids: Vec<ObjectId> = self.objects.keys().filter(|id| id.key.0 % 7 == read).copied().collect();
        for id in ids {
            assert_eq!(has(store, &self.objects[&id]), self.readable(store, id), "{id}");
            self.hear();
        }
    }

    /// Blocks of a chain from its first on that are there.
    fn prefix(&self, chain: &[Key]) -> usize {
        let there = |key: &&Key| self.present.contains_key(&ObjectId { kind: Kind::Block, key: **key });
        chain.iter().take_while(there).count()
    }

    fn put(&mut self, store: &Store, objects: &[Object]) {
        for (put, object) in put(store, objects).iter().zip(objects) {
            let refused = matches!(put, Put::NoParent | Put::Failed(Error::Full(_)));
            assert!(put.is_there() || refused, "{}: {put:?}", object.meta.id);
        }
        // All that was stored was told of, and went only where that was told.
        self.hear();
    }

    fn do_one(&mut self, store: &Store, op: &Op) {
        match *op {
            Op::Put { chain, from, to, slices, backwards } => {
                let mut objects: Vec<Object> = (from..to).map(|at| a_block(chain, at)).collect();
                objects.extend((from..to).filter(|at| slices >> at & 1 == 1).map(|at| a_slice(chain, at)));
                if backwards {
                    objects.reverse();
                }
                self.put(store, &objects);
            }
            Op::Phases { chain, at, revoke } => {
                let object = a_block(chain, at);
                if let Started::Write(put) = store.start(&[object.meta], Rule::Exact).remove(0) {
                    let (first, rest) = object.bytes.split_at(object.bytes.len() / 2);
                    store.write(put, 0, first).unwrap();
                    store.write(put, first.len() as u32, rest).unwrap();
                    self.hear();
                    assert!(!self.present.contains_key(&object.meta.id));
                    if revoke {
                        store.revoke(&[put]);
                    } else {
                        let done = store.commit(&[put], Rule::Exact).remove(0);
                        self.hear();
                        assert_eq!(self.present.contains_key(&object.meta.id), done.is_there(), "{done:?}");
                    }
                }
            }
            Op::Check { chain, blocks } => {
                self.hear();
                let keys = kit::chain(chain, blocks);
                let found = store.check(TENANT, &keys, 8).unwrap();
                // What is over at the end of the chain does not count; within it, it was used when its children were.
                let mut prefix = self.prefix(&keys);
                while prefix > 0 && !self.readable(store, ObjectId { kind: Kind::Block, key: keys[prefix - 1] }) {
                    prefix -= 1;
                }
                let slice = |at: &usize| self.present.contains_key(&ObjectId { kind: Kind::Slice, key: keys[*at] });
                assert_eq!(found.blocks, prefix);
                assert_eq!(found.slices, (0..prefix).rev().filter(slice).collect::<Vec<_>>());
            }
            Op::Range { chain, at, start, bytes } => {
                let object = a_block(chain, at);
                let mut into = vec![0; bytes as usize];
                let got = store.get(TENANT, &mut [Want { id: object.meta.id, start, into: &mut into }]).remove(0);
                let (readable, end) = (self.readable(store, object.meta.id), start + bytes);
                match got {
                    Got::Hit { .. } => assert_eq!(into, object.bytes[start as usize..end as usize]),
                    Got::Miss => assert!(!readable),
                    Got::Refused(_) => assert!(readable && end > object.meta.len),
                }
            }
            Op::Remove { chain, at, slice } => {
                let id = if slice { a_slice(chain, at) } else { a_block(chain, at) }.meta.id;
                self.hear();
                let child = ObjectId { kind: Kind::Block, key: key(chain, at + 1) };
                let may = self.present.contains_key(&id) && (slice || !self.present.contains_key(&child));
                assert_eq!(store.remove(&[id]).unwrap() > 0, may);
                self.hear();
                assert_eq!(self.away.contains(&id) && may, may);
            }
            Op::Life { agents, seconds } => {
                store.set_lifetime(if agents { Class::Agent } else { Class::Chat }, seconds).unwrap();
                self.lives[usize::from(agents)] = seconds;
            }
            Op::Wait { seconds } => self.kit.hands.pass(seconds),
            Op::Collect { force } => while store.collect(force).unwrap() && !force {},
            Op::Tend => assert!(store.tend().error.is_none()),
            Op::Reopen { .. } => {}
        }
    }
}

fn run(policy: PolicyKind, ops: &[Op]) {
    let mut model = Model::new(policy);
    let mut store = model.open();
    for (at, op) in ops.iter().enumerate() {
        if let Op::Reopen { capacity } = *op {
            drop(store);
            model.kit.config.capacity = capacity;
            store = model.open();
        }
        model.do_one(&store, op);
        model.look(&store, at as u128 % 7);
    }
    drop(store);
    model.kit.config.capacity = 64 << 20;
    let store = model.open();
    model.look(&store, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_store_is_its_model(ops in prop::collection::vec(op(), 1..60)) {
        for policy in PolicyKind::ALL {
            run(policy, &ops);
        }
    }
}

#[test]
fn what_was_removed_does_not_come_back_in_an_earlier_copy() {
    let mut model = Model::new(PolicyKind::Lru);
    let store = model.open();
    let mine = [a_block(0, 0)];
    model.put(&store, &mine);
    // Evicted, its record still there; written again; removed; the segment of the removed one is deleted before that of the first.
    model.kit.hands.pass(10);
    for chain in 1..CHAINS {
        let objects: Vec<Object> = (0..LENGTH).flat_map(|at| [a_block(chain, at), a_slice(chain, at)]).collect();
        model.put(&store, &objects);
    }
    assert!(!model.present.contains_key(&mine[0].meta.id));
    model.put(&store, &mine);
    assert_eq!(store.remove(&[mine[0].meta.id]).unwrap(), 1);
    model.hear();
    drop(store);
    let store = model.open();
    assert!(!has(&store, &mine[0]));
    for _ in 0..3 {
        store.collect(true).unwrap();
    }
    drop(store);
    model.hear();
    let store = model.open();
    assert!(!has(&store, &mine[0]));
    model.put(&store, &mine);
    drop(store);
    assert!(has(&model.open(), &mine[0]));
}
