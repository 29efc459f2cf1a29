//! What a refusal of the API server means, and whether it may pass. Pure.

use std::time::Duration;

use kube::core::{ApiResource, Status};

use super::RequestError;
use super::request::Target;
use crate::manifest::ObjectId;
use crate::plan::{Cause, FieldConflict};

/// Too many requests, a server that is not itself, or a quota that is not
/// computed yet: the same request may succeed in a moment. Anything else of the
/// server's own is an answer, as is a 500 that complains about the object.
pub(super) fn may_pass(status: &Status) -> bool {
    let raced = status.code == 409 && status.reason == "AlreadyExists";
    let uncounted = status.code == 403 && status.message.contains("status unknown for quota");
    let overtaxed = matches!(status.code, 429 | 502 | 503 | 504);
    overtaxed || (status.code == 500 && malformed(&status.message).is_none()) || raced || uncounted
}

/// What the API server says of an object that does not fit its schema. It finds
/// this out too late to call it a bad request, and answers 500. What precedes
/// it names the object, as we do.
/// `failed to create typed patch object (farm/x; apps/v1, Kind=Deployment): .spec.y: field not declared in schema`
fn malformed(message: &str) -> Option<&str> {
    let begins = ["failed to create typed ", "failed to convert new object "];
    let rest = begins.into_iter().find_map(|begin| Some(message.split_once(begin)?.1))?;
    Some(rest.split_once("): ").map_or(message, |(_, rest)| rest))
}

pub(super) fn retry_after(status: &Status) -> Option<Duration> {
    let seconds = status.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

pub(super) fn is_connection(error: &kube::Error) -> bool {
    matches!(error, kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_))
}

/// Turns a refusal into an error that says what to do about it.
pub(super) fn refusal(target: &Target<'_>, status: &Status) -> RequestError {
    let conflicts = conflicts(status);
    if !conflicts.is_empty() {
        return RequestError::Conflict { object: Box::new(target.object.clone()), conflicts };
    }
    if status.code == 403
        && let Some((user, verb)) = lacking(&status.message)
    {
        return RequestError::Forbidden { user, permission: permission(target, verb) };
    }
    other_refusal(target.object, status)
}

pub(super) fn other_refusal(object: &ObjectId, status: &Status) -> RequestError {
    let object = Box::new(object.clone());
    match malformed(&status.message) {
        Some(why) => RequestError::Malformed { object, why: why.to_owned() },
        None => {
            let details = status.details.iter().flat_map(|details| &details.causes);
            let causes = details.map(|cause| Cause {
                reason: cause.reason.clone(),
                field: cause.field.clone(),
                message: cause.message.clone(),
            });
            RequestError::Refused {
                object,
                message: status.message.clone(),
                code: status.code,
                causes: causes.collect(),
            }
        }
    }
}

fn permission(target: &Target<'_>, verb: &str) -> String {
    let ApiResource { plural, group, .. } = target.resource;
    let resource = if group.is_empty() { plural.clone() } else { format!("{plural}.{group}") };
    match &target.object.namespace {
        Some(namespace) => format!("{verb} {resource} in namespace \"{namespace}\""),
        None => format!("{verb} {resource} in the whole cluster"),
    }
}

/// Who lacks which verb; `None` when an admission plugin refused, which is
/// also 403. `… is forbidden: User "x" cannot patch resource "y" in API group …`
pub(super) fn lacking(message: &str) -> Option<(String, &str)> {
    let (_, rest) = message.split_once("User \"")?;
    let (user, rest) = rest.split_once("\" cannot ")?;
    let (verb, _) = rest.split_once(" resource")?;
    Some((format!("user \"{user}\""), verb))
}

fn conflicts(status: &Status) -> Vec<FieldConflict> {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .filter(|cause| cause.reason == "FieldManagerConflict")
        .map(|cause| FieldConflict {
            manager: cause.message.split('"').nth(1).unwrap_or(&cause.message).to_owned(),
            field: cause.field.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use kube::core::GroupVersionKind;

    use super::*;

    fn status(json: &str) -> Status {
        serde_json::from_str(json).unwrap()
    }

    fn deployment() -> (ObjectId, ApiResource) {
        let id = ObjectId {
            group: "apps".into(),
            version: "v1".into(),
            kind: "Deployment".into(),
            namespace: Some("farm".into()),
            name: "server".into(),
        };
        let gvk = GroupVersionKind::gvk("apps", "v1", "Deployment");
        (id, ApiResource::from_gvk_with_plural(&gvk, "deployments"))
    }

    #[test]
    fn a_lacking_permission_names_verb_resource_and_namespace() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(
            r#"{"code":403,"reason":"Forbidden","message":"deployments.apps \"server\" is forbidden: User \"eve\" cannot patch resource \"deployments\" in API group \"apps\" in the namespace \"farm\""}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "forbidden: user \"eve\" may not patch deployments.apps in namespace \"farm\""
        );
    }

    #[test]
    fn an_admission_denial_is_no_lacking_permission() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(r#"{"code":403,"reason":"Forbidden","message":"exceeded quota: small"}"#);
        assert!(matches!(refusal(&target, &status), RequestError::Refused { code: 403, .. }));
    }

    #[test]
    fn a_conflict_names_every_manager_and_field() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(
            r#"{"code":409,"reason":"Conflict","message":"Apply failed","details":{"causes":[
                {"reason":"FieldManagerConflict","message":"conflict with \"kubectl-edit\" using apps/v1","field":".spec.replicas"},
                {"reason":"FieldManagerConflict","message":"conflict with \"helm\" with subresource \"scale\"","field":".spec.paused"}]}}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "Deployment farm/server: fields belong to other managers: .spec.replicas of \"kubectl-edit\", .spec.paused of \"helm\""
        );
    }

    #[test]
    fn an_object_that_does_not_fit_the_schema_is_named_with_its_field() {
        let (object, resource) = deployment();
        let target = Target { verb: "check", object: &object, resource: &resource };
        let status = status(
            r#"{"code":500,"message":"failed to create typed patch object (farm/server; apps/v1, Kind=Deployment): .spec.frobnicate: field not declared in schema"}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "Deployment farm/server does not fit the API server's schema: .spec.frobnicate: field not declared in schema"
        );
    }

    #[test]
    fn only_what_can_pass_is_tried_again() {
        for (json, expected) in [
            (r#"{"code":429}"#, true),
            (r#"{"code":500}"#, true),
            (r#"{"code":500,"message":"etcdserver: leader changed"}"#, true),
            (
                r#"{"code":500,"message":"failed to create typed patch object (a/b; v1, Kind=Pod): .x: field not declared in schema"}"#,
                false,
            ),
            (r#"{"code":501}"#, false),
            (r#"{"code":502}"#, true),
            (r#"{"code":503}"#, true),
            (r#"{"code":504}"#, true),
            (r#"{"code":409,"reason":"AlreadyExists"}"#, true),
            (r#"{"code":409,"reason":"Conflict"}"#, false),
            (r#"{"code":403,"message":"exceeded quota: small"}"#, false),
            (r#"{"code":403,"message":"status unknown for quota: small, resources: pods"}"#, true),
            (
                r#"{"code":500,"message":"failed to convert new object (/x; v1, Kind=Secret) to proper version: illegal base64 data"}"#,
                false,
            ),
            (r#"{"code":422}"#, false),
            (r#"{"code":404}"#, false),
        ] {
            assert_eq!(may_pass(&status(json)), expected, "{json}");
        }
    }
}
