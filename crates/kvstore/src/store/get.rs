//! Reading: the longest prefix of a chain, and bytes, which have their checksum or are a miss.

use super::put::may_see;
use super::stats::add;
use super::{Kept, Store};
use crate::catalogue::Bad;
use crate::error::Error;
use crate::index::{Entry, check_chain};
use crate::key::{Key, Kind, ObjectId};
use crate::media::{Place, Read};
use crate::object::{Meta, TenantId};

/// Places that are read again when collection has moved a record meanwhile.
const TRIES: usize = 4;

/// What is there of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks from the first on.
    pub blocks: usize,
    /// Positions of blocks among them that have a slice, deepest first.
    pub slices: Vec<usize>,
}

/// A range to be read.
pub struct Want<'a> {
    /// Of which object.
    pub id: ObjectId,
    /// First byte.
    pub start: u32,
    /// Filled whole on a hit; on a miss it may hold anything.
    pub into: &'a mut [u8],
}

/// What a read gave.
#[derive(Debug)]
pub enum Got {
    /// The bytes. Of a whole object they have its checksum; of a part, its header was right.
    Hit {
        /// Length of the whole object.
        len: u32,
        /// XXH3-64 of the whole object.
        checksum: u64,
    },
    /// Nothing to be used.
    Miss,
    /// The caller asked for what cannot be: a range beyond the object.
    Refused(Error),
}

impl Got {
    /// Whether the bytes are there.
    pub fn is_hit(&self) -> bool {
        matches!(self, Self::Hit { .. })
    }
}

impl Store {
    /// Blocks of a chain that are present from its first on, and up to `slices` slices among them, the deepest first. What is found counts as used.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain that is too long.
    pub fn check(&self, tenant: TenantId, chain: &[Key], slices: usize) -> Result<Found, Error> {
        check_chain(chain)?;
        let now = self.now();
        if let Some(elsewhere) = self.elsewhere() {
            let found = self.check_everywhere(elsewhere, tenant, chain, slices, now);
            self.note_touch(&chain[..found.blocks], now);
            return Ok(found);
        }
        let found = {
            let kept = self.kept();
            let index = kept.retention.index();
            let mut blocks = index.longest(chain);
            // Parents belong to the same tenant or to everybody, and are touched whenever their children are: the last block speaks for all.
            let visible = |at: usize| {
                let id = ObjectId { kind: Kind::Block, key: chain[at] };
                index
                    .find(id)
                    .and_then(|slot| index.entry(slot))
                    .is_some_and(|entry| may_see(tenant, entry.tenant) && !kept.retention.is_over(&entry, now))
            };
            while blocks > 0 && !visible(blocks - 1) {
                blocks -= 1;
            }
            Found { blocks, slices: index.slices(&chain[..blocks], slices) }
        };
        self.note_touch(&chain[..found.blocks], now);
        Ok(found)
    }

    /// Length of an object that can be read.
    pub fn length(&self, tenant: TenantId, id: ObjectId) -> Option<u32> {
        let now = self.now();
        Self::readable(&self.kept(), tenant, id, now).map(|entry| entry.len)
    }

    pub(super) fn readable(kept: &Kept, tenant: TenantId, id: ObjectId, now: u32) -> Option<Entry> {
        let (_, entry) = kept.retention.get(id)?;
        (may_see(tenant, entry.tenant) && !kept.retention.is_over(&entry, now)).then_some(entry)
    }

    /// Reads ranges. Each has an answer of its own.
    pub fn get(&self, tenant: TenantId, wants: &mut [Want<'_>]) -> Vec<Got> {
        let now = self.now();
        let mut answers: Vec<Got> = wants.iter().map(|_| Got::Miss).collect();
        let mut open: Vec<usize> = (0..wants.len()).collect();
        let mut last: Vec<Option<Place>> = vec![None; wants.len()];
        for _ in 0..TRIES {
            let entries: Vec<Option<Entry>> = {
                let kept = self.kept();
                open.iter().map(|&at| Self::readable(&kept, tenant, wants[at].id, now)).collect()
            };
            // Only what lies elsewhere than at the last try is worth another.
            let next: Vec<(usize, Entry)> = open
                .iter()
                .zip(entries)
                .filter_map(|(&at, entry)| entry.filter(|entry| last[at] != Some(entry.place)).map(|entry| (at, entry)))
                .collect();
            if next.is_empty() {
                break;
            }
            let results = self.read_entries(wants, &next);
            open.clear();
            for ((at, entry), result) in next.into_iter().zip(results) {
                last[at] = Some(entry.place);
                match result {
                    Ok(()) => answers[at] = Got::Hit { len: entry.len, checksum: entry.checksum },
                    Err(Error::Invalid(text)) => answers[at] = Got::Refused(Error::Invalid(text)),
                    Err(error @ Error::Damaged(..)) => {
                        if self.quarantine(&entry) {
                            self.trouble.note(error);
                        } else {
                            open.push(at);
                        }
                    }
                    // Gone, or moved meanwhile.
                    Err(Error::Unavailable(_)) => open.push(at),
                    Err(error) => {
                        add(&self.counters.read_errors, 1);
                        self.trouble.note(error);
                    }
                }
            }
        }
        self.count_reads(wants, &answers, now);
        if let Some(elsewhere) = self.elsewhere() {
            self.get_elsewhere(elsewhere, tenant, wants, &mut answers);
        }
        answers
    }

    fn read_entries(&self, wants: &mut [Want<'_>], next: &[(usize, Entry)]) -> Vec<Result<(), Error>> {
        let mut entries = next.iter().peekable();
        let mut reads = Vec::with_capacity(next.len());
        for (at, want) in wants.iter_mut().enumerate() {
            if let Some((_, entry)) = entries.next_if(|(index, _)| *index == at) {
                reads.push(Read { place: entry.place, meta: meta_of(entry), start: want.start, into: want.into });
            }
        }
        self.media.read(&mut reads)
    }

    fn count_reads(&self, wants: &[Want<'_>], answers: &[Got], now: u32) {
        let hits: Vec<&Want<'_>> =
            wants.iter().zip(answers).filter(|(_, got)| got.is_hit()).map(|(want, _)| want).collect();
        add(&self.counters.hits, hits.len() as u64);
        add(&self.counters.misses, (answers.len() - hits.len()) as u64);
        add(&self.counters.hit_bytes, hits.iter().map(|want| want.into.len() as u64).sum());
        if hits.is_empty() {
            return;
        }
        let mut kept = self.kept_mut();
        // Last first, as for a chain: a parent counts as used after its children.
        for want in hits.into_iter().rev() {
            if let Some((slot, entry)) = kept.retention.get(want.id) {
                kept.retention.touch(slot, now);
                self.counters.hit(entry.class, want.into.len() as u64);
            }
        }
    }

    /// Takes an object whose bytes are wrong, or gone, out of sight, now and after every restart; false where it lies elsewhere by now.
    pub(super) fn quarantine(&self, entry: &Entry) -> bool {
        {
            let mut kept = self.kept_mut();
            let Kept { retention, live } = &mut *kept;
            let Some((slot, found)) = retention.get(entry.id) else { return false };
            if found.place != entry.place {
                return false;
            }
            if let Some(removed) = retention.lose(slot) {
                live.drop_removed(&removed);
            } else {
                live.changed(found.id);
                live.sub(found.place, found.len);
            }
        }
        add(&self.counters.quarantined, 1);
        let noted = self.catalogue.add_bad(&[(entry.place, entry.id)], Bad::Damaged, self.now());
        if let Err(error) = noted {
            // The checksum finds it again after the restart.
            add(&self.counters.write_errors, 1);
            self.trouble.note(error);
        }
        true
    }

    /// Removes objects for good: they do not come back at a restart. Blocks that have children stay. How many went, slices with their blocks.
    ///
    /// # Errors
    /// [`Error::Io`] where that could not be noted; they are out of sight until the next open all the same.
    pub fn remove(&self, ids: &[ObjectId]) -> Result<usize, Error> {
        let mut gone: Vec<(Place, ObjectId)> = Vec::new();
        // No copy is on its way meanwhile, which would lie behind what is noted.
        let collection = self.collection();
        {
            let mut kept = self.kept_mut();
            let Kept { retention, live } = &mut *kept;
            for &id in ids {
                let Some((slot, _)) = retention.get(id) else { continue };
                if let Some(removed) = retention.remove(slot) {
                    live.drop_removed(&removed);
                    gone.push((removed.entry.place, removed.entry.id));
                    gone.extend(removed.slice.map(|(_, slice)| (slice.place, slice.id)));
                }
            }
        }
        add(&self.counters.removed, gone.len() as u64);
        if !gone.is_empty() {
            self.catalogue.add_bad(&gone, Bad::Removed, self.now())?;
        }
        drop(collection);
        Ok(gone.len())
    }
}

/// What the media is told of an entry: name, length and checksum count.
pub(super) fn meta_of(entry: &Entry) -> Meta {
    Meta {
        id: entry.id,
        parent: None,
        tenant: entry.tenant,
        class: entry.class,
        len: entry.len,
        checksum: entry.checksum,
        written: entry.touched,
    }
}
