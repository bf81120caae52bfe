//! The least of HTTP that a scraper needs: GET /metrics and GET /health, bounded in time, bytes and connections.
//!
//! The head is read by `httparse`, which hyper uses too; a whole HTTP server would be more code than both answers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::net::Socket;
use crate::server::gate::Gate;
use crate::server::not_bound;

/// Longest head of a request, bytes.
const MAX_HEAD: usize = 8 << 10;

/// Time for a request and its answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests at once; the oldest makes room for another one.
const MOST: usize = 8;

/// What is answered.
pub trait Pages: Send + Sync + 'static {
    /// The text of `/metrics`.
    fn metrics(&self) -> String;
    /// Whether the server takes work, and a word for it.
    fn health(&self) -> (bool, &'static str);
}

/// A listener with its thread; ends when dropped.
pub struct Http {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Http {
    /// Listens at `address` (`host:port`).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn start(address: &str, pages: Arc<dyn Pages>) -> Result<Self, Error> {
        let what = || format!("listening on {address} for metrics");
        let listener = TcpListener::bind(address).map_err(|error| not_bound(what(), error))?;
        let bound = listener.local_addr().map_err(Error::io(what()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("kv-metrics".to_owned())
            .stack_size(256 << 10)
            .spawn(move || accept(&listener, &pages, &stopped))
            .map_err(Error::io(what()))?;
        Ok(Self { address: bound, stop, thread: Some(thread) })
    }

    /// Where it listens, with the port that was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wakes the accept.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, pages: &Arc<dyn Pages>, stop: &AtomicBool) {
    // Nobody here proves who it is: the one that has been at it longest makes room.
    let gate = Arc::new(Gate::new(MOST, MOST));
    while !stop.load(Ordering::SeqCst) {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let Some(id) = stream.try_clone().ok().and_then(|handle| gate.enter(Socket::Tcp(handle))) else { continue };
        let (pages, left) = (Arc::clone(pages), Left(Arc::clone(&gate), id));
        let talk = move || {
            // Whoever goes away in the middle is its own affair.
            let _ = answer(stream, &*pages);
            drop(left);
        };
        // Without a thread the guard is dropped with the closure.
        let _ = std::thread::Builder::new().name("kv-scrape".to_owned()).stack_size(256 << 10).spawn(talk);
    }
}

struct Left(Arc<Gate>, u64);

impl Drop for Left {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

/// Reads a head, within its time and length.
fn head(stream: &mut TcpStream, until: Instant) -> std::io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left))?;
        let count = stream.read(&mut piece)?;
        bytes.extend_from_slice(&piece[..count]);
        if bytes.windows(4).any(|end| end == b"\r\n\r\n") {
            return Ok(Some(bytes));
        }
        if count == 0 || bytes.len() > MAX_HEAD {
            return Ok(None);
        }
    }
}

fn answer(mut stream: TcpStream, pages: &dyn Pages) -> std::io::Result<()> {
    let until = Instant::now() + PATIENCE;
    let head = head(&mut stream, until)?;
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut fields);
    let whole = head.as_deref().is_some_and(|head| request.parse(head).is_ok_and(|status| status.is_complete()));
    let path = request.path.unwrap_or_default();
    let path = path.split('?').next().unwrap_or_default();
    let (status, kind, body) = match (whole, request.method.unwrap_or_default(), path) {
        (false, _, _) => ("400 Bad Request", "text/plain", "no request\n".to_owned()),
        (_, "GET", "/metrics") => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", pages.metrics()),
        (_, "GET", "/health") => {
            let (well, word) = pages.health();
            (if well { "200 OK" } else { "503 Service Unavailable" }, "text/plain", format!("{word}\n"))
        }
        (_, "GET", _) => ("404 Not Found", "text/plain", "there are /metrics and /health\n".to_owned()),
        _ => ("405 Method Not Allowed", "text/plain", "GET only\n".to_owned()),
    };
    stream.set_write_timeout(Some(PATIENCE))?;
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    struct Fixed(AtomicBool);

    impl Pages for Fixed {
        fn metrics(&self) -> String {
            "up 1\n".to_owned()
        }

        fn health(&self) -> (bool, &'static str) {
            if self.0.load(Ordering::SeqCst) { (true, "ok") } else { (false, "draining") }
        }
    }

    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let _ = stream.write_all(request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[test]
    fn two_pages_and_nothing_else() {
        let pages = Arc::new(Fixed(AtomicBool::new(true)));
        let http = Http::start("127.0.0.1:0", Arc::clone(&pages) as Arc<dyn Pages>).unwrap();
        let get = |path: &str| ask(http.address(), format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let metrics = get("/metrics");
        assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n") && metrics.ends_with("\r\n\r\nup 1\n"), "{metrics}");
        assert!(metrics.contains("Content-Type: text/plain; version=0.0.4"));
        assert!(get("/health").ends_with("\r\n\r\nok\n"));
        assert!(get("/metrics?x=1").starts_with("HTTP/1.1 200"));
        pages.0.store(false, Ordering::SeqCst);
        assert!(get("/health").starts_with("HTTP/1.1 503"));
        assert!(get("/../etc/passwd").starts_with("HTTP/1.1 404"));
        assert!(ask(http.address(), b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
        assert!(ask(http.address(), b"\x00\x01\x02\r\n\r\n").starts_with("HTTP/1.1 400"));
    }

    #[test]
    fn whoever_sends_too_much_or_nothing_is_let_go_and_others_are_served() {
        let http = Http::start("127.0.0.1:0", Arc::new(Fixed(AtomicBool::new(true)))).unwrap();
        let long = [b"GET /metrics HTTP/1.1\r\nX: ".as_slice(), &vec![b'x'; 4 * MAX_HEAD]].concat();
        let answer = ask(http.address(), &long);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
        let silent: Vec<TcpStream> = (0..4 * MOST).map(|_| TcpStream::connect(http.address()).unwrap()).collect();
        let begun = Instant::now();
        assert!(ask(http.address(), b"GET /health HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
        assert!(begun.elapsed() < PATIENCE / 2, "waited for those that say nothing");
        drop(silent);
        let address = http.address();
        drop(http);
        assert!(TcpListener::bind(address).is_ok(), "the port is free again");
    }
}
