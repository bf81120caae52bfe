//! What a store must know at its start and cannot read from its segments: tenants with their quotas, times to live, which records are bad or
//! removed, which segments there should be, how far its time had come. In `redb`, written when one of these changes: never for a block.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use redb::{Database, Durability, ReadableTable, TableDefinition};
use rustix::fs::OFlags;

use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Place;
use crate::object::{Class, TenantId};
use crate::root::{Root, open_file};

/// Name → number, quota in bytes (all ones: none).
const TENANTS: TableDefinition<&str, (u16, u64)> = TableDefinition::new("tenants");
/// Class → time to live, seconds.
const LIFETIMES: TableDefinition<u8, u32> = TableDefinition::new("lifetimes");
/// (segment, offset) → kind, key, why, when.
const BAD: TableDefinition<(u32, u32), (u8, u128, u8, u32)> = TableDefinition::new("bad");
/// Segment → bytes when it was sealed.
const SEGMENTS: TableDefinition<u32, u64> = TableDefinition::new("segments");
/// Numbers by name.
const SETTINGS: TableDefinition<&str, u64> = TableDefinition::new("settings");

const NAME: &str = "catalogue.redb";
const NEW: &str = "catalogue.new";

const NO_QUOTA: u64 = u64::MAX;
const TIME: &str = "time";
const NUMBERS: &str = "tenant numbers";

/// What is to be done about a file that is no database any more.
const DAMAGED: &str = "it is damaged: put a copy back, or move it away; a store without it no longer knows names of tenants, and finds \
    only what is everybody's, and what was removed may be back";

/// Longest name of a tenant.
pub const MAX_NAME: usize = 64;

/// Why a record is not to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Bad {
    /// Its bytes lacked their checksum.
    Damaged = 1,
    /// Somebody asked for the object's removal: no record of it up to this place counts.
    Removed = 2,
    /// Another writer of the same name was faster; only this record does not count.
    Stray = 3,
}

impl Bad {
    fn from_byte(byte: u8) -> Self {
        match byte {
            2 => Self::Removed,
            3 => Self::Stray,
            _ => Self::Damaged,
        }
    }
}

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its number.
    pub id: TenantId,
    /// Most bytes of objects it may have.
    pub quota: Option<u64>,
}

/// The database.
pub struct Catalogue {
    db: Database,
}

/// An error of the database, boxed: it is large, and rare.
struct Fault(Box<redb::Error>);

impl<E: Into<redb::Error>> From<E> for Fault {
    fn from(error: E) -> Self {
        Self(Box::new(error.into()))
    }
}

impl Fault {
    fn during(self, what: &str) -> Error {
        let what = format!("{what} in the catalogue");
        match *self.0 {
            redb::Error::Io(source) if source.kind() == io::ErrorKind::StorageFull => {
                Error::Full(format!("{what}: {source}"))
            }
            redb::Error::Io(source) => Error::Io { what, source },
            other => Error::Io { what, source: io::Error::other(other.to_string()) },
        }
    }
}

fn wrap<E: Into<Fault>>(what: &str) -> impl FnOnce(E) -> Error {
    move |error| error.into().during(what)
}

fn name_is_fit(name: &str) -> Result<(), Error> {
    let fit = (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
    fit.then_some(()).ok_or_else(|| {
        Error::Invalid(format!("a tenant's name is 1 to {MAX_NAME} letters, digits, dots, dashes and underscores"))
    })
}

impl Catalogue {
    /// Opens the catalogue of a root, made where it is missing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(root: &Root) -> Result<Self, Error> {
        let shown = root.path().display();
        let flags = OFlags::RDWR;
        let file = match open_file(root.dir(), NAME, flags) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A database that is half made cannot be opened: it gets its name when it is whole.
                let fresh = open_file(root.dir(), NEW, flags | OFlags::CREATE | OFlags::TRUNC);
                drop(Self::of(fresh.map_err(Error::io(format!("create {shown}/{NEW}")))?)?);
                rustix::fs::renameat(root.dir(), NEW, root.dir(), NAME)
                    .and_then(|()| rustix::fs::fsync(root.dir()))
                    .map_err(|error| Error::io(format!("name {shown}/{NAME}"))(error.into()))?;
                open_file(root.dir(), NAME, flags)
            }
            other => other,
        };
        let what = || format!("open {shown}/{NAME}");
        let file = file.map_err(Error::io(what()))?;
        // The database takes some damage for a mistake of its own and panics.
        let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Self::of(file)));
        match opened {
            // Its own errors come as `Other`; what the system says is no damage.
            Ok(Err(Error::Io { source, .. }))
                if matches!(
                    source.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::Other
                ) => {}
            Ok(other) => return other,
            Err(_) => {}
        }
        Err(Error::io(what())(io::Error::new(io::ErrorKind::InvalidData, DAMAGED)))
    }

    fn of(file: File) -> Result<Self, Error> {
        let mut builder = Database::builder();
        builder.set_cache_size(4 << 20);
        builder.create_with_file_format_v3(true);
        let db = builder.create_file(file).map_err(wrap("open"))?;
        let catalogue = Self { db };
        // All tables are there from now on, so that reading needs no case for a missing one.
        catalogue.change("begin", Durability::Immediate, |change| {
            change.open_table(TENANTS)?;
            change.open_table(LIFETIMES)?;
            change.open_table(BAD)?;
            change.open_table(SEGMENTS)?;
            change.open_table(SETTINGS)?;
            Ok(())
        })?;
        Ok(catalogue)
    }

    fn change<T>(
        &self,
        what: &str,
        durability: Durability,
        change: impl FnOnce(&redb::WriteTransaction) -> Result<T, Fault>,
    ) -> Result<T, Error> {
        let mut transaction = self.db.begin_write().map_err(wrap(what))?;
        transaction.set_durability(durability);
        let done = change(&transaction).map_err(wrap(what))?;
        transaction.commit().map_err(wrap(what))?;
        Ok(done)
    }

    fn look<T>(&self, what: &str, look: impl FnOnce(&redb::ReadTransaction) -> Result<T, Fault>) -> Result<T, Error> {
        let transaction = self.db.begin_read().map_err(wrap(what))?;
        look(&transaction).map_err(wrap(what))
    }

    /// The tenant of a name, with a new number if it has none. A number is never given to a second name.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is none, [`Error::Full`] when all 65,535 numbers are given, [`Error::Io`].
    pub fn tenant(&self, name: &str) -> Result<Tenant, Error> {
        if let Some(tenant) = self.known_tenant(name)? {
            return Ok(tenant);
        }
        let id = self.change("add a tenant", Durability::Immediate, |change| {
            let mut tenants = change.open_table(TENANTS)?;
            let mut settings = change.open_table(SETTINGS)?;
            let given = settings.get(NUMBERS)?.map_or(0, |given| given.value());
            let known = tenants.get(name)?.map(|found| found.value().0);
            let fresh = u16::try_from(given + 1).ok();
            if let (None, Some(id)) = (known, fresh) {
                settings.insert(NUMBERS, u64::from(id))?;
                tenants.insert(name, (id, NO_QUOTA))?;
            }
            Ok(known.or(fresh))
        })?;
        let id = id.ok_or_else(|| Error::Full("all 65535 numbers of tenants are given".to_owned()))?;
        Ok(Tenant { id: TenantId(id), quota: None })
    }

    /// The tenant of a name, if it has a number.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is none, [`Error::Io`].
    pub fn known_tenant(&self, name: &str) -> Result<Option<Tenant>, Error> {
        name_is_fit(name)?;
        self.look("find a tenant", |look| {
            let found = look.open_table(TENANTS)?.get(name)?.map(|found| found.value());
            Ok(found.map(|(id, quota)| Tenant { id: TenantId(id), quota: (quota != NO_QUOTA).then_some(quota) }))
        })
    }

    /// Numbers up to `seen` are somebody's, whatever became of the table of names: its file may have been lost.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn keep_numbers(&self, seen: TenantId) -> Result<(), Error> {
        let given = self.setting(NUMBERS)?.unwrap_or(0);
        if given >= u64::from(seen.0) {
            return Ok(());
        }
        self.set(NUMBERS, u64::from(seen.0), Durability::Immediate)
    }

    /// All tenants by name.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn tenants(&self) -> Result<BTreeMap<String, Tenant>, Error> {
        self.look("read tenants", |look| {
            let table = look.open_table(TENANTS)?;
            let mut found = BTreeMap::new();
            for row in table.iter()? {
                let (name, value) = row?;
                let (id, quota) = value.value();
                let quota = (quota != NO_QUOTA).then_some(quota);
                found.insert(name.value().to_owned(), Tenant { id: TenantId(id), quota });
            }
            Ok(found)
        })
    }

    /// Sets or lifts a tenant's quota.
    ///
    /// # Errors
    /// As [`Catalogue::tenant`].
    pub fn set_quota(&self, name: &str, quota: Option<u64>) -> Result<Tenant, Error> {
        let tenant = Tenant { quota: quota.filter(|&bytes| bytes != NO_QUOTA), ..self.tenant(name)? };
        self.change("set a quota", Durability::Immediate, |change| {
            change.open_table(TENANTS)?.insert(name, (tenant.id.0, tenant.quota.unwrap_or(NO_QUOTA)))?;
            Ok(())
        })?;
        Ok(tenant)
    }

    /// Times to live that were set, seconds; a class without one has its default.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn lifetimes(&self) -> Result<BTreeMap<u8, u32>, Error> {
        self.look("read times to live", |look| {
            let table = look.open_table(LIFETIMES)?;
            table
                .iter()?
                .map(|row| row.map(|(class, seconds)| (class.value(), seconds.value())).map_err(Into::into))
                .collect()
        })
    }

    /// Sets a class's time to live.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn set_lifetime(&self, class: Class, seconds: u32) -> Result<(), Error> {
        self.change("set a time to live", Durability::Immediate, |change| {
            change.open_table(LIFETIMES)?.insert(class as u8, seconds)?;
            Ok(())
        })
    }

    /// Records that are never to be served again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn add_bad(&self, records: &[(Place, ObjectId)], why: Bad, now: u32) -> Result<(), Error> {
        self.change("note a bad record", Durability::Immediate, |change| {
            let mut table = change.open_table(BAD)?;
            for (place, id) in records {
                table.insert((place.segment, place.offset), (id.kind as u8, id.key.0, why as u8, now))?;
            }
            Ok(())
        })
    }

    /// All of them.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn bad(&self) -> Result<Vec<(Place, ObjectId, Bad)>, Error> {
        self.look("read bad records", |look| {
            let table = look.open_table(BAD)?;
            let mut found = Vec::new();
            for row in table.iter()? {
                let (place, value) = row?;
                let ((segment, offset), (kind, key, why, _)) = (place.value(), value.value());
                let kind = if kind == Kind::Slice as u8 { Kind::Slice } else { Kind::Block };
                found.push((Place { segment, offset }, ObjectId { kind, key: Key(key) }, Bad::from_byte(why)));
            }
            Ok(found)
        })
    }

    /// Notes sealed segments, so that one whose file is lost is missed.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn add_segments(&self, segments: &[(u32, u64)]) -> Result<(), Error> {
        self.change("note segments", Durability::Eventual, |change| {
            let mut table = change.open_table(SEGMENTS)?;
            for &(number, bytes) in segments {
                table.insert(number, bytes)?;
            }
            Ok(())
        })
    }

    /// Forgets a deleted segment with its bad records. Call before the deletion: what is forgotten and still there is found again.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_segment(&self, number: u32) -> Result<(), Error> {
        self.change("forget a segment", Durability::Eventual, |change| {
            change.open_table(SEGMENTS)?.remove(number)?;
            Ok(())
        })
    }

    /// Forgets the bad records of a segment that is deleted. A removal stays noted until no segment is left that is `oldest` or newer and may
    /// hold an earlier record of the object.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn remove_bad(&self, number: u32, oldest: u32) -> Result<(), Error> {
        self.change("forget bad records", Durability::Eventual, |change| {
            let mut table = change.open_table(BAD)?;
            table.retain_in((number, 0)..=(number, u32::MAX), |_, (_, _, why, _)| why == Bad::Removed as u8)?;
            table.retain_in((0, 0)..(oldest, 0), |_, _| false)?;
            Ok(())
        })
    }

    /// Sealed segments that were noted.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn segments(&self) -> Result<BTreeMap<u32, u64>, Error> {
        self.look("read segments", |look| {
            let table = look.open_table(SEGMENTS)?;
            table
                .iter()?
                .map(|row| row.map(|(number, bytes)| (number.value(), bytes.value())).map_err(Into::into))
                .collect()
        })
    }

    fn setting(&self, name: &str) -> Result<Option<u64>, Error> {
        self.look("read a setting", |look| Ok(look.open_table(SETTINGS)?.get(name)?.map(|value| value.value())))
    }

    fn set(&self, name: &str, value: u64, durability: Durability) -> Result<(), Error> {
        self.change("keep a setting", durability, |change| {
            change.open_table(SETTINGS)?.insert(name, value)?;
            Ok(())
        })
    }

    /// How far the store's time had come, Unix seconds.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn time(&self) -> Result<Option<u32>, Error> {
        Ok(self.setting(TIME)?.and_then(|time| u32::try_from(time).ok()))
    }

    /// Keeps the time.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn set_time(&self, now: u32) -> Result<(), Error> {
        self.set(TIME, now.into(), Durability::Eventual)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn with(base: &tempfile::TempDir, what: impl FnOnce(&Catalogue)) {
        let root = Root::open(base.path()).unwrap();
        what(&Catalogue::open(&root).unwrap());
    }

    #[test]
    fn a_damaged_file_is_an_error_that_says_what_to_do() {
        let base = tempfile::tempdir().unwrap();
        with(&base, |catalogue| assert_eq!(catalogue.tenant("a").unwrap().id, TenantId(1)));
        let file = base.path().join(NAME);
        let whole = std::fs::read(&file).unwrap();
        let mut damaged = vec![b"no database".to_vec(), whole[..whole.len() / 2].to_vec(), whole[..100].to_vec()];
        damaged.extend([1, 64, 5000].map(|more| [&whole[..], &vec![7; more]].concat()));
        for bytes in damaged {
            std::fs::write(&file, &bytes).unwrap();
            let root = Root::open(base.path()).unwrap();
            let error = Catalogue::open(&root).err().unwrap().to_string();
            assert!(
                error.contains("catalogue.redb") && error.contains("put a copy back"),
                "{} bytes: {error}",
                bytes.len()
            );
        }
        std::fs::write(&file, &whole).unwrap();
        with(&base, |catalogue| assert_eq!(catalogue.known_tenant("a").unwrap().unwrap().id, TenantId(1)));
    }

    #[test]
    fn tenants_keep_their_numbers_and_quotas() {
        let base = tempfile::tempdir().unwrap();
        with(&base, |catalogue| {
            assert_eq!(catalogue.known_tenant("a").unwrap(), None);
            assert_eq!(catalogue.tenant("a").unwrap(), Tenant { id: TenantId(1), quota: None });
            assert_eq!(catalogue.set_quota("b", Some(77)).unwrap(), Tenant { id: TenantId(2), quota: Some(77) });
            assert_eq!(catalogue.tenant("a").unwrap().id, TenantId(1));
        });
        with(&base, |catalogue| {
            assert_eq!(catalogue.tenant("b").unwrap(), Tenant { id: TenantId(2), quota: Some(77) });
            assert_eq!(catalogue.known_tenant("b").unwrap(), Some(Tenant { id: TenantId(2), quota: Some(77) }));
            catalogue.set_quota("b", None).unwrap();
            catalogue.keep_numbers(TenantId(40)).unwrap();
            catalogue.keep_numbers(TenantId(3)).unwrap();
            assert_eq!(catalogue.tenant("c").unwrap().id, TenantId(41));
            assert_eq!(catalogue.tenants().unwrap().len(), 3);
            assert_eq!(catalogue.tenants().unwrap()["b"].quota, None);
            catalogue.keep_numbers(TenantId(u16::MAX)).unwrap();
            assert!(matches!(catalogue.tenant("d"), Err(Error::Full(_))));
            for name in ["", "a/b", "..\u{0}", "é", &"x".repeat(65)] {
                assert!(matches!(catalogue.tenant(name), Err(Error::Invalid(_))), "{name}");
                assert!(matches!(catalogue.known_tenant(name), Err(Error::Invalid(_))), "{name}");
            }
        });
        let mode = std::fs::metadata(base.path().join("catalogue.redb")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn bad_records_go_with_their_segment() {
        let base = tempfile::tempdir().unwrap();
        let id = |key| ObjectId { kind: Kind::Slice, key: Key(key) };
        let place = |segment, offset| Place { segment, offset };
        with(&base, |catalogue| {
            let damaged = [(place(1, 5), id(9)), (place(2, 0), id(8)), (place(2, u32::MAX), id(7))];
            catalogue.add_bad(&damaged, Bad::Damaged, 1).unwrap();
            catalogue.add_bad(&[(place(3, 1), id(6))], Bad::Removed, 1).unwrap();
            catalogue.add_segments(&[(1, 10), (2, 20)]).unwrap();
            catalogue.remove_segment(2).unwrap();
            catalogue.add_bad(&[(place(2, 7), id(5))], Bad::Removed, 1).unwrap();
            catalogue.add_bad(&[(place(2, 8), id(4))], Bad::Stray, 1).unwrap();
            catalogue.remove_bad(2, 1).unwrap();
            catalogue.set_time(55).unwrap();
        });
        with(&base, |catalogue| {
            let bad = catalogue.bad().unwrap();
            let removed = (place(3, 1), id(6), Bad::Removed);
            let expected = [(place(1, 5), id(9), Bad::Damaged), (place(2, 7), id(5), Bad::Removed), removed];
            assert_eq!(bad, expected);
            catalogue.remove_bad(1, 3).unwrap();
            assert_eq!(catalogue.bad().unwrap(), [removed]);
            assert_eq!(catalogue.segments().unwrap(), BTreeMap::from([(1, 10)]));
            assert_eq!(catalogue.time().unwrap(), Some(55));
        });
    }

    #[test]
    fn what_a_killed_creation_left_is_made_anew() {
        let base = tempfile::tempdir().unwrap();
        Root::open(base.path()).unwrap();
        std::fs::write(base.path().join(NEW), [7; 5000]).unwrap();
        with(&base, |catalogue| assert!(catalogue.tenants().unwrap().is_empty()));
        assert!(!base.path().join(NEW).exists());
    }

    #[test]
    fn times_to_live_are_kept() {
        let base = tempfile::tempdir().unwrap();
        with(&base, |catalogue| {
            assert!(catalogue.lifetimes().unwrap().is_empty());
            catalogue.set_lifetime(Class::Agent, 30).unwrap();
        });
        with(&base, |catalogue| {
            assert_eq!(catalogue.lifetimes().unwrap(), BTreeMap::from([(Class::Agent as u8, 30)]));
        });
    }
}
