//! The KV store: objects named by chain hash, which outlive the engine that made them and are shared by every engine that asks.
//!
//! Owns: identity and records of objects ([`key`], [`object`]), where their bytes lie ([`media`], and [`backend`] below it), which
//! are kept ([`index`], [`policy`]), how a loss is made good ([`erasure`]), and how all of it is reached ([`server`], [`client`],
//! [`cluster`], [`agent`], [`wire`]; engines through [`upstream`]).
//!
//! Never touches: what the bytes of an object mean, devices, sequences, Python. It computes no chain hash: keys come from the engine.
//!
//! What holds everywhere: nothing is visible before it is durable; nothing is overwritten; bytes that do not have their checksum are
//! a miss. The picture of the layout, the guarantees and what happens on each fault are in `docs/kvstore.md`.

pub mod agent;
pub mod backend;
pub mod bench;
pub mod catalogue;
pub mod checksum;
pub mod client;
pub mod clock;
pub mod cluster;
pub mod directory;
pub mod erasure;
pub mod error;
pub mod index;
pub mod key;
mod lost;
pub mod media;
pub mod metrics;
pub mod net;
pub mod node;
pub mod object;
pub mod operator;
pub mod policy;
pub mod record;
pub mod root;
pub mod server;
pub mod settings;
pub mod sizes;
pub mod store;
pub mod tier;
pub mod tls;
pub mod trouble;
pub mod upstream;
pub mod wire;

pub use error::Error;
pub use key::{Key, Kind, ObjectId};
pub use object::{Class, Meta, TenantId};
