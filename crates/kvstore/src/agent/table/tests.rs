//! Against a model that writes the owner of every grain down.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::agent::space::GRAIN;
use crate::key::{Key, Kind};

const GRAINS: u64 = 24;

fn name(number: u8) -> Name {
    let id = ObjectId { kind: Kind::Block, key: Key(u128::from(number / 2)) };
    Name { tenant: u128::from(number % 2), id }
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(u32),
    Publish(usize, u8),
    Pin(u8),
    Unpin(usize),
    Remove(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..9 * GRAIN as u32).prop_map(Step::Reserve),
        4 => (any::<prop::sample::Index>(), 0u8..10).prop_map(|(at, name)| Step::Publish(at.index(64), name)),
        3 => (0u8..10).prop_map(Step::Pin),
        5 => any::<prop::sample::Index>().prop_map(|at| Step::Unpin(at.index(64))),
        1 => (0u8..10).prop_map(Step::Remove),
    ];
    proptest::collection::vec(step, 1..200)
}

/// Everything that somebody holds: a pin or a reservation.
struct Held {
    row: RowId,
    extent: Extent,
    reserved: bool,
}

/// What the model knows of an object in sight.
struct Known {
    name: Name,
    extent: Extent,
    used: u64,
}

#[derive(Default)]
struct Model {
    held: Vec<Held>,
    known: Vec<Known>,
    now: u64,
}

impl Model {
    fn is_held(&self, extent: Extent) -> bool {
        self.held.iter().any(|held| held.extent.place == extent.place)
    }

    /// Drops what the table has evicted: unpinned ones only, and the least recently used of them first.
    fn notice_evictions(&mut self, table: &Table) {
        let unpinned: Vec<u64> =
            self.known.iter().filter(|known| !self.is_held(known.extent)).map(|known| known.used).collect();
        let mut gone = Vec::new();
        self.known.retain(|known| {
            let there = table.find(known.name).is_some();
            if !there {
                gone.push(known.used);
            }
            there
        });
        for used in &gone {
            assert!(unpinned.contains(used), "a pinned object went");
            assert!(unpinned.iter().all(|other| other >= used || gone.contains(other)), "not the oldest went");
        }
    }

    fn check(&self, table: &Table) {
        // Every grain has one owner: a holder, an object in sight, or nobody.
        let mut owners = vec![0u32; GRAINS as usize];
        let mut extents: Vec<Extent> = self.held.iter().map(|held| held.extent).collect();
        extents.extend(self.known.iter().map(|known| known.extent));
        extents.sort_by_key(|extent| extent.place);
        extents.dedup_by_key(|extent| extent.place);
        let taken = extents.iter().map(|extent| (extent.place, span(extent.len)));
        for (place, len) in taken.chain(table.space.extents()) {
            assert!(place + len <= GRAINS * GRAIN);
            for grain in place / GRAIN..(place + len) / GRAIN {
                owners[grain as usize] += 1;
            }
        }
        assert!(owners.iter().all(|&owner| owner == 1), "{owners:?}");
        let free: Vec<(u64, u64)> = table.space.extents().collect();
        assert!(free.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0), "neighbours are not joined: {free:?}");
        for known in &self.known {
            assert_eq!(table.find(known.name), Some(known.extent));
        }
        assert_eq!(table.sizes().0, self.known.len() as u64);
        let mut pinned: Vec<Extent> = self.held.iter().map(|held| held.extent).collect();
        pinned.sort_by_key(|extent| extent.place);
        pinned.dedup_by_key(|extent| extent.place);
        assert_eq!(table.sizes().2, pinned.iter().map(|extent| span(extent.len)).sum::<u64>());
        assert!(table.rows.len() <= GRAINS as usize, "rows are used again");
    }

    fn step(&mut self, table: &mut Table, step: &Step) {
        self.now += 1;
        match *step {
            Step::Reserve(len) => {
                let reserved = table.reserve(len);
                self.notice_evictions(table);
                if let Some((row, extent)) = reserved {
                    self.held.push(Held { row, extent, reserved: true });
                } else {
                    assert!(self.known.iter().all(|known| self.is_held(known.extent)), "there was more to evict");
                }
            }
            Step::Publish(at, number) => {
                let reserved: Vec<usize> = (0..self.held.len()).filter(|&at| self.held[at].reserved).collect();
                let Some(&at) = reserved.get(at % reserved.len().max(1)) else { return };
                let taken = self.known.iter().any(|known| known.name == name(number));
                let held = &mut self.held[at];
                assert_eq!(table.publish(held.row, name(number), self.now), !taken);
                if !taken {
                    held.extent.checksum = self.now;
                    held.reserved = false;
                    self.known.push(Known { name: name(number), extent: held.extent, used: self.now });
                }
            }
            Step::Pin(number) => {
                let known = self.known.iter().find(|known| known.name == name(number));
                let pinned = table.pin(name(number));
                assert_eq!(pinned.map(|(_, extent)| extent), known.map(|known| known.extent));
                self.held.extend(pinned.map(|(row, extent)| Held { row, extent, reserved: false }));
            }
            Step::Unpin(at) => {
                if self.held.is_empty() {
                    return;
                }
                let held = self.held.swap_remove(at % self.held.len());
                table.unpin(held.row);
                if !self.is_held(held.extent)
                    && let Some(known) = self.known.iter_mut().find(|known| known.extent.place == held.extent.place)
                {
                    known.used = self.now;
                }
            }
            Step::Remove(number) => {
                let before = self.known.len();
                self.known.retain(|known| known.name != name(number));
                assert_eq!(table.remove(name(number)), self.known.len() < before);
            }
        }
        self.check(table);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn extents_have_one_owner_and_pins_hold(steps in steps()) {
        let mut table = Table::new(GRAINS * GRAIN + 7);
        let mut model = Model::default();
        for step in &steps {
            model.step(&mut table, step);
        }
        // When nobody holds anything, all of it can be had again.
        for held in model.held.drain(..) {
            table.unpin(held.row);
        }
        prop_assert!(table.reserve((GRAINS * GRAIN) as u32).is_some());
        prop_assert_eq!(table.sizes().0, 0);
    }
}
