//! An array that grows by whole chunks: no copy of what is there, and never more than one chunk of slack.

use std::ops::{Index, IndexMut};

/// Elements of a chunk, as a power of two.
const BITS: usize = 12;
const CHUNK: usize = 1 << BITS;

/// Elements by number; those never written have their default value.
#[derive(Debug, Default)]
pub(crate) struct Chunked<T> {
    chunks: Vec<Box<[T]>>,
}

impl<T: Copy + Default> Chunked<T> {
    /// Makes room for the element `index`.
    pub(crate) fn reach(&mut self, index: usize) {
        while self.chunks.len() <= index >> BITS {
            self.chunks.push(vec![T::default(); CHUNK].into_boxed_slice());
        }
    }

    /// Elements there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// The element, if there is room for it.
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.chunks.get(index >> BITS).map(|chunk| &chunk[index & (CHUNK - 1)])
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.capacity() * size_of::<T>() + self.chunks.capacity() * size_of::<Box<[T]>>()
    }
}

impl<T> Index<usize> for Chunked<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        &self.chunks[index >> BITS][index & (CHUNK - 1)]
    }
}

impl<T> IndexMut<usize> for Chunked<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        &mut self.chunks[index >> BITS][index & (CHUNK - 1)]
    }
}
