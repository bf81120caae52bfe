//! Whether other stores over the same back end are known, and through which server.

use std::collections::BTreeMap;

#[cfg(feature = "redis")]
use super::values::Time;
use super::{MediaSettings, PREFIX, invalid, raw};
#[cfg(feature = "redis")]
use crate::directory::soft::{Settings, SoftDirectory};
use crate::error::Error;

/// The server of the directory.
#[cfg(feature = "redis")]
pub type DirectorySettings = Settings;

/// The server of the directory: this build knows none.
#[cfg(not(feature = "redis"))]
#[derive(Clone, Debug)]
pub enum DirectorySettings {}

/// The secret that no file of settings holds.
fn password(given: &raw::Directory, variables: &BTreeMap<String, String>) -> Result<Option<String>, Error> {
    if let Some(password) = variables.get(&format!("{PREFIX}DIRECTORY_PASSWORD")) {
        return Ok(Some(password.trim().to_owned()));
    }
    let Some(path) = &given.password_file else { return Ok(None) };
    let bytes = super::read_token(path).or_else(|error| invalid("directory.password_file", error))?;
    String::from_utf8(bytes).map(Some).or_else(|_| invalid("directory.password_file", "it is no text"))
}

pub(super) fn of(
    given: &raw::Directory,
    media: &MediaSettings,
    variables: &BTreeMap<String, String>,
) -> Result<Option<DirectorySettings>, Error> {
    let password = password(given, variables)?;
    let Some(servers) = given.servers.as_ref().filter(|servers| !servers.is_empty()) else {
        let others = [
            ("directory.cluster", given.cluster.is_some()),
            ("directory.tls_ca", given.tls_ca.is_some()),
            ("directory.password_file", given.password_file.is_some()),
            ("the directory's password", password.is_some()),
        ];
        return match others.iter().find(|(_, is_given)| *is_given) {
            Some((key, _)) => invalid(key, "it needs directory.servers"),
            None => Ok(None),
        };
    };
    if !matches!(media, MediaSettings::Objects(_)) {
        let said = format!(
            "it joins stores over one bucket or mounted directory, media.kind = \"objects\", not {:?}",
            media.kind()
        );
        return invalid("directory.servers", said);
    }
    made(given, servers, password)
}

#[cfg(feature = "redis")]
fn made(given: &raw::Directory, servers: &[String], password: Option<String>) -> Result<Option<Settings>, Error> {
    let base = Settings::new(String::new());
    let time = |key: &str, given: Option<Time>, default| match given {
        None => Ok(default),
        Some(Time(time)) if time.as_millis() == 0 || time.as_secs() > 60 => invalid(key, "give between 1ms and 60s"),
        Some(Time(time)) => Ok(time),
    };
    let authorities = match &given.tls_ca {
        None => None,
        Some(_)
            if !servers.iter().any(|server| server.starts_with("rediss://") || server.starts_with("valkeys://")) =>
        {
            return invalid("directory.tls_ca", "it is for servers of rediss://");
        }
        Some(path) => {
            // Held to be certificates here, where the file has a name.
            crate::tls::authorities(path).or_else(|error| invalid("directory.tls_ca", error))?;
            let unread = |error| invalid("directory.tls_ca", format!("{}: {error}", path.display()));
            Some(std::fs::read(path).or_else(unread)?)
        }
    };
    let settings = Settings {
        authorities,
        servers: servers.to_vec(),
        cluster: given.cluster.unwrap_or(servers.len() > 1),
        password,
        prefix: given.prefix.clone().unwrap_or(base.prefix),
        timeout: time("directory.timeout", given.timeout, base.timeout)?,
        retry: time("directory.retry", given.retry, base.retry)?,
    };
    if !settings.cluster && servers.len() > 1 {
        return invalid("directory.cluster", "several servers are members of a cluster: set it to true, or name one");
    }
    // What it refuses is known without a connection.
    for (at, server) in servers.iter().enumerate() {
        let one = Settings { servers: vec![server.clone()], prefix: "x".to_owned(), ..settings.clone() };
        SoftDirectory::new(one).or_else(|error| invalid(&format!("directory.servers[{at}]"), error))?;
    }
    SoftDirectory::new(settings.clone()).or_else(|error| invalid("directory.prefix", error))?;
    Ok(Some(settings))
}

#[cfg(not(feature = "redis"))]
fn made(_: &raw::Directory, _: &[String], _: Option<String>) -> Result<Option<DirectorySettings>, Error> {
    invalid("directory.servers", "this build has no directory: build it with the feature \"redis\"")
}
