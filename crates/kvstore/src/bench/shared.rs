//! Reading through the agent's shared memory, beside a copy of the same bytes.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Figure, SIZES, beside, bytes, disk, key, must, shown};
use crate::agent::{Agent, AgentConfig, Client, ClientConfig};
use crate::error::Error;
use crate::key::{Kind, ObjectId};
use crate::object::Class;
use crate::upstream::{Load, Save, Upstream};

/// Bytes that a call asks for, about: what an engine fetches at once.
const CALL: usize = 16 << 20;

pub(super) fn get(base: &Path, round_bytes: u64) -> Result<Vec<Figure>, Error> {
    let mut figures = Vec::new();
    for size in SIZES {
        let (store, _) = disk::open(&base.join(format!("store-{size}")))?;
        let socket = base.join(format!("agent-{size}")).join("s");
        let round = round_bytes.min(256 << 20);
        let config = AgentConfig {
            arena_bytes: (2 * round).max(256 << 20),
            backlog_bytes: 64 << 20,
            put_patience: Duration::from_secs(60),
            ..AgentConfig::new(socket.clone())
        };
        let _agent = Agent::start(Arc::new(store), config)?;
        let client = Client::new(ClientConfig::new(socket))?;
        let count = (round / size as u64).max(1);
        let mut data = bytes(size);
        let mut copies = Vec::new();
        for number in 0..count {
            data[..8].copy_from_slice(&number.to_le_bytes());
            let save = Save { kind: Kind::Block, at: 0, pieces: &[&data], checksum: None };
            must(client.put(&[key(number)], &[save], Class::Chat).iter().all(|one| one.is_there()), "put an object")?;
            copies.push(data.clone());
        }
        must(client.flush(Duration::from_secs(60)), "have its objects stored")?;
        let a_call = (CALL / size).max(1);
        let numbers: Vec<u64> = (0..count).collect();
        let buffer = RefCell::new(vec![1u8; size * a_call]);
        figures.push(beside(
            format!("shared memory GET {}, checksum included, beside a copy of the bytes", shown(size)),
            size * count as usize,
            || {
                let mut buffer = buffer.borrow_mut();
                numbers.chunks(a_call).try_for_each(|numbers| {
                    let mut loads: Vec<Load<'_>> = numbers
                        .iter()
                        .zip(buffer.chunks_exact_mut(size))
                        .map(|(&number, into)| Load { id: ObjectId { kind: Kind::Block, key: key(number) }, into })
                        .collect();
                    must(client.get(&mut loads).iter().all(Option::is_some), "read an object")
                })
            },
            || {
                let mut buffer = buffer.borrow_mut();
                for copies in copies.chunks(a_call) {
                    for (copy, into) in copies.iter().zip(buffer.chunks_exact_mut(size)) {
                        std::hint::black_box(into).copy_from_slice(std::hint::black_box(copy));
                    }
                }
                Ok(())
            },
        )?);
    }
    Ok(figures)
}
