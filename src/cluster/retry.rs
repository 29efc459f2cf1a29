//! How long to pause before the next attempt.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The pause before attempt `attempt` (the first repetition is 1): doubles up
/// to five seconds, half of it random, and never less than the server asked for.
pub(super) fn pause(attempt: u32, asked: Option<Duration>) -> Duration {
    let whole = FIRST.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(LONGEST);
    let half = whole / 2;
    (half + half.mul_f64(random_fraction())).max(asked.unwrap_or_default())
}

#[expect(clippy::disallowed_methods, reason = "jitter, so that clients that failed together do not come back together")]
fn random_fraction() -> f64 {
    let mut bytes = [0; 4];
    match getrandom::fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_ne_bytes(bytes)) / f64::from(u32::MAX),
        Err(_) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_respect_what_the_server_asks() {
        for attempt in 1..200 {
            let whole = FIRST.saturating_mul(1 << (attempt - 1).min(16)).min(LONGEST);
            let pause = pause(attempt, None);
            assert!(pause >= whole / 2 && pause <= whole, "{attempt}: {pause:?}");
        }
        assert!(pause(1, Some(Duration::from_secs(9))) >= Duration::from_secs(9));
    }
}
