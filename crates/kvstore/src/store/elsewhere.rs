//! What other stores over the same back end hold: chains that lead through it, and its bytes.
//!
//! Each store writes, evicts and collects what is its own; of the others it knows hints, which may be stale: whatever fails is a miss. A chain may
//! change between stores at any block. A block whose parent another store holds begins a chain of its own here.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use super::get::{Found, Got, Want, meta_of};
use super::put::may_see;
use super::stats::add;
use super::{Kept, Store};
use crate::directory::{Hint, Owner};
use crate::error::Error;
use crate::index::Entry;
use crate::key::{Key, Kind, ObjectId};
use crate::media::{Read, Record};
use crate::object::{Meta, TenantId};

/// Blocks of a chain that are asked for at first; each further round asks for four times as many.
const FIRST_ROUND: usize = 64;

/// Blocks of a round at most.
const MAX_ROUND: usize = 4096;

/// Blocks from the end of what was found among which slices are looked for elsewhere.
const SLICES_AMONG: usize = 1024;

/// Whoever knows what other stores hold. Calls wait briefly or not at all; what is not known in time is not there.
pub trait Elsewhere: Send + Sync {
    /// Where objects are said to be, in the order asked.
    fn find(&self, ids: &[ObjectId]) -> Vec<Option<Hint>>;

    /// What a hint said was not so.
    fn stale(&self, hints: &[Hint]);

    /// Something changed here that others should hear of.
    fn wake(&self);

    /// Counters and sizes by name.
    fn counts(&self) -> Vec<(&'static str, u64)>;
}

/// What others are told of an object, and for how many seconds it holds.
pub type Told = (Hint, u32);

fn block(key: Key) -> ObjectId {
    ObjectId { kind: Kind::Block, key }
}

impl Store {
    /// Who is asked for what is not here, from now on; the first one counts.
    pub fn share(&self, elsewhere: Arc<dyn Elsewhere>) {
        self.kept_mut().live.remember_changes();
        // A second one is a mistake of the caller that changes nothing.
        let _ = self.elsewhere.set(elsewhere);
    }

    pub(super) fn elsewhere(&self) -> Option<&dyn Elsewhere> {
        self.elsewhere.get().map(|elsewhere| &**elsewhere)
    }

    /// What is counted of other stores, if they tell.
    pub fn elsewhere_counts(&self) -> Option<Vec<(&'static str, u64)>> {
        self.elsewhere().map(Elsewhere::counts)
    }

    /// The id of this store, which its records carry.
    pub fn media(&self) -> u64 {
        self.root.media()
    }

    /// A tenant as other stores know it; none: it has no name here.
    fn owner(&self, tenant: TenantId) -> Option<Owner> {
        if tenant == TenantId(0) {
            return Some(Owner::PUBLIC);
        }
        let known = self.owners.read().unwrap_or_else(PoisonError::into_inner).get(&tenant).copied();
        known.or_else(|| {
            let named = self.catalogue.tenants().ok()?;
            let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
            owners.extend(named.into_iter().map(|(name, tenant)| (tenant.id, Owner::named(&name))));
            owners.get(&tenant).copied()
        })
    }

    /// Hints of what this tenant may see and another store holds.
    fn find_elsewhere(&self, elsewhere: &dyn Elsewhere, tenant: TenantId, ids: &[ObjectId]) -> Vec<Option<Hint>> {
        let owner = self.owner(tenant);
        let own = self.media();
        let fits = |hint: &Hint| {
            // What is said to be here is not: this store knows better.
            hint.media != own && (hint.owner == Owner::PUBLIC || Some(hint.owner) == owner)
        };
        elsewhere.find(ids).into_iter().map(|hint| hint.filter(fits)).collect()
    }

    /// [`Store::check`] through all stores. Presence is no prefix in any of them, so every key is looked at.
    pub(super) fn check_everywhere(
        &self,
        elsewhere: &dyn Elsewhere,
        tenant: TenantId,
        chain: &[Key],
        slices: usize,
        now: u32,
    ) -> Found {
        let (mut blocks, mut round) = (0, FIRST_ROUND);
        while blocks < chain.len() {
            let window = &chain[blocks..chain.len().min(blocks + round)];
            let mut there: Vec<bool> = {
                let kept = self.kept();
                window.iter().map(|&key| Self::links(&kept, tenant, key, now)).collect()
            };
            let missing: Vec<usize> = (0..window.len()).filter(|&at| !there[at]).collect();
            let ids: Vec<ObjectId> = missing.iter().map(|&at| block(window[at])).collect();
            if !ids.is_empty() {
                let hints = self.find_elsewhere(elsewhere, tenant, &ids);
                missing.into_iter().zip(hints).for_each(|(at, hint)| there[at] = hint.is_some());
            }
            let found = there.iter().take_while(|&&one| one).count();
            blocks += found;
            if found < window.len() {
                break;
            }
            round = (4 * round).min(MAX_ROUND);
        }
        let slices = self.slices_everywhere(elsewhere, tenant, &chain[..blocks], slices, now);
        Found { blocks, slices }
    }

    /// Whether a chain leads through a block here. A lost one is a link, as it is without other stores.
    fn links(kept: &Kept, tenant: TenantId, key: Key, now: u32) -> bool {
        let index = kept.retention.index();
        let entry = index.find(block(key)).and_then(|slot| index.entry(slot));
        entry.is_some_and(|entry| may_see(tenant, entry.tenant) && !kept.retention.is_over(&entry, now))
    }

    fn slices_everywhere(
        &self,
        elsewhere: &dyn Elsewhere,
        tenant: TenantId,
        chain: &[Key],
        want: usize,
        now: u32,
    ) -> Vec<usize> {
        let first = chain.len().saturating_sub(SLICES_AMONG);
        if want == 0 || chain.is_empty() {
            return Vec::new();
        }
        let slice = |at: usize| ObjectId { kind: Kind::Slice, key: chain[at] };
        let (mut positions, mut missing) = (Vec::new(), Vec::new());
        {
            let kept = self.kept();
            for at in (0..chain.len()).rev() {
                if Self::readable(&kept, tenant, slice(at), now).is_some() {
                    positions.push(at);
                } else if at >= first {
                    missing.push(at);
                }
                if positions.len() == want {
                    break;
                }
            }
        }
        if !missing.is_empty() {
            let ids: Vec<ObjectId> = missing.iter().map(|&at| slice(at)).collect();
            let hints = self.find_elsewhere(elsewhere, tenant, &ids);
            positions.extend(missing.into_iter().zip(hints).filter_map(|(at, hint)| hint.map(|_| at)));
        }
        positions.sort_unstable_by(|one, other| other.cmp(one));
        positions.truncate(want);
        positions
    }

    /// Reads from other stores what was a miss here.
    pub(super) fn get_elsewhere(
        &self,
        elsewhere: &dyn Elsewhere,
        tenant: TenantId,
        wants: &mut [Want<'_>],
        answers: &mut [Got],
    ) {
        let missed: Vec<usize> = (0..wants.len()).filter(|&at| matches!(answers[at], Got::Miss)).collect();
        if missed.is_empty() {
            return;
        }
        let ids: Vec<ObjectId> = missed.iter().map(|&at| wants[at].id).collect();
        let hints = self.find_elsewhere(elsewhere, tenant, &ids);
        let found: Vec<(usize, Hint)> =
            missed.into_iter().zip(hints).filter_map(|(at, hint)| hint.map(|hint| (at, hint))).collect();
        let media: HashSet<u64> = found.iter().map(|(_, hint)| hint.media).collect();
        let mut stale = Vec::new();
        for media in media {
            let of_one: Vec<(usize, Hint)> = found.iter().filter(|(_, hint)| hint.media == media).copied().collect();
            let mut next = of_one.iter().peekable();
            let mut reads = Vec::with_capacity(of_one.len());
            for (at, want) in wants.iter_mut().enumerate() {
                if let Some((_, hint)) = next.next_if(|(index, _)| *index == at) {
                    reads.push(Read { place: hint.place, meta: hint.meta, start: want.start, into: want.into });
                }
            }
            let results = self.media.read_of(media, &mut reads);
            for ((at, hint), result) in of_one.into_iter().zip(results) {
                match result {
                    Ok(()) => {
                        answers[at] = Got::Hit { len: hint.meta.len, checksum: hint.meta.checksum };
                        self.counters.hit_elsewhere(hint.meta.class, wants[at].into.len() as u64);
                    }
                    Err(Error::Invalid(text)) => answers[at] = Got::Refused(Error::Invalid(text)),
                    // Moved, deleted, or damaged where it lies: its own store finds out.
                    Err(Error::Damaged(..)) => stale.push(hint),
                    Err(error) => {
                        add(&self.counters.read_errors, 1);
                        self.trouble.note(error);
                    }
                }
            }
        }
        if !stale.is_empty() {
            add(&self.counters.elsewhere_stale, stale.len() as u64);
            elsewhere.stale(&stale);
        }
    }

    /// Objects to be written, where blocks among them have a parent that another store holds: those begin a chain here.
    pub(super) fn adopted_metas(&self, metas: &[Meta]) -> Option<Vec<Meta>> {
        let elsewhere = self.elsewhere()?;
        let mut coming: HashSet<Key> = self.pending().keys().collect();
        coming.extend(metas.iter().filter(|meta| meta.id.kind == Kind::Block).map(|meta| meta.id.key));
        let orphans: Vec<(usize, Key)> = {
            let kept = self.kept();
            let here = |key| kept.retention.index().find(block(key)).is_some() || coming.contains(&key);
            let blocks = metas.iter().enumerate().filter(|(_, meta)| meta.id.kind == Kind::Block);
            blocks.filter_map(|(at, meta)| Some((at, meta.parent.filter(|&key| !here(key))?))).collect()
        };
        let tenant = metas.first()?.tenant;
        if orphans.is_empty() {
            return None;
        }
        let ids: Vec<ObjectId> = orphans.iter().map(|&(_, key)| block(key)).collect();
        let hints = self.find_elsewhere(elsewhere, tenant, &ids);
        let mut metas = metas.to_vec();
        for ((at, _), hint) in orphans.into_iter().zip(hints) {
            // A call is one tenant's, as far as the callers go; another's is refused as an orphan.
            if hint.is_some() && metas[at].tenant == tenant {
                metas[at].parent = None;
            }
        }
        Some(metas)
    }

    pub(super) fn adopted<'a>(&self, records: &[Record<'a>]) -> Option<Vec<Record<'a>>> {
        self.elsewhere()?;
        let metas: Vec<Meta> = records.iter().map(|record| record.meta).collect();
        let metas = self.adopted_metas(&metas)?;
        Some(metas.into_iter().zip(records).map(|(meta, record)| Record { meta, pieces: record.pieces }).collect())
    }

    /// Up to `most` objects that came, went or moved since they were asked for last, each with what others may be told: none, if it is not here
    /// any more. And whether there were more than are remembered: then all must be told again.
    pub fn take_changes(&self, most: usize) -> (Vec<(ObjectId, Option<Told>)>, bool) {
        let now = self.now();
        let (entries, lost) = {
            let mut kept = self.kept_mut();
            let (ids, lost) = kept.live.take_changes(most);
            let of = |id| kept.retention.get(id).map(|(_, entry)| Self::told(&kept, &entry, now));
            (ids.into_iter().map(|id| (id, of(id))).collect::<Vec<_>>(), lost)
        };
        let owned = |(id, told): (ObjectId, Option<Told>)| (id, told.and_then(|told| self.owned(told)));
        (entries.into_iter().map(owned).collect(), lost)
    }

    /// What others may be told of up to `most` rows of the index behind row `after`, and the last of these rows: none, if there are no more.
    pub fn told_of(&self, after: usize, most: usize) -> (Vec<Told>, Option<usize>) {
        let now = self.now();
        let (entries, last) = {
            let kept = self.kept();
            let index = kept.retention.index();
            let last = index.slots().min(after.saturating_add(most));
            let rows = (after + 1..=last).filter_map(|at| index.slot(at).and_then(|slot| index.entry(slot)));
            let there = rows.filter(|entry| !entry.lost && !kept.retention.is_over(entry, now));
            let entries: Vec<Told> = there.map(|entry| Self::told(&kept, &entry, now)).collect();
            (entries, (last > after).then_some(last))
        };
        (entries.into_iter().filter_map(|told| self.owned(told)).collect(), last)
    }

    fn told(kept: &Kept, entry: &Entry, now: u32) -> Told {
        let index = kept.retention.index();
        let parent = entry.parent.and_then(|slot| index.entry(slot)).map(|parent| parent.id.key);
        let life = kept.retention.lifetimes().of(entry.class).saturating_sub(now.saturating_sub(entry.touched));
        let meta = Meta { parent, ..meta_of(entry) };
        (Hint { meta, place: entry.place, media: 0, owner: Owner::PUBLIC }, life)
    }

    fn owned(&self, (hint, life): Told) -> Option<Told> {
        Some((Hint { media: self.media(), owner: self.owner(hint.meta.tenant)?, ..hint }, life))
    }
}
