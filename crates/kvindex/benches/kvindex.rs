//! `cargo bench -p deepinfer-kvindex [-- --json]`: chain hash, prefix match, turnover of blocks.
//!
//! Each row is the best of five runs by median, with the p99 and the maximum of that run, in microseconds.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use deepinfer_kvindex::{Block, BlockHash, BlockPool, ChainHasher, Fence, Owner, PoolConfig, PoolGroup, Root, StepId};

const RUNS: usize = 5;
const NOW: StepId = StepId(1);
const RULE: &str = "\
Counted: hash = hashing full blocks of fresh tokens into a reused vector, per 1,024 tokens. match = hashes given, longest
prefix found, one reference taken on it and its block ids gathered. turnover = one block evicted, allocated, published and
its predecessor's chain released, per block. Not counted: hashing in match and turnover; dropping the reference after a
match. Cold: each sample takes another chain of the pool in a fixed shuffled order, so the chain was last touched a whole
pool ago. Flushed: besides, 64 MiB are written between samples. Contiguous: a chain's blocks have neighbouring ids;
interleaved: neighbouring ids belong to different chains, the worst layout. Second holder: the chain is referenced already.";

struct Row {
    what: &'static str,
    block: usize,
    tokens: usize,
    pool: u32,
    median: f64,
    p99: f64,
    max: f64,
    bar: Option<f64>,
}

struct Samples(Vec<f64>);

impl Samples {
    /// Takes `count` samples; the closure returns microseconds.
    fn take(count: usize, mut sample: impl FnMut(usize) -> f64) -> Self {
        let mut all: Vec<f64> = (0..count).map(&mut sample).collect();
        all.sort_by(f64::total_cmp);
        Self(all)
    }

    fn at(&self, quantile: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * quantile).round() as usize]
    }
}

fn best(mut run: impl FnMut() -> Samples) -> (f64, f64, f64) {
    (0..RUNS).map(|_| run()).map(|s| (s.at(0.5), s.at(0.99), s.at(1.0))).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / 1000.0
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        order
    }
}

fn hasher(block: usize) -> ChainHasher {
    ChainHasher::new(&Root { model: "bench".into(), block_tokens: block as u32, ..Root::default() })
}

fn hash_row(block: usize) -> Row {
    const TOKENS: usize = 8192;
    let hasher = hasher(block);
    let mut random = Random(7);
    let mut tokens: Vec<u32> = (0..TOKENS).map(|_| random.next() as u32 % 50_000).collect();
    let mut out = Vec::with_capacity(TOKENS / block);
    let (median, p99, max) = best(|| {
        Samples::take(400, |i| {
            tokens[i % block] = i as u32;
            out.clear();
            let start = Instant::now();
            hasher.hash_into(black_box(&tokens), &[], &mut out);
            let time = micros(start);
            black_box(&out);
            time * 1024.0 / TOKENS as f64
        })
    });
    let bar = (block == 64).then_some(5.5);
    Row { what: "hash per 1k tokens", block, tokens: 1024, pool: 0, median, p99, max, bar }
}

#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Contiguous,
    Interleaved,
}

struct Filled {
    pool: BlockPool,
    chains: Vec<Vec<BlockHash>>,
    leaves: Vec<Block>,
}

/// A pool full of cached chains of `tokens` tokens each.
fn filled(pool_blocks: u32, block: usize, tokens: usize, layout: Layout) -> Filled {
    let groups = vec![PoolGroup { num_pages: pool_blocks + 1, pages_per_block: 1 }];
    let mut pool = BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 0 }).unwrap();
    let length = tokens / block;
    let count = pool_blocks as usize / length;
    let mut random = Random(11);
    let root = hasher(block);
    // Content does not matter to a match: spread bits are enough and quicker to make than real hashes.
    let mut word = || u128::from(random.next()) << 64 | u128::from(random.next());
    let chains: Vec<Vec<BlockHash>> =
        (0..count).map(|_| (0..length).map(|_| BlockHash(word() | 1)).collect()).collect();
    let mut cursors = vec![Block::NULL; count];
    let mut publish = |chain: usize, depth: usize, pool: &mut BlockPool| {
        let new = pool.alloc(NOW, Owner::Sequence).unwrap();
        cursors[chain] = pool.publish(new, chains[chain][depth], cursors[chain], root.root()).unwrap().cursor;
    };
    match layout {
        Layout::Contiguous => (0..count).for_each(|c| (0..length).for_each(|d| publish(c, d, &mut pool))),
        Layout::Interleaved => (0..length).for_each(|d| (0..count).for_each(|c| publish(c, d, &mut pool))),
    }
    for &cursor in &cursors {
        pool.unpin(cursor, Owner::Sequence, Fence::Open).unwrap();
    }
    Filled { pool, chains, leaves: cursors }
}

#[derive(Clone, Copy)]
struct Match {
    what: &'static str,
    pool: u32,
    layout: Layout,
    flush: bool,
    second: bool,
    bar: Option<f64>,
}

const COLD: Match =
    Match { what: "match, cold", pool: 50_000, layout: Layout::Contiguous, flush: false, second: false, bar: None };

fn match_row(block: usize, tokens: usize, kind: Match) -> Row {
    let Filled { mut pool, chains, leaves } = filled(kind.pool, block, tokens, kind.layout);
    if kind.second {
        for &leaf in &leaves {
            pool.pin(leaf, Owner::Sequence).unwrap();
        }
    }
    let order = Random(13).shuffled(chains.len());
    let mut ids = Vec::with_capacity(tokens / block);
    let mut junk = vec![0u64; if kind.flush { 8 << 20 } else { 0 }];
    let count = if kind.flush { 100 } else { 4000 };
    let (median, p99, max) = best(|| {
        Samples::take(count, |i| {
            for word in &mut junk {
                *word = word.wrapping_add(i as u64);
            }
            black_box(&junk);
            let hashes = &chains[order[i % order.len()]];
            ids.clear();
            let start = Instant::now();
            let hit = pool.find_prefix(black_box(hashes));
            pool.pin_chain(hit.leaf, Owner::Sequence, &mut ids).unwrap();
            let time = micros(start);
            assert_eq!((hit.blocks, ids.len()), (hashes.len(), hashes.len()));
            pool.unpin(hit.leaf, Owner::Sequence, Fence::Open).unwrap();
            time
        })
    });
    Row { what: kind.what, block, tokens, pool: kind.pool, median, p99, max, bar: kind.bar }
}

/// Chains of 8k tokens that come and go in a full pool, 64 blocks a sample.
fn turnover_row(block: usize) -> Row {
    const BATCH: usize = 64;
    let pool_blocks = 50_000;
    let length = 8192 / block;
    let Filled { mut pool, .. } = filled(pool_blocks, block, 8192, Layout::Contiguous);
    let mut random = Random(17);
    let root = hasher(block).root();
    let mut fresh: Vec<BlockHash> = Vec::with_capacity(BATCH);
    let (mut cursor, mut depth) = (Block::NULL, 0);
    while pool.counts(0).free > 0 {
        pool.alloc(NOW, Owner::Sequence).unwrap();
    }
    let (median, p99, max) = best(|| {
        Samples::take(2000, |_| {
            fresh.clear();
            fresh
                .extend((0..BATCH).map(|_| BlockHash(u128::from(random.next()) << 64 | u128::from(random.next()) | 1)));
            let start = Instant::now();
            for &hash in &fresh {
                let new = pool.alloc(NOW, Owner::Sequence).unwrap();
                cursor = pool.publish(new, hash, cursor, root).unwrap().cursor;
                depth += 1;
                if depth == length {
                    pool.unpin(cursor, Owner::Sequence, Fence::Open).unwrap();
                    (cursor, depth) = (Block::NULL, 0);
                }
            }
            micros(start) / BATCH as f64
        })
    });
    Row { what: "turnover per block", block, tokens: block, pool: pool_blocks, median, p99, max, bar: None }
}

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let mut rows: Vec<Row> = [16, 64, 128].into_iter().map(hash_row).collect();
    for tokens in [1024, 8192, 65_536] {
        rows.push(match_row(64, tokens, Match { bar: (tokens == 65_536).then_some(6.0), ..COLD }));
    }
    let worst = Match { what: "match, cold, interleaved", layout: Layout::Interleaved, ..COLD };
    let others = [
        worst,
        Match { what: "match, flushed", flush: true, ..COLD },
        Match { what: "match, cold, second holder", second: true, ..COLD },
        Match { what: "match, cold", pool: 400_000, ..COLD },
        Match { pool: 400_000, ..worst },
    ];
    rows.extend(others.map(|kind| match_row(64, 65_536, kind)));
    rows.extend([16, 128].map(|block| match_row(block, 65_536, COLD)));
    rows.extend([16, 64].map(turnover_row));

    let threads = std::thread::available_parallelism().map_or(0, usize::from);
    let build = if cfg!(debug_assertions) { "debug: figures mean nothing" } else { "release" };
    let machine = format!("{} {}, {threads} threads, {build}", std::env::consts::ARCH, std::env::consts::OS);
    if json {
        let mut out = String::new();
        for row in &rows {
            let comma = if out.is_empty() { "" } else { "," };
            write!(
                out,
                r#"{comma}{{"what":"{}","block":{},"tokens":{},"pool_blocks":{},"us_median":{:.3},"us_p99":{:.3},"us_max":{:.3},"bar_us":{}}}"#,
                row.what,
                row.block,
                row.tokens,
                row.pool,
                row.median,
                row.p99,
                row.max,
                row.bar.map_or("null".to_owned(), |b| b.to_string())
            )
            .unwrap();
        }
        println!(r#"{{"machine":"{machine}","runs":{RUNS},"rows":[{out}]}}"#);
        return;
    }
    println!("{RULE}\n\n{machine}; best of {RUNS} runs, µs\n");
    println!("{:<30}{:>6}{:>8}{:>9}{:>10}{:>10}{:>10}  bar", "", "block", "tokens", "pool", "median", "p99", "max");
    for row in &rows {
        let bar = row
            .bar
            .map_or(String::new(), |bar| format!("<= {bar}: {}", if row.median <= bar { "met" } else { "missed" }));
        println!(
            "{:<30}{:>6}{:>8}{:>9}{:>10.3}{:>10.3}{:>10.3}  {bar}",
            row.what, row.block, row.tokens, row.pool, row.median, row.p99, row.max
        );
    }
}
