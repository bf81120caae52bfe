//! Segments through every kind of end and every kind of failing disk.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::checksum::checksum;
use crate::key::{Key, Kind, ObjectId};
use crate::object::{Class, TenantId};

/// A disk that fails on demand. Without demands it only leaves out the waiting.
#[derive(Default)]
struct Disk {
    /// Bytes that still fit.
    room: Mutex<Option<u64>>,
    /// At most so many bytes a call, 0 for any number.
    most: AtomicUsize,
    interrupts: AtomicU32,
    fail_sync: AtomicBool,
    fail_truncate: AtomicBool,
    fail_read: AtomicBool,
    slow_sync: AtomicBool,
    syncs: AtomicU32,
    writes: AtomicU32,
}

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const EINTR: i32 = 4;

impl Io for Disk {
    fn write(&self, file: &File, pieces: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        if self.interrupts.load(Ordering::Relaxed) > 0 {
            self.interrupts.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(EINTR));
        }
        let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.iter().copied()).collect();
        let mut count = bytes.len();
        let most = self.most.load(Ordering::Relaxed);
        if most > 0 {
            count = count.min(most);
        }
        if let Some(room) = &mut *self.room.lock().unwrap() {
            if *room == 0 {
                return Err(io::Error::from_raw_os_error(ENOSPC));
            }
            count = count.min(*room as usize);
            *room -= count as u64;
        }
        file.write_all_at(&bytes[..count], offset)?;
        Ok(count)
    }

    fn read(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.fail_read.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        file.read_at(into, offset)
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        if self.slow_sync.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(30));
        }
        if self.fail_sync.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(EIO)) } else { Ok(()) }
    }

    fn truncate(&self, file: &File, length: u64) -> io::Result<()> {
        if self.fail_truncate.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        file.set_len(length)
    }
}

/// Bytes that differ from object to object and from place to place.
fn bytes(key: u128, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(key as u64 * 77) >> 13) as u8)
        .collect()
}

fn meta(key: u128, data: &[u8]) -> Meta {
    Meta {
        id: ObjectId { kind: Kind::Block, key: Key(key) },
        parent: (key > 1).then(|| Key(key - 1)),
        tenant: TenantId(3),
        class: Class::Agent,
        len: data.len() as u32,
        checksum: checksum(data),
        written: 9,
    }
}

fn append(local: &Local, objects: &[(u128, usize)]) -> Result<Vec<(Place, Meta)>, Error> {
    let data: Vec<Vec<u8>> = objects.iter().map(|&(key, len)| bytes(key, len)).collect();
    let pieces: Vec<[&[u8]; 2]> = data.iter().map(|data| data.split_at(data.len() / 3)).map(|(a, b)| [a, b]).collect();
    let metas: Vec<Meta> = objects.iter().zip(&data).map(|(&(key, _), data)| meta(key, data)).collect();
    let batch: Vec<_> = metas.iter().zip(&pieces).map(|(&meta, pieces)| Record { meta, pieces }).collect();
    Ok(local.append(&batch)?.into_iter().zip(metas).collect())
}

fn read(local: &Local, place: Place, meta: Meta) -> Result<Vec<u8>, Error> {
    let mut into = vec![0; meta.len as usize];
    local.read(&mut [Read { place, meta, start: 0, into: &mut into }]).remove(0).map(|()| into)
}

fn all(local: &Local) -> Vec<(Place, Meta)> {
    let mut found = Vec::new();
    local.recover(&mut |place, meta| found.push((place, meta))).unwrap();
    found
}

/// Everything recovered, and nothing else, reads as it was written.
fn check(local: &Local, expected: &[(Place, Meta)]) {
    assert_eq!(all(local), expected);
    for &(place, meta) in expected {
        assert_eq!(read(local, place, meta).unwrap(), bytes(meta.id.key.0, meta.len as usize));
    }
}

struct Kit {
    base: tempfile::TempDir,
    disk: Arc<Disk>,
}

impl Kit {
    fn new() -> Self {
        Self { base: tempfile::tempdir().unwrap(), disk: Arc::default() }
    }

    fn open(&self) -> (Root, Local) {
        let root = Root::open(self.base.path()).unwrap();
        let config = LocalConfig { segment_bytes: 64 << 10, ..LocalConfig::default() };
        let local = Local::open_with(&root, config, Arc::clone(&self.disk) as Arc<dyn Io>).unwrap();
        (root, local)
    }

    fn segment(&self, number: u32) -> PathBuf {
        self.base.path().join("segments").join(files::name(number))
    }
}

fn damage(path: &Path, at: u64, with: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(with, at).unwrap();
}

#[test]
fn batches_are_there_after_a_restart_sealed_or_not() {
    let kit = Kit::new();
    let mut expected = Vec::new();
    for round in 0..4u128 {
        let (_root, local) = kit.open();
        check(&local, &expected);
        for batch in 0..6 {
            let base = round * 1000 + batch * 10 + 1;
            expected.extend(append(&local, &[(base, 0), (base + 1, 1), (base + 2, 5000), (base + 3, 64)]).unwrap());
        }
        check(&local, &expected);
        if round == 2 {
            local.seal().unwrap();
            local.seal().unwrap();
        }
    }
    let (_root, local) = kit.open();
    check(&local, &expected);
    assert!(local.segments().len() >= 2);
    assert_eq!(std::fs::metadata(kit.segment(1)).unwrap().permissions().mode() & 0o777, 0o600);
    let on_disk: u64 = std::fs::read_dir(kit.base.path().join("segments"))
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert_eq!(local.bytes(), on_disk);
}

#[test]
fn ranges_are_held_to_their_header() {
    let kit = Kit::new();
    let (_root, local) = kit.open();
    let (place, meta) = append(&local, &[(7, 9000)]).unwrap()[0];
    let whole = bytes(7, 9000);
    let part = |place, meta, start: u32, len: usize| {
        let mut into = vec![0; len];
        local.read(&mut [Read { place, meta, start, into: &mut into }]).remove(0).map(|()| into)
    };
    for (start, len) in [(0, 1), (1, 8999), (4096, 100), (9000, 0), (0, 0)] {
        assert_eq!(part(place, meta, start, len).unwrap(), whole[start as usize..start as usize + len]);
    }
    assert!(matches!(part(place, meta, 8999, 2), Err(Error::Invalid(_))));
    assert!(matches!(part(place, meta, u32::MAX, 2), Err(Error::Invalid(_))));
    let other = Meta { checksum: 1, ..meta };
    assert!(matches!(part(place, other, 1, 2), Err(Error::Damaged(..))));
    assert!(matches!(part(place, other, 0, 9000), Err(Error::Damaged(..))));
    let nowhere = Place { segment: place.segment, offset: place.offset + 1000 };
    assert!(matches!(part(nowhere, meta, 0, 9000), Err(Error::Damaged(..))));
    assert!(matches!(part(Place { segment: 99, offset: 1 }, meta, 0, 9000), Err(Error::Damaged(..))));
    kit.disk.fail_read.store(true, Ordering::Relaxed);
    assert!(matches!(part(place, meta, 0, 9000), Err(Error::Io { .. })));
}

#[test]
fn what_fits_no_segment_or_has_another_length_is_refused() {
    let kit = Kit::new();
    let (_root, local) = kit.open();
    assert!(matches!(append(&local, &[(1, 65 << 10)]), Err(Error::Invalid(_))));
    let wrong = Record { meta: meta(1, &[1, 2, 3]), pieces: &[&[1, 2]] };
    assert!(matches!(local.append(&[wrong]), Err(Error::Invalid(_))));
    assert!(local.append(&[]).unwrap().is_empty());
    check(&local, &[]);
    let small = LocalConfig { segment_bytes: 1000, ..LocalConfig::default() };
    let other = Root::open(&kit.base.path().join("other")).unwrap();
    assert!(matches!(Local::open(&other, small), Err(Error::Invalid(_))));
}

#[test]
fn short_and_interrupted_writes_go_on() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    kit.disk.most.store(777, Ordering::Relaxed);
    kit.disk.interrupts.store(5, Ordering::Relaxed);
    let expected = append(&local, &[(1, 10_000), (2, 3), (3, 20_000)]).unwrap();
    check(&local, &expected);
    drop((root, local));
    check(&kit.open().1, &expected);
}

#[test]
fn a_full_disk_refuses_and_leaves_the_segment_whole() {
    for room in [0, 1, 63, 100, 128, 5000, 10_300] {
        let kit = Kit::new();
        let (root, local) = kit.open();
        let mut expected = append(&local, &[(1, 5000)]).unwrap();
        *kit.disk.room.lock().unwrap() = Some(room);
        assert!(matches!(append(&local, &[(2, 5000), (3, 5200)]), Err(Error::Full(_))), "{room}");
        check(&local, &expected);
        *kit.disk.room.lock().unwrap() = None;
        expected.extend(append(&local, &[(4, 5000)]).unwrap());
        drop((root, local));
        check(&kit.open().1, &expected);
    }
}

#[test]
fn a_disk_too_full_for_a_footer_or_a_new_segment_keeps_what_it_has() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let mut expected = append(&local, &[(1, 30_000)]).unwrap();
    expected.extend(append(&local, &[(2, 30_000)]).unwrap());
    for room in [10, 100, 150] {
        *kit.disk.room.lock().unwrap() = Some(room);
        assert!(matches!(append(&local, &[(3, 30_000)]), Err(Error::Full(_))));
        check(&local, &expected);
    }
    *kit.disk.room.lock().unwrap() = None;
    expected.extend(append(&local, &[(4, 30_000)]).unwrap());
    drop((root, local));
    check(&kit.open().1, &expected);
}

#[test]
fn after_a_failed_sync_nothing_follows_in_that_segment() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let mut expected = append(&local, &[(1, 500)]).unwrap();
    kit.disk.fail_sync.store(true, Ordering::Relaxed);
    assert!(matches!(append(&local, &[(2, 500)]), Err(Error::Io { .. })));
    kit.disk.fail_sync.store(false, Ordering::Relaxed);
    check(&local, &expected);
    let next = append(&local, &[(3, 500)]).unwrap();
    assert_ne!(next[0].0.segment, expected[0].0.segment);
    expected.extend(next);
    // The machine ended before the unsynced part reached the disk.
    drop((root, local));
    let end = u64::from(expected[0].0.offset) * ALIGN + span(500);
    damage(&kit.segment(1), end, &[0; 200]);
    check(&kit.open().1, &expected);
}

#[test]
fn a_tail_that_cannot_be_cut_ends_the_segment() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let mut expected = append(&local, &[(1, 500)]).unwrap();
    kit.disk.fail_truncate.store(true, Ordering::Relaxed);
    *kit.disk.room.lock().unwrap() = Some(300);
    assert!(matches!(append(&local, &[(2, 500)]), Err(Error::Full(_))));
    kit.disk.fail_truncate.store(false, Ordering::Relaxed);
    *kit.disk.room.lock().unwrap() = None;
    expected.extend(append(&local, &[(3, 500)]).unwrap());
    assert_eq!(expected[1].0.segment, 2);
    check(&local, &expected);
    drop((root, local));
    check(&kit.open().1, &expected);
}

#[test]
fn committers_share_a_sync() {
    let kit = Kit::new();
    let (_root, local) = kit.open();
    append(&local, &[(1, 10)]).unwrap();
    kit.disk.slow_sync.store(true, Ordering::Relaxed);
    let (syncs, writes) = (kit.disk.syncs.load(Ordering::Relaxed), kit.disk.writes.load(Ordering::Relaxed));
    let places: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u128)
            .map(|at| {
                scope.spawn({
                    let local = &local;
                    move || append(local, &[(at * 2 + 2, 100), (at * 2 + 3, 100)]).unwrap()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    for &(place, meta) in &places {
        read(&local, place, meta).unwrap();
    }
    assert_eq!(places.len(), 16);
    assert_eq!(kit.disk.writes.load(Ordering::Relaxed) - writes, 8, "one write a batch");
    assert!(
        kit.disk.syncs.load(Ordering::Relaxed) - syncs <= 5,
        "8 batches, {} syncs",
        kit.disk.syncs.load(Ordering::Relaxed) - syncs
    );
}

#[test]
fn a_deleted_segment_reads_on_and_its_number_is_not_given_again() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let (place, meta) = append(&local, &[(1, 3000)]).unwrap()[0];
    assert!(matches!(local.delete(1), Err(Error::Invalid(_))), "it is open");
    local.seal().unwrap();
    let held = local.files.get(1).unwrap();
    local.delete(1).unwrap();
    assert_eq!(
        local.read_whole(&held, u64::from(place.offset) * ALIGN + 128, &mut vec![0; 3000]).unwrap(),
        meta.checksum
    );
    assert!(matches!(read(&local, place, meta), Err(Error::Damaged(..))));
    assert!(matches!(local.delete(1), Err(Error::Invalid(_))));
    drop((root, local));
    let (_root, local) = kit.open();
    assert!(append(&local, &[(2, 10)]).unwrap()[0].0.segment > 1);
}

#[test]
fn nothing_is_acknowledged_of_a_file_that_somebody_deleted() {
    let kit = Kit::new();
    let (_root, local) = kit.open();
    let kept = append(&local, &[(1, 100)]).unwrap();
    std::fs::remove_file(kit.segment(1)).unwrap();
    let error = append(&local, &[(2, 100)]).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("deleted"), "{error}");
    // The next one goes where it stays.
    let next = append(&local, &[(3, 100)]).unwrap();
    assert_eq!(next[0].0.segment, 2);
    assert_eq!(read(&local, next[0].0, next[0].1).unwrap(), bytes(3, 100));
    assert!(read(&local, kept[0].0, kept[0].1).is_err());
    // Nor where there is no folder any more.
    std::fs::remove_dir_all(kit.segment(2).parent().unwrap()).unwrap();
    assert!(append(&local, &[(4, 100)]).is_err() && append(&local, &[(5, 100)]).is_err());
}

#[test]
fn a_damaged_footer_costs_nothing_but_time() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let expected = append(&local, &[(1, 3000), (2, 40)]).unwrap();
    local.seal().unwrap();
    drop((root, local));
    let size = std::fs::metadata(kit.segment(1)).unwrap().len();
    damage(&kit.segment(1), size - 100, &[0x55]);
    check(&kit.open().1, &expected);
}

#[test]
fn decay_in_the_open_segment_ends_nothing_else() {
    let kit = Kit::new();
    let (root, local) = kit.open();
    let mut expected = append(&local, &[(1, 3000), (2, 40)]).unwrap();
    expected.extend(append(&local, &[(3, 100)]).unwrap());
    drop((root, local));
    damage(&kit.segment(1), 64 + 128 + 700, &[0x55, 0x66]);
    for _ in 0..2 {
        let (_root, local) = kit.open();
        assert_eq!(all(&local), expected);
        assert!(matches!(read(&local, expected[0].0, expected[0].1), Err(Error::Damaged(..))));
        for &(place, meta) in &expected[1..] {
            read(&local, place, meta).unwrap();
        }
    }
}

#[test]
fn a_damaged_header_hides_its_own_batch_only() {
    // What was synced before a later header was written is listed, though the header itself is gone with its record's name.
    for (record, listed) in [(0, &[1, 2, 3, 4][..]), (1, &[0, 2, 3, 4]), (3, &[0, 1, 2, 4]), (4, &[0, 1, 2])] {
        let kit = Kit::new();
        let (root, local) = kit.open();
        let mut written = append(&local, &[(1, 3000), (2, 40)]).unwrap();
        written.extend(append(&local, &[(3, 40_000)]).unwrap());
        // The last batch lost a header before anybody said that it was synced: none of it counts, as of a torn write.
        written.extend(append(&local, &[(4, 100), (5, 0)]).unwrap());
        if record < 4 {
            append(&local, &[(6, 10)]).unwrap();
        }
        drop((root, local));
        damage(&kit.segment(1), u64::from(written[record].0.offset) * ALIGN + 30, &[0x55, 0x66]);
        for _ in 0..2 {
            let (_root, local) = kit.open();
            let found = all(&local);
            let expected: Vec<_> = listed.iter().map(|&at| written[at]).collect();
            assert_eq!(found[..expected.len()], expected, "record {record}");
            assert_eq!(found.len(), expected.len() + usize::from(record < 4), "record {record}");
            for &(place, meta) in &found {
                read(&local, place, meta).unwrap();
            }
        }
        let (_root, local) = kit.open();
        // Appending goes on, in this segment or the next.
        let more = append(&local, &[(7, 500)]).unwrap();
        assert!(all(&local).contains(&more[0]));
    }
}

#[test]
fn segments_of_another_store_or_version_are_refused() {
    let (kit, other) = (Kit::new(), Kit::new());
    for kit in [&kit, &other] {
        let (_root, local) = kit.open();
        append(&local, &[(1, 3000)]).unwrap();
        local.seal().unwrap();
    }
    std::fs::copy(other.segment(1), kit.segment(2)).unwrap();
    let open = |kit: &Kit| Local::open(&Root::open(kit.base.path()).unwrap(), LocalConfig::default()).map(|_| ());
    assert!(matches!(open(&kit), Err(Error::Invalid(_))));
    std::fs::copy(kit.segment(1), kit.segment(2)).unwrap();
    assert!(matches!(open(&kit), Err(Error::Invalid(_))));
    let mut header = SegmentHeader { number: 2, media: 0 }.encode();
    header[4] = 7;
    let sum = checksum(&header[..56]);
    header[56..].copy_from_slice(&sum.to_le_bytes());
    std::fs::write(kit.segment(2), header).unwrap();
    assert!(matches!(open(&kit), Err(Error::Newer { found: 7, .. })));
}

#[derive(Clone, Debug)]
enum Crash {
    None,
    Truncate(u16),
    Zeros(u16, u16),
    Garbage(u16, u16),
}

fn crash() -> impl Strategy<Value = Crash> {
    prop_oneof![
        Just(Crash::None),
        any::<u16>().prop_map(Crash::Truncate),
        any::<(u16, u16)>().prop_map(|(at, len)| Crash::Zeros(at, len)),
        any::<(u16, u16)>().prop_map(|(at, len)| Crash::Garbage(at, len)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Batches, then an end that leaves any part of the last, unacknowledged bytes: exactly what was acknowledged is there, round after round.
    #[test]
    fn exactly_what_was_acknowledged_survives(
        rounds in prop::collection::vec((prop::collection::vec(prop::collection::vec(0usize..9000, 1..4), 0..6), prop::collection::vec(0usize..9000, 1..4), crash(), any::<bool>()), 1..4),
    ) {
        let kit = Kit::new();
        let mut expected: Vec<(Place, Meta)> = Vec::new();
        let mut key = 1u128;
        let mut name = |lens: &[usize]| -> Vec<(u128, usize)> {
            lens.iter().map(|&len| { key += 1; (key, len) }).collect()
        };
        for (batches, last, crash, seal) in rounds {
            let (root, local) = kit.open();
            check(&local, &expected);
            for batch in &batches {
                expected.extend(append(&local, &name(batch)).unwrap());
            }
            if seal {
                local.seal().unwrap();
            }
            // The batch that nobody got an answer for.
            let lost = append(&local, &name(&last)).unwrap();
            drop((root, local));
            let path = kit.segment(lost[0].0.segment);
            let size = std::fs::metadata(&path).unwrap().len();
            let start = u64::from(lost[0].0.offset) * ALIGN;
            // Damage that begins in the padding of the last record harms nothing.
            let harmless = lost.last().map(|(place, meta)| u64::from(place.offset) * ALIGN + 128 + u64::from(meta.len)).unwrap();
            let at = |at: u16| start + u64::from(at) % (size - start);
            let hurt = match crash {
                Crash::None => false,
                Crash::Truncate(to) => {
                    OpenOptions::new().write(true).open(&path).unwrap().set_len(at(to)).unwrap();
                    at(to) < harmless
                }
                Crash::Zeros(from, len) | Crash::Garbage(from, len) => {
                    let before = std::fs::read(&path).unwrap();
                    let from = at(from);
                    let with: Vec<u8> = match crash { Crash::Zeros(..) => vec![0; usize::from(len)], _ => bytes(u128::from(len), usize::from(len)) };
                    damage(&path, from, &with);
                    std::fs::read(&path).unwrap()[start as usize..harmless as usize] != before[start as usize..harmless as usize]
                }
            };
            if !hurt {
                expected.extend(lost);
            }
        }
        let (_root, local) = kit.open();
        check(&local, &expected);
        let keys: BTreeMap<_, _> = expected.iter().map(|(place, meta)| (meta.id, place)).collect();
        prop_assert_eq!(keys.len(), expected.len());
    }
}
