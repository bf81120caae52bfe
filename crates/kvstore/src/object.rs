//! What the store knows of an object beside its name and bytes.

use crate::key::{Key, ObjectId};

/// Number of a tenant in this store, from its catalogue. 0 is the public namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u16);

/// Class of traffic: each has its own time to live and its own share of what eviction looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Conversations of people: kept 7 days unless configured otherwise.
    #[default]
    Chat = 0,
    /// Agents' sessions: 3 days.
    Agent = 1,
    /// Everything that has no class of its own.
    Other = 2,
}

impl Class {
    /// All of them, in the order of their bytes.
    pub const ALL: [Self; 3] = [Self::Chat, Self::Agent, Self::Other];

    /// Its name in settings and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Agent => "agent",
            Self::Other => "other",
        }
    }

    /// By its name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.name() == name)
    }

    /// From its byte in a record or a frame.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// An object to be written, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Its name.
    pub id: ObjectId,
    /// Block: the nearest ancestor in its chain that this store keeps too, none for the first. Slice: the block it belongs to.
    pub parent: Option<Key>,
    /// Whose it is.
    pub tenant: TenantId,
    /// What kind of traffic it came with.
    pub class: Class,
    /// Bytes of the object.
    pub len: u32,
    /// XXH3-64 of the bytes.
    pub checksum: u64,
    /// Unix time of the write, seconds: an object's time to live begins here or when it was last read.
    pub written: u32,
}
