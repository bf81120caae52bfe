//! Every key of the settings, and how one is given in the environment.

use std::collections::BTreeMap;

use toml::{Table, Value};

use crate::error::Error;

/// What all variables begin with.
pub const PREFIX: &str = "DEEPINFER_KVSTORE_";

/// How the text of a variable becomes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As it is: names, paths, sizes, times.
    Text,
    /// A whole number.
    Number,
    /// `true` or `false`.
    Truth,
    /// Several, between commas.
    List,
    /// `name=value`, between commas.
    Pairs,
}

/// Keys by their path.
pub const KEYS: &[(&str, Form)] = &[
    ("root", Form::Text),
    ("listen", Form::List),
    ("metrics", Form::Text),
    ("media.kind", Form::Text),
    ("media.segment_bytes", Form::Text),
    ("media.directory", Form::Text),
    ("media.domains", Form::List),
    ("media.min_domains", Form::Number),
    ("media.hedge", Form::Text),
    ("media.read_timeout", Form::Text),
    ("media.write_timeout", Form::Text),
    ("media.repair_every", Form::Text),
    ("media.scrub_every", Form::Text),
    ("media.s3.endpoint", Form::Text),
    ("media.s3.bucket", Form::Text),
    ("media.s3.folder", Form::Text),
    ("media.s3.region", Form::Text),
    ("media.s3.access_key_env", Form::Text),
    ("media.s3.secret_key_env", Form::Text),
    ("media.s3.conditional_put", Form::Truth),
    ("media.s3.timeout", Form::Text),
    ("media.s3.retries", Form::Number),
    ("media.s3.certificates", Form::Text),
    ("directory.servers", Form::List),
    ("directory.cluster", Form::Truth),
    ("directory.password_file", Form::Text),
    ("directory.tls_ca", Form::Text),
    ("directory.prefix", Form::Text),
    ("directory.timeout", Form::Text),
    ("directory.retry", Form::Text),
    ("store.capacity", Form::Text),
    ("store.slack", Form::Text),
    ("store.policy", Form::Text),
    ("store.max_object", Form::Text),
    ("store.batch_bytes", Form::Text),
    ("store.piece_bytes", Form::Text),
    ("store.pending_bytes", Form::Text),
    ("store.orphan_after", Form::Text),
    ("store.tend_every", Form::Text),
    ("lifetimes.chat", Form::Text),
    ("lifetimes.agent", Form::Text),
    ("lifetimes.other", Form::Text),
    ("quotas", Form::Pairs),
    ("tokens.check_file", Form::Text),
    ("tokens.get_file", Form::Text),
    ("tokens.put_file", Form::Text),
    ("tokens.admin_file", Form::Text),
    ("tls.certificate", Form::Text),
    ("tls.key", Form::Text),
    ("limits.max_connections", Form::Number),
    ("limits.max_unknown", Form::Number),
    ("limits.handshake", Form::Text),
    ("limits.request", Form::Text),
    ("limits.idle", Form::Text),
    ("limits.answer_bytes", Form::Text),
    ("limits.drain", Form::Text),
    ("agent.socket", Form::Text),
    ("agent.upstream", Form::Text),
    ("agent.metrics", Form::Text),
    ("agent.arena", Form::Text),
    ("agent.backlog", Form::Text),
    ("agent.at_once", Form::Text),
    ("agent.fetchers", Form::Number),
    ("agent.writers", Form::Number),
    ("agent.lease", Form::Text),
    ("agent.drain", Form::Text),
    ("agent.tls_ca", Form::Text),
    ("agent.tls_name", Form::Text),
];

/// Variables that hold secrets themselves and name no key.
pub const SECRETS: &[&str] = &[
    "DEEPINFER_KVSTORE_TOKEN_CHECK",
    "DEEPINFER_KVSTORE_TOKEN_GET",
    "DEEPINFER_KVSTORE_TOKEN_PUT",
    "DEEPINFER_KVSTORE_TOKEN_ADMIN",
    "DEEPINFER_KVSTORE_DIRECTORY_PASSWORD",
    "DEEPINFER_KVSTORE_S3_ACCESS_KEY",
    "DEEPINFER_KVSTORE_S3_SECRET_KEY",
];

/// The variable of a key.
pub fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_ascii_uppercase())
}

fn value(form: Form, text: &str) -> Result<Value, String> {
    let parts = || text.split(',').map(str::trim).filter(|part| !part.is_empty());
    Ok(match form {
        Form::Text => Value::String(text.to_owned()),
        Form::Number => Value::Integer(text.trim().parse().map_err(|_| format!("{text:?} is no whole number"))?),
        Form::Truth => Value::Boolean(text.trim().parse().map_err(|_| format!("{text:?} is neither true nor false"))?),
        Form::List => Value::Array(parts().map(|part| Value::String(part.to_owned())).collect()),
        Form::Pairs => {
            let pair = |part: &str| {
                let (name, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not name=value"))?;
                Ok((name.trim().to_owned(), Value::String(value.trim().to_owned())))
            };
            Value::Table(parts().map(pair).collect::<Result<_, String>>()?)
        }
    })
}

/// Puts one value in its place; tables on the way are made.
pub fn set(table: &mut Table, key: &str, value: Value) -> Result<(), Error> {
    let mut table = table;
    let mut path = key.split('.').peekable();
    while let Some(part) = path.next() {
        if path.peek().is_none() {
            table.insert(part.to_owned(), value);
            return Ok(());
        }
        let entry = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(inner) = entry else {
            return Err(Error::Invalid(format!("{part} is no table of keys")));
        };
        table = inner;
    }
    Ok(())
}

/// Lays what a command line gave, keys with their text, over a table. A key may be spelled as its variable is.
///
/// # Errors
/// [`Error::Invalid`], with the key as it was given.
pub fn overlay_given(table: &mut Table, given: &[(String, String)]) -> Result<(), Error> {
    for (name, text) in given {
        let Some((key, form)) = KEYS.iter().find(|(key, _)| variable(key) == variable(name)) else {
            return Err(Error::Invalid(format!(
                "--set {name} names no setting: deepinfer kvstore serve --print-settings shows all of them"
            )));
        };
        let wrong = |why: String| Error::Invalid(format!("--set {name}: {why}"));
        set(table, key, value(*form, text).map_err(wrong)?)?;
    }
    Ok(())
}

/// Lays variables over a table. Those of our prefix that name no key are an error: a typing mistake must not pass unseen.
///
/// # Errors
/// [`Error::Invalid`], with the variable's name.
pub fn overlay(table: &mut Table, variables: &BTreeMap<String, String>, allowed: &[String]) -> Result<(), Error> {
    for (name, text) in variables.iter().filter(|(name, _)| name.starts_with(PREFIX)) {
        if SECRETS.contains(&name.as_str()) || allowed.contains(name) {
            continue;
        }
        let Some((key, form)) = KEYS.iter().find(|(key, _)| variable(key) == *name) else {
            return Err(Error::Invalid(format!(
                "{name} names no setting: deepinfer kvstore serve --print-settings shows all of them"
            )));
        };
        let wrong = |why: String| Error::Invalid(format!("{name}: {why}"));
        set(table, key, value(*form, text).map_err(wrong)?)?;
    }
    Ok(())
}
