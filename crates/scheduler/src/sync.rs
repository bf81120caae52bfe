//! What threads share, by one name, so that a test can build the same source on a checker's types.

pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
