//! The disruption budget that keeps a node's drain from evicting a daemon with
//! builds. Pure.

use std::time::Duration;

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::super::settings::Settings;
use super::super::validate::Valid;
use super::{labels, metadata};

/// How long a budget outlives the last build, so that builds in a row share one.
pub const LINGER: Duration = Duration::from_secs(5);

/// What becomes of a daemon's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is as it should be.
    None,
    /// It is made.
    Create,
    /// It is deleted.
    Delete,
    /// It is deleted when no build comes for this long.
    DeleteIn(Duration),
}

/// Decides about the budget: one only while builds are in flight, since it also
/// keeps an idle daemon's node from being drained.
pub fn change(exists: bool, builds: bool, running: bool, quiet: Duration) -> Change {
    match (exists, builds && running) {
        (true, true) | (false, false) => Change::None,
        (false, true) => Change::Create,
        (true, false) if !running || quiet >= LINGER => Change::Delete,
        (true, false) => Change::DeleteIn(LINGER - quiet),
    }
}

/// The budget: the one pod must stay. Evicting an unready pod needs a healthy
/// budget too: a daemon that a build keeps from answering is not evicted either.
pub fn budget(project: &Valid<'_>, settings: &Settings) -> PodDisruptionBudget {
    PodDisruptionBudget {
        metadata: metadata(project, settings),
        spec: Some(PodDisruptionBudgetSpec {
            min_available: Some(IntOrString::Int(1)),
            selector: Some(LabelSelector { match_labels: Some(labels(project)), ..LabelSelector::default() }),
            unhealthy_pod_eviction_policy: Some("IfHealthyBudget".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_there_while_builds_are_and_a_moment_longer() {
        let secs = Duration::from_secs;
        for (exists, builds, running, quiet, expected) in [
            (false, false, true, 99, Change::None),
            (false, true, true, 0, Change::Create),
            (false, true, false, 0, Change::None),
            (true, true, true, 0, Change::None),
            (true, false, true, 0, Change::DeleteIn(secs(5))),
            (true, false, true, 3, Change::DeleteIn(secs(2))),
            (true, false, true, 5, Change::Delete),
            (true, false, false, 0, Change::Delete),
            (true, true, false, 0, Change::Delete),
        ] {
            assert_eq!(change(exists, builds, running, secs(quiet)), expected, "{exists} {builds} {running} {quiet}");
        }
    }
}
