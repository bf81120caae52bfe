//! Policies on an hour of real conversations (`tests/data/mooncake_conversation.txt`): known hit rates, and what the default policy gains.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::sync::OnceLock;

use deepinfer_kvstore::policy::simulate::{Count, Trace, replay};
use deepinfer_kvstore::policy::{HalfLives, Lifetimes, Lru, MarginalHit, Policy, PolicyKind, Ttl};

fn trace() -> &'static Trace {
    static TRACE: OnceLock<Trace> = OnceLock::new();
    TRACE.get_or_init(|| Trace::parse(include_str!("data/mooncake_conversation.txt")).unwrap())
}

fn counts(policy: Box<dyn Policy>, capacity: usize) -> Vec<Count> {
    replay(trace(), policy, Lifetimes::default(), capacity, 1000)
}

fn rate(counts: &[Count]) -> f64 {
    counts.iter().fold(Count::default(), |sum, &count| sum + count).rate()
}

/// To so many digits after the point.
fn digits(value: f64, count: usize) -> String {
    format!("{value:.count$}")
}

#[test]
fn the_trace_is_whole() {
    let requests = &trace().requests;
    assert_eq!(requests.len(), 12_031);
    assert_eq!(requests.iter().map(|request| request.blocks.len()).sum::<usize>(), 288_500);
    assert_eq!(requests.iter().flat_map(|request| &request.blocks).max(), Some(&182_789));
    assert_eq!(requests[requests.len() - 1].millis, 3_536_999);
    for bad in ["", "x +1", "0 +x", "0 5*", "0 4294967295*2", "0 +4000000000"] {
        assert!(Trace::parse(bad).is_err() || bad.is_empty(), "{bad}");
    }
}

#[test]
fn lru_has_its_known_hit_rates() {
    let known = [
        (100, "0.0418"),
        (1_000, "0.0445"),
        (3_000, "0.0653"),
        (5_000, "0.1118"),
        (10_000, "0.2116"),
        (20_000, "0.2878"),
        (30_000, "0.3257"),
        (50_000, "0.3546"),
        (100_000, "0.3637"),
        (150_000, "0.3660"),
        (usize::MAX, "0.3664"),
    ];
    for (capacity, expected) in known {
        assert_eq!(digits(rate(&counts(Box::new(Lru::new()), capacity)), 4), expected, "{capacity} blocks");
    }
}

#[test]
fn times_to_live_have_their_known_hit_rates() {
    // Of an independent count, to the digits it was published with; 0.36349 was rounded twice there.
    for (seconds, expected, published) in
        [(60, "0.1034", 10.3), (300, "0.2877", 28.8), (600, "0.3434", 34.3), (1_800, "0.3635", 36.4)]
    {
        let lifetimes = Lifetimes { chat: 1000 * seconds, agent: 1, other: 1 };
        let found = rate(&replay(trace(), Box::new(Ttl::new(lifetimes)), lifetimes, usize::MAX, 1));
        assert_eq!(digits(found, 4), expected, "{seconds} s");
        assert!((100.0 * found - published).abs() < 0.051, "{seconds} s: {found}");
    }
}

const SIZES: [usize; 6] = [1_000, 2_000, 5_000, 10_000, 20_000, 50_000];
const HALF_LIVES: [f64; 5] = [75.0, 150.0, 300.0, 600.0, 1_200.0];

/// The half-life is chosen on the first half of the trace, and the policy is held to its promise on the second half and on the whole.
#[test]
fn the_default_beats_lru_on_the_half_it_was_not_chosen_on() {
    let half = trace().requests.len() / 2;
    let infinite = rate(&counts(Box::new(Lru::new()), usize::MAX));
    let parts = |counts: &[Count]| [rate(&counts[..half]), rate(&counts[half..]), rate(counts)];
    println!("blocks: LRU -> default (gain) on the first half, on the second, on the whole");
    for size in SIZES {
        let lru = parts(&counts(Box::new(Lru::new()), size));
        let ours = parts(&counts(PolicyKind::default().build(Lifetimes::default()), size));
        let cells = lru
            .iter()
            .zip(&ours)
            .map(|(lru, ours)| format!("{lru:.4} -> {ours:.4} ({:+.1} %)", 100.0 * (ours / lru - 1.0)));
        println!("{size:>6}: {}", cells.collect::<Vec<_>>().join(", "));
        for (lru, ours) in lru.into_iter().zip(ours).skip(1) {
            assert!(ours >= lru, "{size} blocks: {ours} < {lru}");
            assert!(lru >= 0.75 * infinite || ours >= 1.05 * lru, "{size} blocks: {ours} is not 5 % above {lru}");
        }
        // Where it was chosen on nothing is promised; where everything fits for long the two are the same but for a few blocks.
        assert!(ours[0] >= 0.999 * lru[0], "{size} blocks: {} < {}", ours[0], lru[0]);
    }
}

/// The default half-life is the one whose gains over LRU on the first half, over all sizes, multiply to the most.
#[test]
fn the_half_life_is_the_best_of_the_first_half() {
    let half = trace().requests.len() / 2;
    let first = trace().part(0..half);
    let of = |policy, size| rate(&replay(&first, policy, Lifetimes::default(), size, 1000));
    // At 50,000 blocks all are the same.
    let lru = SIZES[..5].iter().map(|&size| (size, of(Box::new(Lru::new()), size))).collect::<Vec<_>>();
    let gain = |seconds| -> f64 {
        lru.iter().map(|&(size, lru)| of(Box::new(MarginalHit::new(HalfLives::all(seconds))), size) / lru).product()
    };
    let gains = HALF_LIVES.map(gain);
    println!("{HALF_LIVES:?} s: {gains:.3?}");
    let best = HALF_LIVES.into_iter().zip(gains).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    assert_eq!(HalfLives::default(), HalfLives::all(best));
}
