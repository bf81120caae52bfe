//! Every word is read as it is written; whatever is none is refused without a panic.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

use crate::wire::{CheckRequest, decode_numbers, encode_numbers};

fn id(number: u64) -> ObjectId {
    ObjectId { kind: if number.is_multiple_of(2) { Kind::Block } else { Kind::Slice }, key: Key(number.into()) }
}

#[test]
fn words_are_read_as_they_are_written() {
    for (op, byte) in Op::ALL.into_iter().zip(1..) {
        for (status, code) in Status::ALL.into_iter().zip(0..) {
            let header = Header { op, status, number: 0x0102_0304, len: 77 };
            assert_eq!(header.encode()[4..6], [byte, code]);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }
    let who = Hello { tenant: "müller".into(), fingerprint: [7; 16], block_tokens: 128, first_stays: true };
    let greeting = Greeting { version: VERSION, who };
    let bytes = greeting.encode();
    let (fixed, tenant) = bytes.split_first_chunk().unwrap();
    assert_eq!(Greeting::tenant_len(fixed), Ok(tenant.len()));
    assert_eq!(Greeting::decode(fixed, tenant), Ok(greeting));
    let welcome = Welcome {
        version: VERSION,
        admitted: true,
        agent: 5,
        arena: 1 << 40,
        at_once: 1 << 26,
        max_object: 9,
        unwritten: 1 << 35,
    };
    assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    let chain: Vec<Key> = (0..5).map(Key).collect();
    assert_eq!(
        CheckRequest::decode(&CheckRequest::encode(3, &chain)),
        Ok(CheckRequest { slices: 3, chain: chain.clone() })
    );
    let found = Found { blocks: 5, slices: vec![4, 1], near: 2 };
    assert_eq!(decode_found(&encode_found(&found, 64), 5), Ok((found.clone(), 64)));
    assert!(decode_found(&encode_found(&found, 64), 4).is_err());
    assert_eq!(decode_flush(&encode_flush(Duration::from_millis(70))), Ok(Duration::from_millis(70)));
    assert_eq!(decode_flushed(&encode_flushed(true, 9)), Ok((true, 9)));
    let items = vec![(id(1), 7), (id(2), 0)];
    assert_eq!(decode_get(&encode_get(items.iter().copied())), Ok(items));
    let places = [Some(Place { pin: 1, place: 2, checksum: 3 }), None];
    let mut body = Vec::new();
    for place in places {
        push_place(&mut body, place);
    }
    assert_eq!(decode_places(&body), Ok(places.to_vec()));
    assert!(decode_places(&body[1..]).is_err() && decode_places(&[]).is_err());
    assert_eq!(decode_numbers(&encode_numbers(&[1, u64::MAX])), Ok(vec![1, u64::MAX]));
    let item = PutItem { kind: Kind::Slice, at: 4, len: 6, place: 1 << 33, checksum: 8 };
    assert_eq!(decode_put(&encode_put(Class::Agent, &chain, &[item])), Ok((Class::Agent, chain.clone(), vec![item])));
    assert!(decode_put(&encode_put(Class::Agent, &chain[..4], &[item])).is_err());
    assert_eq!(decode_damaged(&encode_damaged(id(3), 4)), Ok((id(3), 4)));
    let stats = vec![("hits".to_owned(), 3)];
    assert_eq!(decode_stats(&encode_stats(&stats)), Ok(stats));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn noise_is_refused_or_makes_sense(bytes in proptest::collection::vec(any::<u8>(), 0..200), count in 0u32..9) {
        // A count that is small enough to be believed makes more of the noise pass.
        let mut counted = count.to_le_bytes().to_vec();
        counted.extend(&bytes);
        for body in [&bytes, &counted] {
            if let Ok(CheckRequest { slices, chain }) = CheckRequest::decode(body) {
                prop_assert_eq!(&CheckRequest::encode(slices, &chain), body);
            }
            if let Ok(items) = decode_get(body) {
                prop_assert_eq!(&encode_get(items.into_iter()), body);
            }
            if let Ok(pins) = decode_numbers(body) {
                prop_assert_eq!(&encode_numbers(&pins), body);
            }
            if let Ok((class, chain, items)) = decode_put(body) {
                prop_assert!(items.iter().all(|item| (item.at as usize) < chain.len()));
                prop_assert_eq!(&encode_put(class, &chain, &items), body);
            }
            let _ = (decode_found(body, 5), decode_places(body), decode_damaged(body), decode_stats(body));
        }
        if let Some(fixed) = bytes.first_chunk::<{ Greeting::FIXED }>() {
            let _ = (Greeting::tenant_len(fixed), Greeting::decode(fixed, &bytes[Greeting::FIXED..]));
        }
        if let Some(header) = bytes.first_chunk::<HEADER>() {
            let _ = Header::decode(header);
        }
    }
}
