//! Chain hash: keyed BLAKE3, 128 bits, one per full block of tokens.
//!
//! The root fields give two 16-byte secrets (plain and tagged blocks) and the public root of the chain. The key of a
//! block is `secret ‖ parent hash`. A full block without extras hashes its tokens alone (u32, little endian), so that a
//! power-of-two block fills whole compressions; any other block uses the tagged secret, and its message is the number of
//! tokens and of extras, the tokens, then the extras, each with tag, offset in the block and length. Whoever lacks the salt can neither make
//! nor probe another namespace's hashes.

use std::fmt;

use crate::ids::BlockHash;

/// Raised when anything about the hash changes; part of the root.
pub const HASH_FORMAT: u32 = 1;

const ROOT_CONTEXT: &str = "deepinfer kvindex chain root";
/// Longest block whose message is put together on the stack.
const STACK_TOKENS: usize = 256;

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
    plain: [u8; 16],
    tagged: [u8; 16],
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

fn take16(bytes: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    out.copy_from_slice(&bytes[..16]);
    out
}

#[inline]
fn finish(bytes: &[u8]) -> BlockHash {
    let word = u128::from_le_bytes(take16(bytes));
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
        let mut out = [0; 48];
        hasher.finalize_xof().fill(&mut out);
        Self { fields: fields.clone(), plain: take16(&out), tagged: take16(&out[16..]), root: finish(&out[32..]) }
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

    fn key(secret: &[u8; 16], parent: BlockHash) -> [u8; 32] {
        let mut key = [0; 32];
        key[..16].copy_from_slice(secret);
        key[16..].copy_from_slice(&parent.0.to_le_bytes());
        key
    }

    /// Hash of the block `tokens` after `parent` ([`ChainHasher::root`] for a first block), with the extras that lie in it.
    /// Allocates nothing when there are no extras.
    #[inline]
    pub fn extend(&self, parent: BlockHash, tokens: &[u32], extras: &[Extra]) -> BlockHash {
        if extras.is_empty() && tokens.len() == self.block_tokens() && tokens.len() <= STACK_TOKENS {
            let mut message = [0; STACK_TOKENS * 4];
            let message = &mut message[..tokens.len() * 4];
            for (bytes, token) in message.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            finish(blake3::keyed_hash(&Self::key(&self.plain, parent), message).as_bytes())
        } else {
            self.extend_streamed(parent, tokens, &mut extras.iter().collect::<Vec<_>>())
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
        if here.is_empty() { self.extend(parent, tokens, &[]) } else { self.extend_streamed(parent, tokens, &mut here) }
    }

    fn extend_streamed(&self, parent: BlockHash, tokens: &[u32], extras: &mut [&Extra]) -> BlockHash {
        let is_plain = extras.is_empty() && tokens.len() == self.block_tokens();
        let secret = if is_plain { &self.plain } else { &self.tagged };
        let mut hasher = blake3::Hasher::new_keyed(&Self::key(secret, parent));
        if !is_plain {
            hasher.update(&(tokens.len() as u64).to_le_bytes());
            hasher.update(&(extras.len() as u64).to_le_bytes());
        }
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
