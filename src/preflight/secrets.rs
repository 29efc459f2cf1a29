//! Secrets that somebody else has to make: what is missing or wrong, and the
//! command that mends it. Pure.

use jiff::Timestamp;

use super::{Check, Finding};
use crate::certificate::issue::LiveSecrets;
use crate::certificate::{Gap, Mode, provided};
use crate::manifest::{GeneratedSecret, Rendered};

/// Everything that is wrong, tokens first.
pub fn gaps(rendered: &Rendered, live: &LiveSecrets, now: Timestamp) -> Vec<Gap> {
    let mut gaps: Vec<Gap> = rendered.expected.iter().filter_map(|value| value_gap(value, live)).collect();
    if rendered.mode == Mode::Provided {
        gaps.extend(provided(&rendered.certificates, live, now));
    }
    gaps
}

/// Namespaces and names of the Secrets to look at.
pub fn places(rendered: &Rendered) -> Vec<(String, String)> {
    let specs = rendered.certificates.iter().filter(|spec| rendered.mode == Mode::Provided && !spec.is_authority());
    let certificates = specs.map(|spec| (spec.namespace.clone(), spec.secret.clone()));
    let values = rendered.expected.iter().map(|value| (value.namespace.clone(), value.name.clone()));
    values.chain(certificates).collect()
}

/// Gaps as findings; one that says so when there is none.
pub fn findings(rendered: &Rendered, gaps: &[Gap]) -> Vec<Finding> {
    let count = places(rendered).len();
    if count == 0 {
        return Vec::new();
    }
    if gaps.is_empty() {
        return vec![Check::Secrets.ok(format!("the {count} Secrets that are yours to make are there"))];
    }
    let finding = |gap: &Gap| {
        let (what, hint) = gap.message.split_once("; ").unwrap_or((&gap.message, ""));
        if gap.fatal { Check::Secrets.fail(what, hint) } else { Check::Secrets.warn(what, hint) }
    };
    gaps.iter().map(finding).collect()
}

fn value_gap(value: &GeneratedSecret, live: &LiveSecrets) -> Option<Gap> {
    let GeneratedSecret { namespace, name, key, bytes, .. } = value;
    let why = match live.get(&(namespace.clone(), name.clone())).map(|secret| secret.data.get(key)) {
        None => "is missing".to_owned(),
        Some(None | Some([])) => format!("has no key \"{key}\""),
        Some(Some(_)) => return None,
    };
    let message = format!(
        "Secret \"{namespace}/{name}\": {why}; make it with:\n  \
         kubectl create namespace {namespace} --dry-run=client --output=yaml | kubectl apply --server-side --filename=-\n  \
         kubectl --namespace {namespace} create secret generic {name} \
         --from-literal={key}=\"$(openssl rand -hex {bytes})\""
    );
    Some(Gap { secret: format!("{namespace}/{name}"), message, fatal: true })
}
