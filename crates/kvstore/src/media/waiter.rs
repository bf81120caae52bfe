//! Calls that wait, over back ends that do not.

use std::sync::mpsc;

use tokio::runtime::{Builder, Runtime};

use crate::Error;

/// Threads for the calls to back ends, and for what they leave to be done.
#[derive(Debug)]
pub struct Waiter {
    /// There until dropped.
    runtime: Option<Runtime>,
}

impl Waiter {
    /// With two threads.
    ///
    /// # Errors
    /// [`Error::Io`]: no threads.
    pub fn new() -> Result<Self, Error> {
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("kvstore-media").enable_all().build();
        Ok(Self { runtime: Some(runtime.map_err(Error::io("start the threads of the media"))?) })
    }

    /// Runs a future to its end there. Any thread may wait, one of another runtime too.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it ended without a result.
    pub fn wait<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Result<T, Error> {
        let gone = || Error::Unavailable("the threads of the media have stopped".into());
        let runtime = self.runtime.as_ref().ok_or_else(gone)?;
        let (done, result) = mpsc::sync_channel(1);
        runtime.spawn(async move {
            let _ = done.send(work.await);
        });
        result.recv().map_err(|_| gone())
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // Waits for nothing, so that it may be dropped anywhere.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
