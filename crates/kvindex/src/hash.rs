//! Chain hash: keyed BLAKE3, 128 bits, one per full block of tokens.
//!
//! The root fields give two 32-byte keys (plain and tagged blocks) and the public root of the chain. A full block without
//! extras, of a usual size (16 to 256), whose ids are all below 2^24 is plain: its message is the parent's hash, then three
//! bytes an id (little endian), then zeros to a multiple of 64. So 64 ids are four compressions, and since the parent is in the message, blocks of many
//! sequences share a key and are hashed side by side ([`ChainHasher::extend_many`]). Any other block is tagged: the parent's
//! hash, the number of tokens and of extras, the tokens in four bytes each, then the extras, each with tag, offset in the
//! block and length. Whoever lacks the salt can neither make nor probe another namespace's hashes.

use std::fmt;

use crate::ids::BlockHash;
use crate::side_by_side::{LANES, hash_side_by_side};

/// Raised when anything about the hash changes; part of the root.
pub const HASH_FORMAT: u32 = 2;

const ROOT_CONTEXT: &str = "deepinfer kvindex chain root";
/// Bytes of a hash.
const HASH_BYTES: usize = 16;
/// Ids from here on do not fit three bytes.
const WIDE_ID: u32 = 1 << 24;

/// `$then` with `$N`, the bytes of a plain message of `$tokens` ids; `$otherwise` for sizes of blocks that nobody uses.
macro_rules! with_message_bytes {
    ($tokens:expr, $N:ident => $then:expr, $otherwise:expr) => {
        match $tokens {
            16 => {
                const $N: usize = 64;
                $then
            }
            32 => {
                const $N: usize = 128;
                $then
            }
            64 => {
                const $N: usize = 256;
                $then
            }
            128 => {
                const $N: usize = 448;
                $then
            }
            256 => {
                const $N: usize = 832;
                $then
            }
            _ => $otherwise,
        }
    };
}

/// Writes the message of a plain block over zeros. False if it is not one, since an id is too large.
#[inline]
fn write_message(parent: BlockHash, tokens: &[u32], message: &mut [u8]) -> bool {
    let (head, body) = message.split_at_mut(HASH_BYTES);
    head.copy_from_slice(&parent.0.to_le_bytes());
    let Some((&last, most)) = tokens.split_last() else { return false };
    let mut all = last;
    for (index, &token) in most.iter().enumerate() {
        // Four bytes at a stride of three: the next id overwrites the fourth.
        body[3 * index..3 * index + 4].copy_from_slice(&token.to_le_bytes());
        all |= token;
    }
    body[3 * most.len()..3 * most.len() + 3].copy_from_slice(&last.to_le_bytes()[..3]);
    all < WIDE_ID
}

/// Everything that decides whether two caches may share blocks. Each field enters tagged and length-prefixed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Root {
    /// Model id.
    pub model: String,
    /// Revision of the model.
    pub revision: String,
    /// Weight format, such as `bf16` or `q4_k_m`.
    pub weight_format: String,
    /// KV format, such as `bf16`.
    pub kv_format: String,
    /// Platform, kernel-set version and run dtype.
    pub numerics: String,
    /// Hit policy.
    pub hit_policy: String,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tenant salt; empty for the common namespace.
    pub salt: Vec<u8>,
}

/// Something beside tokens that the KV of a block depends on (image content, adapter). The chain carries it on to all
/// later blocks, so each extra enters once, in the block that holds its first position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extra {
    /// What it is.
    pub kind: ExtraKind,
    /// First token position it applies to.
    pub position: u32,
    /// Its identity, such as a content hash or a name.
    pub data: Vec<u8>,
}

/// Kind of an [`Extra`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKind {
    /// Content of an image placed at the position.
    Image,
    /// Adapter the tokens run through.
    Adapter,
    /// Anything else, under a caller's own tag.
    Other(u16),
}

impl ExtraKind {
    const fn tag(self) -> u32 {
        match self {
            Self::Image => 1,
            Self::Adapter => 2,
            Self::Other(tag) => 0x1_0000 | tag as u32,
        }
    }
}

/// Hashes chains of one root. Cheap to clone; holds no state between calls.
#[derive(Clone)]
pub struct ChainHasher {
    fields: Root,
    plain: [u8; 32],
    tagged: [u8; 32],
    root: BlockHash,
}

impl fmt::Debug for ChainHasher {
    /// Leaves out secrets and salt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainHasher")
            .field("model", &self.fields.model)
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

fn field(hasher: &mut blake3::Hasher, tag: u8, bytes: &[u8]) {
    hasher.update(&[tag]);
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn take<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[..N]);
    out
}

#[inline]
pub(crate) fn finish(bytes: &[u8]) -> BlockHash {
    let word = u128::from_le_bytes(take(bytes));
    // Zero means "no hash" everywhere else.
    BlockHash(if word == 0 { 1 } else { word })
}

impl ChainHasher {
    /// Derives secrets and root from the fields.
    pub fn new(fields: &Root) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        field(&mut hasher, 0, &HASH_FORMAT.to_le_bytes());
        field(&mut hasher, 1, fields.model.as_bytes());
        field(&mut hasher, 2, fields.revision.as_bytes());
        field(&mut hasher, 3, fields.weight_format.as_bytes());
        field(&mut hasher, 4, fields.kv_format.as_bytes());
        field(&mut hasher, 5, fields.numerics.as_bytes());
        field(&mut hasher, 6, fields.hit_policy.as_bytes());
        field(&mut hasher, 7, &fields.block_tokens.to_le_bytes());
        field(&mut hasher, 8, &fields.salt);
        let mut out = [0; 80];
        hasher.finalize_xof().fill(&mut out);
        Self { fields: fields.clone(), plain: take(&out), tagged: take(&out[32..]), root: finish(&out[64..]) }
    }

    /// The same root under another tenant salt.
    #[must_use]
    pub fn with_salt(&self, salt: &[u8]) -> Self {
        Self::new(&Root { salt: salt.to_vec(), ..self.fields.clone() })
    }

    /// Root of the chain: parent of every first block, and the name of the salt namespace in events.
    #[inline]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// Tokens in a block.
    #[inline]
    pub fn block_tokens(&self) -> usize {
        self.fields.block_tokens as usize
    }

    /// Hash of the block `tokens` after `parent` ([`ChainHasher::root`] for a first block), with the extras that lie in it.
    /// Allocates nothing when there are no extras.
    #[inline]
    pub fn extend(&self, parent: BlockHash, tokens: &[u32], extras: &[Extra]) -> BlockHash {
        let plain = if extras.is_empty() && tokens.len() == self.block_tokens() {
            with_message_bytes!(tokens.len(), N => self.extend_plain::<N>(parent, tokens), None)
        } else {
            None
        };
        plain.unwrap_or_else(|| self.extend_tagged(parent, tokens, &mut extras.iter().collect::<Vec<_>>()))
    }

    #[inline]
    fn extend_plain<const N: usize>(&self, parent: BlockHash, tokens: &[u32]) -> Option<BlockHash> {
        let mut message = [0; N];
        write_message(parent, tokens, &mut message)
            .then(|| finish(blake3::keyed_hash(&self.plain, &message).as_bytes()))
    }

    /// [`ChainHasher::extend`] of blocks without extras that do not follow each other, (parent, tokens) each: their
    /// compressions run side by side. Appends a hash for each to `out`.
    pub fn extend_many<'a>(&self, blocks: impl Iterator<Item = (BlockHash, &'a [u32])>, out: &mut Vec<BlockHash>) {
        with_message_bytes!(
            self.block_tokens(),
            N => self.extend_lanes::<N>(blocks, out),
            out.extend(blocks.map(|(parent, tokens)| self.extend(parent, tokens, &[])))
        );
    }

    fn extend_lanes<'a, const N: usize>(
        &self,
        mut blocks: impl Iterator<Item = (BlockHash, &'a [u32])>,
        out: &mut Vec<BlockHash>,
    ) {
        loop {
            let mut messages = [[0; N]; LANES];
            let mut tagged = [None; LANES];
            let mut n = 0;
            for (parent, tokens) in blocks.by_ref().take(LANES) {
                let plain = tokens.len() == self.block_tokens() && write_message(parent, tokens, &mut messages[n]);
                tagged[n] = (!plain).then_some((parent, tokens));
                n += 1;
            }
            let first = out.len();
            hash_side_by_side(&messages, n, &self.plain, out);
            for (hash, tagged) in out[first..].iter_mut().zip(tagged) {
                if let Some((parent, tokens)) = tagged {
                    *hash = self.extend_tagged(parent, tokens, &mut []);
                }
            }
            if n < LANES {
                return;
            }
        }
    }

    /// [`ChainHasher::extend`] for block number `index` of a sequence: picks from all extras of the sequence those whose
    /// position lies in the block. Their order does not matter, except among equal positions.
    #[inline]
    pub fn extend_at(&self, parent: BlockHash, index: usize, tokens: &[u32], extras: &[Extra]) -> BlockHash {
        if extras.is_empty() {
            return self.extend(parent, tokens, extras);
        }
        let size = self.block_tokens();
        let range = index * size..(index + 1) * size;
        let mut here: Vec<_> = extras.iter().filter(|e| range.contains(&(e.position as usize))).collect();
        if here.is_empty() { self.extend(parent, tokens, &[]) } else { self.extend_tagged(parent, tokens, &mut here) }
    }

    fn extend_tagged(&self, parent: BlockHash, tokens: &[u32], extras: &mut [&Extra]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.tagged);
        hasher.update(&parent.0.to_le_bytes());
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        hasher.update(&(extras.len() as u64).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        extras.sort_by_key(|e| e.position);
        for extra in extras {
            hasher.update(&extra.kind.tag().to_le_bytes());
            hasher.update(&(extra.position % self.fields.block_tokens.max(1)).to_le_bytes());
            hasher.update(&(extra.data.len() as u64).to_le_bytes());
            hasher.update(&extra.data);
        }
        finish(hasher.finalize().as_bytes())
    }

    /// Appends to `out` the hashes of the full blocks of `tokens`, a chain from the root. Each extra enters the block
    /// that holds its position. A tail shorter than a block is not hashed.
    pub fn hash_into(&self, tokens: &[u32], extras: &[Extra], out: &mut Vec<BlockHash>) {
        let size = self.block_tokens();
        if size == 0 {
            return;
        }
        out.reserve(tokens.len() / size);
        let mut parent = self.root;
        for (index, block) in tokens.chunks_exact(size).enumerate() {
            parent = self.extend_at(parent, index, block, extras);
            out.push(parent);
        }
    }

    /// [`ChainHasher::hash_into`] a new vector.
    pub fn hash_all(&self, tokens: &[u32], extras: &[Extra]) -> Vec<BlockHash> {
        let mut out = Vec::new();
        self.hash_into(tokens, extras, &mut out);
        out
    }
}
