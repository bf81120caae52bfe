//! Memory that two processes have mapped: the only place that knows addresses.
//!
//! Owns: descriptors of memory files, their seals and mappings. Never touches: which bytes mean what, or who may have them when.
//!
//! A memory file that is sealed against shrinking never gives a fault where it was mapped, whatever the other process does.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::memory;
use crate::checksum::{Sum, checksum};
use crate::error::Error;

/// Copied and summed before the next piece: it stays in the cache meanwhile.
const PIECE: usize = 64 << 10;

/// What is no longer than this is copied whole before it is summed: it stays in a cache as well, and is summed faster in one call.
const WHOLE: usize = 2 << 20;

fn broken(what: &str) -> impl FnOnce(rustix::io::Errno) -> Error {
    let what = format!("shared memory: {what}");
    move |error| Error::Io { what, source: error.into() }
}

/// Bytes of a memory file, mapped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address and a length; what is done with the bytes is the affair of whoever reads or writes them.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> Result<Self, Error> {
        // SAFETY: a new mapping where the system chooses: it lies over nothing of ours.
        let start = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) };
        let start = start.map_err(broken("mapping"))?;
        // SAFETY: advice on the mapping that was just made. Where large pages are not to be had it does without.
        let _ = unsafe { madvise(start, len, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(|| broken("mapping")(rustix::io::Errno::NOMEM))?;
        Ok(Self { start, len })
    }

    /// The address of `len` bytes from `place` on, if they all lie within.
    fn at(&self, place: u64, len: usize) -> Option<NonNull<u8>> {
        let place = usize::try_from(place).ok()?;
        let end = place.checked_add(len)?;
        // SAFETY: `place` is within the mapping, or one past its end for no bytes.
        (end <= self.len).then(|| unsafe { self.start.add(place) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nobody has an address of it who does not hold it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn create(name: &str, len: u64, seals: SealFlags) -> Result<OwnedFd, Error> {
    let fd =
        rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(broken("making"))?;
    rustix::fs::ftruncate(&fd, len).map_err(broken("sizing"))?;
    rustix::fs::fcntl_add_seals(&fd, seals | SealFlags::SHRINK | SealFlags::GROW).map_err(broken("sealing"))?;
    Ok(fd)
}

fn length(fd: BorrowedFd<'_>) -> Result<u64, Error> {
    let stat = rustix::fs::fstat(fd).map_err(broken("a look at it"))?;
    u64::try_from(stat.st_size).map_err(|_| Error::Invalid("shared memory of no length".to_owned()))
}

/// Whether it is a memory file that cannot become shorter.
fn holds(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Memory that this process writes and others can only read.
#[derive(Debug)]
pub struct Shared {
    mapping: Mapping,
    fd: OwnedFd,
}

impl Shared {
    /// All its memory is taken now: a lack of it is an error here and not a fault later.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than this machine has left, [`Error::Io`]: no memory.
    pub fn new(len: u64) -> Result<Self, Error> {
        memory::fits(len, memory::available())?;
        let fd = create("deepinfer-kv-arena", len, SealFlags::empty())?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len).map_err(broken("taking it"))?;
        let bytes = usize::try_from(len).map_err(|_| Error::Invalid(format!("{len} bytes do not fit memory")))?;
        let mapping = Mapping::new(fd.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        // The mapping made before stays writable; no other can be made, by whoever has the descriptor.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(broken("sealing"))?;
        Ok(Self { mapping, fd })
    }

    /// What others map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.mapping.len as u64
    }

    /// Bytes to be read.
    ///
    /// # Safety
    /// Nobody writes to them while the slice lives.
    pub unsafe fn bytes(&self, place: u64, len: usize) -> &[u8] {
        match self.mapping.at(place, len) {
            // SAFETY: within the mapping, which lives as long as this; the caller vouches that they do not change.
            Some(start) => unsafe { std::slice::from_raw_parts(start.as_ptr(), len) },
            None => &[],
        }
    }

    /// Bytes to be written.
    ///
    /// # Safety
    /// Nobody else of this process reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, place: u64, len: usize) -> &mut [u8] {
        match self.mapping.at(place, len) {
            // SAFETY: within the mapping, which lives as long as this; the caller vouches that it has them alone.
            Some(start) => unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) },
            None => &mut [],
        }
    }
}

/// The same memory as another process has it: to be copied from.
#[derive(Debug)]
pub struct View {
    mapping: Mapping,
}

impl View {
    /// Maps what was passed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what could shrink or is shorter than told, [`Error::Io`].
    pub fn new(fd: BorrowedFd<'_>, len: u64) -> Result<Self, Error> {
        if !holds(fd) || length(fd)? < len {
            return Err(Error::Invalid("what the agent passed is no sealed memory of its length".to_owned()));
        }
        let len = usize::try_from(len).map_err(|_| Error::Invalid(format!("{len} bytes do not fit memory")))?;
        Ok(Self { mapping: Mapping::new(fd, len, ProtFlags::READ)? })
    }

    /// Copies bytes out, and sums what was copied: `None` for what does not lie within.
    pub fn copy(&self, place: u64, into: &mut [u8]) -> Option<u64> {
        let start = self.mapping.at(place, into.len())?;
        if into.len() <= WHOLE {
            // SAFETY: as below.
            unsafe { std::ptr::copy_nonoverlapping(start.as_ptr(), into.as_mut_ptr(), into.len()) };
            return Some(checksum(into));
        }
        let mut sum = Sum::default();
        let mut from = start;
        for piece in into.chunks_mut(PIECE) {
            // SAFETY: within the mapping, which is this process's to read and cannot shrink; `piece` is not part of it, since it is not
            // writable. Should the other process write meanwhile, in breach of its word, then what is copied lacks its checksum.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), piece.as_mut_ptr(), piece.len());
                from = from.add(piece.len());
            }
            sum.add(piece);
        }
        Some(sum.value())
    }
}

/// Memory in which this process puts down what the agent then reads by its descriptor.
#[derive(Debug)]
pub struct Stage {
    mapping: Mapping,
    fd: OwnedFd,
}

impl Stage {
    /// Takes memory only as it is written to.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn new(len: u64) -> Result<Self, Error> {
        let fd = create("deepinfer-kv-stage", len, SealFlags::SEAL)?;
        let bytes = usize::try_from(len).map_err(|_| Error::Invalid(format!("{len} bytes do not fit memory")))?;
        let mapping = Mapping::new(fd.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Self { mapping, fd })
    }

    /// What the agent reads from.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Puts pieces down one behind the other, and sums them: `None` if they do not fit.
    pub fn put(&mut self, place: u64, pieces: &[&[u8]]) -> Option<u64> {
        let len = pieces.iter().map(|piece| piece.len()).sum();
        let mut to = self.mapping.at(place, len)?;
        let mut sum = Sum::default();
        for piece in pieces.iter().flat_map(|piece| piece.chunks(PIECE)) {
            sum.add(piece);
            // SAFETY: within the mapping, which nobody else of this process has; `piece` is not part of it.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), to.as_ptr(), piece.len());
                to = to.add(piece.len());
            }
        }
        Some(sum.value())
    }
}

/// A stage as the agent has it: read by system calls, so that nothing the other process does to it is a fault here.
#[derive(Debug)]
pub struct Staged {
    fd: OwnedFd,
    len: u64,
}

impl Staged {
    /// # Errors
    /// [`Error::Invalid`] for anything but a memory file: reading from others may wait for ever.
    pub fn new(fd: OwnedFd) -> Result<Self, Error> {
        if !holds(fd.as_fd()) {
            return Err(Error::Invalid("a stage is a memory file sealed against shrinking".to_owned()));
        }
        let len = length(fd.as_fd())?;
        Ok(Self { fd, len })
    }

    /// Reads bytes that all lie within.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a range beyond the end, [`Error::Io`].
    pub fn read(&self, place: u64, into: &mut [u8]) -> Result<(), Error> {
        if place.checked_add(into.len() as u64).is_none_or(|end| end > self.len) {
            return Err(Error::Invalid("a range beyond the end of the stage".to_owned()));
        }
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.fd, &mut into[done..], place + done as u64) {
                Ok(0) => return Err(Error::Invalid("the stage became shorter".to_owned())),
                Ok(more) => done += more,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(broken("reading a stage")(error)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
    }

    #[test]
    fn what_one_side_writes_the_other_reads_and_cannot_write() {
        let shared = Shared::new(4 << 20).unwrap();
        let bytes = pattern(3_000_001);
        // SAFETY: nobody else has the memory yet.
        unsafe { shared.bytes_mut(4096, bytes.len()) }.copy_from_slice(&bytes);
        let fd = shared.fd().try_clone_to_owned().unwrap();
        let view = View::new(fd.as_fd(), shared.len()).unwrap();
        let mut into = vec![0; bytes.len()];
        assert_eq!(view.copy(4096, &mut into), Some(checksum(&bytes)));
        assert_eq!(into, bytes);
        for len in [1, PIECE + 1, WHOLE, WHOLE + 1] {
            assert_eq!(view.copy(4096, &mut into[..len]), Some(checksum(&bytes[..len])), "{len}");
        }
        // SAFETY: nobody writes.
        assert_eq!(unsafe { shared.bytes(4096, bytes.len()) }, bytes);
        assert_eq!(view.copy((4 << 20) - 9, &mut [0; 10]), None);
        assert_eq!(view.copy(u64::MAX, &mut [0; 10]), None);
        assert_eq!(view.copy(4 << 20, &mut []), Some(checksum(&[])));
        assert!(Mapping::new(fd.as_fd(), 4096, ProtFlags::READ | ProtFlags::WRITE).is_err(), "mapped to be written");
        assert!(rustix::io::pwrite(&fd, b"x", 0).is_err(), "written");
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "made shorter");
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let again = std::fs::OpenOptions::new().read(true).write(true).open(again);
        assert!(again.is_err() || rustix::io::pwrite(again.unwrap(), b"x", 0).is_err(), "opened anew and written");
        assert!(View::new(fd.as_fd(), 8 << 20).is_err(), "longer than it is");
    }

    #[test]
    fn a_stage_is_read_within_its_bounds() {
        let mut stage = Stage::new(1 << 20).unwrap();
        let bytes = pattern(400_000);
        let (front, back) = bytes.split_at(131);
        assert_eq!(stage.put(500, &[front, &[], back]), Some(checksum(&bytes)));
        assert_eq!(stage.put((1 << 20) - 3, &[b"four"]), None);
        let staged = Staged::new(stage.fd().try_clone_to_owned().unwrap()).unwrap();
        let mut into = vec![0; bytes.len()];
        staged.read(500, &mut into).unwrap();
        assert_eq!(into, bytes);
        for (place, len) in [(1 << 20, 1), ((1 << 20) - 1, 2), (u64::MAX, 2)] {
            assert!(matches!(staged.read(place, &mut vec![0; len]), Err(Error::Invalid(_))), "{place}");
        }
    }

    #[test]
    fn what_is_no_sealed_memory_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(Staged::new(file.into()).is_err());
        let (pipe, _other) = std::io::pipe().unwrap();
        assert!(Staged::new(pipe.into()).is_err());
        let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(View::new(open.as_fd(), 4096).is_err(), "it could still shrink");
        assert!(Staged::new(open).is_err());
    }
}
