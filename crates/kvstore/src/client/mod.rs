//! The other end of a server: one entry point of the store, over a few connections that are kept.
//!
//! Owns: connections to one address, what is asked again on a fresh one, how long a silent server is left alone.
//! Never touches: which entry point owns a key.
//!
//! Every request may be made twice without harm, since writes are create-only: what a kept connection loses, because the server was
//! started again, is asked once more on a new one.

mod link;

use std::io::IoSlice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::checksum::{Sum, checksum};
use crate::error::Error;
use crate::index::check_chain;
use crate::key::{Key, ObjectId};
use crate::lost::Lost;
use crate::net::Address;
use crate::object::Class;
use crate::tls::{ClientTls, Connector};
use crate::wire::{
    AnswerStart, CheckAnswer, CheckRequest, GetItem, GetRequest, Hello, MAX_ITEMS, MAX_WRITE, MetaFields, Op, Outcome,
    Proof, Role, WriteHead, decode_outcomes, decode_started, encode_numbers, encode_start,
};
use link::{Link, nonsense};

/// Longest name of a tenant, bytes.
pub const MAX_TENANT: usize = 128;

/// Bytes of objects begun at once by a put: several round trips for more.
const PUT_AT_ONCE: u64 = 64 << 20;

/// Whom to ask, and as whom.
#[derive(Clone)]
pub struct ClientConfig {
    /// The server.
    pub address: Address,
    /// Name of the tenant; empty: the public one.
    pub tenant: String,
    /// Roles wanted, each with its token where the server has one.
    pub roles: Vec<(Role, Option<Vec<u8>>)>,
    /// See [`Hello::fingerprint`].
    pub fingerprint: [u8; 16],
    /// See [`Hello::block_tokens`].
    pub block_tokens: u32,
    /// See [`Hello::first_stays`].
    pub first_stays: bool,
    /// Authorities and name for TLS; none: plain.
    pub tls: Option<ClientTls>,
    /// Time for a connection and its hello.
    pub connect: Duration,
    /// Time for a check: a server that is slower has none of the keys.
    pub check: Duration,
    /// Time for each object of a get, and for a put to be begun.
    pub get: Duration,
    /// Time for everything else, an object at a time.
    pub request: Duration,
    /// How long a server that did not answer is left alone.
    pub rest: Duration,
    /// Connections kept for later.
    pub keep: usize,
}

impl std::fmt::Debug for ClientConfig {
    /// Without the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let roles: Vec<&str> = self.roles.iter().map(|(role, _)| role.name()).collect();
        f.debug_struct("ClientConfig")
            .field("address", &self.address)
            .field("tenant", &self.tenant)
            .field("roles", &roles)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl ClientConfig {
    /// Of everybody's store at `address`, for everything.
    pub fn new(address: Address) -> Self {
        Self {
            address,
            tenant: String::new(),
            roles: Role::ALL.map(|role| (role, None)).to_vec(),
            fingerprint: [0; 16],
            block_tokens: 0,
            first_stays: false,
            tls: None,
            connect: Duration::from_millis(300),
            check: Duration::from_millis(500),
            get: Duration::from_secs(30),
            request: Duration::from_secs(30),
            rest: Duration::from_secs(1),
            keep: 8,
        }
    }
}

/// An object to be written.
pub struct NewObject<'a> {
    /// Its name.
    pub id: ObjectId,
    /// See [`crate::Meta::parent`].
    pub parent: Option<Key>,
    /// What kind of traffic it came with.
    pub class: Class,
    /// Its bytes, one piece after the other.
    pub pieces: &'a [&'a [u8]],
    /// Their XXH3-64 where it is known: bytes that lack it are refused. Otherwise it is taken now.
    pub checksum: Option<u64>,
}

/// A range of an object to be read.
pub struct Fetch<'a> {
    /// Which object.
    pub id: ObjectId,
    /// First byte.
    pub start: u32,
    /// Filled whole on a hit; on a miss it may hold anything.
    pub into: &'a mut [u8],
}

#[derive(Default)]
struct Pool {
    idle: Vec<Link>,
    silent_until: Option<Instant>,
    other_block_tokens: u32,
}

/// A client. All calls are safe from any thread; each takes a connection of its own.
pub struct Client {
    config: ClientConfig,
    hello: Hello,
    proofs: Vec<(Role, Option<Proof>)>,
    connector: Option<Connector>,
    pool: Mutex<Pool>,
}

impl Client {
    /// Connects to nobody yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a tenant's name that is too long or a bad certificate, [`Error::Io`].
    pub fn new(config: ClientConfig) -> Result<Self, Error> {
        if config.tenant.len() > MAX_TENANT {
            return Err(Error::Invalid(format!("a tenant's name has {MAX_TENANT} bytes at most")));
        }
        let connector = config.tls.as_ref().map(Connector::new).transpose()?;
        let proofs =
            config.roles.iter().map(|(role, token)| (*role, token.as_deref().map(Proof::from_token))).collect();
        let hello = Hello {
            tenant: config.tenant.clone(),
            fingerprint: config.fingerprint,
            block_tokens: config.block_tokens,
            first_stays: config.first_stays,
        };
        Ok(Self { config, hello, proofs, connector, pool: Mutex::default() })
    }

    /// The server's address.
    pub fn address(&self) -> &Address {
        &self.config.address
    }

    /// Another size of blocks under which engines of this fingerprint write; what they write cannot be found from here. 0: none known.
    pub fn other_block_tokens(&self) -> u32 {
        self.pool().other_block_tokens
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fresh(&self, time: Duration) -> Result<Link, Lost> {
        let (link, welcome) =
            Link::open(&self.config.address, self.connector.as_ref(), &self.hello, &self.proofs, time)?;
        self.pool().other_block_tokens = welcome.other_block_tokens;
        Ok(link)
    }

    fn keep(&self, link: Link) {
        let mut pool = self.pool();
        if pool.idle.len() < self.config.keep {
            pool.idle.push(link);
        }
    }

    /// Runs `talk` on a kept connection, once more on a fresh one if that was lost, and keeps the connection if all went well. `time` is for the
    /// first answer, connecting twice included: `talk` begins with what is left of it.
    fn with<T>(&self, time: Duration, mut talk: impl FnMut(&mut Link) -> Result<T, Lost>) -> Result<T, Error> {
        let until = Instant::now() + time;
        let left = || until.saturating_duration_since(Instant::now());
        {
            let mut pool = self.pool();
            if pool.silent_until.is_some_and(|until| Instant::now() < until) {
                return Err(self.silent("it did not answer a moment ago"));
            }
            pool.silent_until = None;
        }
        let kept = self.pool().idle.pop();
        let mut first = kept.is_some();
        let mut link = match kept {
            Some(link) => Ok(link),
            None => self.fresh(self.config.connect.min(time)),
        };
        loop {
            if let Ok(open) = &mut link {
                open.allow(left());
            }
            let ended = match link {
                Ok(mut open) => match talk(&mut open) {
                    Ok(value) => {
                        self.keep(open);
                        return Ok(value);
                    }
                    Err(Lost::Told(error)) => {
                        // The connection is as good as before: the server answered.
                        self.keep(open);
                        return Err(error);
                    }
                    Err(lost) => lost,
                },
                Err(lost) => lost,
            };
            match ended {
                Lost::Told(error) | Lost::Refused(error) => return Err(error),
                Lost::Gone(_) if first => {
                    // All kept ones are of the same age.
                    self.pool().idle.clear();
                    first = false;
                    link = self.fresh(self.config.connect.min(left()));
                }
                Lost::Gone(error) | Lost::Slow(error) => {
                    let mut pool = self.pool();
                    pool.idle.clear();
                    pool.silent_until = Some(Instant::now() + self.config.rest);
                    drop(pool);
                    return Err(match error {
                        Error::Unavailable(why) => self.silent(&why),
                        other => self.silent(&other.to_string()),
                    });
                }
            }
        }
    }

    fn silent(&self, why: &str) -> Error {
        Error::Unavailable(format!("the KV store at {}: {why}", self.config.address))
    }

    /// What is there of a chain: blocks from the first on, and up to `slices` of their slices, deepest first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain that is too long, [`Error::Unavailable`] where nobody answers in time.
    pub fn check(&self, chain: &[Key], slices: u32) -> Result<CheckAnswer, Error> {
        check_chain(chain)?;
        let body = CheckRequest::encode(slices, chain);
        let answer = self.with(self.config.connect + self.config.check, |link| {
            link.ask(Op::Check, &body)?;
            let answer = link.answer()?;
            CheckAnswer::decode(answer).map_err(nonsense)
        })?;
        if answer.blocks as usize > chain.len() {
            return Err(self.silent("it found more blocks than were asked for"));
        }
        Ok(answer)
    }

    /// Reads ranges: which of them are there. Bytes are held to the checksum that came with them, whatever happened on the way.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Unavailable`].
    pub fn get(&self, fetches: &mut [Fetch<'_>]) -> Result<Vec<bool>, Error> {
        let (sums, error) = self.read(fetches, false);
        error.map_or_else(|| Ok(sums.iter().map(Option::is_some).collect()), Err)
    }

    /// Reads whole objects, with their XXH3-64: one that is longer than asked for is a miss, too. What had arrived before an error counts.
    pub fn get_whole(&self, fetches: &mut [Fetch<'_>]) -> (Vec<Option<u64>>, Option<Error>) {
        self.read(fetches, true)
    }

    fn read(&self, fetches: &mut [Fetch<'_>], whole: bool) -> (Vec<Option<u64>>, Option<Error>) {
        let mut sums = vec![None; fetches.len()];
        for (fetches, some) in fetches.chunks_mut(MAX_ITEMS).zip(sums.chunks_mut(MAX_ITEMS)) {
            if let Err(error) = self.read_some(fetches, whole, some) {
                return (sums, Some(error));
            }
        }
        (sums, None)
    }

    fn read_some(&self, fetches: &mut [Fetch<'_>], whole: bool, sums: &mut [Option<u64>]) -> Result<(), Error> {
        let items: Vec<GetItem> = fetches
            .iter()
            .map(|fetch| GetItem { id: fetch.id, start: fetch.start, len: fetch.into.len() as u32 })
            .collect();
        let body = GetRequest::encode(&items);
        self.with(self.config.connect.max(self.config.get), |link| {
            link.ask(Op::Get, &body)?;
            link.answer()?;
            for (fetch, sum) in fetches.iter_mut().zip(sums.iter_mut()) {
                let start = AnswerStart::decode(&link.array()?).map_err(nonsense)?;
                // What an earlier connection brought is written over from here on.
                *sum = None;
                if start.hit {
                    link.read(fetch.into)?;
                }
                let fits = !whole || start.len as usize == fetch.into.len();
                *sum = (start.hit && fits && checksum(fetch.into) == start.checksum).then_some(start.checksum);
                link.allow(self.config.get);
            }
            Ok(())
        })
    }

    /// Writes objects, parents before children: what became of each is final. Those that are there are not sent.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Unavailable`]: of objects not answered for nothing is known; they may be there.
    pub fn put(&self, objects: &[NewObject<'_>]) -> Result<Vec<Outcome>, Error> {
        let mut outcomes = Vec::with_capacity(objects.len());
        let len = |object: &NewObject<'_>| object.pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let mut rest = objects;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |object: &NewObject<'_>| {
                bytes += len(object);
                bytes > PUT_AT_ONCE
            };
            let count = rest.iter().position(fits).unwrap_or(rest.len()).clamp(1, MAX_ITEMS);
            let (group, behind) = rest.split_at(count);
            rest = behind;
            outcomes.extend(self.put_group(group)?);
        }
        Ok(outcomes)
    }

    fn put_group(&self, group: &[NewObject<'_>]) -> Result<Vec<Outcome>, Error> {
        let mut items = Vec::with_capacity(group.len());
        for object in group {
            let len: usize = object.pieces.iter().map(|piece| piece.len()).sum();
            let len = u32::try_from(len).map_err(|_| Error::Invalid(format!("{} is longer than 4 GiB", object.id)))?;
            let sum = object.checksum.unwrap_or_else(|| Sum::of(object.pieces));
            items.push(MetaFields { id: object.id, parent: object.parent, class: object.class, len, checksum: sum });
        }
        let body = encode_start(&items);
        self.with(self.config.connect.max(self.config.get), |link| {
            link.ask(Op::Start, &body)?;
            let started = decode_started(link.answer()?).map_err(nonsense)?;
            if started.len() != group.len() {
                return Err(nonsense("an answer of another length"));
            }
            let mut ids = Vec::new();
            for (object, answer) in group.iter().zip(&started) {
                if let Ok(id) = *answer {
                    link.allow(self.config.request);
                    write(link, id, object.pieces)?;
                    ids.push(id);
                }
            }
            let mut done = Vec::new();
            if !ids.is_empty() {
                link.allow(self.config.request);
                link.ask(Op::Commit, &encode_numbers(&ids))?;
                done = decode_outcomes(link.answer()?).map_err(nonsense)?;
                if done.len() != ids.len() {
                    return Err(nonsense("an answer of another length"));
                }
            }
            let mut done = done.into_iter();
            Ok(started
                .iter()
                .map(|answer| answer.map_or_else(|outcome| outcome, |_| done.next().unwrap_or(Outcome::Failed)))
                .collect())
        })
    }

    /// Whether anybody answers.
    ///
    /// # Errors
    /// [`Error::Unavailable`], or why the server does not let this client in.
    pub fn ping(&self) -> Result<(), Error> {
        self.with(self.config.connect + self.config.check, |link| {
            link.ask(Op::Ping, &[])?;
            link.answer().map(drop)
        })
    }

    /// Runs a command of an operator: JSON in, JSON out.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Unavailable`].
    pub fn admin(&self, command: &str) -> Result<String, Error> {
        self.with(self.config.request, |link| {
            link.ask(Op::Admin, command.as_bytes())?;
            let answer = link.answer()?;
            String::from_utf8(answer.to_vec()).map_err(|_| nonsense("an answer that is no text"))
        })
    }
}

/// Sends an object's pieces, cut where a frame would be too long.
fn write(link: &mut Link, put: u64, pieces: &[&[u8]]) -> Result<(), Lost> {
    let mut offset = 0u32;
    for piece in pieces {
        for part in piece.chunks(MAX_WRITE) {
            let head = WriteHead { put, offset }.encode();
            link.say(Op::Write, &mut [IoSlice::new(&head), IoSlice::new(part)])?;
            offset += part.len() as u32;
        }
    }
    Ok(())
}
