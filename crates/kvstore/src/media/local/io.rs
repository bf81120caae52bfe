//! What segments ask the operating system for: the seam at which tests make disks fail.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;

/// Calls that move or keep bytes.
pub trait Io: Send + Sync {
    /// Writes some of `pieces`, in order, at `offset`; how much it says.
    ///
    /// # Errors
    /// The system's.
    fn write(&self, file: &File, pieces: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pwritev(file, pieces, offset)?)
    }

    /// Reads some bytes at `offset`; 0 at the end of the file.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(into, offset)
    }

    /// Waits until what was written is on the disk, with the file's length.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    /// Cuts a file.
    ///
    /// # Errors
    /// The system's.
    fn truncate(&self, file: &File, length: u64) -> io::Result<()> {
        file.set_len(length)
    }
}

/// The operating system itself.
#[derive(Debug, Default)]
pub struct System;

impl Io for System {}

/// At most this many pieces a call: Linux's bound.
const PIECES: usize = 1024;

/// Writes all of `pieces`.
pub(crate) fn write_all(io: &dyn Io, file: &File, mut pieces: &mut [IoSlice<'_>], mut offset: u64) -> io::Result<()> {
    IoSlice::advance_slices(&mut pieces, 0);
    while !pieces.is_empty() {
        match io.write(file, &pieces[..pieces.len().min(PIECES)], offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                offset += count as u64;
                IoSlice::advance_slices(&mut pieces, count);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills `into`; an end of the file before that is [`io::ErrorKind::UnexpectedEof`].
pub(crate) fn read_exact(io: &dyn Io, file: &File, mut into: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !into.is_empty() {
        match io.read(file, into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                offset += count as u64;
                into = &mut into[count..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
