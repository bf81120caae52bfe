//! Gigabytes a second of each part of a hand-over, beside a plain copy. `cargo bench -p deepinfer-kvtransfer`
//!
//! Source and destination are touched before. Wall: best and median of the rounds. CPU: bytes by the processor time of the whole process,
//! owner and puller, best of the rounds: what a busy machine leaves comparable.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::{Config, KvTransfer, SharedMemory, Target, Tcp, TcpAddress};

const ROUNDS: usize = 15;

/// Processor time of this process.
fn cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one `timespec`, which is there.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn row(name: &str, bytes: usize, mut round: impl FnMut()) {
    round();
    let mut walls = Vec::new();
    let mut cpus = Vec::new();
    for _ in 0..ROUNDS {
        let (start, before) = (Instant::now(), cpu());
        round();
        walls.push(start.elapsed());
        cpus.push(cpu().saturating_sub(before));
    }
    walls.sort();
    cpus.sort();
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    let (best, median, cpu) = (rate(walls[0]), rate(walls[ROUNDS / 2]), rate(cpus[0]));
    println!("{name:<28} {:>4} MiB   best {best:>6.2}   median {median:>6.2}   CPU {cpu:>6.2} GB/s", bytes >> 20);
}

fn small(name: &str, mut round: impl FnMut()) {
    let mut times: Vec<Duration> = (0..300)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort();
    println!(
        "{name:<28}           best {:>6.1}   median {:>6.1} µs",
        times[0].as_secs_f64() * 1e6,
        times[150].as_secs_f64() * 1e6
    );
}

fn main() {
    let lease = Duration::from_secs(600);
    for size in [16usize << 20, 256 << 20] {
        let source: Vec<u8> = (0..size).map(|at| (at * 2_654_435_761) as u8).collect();
        let mut into = vec![1u8; size];
        row("memcpy", size, || black_box(&mut into).copy_from_slice(black_box(&source)));
        row("XXH3-64", size, || {
            let mut state = xxhash_rust::xxh3::Xxh3::new();
            source.chunks(256 << 10).for_each(|chunk| state.update(chunk));
            black_box(state.digest());
        });
        row("BLAKE3", size, || {
            black_box(blake3::hash(&source));
        });
        let ends: [(&str, Box<dyn KvTransfer>); 2] = [
            ("shm", Box::new(SharedMemory::new(&Config::default()).unwrap())),
            ("tcp", Box::new(Tcp::new(&Config::default(), &TcpAddress::default()).unwrap())),
        ];
        for (name, end) in &ends {
            row(&format!("{name} offer + release"), size, || {
                let ticket = end.offer(b"", &[&source], lease).unwrap();
                end.release(&ticket).unwrap();
            });
            let ticket = end.offer(b"", &[&source], lease).unwrap();
            row(&format!("{name} pull"), size, || {
                end.pull(&ticket, Target::Buffers(&mut [&mut into])).unwrap();
            });
            assert!(into == source);
            end.release(&ticket).unwrap();
            if size == 16 << 20 {
                small(&format!("{name} 4 KiB offer+pull+release"), || {
                    let ticket = end.offer(b"", &[&source[..4096]], lease).unwrap();
                    end.pull(&ticket, Target::Buffers(&mut [&mut into[..4096]])).unwrap();
                    end.release(&ticket).unwrap();
                });
            }
        }
    }
}
