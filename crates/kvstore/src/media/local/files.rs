//! The files of the segments: names, opening and deleting below one directory, and a bound on how many stay open.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{AtFlags, OFlags};

/// The name of a segment's file.
pub(crate) fn name(segment: u32) -> String {
    format!("{segment:08x}.seg")
}

fn number(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".seg").filter(|digits| digits.len() == 8)?;
    let found = u32::from_str_radix(digits, 16).ok().filter(|&found| found != 0)?;
    (self::name(found) == name).then_some(found)
}

struct Opened {
    file: Arc<File>,
    used: AtomicU64,
}

/// The directory with its open files.
pub(crate) struct Files {
    dir: OwnedFd,
    most: usize,
    clock: AtomicU64,
    open: RwLock<BTreeMap<u32, Opened>>,
}

impl Files {
    /// At most `most` sealed segments stay open between reads.
    pub(crate) fn new(dir: OwnedFd, most: usize) -> Self {
        Self { dir, most, clock: AtomicU64::new(0), open: RwLock::default() }
    }

    /// Numbers of the segments that exist, in order. Files of other names are left alone.
    pub(crate) fn list(&self) -> io::Result<Vec<u32>> {
        let mut found: Vec<u32> = rustix::fs::Dir::read_from(&self.dir)?
            .filter_map(|entry| entry.map(|entry| entry.file_name().to_str().ok().and_then(number)).transpose())
            .collect::<Result<_, _>>()?;
        found.sort_unstable();
        Ok(found)
    }

    /// Makes a segment's file; the name is on the disk when this returns.
    pub(crate) fn create(&self, segment: u32) -> io::Result<Arc<File>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let file = Arc::new(crate::root::open_file(&self.dir, &name(segment), flags)?);
        rustix::fs::fsync(&self.dir)?;
        Ok(file)
    }

    /// Opens one for writing, outside of what is kept open.
    pub(crate) fn open_to_write(&self, segment: u32) -> io::Result<Arc<File>> {
        crate::root::open_file(&self.dir, &name(segment), OFlags::RDWR).map(Arc::new)
    }

    /// The file of a segment, to read from: it stays readable while the caller has it, deleted or not.
    pub(crate) fn get(&self, segment: u32) -> io::Result<Arc<File>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(opened) = self.open.read().unwrap_or_else(PoisonError::into_inner).get(&segment) {
            opened.used.store(now, Ordering::Relaxed);
            return Ok(Arc::clone(&opened.file));
        }
        // Opened under the lock: a segment deleted meanwhile must not be kept open for ever.
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let file = Arc::new(crate::root::open_file(&self.dir, &name(segment), OFlags::RDONLY)?);
        if open.len() >= self.most {
            let oldest = open.iter().min_by_key(|(_, opened)| opened.used.load(Ordering::Relaxed)).map(|(&at, _)| at);
            oldest.map(|at| open.remove(&at));
        }
        open.insert(segment, Opened { file: Arc::clone(&file), used: AtomicU64::new(now) });
        Ok(file)
    }

    pub(crate) fn delete(&self, segment: u32) -> io::Result<()> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.remove(&segment);
        match rustix::fs::unlinkat(&self.dir, name(segment), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_names_made_here_are_segments() {
        assert_eq!(number(&name(10)), Some(10));
        assert_eq!(number(&name(u32::MAX)), Some(u32::MAX));
        for text in ["00000000.seg", "0000000A.seg", "+000000a.seg", "a.seg", "0000000a.seg.new", "0000000a", ""] {
            assert_eq!(number(text), None, "{text}");
        }
    }

    #[test]
    fn few_files_stay_open_and_deleted_ones_read_on() {
        let base = tempfile::tempdir().unwrap();
        let dir = OwnedFd::from(File::open(base.path()).unwrap());
        let files = Files::new(dir, 2);
        for segment in 1..=4 {
            files.create(segment).unwrap().set_len(u64::from(segment)).unwrap();
        }
        assert_eq!(files.list().unwrap(), [1, 2, 3, 4]);
        for segment in 1..=4 {
            assert_eq!(files.get(segment).unwrap().metadata().unwrap().len(), u64::from(segment));
            assert!(files.open.read().unwrap().len() <= 2);
        }
        let held = files.get(3).unwrap();
        files.delete(3).unwrap();
        files.delete(3).unwrap();
        assert_eq!(held.metadata().unwrap().len(), 3);
        assert_eq!(files.get(3).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(files.list().unwrap(), [1, 2, 4]);
    }
}
