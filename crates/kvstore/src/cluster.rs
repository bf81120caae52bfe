//! The store behind any number of entry points, as one engine or agent sees it.
//!
//! Owns: one [`Client`] for each entry point, parts of a request asked side by side on a bounded number of threads, who is left alone
//! because it did not answer and when it is asked again. Never touches: who owns which key ([`crate::directory`]), frames, sockets.
//!
//! An entry point that hangs or dies costs the requests under way one time-out; from then on its keys are misses at once, and a thread
//! asks in the background until it answers again. No request waits for that.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::client::{Client, ClientConfig, Fetch, NewObject};
use crate::directory::{Directory, Found as Part, Members};
use crate::error::Error;
use crate::index::check_chain;
use crate::key::{Key, Kind};
use crate::net::Address;
use crate::object::Class;
use crate::tls::ClientTls;
use crate::trouble::Trouble;
use crate::upstream::{Found, Load, Save, Source, Tally, Upstream};
use crate::wire::{Hello, Outcome, Role};

/// Stands for ever where only the thread that asks in the background ends a rest.
const LONG: Duration = Duration::from_secs(1 << 32);

/// Whom to ask, and as whom.
#[derive(Clone)]
pub struct ClusterConfig {
    /// The entry points. Their written addresses are their names: the same for every client, in any order.
    pub addresses: Vec<Address>,
    /// Name of the tenant; empty: the public one.
    pub tenant: String,
    /// Roles wanted, each with its token where the servers have one.
    pub roles: Vec<(Role, Option<Vec<u8>>)>,
    /// See [`Hello::fingerprint`].
    pub fingerprint: [u8; 16],
    /// See [`Hello::block_tokens`].
    pub block_tokens: u32,
    /// See [`Hello::first_stays`].
    pub first_stays: bool,
    /// Authorities and name for TLS; none: plain.
    pub tls: Option<ClientTls>,
    /// Time for a connection and its hello. With `check`: after how long an entry point has none of its keys.
    pub connect: Duration,
    /// Time for a check beside that.
    pub check: Duration,
    /// Time for each object of a get to arrive.
    pub get: Duration,
    /// Time for a write to be durable.
    pub write: Duration,
    /// How often one that did not answer is asked whether it is back.
    pub retry: Duration,
    /// Connections kept to each entry point.
    pub keep: usize,
    /// Most threads that ask side by side, all requests together.
    pub threads: usize,
}

impl std::fmt::Debug for ClusterConfig {
    /// Without the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let roles: Vec<&str> = self.roles.iter().map(|(role, _)| role.name()).collect();
        f.debug_struct("ClusterConfig")
            .field("addresses", &self.addresses)
            .field("tenant", &self.tenant)
            .field("roles", &roles)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            tenant: String::new(),
            roles: [Role::Check, Role::Get, Role::Put].map(|role| (role, None)).to_vec(),
            fingerprint: [0; 16],
            block_tokens: 0,
            first_stays: false,
            tls: None,
            connect: Duration::from_millis(300),
            check: Duration::from_millis(500),
            get: Duration::from_millis(800),
            write: Duration::from_secs(10),
            retry: Duration::from_millis(500),
            keep: 8,
            threads: 64,
        }
    }
}

impl ClusterConfig {
    /// Everybody's store at these addresses.
    pub fn new(addresses: impl IntoIterator<Item = Address>) -> Self {
        Self { addresses: addresses.into_iter().collect(), ..Self::default() }
    }

    fn client(&self, address: &Address) -> ClientConfig {
        ClientConfig {
            tenant: self.tenant.clone(),
            roles: self.roles.clone(),
            fingerprint: self.fingerprint,
            block_tokens: self.block_tokens,
            first_stays: self.first_stays,
            tls: self.tls.clone(),
            connect: self.connect,
            check: self.check,
            get: self.get,
            request: self.write,
            // The directory knows who is left alone.
            rest: Duration::ZERO,
            keep: self.keep,
            ..ClientConfig::new(address.clone())
        }
    }
}

struct Point {
    client: Client,
    /// A thread asks whether it is back.
    probed: AtomicBool,
    /// Requests that it did not answer as it should.
    failures: AtomicU64,
    last_error: Mutex<Option<String>>,
}

struct Inner {
    points: Vec<Point>,
    trouble: Trouble,
    directory: Directory,
    retry: Duration,
    patience: Duration,
    free_threads: AtomicUsize,
    begun: Instant,
}

/// A client of all entry points. All calls are safe from any thread.
pub struct Cluster {
    inner: Arc<Inner>,
    tally: Tally,
}

impl Cluster {
    /// Connects to nobody yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no address or one given twice, and as [`Client::new`].
    pub fn new(config: &ClusterConfig) -> Result<Self, Error> {
        let members = Members::new(config.addresses.iter().map(Address::to_string))?;
        let point = |address: &Address| {
            let client = Client::new(config.client(address))?;
            let last_error = Mutex::default();
            Ok(Point { client, probed: AtomicBool::new(false), failures: AtomicU64::new(0), last_error })
        };
        let points = config.addresses.iter().map(point).collect::<Result<Vec<_>, Error>>()?;
        let inner = Inner {
            points,
            trouble: Trouble::default(),
            directory: Directory::new(members, LONG),
            retry: config.retry.max(Duration::from_millis(1)),
            patience: config.connect + config.check,
            free_threads: AtomicUsize::new(config.threads),
            begun: Instant::now(),
        };
        Ok(Self { inner: Arc::new(inner), tally: Tally::default() })
    }

    /// Which entry points own what.
    pub fn members(&self) -> &Members {
        self.inner.directory.members()
    }

    /// Whether an entry point is asked; `false` while it is left alone because it did not answer.
    pub fn is_up(&self, member: usize) -> bool {
        self.inner.directory.is_up(member, self.inner.begun.elapsed())
    }

    /// What each entry point last failed with, for whoever wants to know why there are misses.
    pub fn last_errors(&self) -> Vec<(Address, Option<String>)> {
        let of = |point: &Point| {
            let error = point.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone();
            (point.client.address().clone(), error)
        };
        self.inner.points.iter().map(of).collect()
    }

    /// Asks every entry point whether it is there and lets this client in.
    pub fn ping(&self) -> Vec<(Address, Result<(), Error>)> {
        let all: Vec<usize> = (0..self.inner.points.len()).collect();
        let answers = self.inner.side_by_side(all, LONG, |at| Some(self.inner.ask(at, Client::ping)));
        let of = |(point, answer): (&Point, Option<_>)| {
            let none = || Err(Error::Unavailable("it was not asked".to_owned()));
            (point.client.address().clone(), answer.unwrap_or_else(none))
        };
        self.inner.points.iter().zip(answers).map(of).collect()
    }
}

impl Inner {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Runs jobs side by side as far as threads are free, in the caller's own otherwise. What has not begun when `patience` is over is left
    /// out.
    fn side_by_side<J: Send, T: Send>(
        &self,
        jobs: Vec<J>,
        patience: Duration,
        run: impl Fn(J) -> Option<T> + Sync,
    ) -> Vec<Option<T>> {
        let count = jobs.len();
        let until = Instant::now() + patience;
        let results: Mutex<Vec<Option<T>>> = Mutex::new(jobs.iter().map(|_| None).collect());
        let queue = Mutex::new(jobs.into_iter().enumerate());
        let work = || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((at, job)) = next else { break };
                let result = if Instant::now() < until { run(job) } else { None };
                results.lock().unwrap_or_else(PoisonError::into_inner)[at] = result;
            }
        };
        let take = |free: usize| Some(free.saturating_sub(count.saturating_sub(1)));
        let free = self.free_threads.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).unwrap_or(0);
        let taken = free.min(count.saturating_sub(1));
        let _back = Back(&self.free_threads, taken);
        std::thread::scope(|scope| {
            for _ in 0..taken {
                // Without a thread the work is done by those there are.
                let _ = std::thread::Builder::new().name("kv-ask".to_owned()).spawn_scoped(scope, work);
            }
            work();
        });
        results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks one entry point; who does not answer is left alone until it does.
    fn ask<T>(self: &Arc<Self>, at: usize, call: impl FnOnce(&Client) -> Result<T, Error>) -> Result<T, Error> {
        let result = call(&self.points[at].client);
        if let Err(error) = &result {
            self.failed(at, error);
        }
        result
    }

    fn failed(self: &Arc<Self>, at: usize, error: &Error) {
        let point = &self.points[at];
        point.failures.fetch_add(1, Ordering::Relaxed);
        *point.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        self.trouble.note(error);
        if is_to_blame(error) {
            self.rest(at);
        }
    }

    /// Leaves one alone until it answers a thread that asks in the background.
    fn rest(self: &Arc<Self>, at: usize) {
        self.directory.down(at, self.now());
        let point = &self.points[at];
        if point.probed.swap(true, Ordering::SeqCst) {
            return;
        }
        let (weak, retry) = (Arc::downgrade(self), self.retry);
        let thread = std::thread::Builder::new().name("kv-probe".to_owned()).stack_size(256 << 10);
        if thread.spawn(move || probe(&weak, at, retry)).is_err() {
            // Nobody would ask again: the next request does.
            point.probed.store(false, Ordering::SeqCst);
            self.directory.up(at);
        }
    }
}

/// Whether an entry point that gave this error is better left alone: it did not answer, or is going away.
fn is_to_blame(error: &Error) -> bool {
    matches!(error, Error::Unavailable(_) | Error::Io { .. })
}

/// Asks one entry point now and then until it answers, or nobody needs it any more.
fn probe(inner: &Weak<Inner>, at: usize, retry: Duration) {
    loop {
        std::thread::sleep(retry);
        let Some(inner) = inner.upgrade() else { return };
        let point = &inner.points[at];
        match point.client.ping() {
            Ok(()) => {
                // In this order, so that whoever finds it down from now on starts another thread.
                point.probed.store(false, Ordering::SeqCst);
                inner.directory.up(at);
                return;
            }
            Err(error) => {
                *point.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            }
        }
    }
}

/// Gives threads back, panic or not.
struct Back<'a>(&'a AtomicUsize, usize);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(self.1, Ordering::SeqCst);
    }
}

impl Upstream for Cluster {
    fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error> {
        let inner = &self.inner;
        let mut plan = inner.directory.plan(chain, inner.now())?;
        let want = u32::try_from(slices).unwrap_or(u32::MAX);
        let parts: Vec<_> = plan.ask.iter().collect();
        let answers = inner.side_by_side(parts, inner.patience, |part| {
            match inner.ask(part.owner, |client| client.check(&part.keys, want)) {
                Ok(found) => {
                    let slices = found.slices.into_iter().map(|position| position as usize).collect();
                    Some(Some(Part { blocks: found.blocks as usize, slices }))
                }
                Err(error) => is_to_blame(&error).then_some(None),
            }
        });
        // Who refused, or was not asked for want of time, has none of the keys but is not left alone for it.
        let mut answered = Vec::with_capacity(answers.len());
        let mut parts = Vec::with_capacity(answers.len());
        for (part, answer) in std::mem::take(&mut plan.ask).into_iter().zip(answers) {
            if let Some(answer) = answer {
                parts.push(part);
                answered.push(answer);
            } else {
                plan.blocks = plan.blocks.min(part.positions[0]);
            }
        }
        plan.ask = parts;
        let found = inner.directory.merge(&plan, &answered, inner.now());
        for (part, _) in plan.ask.iter().zip(&answered).filter(|(_, answer)| answer.is_none()) {
            // Whoever asks in the background may have been done before the answers were joined.
            inner.rest(part.owner);
        }
        let mut deepest = found.slices;
        deepest.truncate(slices);
        Ok(Found { blocks: found.blocks, slices: deepest, near: 0 })
    }

    fn get(&self, loads: &mut [Load<'_>]) -> Vec<Option<u64>> {
        let inner = &self.inner;
        let mut sums = vec![None; loads.len()];
        {
            let mut jobs: Vec<(usize, Vec<Fetch<'_>>, Vec<usize>)> =
                (0..inner.points.len()).map(|owner| (owner, Vec::new(), Vec::new())).collect();
            for (at, load) in loads.iter_mut().enumerate() {
                let (_, fetches, places) = &mut jobs[inner.directory.members().owner(load.id.key)];
                fetches.push(Fetch { id: load.id, start: 0, into: &mut *load.into });
                places.push(at);
            }
            let now = inner.now();
            jobs.retain(|(owner, fetches, _)| !fetches.is_empty() && inner.directory.is_up(*owner, now));
            let answers = inner.side_by_side(jobs, LONG, |(owner, mut fetches, places)| {
                let (sums, error) = inner.points[owner].client.get_whole(&mut fetches);
                if let Some(error) = error {
                    inner.failed(owner, &error);
                }
                Some((places, sums))
            });
            for (places, found) in answers.into_iter().flatten() {
                for (at, sum) in places.into_iter().zip(found) {
                    sums[at] = sum;
                }
            }
        }
        self.tally.loads(loads, &sums);
        sums
    }

    fn put(&self, chain: &[Key], objects: &[Save<'_>], class: Class) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Invalid; objects.len()];
        if check_chain(chain).is_ok() {
            self.put_by_owner(chain, objects, class, &mut outcomes);
        }
        self.tally.saves(objects, &outcomes);
        outcomes
    }

    fn other_block_tokens(&self) -> u32 {
        self.inner.points.iter().map(|point| point.client.other_block_tokens()).find(|&other| other != 0).unwrap_or(0)
    }

    fn trouble(&self) -> Option<String> {
        self.inner.trouble.latest()
    }

    fn failures(&self) -> u64 {
        self.inner.trouble.count()
    }

    fn stats(&self) -> Vec<(String, u64)> {
        let mut all = self.tally.each();
        let down = (0..self.inner.points.len()).filter(|&at| !self.is_up(at)).count();
        all.push(("entry_points".to_owned(), self.inner.points.len() as u64));
        all.push(("entry_points_down".to_owned(), down as u64));
        let failures = self.inner.points.iter().map(|point| point.failures.load(Ordering::Relaxed)).sum();
        all.push(("entry_point_failures".to_owned(), failures));
        all
    }
}

impl Cluster {
    fn put_by_owner(&self, chain: &[Key], objects: &[Save<'_>], class: Class, outcomes: &mut [Outcome]) {
        let inner = &self.inner;
        let members = inner.directory.members();
        let parents = members.parents(chain);
        let mut jobs: Vec<(usize, Vec<NewObject<'_>>, Vec<usize>)> =
            (0..inner.points.len()).map(|owner| (owner, Vec::new(), Vec::new())).collect();
        // Parents before children.
        let mut order: Vec<usize> = (0..objects.len()).filter(|&place| objects[place].at < chain.len()).collect();
        order.sort_by_key(|&place| (objects[place].at, objects[place].kind));
        for place in order {
            let object = &objects[place];
            let Some(id) = object.id(chain) else { continue };
            let parent = match object.kind {
                Kind::Block => parents[object.at],
                Kind::Slice => Some(id.key),
            };
            outcomes[place] = Outcome::Failed;
            let (_, group, places) = &mut jobs[members.owner(id.key)];
            group.push(NewObject { id, parent, class, pieces: object.pieces, checksum: object.checksum });
            places.push(place);
        }
        let now = inner.now();
        jobs.retain(|(owner, group, _)| !group.is_empty() && inner.directory.is_up(*owner, now));
        let answers = inner.side_by_side(jobs, LONG, |(owner, group, places)| {
            let done = inner.ask(owner, |client| client.put(&group)).ok()?;
            Some((owner, places, done))
        });
        for (owner, places, done) in answers.into_iter().flatten() {
            for (place, outcome) in places.into_iter().zip(done) {
                outcomes[place] = outcome;
                let why = match outcome {
                    Outcome::Full => "has no room",
                    Outcome::Invalid => "does not take such an object",
                    Outcome::Failed => "cannot write",
                    Outcome::Stored | Outcome::Exists | Outcome::Conflict | Outcome::NoParent => continue,
                };
                let point = &inner.points[owner];
                let text = format!("the KV store at {} {why}", point.client.address());
                inner.trouble.note(&text);
                *point.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
        }
    }
}

impl Source for ClusterConfig {
    fn open(&self, who: &Hello) -> Result<Arc<dyn Upstream>, Error> {
        let config = Self {
            tenant: who.tenant.clone(),
            fingerprint: who.fingerprint,
            block_tokens: who.block_tokens,
            first_stays: who.first_stays,
            ..self.clone()
        };
        Ok(Arc::new(Cluster::new(&config)?))
    }
}
