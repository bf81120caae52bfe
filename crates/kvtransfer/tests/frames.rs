//! Frames and tickets: what goes in comes out, and nothing else is taken for one.
#![allow(clippy::unwrap_used)]

use deepinfer_kvtransfer::frame::{Bad, Greeting, Operation, Outcome, Reply, Request, Status};
use deepinfer_kvtransfer::{Address, Auth, Config, Error, OfferId, Ticket, VERSION};
use proptest::prelude::*;

fn auth(token: bool) -> Auth {
    Auth::new(&Config { token: token.then(|| b"0123456789abcdef".to_vec()), ..Config::default() })
}

fn request() -> impl Strategy<Value = Request> {
    (any::<bool>(), any::<u64>(), any::<[u8; 16]>(), any::<[u8; 16]>()).prop_map(|(pull, epoch, id, layout)| Request {
        operation: if pull { Operation::Pull } else { Operation::Release },
        epoch,
        id: OfferId(id),
        layout,
    })
}

/// The bytes of a valid ticket, from parts.
fn ticket_bytes(kind: u8, address: &str, numbers: &[u8; 56], mac: &[u8; 32]) -> Vec<u8> {
    [b"DIKT".as_slice(), &VERSION.to_le_bytes(), &[kind, address.len() as u8], numbers, address.as_bytes(), mac]
        .concat()
}

proptest! {
    #[test]
    fn frames_come_back(epoch: u64, nonce: [u8; 16], request in request(), status in 0..5usize, numbers: [u64; 3], token: bool) {
        let auth = auth(token);
        let greeting = Greeting { epoch, nonce };
        prop_assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        prop_assert_eq!(Request::decode(&request.encode(&auth, &nonce), &auth, &nonce), Ok((request, true)));
        let status = [Status::Granted, Status::Gone, Status::Layout, Status::Token, Status::Frame][status];
        let reply = Reply { status, meta: numbers[0], length: numbers[1], checksum: numbers[2] };
        prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        for outcome in [Outcome::Verified, Outcome::Corrupt, Outcome::GivenUp] {
            prop_assert_eq!(Outcome::decode(&outcome.encode()), Ok(outcome));
        }
    }

    #[test]
    fn under_a_token_one_changed_bit_or_another_nonce_is_noticed(request in request(), nonce: [u8; 16], bit in 0..Request::SIZE * 8) {
        let auth = auth(true);
        let bytes = request.encode(&auth, &nonce);
        let mut changed = bytes;
        changed[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!matches!(Request::decode(&changed, &auth, &nonce), Ok((_, true))));
        let mut other = nonce;
        other[bit % 16] ^= 1;
        prop_assert_eq!(Request::decode(&bytes, &auth, &other), Ok((request, false)));
    }

    #[test]
    fn noise_is_no_frame(noise: [u8; 32], version: u16) {
        // The magic number cannot come up by chance in a run of this length.
        prop_assert_eq!(Greeting::decode(&noise), Err(Bad::Magic));
        prop_assert_eq!(Reply::decode(&noise), Err(Bad::Magic));
        let mut frame = Greeting { epoch: 1, nonce: [2; 16] }.encode();
        frame[4..6].copy_from_slice(&version.to_le_bytes());
        prop_assert_eq!(Greeting::decode(&frame).is_ok(), version == VERSION);
        if version != VERSION {
            prop_assert_eq!(Greeting::decode(&frame), Err(Bad::Version(version)));
        }
    }

    #[test]
    fn tickets_come_back_as_bytes_and_text(numbers in prop::array::uniform32(any::<u8>()), mac: [u8; 32], port: u16, ip: u32, v6: u128, kind in 0..3u8) {
        let mut fixed = [7; 56];
        fixed[..32].copy_from_slice(&numbers);
        let (kind, address) = match kind {
            0 => (1, format!("deepinfer-kv.{ip}.{v6:032x}")),
            1 => (2, std::net::SocketAddr::from((std::net::Ipv4Addr::from(ip), port)).to_string()),
            _ => (2, std::net::SocketAddr::from((std::net::Ipv6Addr::from(v6), port)).to_string()),
        };
        let bytes = ticket_bytes(kind, &address, &fixed, &mac);
        let ticket = Ticket::from_bytes(&bytes).unwrap();
        prop_assert_eq!(ticket.to_bytes(), bytes);
        prop_assert!(fixed.starts_with(&ticket.id().0));
        prop_assert_eq!(ticket.to_string().parse::<Ticket>().unwrap(), ticket);
    }

    #[test]
    fn cut_lengthened_and_random_tickets_are_refused(cut in 0..100usize, noise in prop::collection::vec(any::<u8>(), 0..300), text in ".{0,400}") {
        let bytes = ticket_bytes(2, "127.0.0.1:80", &[1; 56], &[0; 32]);
        let refused = |bytes: &[u8]| matches!(Ticket::from_bytes(bytes), Err(Error::Refused(_)));
        prop_assert!(refused(&bytes[..cut.min(bytes.len() - 1)]));
        if !noise.is_empty() {
            prop_assert!(refused(&[bytes.as_slice(), &noise].concat()));
        }
        prop_assert!(refused(&noise));
        prop_assert!(matches!(text.parse::<Ticket>(), Err(Error::Refused(_))));
    }
}

#[test]
fn only_plain_addresses_are_taken() {
    let parse = |kind, address: &str| Ticket::from_bytes(&ticket_bytes(kind, address, &[1; 56], &[0; 32]));
    assert_eq!(*parse(1, "deepinfer-kv.1.ab").unwrap().address(), Address::Shm("deepinfer-kv.1.ab".to_owned()));
    assert_eq!(*parse(2, "[::1]:80").unwrap().address(), Address::Tcp("[::1]:80".parse().unwrap()));
    for (kind, address) in [
        (1, ""),
        (1, "a/b"),
        (1, "a\0b"),
        (1, "ä"),
        (2, ""),
        (2, "localhost:80"),
        (2, "127.0.0.1"),
        (2, "127.0.0.1:080"),
        (2, "[0::1]:80"),
        (0, "x"),
        (3, "x"),
    ] {
        assert!(matches!(parse(kind, address), Err(Error::Refused(_))), "{kind} {address:?}");
    }
    assert!(parse(1, &"a".repeat(100)).is_ok() && parse(1, &"a".repeat(101)).is_err());
}

/// What is on the wire today; another layout needs another version.
#[test]
fn the_wire_is_what_it_was() {
    assert_eq!(VERSION, 1);
    let greeting = Greeting { epoch: 0x0102_0304_0506_0708, nonce: [9; 16] };
    assert_eq!(greeting.encode()[..16], *b"DIKV\x01\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01");
    let request = Request { operation: Operation::Release, epoch: 3, id: OfferId([4; 16]), layout: [5; 16] };
    let bytes = request.encode(&auth(false), &[0; 16]);
    assert_eq!(bytes[..16], *b"DIKV\x01\0\x02\0\x03\0\0\0\0\0\0\0");
    assert_eq!(
        (&bytes[16..32], &bytes[32..48], &bytes[48..]),
        ([4; 16].as_slice(), [5; 16].as_slice(), [0; 32].as_slice())
    );
    let reply = Reply { status: Status::Gone, meta: 1, length: 2, checksum: 3 };
    assert_eq!(reply.encode(), *b"DIKV\x01\0\x01\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0");
    assert_eq!(Outcome::Corrupt.encode(), *b"DIKV\x02\0\0\0");
}
