#![allow(clippy::unwrap_used)]
use std::time::Duration;

use super::*;
use crate::backend::{Faulty, Memory, MountedDir};
use crate::key::{Key, Kind, ObjectId};
use crate::object::{Class, TenantId};

fn start(backend: &Arc<Faulty>) -> (Objects, Vec<(Place, Meta)>) {
    let objects = Objects::new(backend.clone(), 7).unwrap();
    let mut found = Vec::new();
    objects.recover(&mut |place, meta| found.push((place, meta))).unwrap();
    (objects, found)
}

fn bytes(key: u128, len: usize) -> Vec<u8> {
    (0..len).map(|at| (((at as u128 + 1) * (key + 3) * 2_654_435_761) >> 11) as u8).collect()
}

fn append(objects: &Objects, all: &[(u128, usize)]) -> Result<Vec<(Place, Meta)>, Error> {
    let data: Vec<Vec<u8>> = all.iter().map(|&(key, len)| bytes(key, len)).collect();
    let pieces: Vec<[&[u8]; 2]> = data.iter().map(|data| data.split_at(data.len() / 3)).map(|(a, b)| [a, b]).collect();
    let meta = |key, data: &[u8]| Meta {
        id: ObjectId { kind: Kind::Slice, key: Key(key) },
        parent: (key > 1).then(|| Key(key - 1)),
        tenant: TenantId(3),
        class: Class::Agent,
        len: data.len() as u32,
        checksum: checksum(data),
        written: 9,
    };
    let metas: Vec<Meta> = all.iter().zip(&data).map(|(&(key, _), data)| meta(key, data)).collect();
    let batch: Vec<_> = metas.iter().zip(&pieces).map(|(&meta, pieces)| Record { meta, pieces }).collect();
    Ok(objects.append(&batch)?.into_iter().zip(metas).collect())
}

fn read(objects: &Objects, (place, meta): (Place, Meta), range: std::ops::Range<usize>) -> Result<(), Error> {
    let mut into = vec![0xee; range.len()];
    let done = objects.read(&mut [Read { place, meta, start: range.start as u32, into: &mut into }]).remove(0);
    done.inspect(|()| assert!(into == bytes(meta.id.key.0, meta.len as usize)[range.clone()], "{} {range:?}", meta.id))
}

const OBJECTS: [(u128, usize); 5] = [(1, 0), (2, 1), (3, 64), (4, 1000), (5, 114_000)];

#[test]
fn what_is_appended_is_read_and_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let inner: [Arc<dyn Backend>; 2] = [Arc::new(Memory::new()), Arc::new(MountedDir::open(folder.path()).unwrap())];
    for inner in inner {
        let backend = Arc::new(Faulty::new(inner));
        let (objects, found) = start(&backend);
        assert!(found.is_empty() && objects.append(&[]).unwrap().is_empty());
        let mut stored = append(&objects, &OBJECTS).unwrap();
        stored.extend(append(&objects, &[(9, 5000)]).unwrap());
        // All in one call: one request for each segment.
        let before = backend.reads();
        let mut into: Vec<Vec<u8>> = stored.iter().map(|(_, meta)| vec![0; meta.len as usize]).collect();
        let mut reads: Vec<_> =
            stored.iter().zip(&mut into).map(|(&(place, meta), into)| Read { place, meta, start: 0, into }).collect();
        assert!(objects.read(&mut reads).iter().all(Result::is_ok));
        assert!(stored.iter().zip(&into).all(|((_, meta), into)| *into == bytes(meta.id.key.0, meta.len as usize)));
        assert_eq!(backend.reads() - before, 2);
        for stored in &stored {
            let len = stored.1.len as usize;
            for range in [0..len / 2, len / 3..len, len..len] {
                read(&objects, *stored, range).unwrap();
            }
        }
        let (again, found) = start(&backend);
        assert_eq!(found, stored);
        assert_eq!(again.segments(), objects.segments());
        let mut second = Vec::new();
        again.records(2, &mut |place, meta| second.push((place, meta))).unwrap();
        assert_eq!(second, stored[5..]);
        assert_eq!(append(&again, &[(11, 1)]).unwrap()[0].0.segment, 3);
        again.seal().unwrap();
        again.delete(1).unwrap();
        assert!(matches!(again.delete(1), Err(Error::Invalid(_))));
        assert!(read(&again, stored[3], 0..1000).is_err());
        read(&again, stored[5], 0..5000).unwrap();
    }
}

#[test]
fn what_is_not_whole_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let backend = Arc::new(Faulty::new(Arc::new(MountedDir::open(folder.path()).unwrap())));
    let (objects, _) = start(&backend);
    let stored = append(&objects, &OBJECTS).unwrap();
    let file = folder.path().join(Name::segment_of(7, 1).as_str());
    let original = std::fs::read(&file).unwrap();
    let at = stored[3].0.offset as usize * 64;
    for wrong in [at + 20, at + 128 + 500] {
        let mut bytes = original.clone();
        bytes[wrong] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert!(matches!(read(&objects, stored[3], 0..1000), Err(Error::Damaged(..))));
        read(&objects, stored[4], 0..114_000).unwrap();
    }
    std::fs::write(&file, &original[..at + 200]).unwrap();
    assert!(matches!(read(&objects, stored[3], 0..1000), Err(Error::Damaged(..))));
    // Without its footer it is no segment; it is not written over either.
    let (again, found) = start(&backend);
    assert!(found.is_empty());
    assert_eq!(append(&again, &[(1, 1)]).unwrap()[0].0.segment, 2);
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(read(&objects, stored[3], 0..1000), Err(Error::Damaged(..))));
}

#[test]
fn a_service_that_fails_is_unavailable_and_nothing_is_lost() {
    let backend = Arc::new(Faulty::new(Arc::new(Memory::new())));
    let (objects, _) = start(&backend);
    let stored = append(&objects, &OBJECTS).unwrap();
    backend.set_down(true);
    assert!(matches!(append(&objects, &[(7, 7)]), Err(Error::Unavailable(_))));
    assert!(matches!(read(&objects, stored[4], 0..9), Err(Error::Unavailable(_))));
    assert!(matches!(objects.delete(1), Err(Error::Unavailable(_))));
    assert!(Objects::new(backend.clone(), 7).unwrap().recover(&mut |_, _| ()).is_err());
    backend.set_down(false);
    read(&objects, stored[4], 0..114_000).unwrap();
    objects.delete(1).unwrap();
    // Another writer's object of the same number.
    let (one, two) = (start(&backend).0, start(&backend).0);
    append(&one, &[(1, 10)]).unwrap();
    assert!(matches!(append(&two, &[(2, 10)]), Err(Error::Unavailable(said)) if said.contains("another object")));
}

#[test]
fn a_delete_waits_for_reads_that_have_begun() {
    let backend = Arc::new(Faulty::new(Arc::new(Memory::new())));
    let (objects, _) = start(&backend);
    let stored = append(&objects, &[(1, 1000)]).unwrap();
    backend.set_delay(Duration::from_millis(60));
    std::thread::scope(|scope| {
        let before = backend.reads();
        let reading = scope.spawn(|| read(&objects, stored[0], 0..1000));
        while backend.reads() == before {
            std::thread::yield_now();
        }
        objects.delete(1).unwrap();
        reading.join().unwrap().unwrap();
    });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (objects, _) = start(&Arc::new(Faulty::new(Arc::new(Memory::new()))));
    let stored = append(&objects, &[(1, 1000)]).unwrap();
    assert!(matches!(objects.append(&[Record { meta: stored[0].1, pieces: &[&[1]] }]), Err(Error::Invalid(_))));
    assert!(matches!(read(&objects, stored[0], 991..1001), Err(Error::Invalid(_))));
    let other = Place { offset: stored[0].0.offset + 1, ..stored[0].0 };
    assert!(matches!(read(&objects, (other, stored[0].1), 0..10), Err(Error::Damaged(..))));
    assert!(matches!(objects.records(9, &mut |_, _| ()), Err(Error::Invalid(_))));
}

#[test]
fn stores_over_one_back_end_keep_apart_and_read_each_other() {
    let backend: Arc<dyn Backend> = Arc::new(Memory::new());
    let store = |media| {
        let objects = Objects::new(Arc::clone(&backend), media).unwrap();
        let mut found = Vec::new();
        objects.recover(&mut |place, meta| found.push((place, meta))).unwrap();
        (objects, found)
    };
    let (one, two) = (store(1).0, store(2).0);
    let (of_one, of_two) = (append(&one, &OBJECTS).unwrap(), append(&two, &[(9, 500)]).unwrap());
    assert_eq!(of_one[0].0.segment, of_two[0].0.segment, "numbers are each store's own");
    assert_eq!((store(1).1, store(2).1), (of_one.clone(), of_two));
    let (place, meta) = of_one[4];
    let mut into = vec![0; meta.len as usize];
    assert!(two.read_of(1, &mut [Read { place, meta, start: 0, into: &mut into }])[0].is_ok());
    assert_eq!(into, bytes(5, 114_000));
    // Another store's id, a place that is none, a segment that is gone.
    let mut wrong = |media, place| two.read_of(media, &mut [Read { place, meta, start: 0, into: &mut into }]).remove(0);
    assert!(matches!(wrong(2, place), Err(Error::Damaged(..))));
    assert!(matches!(wrong(1, Place { offset: place.offset + 1, ..place }), Err(Error::Damaged(..))));
    one.delete(place.segment).unwrap();
    assert!(matches!(wrong(1, place), Err(Error::Damaged(..))));
    read(&two, store(2).1[0], 0..500).unwrap();
}
