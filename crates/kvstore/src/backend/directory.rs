//! A mounted directory as a back end: one file an object.
//!
//! Every file is opened below the directory's descriptor, by a [`Name`], and never through a link. A file is written under a name that no
//! reader looks for, synced, then given its own: whatever happens in between leaves no torn object, only a file that a later start removes.

use std::fs::File;
use std::io::{IoSlice, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{Backend, Capabilities, Name, Put, beyond};
use crate::Error;

/// Files of a write in progress begin so.
const TEMPORARY: &str = "tmp-";

/// Such a file that has not been touched for this long belongs to no writer any more.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A directory of this machine or of a file system of many.
#[derive(Clone, Debug)]
pub struct MountedDir(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: String,
    directory: OwnedFd,
    /// Tells temporary files of this process from those of others.
    writer: u64,
    writes: AtomicU64,
}

impl MountedDir {
    /// Opens a directory, which is made (0700) if it is not there; what is above it must be. Files are 0600.
    ///
    /// # Errors
    /// [`Error::Io`]: it cannot be made or opened, or is a link.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let shown = path.display().to_string();
        let failed = |source: Errno| Error::io(format!("open the directory {shown}"))(source.into());
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(source) => return Err(failed(source)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        let mut writer = [0; 8];
        getrandom::fill(&mut writer).map_err(|source| Error::Unavailable(format!("no random numbers: {source}")))?;
        let inner = Inner { path: shown, directory, writer: u64::from_le_bytes(writer), writes: AtomicU64::new(0) };
        inner.sweep(SystemTime::now())?;
        Ok(Self(Arc::new(inner)))
    }

    /// Runs `work` where it may wait for a disk.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let inner = self.0.clone();
        let done = tokio::task::spawn_blocking(move || work(&inner)).await;
        done.unwrap_or_else(|stopped| Err(Error::Unavailable(format!("{}: {stopped}", self.0.path))))
    }
}

impl Inner {
    fn failed(&self, what: &str, name: &str) -> impl Fn(Errno) -> Error {
        let what = format!("{what} {}/{name}", self.path);
        move |source| match source {
            Errno::NOSPC | Errno::DQUOT => Error::Full(what.clone()),
            source => Error::io(what.clone())(source.into()),
        }
    }

    /// Removes what writers that ended left behind.
    fn sweep(&self, now: SystemTime) -> Result<(), Error> {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        self.each(|name, kind| {
            if name.starts_with(TEMPORARY) && kind == FileType::RegularFile {
                let stat = rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW);
                if stat.is_ok_and(|stat| now > Duration::from_secs(stat.st_mtime.unsigned_abs()) + ABANDONED) {
                    rustix::fs::unlinkat(&self.directory, name, AtFlags::empty())
                        .or_else(gone)
                        .map_err(self.failed("remove", name))?;
                }
            }
            Ok(())
        })
    }

    /// Tells of every entry with its type, as far as the file system knows it.
    fn each(&self, mut tell: impl FnMut(&str, FileType) -> Result<(), Error>) -> Result<(), Error> {
        for entry in Dir::read_from(&self.directory).map_err(self.failed("list", ""))? {
            let entry = entry.map_err(self.failed("list", ""))?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let mut kind = entry.file_type();
            if kind == FileType::Unknown {
                let Ok(stat) = rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
                kind = FileType::from_raw_mode(stat.st_mode);
            }
            tell(name, kind)?;
        }
        Ok(())
    }

    fn put(&self, name: &Name, parts: &[Bytes], replace: bool) -> Result<Put, Error> {
        let temporary = format!("{TEMPORARY}{:016x}-{}", self.writer, self.writes.fetch_add(1, Relaxed));
        let put = self.write(&temporary, parts).and_then(|()| self.publish(&temporary, name, replace));
        // Gone already where it was renamed.
        let _ = rustix::fs::unlinkat(&self.directory, &temporary, AtFlags::empty());
        let put = put?;
        rustix::fs::fsync(&self.directory).map_err(self.failed("sync", ""))?;
        Ok(put)
    }

    fn write(&self, temporary: &str, parts: &[Bytes]) -> Result<(), Error> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.directory, temporary, flags, Mode::RUSR | Mode::WUSR)
            .map_err(self.failed("create", temporary))?;
        let mut file = File::from(file);
        write_all(&mut file, parts).and_then(|()| file.sync_all()).map_err(|source| {
            let what = format!("write {}/{temporary}", self.path);
            match source.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Error::Full(what),
                _ => Error::io(what)(source),
            }
        })
    }

    fn publish(&self, temporary: &str, name: &Name, replace: bool) -> Result<Put, Error> {
        let (from, to) = (&self.directory, &self.directory);
        let done = if replace {
            rustix::fs::renameat(from, temporary, to, name.as_str())
        } else {
            match rustix::fs::linkat(from, temporary, to, name.as_str(), AtFlags::empty()) {
                // A file system without hard links.
                Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                    rustix::fs::renameat_with(from, temporary, to, name.as_str(), RenameFlags::NOREPLACE)
                }
                done => done,
            }
        };
        match done {
            Ok(()) => Ok(Put::Created),
            Err(Errno::EXIST) if !replace => Ok(Put::Exists),
            Err(source) => Err(self.failed("name", name.as_str())(source)),
        }
    }

    fn get(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::openat(&self.directory, name.as_str(), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(source) => return Err(self.failed("open", name.as_str())(source)),
        };
        let failed = || Error::io(format!("read {}/{name}", self.path));
        let about = file.metadata().map_err(failed())?;
        if !about.is_file() {
            return Err(failed()(std::io::Error::other("not a file")));
        }
        let read = |range: &Range<u64>| {
            if range.start > range.end || range.end > about.len() {
                return Err(beyond(name, range, about.len()));
            }
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start).map_err(failed())?;
            Ok(Bytes::from(bytes))
        };
        ranges.iter().map(read).collect::<Result<_, _>>().map(Some)
    }
}

/// For `or_else`: nothing to remove is removed.
fn gone(source: Errno) -> Result<(), Errno> {
    if source == Errno::NOENT { Ok(()) } else { Err(source) }
}

fn write_all(file: &mut File, parts: &[Bytes]) -> std::io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = slices.as_mut_slice();
    // Drops empty parts, of which a write of nothing would otherwise look like a full disk.
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[async_trait]
impl Backend for MountedDir {
    fn place(&self) -> &str {
        &self.0.path
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { ttl: false, conditional_put: true, checksum: false, range: true }
    }

    async fn put_segment(&self, name: &Name, parts: Vec<Bytes>) -> Result<(), Error> {
        let name = name.clone();
        self.blocking(move |inner| inner.put(&name, &parts, true).map(|_| ())).await
    }

    async fn put_object(&self, name: &Name, parts: Vec<Bytes>) -> Result<Put, Error> {
        let name = name.clone();
        self.blocking(move |inner| inner.put(&name, &parts, false)).await
    }

    async fn get_ranges(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error> {
        let (name, ranges) = (name.clone(), ranges.to_vec());
        self.blocking(move |inner| inner.get(&name, &ranges)).await
    }

    async fn delete_many(&self, names: &[Name]) -> Result<(), Error> {
        let names = names.to_vec();
        self.blocking(move |inner| {
            for name in &names {
                rustix::fs::unlinkat(&inner.directory, name.as_str(), AtFlags::empty())
                    .or_else(gone)
                    .map_err(inner.failed("delete", name.as_str()))?;
            }
            rustix::fs::fsync(&inner.directory).map_err(inner.failed("sync", ""))
        })
        .await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, Error> {
        let prefix = prefix.to_owned();
        self.blocking(move |inner| {
            let mut found = Vec::new();
            inner.each(|name, kind| {
                let wanted = kind == FileType::RegularFile && name.starts_with(&prefix);
                if let Some(name) = wanted.then(|| name.parse::<Name>().ok()).flatten() {
                    // Deleted since: not there.
                    if let Ok(stat) = rustix::fs::statat(&inner.directory, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                        found.push((name, stat.st_size as u64));
                    }
                }
                Ok(())
            })?;
            found.sort();
            Ok(found)
        })
        .await
    }
}
