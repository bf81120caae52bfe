//! Reads: enough shards of each object, from whichever domains answer first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout, timeout_at};

use super::shard::{HEAD, span};
use super::write::identity;
use super::{Core, Debt, domain_of};
use crate::Error;
use crate::backend::Name;
use crate::checksum::checksum;
use crate::erasure::{DATA, P, PARITY, SHARDS, Stripe, rebuild};
use crate::media::{ALIGN, Place, Read};
use crate::object::Meta;

/// A shard that is all padding; only objects of less than 6,400 bytes have any.
static ZEROS: [u8; DATA * Stripe::UNIT] = [0; DATA * Stripe::UNIT];

/// What is to be gathered for one read.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    place: Place,
    meta: Meta,
    start: usize,
    end: usize,
}

impl Wanted {
    pub fn of(read: &Read<'_>) -> Self {
        let start = read.start as usize;
        Self { place: read.place, meta: read.meta, start, end: start + read.into.len() }
    }

    fn stripe(&self) -> Stripe {
        Stripe::of(self.meta.len as usize)
    }

    /// Positions of the data that it needs.
    fn needed(&self) -> Range<usize> {
        self.stripe().covering(&(self.start..self.end))
    }

    /// Bytes of the object of a domain.
    fn range(&self) -> Range<u64> {
        let start = u64::from(self.place.offset) * ALIGN;
        start..start + span(self.meta.len)
    }
}

/// Shards of one object, each with its checksum; enough for what is wanted.
#[derive(Debug)]
pub struct Found {
    wanted: Wanted,
    /// Without headers.
    shards: [Option<Bytes>; SHARDS],
}

impl Found {
    /// Copies what is wanted out of the shards; whether some of it had to be computed.
    pub fn fill(self, read: &mut Read<'_>) -> Result<bool, Error> {
        let stripe = self.wanted.stripe();
        let missing: Vec<usize> = self.wanted.needed().filter(|at| self.shards[*at].is_none()).collect();
        let mut made: Vec<(usize, Vec<u8>)> = missing.iter().map(|at| (*at, vec![0; stripe.shard()])).collect();
        if !made.is_empty() {
            let there = self.shards.each_ref().map(|shard| shard.as_deref());
            let mut wanted: Vec<_> = made.iter_mut().map(|(at, bytes)| (*at, bytes.as_mut_slice())).collect();
            rebuild(&there, &mut wanted).map_err(|error| Error::Damaged(self.wanted.meta.id, error.to_string()))?;
        }
        for at in self.wanted.needed() {
            let bytes: &[u8] = match &self.shards[at] {
                Some(shard) => shard,
                None => made.iter().find(|(made, _)| *made == at).map_or(&[], |(_, bytes)| bytes),
            };
            let held = stripe.range(at);
            let (from, to) = (held.start.max(self.wanted.start), held.end.min(self.wanted.end));
            read.into[from - self.wanted.start..to - self.wanted.start]
                .copy_from_slice(&bytes[from - held.start..to - held.start]);
        }
        if read.into.len() == self.wanted.meta.len as usize && checksum(read.into) != self.wanted.meta.checksum {
            return Err(Error::Damaged(
                self.wanted.meta.id,
                "its shards are whole, their bytes are not what was stored".into(),
            ));
        }
        Ok(!made.is_empty())
    }
}

/// One read in progress.
struct Gather {
    found: Found,
    asked: [bool; SHARDS],
    /// Shards that are wrong or not there.
    lost: usize,
    /// Domains that did not answer.
    away: usize,
    said: String,
    result: Option<Result<(), Error>>,
}

impl Gather {
    fn new(wanted: Wanted) -> Self {
        let result = match wanted {
            _ if wanted.end > wanted.meta.len as usize => Some(Err(Error::Invalid(format!(
                "bytes {} to {} of {}, which has {}",
                wanted.start, wanted.end, wanted.meta.id, wanted.meta.len
            )))),
            // Nothing is wanted.
            _ if wanted.needed().is_empty() => Some(Ok(())),
            _ => None,
        };
        let mut gather = Self {
            found: Found { wanted, shards: Default::default() },
            asked: [false; SHARDS],
            lost: 0,
            away: 0,
            said: String::new(),
            result,
        };
        // Shards of a short object that are all padding are known.
        let stripe = wanted.stripe();
        for at in (0..DATA).filter(|at| stripe.range(*at).is_empty() && stripe.shard() <= ZEROS.len()) {
            gather.found.shards[at] = Some(Bytes::from_static(&ZEROS[..stripe.shard()]));
            gather.asked[at] = true;
        }
        gather
    }

    /// Positions asked at first: the data that are needed, and P where that is all of them: of these eleven, ten answers suffice.
    fn first(&self) -> Vec<usize> {
        let needed = self.found.wanted.needed();
        let all = needed == self.found.wanted.stripe().covering(&(0..self.found.wanted.meta.len as usize));
        needed.chain(all.then_some(P)).collect()
    }

    /// Positions not asked yet.
    fn rest(&self) -> Vec<usize> {
        (0..SHARDS).filter(|position| !self.asked[*position]).collect()
    }

    /// The domain that has a position.
    fn domain(&self, position: usize) -> usize {
        domain_of(self.found.wanted.meta.id.key, position)
    }

    /// Takes in an answer, and decides where it can.
    fn answered(&mut self, position: usize, shard: Option<Bytes>) {
        match shard {
            Some(shard) => self.found.shards[position] = Some(shard),
            None => self.lost += 1,
        }
        self.decide();
    }

    /// Takes in that a domain does not answer.
    fn away(&mut self, said: String) {
        self.away += 1;
        self.said = said;
        self.decide();
    }

    fn decide(&mut self) {
        if self.result.is_some() {
            return;
        }
        let mut needed = self.found.wanted.needed();
        let good = self.found.shards.iter().flatten().count();
        let id = self.found.wanted.meta.id;
        if good >= DATA || needed.all(|at| self.found.shards[at].is_some()) {
            self.result = Some(Ok(()));
        } else if self.lost > PARITY {
            self.result = Some(Err(Error::Damaged(id, format!("{} of its 12 shards are lost", self.lost))));
        } else if self.lost + self.away > PARITY {
            let said = format!(
                "{id}: {} of its 12 shards are lost and {} domains do not answer: {}",
                self.lost, self.away, self.said
            );
            self.result = Some(Err(Error::Unavailable(said)));
        }
    }

    fn open(&self) -> bool {
        self.result.is_none()
    }
}

/// Which reads an answer is for, by index and position.
type Items = Vec<(usize, usize)>;
type Answer = (u32, usize, Items, Result<Option<Vec<Bytes>>, Error>);

/// Gathers shards for all reads. Requests of reads in one segment and domain go together.
pub async fn gather(core: Arc<Core>, wanted: Vec<Wanted>) -> Vec<Result<Found, Error>> {
    let mut segments: Vec<u32> = wanted.iter().map(|wanted| wanted.place.segment).collect();
    segments.sort_unstable();
    segments.dedup();
    segments.retain(|segment| core.enter(*segment));
    let mut gathers: Vec<Gather> = wanted.into_iter().map(Gather::new).collect();
    for gather in gathers.iter_mut().filter(|gather| gather.open()) {
        let segment = gather.found.wanted.place.segment;
        if segments.binary_search(&segment).is_err() {
            let id = gather.found.wanted.meta.id;
            gather.result = Some(Err(Error::Unavailable(format!("{id}: there is no segment {segment}"))));
        }
    }
    run(&core, &mut gathers).await;
    for segment in segments {
        core.leave(segment);
    }
    let done = |gather: Gather| {
        gather.result.unwrap_or_else(|| Err(Error::Unavailable("a read without an end".into()))).map(|()| gather.found)
    };
    gathers.into_iter().map(done).collect()
}

/// Requests under way.
#[derive(Default)]
struct Running {
    requests: FuturesUnordered<BoxFuture<'static, Answer>>,
    /// How many of them each domain has.
    waiting: [usize; SHARDS],
}

async fn run(core: &Arc<Core>, gathers: &mut [Gather]) {
    let mut running = Running::default();
    let open: Vec<usize> = (0..gathers.len()).filter(|at| gathers[*at].open()).collect();
    // Where one of the first was late a moment ago, all are asked at once.
    let wait = |gather: &Gather, position: &usize| core.quiet.is(gather.domain(*position));
    let (doubtful, sure): (Vec<usize>, Vec<usize>) =
        open.iter().partition(|at| gathers[**at].first().iter().any(|position| wait(&gathers[**at], position)));
    let first = sure.into_iter().map(|at| (at, gathers[at].first())).collect();
    ask(core, gathers, first, &mut running);
    widen(core, gathers, &doubtful, &mut running);
    let mut hedge = Some(Instant::now() + core.config.hedge);
    while gathers.iter().any(Gather::open) {
        let answer = match hedge {
            None => running.requests.next().await,
            Some(at) => {
                let Ok(answer) = timeout_at(at, running.requests.next()).await else {
                    hedge = None;
                    (0..SHARDS)
                        .filter(|domain| running.waiting[*domain] > 0)
                        .for_each(|domain| core.quiet.missed(domain));
                    let slow: Vec<usize> = (0..gathers.len()).filter(|at| gathers[*at].open()).collect();
                    widen(core, gathers, &slow, &mut running);
                    continue;
                };
                answer
            }
        };
        let Some((segment, domain, items, answer)) = answer else { break };
        running.waiting[domain] -= 1;
        if matches!(answer, Ok(_) | Err(Error::Invalid(_))) {
            core.quiet.answered(domain);
        } else {
            core.quiet.missed(domain);
        }
        let mut short = Vec::new();
        match answer {
            Ok(Some(parts)) => {
                for ((at, position), part) in items.into_iter().zip(parts) {
                    let shard = held(core, &gathers[at].found.wanted.meta, domain, segment, &part);
                    if shard.is_none() {
                        lost(core, segment, domain);
                        short.push(at);
                    }
                    gathers[at].answered(position, shard);
                }
            }
            Ok(None) if core.pending(segment, domain) => {
                for (at, _) in items {
                    gathers[at].away(format!("{} has not got it yet", core.domains[domain].place()));
                    short.push(at);
                }
            }
            // No such object, or one that is cut off.
            Ok(None) | Err(Error::Invalid(_)) => {
                lost(core, segment, domain);
                for (at, position) in items {
                    gathers[at].answered(position, None);
                    short.push(at);
                }
            }
            Err(error) => {
                for (at, _) in items {
                    gathers[at].away(error.to_string());
                    short.push(at);
                }
            }
        }
        short.retain(|at| gathers[*at].open());
        widen(core, gathers, &short, &mut running);
    }
}

/// The shard behind its header, if both are what they should be. One of a version to come is none that this version can use.
fn held(core: &Core, meta: &Meta, domain: usize, segment: u32, part: &Bytes) -> Option<Bytes> {
    let holds = identity(meta, domain, segment, core.config.media).holds(part).unwrap_or(false);
    holds.then(|| part.slice(HEAD..))
}

fn lost(core: &Core, segment: u32, domain: usize) {
    core.counters.damaged.fetch_add(1, Relaxed);
    core.owe(Debt::Repair(segment), domain);
}

/// Asks all domains that these reads have not asked yet.
fn widen(core: &Arc<Core>, gathers: &mut [Gather], reads: &[usize], running: &mut Running) {
    let mut more = Vec::new();
    for at in reads {
        let rest = gathers[*at].rest();
        if !rest.is_empty() {
            core.counters.hedged.fetch_add(1, Relaxed);
            more.push((*at, rest));
        }
    }
    ask(core, gathers, more, running);
}

/// Sends requests, one for each segment and domain.
fn ask(core: &Arc<Core>, gathers: &mut [Gather], reads: Vec<(usize, Vec<usize>)>, running: &mut Running) {
    let mut requests: BTreeMap<(u32, usize), Items> = BTreeMap::new();
    for (at, positions) in reads {
        for position in positions {
            gathers[at].asked[position] = true;
            let wanted = &gathers[at].found.wanted;
            requests
                .entry((wanted.place.segment, domain_of(wanted.meta.id.key, position)))
                .or_default()
                .push((at, position));
        }
    }
    for ((segment, domain), items) in requests {
        let core = core.clone();
        let ranges: Vec<Range<u64>> = items.iter().map(|(at, _)| gathers[*at].found.wanted.range()).collect();
        running.waiting[domain] += 1;
        running.requests.push(Box::pin(async move {
            let backend = &core.domains[domain];
            let name = Name::segment(segment);
            let answer = timeout(core.config.read_timeout, backend.get_ranges(&name, &ranges)).await;
            let late = || Err(Error::Unavailable(format!("{} did not answer in time", backend.place())));
            (segment, domain, items, answer.unwrap_or_else(|_| late()))
        }));
    }
}
