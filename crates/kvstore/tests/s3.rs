//! Against a real S3 service. Skipped, with the reason on stderr, where its program is not installed.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, clippy::single_range_in_vec_init)]

mod weed;

use std::time::{Duration, Instant};

use bytes::Bytes;
use deepinfer_kvstore::Error;
use deepinfer_kvstore::backend::{Backend, Name, Put, S3, S3Config};

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn config(endpoint: &str, bucket: &str) -> S3Config {
    S3Config {
        endpoint: endpoint.into(),
        bucket: bucket.into(),
        access_key: weed::ACCESS_KEY.into(),
        secret_key: weed::SECRET_KEY.into(),
        ..S3Config::default()
    }
}

/// A server that has just begun to listen refuses writes until its volumes are known.
async fn until_ready(backend: &S3) {
    let end = Instant::now() + Duration::from_secs(30);
    while let Err(error) = backend.put_segment(&Name::segment(0), vec![Bytes::from_static(b"x")]).await {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    backend.delete_many(&[Name::segment(0)]).await.unwrap();
}

#[test]
fn a_bucket_of_a_real_service_keeps_the_contract() {
    let Some(program) = weed::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = weed::Weed::start(&program, folder.path());
    wait(async {
        let backend = S3::new(&config(&server.endpoint, "contract")).unwrap();
        assert!(backend.capabilities().conditional_put && backend.capabilities().range);
        until_ready(&backend).await;
        let (one, two) = (Name::segment(1), Name::segment(2));
        assert_eq!(backend.get_ranges(&one, &[0..1]).await.unwrap(), None);
        assert_eq!(
            backend.put_object(&one, vec![Bytes::from_static(b"hello, "), Bytes::from_static(b"world")]).await.unwrap(),
            Put::Created
        );
        assert_eq!(backend.put_object(&one, vec![Bytes::from_static(b"other")]).await.unwrap(), Put::Exists);
        let found = backend.get_ranges(&one, &[7..12, 0..5, 3..3]).await.unwrap().unwrap();
        assert_eq!(found, ["world", "hello", ""].map(Bytes::from));
        assert!(backend.get_ranges(&one, &[0..13]).await.is_err());
        assert!(backend.get_ranges(&one, &[20..30]).await.is_err());
        assert_eq!(backend.get_ranges(&two, &[0..0]).await.unwrap(), None);
        // More than one chunk of the service.
        let large: Vec<u8> = (0..12_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        backend.put_segment(&two, vec![Bytes::from_static(b"first")]).await.unwrap();
        backend.put_segment(&two, vec![Bytes::from(large.clone())]).await.unwrap();
        let found = backend
            .get_ranges(&two, &[0..12_000_000, 4_194_300..8_388_613, 11_999_999..12_000_000])
            .await
            .unwrap()
            .unwrap();
        assert!(found[0] == large && found[1] == large[4_194_300..8_388_613] && found[2] == large[11_999_999..]);
        assert_eq!(backend.list("").await.unwrap(), [(one.clone(), 12), (two.clone(), 12_000_000)]);
        assert_eq!(backend.list("00000002").await.unwrap(), [(two.clone(), 12_000_000)]);
        // Folders of one bucket do not see each other.
        let other = S3::new(&S3Config { folder: "other".into(), ..config(&server.endpoint, "contract") }).unwrap();
        assert!(other.list("").await.unwrap().is_empty());
        assert_eq!(other.get_ranges(&one, &[0..1]).await.unwrap(), None);
        backend.delete_many(&[one.clone(), "abc".parse().unwrap(), two]).await.unwrap();
        assert!(backend.list("").await.unwrap().is_empty());
        // Who lacks the secret gets nothing, and hears why.
        let stranger =
            S3::new(&S3Config { secret_key: "guess".into(), ..config(&server.endpoint, "contract") }).unwrap();
        assert!(matches!(stranger.put_object(&one, vec![]).await, Err(Error::Unavailable(_))));
        assert!(stranger.list("").await.is_err());
    });
}

#[test]
fn a_service_that_is_gone_is_unavailable_in_time() {
    let Some(program) = weed::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = weed::Weed::start(&program, folder.path());
    wait(async {
        let backend =
            S3::new(&S3Config { timeout: Duration::from_secs(2), ..config(&server.endpoint, "gone") }).unwrap();
        until_ready(&backend).await;
        drop(server);
        let start = Instant::now();
        assert!(matches!(backend.put_object(&Name::segment(1), vec![]).await, Err(Error::Unavailable(_))));
        assert!(matches!(backend.get_ranges(&Name::segment(1), &[0..1]).await, Err(Error::Unavailable(_))));
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}
