//! The directory of a store on this machine: who may open it, which version wrote it, who it is.
//!
//! Every file below is opened by name under a descriptor of the directory, never through a link; names are made here, of numbers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};

use crate::error::Error;

/// The version of the layout this code reads and writes.
pub const FORMAT: u32 = 1;

const HEAD: &str = "deepinfer kvstore ";

/// An opened root; the lock goes with it.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    path: PathBuf,
    media: u64,
    _lock: File,
}

fn os<T>(result: rustix::io::Result<T>) -> io::Result<T> {
    result.map_err(io::Error::from)
}

/// Opens a directory below another one, made where it is missing, closed to other users.
pub(crate) fn open_dir(below: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(below, name, Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    os(rustix::fs::openat(below, name, flags, Mode::empty()))
}

/// Opens a plain file below a directory, never through a link. A device, a pipe or a directory is refused.
pub(crate) fn open_file(below: &OwnedFd, name: &str, flags: OFlags) -> io::Result<File> {
    // NONBLOCK: a pipe put in a file's place must not hold the process at its open.
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(os(rustix::fs::openat(below, name, flags, Mode::RUSR | Mode::WUSR))?);
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a plain file")) }
}

impl Root {
    /// Opens a root, made where it is missing, and takes its lock.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when another process has it, [`Error::Newer`], [`Error::Invalid`] for a directory that holds something
    /// else, [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let shown = path.display();
        std::fs::create_dir_all(path.parent().unwrap_or(path)).map_err(Error::io(format!("create {shown}")))?;
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(Error::io(format!("create {shown}"))(error.into())),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = os(rustix::fs::open(path, flags, Mode::empty())).map_err(Error::io(format!("open {shown}")))?;
        let lock =
            open_file(&dir, "LOCK", OFlags::RDWR | OFlags::CREATE).map_err(Error::io(format!("open {shown}/LOCK")))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::Unavailable(format!(
                    "{shown} is open in another process: stop it or name another root"
                )));
            }
            Err(error) => return Err(Error::io(format!("lock {shown}/LOCK"))(error.into())),
        }
        let media = Self::format(&dir, path)?;
        Ok(Self { dir, path: path.to_owned(), media, _lock: lock })
    }

    /// Reads FORMAT, or writes it into a new root. Returns the id of the media.
    fn format(dir: &OwnedFd, path: &Path) -> Result<u64, Error> {
        let shown = path.join("FORMAT");
        let wrap = |what: &str| Error::io(format!("{what} {}", shown.display()));
        let mut bytes = Vec::new();
        match open_file(dir, "FORMAT", OFlags::RDONLY) {
            Ok(file) => file.take(4096).read_to_end(&mut bytes).map_err(wrap("read"))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::begin(dir, path),
            Err(error) => return Err(wrap("open")(error)),
        };
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines();
        let version = lines.next().and_then(|line| line.strip_prefix(HEAD)).and_then(|rest| rest.parse::<u32>().ok());
        let id = lines.next().and_then(|line| line.strip_prefix("media ")).filter(|digits| digits.len() == 16);
        match (version, id.and_then(|digits| u64::from_str_radix(digits, 16).ok())) {
            (Some(found), _) if found > FORMAT => {
                Err(Error::Newer { what: path.display().to_string(), found, known: FORMAT })
            }
            (Some(_), Some(media)) => Ok(media),
            _ => Err(Error::Invalid(format!("{} is no store's: name another root", shown.display()))),
        }
    }

    fn begin(dir: &OwnedFd, path: &Path) -> Result<u64, Error> {
        if rustix::fs::statat(dir, "segments", AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            let text = format!("{} has segments but no FORMAT: put the file back or name another root", path.display());
            return Err(Error::Invalid(text));
        }
        let wrap = |error| Error::io(format!("write {}/FORMAT", path.display()))(error);
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(|error| wrap(io::Error::other(error)))?;
        let media = u64::from_le_bytes(id);
        // Whole or not there at all.
        let write = || -> io::Result<()> {
            let mut file = open_file(dir, "FORMAT.new", OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
            file.write_all(format!("{HEAD}{FORMAT}\nmedia {media:016x}\n").as_bytes())?;
            file.sync_all()?;
            os(rustix::fs::renameat(dir, "FORMAT.new", dir, "FORMAT"))?;
            os(rustix::fs::fsync(dir))
        };
        write().map_err(wrap)?;
        Ok(media)
    }

    /// Id of the media, random, from the day the root was made.
    pub fn media(&self) -> u64 {
        self.media
    }

    /// Where it is, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn dir(&self) -> &OwnedFd {
        &self.dir
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_root_keeps_its_id_and_its_modes() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("a/b");
        let media = Root::open(&path).unwrap().media();
        assert_eq!(Root::open(&path).unwrap().media(), media);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        for name in ["LOCK", "FORMAT"] {
            assert_eq!(std::fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
        assert_ne!(Root::open(&base.path().join("c")).unwrap().media(), media);
    }

    #[test]
    fn one_at_a_time() {
        let base = tempfile::tempdir().unwrap();
        let first = Root::open(base.path()).unwrap();
        assert!(matches!(Root::open(base.path()), Err(Error::Unavailable(_))));
        drop(first);
        Root::open(base.path()).unwrap();
    }

    #[test]
    fn what_is_newer_or_no_store_is_refused() {
        let base = tempfile::tempdir().unwrap();
        Root::open(base.path()).unwrap();
        let format = base.path().join("FORMAT");
        std::fs::write(&format, "deepinfer kvstore 2\nsomething else\n").unwrap();
        assert!(matches!(Root::open(base.path()), Err(Error::Newer { found: 2, known: 1, .. })));
        for bytes in [&b""[..], b"deepinfer kvstore 1\n", b"deepinfer kvstore 1\nmedia 12\n", b"hello", b"\xff\xfe"] {
            std::fs::write(&format, bytes).unwrap();
            assert!(matches!(Root::open(base.path()), Err(Error::Invalid(_))), "{bytes:?}");
        }
        std::fs::remove_file(&format).unwrap();
        std::fs::create_dir(base.path().join("segments")).unwrap();
        assert!(matches!(Root::open(base.path()), Err(Error::Invalid(_))));
    }

    #[test]
    fn links_are_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let real = base.path().join("real");
        Root::open(&real).unwrap();
        symlink(&real, base.path().join("link")).unwrap();
        assert!(matches!(Root::open(&base.path().join("link")), Err(Error::Io { .. })));
        let target = base.path().join("target");
        std::fs::write(&target, "keep").unwrap();
        std::fs::remove_file(real.join("LOCK")).unwrap();
        symlink(&target, real.join("LOCK")).unwrap();
        assert!(matches!(Root::open(&real), Err(Error::Io { .. })));
        assert_eq!(std::fs::read(&target).unwrap(), b"keep");
    }
}
