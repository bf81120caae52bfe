//! TLS by rustls: certificates from PEM files.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::error::Error;
use crate::net::{Connection, Timed};

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let file = std::fs::File::open(path).map_err(Error::io(format!("opening {}", path.display())))?;
    let found: Result<Vec<_>, _> = rustls_pemfile::certs(&mut BufReader::new(file)).collect();
    let found = found.map_err(Error::io(format!("reading {}", path.display())))?;
    if found.is_empty() {
        return Err(Error::Invalid(format!("{} holds no certificate in PEM form", path.display())));
    }
    Ok(found)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, Error> {
    let file = std::fs::File::open(path).map_err(Error::io(format!("opening {}", path.display())))?;
    rustls_pemfile::private_key(&mut BufReader::new(file))
        .map_err(Error::io(format!("reading {}", path.display())))?
        .ok_or_else(|| Error::Invalid(format!("{} holds no private key in PEM form", path.display())))
}

fn wrong(what: &str) -> impl FnOnce(rustls::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::Invalid(format!("{what}: {error}"))
}

/// A server's certificate chain and key.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// PEM file of the chain, the server's own first.
    pub certificate: PathBuf,
    /// PEM file of its key.
    pub key: PathBuf,
}

/// How a client knows its server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    /// PEM file of the authorities it believes.
    pub authorities: PathBuf,
    /// Name the certificate must be for.
    pub server_name: String,
}

/// Makes protected connections of accepted ones.
pub struct Acceptor(Arc<ServerConfig>);

impl Acceptor {
    /// # Errors
    /// [`Error::Io`], [`Error::Invalid`] for files that hold something else.
    pub fn new(tls: &ServerTls) -> Result<Self, Error> {
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(wrong("TLS"))?
            .with_no_client_auth()
            .with_single_cert(certificates(&tls.certificate)?, key(&tls.key)?)
            .map_err(wrong("the certificate and its key"))?;
        Ok(Self(Arc::new(config)))
    }

    /// The server's end over `timed`; the handshake runs with the first bytes.
    ///
    /// # Errors
    /// Of rustls.
    pub fn accept(&self, timed: Timed) -> Result<Connection, Error> {
        let session = ServerConnection::new(Arc::clone(&self.0)).map_err(wrong("TLS"))?;
        Ok(Connection::Server(Box::new(StreamOwned::new(session, timed))))
    }
}

/// Makes protected connections to a server.
pub struct Connector {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

/// The authorities of a PEM file.
///
/// # Errors
/// [`Error::Io`], [`Error::Invalid`] for a file that holds none.
pub fn authorities(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(path)? {
        roots.add(authority).map_err(wrong("an authority's certificate"))?;
    }
    Ok(roots)
}

impl Connector {
    /// # Errors
    /// As [`Acceptor::new`]; also for a name that is none.
    pub fn new(tls: &ClientTls) -> Result<Self, Error> {
        let roots = authorities(&tls.authorities)?;
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(wrong("TLS"))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(tls.server_name.clone())
            .map_err(|_| Error::Invalid(format!("{:?} is no name of a server", tls.server_name)))?;
        Ok(Self { config: Arc::new(config), name })
    }

    /// The client's end over `timed`.
    ///
    /// # Errors
    /// Of rustls.
    pub fn connect(&self, timed: Timed) -> Result<Connection, Error> {
        let session = ClientConnection::new(Arc::clone(&self.config), self.name.clone()).map_err(wrong("TLS"))?;
        Ok(Connection::Client(Box::new(StreamOwned::new(session, timed))))
    }
}
