//! One engine's connection, from its greeting to its end.

use std::io::{self, IoSlice, Read, Write};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::Pin;
use super::counters::add;
use super::fetch::Found;
use super::host::{Host, Pins};
use super::pass;
use super::shm::Staged;
use super::tenants::Tenant;
use super::words::{
    Greeting, HEADER, Header, MAX_BODY, Op, PLACE, Place, PutItem, Status, VERSION, Welcome, decode_damaged,
    decode_flush, decode_get, decode_put, encode_flushed, encode_found, encode_outcomes, encode_stats, push_place,
};
use crate::checksum::checksum;
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::net::{Socket, Timed, timed_out, write_pieces};
use crate::object::Class;
use crate::upstream::Found as Prefix;
use crate::wire::{CheckRequest, Malformed, Outcome, decode_numbers};

/// How often an engine that waits is told that somebody is there.
const MOMENT: Duration = Duration::from_millis(150);

/// Objects of an answer that are told at once.
const PART: usize = 64;

/// Bodies above this size leave no memory behind.
const KEEP: usize = 256 << 10;

/// What ends a request without an answer of its own.
enum Fault {
    /// The connection is of no use any more.
    Broken,
    /// Told to the engine.
    Told(Status, String),
}

impl From<io::Error> for Fault {
    fn from(_: io::Error) -> Self {
        Self::Broken
    }
}

impl From<Malformed> for Fault {
    fn from(malformed: Malformed) -> Self {
        Self::Told(Status::Invalid, malformed.to_string())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let status = if matches!(error, Error::Invalid(_)) { Status::Invalid } else { Status::Unavailable };
        Self::Told(status, error.to_string())
    }
}

/// One engine, after its greeting.
struct Peer<'a> {
    host: &'a Host,
    timed: Timed,
    tenant: Arc<Tenant>,
    pins: Arc<Mutex<Pins>>,
    stage: Option<Staged>,
    /// It has put something: what it says of its blocks is noted.
    writes: bool,
    body: Vec<u8>,
}

/// Learns who it is, and serves requests until either end has enough.
pub(super) fn conversation(host: &Host, socket: Socket, id: u64) {
    let Ok(handle) = socket.handle() else { return };
    let Ok(mut peer) = greet(host, Timed::new(socket), id, handle) else { return };
    while peer.request().is_ok() {}
}

fn greet(host: &Host, mut timed: Timed, id: u64, handle: Socket) -> Result<Peer<'_>, Fault> {
    let refused = |fault| {
        add(&host.counters.turned_away, 1);
        fault
    };
    timed.allow(host.config.handshake);
    let mut fixed = [0; Greeting::FIXED];
    timed.read_exact(&mut fixed)?;
    let mut tenant = vec![0; Greeting::tenant_len(&fixed).map_err(|error| refused(error.into()))?];
    timed.read_exact(&mut tenant)?;
    let greeting = Greeting::decode(&fixed, &tenant).map_err(|error| refused(error.into()))?;
    let mut welcome = Welcome {
        version: VERSION,
        admitted: false,
        agent: host.number,
        arena: host.arena.shared().len(),
        at_once: host.config.at_once,
        max_object: host.config.max_object,
        unwritten: 0,
    };
    let tenant = if greeting.version == VERSION { host.tenants.of(&greeting.who) } else { Err(Malformed("").into()) };
    let tenant = match tenant {
        Ok(tenant) => tenant,
        Err(error) => {
            timed.write_all(&welcome.encode())?;
            return Err(refused(error.into()));
        }
    };
    welcome.admitted = true;
    welcome.unwritten = tenant.queue().unwritten;
    let fd = host.arena.shared().fd();
    pass::send(timed.armed()?, &welcome.encode(), fd)?;
    let pins = host.known(id, handle);
    Ok(Peer { host, timed, tenant, pins, stage: None, writes: false, body: Vec::new() })
}

impl Peer<'_> {
    fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request and its answer.
    fn request(&mut self) -> Result<(), Fault> {
        let mut head = [0; HEADER];
        self.timed.allow(self.host.config.idle);
        self.timed.read_exact(&mut head[..1])?;
        self.timed.allow(self.host.config.request);
        self.timed.read_exact(&mut head[1..])?;
        let Ok(header) = Header::decode(&head) else {
            add(&self.host.counters.malformed, 1);
            return Err(Fault::Broken);
        };
        if header.len as usize > MAX_BODY {
            // What follows cannot be skipped: it may be as long as it likes.
            add(&self.host.counters.malformed, 1);
            let why = format!("a body of {} bytes: send {MAX_BODY} at most", header.len);
            self.frame(header.number, Status::Invalid, why.as_bytes())?;
            return Err(Fault::Broken);
        }
        if header.op == Op::Stage {
            return self.stage(header);
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(header.len as usize, 0);
        self.timed.read_exact(&mut body)?;
        let done = self.handle(header, &body);
        if body.capacity() <= KEEP {
            self.body = body;
        }
        match done {
            Err(Fault::Told(status, why)) => {
                if status == Status::Invalid {
                    add(&self.host.counters.malformed, 1);
                }
                if matches!(header.op, Op::Release | Op::Damaged) {
                    // They have no answer: whoever says what makes no sense there has lost count.
                    return Err(Fault::Broken);
                }
                self.frame(header.number, status, why.as_bytes())
            }
            other => other,
        }
    }

    fn handle(&mut self, header: Header, body: &[u8]) -> Result<(), Fault> {
        let number = header.number;
        match header.op {
            Op::Check => {
                let CheckRequest { slices, chain } = CheckRequest::decode(body)?;
                let found = self.check(&chain, slices as usize)?;
                let other = match self.host.tenants.other_block_tokens(&self.tenant.who, self.writes) {
                    0 => self.tenant.upstream.other_block_tokens(),
                    other => other,
                };
                self.frame(number, Status::Done, &encode_found(&found, other))
            }
            Op::Get => self.get(number, &decode_get(body)?),
            Op::Release => {
                let mut pins = self.pins();
                let known = decode_numbers(body)?.iter().all(|&pin| pins.drop_pin(pin));
                if known { Ok(()) } else { Err(Malformed("a pin that this connection does not have").into()) }
            }
            Op::Put => {
                let (class, chain, items) = decode_put(body)?;
                let outcomes = self.put(number, class, chain, &items)?;
                self.frame(number, Status::Done, &encode_outcomes(&outcomes))
            }
            Op::Flush => {
                let (all, unwritten) = self.flush(number, decode_flush(body)?)?;
                self.frame(number, Status::Done, &encode_flushed(all, unwritten))
            }
            Op::Stats => {
                let mut all = self.host.stats();
                all.extend(
                    self.tenant.upstream.stats().into_iter().map(|(name, value)| (format!("store_{name}"), value)),
                );
                self.frame(number, Status::Done, &encode_stats(&all))
            }
            Op::Damaged => {
                let (id, sum) = decode_damaged(body)?;
                self.damaged(id, sum);
                Ok(())
            }
            Op::Stage | Op::Answer => Err(Malformed("an answer to nothing").into()),
        }
    }

    /// The memory that this engine puts from: a descriptor with one byte.
    fn stage(&mut self, header: Header) -> Result<(), Fault> {
        if header.len != 1 {
            return Err(Fault::Broken);
        }
        let mut byte = [0];
        let (read, fd) = pass::receive(self.timed.armed()?, &mut byte).map_err(timed_out)?;
        if read == 0 {
            return Err(Fault::Broken);
        }
        let staged =
            fd.ok_or_else(|| Error::Invalid("a stage without its descriptor".to_owned())).and_then(Staged::new);
        match staged {
            Ok(staged) => {
                self.stage = Some(staged);
                self.frame(header.number, Status::Done, &[])
            }
            Err(error) => {
                add(&self.host.counters.malformed, 1);
                self.frame(header.number, Status::Invalid, error.to_string().as_bytes())
            }
        }
    }

    /// What lies in the arena counts like what the store has, and goes on where the store ends: a put is there at once.
    fn check(&self, chain: &[Key], slices: usize) -> Result<Prefix, Error> {
        crate::index::check_chain(chain)?;
        let arena = &self.host.arena;
        let name = |kind: Kind, key: Key| self.tenant.name(ObjectId { kind, key });
        let run = |from: usize| arena.run(chain[from..].iter().map(|&key| name(Kind::Block, key)));
        let near = run(0);
        let mut here: Vec<usize> = Vec::new();
        let look = |here: &mut Vec<usize>, blocks: usize| {
            here.clear();
            let present = |at: &usize| arena.find(name(Kind::Slice, chain[*at])).is_some();
            here.extend((0..blocks).rev().filter(present).take(slices));
        };
        look(&mut here, near);
        let enough = slices == 0 || (slices == 1 && here.first().is_some_and(|&at| at + 1 == chain.len()));
        if near == chain.len() && enough {
            // Nothing that the store could say would change it.
            return Ok(Prefix { blocks: near, slices: here, near });
        }
        // A store that does not answer has nothing: what is here stays.
        let store = self.tenant.upstream.check(chain, slices).unwrap_or_default();
        let mut blocks = near.max(store.blocks);
        blocks += run(blocks);
        look(&mut here, blocks);
        here.extend(store.slices);
        here.sort_unstable_by(|a, b| b.cmp(a));
        here.dedup();
        here.truncate(slices);
        Ok(Prefix { blocks, slices: here, near })
    }

    /// Tells where objects lie, in order, as they arrive.
    fn get(&mut self, number: u32, items: &[(ObjectId, u32)]) -> Result<(), Fault> {
        let total: u64 = items.iter().map(|&(_, len)| u64::from(len)).sum();
        let most = self.host.config.max_object;
        if let Some((id, len)) = items.iter().find(|(_, len)| *len > most) {
            return Err(Error::Invalid(format!("{len} bytes of {id}: no object is longer than {most}")).into());
        }
        if total + self.pins().bytes() > self.host.config.at_once {
            let most = self.host.config.at_once;
            return Err(Error::Invalid(format!("more than {most} bytes at once: ask for less, release first")).into());
        }
        if items.is_empty() {
            return Err(Malformed("a get of nothing").into());
        }
        let found = self.host.fetches.find(&self.tenant, items);
        let until = Instant::now() + self.host.config.fetch_patience;
        let mut part = Vec::with_capacity(PART * PLACE);
        for (found, &(id, len)) in found.into_iter().zip(items) {
            let pin = match found {
                Found::Here(pin) => Some(pin),
                Found::Missing => None,
                Found::Coming(fetch, at) => {
                    let here = loop {
                        if let Some(here) = fetch.wait(at, Duration::ZERO) {
                            break here;
                        }
                        // What is known is told before anything is waited for.
                        self.part(number, &mut part)?;
                        if let Some(here) = fetch.wait(at, MOMENT) {
                            break here;
                        }
                        if Instant::now() >= until {
                            break false;
                        }
                        self.frame(number, Status::Waiting, &[])?;
                    };
                    if here {
                        self.host.arena.pin(self.tenant.name(id)).filter(|pin| pin.extent().len == len)
                    } else {
                        None
                    }
                }
            };
            let place = pin.map(|pin| self.place(pin));
            push_place(&mut part, place);
            if part.len() >= PART * PLACE {
                self.part(number, &mut part)?;
            }
        }
        self.part(number, &mut part)
    }

    fn place(&self, pin: Pin) -> Place {
        let extent = pin.extent();
        Place { pin: self.pins().add(pin), place: extent.place, checksum: extent.checksum }
    }

    fn part(&mut self, number: u32, part: &mut Vec<u8>) -> Result<(), Fault> {
        if part.is_empty() {
            return Ok(());
        }
        let sent = self.frame(number, Status::Done, part);
        part.clear();
        sent
    }

    /// Copies objects out of the stage; from then on they are there, and on their way to the store.
    fn put(&mut self, number: u32, class: Class, chain: Vec<Key>, items: &[PutItem]) -> Result<Vec<Outcome>, Fault> {
        if self.host.leaving.load(Ordering::SeqCst) {
            return Err(Fault::Told(Status::Unavailable, "the agent is going away".to_owned()));
        }
        if self.stage.is_none() {
            return Err(Malformed("a put before its stage").into());
        }
        let total: u64 = items.iter().map(|item| u64::from(item.len)).sum();
        if total > self.host.config.at_once {
            return Err(Malformed("more bytes than may be put at once").into());
        }
        self.writes = true;
        self.host.tenants.other_block_tokens(&self.tenant.who, true);
        let host = self.host;
        let until = Instant::now() + host.config.put_patience;
        let share = loop {
            let left = until.saturating_duration_since(Instant::now());
            if let Some(share) = host.backlog.take(total, left.min(MOMENT)) {
                break share;
            }
            if left.is_zero() {
                add(&host.counters.no_room, items.len() as u64);
                return Ok(vec![Outcome::Full; items.len()]);
            }
            self.frame(number, Status::Waiting, &[])?;
        };
        // Whoever holds what is pinned has a moment to let go, not one for each object.
        let until = Instant::now() + host.config.room_patience.min(4 * MOMENT);
        let mut taken = Vec::new();
        let mut outcomes = Vec::with_capacity(items.len());
        for item in items {
            let at = item.at as usize;
            let (outcome, pin) = self.take(ObjectId { kind: item.kind, key: chain[at] }, item, until);
            outcomes.push(outcome);
            taken.extend(pin.map(|pin| (item.kind, at, pin)));
        }
        host.backlog.push(share, &self.tenant, chain, class, taken);
        Ok(outcomes)
    }

    /// One object out of the stage, unless it is there.
    fn take(&self, id: ObjectId, item: &PutItem, until: Instant) -> (Outcome, Option<Pin>) {
        let host = self.host;
        let name = self.tenant.name(id);
        if item.len > host.config.max_object {
            return (Outcome::Invalid, None);
        }
        if let Some(outcome) = self.present(id, item) {
            return (outcome, None);
        }
        let Some(mut room) = host.arena.reserve(item.len, until.saturating_duration_since(Instant::now())) else {
            add(&host.counters.no_room, 1);
            return (Outcome::Full, None);
        };
        let read = self.stage.as_ref().map(|stage| stage.read(item.place, room.bytes()));
        if !matches!(read, Some(Ok(()))) || checksum(room.bytes()) != item.checksum {
            return (Outcome::Invalid, None);
        }
        match room.publish(name, item.checksum) {
            Ok(pin) => {
                add(&host.counters.put, 1);
                add(&host.counters.put_bytes, item.len.into());
                (Outcome::Stored, Some(pin))
            }
            // Another one was faster.
            Err(_) => (self.present(id, item).unwrap_or(Outcome::Failed), None),
        }
    }

    fn present(&self, id: ObjectId, item: &PutItem) -> Option<Outcome> {
        let extent = self.host.arena.find(self.tenant.name(id))?;
        let counters = &self.host.counters;
        Some(if (extent.len, extent.checksum) == (item.len, item.checksum) {
            add(&counters.exists, 1);
            Outcome::Exists
        } else if self.tenant.who.first_stays {
            add(&counters.differs, 1);
            Outcome::Exists
        } else {
            add(&counters.conflicts, 1);
            Outcome::Conflict
        })
    }

    /// Waits until what was put before has been tried; then says how many objects the store did not take so far.
    fn flush(&mut self, number: u32, patience: Duration) -> Result<(bool, u64), Fault> {
        let until = Instant::now() + patience.min(self.host.config.request);
        let target = self.tenant.queue().taken;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.tenant.wait(target, left.min(MOMENT)) {
                let all = self.tenant.upstream.flush(until.saturating_duration_since(Instant::now()));
                return Ok((all, self.tenant.queue().unwritten));
            }
            if left.is_zero() {
                return Ok((false, self.tenant.queue().unwritten));
            }
            self.frame(number, Status::Waiting, &[])?;
        }
    }

    /// A reader found wrong bytes: if they are wrong here, too, nobody finds them any more, and the store is told.
    fn damaged(&self, id: ObjectId, sum: u64) {
        let name = self.tenant.name(id);
        let Some(pin) = self.host.arena.pin(name).filter(|pin| pin.extent().checksum == sum) else { return };
        if pin.is_damaged() {
            self.host.arena.remove(name);
            add(&self.host.counters.quarantined, 1);
            self.tenant.upstream.damaged(id);
        } else {
            add(&self.host.counters.false_reports, 1);
        }
    }

    fn frame(&mut self, number: u32, status: Status, body: &[u8]) -> Result<(), Fault> {
        // Whoever takes its answer slowly has time for each part, not for all of them.
        self.timed.allow(self.host.config.request);
        let head = Header { op: Op::Answer, status, number, len: body.len() as u32 }.encode();
        write_pieces(&mut self.timed, &mut [IoSlice::new(&head), IoSlice::new(body)])?;
        Ok(())
    }
}
