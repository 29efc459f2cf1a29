//! Time goes by, and certificates end; the clock of the host may be wrong, and be put right while the farm runs.
//! Times that are yet to come are taken for now, or a daemon would be kept until
//! then; going forward makes builds look old, and what runs is never cut for that.
#![expect(clippy::disallowed_methods, reason = "shell: looks at both clocks")]

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::time::{Instant, sleep};

use super::core::Core;
use super::keeper::chain;
use super::writer::{Change, WriteError};
use crate::families::build_farm::ledger::Outcome;

/// How often the clocks are compared.
const EVERY: Duration = Duration::from_secs(5);

/// What a clock may be put right by without a word.
pub const SLACK: SignedDuration = SignedDuration::from_secs(30);

/// By how much the wall clock went another way than the steady one, if that is worth a word. Pure.
pub fn jumped(wall: SignedDuration, steady: Duration) -> Option<SignedDuration> {
    let by = wall.saturating_sub(SignedDuration::try_from(steady).unwrap_or(SignedDuration::MAX));
    (by.abs() > SLACK).then_some(by)
}

/// How often certificates are looked at.
const RENEW: Duration = Duration::from_secs(3600);

/// Watches until the farm ends.
pub async fn watch(core: Arc<Core>) {
    let mut renewed = Instant::now();
    loop {
        if renewed.elapsed() > RENEW {
            renewed = Instant::now();
            renew(&core);
        }
        let (wall, steady) = (Timestamp::now(), Instant::now());
        if core.draining.run_until_cancelled(sleep(EVERY)).await.is_none() {
            return;
        }
        let Some(by) = jumped(Timestamp::now().duration_since(wall), steady.elapsed()) else { continue };
        let shown = shown(by);
        if by.is_negative() {
            tracing::warn!(
                "the clock of this host went back by {shown}: times that were noted later are taken for now"
            );
            if let Err(error) = rewind(&core).await {
                tracing::warn!(%error, "times that are yet to come could not be changed");
            }
        } else {
            tracing::warn!(
                "the clock of this host went forward by {shown}, or the host slept: builds that were routed before \
                 look older by that; those that run are not cut"
            );
        }
        renew(&core);
    }
}

fn renew(core: &Core) {
    if let Err(error) = core.certificates.renew() {
        tracing::warn!(error = chain(&error), "certificates could not be renewed");
    }
}

/// Takes every time that is yet to come for now; returns how many projects had one.
///
/// # Errors
/// The store's.
pub async fn rewind(core: &Core) -> Result<usize, WriteError> {
    let (now, mut count) = (Timestamp::now(), 0);
    for record in core.index.all() {
        if record.until(now).is_some()
            && core.writer.submit(&record.project.spec.key, Change::Rewind).await? == Outcome::Done
        {
            count += 1;
        }
    }
    Ok(count)
}

fn shown(by: SignedDuration) -> String {
    let seconds = Duration::from_secs(by.unsigned_abs().as_secs());
    humantime::format_duration(seconds).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_jump_is_a_jump() {
        let by =
            |wall, steady| jumped(SignedDuration::from_secs(wall), Duration::from_secs(steady)).map(|by| by.as_secs());
        assert_eq!([by(5, 5), by(35, 5), by(-20, 5)], [None; 3]);
        assert_eq!([by(3605, 5), by(-3595, 5)], [Some(3600), Some(-3600)]);
        assert_eq!(shown(SignedDuration::from_secs(-3661)), "1h 1m 1s");
    }
}
