//! The engine's end of the agent: a few connections that are kept, and the agent's memory, mapped to be read.
//!
//! Owns: what is asked again on a fresh connection, how long an agent that does not answer is left alone, that nothing is handed on which
//! lacks its checksum. Never touches: how the agent keeps objects.
//!
//! An agent that dies or hangs is misses; as it comes back it is used again. Every request may be made twice without harm.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::link::{Link, Mapped, nonsense};
use super::words::{
    Op, PLACE, PutItem, decode_flushed, decode_found, decode_outcomes, decode_places, decode_stats, encode_damaged,
    encode_flush, encode_get, encode_put,
};
use crate::client::MAX_TENANT;
use crate::error::Error;
use crate::index::check_chain;
use crate::key::{Key, ObjectId};
use crate::lost::Lost;
use crate::object::Class;
use crate::upstream::{Found, Load, Save, Tally, Upstream};
use crate::wire::{CheckRequest, Hello, MAX_ITEMS, Outcome, encode_numbers};

/// Whom to ask, and as whom.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Path of the agent's socket.
    pub socket: PathBuf,
    /// Name of the tenant; empty: the public one.
    pub tenant: String,
    /// See [`Hello::fingerprint`].
    pub fingerprint: [u8; 16],
    /// See [`Hello::block_tokens`].
    pub block_tokens: u32,
    /// See [`Hello::first_stays`].
    pub first_stays: bool,
    /// Time for a connection.
    pub connect: Duration,
    /// Time for a check beside that, and for which an agent may say nothing while it works on something else: then it is taken for dead.
    pub silence: Duration,
    /// How long an agent that did not answer is left alone.
    pub rest: Duration,
    /// Connections kept for later: one for each thread that asks at once.
    pub keep: usize,
    /// Most bytes put at once, and of memory that a connection takes for that.
    pub stage_bytes: u64,
}

impl ClientConfig {
    /// Of everybody's objects, at this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            tenant: String::new(),
            fingerprint: [0; 16],
            block_tokens: 0,
            first_stays: false,
            connect: Duration::from_millis(300),
            silence: Duration::from_secs(1),
            rest: Duration::from_millis(500),
            keep: 8,
            stage_bytes: 32 << 20,
        }
    }
}

#[derive(Default)]
struct Pool {
    idle: Vec<Link>,
    silent_until: Option<Instant>,
    mapped: Option<Arc<Mapped>>,
    other_block_tokens: u32,
    last_error: Option<String>,
    /// What was put since the last flush: to which agent, and what that had not written by then.
    unflushed: Option<(u64, u64)>,
    /// Puts went to an agent that is no more.
    lost: bool,
    /// Puts so far: whether there was one while a flush was under way.
    puts: u64,
    /// What the agent had not written when it was last heard of.
    unwritten: Option<(u64, u64)>,
}

/// A client. All calls are safe from any thread; each takes a connection of its own.
pub struct Client {
    config: ClientConfig,
    who: Hello,
    pool: Mutex<Pool>,
    tally: Tally,
    mismatches: AtomicU64,
    failures: AtomicU64,
}

impl Client {
    /// Connects to nobody yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tenant's name that is too long.
    pub fn new(config: ClientConfig) -> Result<Self, Error> {
        if config.tenant.len() > MAX_TENANT {
            return Err(Error::Invalid(format!("a tenant's name has {MAX_TENANT} bytes at most")));
        }
        let who = Hello {
            tenant: config.tenant.clone(),
            fingerprint: config.fingerprint,
            block_tokens: config.block_tokens,
            first_stays: config.first_stays,
        };
        Ok(Self {
            config,
            who,
            pool: Mutex::default(),
            tally: Tally::default(),
            mismatches: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the agent answers.
    ///
    /// # Errors
    /// Why it does not.
    pub fn ping(&self) -> Result<(), Error> {
        self.with(|link| {
            link.ask(Op::Stats, &[])?;
            link.answer().map(drop)
        })
    }

    /// What last went wrong, for whoever wants to know why there are misses.
    pub fn last_error(&self) -> Option<String> {
        self.pool().last_error.clone()
    }

    fn fresh(&self) -> Result<Link, Lost> {
        let mapped = self.pool().mapped.clone();
        let link = Link::open(&self.config.socket, &self.who, self.config.connect, self.config.silence, mapped)?;
        let mut pool = self.pool();
        pool.mapped = Some(Arc::clone(&link.mapped));
        if pool.unwritten.is_none_or(|(agent, _)| agent != link.welcome.agent) {
            pool.unwritten = Some((link.welcome.agent, link.welcome.unwritten));
        }
        Ok(link)
    }

    fn keep(&self, link: Link) {
        let mut pool = self.pool();
        if pool.idle.len() < self.config.keep {
            pool.idle.push(link);
        }
    }

    /// Runs `talk` on a kept connection, once more on a fresh one if that was lost, and keeps the connection if all went well.
    fn with<T>(&self, talk: impl FnMut(&mut Link) -> Result<T, Lost>) -> Result<T, Error> {
        let result = self.try_with(talk);
        if let Err(error) = &result {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.pool().last_error = Some(error.to_string());
        }
        result
    }

    fn try_with<T>(&self, mut talk: impl FnMut(&mut Link) -> Result<T, Lost>) -> Result<T, Error> {
        let kept = {
            let mut pool = self.pool();
            if pool.silent_until.is_some_and(|until| Instant::now() < until) {
                return Err(self.silent("it did not answer a moment ago"));
            }
            pool.silent_until = None;
            pool.idle.pop()
        };
        let mut first = kept.is_some();
        let mut link = kept.map_or_else(|| self.fresh(), Ok);
        loop {
            let ended = match link {
                Ok(mut open) => {
                    open.allow(self.config.silence);
                    match talk(&mut open) {
                        Ok(value) => {
                            self.keep(open);
                            return Ok(value);
                        }
                        Err(Lost::Told(error)) => {
                            // The connection is as good as before: the agent answered.
                            self.keep(open);
                            return Err(error);
                        }
                        Err(lost) => lost,
                    }
                }
                Err(lost) => lost,
            };
            match ended {
                Lost::Gone(_) if first => {
                    // All kept ones are of the same age.
                    self.pool().idle.clear();
                    first = false;
                    link = self.fresh();
                }
                Lost::Told(error) | Lost::Refused(error) | Lost::Gone(error) | Lost::Slow(error) => {
                    let mut pool = self.pool();
                    pool.idle.clear();
                    pool.silent_until = Some(Instant::now() + self.config.rest);
                    drop(pool);
                    return Err(match error {
                        Error::Unavailable(why) => self.silent(&why),
                        other => other,
                    });
                }
            }
        }
    }

    fn silent(&self, why: &str) -> Error {
        Error::Unavailable(format!("the agent at {}: {why}", self.config.socket.display()))
    }

    /// Reads what one request may pin at once, copies it out and lets it go again.
    fn get_some(&self, link: &mut Link, loads: &mut [Load<'_>], sums: &mut [Option<u64>]) -> Result<(), Lost> {
        sums.fill(None);
        let items = loads.iter().map(|load| (load.id, load.into.len() as u32));
        link.ask(Op::Get, &encode_get(items))?;
        let mut pins = Vec::with_capacity(loads.len());
        let mut wrong: Vec<(ObjectId, u64)> = Vec::new();
        let mapped = Arc::clone(&link.mapped);
        while pins.len() < loads.len() {
            let done = pins.len();
            let body = link.answer()?;
            if body.len() > (loads.len() - done) * PLACE {
                return Err(nonsense("more objects than were asked for"));
            }
            let places = decode_places(body).map_err(nonsense)?;
            for ((place, load), sum) in places.into_iter().zip(&mut loads[done..]).zip(&mut sums[done..]) {
                pins.push(place.map(|place| place.pin));
                let Some(place) = place else { continue };
                let copied = mapped.view.copy(place.place, load.into);
                let copied = copied.ok_or_else(|| nonsense("a place outside of its memory"))?;
                if copied == place.checksum {
                    *sum = Some(copied);
                } else {
                    wrong.push((load.id, place.checksum));
                }
            }
        }
        let pins: Vec<u64> = pins.into_iter().flatten().collect();
        link.allow(self.config.silence);
        for (id, sum) in wrong {
            self.mismatches.fetch_add(1, Ordering::Relaxed);
            link.ask(Op::Damaged, &encode_damaged(id, sum))?;
        }
        if !pins.is_empty() {
            link.ask(Op::Release, &encode_numbers(&pins))?;
        }
        Ok(())
    }

    /// Lays objects down in the stage and has the agent take them.
    fn put_some(
        &self,
        link: &mut Link,
        chain: &[Key],
        objects: &[Save<'_>],
        class: Class,
    ) -> Result<Vec<Outcome>, Lost> {
        let stage = link.stage(self.config.stage_bytes)?;
        let mut place = 0;
        let mut items = Vec::with_capacity(objects.len());
        for object in objects {
            let len = length(object);
            let sum = stage.put(place, object.pieces).ok_or_else(|| nonsense("a stage that is too short"))?;
            // Bytes that are no longer those of their checksum are refused by the agent like others that changed on the way.
            let checksum = object.checksum.unwrap_or(sum);
            items.push(PutItem { kind: object.kind, at: object.at as u32, len: len as u32, place, checksum });
            place += len;
        }
        link.allow(self.config.silence);
        link.ask(Op::Put, &encode_put(class, chain, &items))?;
        let outcomes = decode_outcomes(link.answer()?).map_err(nonsense)?;
        if outcomes.len() != objects.len() {
            return Err(nonsense("an answer of another length"));
        }
        if outcomes.iter().any(|outcome| outcome.is_there()) {
            self.note_put(link.welcome.agent);
        }
        Ok(outcomes)
    }

    fn note_put(&self, agent: u64) {
        let mut pool = self.pool();
        pool.puts += 1;
        match pool.unflushed {
            Some((before, _)) if before == agent => {}
            before => {
                pool.lost |= before.is_some();
                let unwritten = pool.unwritten.filter(|(known, _)| *known == agent).map_or(0, |(_, count)| count);
                pool.unflushed = Some((agent, unwritten));
            }
        }
    }

    /// How many of `rest` fit one request: by bytes and by count, one at least.
    fn fit<T>(rest: &[T], most: u64, len: impl Fn(&T) -> u64) -> usize {
        let mut bytes = 0;
        let over = |one: &T| {
            bytes += len(one);
            bytes > most
        };
        rest.iter().position(over).unwrap_or(rest.len()).clamp(1, MAX_ITEMS)
    }
}

fn length(object: &Save<'_>) -> u64 {
    object.pieces.iter().map(|piece| piece.len() as u64).sum()
}

impl Upstream for Client {
    fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error> {
        check_chain(chain)?;
        let body = CheckRequest::encode(u32::try_from(slices).unwrap_or(u32::MAX), chain);
        let (found, other) = self.with(|link| {
            link.ask(Op::Check, &body)?;
            decode_found(link.answer()?, chain.len()).map_err(nonsense)
        })?;
        self.pool().other_block_tokens = other;
        Ok(found)
    }

    fn get(&self, loads: &mut [Load<'_>]) -> Vec<Option<u64>> {
        let mut sums = vec![None; loads.len()];
        let mut next = 0;
        // What fails is a miss; what came before it is there.
        let _ = self.with(|link| {
            while next < loads.len() {
                let (rest, sums) = (&mut loads[next..], &mut sums[next..]);
                if rest[0].into.len() as u64 > u64::from(link.welcome.max_object) {
                    next += 1;
                    continue;
                }
                let most = link.welcome.at_once;
                let count = Self::fit(rest, most, |load| load.into.len() as u64);
                // An object that is too long stands for itself.
                let long = |load: &Load<'_>| load.into.len() as u64 > u64::from(link.welcome.max_object);
                let count = rest[..count].iter().position(long).unwrap_or(count);
                self.get_some(link, &mut rest[..count], &mut sums[..count])?;
                next += count;
            }
            Ok(())
        });
        self.tally.loads(loads, &sums);
        sums
    }

    fn put(&self, chain: &[Key], objects: &[Save<'_>], class: Class) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Invalid; objects.len()];
        if check_chain(chain).is_err() {
            self.tally.saves(objects, &outcomes);
            return outcomes;
        }
        let longest = |link: &Link| u64::from(link.welcome.max_object).min(self.config.stage_bytes);
        let good: Vec<usize> = (0..objects.len()).filter(|&at| objects[at].at < chain.len()).collect();
        for &at in &good {
            outcomes[at] = Outcome::Failed;
        }
        let mut next = 0;
        let _ = self.with(|link| {
            while next < good.len() {
                let rest = &good[next..];
                if length(&objects[rest[0]]) > longest(link) {
                    outcomes[rest[0]] = Outcome::Invalid;
                    next += 1;
                    continue;
                }
                let most = link.welcome.at_once.min(self.config.stage_bytes);
                let count = Self::fit(rest, most, |&at| length(&objects[at]));
                let count = rest[..count].iter().position(|&at| length(&objects[at]) > longest(link)).unwrap_or(count);
                let group: Vec<Save<'_>> = rest[..count].iter().map(|&at| objects[at]).collect();
                let done = self.put_some(link, chain, &group, class)?;
                for (&at, outcome) in rest.iter().zip(done) {
                    outcomes[at] = outcome;
                }
                next += count;
            }
            Ok(())
        });
        self.tally.saves(objects, &outcomes);
        outcomes
    }

    fn flush(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let (before, lost, puts) = {
            let mut pool = self.pool();
            (pool.unflushed, std::mem::take(&mut pool.lost), pool.puts)
        };
        let Some((agent, unwritten)) = before else { return !lost };
        let flushed = self.with(|link| {
            if link.welcome.agent != agent {
                return Ok(None);
            }
            loop {
                let left = until.saturating_duration_since(Instant::now());
                link.allow(self.config.silence);
                link.ask(Op::Flush, &encode_flush(left))?;
                let (all, now) = decode_flushed(link.answer()?).map_err(nonsense)?;
                if all || Instant::now() >= until {
                    return Ok(Some((all, now)));
                }
            }
        });
        let mut pool = self.pool();
        match flushed {
            Ok(Some((true, now))) => {
                pool.unwritten = Some((agent, now));
                let more = pool.puts != puts && pool.unflushed.is_some_and(|(to, _)| to == agent);
                if more {
                    pool.unflushed = Some((agent, now));
                } else if pool.puts == puts {
                    pool.unflushed = None;
                }
                now == unwritten && !lost
            }
            // Another agent by now: what the one before had not written is gone.
            Ok(None) => {
                pool.unflushed = pool.unflushed.filter(|(to, _)| *to != agent);
                false
            }
            // Not in time, or nobody there: the next flush asks for it again.
            Ok(Some((false, _))) | Err(_) => {
                pool.lost |= lost;
                false
            }
        }
    }

    fn other_block_tokens(&self) -> u32 {
        self.pool().other_block_tokens
    }

    fn stats(&self) -> Vec<(String, u64)> {
        let mut all = self.tally.each();
        all.push(("mismatches".to_owned(), self.mismatches.load(Ordering::Relaxed)));
        all.push(("agent_failures".to_owned(), self.failures.load(Ordering::Relaxed)));
        let agents = self.with(|link| {
            link.ask(Op::Stats, &[])?;
            decode_stats(link.answer()?).map_err(nonsense)
        });
        all.push(("agent_up".to_owned(), u64::from(agents.is_ok())));
        all.extend(agents.unwrap_or_default().into_iter().map(|(name, value)| (format!("agent_{name}"), value)));
        all
    }
}
