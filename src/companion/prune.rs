//! When the cache is pruned beyond BuildKit's own garbage collection. Pure.

/// What the cache's volume holds, as the file system says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Size in bytes.
    pub bytes_total: u64,
    /// Bytes in use.
    pub bytes_used: u64,
    /// Bytes that an ordinary user can still write.
    pub bytes_available: u64,
    /// Inodes in all; 0 where the file system makes them as needed.
    pub inodes_total: u64,
    /// Inodes in use.
    pub inodes_used: u64,
}

impl Volume {
    /// Share of the inodes in use.
    pub fn inode_ratio(&self) -> f64 {
        ratio(self.inodes_used, self.inodes_total)
    }

    /// Share of the writable bytes in use: what is reserved for root cannot be
    /// written by a rootless daemon, so it counts as gone.
    pub fn byte_ratio(&self) -> f64 {
        ratio(self.bytes_used, self.bytes_used.saturating_add(self.bytes_available))
    }

    /// Free bytes that only root can write. BuildKit counts them as free.
    fn reserved(&self) -> u64 {
        self.bytes_total.saturating_sub(self.bytes_used).saturating_sub(self.bytes_available)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share, to be compared with a threshold")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// From which share on the cache is pruned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// Share of the inodes.
    pub inodes: f64,
    /// Share of the bytes.
    pub bytes: f64,
}

/// Above this share writes begin to fail, so builds lose more by waiting than
/// by losing cache that they do not use.
pub const FULL: f64 = 0.99;

/// How far below the threshold a prune for space goes, so that the next is not
/// due at once.
const MARGIN: f64 = 0.08;

/// Why the cache is pruned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Inodes run out.
    Inodes,
    /// Bytes run out.
    Bytes,
}

impl Reason {
    /// In one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Inodes => "inodes",
            Self::Bytes => "bytes",
        }
    }
}

/// What to do about the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// There is room.
    Enough,
    /// There is little room, but a build runs, or may run.
    Held(Reason),
    /// Drop all that is not in use.
    All(Reason),
    /// Drop the least recently used until so many bytes are free.
    UntilFree(u64),
}

/// Decides. `running` is the number of active builds, `None` when unknown.
pub fn decide(volume: &Volume, thresholds: Thresholds, running: Option<usize>) -> Decision {
    let (inodes, bytes) = (volume.inode_ratio(), volume.byte_ratio());
    let reason = match (inodes > thresholds.inodes, bytes > thresholds.bytes) {
        (true, _) => Reason::Inodes,
        (false, true) => Reason::Bytes,
        (false, false) => return Decision::Enough,
    };
    let full = inodes >= FULL || bytes >= FULL;
    match (running, reason) {
        // A daemon that does not answer would not answer to this either.
        (None, _) => Decision::Held(reason),
        (Some(1..), _) if !full => Decision::Held(reason),
        // The cache does not know how many inodes an entry has.
        (Some(_), Reason::Inodes) => Decision::All(reason),
        (Some(_), Reason::Bytes) => {
            let free = (1.0 - thresholds.bytes + MARGIN).min(1.0);
            Decision::UntilFree(share(volume.bytes_total, free) + volume.reserved())
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of bytes, between nothing and all of them"
)]
fn share(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * share).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLDS: Thresholds = Thresholds { inodes: 0.95, bytes: 0.93 };

    fn volume(bytes: u64, inodes: u64) -> Volume {
        Volume {
            bytes_total: 1000,
            bytes_used: bytes,
            bytes_available: 1000 - bytes,
            inodes_total: 1000,
            inodes_used: inodes,
        }
    }

    #[test]
    fn the_cache_is_pruned_when_full_and_idle_or_when_writes_would_fail() {
        use Decision::{All, Enough, Held, UntilFree};
        use Reason::{Bytes, Inodes};
        for (bytes, inodes, running, want) in [
            (0, 0, Some(0), Enough),
            (930, 950, Some(0), Enough),
            (931, 0, Some(0), UntilFree(150)),
            (0, 951, Some(0), All(Inodes)),
            (931, 951, Some(0), All(Inodes)),
            (931, 0, Some(1), Held(Bytes)),
            (0, 951, Some(1), Held(Inodes)),
            (989, 989, Some(2), Held(Inodes)),
            (990, 0, Some(2), UntilFree(150)),
            (0, 990, Some(2), All(Inodes)),
            (1000, 1000, None, Held(Inodes)),
        ] {
            assert_eq!(decide(&volume(bytes, inodes), THRESHOLDS, running), want, "{bytes} {inodes} {running:?}");
        }
    }

    #[test]
    fn what_is_reserved_for_root_counts_as_gone() {
        let reserved = Volume { bytes_total: 1000, bytes_used: 900, bytes_available: 50, ..Volume::default() };
        assert!(reserved.byte_ratio() > 0.94);
        assert_eq!(decide(&reserved, THRESHOLDS, Some(0)), Decision::UntilFree(200));
    }

    #[test]
    fn a_prune_for_space_goes_below_its_threshold() {
        let low = Thresholds { bytes: 0.5, ..THRESHOLDS };
        assert_eq!(decide(&volume(600, 0), low, Some(0)), Decision::UntilFree(580));
        let lowest = Thresholds { bytes: 0.05, ..THRESHOLDS };
        assert_eq!(decide(&volume(600, 0), lowest, Some(0)), Decision::UntilFree(1000));
    }

    #[test]
    fn a_file_system_without_a_number_of_inodes_is_never_short_of_them() {
        assert_eq!(decide(&Volume { inodes_used: 5, ..volume(0, 0) }, THRESHOLDS, Some(0)), Decision::Enough);
        let none = Volume { inodes_total: 0, inodes_used: 0, ..volume(10, 0) };
        assert_eq!(decide(&none, THRESHOLDS, Some(0)), Decision::Enough);
    }
}
