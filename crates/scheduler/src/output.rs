//! Output rows of a step in two parity buffers: a view stays valid until the next `complete`.

use deepinfer_kvindex::{Seq, StepId};

/// Words of an output row.
pub const OUTPUT_WORDS: usize = 8;

/// Positions in an output row.
pub mod out {
    /// Index of the sequence.
    pub const SEQ: usize = 0;
    /// Generation of the sequence.
    pub const GENERATION: usize = 1;
    /// State slot, 0 when it had none.
    pub const SLOT: usize = 2;
    /// First token of this step.
    pub const TOKEN: usize = 3;
    /// Tokens of this step.
    pub const COUNT: usize = 4;
    /// 0 none, otherwise [`crate::Finish`].
    pub const FINISH: usize = 5;
    /// Bits: 1 streams, 2 first output.
    pub const FLAGS: usize = 6;
    /// Index of the sequence in the step, −1 when it ended outside of one.
    pub const INDEX: usize = 7;
}

/// Bit of `out::FLAGS`: the sequence streams.
pub const STREAMS: i32 = 1;
/// Bit of `out::FLAGS`: its first output.
pub const FIRST: i32 = 2;

/// What a returned row holds in debug builds.
const POISON: i32 = 0x0DEA_D0FF;

#[derive(Default)]
struct Buffer {
    rows: Vec<i32>,
    notify: Vec<u32>,
}

/// Outputs of one step, valid until the next `complete`, `fail_step` or `flush`.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'a> {
    /// Step; 0 when no step ran.
    pub step: StepId,
    /// Rows of [`OUTPUT_WORDS`] words.
    pub rows: &'a [i32],
    /// Rows that a reader must look at: streaming or finished.
    pub notify: &'a [u32],
}

impl Outputs<'_> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len() / OUTPUT_WORDS
    }

    /// True if there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Row `index`.
    pub fn row(&self, index: usize) -> &[i32] {
        &self.rows[index * OUTPUT_WORDS..(index + 1) * OUTPUT_WORDS]
    }

    /// Sequence of row `index`.
    pub fn seq(&self, index: usize) -> Seq {
        let row = self.row(index);
        Seq { index: row[out::SEQ] as u32, generation: row[out::GENERATION] as u32 }
    }
}

/// The two buffers.
#[derive(Default)]
pub(crate) struct OutputPool {
    buffers: [Buffer; 2],
    current: usize,
    /// Rows of sequences that ended outside of a step.
    pub pending: Vec<[i32; OUTPUT_WORDS]>,
}

impl OutputPool {
    pub fn with_capacity(seqs: usize) -> Self {
        let mut pool = Self::default();
        for buffer in &mut pool.buffers {
            buffer.rows.reserve(2 * seqs * OUTPUT_WORDS);
            buffer.notify.reserve(2 * seqs);
        }
        pool.pending.reserve(seqs);
        pool
    }

    /// Takes back the previous outputs and starts new ones.
    pub fn begin(&mut self) {
        if cfg!(debug_assertions) {
            self.buffers[self.current].rows.fill(POISON);
        }
        self.current ^= 1;
        let buffer = &mut self.buffers[self.current];
        buffer.rows.clear();
        buffer.notify.clear();
    }

    #[inline]
    pub fn rows(&mut self) -> &mut Vec<i32> {
        &mut self.buffers[self.current].rows
    }

    #[inline]
    pub fn parts(&mut self) -> (&mut Vec<i32>, &mut Vec<u32>) {
        let buffer = &mut self.buffers[self.current];
        (&mut buffer.rows, &mut buffer.notify)
    }

    pub fn push(&mut self, row: [i32; OUTPUT_WORDS]) {
        let (rows, notify) = self.parts();
        if row[out::FINISH] != 0 || row[out::FLAGS] & STREAMS != 0 {
            notify.push((rows.len() / OUTPUT_WORDS) as u32);
        }
        rows.extend_from_slice(&row);
    }

    /// Appends the rows that were waiting for a step.
    pub fn push_pending(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        for row in pending.drain(..) {
            self.push(row);
        }
        self.pending = pending;
    }

    pub fn view(&self, step: StepId) -> Outputs<'_> {
        let buffer = &self.buffers[self.current];
        Outputs { step, rows: &buffer.rows, notify: &buffer.notify }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_survives_its_step_and_is_poisoned_after_the_next() {
        let mut pool = OutputPool::with_capacity(4);
        pool.begin();
        pool.push([1, 1, 1, 42, 1, 0, STREAMS, 0]);
        pool.push([2, 1, 2, 43, 1, 0, 0, 1]);
        let view = pool.view(StepId(1));
        assert_eq!((view.len(), view.notify), (2, &[0][..]));
        let address = view.rows.as_ptr();
        pool.begin();
        assert_ne!(pool.view(StepId(2)).rows.as_ptr(), address, "the next step writes another buffer");
        if cfg!(debug_assertions) {
            assert!(pool.buffers[pool.current ^ 1].rows.iter().all(|&w| w == POISON));
        }
    }

    #[test]
    fn pending_rows_reach_the_reader_once() {
        let mut pool = OutputPool::with_capacity(4);
        pool.pending.push([7, 1, 0, 0, 0, 3, 0, -1]);
        pool.begin();
        pool.push_pending();
        assert_eq!((pool.view(StepId(1)).len(), pool.view(StepId(1)).notify), (1, &[0][..]));
        pool.begin();
        pool.push_pending();
        assert!(pool.view(StepId(2)).is_empty());
    }
}
