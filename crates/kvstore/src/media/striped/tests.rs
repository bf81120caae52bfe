#![allow(clippy::unwrap_used)]
use std::path::PathBuf;
use std::time::Instant;

use super::*;
use crate::backend::{Faulty, Memory, MountedDir, Name};
use crate::checksum::checksum;
use crate::key::{Kind, ObjectId};
use crate::object::{Class, TenantId};

struct Stored {
    place: Place,
    meta: Meta,
    bytes: Vec<u8>,
}

fn config() -> Config {
    Config {
        media: 7,
        hedge: Duration::from_millis(30),
        read_timeout: Duration::from_millis(400),
        write_timeout: Duration::from_secs(5),
        ..Config::default()
    }
}

/// Twelve domains that fail when told to.
fn domains(inner: impl Fn(usize) -> Arc<dyn Backend>) -> Vec<Arc<Faulty>> {
    (0..SHARDS).map(|at| Arc::new(Faulty::new(inner(at)))).collect()
}

fn in_memory() -> Vec<Arc<Faulty>> {
    domains(|_| Arc::new(Memory::new()))
}

fn in_files(folder: &tempfile::TempDir) -> Vec<Arc<Faulty>> {
    domains(|at| Arc::new(MountedDir::open(&folder.path().join(format!("{at:02}"))).unwrap()))
}

fn file(folder: &tempfile::TempDir, domain: usize, segment: u32) -> PathBuf {
    folder.path().join(format!("{domain:02}")).join(Name::segment(segment).as_str())
}

fn over(domains: &[Arc<Faulty>], config: Config) -> Striped {
    Striped::new(std::array::from_fn(|at| domains[at].clone() as Arc<dyn Backend>), config).unwrap()
}

/// What a start finds.
fn start(domains: &[Arc<Faulty>], config: Config) -> (Striped, Vec<(Place, Meta)>) {
    let striped = over(domains, config);
    let mut found = Vec::new();
    striped.recover(&mut |place, meta| found.push((place, meta))).unwrap();
    (striped, found)
}

fn bytes(len: usize, seed: u128) -> Vec<u8> {
    (0..len).map(|at| (((at as u128 + 1) * (seed + 3) * 2_654_435_761) >> 11) as u8).collect()
}

/// Objects with these keys, appended as one batch.
fn append(striped: &Striped, objects: &[(u128, usize)]) -> Result<Vec<Stored>, Error> {
    let all: Vec<(Meta, Vec<u8>)> = objects
        .iter()
        .map(|(key, len)| {
            let bytes = bytes(*len, *key);
            let id = ObjectId { kind: if key % 2 == 0 { Kind::Block } else { Kind::Slice }, key: Key(*key) };
            let parent = (key % 3 == 0).then_some(Key(key + 1));
            let (len, checksum) = (*len as u32, checksum(&bytes));
            (
                Meta { id, parent, tenant: TenantId(5), class: Class::Agent, len, checksum, written: 1_800_000_000 },
                bytes,
            )
        })
        .collect();
    // In pieces that end nowhere near a shard.
    let pieces: Vec<Vec<&[u8]>> = all.iter().map(|(_, bytes)| bytes.chunks(777).collect()).collect();
    let batch: Vec<Record<'_>> =
        all.iter().zip(&pieces).map(|((meta, _), pieces)| Record { meta: *meta, pieces }).collect();
    let places = striped.append(&batch)?;
    eventually("the last domains have theirs", || striped.core.state().segments[&places[0].segment].pending == 0);
    Ok(places.into_iter().zip(all).map(|(place, (meta, bytes))| Stored { place, meta, bytes }).collect())
}

fn part(striped: &Striped, stored: &Stored, range: std::ops::Range<usize>) -> Result<(), Error> {
    let mut into = vec![0xee; range.len()];
    let read = Read { place: stored.place, meta: stored.meta, start: range.start as u32, into: &mut into };
    let done = striped.read(&mut [read]).pop().unwrap();
    done.inspect(|()| assert!(into == stored.bytes[range.clone()], "{} {range:?}", stored.meta.id))
}

fn whole(striped: &Striped, stored: &Stored) -> Result<(), Error> {
    part(striped, stored, 0..stored.bytes.len())
}

/// Everything, in one call.
fn all_right(striped: &Striped, stored: &[Stored]) {
    let mut into: Vec<Vec<u8>> = stored.iter().map(|stored| vec![0xee; stored.bytes.len()]).collect();
    let reads = stored.iter().zip(&mut into).map(|(stored, into)| Read {
        place: stored.place,
        meta: stored.meta,
        start: 0,
        into,
    });
    let done = striped.read(&mut reads.collect::<Vec<_>>());
    assert!(done.iter().all(Result::is_ok), "{done:?}");
    assert!(stored.iter().zip(&into).all(|(stored, into)| stored.bytes == *into));
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const LENGTHS: [usize; 10] = [0, 1, 63, 64, 639, 640, 641, 1000, 6400, 114_000];

/// Each length under a key of another rotation.
fn mixed() -> Vec<(u128, usize)> {
    LENGTHS.iter().enumerate().map(|(at, len)| (at as u128 * 5 + 100, *len)).collect()
}

#[test]
fn what_is_appended_is_read_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    for domains in [in_memory(), in_files(&folder)] {
        let (striped, found) = start(&domains, config());
        assert!(found.is_empty() && striped.append(&[]).unwrap().is_empty());
        let mut stored = append(&striped, &mixed()).unwrap();
        stored.extend(append(&striped, &[(1, 5000)]).unwrap());
        all_right(&striped, &stored);
        for stored in &stored {
            let len = stored.bytes.len();
            for range in [
                0..len,
                0..len / 2,
                len / 3..len,
                len / 2..len / 2,
                len.saturating_sub(1)..len,
                len / 7..len / 7 + len / 9,
            ] {
                part(&striped, stored, range).unwrap();
            }
        }
        assert_eq!(striped.segments().iter().map(|(segment, _)| *segment).collect::<Vec<_>>(), [1, 2]);
        striped.seal().unwrap();
        let stats = striped.stats();
        assert_eq!((stats.hedged, stats.damaged, stats.short, stats.backlog), (0, 0, 0, 0));
        let (again, found) = start(&domains, config());
        assert_eq!(found, stored.iter().map(|stored| (stored.place, stored.meta)).collect::<Vec<_>>());
        all_right(&again, &stored);
        let mut second = Vec::new();
        again.records(2, &mut |place, meta| second.push((place, meta))).unwrap();
        assert_eq!(second, [(stored.last().unwrap().place, stored.last().unwrap().meta)]);
        assert_eq!(append(&again, &[(9, 10)]).unwrap()[0].place.segment, 3);
        assert_eq!(again.segments()[0].1, 12 * domains[0].size_of(1));
    }
}

impl Faulty {
    fn size_of(&self, segment: u32) -> u64 {
        let list = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(self.list(""));
        list.unwrap().into_iter().find(|(name, _)| *name == Name::segment(segment)).map_or(0, |(_, size)| size)
    }
}

#[test]
fn a_read_asks_ten_domains_and_that_of_p_and_spreads_parity() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &(0..12).map(|key| (key, 6400)).collect::<Vec<_>>()).unwrap();
    // So that no ten have answered before the last is asked.
    for domain in &domains {
        domain.set_delay(Duration::from_millis(2));
    }
    let counts = || domains.iter().map(|domain| domain.reads()).collect::<Vec<_>>();
    for (at, stored) in stored.iter().enumerate() {
        let before = counts();
        whole(&striped, stored).unwrap();
        let asked: Vec<usize> = counts().iter().zip(&before).map(|(after, before)| after - before).collect();
        // Q of key k lies in domain 11 + k, and is the only one left alone.
        let expected: Vec<usize> = (0..SHARDS).map(|domain| usize::from(domain != (11 + at) % 12)).collect();
        assert_eq!(asked, expected, "key {at}");
    }
    let before = counts().iter().sum::<usize>();
    part(&striped, &stored[0], 0..64).unwrap();
    assert_eq!(counts().iter().sum::<usize>(), before + 1);
    // Of one segment, all in one request to each domain.
    let before = counts().iter().sum::<usize>();
    all_right(&striped, &stored);
    assert_eq!(counts().iter().sum::<usize>(), before + 12);
}

#[test]
fn every_pattern_of_one_and_two_lost_files_is_made_good() {
    let folder = tempfile::tempdir().unwrap();
    let domains = in_files(&folder);
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &[(0, 6400), (5, 12_345), (11, 7000), (7, 77)]).unwrap();
    let mut patterns = 0;
    for first in 0..SHARDS {
        for second in first..SHARDS {
            let lost = if first == second { vec![first] } else { vec![first, second] };
            for domain in &lost {
                std::fs::rename(file(&folder, *domain, 1), folder.path().join(format!("away-{domain}"))).unwrap();
            }
            all_right(&striped, &stored);
            part(&striped, &stored[1], 300..4000).unwrap();
            for domain in &lost {
                std::fs::rename(folder.path().join(format!("away-{domain}")), file(&folder, *domain, 1)).unwrap();
            }
            patterns += 1;
        }
    }
    assert_eq!(patterns, 78);
    for domain in [2, 7, 11] {
        std::fs::remove_file(file(&folder, domain, 1)).unwrap();
    }
    for stored in &stored[..3] {
        assert!(matches!(whole(&striped, stored), Err(Error::Damaged(id, _)) if id == stored.meta.id));
    }
    // Of a short one, eight shards are padding: positions 7, 0 and 4 are lost, of which it needs one.
    whole(&striped, &stored[3]).unwrap();
    // What lies in domains that are there is read all the same.
    part(&striped, &stored[0], 0..10).unwrap();
}

#[test]
fn a_flipped_byte_is_a_loss_until_it_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let domains = in_files(&folder);
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &[(0, 1000), (3, 6400)]).unwrap();
    let original: Vec<Vec<u8>> = (0..SHARDS).map(|domain| std::fs::read(file(&folder, domain, 1)).unwrap()).collect();
    // In the header and in the bytes of a shard of the second object, and in the footer.
    for (at, seen) in [(64 + 128 + 9, true), (64 + 128 + 64 + 50, true), (original[0].len() - 100, false)] {
        for (domain, original) in original.iter().enumerate() {
            let mut bytes = original.clone();
            bytes[at] ^= 4;
            std::fs::write(file(&folder, domain, 1), &bytes).unwrap();
            let before = striped.stats();
            // Ten other answers may be the first; without P it takes the wrong one or Q.
            let data = position_of(stored[1].meta.id.key, domain) < DATA;
            domains[domain_of(stored[1].meta.id.key, DATA)].set_down(data);
            eventually("a read meets it", || {
                whole(&striped, &stored[1]).unwrap();
                !data || !seen || striped.stats().damaged > before.damaged
            });
            domains[domain_of(stored[1].meta.id.key, DATA)].set_down(false);
            assert!(seen || striped.stats().damaged == before.damaged);
            let scrubbed = striped.scrub(1).unwrap();
            assert_eq!(scrubbed, Scrubbed { sound: 11, damaged: 1, away: 0 });
            assert_eq!(striped.stats().backlog, 1);
            assert_eq!(striped.repair_step(10).unwrap(), Repaired { made: 1, ..Repaired::default() });
            assert!(std::fs::read(file(&folder, domain, 1)).unwrap() == *original);
        }
    }
    assert_eq!(striped.scrub(1).unwrap(), Scrubbed { sound: 12, damaged: 0, away: 0 });
    assert!(matches!(striped.scrub(2), Err(Error::Invalid(_))));
}

#[test]
fn two_dead_domains_and_a_slow_one_give_the_same_bytes() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &mixed()).unwrap();
    domains[1].set_down(true);
    domains[8].set_down(true);
    domains[4].set_delay(Duration::from_millis(50));
    all_right(&striped, &stored);
    for stored in &stored {
        whole(&striped, stored).unwrap();
    }
    // A third that does not answer: nothing is known to be lost.
    domains[4].set_down(true);
    domains[4].set_delay(Duration::ZERO);
    assert!(matches!(whole(&striped, &stored[9]), Err(Error::Unavailable(_))));
    domains[8].set_down(false);
    all_right(&striped, &stored);
    assert_eq!(striped.stats().damaged, 0);
}

#[test]
fn one_slow_domain_costs_nothing_and_two_the_hedge() {
    let domains = in_memory();
    let (striped, _) =
        start(&domains, Config { hedge: Duration::from_millis(100), read_timeout: Duration::from_secs(3), ..config() });
    let stored = append(&striped, &[(0, 100_000)]).unwrap();
    let time = || {
        let start = Instant::now();
        whole(&striped, &stored[0]).unwrap();
        start.elapsed()
    };
    domains[3].set_hanging(true);
    assert!(time() < Duration::from_millis(90) && striped.stats().hedged == 0);
    domains[6].set_hanging(true);
    let both = time();
    assert!(both >= Duration::from_millis(100) && both < Duration::from_millis(1500), "{both:?}");
    assert_eq!((striped.stats().hedged, striped.stats().rebuilt), (1, 2));
    // They are known by now: the twelfth is asked at once.
    assert!(time() < Duration::from_millis(90));
    assert_eq!(striped.stats().hedged, 2);
    // Who answers again is waited for again.
    domains[3].set_hanging(false);
    domains[6].set_hanging(false);
    eventually("both count as answering", || {
        let before = striped.stats().hedged;
        time();
        striped.stats().hedged == before
    });
    domains[3].set_hanging(true);
    domains[6].set_hanging(true);
    domains[7].set_hanging(true);
    assert!(matches!(whole(&striped, &stored[0]), Err(Error::Unavailable(_))));
}

#[test]
fn a_domain_that_returns_gets_what_it_missed() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    domains[5].set_down(true);
    let mut stored = append(&striped, &mixed()).unwrap();
    stored.extend(append(&striped, &[(77, 3000)]).unwrap());
    eventually("both batches are short of one", || striped.stats().short == 2 && striped.stats().backlog == 2);
    // Still away: the debt stays, and nothing else is tried there.
    assert_eq!(striped.repair_step(10).unwrap(), Repaired { left: 2, ..Repaired::default() });
    domains[5].set_down(false);
    assert_eq!(striped.repair_step(1).unwrap(), Repaired { made: 1, left: 1, ..Repaired::default() });
    assert_eq!(striped.repair_step(9).unwrap(), Repaired { made: 1, ..Repaired::default() });
    for segment in [1, 2] {
        assert_eq!(striped.scrub(segment).unwrap(), Scrubbed { sound: 12, damaged: 0, away: 0 });
    }
    // What was made is used.
    domains[0].set_down(true);
    domains[9].set_down(true);
    all_right(&striped, &stored);
}

#[test]
fn a_start_finds_what_a_domain_missed() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    domains[5].set_down(true);
    let stored = append(&striped, &mixed()).unwrap();
    drop(striped);
    // Away at the start, nothing can be said of it; back, it owes.
    let (striped, found) = start(&domains, config());
    assert_eq!(found.len(), stored.len());
    drop(striped);
    domains[5].set_down(false);
    let (striped, found) = start(&domains, config());
    assert_eq!((found.len(), striped.stats().backlog), (stored.len(), 1));
    assert_eq!(striped.repair_step(9).unwrap().made, 1);
    assert_eq!(striped.scrub(1).unwrap().sound, 12);
}

#[test]
fn a_batch_counts_when_enough_domains_hold_it() {
    let domains = in_memory();
    let (strict, _) = start(&domains, config());
    domains[0].set_down(true);
    domains[1].set_down(true);
    assert!(matches!(append(&strict, &mixed()), Err(Error::Unavailable(_))));
    for domain in [0, 1] {
        domains[domain].set_down(false);
        domains[domain].set_writes_left(0);
    }
    assert!(matches!(append(&strict, &mixed()), Err(Error::Full(_))));
    // Nothing of either is left, and nothing is found.
    eventually("refused batches are removed", || {
        domains.iter().all(|domain| domain.size_of(1) + domain.size_of(2) == 0)
    });
    assert!(strict.segments().is_empty() && start(&domains, config()).1.is_empty());
    let (loose, _) = start(&domains, Config { min_domains: 10, ..config() });
    let stored = append(&loose, &mixed()).unwrap();
    all_right(&loose, &stored);
}

#[test]
fn what_a_kill_left_behind_is_no_batch() {
    let folder = tempfile::tempdir().unwrap();
    let domains = in_files(&folder);
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &mixed()).unwrap();
    append(&striped, &[(500, 900)]).unwrap();
    drop(striped);
    // As after a kill in the middle of the second: nine have it, one has a torn file.
    for domain in 9..12 {
        std::fs::remove_file(file(&folder, domain, 2)).unwrap();
    }
    std::fs::write(folder.path().join("09/tmp-00000000000000aa-3"), "half an obj").unwrap();
    // While one is away it might have the tenth: the batch is kept, but cannot be read yet.
    domains[11].set_down(true);
    let (striped, found) = start(&domains, config());
    assert_eq!(found.len(), stored.len() + 1);
    drop(striped);
    assert!(file(&folder, 0, 2).exists());
    domains[11].set_down(false);
    let (striped, found) = start(&domains, config());
    assert_eq!(found, stored.iter().map(|stored| (stored.place, stored.meta)).collect::<Vec<_>>());
    assert!((0..SHARDS).all(|domain| !file(&folder, domain, 2).exists()));
    all_right(&striped, &stored);
}

#[test]
fn ten_domains_that_hold_a_batch_are_enough_for_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let domains = in_files(&folder);
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &mixed()).unwrap();
    drop(striped);
    for (a, b) in [(0, 1), (4, 9), (10, 11), (0, 11)] {
        for kind in ["down", "gone"] {
            for domain in [a, b] {
                match kind {
                    "down" => domains[domain].set_down(true),
                    _ => {
                        std::fs::rename(file(&folder, domain, 1), folder.path().join(format!("away-{domain}")))
                            .unwrap();
                    }
                }
            }
            let (striped, found) = start(&domains, config());
            assert_eq!(found.len(), stored.len());
            all_right(&striped, &stored);
            assert_eq!(striped.stats().backlog, if kind == "down" { 0 } else { 2 });
            for domain in [a, b] {
                domains[domain].set_down(false);
                let _ = std::fs::rename(folder.path().join(format!("away-{domain}")), file(&folder, domain, 1));
            }
        }
    }
    (0..3).for_each(|domain| domains[domain].set_down(true));
    assert!(matches!(over(&domains, config()).recover(&mut |_, _| ()), Err(Error::Unavailable(_))));
}

#[test]
fn a_deleted_segment_goes_from_domains_that_were_away_too() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &[(1, 100)]).unwrap();
    let kept = append(&striped, &[(2, 100)]).unwrap();
    domains[2].set_down(true);
    striped.delete(1).unwrap();
    assert!(matches!(striped.delete(1), Err(Error::Invalid(_))));
    assert!(whole(&striped, &stored[0]).is_err());
    assert_eq!(striped.segments().len(), 1);
    domains[2].set_down(false);
    assert!(domains[2].size_of(1) > 0);
    assert_eq!(striped.repair_step(9).unwrap(), Repaired { deleted: 1, ..Repaired::default() });
    assert_eq!(domains[2].size_of(1), 0);
    // The same when the debt is forgotten in between.
    domains[2].set_down(true);
    striped.delete(2).unwrap();
    domains[2].set_down(false);
    drop(striped);
    let (striped, found) = start(&domains, config());
    assert!(found.is_empty() && striped.segments().is_empty());
    assert_eq!(domains[2].size_of(2), 0);
    assert!(whole(&striped, &kept[0]).is_err());
}

#[test]
fn reads_that_have_begun_end_well() {
    let domains = in_memory();
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &[(1, 1000)]).unwrap();
    for domain in &domains {
        domain.set_delay(Duration::from_millis(60));
    }
    std::thread::scope(|scope| {
        let before: usize = domains.iter().map(|domain| domain.reads()).sum();
        let reading = scope.spawn(|| whole(&striped, &stored[0]));
        eventually("the read has begun", || domains.iter().map(|domain| domain.reads()).sum::<usize>() > before);
        striped.delete(1).unwrap();
        reading.join().unwrap().unwrap();
    });
}

#[test]
fn objects_of_another_store_are_not_its_own() {
    let domains = in_memory();
    let (ours, _) = start(&domains, config());
    let (theirs, _) = start(&domains, Config { media: 8, ..config() });
    let stored = append(&ours, &[(1, 1000)]).unwrap();
    assert!(matches!(append(&theirs, &[(1, 1000)]), Err(Error::Unavailable(said)) if said.contains("another object")));
    all_right(&ours, &stored);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let domains = in_memory();
    for min_domains in [0, 9, 13] {
        let all = std::array::from_fn(|at| domains[at].clone() as Arc<dyn Backend>);
        assert!(matches!(Striped::new(all, Config { min_domains, ..config() }), Err(Error::Invalid(_))));
    }
    let (striped, _) = start(&domains, config());
    let stored = append(&striped, &[(1, 1000)]).unwrap();
    let wrong = Record { meta: stored[0].meta, pieces: &[&[1, 2, 3]] };
    assert!(matches!(striped.append(&[wrong]), Err(Error::Invalid(_))));
    let mut into = [0; 10];
    let read = Read { place: stored[0].place, meta: stored[0].meta, start: 991, into: &mut into };
    assert!(matches!(striped.read(&mut [read])[0], Err(Error::Invalid(_))));
    // A place that holds another object, and one that there is not.
    let other = Place { offset: stored[0].place.offset + 1, ..stored[0].place };
    let nowhere = Place { segment: 99, offset: 0 };
    for place in [other, nowhere] {
        let mut into = vec![0; 1000];
        let read = Read { place, meta: stored[0].meta, start: 0, into: &mut into };
        assert!(striped.read(&mut [read])[0].is_err());
    }
    assert!(matches!(striped.records(99, &mut |_, _| ()), Err(Error::Invalid(_))));
}
