//! One conversation, from the greeting to its end.

use std::collections::HashSet;
use std::io::{self, IoSlice, Read, Write};
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Shared, Traffic, admin};
use crate::checksum::checksum;
use crate::error::Error;
use crate::net::{Connection, Socket, Timed};
use crate::object::{Meta, TenantId};
use crate::store::{Got, PutId, Rule, Started, Want};
use crate::upstream::outcome;
use crate::wire::{
    AnswerStart, CheckAnswer, CheckRequest, GetItem, GetRequest, Greeting, HEADER, Header, Hello, MAX_BODY, MAX_WRITE,
    Malformed, Op, Role, Roles, Status, Welcome, WriteHead, decode_numbers, decode_start, encode_outcomes,
    encode_started,
};

/// Bytes of objects that are read and sent at once.
const GROUP: u64 = 4 << 20;

/// Puts that one connection may have open.
const MAX_OPEN: usize = 16 << 10;

/// Bodies above this size leave no memory behind.
const KEEP: usize = 256 << 10;

/// One peer, after its hello.
struct Peer<'a> {
    shared: &'a Shared,
    connection: Connection,
    tenant: TenantId,
    /// Its tenant, while that has no number.
    unnumbered: Option<String>,
    roles: Roles,
    rule: Rule,
    /// Puts begun on this connection: nobody else's may be named.
    open: HashSet<u64>,
    body: Vec<u8>,
    bytes: Vec<u8>,
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        let left: Vec<PutId> = self.open.drain().map(PutId).collect();
        self.shared.store.revoke(&left);
    }
}

/// What ends a request without an answer of its own.
enum Fault {
    /// The connection is of no use any more.
    Broken,
    /// Told to the peer under this status.
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
        let status = match error {
            Error::Invalid(_) | Error::Conflict(_) => Status::Invalid,
            Error::Full(_) => Status::Busy,
            Error::Unavailable(_) => Status::Leaving,
            Error::Damaged(..) | Error::Newer { .. } | Error::Io { .. } => Status::Failed,
        };
        Self::Told(status, error.to_string())
    }
}

/// Greets, learns who it is, and serves requests until either end has enough.
pub(super) fn conversation(shared: &Shared, socket: Socket, tcp: bool, id: u64) -> Result<(), Error> {
    let broken = || Error::Unavailable("the connection ended".to_owned());
    let timed = Timed::new(socket);
    let mut connection = match &shared.acceptor {
        Some(acceptor) if tcp => acceptor.accept(timed)?,
        _ => Connection::Plain(timed),
    };
    connection.allow(shared.config.handshake);
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|_| broken())?;
    let mut peer = greet(shared, connection, nonce).map_err(|_| broken())?;
    shared.gate.known(id);
    while peer.request().is_ok() {}
    Ok(())
}

fn greet(shared: &Shared, mut connection: Connection, nonce: [u8; 16]) -> Result<Peer<'_>, Fault> {
    connection.write_all(&Greeting { nonce }.encode())?;
    connection.flush()?;
    let mut len = [0; 4];
    connection.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    let refused = |_| {
        Traffic::note(&shared.traffic.refused);
        Fault::Broken
    };
    if len > Hello::MAX {
        return Err(refused(Malformed("a hello is too long")));
    }
    let mut body = vec![0; len];
    connection.read_exact(&mut body)?;
    let (hello, roles, all) =
        Hello::decode(&body, &nonce, |role| shared.secrets.get(&role).cloned()).map_err(refused)?;
    // Whoever proves nothing has no claim on a place.
    let all = all && roles != Roles::default();
    // A number is for good: only who may write takes one.
    let tenant = if hello.tenant.is_empty() || !all {
        TenantId(0)
    } else if roles.has(Role::Put) {
        shared.store.tenant(&hello.tenant)?.id
    } else {
        shared.store.reader(&hello.tenant)?
    };
    let unnumbered = (tenant == TenantId(0) && !hello.tenant.is_empty()).then_some(hello.tenant);
    let other = shared.other_block_tokens(hello.fingerprint, hello.block_tokens, roles.has(Role::Put));
    let welcome = Welcome { roles, all, other_block_tokens: other, max_object: shared.store.config().max_object };
    let unproved = if all { None } else { Some(refused(Malformed("a role is not proved"))) };
    connection.write_all(&welcome.encode())?;
    connection.flush()?;
    if let Some(fault) = unproved {
        return Err(fault);
    }
    let rule = if hello.first_stays { Rule::FirstStays } else { Rule::Exact };
    Ok(Peer {
        shared,
        connection,
        tenant,
        unnumbered,
        roles,
        rule,
        open: HashSet::new(),
        body: Vec::new(),
        bytes: Vec::new(),
    })
}

impl Peer<'_> {
    /// One request and its answer.
    fn request(&mut self) -> Result<(), Fault> {
        let mut head = [0; HEADER];
        self.connection.allow(self.shared.config.idle);
        self.connection.read_exact(&mut head[..1])?;
        self.connection.allow(self.shared.config.request);
        self.connection.read_exact(&mut head[1..])?;
        let header = Header::decode(&head).map_err(|error| {
            Traffic::note(&self.shared.traffic.malformed);
            Fault::from(error)
        });
        let Ok(header) = header else { return Err(Fault::Broken) };
        let most = if header.op == Op::Write { WriteHead::LEN + MAX_WRITE } else { MAX_BODY };
        if header.len as usize > most {
            // What follows cannot be skipped: it may be as long as it likes.
            Traffic::note(&self.shared.traffic.malformed);
            self.tell(header.number, Status::Invalid, &format!("a body of {} bytes: send {most} at most", header.len))?;
            return Err(Fault::Broken);
        }
        let mut body = std::mem::take(&mut self.body);
        body.resize(header.len as usize, 0);
        self.connection.read_exact(&mut body)?;
        let begun = Instant::now();
        let done = self.handle(header, &body);
        if let Some(times) = self.shared.traffic.times(header.op) {
            times.add(begun.elapsed());
        }
        if body.capacity() <= KEEP {
            self.body = body;
        }
        match done {
            Ok(()) => Ok(()),
            Err(Fault::Told(status, why)) => {
                let counter = match status {
                    Status::Invalid => Some(&self.shared.traffic.malformed),
                    Status::Forbidden => Some(&self.shared.traffic.forbidden),
                    _ => None,
                };
                counter.inspect(|counter| Traffic::note(counter));
                if header.op == Op::Write {
                    // It has no answer: the commit finds bytes missing.
                    return Ok(());
                }
                self.tell(header.number, status, &why)
            }
            Err(Fault::Broken) => Err(Fault::Broken),
        }
    }

    fn handle(&mut self, header: Header, body: &[u8]) -> Result<(), Fault> {
        let requests = &self.shared.traffic.requests;
        let (role, counter) = match header.op {
            Op::Check => (Some(Role::Check), Some(&requests[0])),
            Op::Get => (Some(Role::Get), Some(&requests[1])),
            Op::Start => (Some(Role::Put), Some(&requests[2])),
            Op::Commit => (Some(Role::Put), Some(&requests[3])),
            Op::Write | Op::Revoke => (Some(Role::Put), None),
            Op::Admin => (Some(Role::Admin), None),
            Op::Ping => (None, None),
            Op::Answer => return Err(Malformed("an answer to nothing").into()),
        };
        if let Some(role) = role
            && !self.roles.has(role)
        {
            return Err(Fault::Told(Status::Forbidden, format!("this needs the role {}: give its token", role.name())));
        }
        counter.inspect(|counter| Traffic::note(counter));
        if self.shared.leaving.load(Ordering::SeqCst) && !matches!(header.op, Op::Write | Op::Commit | Op::Revoke) {
            return Err(Fault::Told(Status::Leaving, "the server is going away".to_owned()));
        }
        match header.op {
            Op::Check => {
                let request = CheckRequest::decode(body)?;
                let found = self.shared.store.check(self.reader()?, &request.chain, request.slices as usize)?;
                let slices = found.slices.iter().map(|&position| position as u32).collect();
                self.answer(header.number, &CheckAnswer { blocks: found.blocks as u32, slices }.encode())
            }
            Op::Get => self.get(header.number, &GetRequest::decode(body)?),
            Op::Start => self.start(header.number, body),
            Op::Write => {
                let (head, bytes) = WriteHead::decode(body)?;
                self.own(head.put)?;
                Ok(self.shared.store.write(PutId(head.put), head.offset, bytes)?)
            }
            Op::Commit => self.commit(header.number, body),
            Op::Revoke => {
                let ids = decode_numbers(body)?;
                ids.iter().try_for_each(|&id| self.own(id))?;
                self.shared.store.revoke(&ids.iter().map(|&id| PutId(id)).collect::<Vec<_>>());
                self.forget(&ids);
                self.answer(header.number, &[])
            }
            Op::Admin => {
                let answer = admin::run(&self.shared.store, Some(&self.shared.traffic), body)?;
                self.answer(header.number, answer.as_bytes())
            }
            Op::Ping | Op::Answer => self.answer(header.number, &[]),
        }
    }

    /// Whose objects it may see: a writer may have given its tenant a number since.
    fn reader(&mut self) -> Result<TenantId, Error> {
        if let Some(name) = &self.unnumbered {
            self.tenant = self.shared.store.reader(name)?;
            if self.tenant != TenantId(0) {
                self.unnumbered = None;
            }
        }
        Ok(self.tenant)
    }

    fn own(&self, put: u64) -> Result<(), Fault> {
        if self.open.contains(&put) {
            Ok(())
        } else {
            Err(Malformed("a put that this connection did not begin").into())
        }
    }

    fn forget(&mut self, puts: &[u64]) {
        for put in puts {
            self.open.remove(put);
        }
    }

    fn start(&mut self, number: u32, body: &[u8]) -> Result<(), Fault> {
        let items = decode_start(body)?;
        if self.open.len() + items.len() > MAX_OPEN {
            return Err(Fault::Told(Status::Busy, format!("more than {MAX_OPEN} open puts: commit some first")));
        }
        let now = self.shared.store.now();
        let metas: Vec<Meta> = items
            .iter()
            .map(|item| Meta {
                id: item.id,
                parent: item.parent,
                tenant: self.tenant,
                class: item.class,
                len: item.len,
                checksum: item.checksum,
                written: now,
            })
            .collect();
        let started = self.shared.store.start(&metas, self.rule);
        let answers: Vec<_> = started
            .iter()
            .map(|one| match one {
                Started::Write(PutId(id)) => {
                    self.open.insert(*id);
                    Ok(*id)
                }
                Started::Not(put) => Err(outcome(put)),
            })
            .collect();
        self.answer(number, &encode_started(&answers))
    }

    fn commit(&mut self, number: u32, body: &[u8]) -> Result<(), Fault> {
        let ids = decode_numbers(body)?;
        ids.iter().try_for_each(|&id| self.own(id))?;
        let puts: Vec<PutId> = ids.iter().map(|&id| PutId(id)).collect();
        let done = self.shared.store.commit(&puts, self.rule);
        self.forget(&ids);
        self.answer(number, &encode_outcomes(&done.iter().map(outcome).collect::<Vec<_>>()))
    }

    /// Reads and sends group by group, so that an answer of any length takes bounded memory.
    fn get(&mut self, number: u32, items: &[GetItem]) -> Result<(), Fault> {
        let most = self.shared.store.config().max_object;
        if let Some(item) = items.iter().find(|item| item.len > most) {
            return Err(Fault::Told(
                Status::Invalid,
                format!("{} bytes of {}: no object is longer than {most}", item.len, item.id),
            ));
        }
        self.reader()?;
        self.connection.write_all(&Header { op: Op::Answer, status: Status::Done, number, len: 0 }.encode())?;
        let mut rest = items;
        while !rest.is_empty() {
            let mut bytes = 0;
            let count = rest
                .iter()
                .position(|item| {
                    bytes += u64::from(item.len);
                    bytes > GROUP
                })
                .unwrap_or(rest.len())
                .max(1);
            let (group, behind) = rest.split_at(count);
            rest = behind;
            self.send(group)?;
            // Whoever takes its answer slowly has time for each group, not for all of them.
            self.connection.allow(self.shared.config.request);
        }
        Ok(self.connection.flush()?)
    }

    fn send(&mut self, group: &[GetItem]) -> Result<(), Fault> {
        let total: usize = group.iter().map(|item| item.len as usize).sum();
        let patience = self.shared.config.request;
        let Some(_share) = self.shared.budget.take(total as u64, patience) else { return Err(Fault::Broken) };
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(total, 0);
        let mut left = bytes.as_mut_slice();
        let mut wants = Vec::with_capacity(group.len());
        for item in group {
            let (into, behind) = left.split_at_mut(item.len as usize);
            left = behind;
            wants.push(Want { id: item.id, start: item.start, into });
        }
        let got = self.shared.store.get(self.tenant, &mut wants);
        let starts: Vec<[u8; AnswerStart::LEN]> = wants
            .iter()
            .zip(&got)
            .map(|(want, got)| {
                let start = match *got {
                    // Of a whole object the store has just held the bytes to it.
                    Got::Hit { len, checksum } if want.into.len() == len as usize => {
                        AnswerStart { hit: true, len, checksum }
                    }
                    Got::Hit { len, .. } => AnswerStart { hit: true, len, checksum: checksum(want.into) },
                    _ => AnswerStart { hit: false, len: 0, checksum: 0 },
                };
                start.encode()
            })
            .collect();
        let mut pieces = Vec::with_capacity(2 * group.len());
        for ((want, got), start) in wants.iter().zip(&got).zip(&starts) {
            pieces.push(IoSlice::new(start));
            if got.is_hit() {
                pieces.push(IoSlice::new(want.into));
            }
        }
        // The system takes 1,024 pieces at once.
        for pieces in pieces.chunks_mut(1024) {
            self.connection.write_pieces(pieces)?;
        }
        if bytes.capacity() <= GROUP as usize {
            self.bytes = bytes;
        }
        Ok(())
    }

    fn answer(&mut self, number: u32, body: &[u8]) -> Result<(), Fault> {
        self.frame(number, Status::Done, body)
    }

    fn tell(&mut self, number: u32, status: Status, why: &str) -> Result<(), Fault> {
        self.frame(number, status, why.as_bytes())
    }

    fn frame(&mut self, number: u32, status: Status, body: &[u8]) -> Result<(), Fault> {
        let head = Header { op: Op::Answer, status, number, len: body.len() as u32 }.encode();
        Ok(self.connection.write_pieces(&mut [IoSlice::new(&head), IoSlice::new(body)])?)
    }
}
