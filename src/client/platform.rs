//! What differs between operating systems: signals, and private directories.
//! The only file of the client with code for one system alone, each with its
//! counterpart for the others.

use std::io;
use std::path::Path;

/// A request to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Ctrl-C.
    Interrupt,
    /// `kill`, as a CI system cancels a job.
    Terminate,
    /// The terminal has gone away.
    HangUp,
}

impl Stop {
    /// The exit code of a program that such a signal ended.
    pub fn code(self) -> u8 {
        match self {
            Self::HangUp => 129,
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }

    /// For messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::HangUp => "the terminal has gone away",
            Self::Interrupt => "interrupted",
            Self::Terminate => "terminated",
        }
    }
}

/// Signals that ask to end; from [`listen`](Stops::listen) on they no longer
/// end the process by themselves.
#[derive(Debug)]
pub struct Stops {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    hang_up: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Stops {
    /// Listens.
    ///
    /// # Errors
    /// The operating system's.
    pub fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// The next one. May be dropped and called again.
    pub async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.interrupt.recv() => Stop::Interrupt,
            _ = self.terminate.recv() => Stop::Terminate,
            _ = self.hang_up.recv() => Stop::HangUp,
        }
    }
}

#[cfg(not(unix))]
impl Stops {
    /// Listens.
    ///
    /// # Errors
    /// None here.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    /// The next one. May be dropped and called again.
    pub async fn next(&mut self) -> Stop {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        Stop::Interrupt
    }
}

/// Passes a signal on to a child. One that has ended already is no error.
#[cfg(unix)]
pub fn forward(child: &mut tokio::process::Child, stop: Stop) {
    use rustix::process::{Pid, Signal, kill_process};
    let signal = match stop {
        Stop::Interrupt => Signal::INT,
        Stop::Terminate | Stop::HangUp => Signal::TERM,
    };
    // A child that was not waited for keeps its number.
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, signal);
    }
}

/// Passes a signal on to a child. Ctrl-C has reached it already.
#[cfg(not(unix))]
pub fn forward(child: &mut tokio::process::Child, stop: Stop) {
    if stop != Stop::Interrupt {
        let _ = child.start_kill();
    }
}

/// The exit code of a child as a shell would have it.
pub fn code(status: std::process::ExitStatus) -> u8 {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt as _;
        if let Some(signal) = status.signal() {
            return u8::try_from(128 + signal).unwrap_or(u8::MAX);
        }
    }
    status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1))
}

/// Lets nobody else into a directory.
///
/// # Errors
/// The operating system's.
#[cfg(unix)]
pub fn make_private(directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o700))
}

/// Lets nobody else into a directory: that of temporary files is private there.
///
/// # Errors
/// None here.
#[cfg(not(unix))]
pub fn make_private(_directory: &Path) -> io::Result<()> {
    Ok(())
}
