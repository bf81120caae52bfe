//! What one store tells others of an object that it holds.

use crate::media::Place;
use crate::object::Meta;

/// Whose an object is, in a form that is the same in every store: numbers of tenants are each store's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner(pub [u8; 16]);

impl Owner {
    /// Everybody.
    pub const PUBLIC: Self = Self([0; 16]);

    /// The tenant of this name; empty: everybody.
    pub fn named(name: &str) -> Self {
        if name.is_empty() {
            return Self::PUBLIC;
        }
        let hash = blake3::derive_key("deepinfer kvstore tenant 1", name.as_bytes());
        Self(crate::record::take(&hash, 0))
    }
}

/// Where an object is said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// What it is; the tenant is a number of the store that holds it.
    pub meta: Meta,
    /// Where its record lies.
    pub place: Place,
    /// Which store holds it.
    pub media: u64,
    /// Whose it is.
    pub owner: Owner,
}
