#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::Error;

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn names_are_hex_and_a_suffix_or_nothing() {
    for good in ["0", "0000000a.seg", &"f".repeat(64), "00ff.x"] {
        assert_eq!(name(good).as_str(), good);
    }
    for bad in [
        "",
        ".",
        "..",
        ".seg",
        "0/0",
        "../0",
        "0A",
        "g",
        "0.",
        "0.SEG",
        "0.s.t",
        "0.segsegseg",
        "tmp-0",
        "é",
        "0\0",
        &"0".repeat(65),
    ] {
        assert!(bad.parse::<Name>().is_err(), "{bad:?}");
    }
    assert_eq!(Name::segment(10).as_str(), "0000000a.seg");
    let other = Name::segment_of(0xab, 10);
    assert_eq!(other.as_str(), "00000000000000ab0000000a.seg");
    assert_eq!((other.number_of(0xab), other.number_of(0xac), other.number()), (Some(10), None, None));
    assert_eq!(Name::segment(10).number_of(0), None);
    assert_eq!(Name::segment(u32::MAX).number(), Some(u32::MAX));
    assert_eq!(["0.seg", "0000000a", "0000000a.tmp"].map(|other| name(other).number()), [None; 3]);
}

/// What every kind does.
async fn keeps_the_contract(backend: &dyn Backend) {
    let (one, two) = (Name::segment(1), Name::segment(2));
    let parts = || vec![Bytes::from_static(b"hello, "), Bytes::new(), Bytes::from_static(b"world")];
    assert!(backend.list("").await.unwrap().is_empty());
    assert_eq!(backend.get_ranges(&one, &[0..1]).await.unwrap(), None);
    assert_eq!(backend.put_object(&one, parts()).await.unwrap(), Put::Created);
    assert_eq!(backend.put_object(&one, vec![Bytes::from_static(b"other")]).await.unwrap(), Put::Exists);
    let found = backend.get_ranges(&one, &[7..12, 0..5, 3..3, 0..12]).await.unwrap().unwrap();
    assert_eq!(found.iter().map(text).collect::<Vec<_>>(), ["world", "hello", "", "hello, world"]);
    for range in [0..13, 12..13, 20..30] {
        assert!(backend.get_ranges(&one, &[0..1, range.clone()]).await.is_err(), "{range:?}");
    }
    // A segment takes the place of another; an empty object is one.
    backend.put_segment(&two, vec![Bytes::from_static(b"first")]).await.unwrap();
    backend.put_segment(&two, vec![]).await.unwrap();
    assert_eq!(backend.get_ranges(&two, &[0..0]).await.unwrap(), Some(vec![Bytes::new()]));
    backend.put_segment(&name("ff"), parts()).await.unwrap();
    assert_eq!(backend.list("").await.unwrap(), [(one.clone(), 12), (two.clone(), 0), (name("ff"), 12)]);
    assert_eq!(backend.list("00000001").await.unwrap(), [(one.clone(), 12)]);
    backend.delete_many(&[one.clone(), name("abc"), two.clone()]).await.unwrap();
    backend.delete_many(&[]).await.unwrap();
    assert_eq!(backend.list("").await.unwrap(), [(name("ff"), 12)]);
    assert_eq!(backend.get_ranges(&one, &[0..1]).await.unwrap(), None);
}

#[test]
fn memory_keeps_the_contract() {
    wait(keeps_the_contract(&Memory::new()));
}

#[test]
fn a_directory_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    wait(keeps_the_contract(&MountedDir::open(&folder.path().join("domain")).unwrap()));
}

#[test]
fn files_are_for_their_owner_and_nothing_else_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("domain");
    let backend = MountedDir::open(&path).unwrap();
    wait(backend.put_object(&Name::segment(1), vec![Bytes::from_static(b"x")])).unwrap();
    wait(backend.put_object(&Name::segment(1), vec![Bytes::from_static(b"y")])).unwrap();
    wait(backend.put_segment(&Name::segment(2), vec![Bytes::from_static(b"z")])).unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let mut files: Vec<_> = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files, [path.join("00000001.seg"), path.join("00000002.seg")]);
    assert!(files.iter().all(|file| mode(file) == 0o600));
}

#[test]
fn links_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, secret) = (folder.path().join("domain"), folder.path().join("secret"));
    std::fs::write(&secret, "secret").unwrap();
    let backend = MountedDir::open(&path).unwrap();
    symlink(&secret, path.join("00000001.seg")).unwrap();
    std::fs::create_dir(path.join("00000002.seg")).unwrap();
    assert!(matches!(wait(backend.get_ranges(&Name::segment(1), &[0..6])), Err(Error::Io { .. })));
    assert!(matches!(wait(backend.get_ranges(&Name::segment(2), &[0..0])), Err(Error::Io { .. })));
    assert!(wait(backend.list("")).unwrap().is_empty());
    // Writing puts a file in the link's place and leaves what it pointed to.
    assert_eq!(wait(backend.put_object(&Name::segment(1), vec![])).unwrap(), Put::Exists);
    wait(backend.put_segment(&Name::segment(1), vec![Bytes::from_static(b"mine")])).unwrap();
    assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
    assert_eq!(std::fs::read(path.join("00000001.seg")).unwrap(), b"mine");
    symlink(&path, folder.path().join("link")).unwrap();
    assert!(matches!(MountedDir::open(&folder.path().join("link")), Err(Error::Io { .. })));
}

#[test]
fn a_torn_write_is_no_object_and_is_removed_when_old() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("domain");
    let backend = MountedDir::open(&path).unwrap();
    let (fresh, old) = (path.join("tmp-0000000000000001-0"), path.join("tmp-0000000000000001-1"));
    for file in [&fresh, &old] {
        std::fs::write(file, "half an obj").unwrap();
    }
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
    std::fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    assert!(wait(backend.list("")).unwrap().is_empty());
    MountedDir::open(&path).unwrap();
    assert!(fresh.exists() && !old.exists());
}

#[test]
fn of_writers_side_by_side_one_creates() {
    let folder = tempfile::tempdir().unwrap();
    let writers: Vec<MountedDir> = (0..4).map(|_| MountedDir::open(folder.path()).unwrap()).collect();
    for round in 0..20 {
        let created: usize = std::thread::scope(|scope| {
            let all: Vec<_> = (0..4u8)
                .map(|at| {
                    let writer = &writers[usize::from(at)];
                    scope.spawn(move || {
                        wait(writer.put_object(&Name::segment(round), vec![Bytes::from(vec![at; 5000])])).unwrap()
                            == Put::Created
                    })
                })
                .collect();
            all.into_iter().map(|one| usize::from(one.join().unwrap())).sum()
        });
        assert_eq!(created, 1);
        let bytes = std::fs::read(folder.path().join(Name::segment(round).as_str())).unwrap();
        assert!(bytes.len() == 5000 && bytes.iter().all(|byte| *byte == bytes[0]));
    }
}

#[test]
fn faults_come_and_go() {
    wait(async {
        let faulty = Faulty::new(Arc::new(Memory::new()));
        keeps_the_contract(&faulty).await;
        faulty.set_down(true);
        assert!(matches!(faulty.list("").await, Err(Error::Unavailable(_))));
        faulty.set_down(false);
        faulty.set_delay(Duration::from_millis(20));
        let start = Instant::now();
        faulty.list("").await.unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20));
        faulty.set_delay(Duration::ZERO);
        faulty.set_writes_left(1);
        faulty.put_segment(&Name::segment(1), vec![]).await.unwrap();
        assert!(matches!(faulty.put_segment(&Name::segment(2), vec![]).await, Err(Error::Full(_))));
        faulty.set_hanging(true);
        assert!(tokio::time::timeout(Duration::from_millis(20), faulty.list("")).await.is_err());
    });
}

#[cfg(feature = "s3")]
#[test]
fn an_s3_configuration_that_makes_no_sense_is_refused() {
    let good = S3Config { endpoint: "http://127.0.0.1:1".into(), bucket: "kv1".into(), ..S3Config::default() };
    assert!(S3::new(&good).is_ok());
    let bad = |config| assert!(matches!(S3::new(&config), Err(Error::Invalid(_))));
    bad(S3Config { endpoint: "ftp://x".into(), ..good.clone() });
    bad(S3Config { folder: "a/b".into(), ..good.clone() });
    bad(S3Config { folder: "..".into(), ..good.clone() });
    bad(S3Config { folder: String::new(), ..good.clone() });
    bad(S3Config {
        certificates: Some(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----".to_vec()),
        ..good.clone()
    });
    assert!(!format!("{:?}", S3Config { secret_key: "hush".into(), ..good }).contains("hush"));
}
