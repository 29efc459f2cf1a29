//! What a builder's own messages say of a build that failed: whether its steps
//! had begun, and whether the daemon went away. Pure; no IO.

/// What has passed so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The beginning of a line whose end has not passed yet.
    pub(super) partial: Vec<u8>,
    /// A step of the Dockerfile was begun, or found in the cache.
    pub began: bool,
    /// The connection failed.
    pub lost: bool,
    /// Something took too long: before the first step, most likely the connection.
    pub late: bool,
}

/// A line is judged by its beginning.
const LINE: usize = 4096;

/// What stock builders say when a daemon is not there any more.
const LOST: [&str; 14] = [
    "connection refused",
    "connection reset by peer",
    "error reading from server: EOF",
    "code = Unavailable",
    "Unavailable: ",
    "authentication handshake failed",
    "transport is closing",
    "graceful_stop",
    "no active session",
    "failed to dial",
    "closing transport",
    "broken pipe",
    "unrecognized name",
    "received context error while waiting for new LB policy update",
];

impl Progress {
    /// Reads on.
    pub fn read(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' || byte == b'\r' {
                let line = std::mem::take(&mut self.partial);
                self.line(&String::from_utf8_lossy(&line));
            } else if self.partial.len() < LINE {
                self.partial.push(byte);
            }
        }
    }

    /// Nothing follows.
    pub fn end(&mut self) {
        self.read(b"\n");
    }

    /// `#7 [build 2/3] RUN make`: not `#1 [internal] load build definition`, nor what a step prints.
    fn line(&mut self, line: &str) {
        let numbered = line.strip_prefix('#').and_then(|rest| rest.split_once(' '));
        if let Some((number, rest)) = numbered
            && number.bytes().all(|b| b.is_ascii_digit())
        {
            // With several daemons the name of one comes first: `[bko-1-amd64 internal]`.
            let inside = rest.strip_prefix('[').and_then(|rest| rest.split(']').next());
            self.began |= inside.is_some_and(|inside| inside != "internal" && !inside.ends_with(" internal"));
            return;
        }
        self.late |= line.contains("context deadline exceeded");
        self.lost |= LOST.iter().any(|sign| line.contains(sign));
    }
}

/// Whether to build once more: at once if nothing had begun, and as often as
/// the user allows if something had.
pub(super) fn repeats(progress: &Progress, repeated: u32, retries: u32) -> bool {
    let fresh = repeated == 0 && !progress.began;
    (progress.lost && (fresh || repeated < retries)) || (progress.late && fresh)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(text: &str) -> Progress {
        let mut progress = Progress::default();
        for chunk in text.as_bytes().chunks(3) {
            progress.read(chunk);
        }
        progress.end();
        progress
    }

    const BEGUN: &str = "#0 building with \"bko\" instance using remote driver\n\
        #1 [internal] load build definition from Dockerfile\n#1 DONE 0.0s\n#4 [1/2] FROM docker.io/library/busybox\n";

    #[test]
    fn only_steps_of_the_dockerfile_count() {
        assert!(after(BEGUN).began);
        assert!(!after("#1 [internal] load .dockerignore\n#1 DONE 0.0s\n").began);
        assert!(!after("#1 [bko-1-amd64 internal] load .dockerignore\n").began);
        assert!(after("#1 [bko-1-amd64 linux/amd64 1/2] FROM busybox\n").began);
        assert!(!after("ERROR: [1/2]\n[x]\n#x [1/2] RUN\n").began);
    }

    #[test]
    fn a_lost_daemon_is_told_from_a_step_that_says_the_same() {
        let lost = after("#1 [internal] load\nERROR: failed to build: rpc error: code = Unavailable desc = closing\n");
        assert!(lost.lost && !lost.began);
        assert!(!after("#5 0.212 curl: connection refused\nERROR: process \"curl\" did not complete\n").lost);
        assert!(after("error: dial tcp 127.0.0.1:1: connect: connection refused").lost, "without a last line break");
    }

    #[test]
    fn a_build_whose_steps_began_is_never_repeated_unasked() {
        let fresh = Progress { lost: true, ..Progress::default() };
        let begun = Progress { began: true, ..fresh.clone() };
        let late = Progress { late: true, ..Progress::default() };
        let failed = Progress { began: true, late: true, ..Progress::default() };
        for (progress, repeated, retries, want) in [
            (&fresh, 0, 0, true),
            (&fresh, 1, 0, false),
            (&late, 0, 0, true),
            (&late, 1, 5, false),
            (&begun, 0, 0, false),
            (&begun, 0, 1, true),
            (&begun, 1, 1, false),
            (&failed, 0, 5, false),
        ] {
            assert_eq!(repeats(progress, repeated, retries), want, "{progress:?} {repeated} {retries}");
        }
    }
}
