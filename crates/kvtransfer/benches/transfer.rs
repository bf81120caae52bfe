//! Gigabytes a second of each part of a hand-over, beside a plain copy. `cargo bench -p deepinfer-kvtransfer`
//!
//! Source and destination are touched before; the best and the median of the rounds. Owner and puller are two ends of one process.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::{Config, KvTransfer, SharedMemory, Target, Tcp, TcpAddress};

const ROUNDS: usize = 15;

fn row(name: &str, bytes: usize, mut round: impl FnMut()) {
    round();
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort();
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    println!(
        "{name:<28} {:>4} MiB   best {:>6.2}   median {:>6.2} GB/s",
        bytes >> 20,
        rate(times[0]),
        rate(times[ROUNDS / 2])
    );
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
