//! One offer's bytes: anonymous shared memory that ends with its last holder, whatever kills it.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::checksum::Checksum;
use crate::error::Error;

/// Bytes moved at a time: hashed while they are still in the core's cache.
pub const CHUNK: usize = 256 << 10;

/// Written once, read by many, and given back to the system when dropped even if a reader keeps its descriptor.
pub struct Memory {
    file: File,
    /// A forked child inherits the descriptor, not the right to empty it.
    owner: u32,
}

impl Memory {
    /// Gathers the segments, and adds their bytes to the checksum.
    pub fn gather(segments: &[&[u8]], checksum: &mut Checksum) -> Result<Self, Error> {
        let create = |flags| rustix::fs::memfd_create(c"deepinfer-kv", MemfdFlags::CLOEXEC | flags);
        // A kernel may insist on memory that cannot be executed; before 6.3 it does not know the word.
        let fd = create(MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| create(MemfdFlags::ALLOW_SEALING))
            .map_err(Error::system("cannot create shared memory"))?;
        // Readers get a descriptor that was opened for reading only; the mode keeps them from opening another.
        rustix::fs::fchmod(&fd, Mode::RUSR).map_err(Error::system("cannot protect shared memory"))?;
        let memory = Self { file: File::from(fd), owner: std::process::id() };
        for segment in segments {
            for chunk in segment.chunks(CHUNK) {
                checksum.update(chunk);
                (&memory.file).write_all(chunk).map_err(Error::io("no memory for the offered bytes"))?;
            }
        }
        // Not against shrinking: that is how the memory is taken back from readers that do not let go.
        rustix::fs::fcntl_add_seals(&memory.file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SEAL)
            .map_err(Error::system("cannot seal shared memory"))?;
        Ok(memory)
    }

    /// A descriptor of its own position that can be read and nothing else.
    pub fn reader(&self) -> Result<OwnedFd, Error> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::system("cannot reopen shared memory for reading"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            // Cannot fail for our own file; if it did, the kernel would free the memory with its last holder.
            let _ = rustix::fs::ftruncate(&self.file, 0);
        }
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read;

    use super::*;

    fn memory(bytes: &[u8]) -> Memory {
        Memory::gather(&[bytes], &mut Checksum::new(b"")).unwrap()
    }

    #[test]
    fn a_reader_can_read_and_change_nothing() {
        let memory = memory(b"abc");
        let mut reader = File::from(memory.reader().unwrap());
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "abc");
        assert!(reader.write_all(b"x").is_err());
        assert!(reader.set_len(0).is_err());
        assert!((&memory.file).write_all(b"x").is_err(), "sealed for the owner, too");
    }

    #[test]
    fn dropping_takes_the_memory_back_from_readers() {
        let memory = memory(&vec![7; 1 << 20]);
        let mut reader = File::from(memory.reader().unwrap());
        assert_eq!(reader.metadata().unwrap().len(), 1 << 20);
        drop(memory);
        assert_eq!(reader.metadata().unwrap().len(), 0);
        assert_eq!(reader.read(&mut [0; 16]).unwrap(), 0);
    }
}
