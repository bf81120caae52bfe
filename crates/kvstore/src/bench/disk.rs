//! Puts beside the same bytes with the same syncs, gets beside `pread` of the same ranges.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::{Figure, SIZES, beside, bytes, key, meta, must, shown};
use crate::checksum::checksum;
use crate::error::Error;
use crate::key::{Kind, ObjectId};
use crate::media::local::{Local, LocalConfig};
use crate::media::{ALIGN, Media, Place, Record};
use crate::object::{Meta, TenantId};
use crate::record::Header;
use crate::root::Root;
use crate::store::{Got, Put, Rule, Store, StoreConfig, Want};

/// Bytes of a batch, about: what an engine gives at once.
const BATCH: usize = 8 << 20;

pub(super) fn open(path: &Path) -> Result<(Arc<Store>, Arc<Local>), Error> {
    let root = Root::open(path)?;
    let media = Arc::new(Local::open(&root, LocalConfig::default())?);
    let config = StoreConfig { capacity: 1 << 40, ..StoreConfig::default() };
    let store = Store::open(root, Arc::clone(&media) as Arc<dyn Media>, config)?;
    Ok((Arc::new(store), media))
}

/// Puts `count` objects of the same bytes, from `first` on.
fn put_batch(store: &Store, first: u64, count: u64, data: &[u8], sum: u64) -> Result<(), Error> {
    let pieces = [data];
    let metas: Vec<Meta> = (first..first + count).map(|number| meta(number, None, data.len(), sum)).collect();
    let records: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
    must(store.put(&records, Rule::Exact).iter().all(Put::is_there), "put an object")
}

pub(super) fn put(base: &Path, round_bytes: u64) -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for size in SIZES {
        let batch = (BATCH / size).max(1) as u64;
        let batches = (round_bytes / (batch * size as u64)).max(1);
        let (store, _) = open(&base.join(format!("put-{size}")))?;
        let path = base.join("plain");
        let plain = OpenOptions::new().write(true).create(true).truncate(true).open(&path);
        let plain = plain.map_err(Error::io("create a file to compare with"))?;
        let data = bytes(size);
        let sum = checksum(&data);
        let (mut number, mut end) = (0, 0);
        figures.push(beside(
            format!("PUT {}, {batch} a batch, beside pwritev + fdatasync", shown(size)),
            size * (batch * batches) as usize,
            || {
                (0..batches).try_for_each(|_| {
                    number += batch;
                    put_batch(&store, number - batch, batch, &data, sum)
                })
            },
            || {
                (0..batches).try_for_each(|_| {
                    let slices: Vec<IoSlice<'_>> = (0..batch).map(|_| IoSlice::new(&data)).collect();
                    let written =
                        rustix::io::pwritev(&plain, &slices, end).map_err(|error| Error::io("write")(error.into()))?;
                    must(written == size * batch as usize, "write all at once")?;
                    end += written as u64;
                    plain.sync_data().map_err(Error::io("sync"))
                })
            },
        )?);
        drop(plain);
        std::fs::remove_file(path).map_err(Error::io("delete the file compared with"))?;
    }
    Ok(figures)
}

pub(super) fn get(base: &Path, round_bytes: u64) -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for size in SIZES {
        let path = base.join(format!("get-{size}"));
        let (store, media) = open(&path)?;
        let count = (round_bytes / size as u64).max(2);
        let mut data = bytes(size);
        for number in 0..count {
            // Bytes of their own, so that nothing is read from the processor's caches.
            data[..8].copy_from_slice(&number.to_le_bytes());
            put_batch(&store, number, 1, &data, checksum(&data))?;
        }
        media.seal()?;
        let mut order: Vec<u64> = (0..count).collect();
        let mut state = 9u64;
        for at in (1..order.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            order.swap(at, (state >> 33) as usize % (at + 1));
        }
        let places: Vec<Place> = order.iter().filter_map(|&number| store.place(Kind::Block, key(number))).collect();
        must(places.len() == order.len(), "find its objects")?;
        let most = places.iter().map(|place| place.segment).max().unwrap_or(0);
        let file = |number: u32| {
            let path = path.join("segments").join(format!("{number:08x}.seg"));
            File::open(&path).map_err(Error::io(format!("open {}", path.display())))
        };
        let files: Vec<File> = (1..=most).map(file).collect::<Result<_, _>>()?;
        // Both sides read into the same memory.
        let buffer = RefCell::new(vec![1u8; size]);
        figures.push(beside(
            format!("GET {}, random order, warm, beside pread", shown(size)),
            size * order.len(),
            || {
                let mut buffer = buffer.borrow_mut();
                order.iter().try_for_each(|&number| {
                    let id = ObjectId { kind: Kind::Block, key: key(number) };
                    let got = store.get(TenantId(0), &mut [Want { id, start: 0, into: &mut buffer }]);
                    must(got.iter().all(Got::is_hit), "read an object")
                })
            },
            || {
                let mut buffer = buffer.borrow_mut();
                places.iter().try_for_each(|place| {
                    let at = u64::from(place.offset) * ALIGN + Header::BYTES as u64;
                    files[place.segment as usize - 1].read_exact_at(&mut buffer, at).map_err(Error::io("read"))
                })
            },
        )?);
    }
    Ok(figures)
}
