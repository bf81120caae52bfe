//! Small identifiers shared by the pool, the slots and the scheduler.

/// Generational handle of a sequence. A stale generation names nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq {
    /// Place in the sequence pool.
    pub index: u32,
    /// How often that place has been reused.
    pub generation: u32,
}

impl Seq {
    /// One word for callers outside Rust: `generation << 32 | index`.
    #[inline]
    pub const fn to_u64(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// Inverse of [`Seq::to_u64`].
    #[inline]
    pub const fn from_u64(word: u64) -> Self {
        Self { index: word as u32, generation: (word >> 32) as u32 }
    }
}

/// A block: node of the index and page id in paged group 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Block(pub u32);

impl Block {
    /// The null page; as a cursor, the empty prefix.
    pub const NULL: Self = Self(0);

    /// True for the null page.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The id as an array index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// 128-bit chain hash of a block and everything before it. Zero means "not hashed" and is never produced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// No hash.
    pub const NONE: Self = Self(0);

    /// True unless this is [`BlockHash::NONE`].
    #[inline]
    pub const fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// A state slot: stable row id of per-sequence device state. Slot 0 is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct StateSlot(pub u32);

impl StateSlot {
    /// The null slot.
    pub const NULL: Self = Self(0);

    /// True for the null slot.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The id as an array index.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Number of a step, counted from 1 and never reused. Also the epoch of deferred release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct StepId(pub u64);

/// Generational handle of a transfer (inbound KV, swap, save).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId {
    /// Place in the issuer's transfer table.
    pub index: u32,
    /// How often that place has been reused.
    pub generation: u32,
}

/// What must happen before a released resource may be reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fence {
    /// Nothing.
    #[default]
    Open,
    /// `now` must be a later step than this one.
    Step(StepId),
    /// The transfer must be closed.
    Transfer(TransferId),
}

/// Who holds a reference on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A sequence: its cursor, or a private block it writes.
    Sequence,
    /// A transfer lease: a load, a swap or a save.
    Transfer,
}

impl Owner {
    #[inline]
    pub(crate) const fn slot(self) -> usize {
        match self {
            Self::Sequence => 0,
            Self::Transfer => 1,
        }
    }
}
