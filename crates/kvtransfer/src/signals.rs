//! Signals are for the program's own threads.

/// Keeps every signal from the calling thread. A handler belongs to the program that embeds this library; and `sendfile` to a
/// peer that is gone raises `SIGPIPE`, which must not end a process that does not ignore it.
pub fn block() {
    // SAFETY: both calls only read and write the local set and this thread's mask, and are given valid pointers
    // (tests/kills.rs has a puller die with the default action for SIGPIPE).
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
