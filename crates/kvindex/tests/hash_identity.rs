//! What the chain hash tells apart, and fixed vectors that keep it from changing unnoticed.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use deepinfer_kvindex::{BlockHash, ChainHasher, Extra, ExtraKind, Root};
use proptest::prelude::*;

fn root() -> Root {
    Root {
        model: "org/model".into(),
        revision: "main".into(),
        weight_format: "bf16".into(),
        kv_format: "bf16".into(),
        numerics: "cpu/1/bf16".into(),
        hit_policy: "all".into(),
        block_tokens: 16,
        salt: Vec::new(),
    }
}

fn extra(kind: ExtraKind, position: u32, data: &[u8]) -> Extra {
    Extra { kind, position, data: data.to_vec() }
}

/// Stored hashes outlive a process: if this fails, raise `HASH_FORMAT`.
#[test]
fn hashes_equal_the_committed_vectors() {
    let tokens: Vec<u32> = (0..32).collect();
    let hasher = ChainHasher::new(&root());
    let plain = hasher.hash_all(&tokens, &[]);
    let salted = hasher.with_salt(b"tenant-a").hash_all(&tokens, &[]);
    let image = hasher.hash_all(&tokens, &[extra(ExtraKind::Image, 17, b"picture")]);
    let partial = hasher.extend(hasher.root(), &tokens[..5], &[]);
    let long = ChainHasher::new(&Root { block_tokens: 512, ..root() }).hash_all(&(0..512).collect::<Vec<_>>(), &[]);
    let all = [hasher.root(), plain[0], plain[1], salted[0], salted[1], image[0], image[1], partial, long[0]];
    let hex = all.map(|h| format!("{:032x}", h.0));
    assert_eq!(hex, VECTORS);
}

/// Computed from the written format with another BLAKE3 implementation.
const VECTORS: [&str; 9] = [
    "d1005fe34a04c39ca3731cafd705bb45",
    "d35ab8cbe88214bd0edc65aa470c9589",
    "0c2e1478df04ee91f6d2b5e653da9ecc",
    "b3fa630e4ed463ca311225eebd07d209",
    "3aeba7be08551e6d346fd90093975e82",
    "d35ab8cbe88214bd0edc65aa470c9589",
    "701cea9e64052edd07f00f901835d70e",
    "2b59c9bdb54b1c71ccb23366b505ca85",
    "6430d721c42cf75488d12c3a5544c254",
];

/// Blocks of each size that is hashed in lanes, an id too large for three bytes among them, and one size that is not.
#[test]
fn blocks_side_by_side_have_the_hashes_they_have_alone() {
    for size in [16, 32, 48, 64, 128, 256, 512] {
        let hasher = ChainHasher::new(&Root { block_tokens: size, ..root() });
        for count in 0..40u32 {
            let blocks: Vec<(BlockHash, Vec<u32>)> = (0..count)
                .map(|n| {
                    let wide = if n % 5 == 3 { 1 << 24 } else { 0 };
                    let tokens =
                        (0..size).map(|i| (i * 2_654_435 + n * 77) % 0xFF_FFFF + if i == size - 1 { wide } else { 0 });
                    (BlockHash(u128::from(n) * 0x1234_5678_9abc_def1), tokens.collect())
                })
                .collect();
            let alone: Vec<_> = blocks.iter().map(|(parent, tokens)| hasher.extend(*parent, tokens, &[])).collect();
            let mut together = Vec::new();
            hasher.extend_many(blocks.iter().map(|(parent, tokens)| (*parent, tokens.as_slice())), &mut together);
            assert_eq!(alone, together, "{count} blocks of {size}");
        }
    }
}

/// An id is cut to three bytes in a plain block only.
#[test]
fn ids_that_differ_beyond_three_bytes_have_different_hashes() {
    let hasher = ChainHasher::new(&root());
    for place in 0..16 {
        let mut seen = std::collections::HashSet::new();
        for high in [0, 1 << 24, 1 << 31, 0xFF << 24] {
            let mut tokens: Vec<u32> = (0..16).collect();
            tokens[place] |= high;
            assert!(seen.insert(hasher.extend(hasher.root(), &tokens, &[])), "{place} {high:x}");
        }
    }
}

#[test]
fn each_root_field_changes_root_and_hashes() {
    let tokens: Vec<u32> = (0..16).collect();
    let base = root();
    let variants = [
        base.clone(),
        Root { model: "org/model2".into(), ..base.clone() },
        Root { revision: "v2".into(), ..base.clone() },
        Root { weight_format: "q4".into(), ..base.clone() },
        Root { kv_format: "fp8".into(), ..base.clone() },
        Root { numerics: "cuda/1/bf16".into(), ..base.clone() },
        Root { hit_policy: "window".into(), ..base.clone() },
        Root { salt: b"s".to_vec(), ..base.clone() },
        // The same bytes, cut differently between neighbours.
        Root { model: "org/modelm".into(), revision: "ain".into(), ..base.clone() },
        Root { model: "org/mode".into(), revision: "lmain".into(), ..base.clone() },
        Root { weight_format: "bf16bf".into(), kv_format: "16".into(), ..base.clone() },
        Root { weight_format: String::new(), kv_format: "bf16bf16".into(), ..base.clone() },
        // The same text in another field.
        Root { hit_policy: String::new(), salt: b"all".to_vec(), ..base.clone() },
    ];
    let mut seen = HashMap::new();
    for variant in &variants {
        let hasher = ChainHasher::new(variant);
        for hash in [hasher.root(), hasher.hash_all(&tokens, &[])[0]] {
            assert_eq!(seen.insert(hash, variant.clone()), None, "{variant:?}");
        }
    }
    assert_ne!(ChainHasher::new(&Root { block_tokens: 32, ..base.clone() }).root(), ChainHasher::new(&base).root());
}

#[test]
fn changing_an_early_block_changes_every_later_hash() {
    let hasher = ChainHasher::new(&root());
    let tokens: Vec<u32> = (0..16 * 8).collect();
    let base = hasher.hash_all(&tokens, &[]);
    for block in 0..8 {
        let mut changed = tokens.clone();
        changed[block * 16 + 3] ^= 1;
        let other = hasher.hash_all(&changed, &[]);
        assert_eq!(base[..block], other[..block]);
        assert!(base[block..].iter().zip(&other[block..]).all(|(a, b)| a != b));
    }
}

/// Same last block and same length do not make two prefixes equal.
#[test]
fn equal_last_blocks_after_different_early_blocks_never_match() {
    let hasher = ChainHasher::new(&root());
    let tail: Vec<u32> = (100..116).collect();
    let chains: Vec<_> = (0..4u32)
        .map(|first| {
            let tokens: Vec<u32> = std::iter::repeat_n(first, 16).chain(tail.iter().copied()).collect();
            hasher.hash_all(&tokens, &[])[1]
        })
        .collect();
    for (i, a) in chains.iter().enumerate() {
        assert!(chains[i + 1..].iter().all(|b| a != b));
    }
}

#[test]
fn an_adapter_cannot_pass_for_a_salt_or_an_image() {
    let hasher = ChainHasher::new(&root());
    let tokens: Vec<u32> = (0..16).collect();
    let hash = |h: &ChainHasher, extras: &[Extra]| h.hash_all(&tokens, extras)[0];
    let all = [
        hash(&hasher, &[]),
        hash(&hasher.with_salt(b"x"), &[]),
        hash(&hasher, &[extra(ExtraKind::Adapter, 0, b"x")]),
        hash(&hasher, &[extra(ExtraKind::Image, 0, b"x")]),
        hash(&hasher, &[extra(ExtraKind::Image, 1, b"x")]),
        hash(&hasher, &[extra(ExtraKind::Other(1), 0, b"x")]),
        hash(&hasher, &[extra(ExtraKind::Other(2), 0, b"x")]),
        hash(&hasher, &[extra(ExtraKind::Adapter, 0, b"")]),
        hash(&hasher, &[extra(ExtraKind::Adapter, 0, b"x"), extra(ExtraKind::Adapter, 0, b"")]),
        hash(&hasher, &[extra(ExtraKind::Adapter, 0, b""), extra(ExtraKind::Adapter, 0, b"x")]),
    ];
    for (i, a) in all.iter().enumerate() {
        assert!(all[i + 1..].iter().all(|b| a != b), "variant {i}");
    }
}

#[test]
fn an_extra_marks_its_block_and_all_later_ones_whatever_the_order_given() {
    let hasher = ChainHasher::new(&root());
    let tokens: Vec<u32> = (0..16 * 4).collect();
    let (adapter, image) = (extra(ExtraKind::Adapter, 0, b"a"), extra(ExtraKind::Image, 40, b"i"));
    let plain = hasher.hash_all(&tokens, &[]);
    let with_image = hasher.hash_all(&tokens, std::slice::from_ref(&image));
    assert_eq!(plain[..2], with_image[..2]);
    assert!(plain[2] != with_image[2] && plain[3] != with_image[3]);
    let both = hasher.hash_all(&tokens, &[adapter.clone(), image.clone()]);
    assert_eq!(both, hasher.hash_all(&tokens, &[image.clone(), adapter.clone()]));
    assert!(both[0] != plain[0]);
    let mut parent = hasher.root();
    for (index, block) in tokens.chunks_exact(16).enumerate() {
        parent = hasher.extend_at(parent, index, block, &[image.clone(), adapter.clone()]);
        assert_eq!(parent, both[index]);
    }
    // An extra behind the last full block changes nothing yet.
    assert_eq!(plain, hasher.hash_all(&tokens, &[extra(ExtraKind::Image, 64, b"i")]));
}

#[test]
fn zero_block_size_hashes_nothing_instead_of_failing() {
    let hasher = ChainHasher::new(&Root { block_tokens: 0, ..root() });
    assert_eq!(hasher.hash_all(&[1, 2, 3], &[]), []);
    let _ = hasher.extend(hasher.root(), &[1], &[extra(ExtraKind::Image, 5, b"x")]);
}

#[test]
fn debug_output_does_not_show_the_salt() {
    let text = format!("{:?}", ChainHasher::new(&root()).with_salt(b"verysecret"));
    assert!(!text.contains("verysecret") && !text.contains("118, 101, 114"), "{text}");
}

type Key = (Root, Vec<u32>, Vec<(u8, u32, Vec<u8>)>);

fn short_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0..3u8, 0..3)
}

fn short_text() -> impl Strategy<Value = String> {
    "[ab]{0,3}"
}

fn key() -> impl Strategy<Value = Key> {
    let fields = (short_text(), short_text(), short_text(), short_text(), short_text(), short_text(), short_bytes());
    let extras = prop::collection::vec((0..3u8, 0..4u32, short_bytes()), 0..3);
    (fields, prop::collection::vec(0..2u32, 0..=4), extras).prop_map(|((m, r, w, k, n, h, salt), tokens, extras)| {
        let root = Root {
            model: m,
            revision: r,
            weight_format: w,
            kv_format: k,
            numerics: n,
            hit_policy: h,
            block_tokens: 4,
            salt,
        };
        (root, tokens, extras)
    })
}

fn hash_of((root, tokens, extras): &Key) -> BlockHash {
    let hasher = ChainHasher::new(root);
    let extras: Vec<_> = extras
        .iter()
        .map(|(kind, position, data)| {
            let kind = [ExtraKind::Image, ExtraKind::Adapter, ExtraKind::Other(1)][*kind as usize];
            extra(kind, *position, data)
        })
        .collect();
    hasher.extend(hasher.root(), tokens, &extras)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Fields made of few letters, so that most ways of running them together would collide.
    #[test]
    fn keys_collide_only_when_every_field_is_equal(keys in prop::collection::vec(key(), 500)) {
        let mut seen: HashMap<BlockHash, Key> = HashMap::new();
        for mut key in keys {
            // Extras enter in order of position.
            key.2.sort_by_key(|e| e.1);
            let other = seen.entry(hash_of(&key)).or_insert_with(|| key.clone());
            prop_assert_eq!(&*other, &key);
        }
    }
}
