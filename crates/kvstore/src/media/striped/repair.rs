//! What domains owe: finding it at a start and by scrubbing, and making it good.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use tokio::time::timeout;

use super::shard::{HEAD, span};
use super::write::identity;
use super::{Core, Debt, Segment, position_of};
use crate::Error;
use crate::backend::{Backend, Name};
use crate::erasure::{DATA, SHARDS, rebuild};
use crate::media::footer::{ENTRY, TAIL, Tail};
use crate::media::{ALIGN, Place};
use crate::object::Meta;
use crate::record::take;

/// Footers read side by side at a start.
const FOOTERS: usize = 32;

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// Objects of domains made again.
    pub made: usize,
    /// Deletions made up for.
    pub deleted: usize,
    /// Objects that cannot be made: more than two domains have lost them.
    pub hopeless: usize,
    /// What is left to do, for later or for when a domain is back.
    pub left: usize,
}

/// What a scrub of one segment found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Domains whose object is as it should be.
    pub sound: usize,
    /// Whose object is absent or has something wrong in it: queued for repair.
    pub damaged: usize,
    /// That did not answer.
    pub away: usize,
}

type Records = Vec<(Place, Meta)>;

/// Deletes a segment from domains; those that do not answer owe it.
pub async fn delete(core: Arc<Core>, segment: u32, domains: Vec<usize>) {
    let name = [Name::segment(segment)];
    let each = domains.into_iter().map(|domain| {
        let (core, name) = (&core, &name);
        async move { (domain, timeout(core.config.write_timeout, core.domains[domain].delete_many(name)).await) }
    });
    for (domain, done) in join_all(each).await {
        if !matches!(done, Ok(Ok(()))) {
            core.owe(Debt::Delete(segment), domain);
        }
    }
}

/// Reads a domain's footer of an object of `size` bytes. `None`: there is none, or it is not whole.
async fn footer(core: &Core, domain: usize, segment: u32, size: u64) -> Result<Option<Records>, Error> {
    let read = |start: u64, end: u64| async move {
        let name = Name::segment(segment);
        let read = timeout(
            core.config.read_timeout,
            core.domains[domain].get_ranges(&name, std::slice::from_ref(&(start..end))),
        )
        .await;
        match read.unwrap_or_else(|_| {
            Err(Error::Unavailable(format!("{} did not answer in time", core.domains[domain].place())))
        }) {
            Ok(Some(mut parts)) => Ok(parts.pop()),
            // Shorter than it was said to be.
            Ok(None) | Err(Error::Invalid(_)) => Ok(None),
            Err(error) => Err(error),
        }
    };
    let Some(start) = size.checked_sub(TAIL as u64) else { return Ok(None) };
    let Some(bytes) = read(start, size).await? else { return Ok(None) };
    let Some(tail) = own(core, segment, Tail::decode(&take(&bytes, 0), size)?) else { return Ok(None) };
    let Some(entries) = read(start - tail.entries_bytes() as u64, start).await? else { return Ok(None) };
    Ok(tail.records_of(&entries, span))
}

/// A tail of this segment and store.
fn own(core: &Core, segment: u32, tail: Option<Tail>) -> Option<Tail> {
    tail.filter(|tail| tail.segment == segment && tail.media == core.config.media)
}

/// The records of a segment, from any domain.
pub async fn records(core: Arc<Core>, segment: u32) -> Result<Records, Error> {
    let Some(size) = core.state().segments.get(&segment).map(|found| found.size) else {
        return Err(Error::Invalid(format!("there is no segment {segment}")));
    };
    let mut said = String::from("no domain has its footer");
    for domain in 0..SHARDS {
        match footer(&core, domain, segment, size).await {
            Ok(Some(records)) => return Ok(records),
            Ok(None) => {}
            Err(Error::Newer { what, found, known }) => return Err(Error::Newer { what, found, known }),
            Err(error) => said = error.to_string(),
        }
    }
    Err(Error::Unavailable(format!("segment {segment}: {said}")))
}

/// Finds all segments and what domains owe.
pub async fn recover(core: Arc<Core>) -> Result<Records, Error> {
    let lists = join_all(core.domains.iter().map(|domain| timeout(core.config.write_timeout, domain.list("")))).await;
    let mut away = Vec::new();
    let mut said = String::new();
    let mut have: BTreeMap<u32, Vec<(usize, u64)>> = BTreeMap::new();
    for (domain, list) in lists.into_iter().enumerate() {
        match list.unwrap_or_else(|_| {
            Err(Error::Unavailable(format!("{} did not answer in time", core.domains[domain].place())))
        }) {
            Ok(list) => {
                for (segment, size) in list.into_iter().filter_map(|(name, size)| Some((name.number()?, size))) {
                    have.entry(segment).or_default().push((domain, size));
                }
            }
            Err(error) => {
                away.push(domain);
                said = error.to_string();
            }
        }
    }
    if away.len() > SHARDS - DATA {
        return Err(Error::Unavailable(format!("{} of 12 domains do not answer, ten are needed: {said}", away.len())));
    }
    core.next.fetch_max(have.last_key_value().map_or(1, |(last, _)| last + 1), Relaxed);
    let found = stream::iter(have)
        .map(|(segment, domains)| {
            let (core, away) = (&core, &away);
            async move { classify(core, away, segment, domains).await }
        })
        .buffered(FOOTERS)
        .collect::<Vec<_>>()
        .await;
    let mut all = Vec::new();
    for records in found {
        all.extend(records?);
    }
    Ok(all)
}

/// Whether a segment counts; its records if so.
async fn classify(
    core: &Arc<Core>,
    away: &[usize],
    segment: u32,
    domains: Vec<(usize, u64)>,
) -> Result<Records, Error> {
    // Footers decide which object is the segment's: one of another size is left over from a batch that did not count, or cut off.
    let mut sound: Vec<usize> = Vec::new();
    let mut records: Option<(u64, Records)> = None;
    for (domain, size) in &domains {
        if let Some((known, _)) = &records {
            if known == size {
                sound.push(*domain);
            }
            continue;
        }
        match footer(core, *domain, segment, *size).await {
            Ok(Some(found)) => {
                // Another domain's object of this number may be the right one.
                let alike = domains.iter().filter(|(_, other)| other == size).count();
                if alike + away.len() >= DATA {
                    records = Some((*size, found));
                    sound.push(*domain);
                }
            }
            Ok(None) => {}
            Err(Error::Newer { what, found, known }) => return Err(Error::Newer { what, found, known }),
            Err(_) => sound.push(*domain),
        }
    }
    let Some((size, records)) = records else {
        // What fewer than ten domains have never counted. While one is away, it may have what the others lack.
        if away.is_empty() {
            delete(core.clone(), segment, domains.iter().map(|(domain, _)| *domain).collect()).await;
        }
        return Ok(Records::new());
    };
    core.state().segments.insert(segment, Segment { size, ..Segment::default() });
    // Of one that is away nothing is known.
    for domain in (0..SHARDS).filter(|domain| !sound.contains(domain) && !away.contains(domain)) {
        core.owe(Debt::Repair(segment), domain);
    }
    Ok(records)
}

/// Pays debts.
pub async fn step(core: Arc<Core>, limit: usize) -> Result<Repaired, Error> {
    let debts: Vec<(Debt, usize)> = core.state().debts.iter().copied().collect();
    let mut done = Repaired::default();
    let mut away: BTreeSet<usize> = BTreeSet::new();
    let mut tried = 0;
    for (debt, domain) in debts {
        // One that has just not answered would hold up the rest.
        if away.contains(&domain) {
            continue;
        }
        if tried == limit {
            break;
        }
        tried += 1;
        let paid = match debt {
            Debt::Delete(segment) => {
                let deleted =
                    timeout(core.config.write_timeout, core.domains[domain].delete_many(&[Name::segment(segment)]))
                        .await;
                let deleted = matches!(deleted, Ok(Ok(())));
                done.deleted += usize::from(deleted);
                deleted
            }
            Debt::Repair(segment) => match make(&core, domain, segment).await {
                Ok(made) => {
                    done.made += usize::from(made);
                    true
                }
                Err(Error::Newer { what, found, known }) => return Err(Error::Newer { what, found, known }),
                Err(Error::Damaged(..)) => {
                    done.hopeless += 1;
                    true
                }
                Err(_) => false,
            },
        };
        if paid {
            core.state().debts.remove(&(debt, domain));
        } else {
            away.insert(domain);
        }
    }
    done.left = core.state().debts.len();
    Ok(done)
}

/// Makes a domain's object of a segment again. `false`: the segment is no more.
async fn make(core: &Arc<Core>, domain: usize, segment: u32) -> Result<bool, Error> {
    if !core.enter(segment) {
        return Ok(false);
    }
    let made = make_entered(core, domain, segment).await;
    core.leave(segment);
    made.map(|()| true)
}

async fn make_entered(core: &Arc<Core>, domain: usize, segment: u32) -> Result<(), Error> {
    let size = core.state().segments.get(&segment).map_or(0, |found| found.size);
    let copies = whole(core, segment, size).await;
    let Some((records, footer)) = reading(core, segment, &copies)? else {
        return Err(Error::Unavailable(format!("no domain gives the footer of segment {segment}")));
    };
    let mut object = vec![0; size as usize - footer.len()];
    object.extend_from_slice(&footer);
    for (place, meta) in &records {
        let (start, end) = bounds(*place, meta);
        let mut shards: [Option<&[u8]>; SHARDS] = [None; SHARDS];
        for (other, copy) in copies.iter().enumerate().filter(|(other, _)| *other != domain) {
            if let Copy::Here(bytes) = copy
                && identity(meta, other, segment, core.config.media).holds(&bytes[start..end])?
            {
                shards[position_of(meta.id.key, other)] = Some(&bytes[start + HEAD..end]);
            }
        }
        let (head, shard) = object[start..end].split_at_mut(HEAD);
        rebuild(&shards, &mut [(position_of(meta.id.key, domain), &mut *shard)]).map_err(|error| {
            let away = copies.iter().any(|copy| matches!(copy, Copy::Away));
            if away { Error::Unavailable(error.to_string()) } else { Error::Damaged(meta.id, error.to_string()) }
        })?;
        head.copy_from_slice(&identity(meta, domain, segment, core.config.media).encode(shard));
    }
    let name = Name::segment(segment);
    let put = core.domains[domain].put_segment(&name, vec![object.into()]);
    timeout(core.config.write_timeout, put)
        .await
        .unwrap_or_else(|_| Err(Error::Unavailable("a repair took too long".into())))
}

/// Compares every shard of a segment with its checksum.
pub async fn scrub(core: Arc<Core>, segment: u32) -> Result<Scrubbed, Error> {
    if !core.enter(segment) {
        return Err(Error::Invalid(format!("there is no segment {segment}")));
    }
    let found = scrub_entered(&core, segment).await;
    core.leave(segment);
    found
}

async fn scrub_entered(core: &Arc<Core>, segment: u32) -> Result<Scrubbed, Error> {
    let size = core.state().segments.get(&segment).map_or(0, |found| found.size);
    let copies = whole(core, segment, size).await;
    let known = reading(core, segment, &copies)?;
    let mut scrubbed = Scrubbed::default();
    for (domain, copy) in copies.iter().enumerate() {
        let sound = match (copy, &known) {
            (Copy::Away, _) => {
                scrubbed.away += 1;
                continue;
            }
            (Copy::Here(bytes), Some((records, footer))) => {
                let mut sound = bytes.ends_with(footer);
                for (place, meta) in records {
                    let (start, end) = bounds(*place, meta);
                    sound = sound && identity(meta, domain, segment, core.config.media).holds(&bytes[start..end])?;
                }
                sound
            }
            _ => false,
        };
        if sound {
            scrubbed.sound += 1;
        } else {
            scrubbed.damaged += 1;
            core.counters.damaged.fetch_add(1, Relaxed);
            core.owe(Debt::Repair(segment), domain);
        }
    }
    Ok(scrubbed)
}

/// A domain's object of a segment.
enum Copy {
    /// All its bytes, right or wrong.
    Here(Bytes),
    /// There is none, or one of another size.
    Absent,
    /// The domain does not answer.
    Away,
}

async fn whole(core: &Core, segment: u32, size: u64) -> Vec<Copy> {
    let name = Name::segment(segment);
    let name = &name;
    let read = |backend: Arc<dyn Backend>| async move {
        match timeout(core.config.write_timeout, backend.get_ranges(name, std::slice::from_ref(&(0..size)))).await {
            Ok(Ok(Some(mut parts))) => parts.pop().map_or(Copy::Absent, Copy::Here),
            Ok(Ok(None) | Err(Error::Invalid(_))) => Copy::Absent,
            Ok(Err(_)) | Err(_) => Copy::Away,
        }
    };
    join_all(core.domains.iter().cloned().map(read)).await
}

/// The records and the footer, from the first copy whose footer is whole.
fn reading(core: &Core, segment: u32, copies: &[Copy]) -> Result<Option<(Records, Bytes)>, Error> {
    for copy in copies {
        let Copy::Here(bytes) = copy else { continue };
        let Some(tail_at) = bytes.len().checked_sub(TAIL) else { continue };
        let Some(tail) = own(core, segment, Tail::decode(&take(bytes, tail_at), bytes.len() as u64)?) else { continue };
        let start = tail_at - tail.count as usize * ENTRY;
        if let Some(records) = tail.records_of(&bytes[start..tail_at], span) {
            return Ok(Some((records, bytes.slice(start..))));
        }
    }
    Ok(None)
}

fn bounds(place: Place, meta: &Meta) -> (usize, usize) {
    let start = u64::from(place.offset) * ALIGN;
    (start as usize, (start + span(meta.len)) as usize)
}
