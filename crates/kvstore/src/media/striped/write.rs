//! A batch on its way to the domains.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::shard::{HEAD, Identity, span};
use super::{Core, Debt, Segment, domain_of, position_of, repair};
use crate::Error;
use crate::backend::{Name, Put};
use crate::erasure::{DATA, P, SHARDS, Stripe, parity};
use crate::media::footer::{self, TAIL};
use crate::media::{ALIGN, Place, Record};
use crate::object::Meta;

/// The objects of a batch, one for each domain.
pub struct Encoded {
    /// Where the objects of the batch lie, in its order.
    pub places: Vec<Place>,
    objects: Vec<Bytes>,
}

/// Cuts a batch into shards.
pub fn encode(batch: &[Record<'_>], segment: u32, media: u64) -> Result<Encoded, Error> {
    let mut records = Vec::with_capacity(batch.len());
    let mut end = 0;
    for record in batch {
        let given: usize = record.pieces.iter().map(|piece| piece.len()).sum();
        if given != record.meta.len as usize {
            return Err(Error::Invalid(format!(
                "{} has {} bytes, its pieces {given}",
                record.meta.id, record.meta.len
            )));
        }
        let offset = u32::try_from(end / ALIGN).map_err(|_| Error::Invalid("a batch of more than 2.5 TiB".into()))?;
        records.push((Place { segment, offset }, record.meta));
        end += span(record.meta.len);
    }
    let footer = footer::encode(segment, media, end, &records);
    let size = end as usize + footer.len();
    let mut objects: [Vec<u8>; SHARDS] = std::array::from_fn(|_| Vec::with_capacity(size));
    for object in &mut objects {
        object.resize(end as usize, 0);
        object.extend_from_slice(&footer);
    }
    for (record, (place, meta)) in batch.iter().zip(&records) {
        let start = (u64::from(place.offset) * ALIGN) as usize;
        let shard = Stripe::of(meta.len as usize).shard();
        // The record's part of each domain, then in the order of positions.
        let mut parts = objects.each_mut().map(|object| &mut object[start..start + HEAD + shard]);
        parts.rotate_left(domain_of(meta.id.key, 0));
        let mut split = parts.map(|part| part.split_at_mut(HEAD));
        scatter(record.pieces, &mut split);
        let (data, both) = split.split_at_mut(DATA);
        let [(_, p), (_, q)] = both else { unreachable!("two of the twelve are left") };
        parity(&std::array::from_fn(|at| &*data[at].1), p, q);
        debug_assert_eq!(P, DATA);
        for (position, (head, shard)) in split.iter_mut().enumerate() {
            head.copy_from_slice(&Identity { meta, position, segment, media }.encode(shard));
        }
    }
    let places = records.iter().map(|(place, _)| *place).collect();
    Ok(Encoded { places, objects: objects.map(Bytes::from).to_vec() })
}

/// Copies the bytes of an object over its data shards.
fn scatter(pieces: &[&[u8]], split: &mut [(&mut [u8], &mut [u8]); SHARDS]) {
    let (mut position, mut at) = (0, 0);
    for piece in pieces {
        let mut left = *piece;
        while !left.is_empty() {
            let shard = &mut split[position].1;
            let (now, later) = left.split_at(left.len().min(shard.len() - at));
            shard[at..at + now.len()].copy_from_slice(now);
            (left, at) = (later, at + now.len());
            if at == shard.len() {
                (position, at) = (position + 1, 0);
            }
        }
    }
}

/// The shard of a domain in a part of its object that begins with the header, by the inverse of the rotation.
pub fn identity(meta: &Meta, domain: usize, segment: u32, media: u64) -> Identity<'_> {
    Identity { meta, position: position_of(meta.id.key, domain), segment, media }
}

/// Sends the objects and returns when enough domains hold theirs. The others go on behind.
pub async fn store(core: Arc<Core>, segment: u32, encoded: Encoded) -> Result<(), Error> {
    let size = encoded.objects[0].len() as u64;
    let mut running: FuturesUnordered<_> = encoded
        .objects
        .into_iter()
        .enumerate()
        .map(|(domain, object)| {
            let core = core.clone();
            // Tasks of their own: they do not end with this call.
            tokio::spawn(async move { put(&core, domain, segment, object).await })
        })
        .collect();
    let (mut stored, mut failed, mut pending) = (0, Vec::new(), (1u16 << SHARDS) - 1);
    // Domains whose object of that name is another's: it stays.
    let mut taken = Vec::new();
    while stored < core.config.min_domains && failed.len() <= SHARDS - core.config.min_domains {
        let Some(Ok((domain, done))) = running.next().await else { break };
        pending &= !(1 << domain);
        match done {
            Ok(()) => stored += 1,
            Err(Refusal { error, other }) => {
                taken.extend(other.then_some(domain));
                failed.push((domain, error));
            }
        }
    }
    if stored < core.config.min_domains {
        let full = failed.iter().all(|(_, error)| matches!(error, Error::Full(_)));
        let said: Vec<String> = failed.iter().map(|(_, error)| error.to_string()).collect();
        let said =
            format!("{stored} of 12 domains took a batch, {} must: {}", core.config.min_domains, said.join("; "));
        tokio::spawn(async move {
            // What has arrived goes again, after the last that may still arrive.
            while let Some(done) = running.next().await {
                if let Ok((domain, Err(Refusal { other: true, .. }))) = done {
                    taken.push(domain);
                }
            }
            repair::delete(core, segment, (0..SHARDS).filter(|domain| !taken.contains(domain)).collect()).await;
        });
        return Err(if full { Error::Full(said) } else { Error::Unavailable(said) });
    }
    core.state().segments.insert(segment, Segment { size, pending, ..Segment::default() });
    for (domain, _) in failed {
        arrived(&core, segment, domain, false);
    }
    tokio::spawn(async move {
        while let Some(done) = running.next().await {
            if let Ok((domain, done)) = done {
                arrived(&core, segment, domain, done.is_ok());
            }
        }
    });
    Ok(())
}

/// Notes that a domain has its object of a batch that counts, or has not got it.
fn arrived(core: &Core, segment: u32, domain: usize, stored: bool) {
    let mut state = core.state();
    let found = state.segments.get_mut(&segment).filter(|found| !found.gone);
    let counts = found.is_some();
    if let Some(found) = found {
        found.pending &= !(1 << domain);
    }
    if !stored {
        core.counters.short.fetch_add(1, Relaxed);
    }
    match (counts, stored) {
        (true, false) => drop(state.debts.insert((Debt::Repair(segment), domain))),
        // Deleted while it was on its way: what arrived has to go too.
        (false, true) => drop(state.debts.insert((Debt::Delete(segment), domain))),
        _ => {}
    }
}

/// Why a domain has not got an object.
struct Refusal {
    error: Error,
    /// It has another one of that name.
    other: bool,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, other: false }
    }
}

/// Puts one domain's object.
async fn put(core: &Core, domain: usize, segment: u32, object: Bytes) -> (usize, Result<(), Refusal>) {
    let backend = &core.domains[domain];
    let name = Name::segment(segment);
    let tail = object.slice(object.len() - TAIL..);
    let end = object.len() as u64;
    let work = async {
        if backend.put_object(&name, vec![object]).await? == Put::Created {
            return Ok(());
        }
        // A lost answer makes the own object look like another's.
        match backend.get_ranges(&name, std::slice::from_ref(&(end - TAIL as u64..end))).await {
            Ok(Some(found)) if found[0] == tail => Ok(()),
            Ok(_) | Err(Error::Invalid(_)) => Err(Refusal {
                error: Error::Unavailable(format!("{} has another object {name}", backend.place())),
                other: true,
            }),
            Err(error) => Err(Refusal { error, other: true }),
        }
    };
    let late = || Refusal::from(Error::Unavailable(format!("{} did not answer in time", backend.place())));
    (domain, tokio::time::timeout(core.config.write_timeout, work).await.unwrap_or_else(|_| Err(late())))
}
