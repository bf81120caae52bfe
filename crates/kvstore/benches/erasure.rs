//! Gigabytes of data a second of encoding and of rebuilding two lost data shards on one core, by each path this processor has, beside a
//! copy of the same data. `cargo bench -p deepinfer-kvstore --bench erasure`
//!
//! Counted are the ten data shards. Buffers are touched before. Wall: best and median of the rounds; CPU: by the processor time of the
//! process, best of the rounds: what a busy machine leaves comparable.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use deepinfer_kvstore::erasure::{DATA, Path, SHARDS, Stripe, parity_by, rebuild_by};

const ROUNDS: usize = 15;
/// Bytes of data a round works on: short enough to miss most of the pre-emptions of a busy machine.
const ROUND: usize = 64 << 20;

/// Processor time of this process.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one `timespec`, which is there.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn row(name: &str, bytes: usize, mut once: impl FnMut()) {
    let times = (ROUND / bytes).max(1);
    once();
    let mut walls = Vec::new();
    let mut cpus = Vec::new();
    for _ in 0..ROUNDS {
        let (start, before) = (Instant::now(), cpu());
        (0..times).for_each(|_| once());
        walls.push(start.elapsed());
        cpus.push(cpu().saturating_sub(before));
    }
    walls.sort();
    cpus.sort();
    let rate = |time: Duration| (bytes * times) as f64 / time.as_secs_f64() / 1e9;
    let (best, median, cpu) = (rate(walls[0]), rate(walls[ROUNDS / 2]), rate(cpus[0]));
    println!("  {name:<28} best {best:>6.2}   median {median:>6.2}   CPU {cpu:>6.2} GB/s");
}

fn main() {
    for (name, len) in
        [("an object of 1,415,040 B", 1_415_040), ("an object of 114,000 B", 114_000), ("shards of 1 MiB", DATA << 20)]
    {
        let shard = Stripe::of(len).shard();
        println!("{name}: shards of {shard} B");
        let mut shards: Vec<Vec<u8>> =
            (0..SHARDS).map(|at| (0..shard).map(|i| ((i + at) * 2_654_435_761) as u8).collect()).collect();
        let mut copies = shards.clone();
        row("memcpy", shard * DATA, || {
            for (copy, shard) in copies.iter_mut().zip(&shards).take(DATA) {
                black_box(copy).copy_from_slice(black_box(shard));
            }
        });
        for path in Path::available() {
            let (data, parity) = shards.split_at_mut(DATA);
            let (p, q) = parity.split_at_mut(1);
            row(&format!("{path:?} encode"), shard * DATA, || {
                parity_by(path, &std::array::from_fn(|at| black_box(data[at].as_slice())), &mut p[0], &mut q[0]);
            });
            let (mut first, mut second) = (vec![1; shard], vec![1; shard]);
            let there = std::array::from_fn(|at| (at != 2 && at != 7).then_some(shards[at].as_slice()));
            row(&format!("{path:?} rebuild of two"), shard * DATA, || {
                rebuild_by(path, black_box(&there), &mut [(2, &mut first), (7, &mut second)]).unwrap();
            });
            assert!(first == shards[2] && second == shards[7]);
            let there = std::array::from_fn(|at| (at != 2).then_some(shards[at].as_slice()));
            row(&format!("{path:?} rebuild of one"), shard * DATA, || {
                rebuild_by(path, black_box(&there), &mut [(2, &mut first)]).unwrap();
            });
        }
    }
}
