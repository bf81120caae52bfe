//! From the store into the arena, in the background: several at once, each object once.
//!
//! Owns: what is being fetched and for whom it is kept until they have it. Never touches: sockets.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{Arena, Pin, Room};
use super::counters::{Counters, add};
use super::table::Name;
use super::tenants::Tenant;
use crate::key::ObjectId;
use crate::upstream::Load;

/// Most objects of one call to the store.
const BATCH: usize = 64;

#[derive(Debug)]
enum State {
    Waiting,
    /// Kept where it is for those who wait.
    Here {
        _kept: Pin,
    },
    Missing,
}

/// Objects asked for together. What arrived stays pinned as long as somebody has this.
#[derive(Debug)]
pub struct Fetch {
    tenant: Arc<Tenant>,
    items: Vec<(ObjectId, u32)>,
    states: Mutex<Vec<State>>,
    ready: Condvar,
}

impl Fetch {
    fn states(&self) -> MutexGuard<'_, Vec<State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for one object, for a moment at most: whether it is here; `None` while that is not known.
    pub fn wait(&self, at: usize, moment: Duration) -> Option<bool> {
        let until = Instant::now() + moment;
        let mut states = self.states();
        loop {
            match states.get(at) {
                Some(State::Here { .. }) => return Some(true),
                Some(State::Missing) | None => return Some(false),
                Some(State::Waiting) => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            states = self.ready.wait_timeout(states, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Where an object of a request is.
#[derive(Debug)]
pub enum Found {
    /// In the arena.
    Here(Pin),
    /// Being fetched: at this place of that fetch.
    Coming(Arc<Fetch>, usize),
    /// Nowhere that could be had.
    Missing,
}

#[derive(Default)]
struct Open {
    by_name: HashMap<Name, (Arc<Fetch>, usize)>,
    queue: VecDeque<Arc<Fetch>>,
    closed: bool,
}

/// All fetches.
pub struct Fetches {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    batch_bytes: u64,
    most: usize,
    room_patience: Duration,
    open: Mutex<Open>,
    wake: Condvar,
}

impl Fetches {
    /// Of `batch_bytes` at once, `most` objects under way.
    pub fn new(
        arena: Arc<Arena>,
        counters: Arc<Counters>,
        batch_bytes: u64,
        most: usize,
        room_patience: Duration,
    ) -> Self {
        Self { arena, counters, batch_bytes, most, room_patience, open: Mutex::default(), wake: Condvar::new() }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds objects of a tenant, and has those fetched that are not here.
    pub fn find(&self, tenant: &Arc<Tenant>, items: &[(ObjectId, u32)]) -> Vec<Found> {
        let mut found: Vec<Option<Found>> = items.iter().map(|&item| self.here(tenant, item)).collect();
        if found.iter().any(Option::is_none) {
            let mut open = self.open();
            let mut new: Vec<usize> = Vec::new();
            for (at, &(id, len)) in items.iter().enumerate() {
                if found[at].is_some() {
                    continue;
                }
                found[at] = match open.by_name.get(&tenant.name(id)) {
                    Some((fetch, place)) if fetch.items[*place].1 == len => {
                        Some(Found::Coming(Arc::clone(fetch), *place))
                    }
                    Some(_) => Some(Found::Missing),
                    // It may have arrived between the two looks; what is published is not open any more.
                    None => self.here(tenant, (id, len)),
                };
                if found[at].is_some() {
                    continue;
                }
                if open.closed || open.by_name.len() + new.len() >= self.most {
                    add(&self.counters.no_room, 1);
                    found[at] = Some(Found::Missing);
                } else if new.iter().any(|&other| items[other].0 == id) {
                    // Named twice in one request: it has the second one when it asks again.
                    found[at] = Some(Found::Missing);
                } else {
                    new.push(at);
                }
            }
            self.begin(&mut open, tenant, items, &new, &mut found);
        }
        let found: Vec<Found> = found.into_iter().map(|one| one.unwrap_or(Found::Missing)).collect();
        add(&self.counters.hits, found.iter().filter(|one| matches!(one, Found::Here(_))).count() as u64);
        found
    }

    /// An object in the arena: of another length than asked for it is a miss.
    fn here(&self, tenant: &Tenant, (id, len): (ObjectId, u32)) -> Option<Found> {
        let pin = self.arena.pin(tenant.name(id))?;
        Some(if pin.extent().len == len { Found::Here(pin) } else { Found::Missing })
    }

    /// Queues what is new, in groups of bounded size.
    fn begin(
        &self,
        open: &mut Open,
        tenant: &Arc<Tenant>,
        items: &[(ObjectId, u32)],
        new: &[usize],
        found: &mut [Option<Found>],
    ) {
        let mut rest = new;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |&at: &usize| {
                bytes += u64::from(items[at].1);
                bytes > self.batch_bytes
            };
            let count = rest.iter().position(fits).unwrap_or(rest.len()).clamp(1, BATCH);
            let (group, behind) = rest.split_at(count);
            rest = behind;
            let fetch = Arc::new(Fetch {
                tenant: Arc::clone(tenant),
                items: group.iter().map(|&at| items[at]).collect(),
                states: Mutex::new(group.iter().map(|_| State::Waiting).collect()),
                ready: Condvar::new(),
            });
            for (place, &at) in group.iter().enumerate() {
                open.by_name.insert(tenant.name(items[at].0), (Arc::clone(&fetch), place));
                found[at] = Some(Found::Coming(Arc::clone(&fetch), place));
            }
            add(&self.counters.fetches, group.len() as u64);
            open.queue.push_back(fetch);
            self.wake.notify_one();
        }
    }

    /// Fetches until [`Fetches::close`]: the body of a thread.
    pub fn work(&self) {
        loop {
            let fetch = {
                let mut open = self.open();
                loop {
                    if open.closed {
                        return;
                    }
                    match open.queue.pop_front() {
                        Some(fetch) => break fetch,
                        None => open = self.wake.wait(open).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            let mut done = Done { fetches: self, fetch: &fetch, pins: fetch.items.iter().map(|_| None).collect() };
            self.run(&fetch, &mut done.pins);
        }
    }

    fn run(&self, fetch: &Fetch, pins: &mut [Option<Pin>]) {
        let mut rooms: Vec<(usize, Room)> = Vec::with_capacity(fetch.items.len());
        // Whoever holds what is pinned has a moment to let go, not one for each object.
        let until = Instant::now() + self.room_patience;
        for (at, &(_, len)) in fetch.items.iter().enumerate() {
            match self.arena.reserve(len, until.saturating_duration_since(Instant::now())) {
                Some(room) => rooms.push((at, room)),
                None => add(&self.counters.no_room, 1),
            }
        }
        let mut loads: Vec<Load<'_>> =
            rooms.iter_mut().map(|(at, room)| Load { id: fetch.items[*at].0, into: room.bytes() }).collect();
        let sums = fetch.tenant.upstream.get(&mut loads);
        for ((at, room), sum) in rooms.into_iter().zip(sums) {
            let Some(sum) = sum else { continue };
            let (id, len) = fetch.items[at];
            add(&self.counters.fetched, 1);
            add(&self.counters.fetched_bytes, len.into());
            let name = fetch.tenant.name(id);
            // Somebody may have put it meanwhile: the first one stays.
            pins[at] = room.publish(name, sum).ok().or_else(|| self.arena.pin(name));
        }
    }

    /// Fetches nothing any more; whoever waits has a miss.
    pub fn close(&self) {
        let left = {
            let mut open = self.open();
            open.closed = true;
            open.by_name.clear();
            std::mem::take(&mut open.queue)
        };
        self.wake.notify_all();
        for fetch in left {
            fetch.states().iter_mut().for_each(|state| *state = State::Missing);
            fetch.ready.notify_all();
        }
    }
}

/// Tells of the end of a fetch, whatever way it came about.
struct Done<'a> {
    fetches: &'a Fetches,
    fetch: &'a Arc<Fetch>,
    pins: Vec<Option<Pin>>,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        {
            let mut open = self.fetches.open();
            for &(id, _) in &self.fetch.items {
                open.by_name.remove(&self.fetch.tenant.name(id));
            }
        }
        for (state, pin) in self.fetch.states().iter_mut().zip(self.pins.drain(..)) {
            *state = pin.map_or(State::Missing, |pin| State::Here { _kept: pin });
        }
        self.fetch.ready.notify_all();
    }
}
