//! Scrubbing: reading what nobody asks for, so that damage is found while it can still be made good.

use std::sync::PoisonError;

use super::Store;
use super::get::meta_of;
use super::stats::add;
use crate::error::Error;
use crate::index::Entry;
use crate::media::Read;

/// What one call of [`Store::scrub`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Objects read.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those put in quarantine.
    pub damaged: u64,
    /// Those whose disk or service answered with an error.
    pub errors: u64,
    /// Every object there was has been read since the round began.
    pub done: bool,
}

impl Store {
    /// Reads and checks about `bytes` bytes of objects, going on where the last call ended. Reads that collection crosses are left to the next round.
    pub fn scrub(&self, bytes: u64) -> Scrubbed {
        let mut at = self.scrubbed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut did = Scrubbed::default();
        let mut buffer = Vec::new();
        while did.bytes < bytes {
            let Some(entry) = self.next_entry(&mut at) else {
                *at = 0;
                did.done = true;
                break;
            };
            buffer.resize(entry.len as usize, 0);
            let read = Read { place: entry.place, meta: meta_of(&entry), start: 0, into: &mut buffer };
            match self.media.read(&mut [read]).pop() {
                Some(Err(Error::Damaged(..))) => {
                    did.damaged += u64::from(self.quarantine(&entry));
                }
                Some(Err(Error::Io { .. })) => did.errors += 1,
                _ => {}
            }
            did.objects += 1;
            did.bytes += u64::from(entry.len).max(1);
        }
        add(&self.counters.scrubbed, did.objects);
        did
    }

    fn next_entry(&self, at: &mut usize) -> Option<Entry> {
        let kept = self.kept();
        let index = kept.retention.index();
        while *at < index.slots() {
            *at += 1;
            let entry = index.slot(*at).and_then(|slot| index.entry(slot)).filter(|entry| !entry.lost);
            if entry.is_some() {
                return entry;
            }
        }
        None
    }
}
