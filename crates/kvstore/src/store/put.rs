//! Writing: what is refused, room for what is not, one append, then visibility.

use std::collections::hash_map;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

use super::live::Live;
use super::stats::add;
use super::{Kept, Store};
use crate::checksum::Sum;
use crate::error::Error;
use crate::index::{Entry, Refused, Slot};
use crate::key::{Key, Kind, ObjectId};
use crate::media::{Place, Record};
use crate::object::{Meta, TenantId};
use crate::policy::{Retention, Scope};
use crate::record::span;

/// What other bytes under a present name mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// An alarm: the bytes of a name are determined.
    #[default]
    Exact,
    /// Nothing but a count: they depend on where a hit ended (`replay`). The first write stays.
    FirstStays,
}

/// What became of an object that was to be written.
#[derive(Debug)]
pub enum Put {
    /// It is durable and visible.
    Stored,
    /// It was there already, under [`Rule::FirstStays`] maybe with other bytes.
    Exists,
    /// It is there with other bytes, which stay.
    Conflict,
    /// Its parent, or the block of a slice, is not there and not in the batch before it.
    NoParent,
    /// Nothing was written.
    Failed(Error),
}

impl Put {
    /// Whether the object is there now.
    pub fn is_there(&self) -> bool {
        matches!(self, Self::Stored | Self::Exists)
    }
}

/// Whether one tenant's objects may hang off, or be read by, another.
pub(super) fn may_see(tenant: TenantId, owner: TenantId) -> bool {
    owner == tenant || owner == TenantId(0)
}

impl Store {
    /// Writes objects whose bytes are at hand: the three phases in one. In any order; parents that are not present must be among them.
    pub fn put(&self, records: &[Record<'_>], rule: Rule) -> Vec<Put> {
        let ticket = self.tickets().take();
        // Asked with the ticket in hand: closing waits for it from then on.
        let done = match self.refuse_when_draining() {
            Ok(()) => self.put_with_ticket(records, rule),
            Err(error) => fail_all(records.len(), &error),
        };
        self.tickets().give_back(ticket);
        if let Some(elsewhere) = self.elsewhere() {
            elsewhere.wake();
        }
        self.collect_if_behind();
        done
    }

    fn put_with_ticket(&self, records: &[Record<'_>], rule: Rule) -> Vec<Put> {
        let adopted = self.adopted(records);
        let records = adopted.as_deref().unwrap_or(records);
        let mut done: Vec<Option<Put>> = records.iter().map(|_| None).collect();
        let coming: HashSet<Key> = records
            .iter()
            .filter(|record| record.meta.id.kind == Kind::Block)
            .map(|record| record.meta.id.key)
            .collect();
        let mut wanted: HashMap<ObjectId, usize> = HashMap::new();
        let mut again: Vec<usize> = Vec::new();
        for (at, record) in records.iter().enumerate() {
            let meta = &record.meta;
            done[at] = self.judge(meta, rule, &coming);
            if done[at].is_some() {
                continue;
            }
            let given: usize = record.pieces.iter().map(|piece| piece.len()).sum();
            if given as u64 != u64::from(meta.len) || Sum::of(record.pieces) != meta.checksum {
                done[at] =
                    Some(Put::Failed(Error::Invalid(format!("the bytes of {} are not those announced", meta.id))));
            } else {
                match wanted.entry(meta.id) {
                    hash_map::Entry::Occupied(_) => again.push(at),
                    hash_map::Entry::Vacant(free) => {
                        free.insert(at);
                    }
                }
            }
        }
        let order = parents_first(records, &wanted);
        self.write_in_groups(records, &order, rule, &mut done);
        for at in again {
            done[at] = self.judge(&records[at].meta, rule, &coming);
        }
        // Left over: parts of a circle of parents, and doubles of what was not stored.
        done.into_iter().map(|put| put.unwrap_or_else(|| self.count(Put::NoParent))).collect()
    }

    /// Whether an object is refused or not needed, seen before its bytes; `None` where they are wanted. What is present counts as used.
    pub(super) fn judge(&self, meta: &Meta, rule: Rule, coming: &HashSet<Key>) -> Option<Put> {
        if meta.len > self.config.max_object {
            let text = format!("{} has {} bytes: {} is the most", meta.id, meta.len, self.config.max_object);
            return Some(Put::Failed(Error::Invalid(text)));
        }
        if (meta.id.kind == Kind::Slice) != (meta.parent == Some(meta.id.key)) {
            let text = format!("{}: a slice belongs to the block of its own key, a block to another one", meta.id);
            return Some(Put::Failed(Error::Invalid(text)));
        }
        let now = self.now();
        let mut kept = self.kept_mut();
        let Kept { retention, live } = &mut *kept;
        if let Some((slot, entry)) = retention.get(meta.id) {
            if retention.is_over(&entry, now) && !same(&entry, meta) {
                // Nobody can read it any more: it makes way, if nothing depends on it.
                if let Some(removed) = retention.remove(slot) {
                    live.drop_removed(&removed);
                    add(&self.counters.expired, 1);
                }
            } else {
                retention.touch(slot, now);
            }
        }
        if let Some((_, entry)) = retention.get(meta.id) {
            return Some(self.present(&entry, meta, rule));
        }
        let parent = meta.parent?;
        // A lost block is a link all the same.
        let found = retention.index().find(ObjectId { kind: Kind::Block, key: parent });
        let owner = found.and_then(|slot| retention.index().entry(slot)).map(|entry| entry.tenant);
        let fit = owner.map_or_else(|| coming.contains(&parent), |owner| may_see(meta.tenant, owner));
        if !fit {
            return Some(self.count(Put::NoParent));
        }
        if let Some(slot) = found {
            // So that the room for the child is not made of its parent.
            retention.touch(slot, now);
        }
        None
    }

    fn present(&self, entry: &Entry, meta: &Meta, rule: Rule) -> Put {
        if same(entry, meta) {
            return self.count(Put::Exists);
        }
        match rule {
            Rule::Exact => {
                self.trouble.note(Error::Conflict(entry.id));
                self.count(Put::Conflict)
            }
            Rule::FirstStays => {
                add(&self.counters.differs, 1);
                self.count(Put::Exists)
            }
        }
    }

    pub(super) fn count(&self, put: Put) -> Put {
        let counters = &self.counters;
        let counter = match &put {
            Put::Stored => &counters.stored,
            Put::Exists => &counters.exists,
            Put::Conflict => &counters.conflicts,
            Put::NoParent => &counters.no_parent,
            Put::Failed(Error::Full(_)) => &counters.full,
            Put::Failed(_) => &counters.write_errors,
        };
        match &put {
            Put::Failed(Error::Invalid(_)) => {}
            Put::Failed(error) => self.trouble.note(error),
            _ => {}
        }
        add(counter, 1);
        put
    }

    /// Appends in groups that fit the media: what the order puts first is visible first.
    fn write_in_groups(&self, records: &[Record<'_>], order: &[usize], rule: Rule, done: &mut [Option<Put>]) {
        let mut rest = order;
        while !rest.is_empty() {
            let mut bytes = 0;
            let mut fits = |&at: &usize| {
                bytes += span(records[at].meta.len);
                bytes <= self.config.batch_bytes
            };
            // One object always fits: the configuration was checked for that.
            let count = rest.iter().take_while(|at| fits(at)).count().max(1);
            let (group, behind) = rest.split_at(count);
            self.write_group(records, group, rule, done);
            rest = behind;
        }
    }

    fn write_group(&self, records: &[Record<'_>], group: &[usize], rule: Rule, done: &mut [Option<Put>]) {
        let now = self.now();
        let metas: Vec<Meta> = group.iter().map(|&at| Meta { written: now, ..records[at].meta }).collect();
        let promise = match self.make_room(&metas, now) {
            Ok(promise) => promise,
            Err(error) => return self.fail(group, &error, done),
        };
        let batch: Vec<Record<'_>> =
            metas.iter().zip(group).map(|(&meta, &at)| Record { meta, pieces: records[at].pieces }).collect();
        let mut appended = self.media.append(&batch);
        if matches!(appended, Err(Error::Full(_))) && self.delete_empty() {
            appended = self.media.append(&batch);
        }
        let mut kept = self.kept_mut();
        let held = promise.settle(&mut kept.live);
        let places = match appended {
            Ok(places) => places,
            Err(error) => {
                for slot in held {
                    kept.retention.release(slot);
                }
                drop(kept);
                return self.fail(group, &error, done);
            }
        };
        let objects: Vec<(Meta, Place)> = metas.iter().copied().zip(places).collect();
        let inserted = kept.retention.insert(&objects, now);
        for slot in held {
            kept.retention.release(slot);
        }
        let mut strays = Vec::new();
        for ((&at, result), &(meta, place)) in group.iter().zip(inserted).zip(&objects) {
            let put = match result {
                Ok(_) => {
                    kept.live.add(meta.id, place, meta.len);
                    add(&self.counters.stored_bytes, u64::from(meta.len));
                    self.count(Put::Stored)
                }
                // Another one was faster; these bytes are garbage from their first moment.
                Err(Refused::Exists(slot) | Refused::Conflict(slot)) => match kept.retention.index().entry(slot) {
                    Some(entry) => {
                        strays.extend(kept.is_stray(&meta, place).then_some((place, meta.id)));
                        self.present(&entry, &meta, rule)
                    }
                    None => self.count(Put::NoParent),
                },
                Err(Refused::NoParent | Refused::BadParent) => self.count(Put::NoParent),
                Err(Refused::Full) => {
                    self.count(Put::Failed(Error::Full("every number of the index is taken".to_owned())))
                }
            };
            done[at] = Some(put);
        }
        drop(kept);
        self.note_strays(&strays);
        self.appended.fetch_add(metas.iter().map(|meta| span(meta.len)).sum(), Ordering::Relaxed);
    }

    fn fail(&self, group: &[usize], error: &Error, done: &mut [Option<Put>]) {
        for (&at, put) in group.iter().zip(fail_all(group.len(), error)) {
            done[at] = Some(self.count(put));
        }
    }

    /// Evicts for a group: each tenant's own for its quota, anybody's for the capacity.
    fn make_room(&self, metas: &[Meta], now: u32) -> Result<Promise, Error> {
        let mut promise = Promise { spans: 0, tenants: HashMap::new(), held: Vec::new() };
        for meta in metas {
            promise.spans += span(meta.len);
            *promise.tenants.entry(meta.tenant).or_default() += u64::from(meta.len);
        }
        self.apply_touches();
        let mut kept = self.kept_mut();
        let Kept { retention, live } = &mut *kept;
        // Parents present and slices' blocks: some orders would take them first.
        for key in metas.iter().filter_map(|meta| meta.parent) {
            let parent = retention.index().find(ObjectId { kind: Kind::Block, key });
            promise.held.extend(parent.filter(|&slot| retention.hold(slot)));
        }
        if let Err(error) = self.evict_for_all(retention, live, &promise, now) {
            for slot in promise.held {
                retention.release(slot);
            }
            return Err(error);
        }
        live.promised += promise.spans;
        for (&tenant, &bytes) in &promise.tenants {
            *live.promised_to.entry(tenant).or_default() += bytes;
        }
        Ok(promise)
    }

    fn evict_for_all(
        &self,
        retention: &mut Retention,
        live: &mut Live,
        promise: &Promise,
        now: u32,
    ) -> Result<(), Error> {
        for (&tenant, &bytes) in &promise.tenants {
            let promised = live.promised_to.get(&tenant).copied().unwrap_or(0);
            if !retention.make_room(tenant, bytes + promised, now, &mut |removed| self.evicted_quota(live, removed)) {
                return Err(Error::Full(format!("the quota of tenant {}", tenant.0)));
            }
        }
        self.evict_for(retention, live, promise.spans, now)
    }

    pub(super) fn evict_for(
        &self,
        retention: &mut Retention,
        live: &mut Live,
        bytes: u64,
        now: u32,
    ) -> Result<(), Error> {
        let over = |live: &Live| (live.total() + live.promised + bytes).saturating_sub(self.config.capacity);
        // One at a time: the policy counts objects without their headers.
        while over(live) > 0 {
            let before = live.total();
            retention.evict(Scope::All, 1, now, &mut |removed| self.evicted(live, removed));
            if live.total() == before {
                return Err(Error::Full(format!("the capacity of {} bytes", self.config.capacity)));
            }
        }
        Ok(())
    }
}

/// Room promised to a group on its way, and what is kept for it.
struct Promise {
    spans: u64,
    tenants: HashMap<TenantId, u64>,
    held: Vec<Slot>,
}

impl Promise {
    /// Takes back the promise; the parents held are the caller's to release once their children are in.
    fn settle(self, live: &mut Live) -> Vec<Slot> {
        live.promised -= self.spans;
        for (tenant, bytes) in self.tenants {
            if let Some(promised) = live.promised_to.get_mut(&tenant) {
                *promised -= bytes;
                if *promised == 0 {
                    live.promised_to.remove(&tenant);
                }
            }
        }
        self.held
    }
}

pub(super) fn same(entry: &Entry, meta: &Meta) -> bool {
    entry.len == meta.len && entry.checksum == meta.checksum
}

/// One error for many: those of the system do not copy.
fn fail_all(count: usize, error: &Error) -> Vec<Put> {
    let one = || match error {
        Error::Full(text) => Error::Full(text.clone()),
        Error::Invalid(text) => Error::Invalid(text.clone()),
        Error::Unavailable(text) => Error::Unavailable(text.clone()),
        Error::Io { what, source } => {
            Error::Io { what: what.clone(), source: std::io::Error::new(source.kind(), source.to_string()) }
        }
        other => Error::Unavailable(other.to_string()),
    };
    (0..count).map(|_| Put::Failed(one())).collect()
}

/// The wanted records, every block behind its parent and every slice behind its block. Circles are left out.
fn parents_first(records: &[Record<'_>], wanted: &HashMap<ObjectId, usize>) -> Vec<usize> {
    let mut placed: HashSet<usize> = HashSet::with_capacity(wanted.len());
    let mut order = Vec::with_capacity(wanted.len());
    for at in 0..records.len() {
        if wanted.get(&records[at].meta.id) != Some(&at) {
            continue;
        }
        let (mut path, mut seen) = (vec![at], HashSet::from([at]));
        let mut circle = false;
        while let Some(parent) = path.last().and_then(|&last| records[last].meta.parent) {
            let above = wanted.get(&ObjectId { kind: Kind::Block, key: parent });
            let Some(&above) = above.filter(|above| !placed.contains(above)) else { break };
            circle = !seen.insert(above);
            if circle {
                break;
            }
            path.push(above);
        }
        if !circle {
            for at in path.into_iter().rev() {
                if placed.insert(at) {
                    order.push(at);
                }
            }
        }
    }
    order
}
