//! What is counted of issuers. Labels are configured names, never what somebody sent.

use std::borrow::Cow;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type Labels = Vec<(&'static str, Cow<'static, str>)>;

/// The metrics of all issuers; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    refreshes: Family<Labels, Counter>,
    refreshed: Family<Labels, Gauge>,
    verifications: Family<Labels, Counter>,
}

impl Metrics {
    /// Shows them under their names.
    pub fn register(&self, registry: &mut Registry) {
        // The encoder appends `_total` to the names of counters.
        registry.register(
            "buildkit_operator_oidc_refreshes",
            "Look-ups of an issuer's keys by result",
            self.refreshes.clone(),
        );
        registry.register(
            "buildkit_operator_oidc_keys_refreshed_timestamp_seconds",
            "When an issuer's keys were last looked up with success",
            self.refreshed.clone(),
        );
        registry.register(
            "buildkit_operator_oidc_verifications",
            "Tokens by issuer and result; no issuer is one that is not configured",
            self.verifications.clone(),
        );
    }

    /// One look-up; with the time, in seconds since 1970, if it succeeded.
    pub fn refreshed(&self, issuer: &str, at: Option<i64>) {
        let result = if at.is_some() { "success" } else { "failure" };
        self.refreshes.get_or_create(&labels(issuer, Some(result))).inc();
        if let Some(at) = at {
            self.refreshed.get_or_create(&labels(issuer, None)).set(at);
        }
    }

    /// One token.
    pub fn verified(&self, issuer: &str, result: &'static str) {
        self.verifications.get_or_create(&labels(issuer, Some(result))).inc();
    }
}

fn labels(issuer: &str, result: Option<&'static str>) -> Labels {
    let issuer = ("issuer", Cow::Owned(issuer.to_owned()));
    std::iter::once(issuer).chain(result.map(|result| ("result", Cow::Borrowed(result)))).collect()
}
