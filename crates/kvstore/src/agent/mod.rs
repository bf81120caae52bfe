//! The agent of a host: moves objects between a store and memory that the engines of the host have mapped.
//!
//! Owns: the arena and who may have which part of it until when, the socket that engines connect to, fetches and puts in the background; and
//! the engine's end of it ([`Client`]). Never touches: how a store is reached (any [`Source`](crate::upstream::Source) will do), what bytes mean.
//!
//! ```text
//!  engine ── words ──▶ talk ─┬─ fetch  ──▶ Upstream      missing objects, several at once, each once
//!    │ copies out            ├─ behind ──▶ Upstream      what was put, in order, a bounded backlog
//!    └──── mapped ◀── arena ─┘                           table: names, pins, least recently used · space: extents · shm: memory
//! ```
//!
//! Bytes in the arena are written once, before anybody finds them; engines can only read them, and hold what they copied to its checksum.

mod arena;
mod behind;
mod client;
mod counters;
mod fetch;
mod host;
mod link;
mod memory;
mod pass;
mod shm;
mod space;
mod table;
mod talk;
mod tenants;
mod words;

pub use arena::Sizes;
pub use client::{Client, ClientConfig};
pub use host::{Agent, AgentConfig, Watch};
/// What engines and the agent say to each other.
pub mod protocol {
    pub use super::pass::{receive, send};
    pub use super::words::*;
}
