//! SIGTERM and SIGINT: the first one begins an orderly end, the second one ends it.

use anyhow::{Context, Result};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// What signals have asked for. Install it before anything slow.
#[derive(Clone)]
pub struct Shutdown {
    /// Finish what is there.
    pub begin: CancellationToken,
    /// Leave.
    pub now: CancellationToken,
}

impl Shutdown {
    /// Tokens that no signal raises: for those who listen themselves.
    pub fn by_hand() -> Self {
        Self { begin: CancellationToken::new(), now: CancellationToken::new() }
    }

    /// Listens for signals on a task of `tasks`.
    pub fn install(tasks: &TaskTracker) -> Result<Self> {
        let shutdown = Self::by_hand();
        let mut signals = Signals::new().context("can't listen for signals")?;
        let watching = shutdown.clone();
        tasks.spawn(async move {
            signals.next().await;
            watching.begin.cancel();
            signals.next().await;
            watching.now.cancel();
        });
        Ok(shutdown)
    }
}

/// What was heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C
    Interrupt,
    Terminate,
}

/// The signals of this process, one after the other.
#[cfg(unix)]
pub struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    pub fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::Interrupt,
            _ = self.terminate.recv() => Signal::Terminate,
        }
    }
}

#[cfg(not(unix))]
pub struct Signals;

#[cfg(not(unix))]
impl Signals {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    pub async fn next(&mut self) -> Signal {
        match tokio::signal::ctrl_c().await {
            Ok(()) => Signal::Interrupt,
            Err(_) => std::future::pending().await,
        }
    }
}
