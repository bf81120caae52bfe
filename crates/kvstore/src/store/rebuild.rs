//! The index from what the media still holds. Records may come children first; a child whose parent never comes is dropped.

use std::collections::{BTreeMap, HashMap};

use super::Kept;
use crate::catalogue::{Bad, Catalogue};
use crate::error::Error;
use crate::index::Recovery;
use crate::media::{Media, Place};
use crate::object::{Meta, TenantId};

pub(super) struct Rebuilt {
    /// The latest time a record was written at.
    pub newest: u32,
    /// Segments of the catalogue that are not there.
    pub missing: u64,
}

pub(super) fn rebuild(media: &dyn Media, catalogue: &Catalogue, kept: &mut Kept) -> Result<Rebuilt, Error> {
    let (mut bad, mut removed) = (HashMap::new(), HashMap::new());
    for (place, id, why) in catalogue.bad()? {
        if why == Bad::Removed {
            // In order: the last removal of an object stays.
            removed.insert(id, place);
        } else {
            bad.insert(place, why);
        }
    }
    let retention = &mut kept.retention;
    let mut recovery = Recovery::new();
    let mut damaged: Vec<(Place, Meta)> = Vec::new();
    let (mut newest, mut tenant) = (0, TenantId(0));
    media.recover(&mut |place, meta| {
        newest = newest.max(meta.written);
        tenant = tenant.max(meta.tenant);
        if removed.get(&meta.id).is_some_and(|&last| place <= last) {
            return;
        }
        match bad.get(&place) {
            None => {
                retention.recover(&mut recovery, meta, place);
            }
            Some(Bad::Damaged) => damaged.push((place, meta)),
            Some(_) => {}
        }
    })?;
    // A damaged block stays as a link of its chain, so that its children are still led to, and as a miss: unless there is a whole record of it.
    for &(place, meta) in &damaged {
        if retention.index().find(meta.id).is_none() {
            retention.recover(&mut recovery, meta, place);
        }
    }
    for &(place, meta) in damaged.iter().rev() {
        if let Some((slot, entry)) = retention.get(meta.id)
            && entry.place == place
        {
            retention.lose(slot);
        }
    }
    for (_, entry) in retention.index().iter() {
        if !entry.lost {
            kept.live.add(entry.id, entry.place, entry.len);
        }
    }
    catalogue.keep_numbers(tenant)?;
    Ok(Rebuilt { newest, missing: compare(media, catalogue)? })
}

/// Holds the catalogue's list of segments against what is there, and makes it that.
fn compare(media: &dyn Media, catalogue: &Catalogue) -> Result<u64, Error> {
    let there: BTreeMap<u32, u64> = media.segments().into_iter().collect();
    let mut missing = 0;
    for number in catalogue.segments()?.into_keys().filter(|number| !there.contains_key(number)) {
        missing += 1;
        catalogue.remove_segment(number)?;
        catalogue.remove_bad(number, there.keys().next().copied().unwrap_or(0))?;
    }
    match catalogue.add_segments(&there.into_iter().collect::<Vec<_>>()) {
        // Reading needs no room; upkeep notes them when there is some.
        Ok(()) | Err(Error::Full(_)) => Ok(missing),
        Err(error) => Err(error),
    }
}
