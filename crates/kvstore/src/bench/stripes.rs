//! Erasure coding on one core, and reads of stripes with one slow domain.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Figure, ROUNDS, SIZES, bytes, compared, median, meta, millis, must, shown};
use crate::backend::{Backend, Faulty, MountedDir};
use crate::checksum::checksum;
use crate::erasure::{DATA, SHARDS, Stripe, parity, rebuild};
use crate::error::Error;
use crate::media::striped::{Config, Striped};
use crate::media::{Media, Place, Read, Record};
use crate::object::Meta;

/// Bytes of data that a round codes: short enough to miss most of the pre-emptions of a busy machine.
const ROUND: usize = 64 << 20;

/// Objects, so that the slow domain has each position.
const OBJECTS: usize = 24;

/// Reads of a round.
const READS: usize = 120;

fn rate(name: String, each: usize, mut once: impl FnMut() -> Result<(), Error>) -> Result<Figure, Error> {
    let times = (ROUND / each).max(1);
    let mut rates = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        let begun = Instant::now();
        (0..times).try_for_each(|_| once())?;
        if round > 0 {
            rates.push((each * times) as f64 / begun.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(Figure { name, unit: "GB/s", value: median(&rates), beside: None, ratio: None })
}

pub(super) fn code() -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for size in SIZES {
        let shard = Stripe::of(size).shard();
        let mut shards: Vec<Vec<u8>> =
            (0..SHARDS).map(|at| (0..shard).map(|i| ((i + at) * 2_654_435_761) as u8).collect()).collect();
        let (data, ends) = shards.split_at_mut(DATA);
        let (p, q) = ends.split_at_mut(1);
        figures.push(rate(format!("10+2 encode of {}, one core", shown(size)), shard * DATA, || {
            parity(&std::array::from_fn(|at| black_box(data[at].as_slice())), &mut p[0], &mut q[0]);
            Ok(())
        })?);
        let (mut first, mut second) = (vec![1; shard], vec![1; shard]);
        let there = std::array::from_fn(|at| (at != 2 && at != 7).then_some(shards[at].as_slice()));
        figures.push(rate(format!("10+2 rebuild of two shards of {}, one core", shown(size)), shard * DATA, || {
            rebuild(black_box(&there), &mut [(2, &mut first), (7, &mut second)])
                .map_err(|_| Error::Unavailable("two losses of twelve are too many".to_owned()))
        })?);
        must(first == shards[2] && second == shards[7], "rebuild shards")?;
    }
    Ok(figures)
}

pub(super) fn slow_domain(base: &Path) -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for size in SIZES {
        let open =
            |at: usize| Ok(Arc::new(Faulty::new(Arc::new(MountedDir::open(&base.join(format!("{size}-{at}")))?))));
        let faulty: Vec<Arc<Faulty>> = (0..SHARDS).map(open).collect::<Result<_, Error>>()?;
        let domains = std::array::from_fn(|at| Arc::clone(&faulty[at]) as Arc<dyn Backend>);
        let striped = Striped::new(domains, Config::default())?;
        striped.recover(&mut |_, _| ())?;
        let data = bytes(size);
        let sum = checksum(&data);
        let pieces = [data.as_slice()];
        let metas: Vec<Meta> = (0..OBJECTS as u64).map(|number| meta(number, None, size, sum)).collect();
        let batch: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
        let places: Vec<Place> = striped.append(&batch)?;
        // Each domain takes some time, as a service does.
        for domain in &faulty {
            domain.set_delay(Duration::from_millis(2));
        }
        let mut into = vec![0; size];
        let mut once = |at: usize, slow: bool| {
            faulty[5].set_delay(Duration::from_millis(if slow { 50 } else { 2 }));
            let begun = Instant::now();
            let read = Read { place: places[at], meta: metas[at], start: 0, into: &mut into };
            striped.read(&mut [read]).into_iter().try_for_each(|result| result)?;
            Ok::<_, Error>(millis(begun.elapsed()))
        };
        let (mut evens, mut slows) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (mut even, mut slow) = (Vec::new(), Vec::new());
            for at in 0..READS {
                even.push(once(at % OBJECTS, false)?);
                slow.push(once(at % OBJECTS, true)?);
            }
            if round > 0 {
                evens.push(p99(&mut even));
                slows.push(p99(&mut slow));
            }
        }
        let name = format!("p99 of a striped read of {}, one domain 50 ms slow, beside none", shown(size));
        figures.push(compared(name, "ms", &slows, &evens));
    }
    Ok(figures)
}

fn p99(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[(times.len() * 99 / 100).min(times.len() - 1)]
}
