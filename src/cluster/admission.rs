//! Webhooks that the API server cannot call: every write fails until they
//! serve, so that they are told of once, with what they belong to.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use http::Request;
use serde_json::Value;

use super::Cluster;

/// Webhooks that failed in this run, with the configurations that hold them.
#[derive(Debug, Default)]
pub(super) struct Told(Mutex<BTreeMap<String, Vec<String>>>);

/// The name of the webhook that a request failed for, and why.
/// `Internal error occurred: failed calling webhook "a.example.org": failed to call webhook: Post "https://…": …`
pub(super) fn failed(message: &str) -> Option<(&str, &str)> {
    let (_, rest) = message.split_once("failed calling webhook \"")?;
    let (name, why) = rest.split_once("\": ")?;
    Some((name, why.strip_prefix("failed to call webhook: ").unwrap_or(why)))
}

/// `webhook "a" of ValidatingWebhookConfiguration "b"`.
pub(super) fn named(webhook: &str, configurations: &[String]) -> String {
    let of = if configurations.is_empty() { String::new() } else { format!(" of {}", configurations.join(" and ")) };
    format!("webhook \"{webhook}\"{of}")
}

impl Cluster {
    /// The configurations that hold a webhook, and whether this run asks for
    /// the first time. Who may not look learns of none.
    pub(super) async fn holders(&self, webhook: &str) -> (Vec<String>, bool) {
        let known = |told: &Told| told.0.lock().unwrap_or_else(PoisonError::into_inner).get(webhook).cloned();
        if let Some(configurations) = known(&self.webhooks) {
            return (configurations, false);
        }
        let mut configurations = Vec::new();
        for kind in ["ValidatingWebhookConfiguration", "MutatingWebhookConfiguration"] {
            let path = format!("/apis/admissionregistration.k8s.io/v1/{}s", kind.to_lowercase());
            let Ok(request) = Request::get(path).body(Vec::new()) else { continue };
            let Some(Ok(list)) = self.attempt(self.client.request::<Value>(request)).await else { continue };
            let holds = |item: &&Value| {
                item["webhooks"].as_array().into_iter().flatten().any(|hook| hook["name"].as_str() == Some(webhook))
            };
            let holders = list["items"].as_array().into_iter().flatten().filter(holds);
            configurations.extend(
                holders.filter_map(|item| item["metadata"]["name"].as_str()).map(|name| format!("{kind} \"{name}\"")),
            );
        }
        let mut told = self.webhooks.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = told.insert(webhook.to_owned(), configurations.clone()).is_none();
        drop(told);
        (configurations, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_webhook_that_failed_is_found_in_the_message() {
        let message = "Internal error occurred: failed calling webhook \"a.example.org\": failed to call webhook: Post \
                       \"https://x.y.svc:443/v?timeout=10s\": dial tcp 10.0.0.1:443: connect: connection refused";
        let why = "Post \"https://x.y.svc:443/v?timeout=10s\": dial tcp 10.0.0.1:443: connect: connection refused";
        assert_eq!(failed(message), Some(("a.example.org", why)));
        assert_eq!(failed("etcdserver: leader changed"), None);
        assert_eq!(named("a", &[]), "webhook \"a\"");
        let two = ["ValidatingWebhookConfiguration \"b\"".to_owned(), "MutatingWebhookConfiguration \"c\"".to_owned()];
        assert_eq!(
            named("a", &two),
            "webhook \"a\" of ValidatingWebhookConfiguration \"b\" and MutatingWebhookConfiguration \"c\""
        );
    }
}
