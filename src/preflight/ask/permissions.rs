//! Asks what we may do, by reviews of access.

use std::collections::BTreeSet;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::Asker;
use crate::cluster::{Answer, Cluster, RequestError};
use crate::manifest::{ObjectId, Rendered};
use crate::preflight::Finding;
use crate::preflight::access::{self, Besides, EVERYTHING, Known, Needs, Permission, Plurals, Purpose};

/// What an installation needs to be allowed, in this cluster. Its namespaces
/// are there by then, if they are `made` with the roles that are asked about.
///
/// # Errors
/// When the API server does not answer.
pub async fn needs(
    cluster: &Cluster,
    rendered: &Rendered,
    besides: &Besides,
    made: bool,
) -> Result<Needs, RequestError> {
    let mut known = Asker::new(cluster, rendered).await?.known(besides).await?;
    if made {
        known.missing.clear();
    }
    Ok(access::install(rendered, &known, besides))
}

impl Asker<'_> {
    pub(super) async fn known(&self, besides: &Besides) -> Result<Known, RequestError> {
        let plurals = known_plurals(self.cluster, self.rendered, besides.going.iter()).await;
        let mut known = Known { missing: self.missing(), plurals, ..Known::default() };
        for object in self.rendered.objects.iter().filter(|object| access::is_role(&object.id)) {
            match self.cluster.get(&object.id).await {
                Ok(live) => known.roles.extend(live),
                // That it may not be looked at is told with all the rest.
                Err(RequestError::Forbidden { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }
}

/// What is lacking of these needs, as findings.
///
/// # Errors
/// When the API server does not answer.
pub async fn permissions(cluster: &Cluster, needs: &Needs, purposes: &[Purpose]) -> Result<Vec<Finding>, RequestError> {
    reviewed(cluster, &Semaphore::new(cluster.concurrency()), needs, purposes).await
}

/// How resources of these kinds are called, by the bundle or by the API server.
pub async fn known_plurals<'a>(
    cluster: &Cluster,
    rendered: &Rendered,
    others: impl Iterator<Item = &'a ObjectId>,
) -> Plurals {
    let mut plurals = served_plurals(cluster, others).await;
    plurals.extend(access::plurals(rendered));
    plurals
}

/// How the API server calls the resources of these kinds. What it does not
/// serve is left out.
pub async fn served_plurals<'a>(cluster: &Cluster, kinds: impl Iterator<Item = &'a ObjectId>) -> Plurals {
    let mut plurals = Plurals::new();
    for id in kinds {
        let kind = (id.group.clone(), id.kind.clone());
        if !plurals.contains_key(&kind)
            && let Ok(Some(resource)) = cluster.find_resource(id).await
        {
            plurals.insert(kind, resource.plural);
        }
    }
    plurals
}

pub(super) async fn reviewed(
    cluster: &Cluster,
    permits: &Semaphore,
    needs: &Needs,
    purposes: &[Purpose],
) -> Result<Vec<Finding>, RequestError> {
    let reviewer = Reviewer { cluster, permits };
    let user = reviewer.user().await?;
    let mut lacking = BTreeSet::new();
    if !reviewer.may(&everything()).await? {
        let answers = stream::iter(needs.all()).map(|permission| async {
            let may = reviewer.may_all_of(&permission).await?;
            Ok::<_, RequestError>((!may).then_some(permission))
        });
        let answers: Vec<_> = answers.buffer_unordered(cluster.concurrency()).try_collect().await?;
        lacking.extend(answers.into_iter().flatten());
    }
    Ok(access::judge(needs, &lacking, &user, purposes))
}

struct Reviewer<'a> {
    cluster: &'a Cluster,
    permits: &'a Semaphore,
}

impl Reviewer<'_> {
    async fn post(&self, what: &str, path: &str, body: &Value) -> Result<Answer, RequestError> {
        let _permit = self.permits.acquire().await;
        self.cluster.ask_with(what, path, body).await
    }

    /// Who we are, as the API server calls us.
    async fn user(&self) -> Result<String, RequestError> {
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
        let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
        let answer = self.post("ask who we are", path, &review).await?;
        let name = match &answer {
            Answer::Yes(review) => review.pointer("/status/userInfo/username").and_then(Value::as_str),
            Answer::No { .. } => None,
        };
        Ok(name.map_or_else(|| "the user of this kubeconfig".to_owned(), |name| format!("user \"{name}\"")))
    }

    /// The same as [`Self::may`]; who may not list everything may still list
    /// each kind that there is.
    async fn may_all_of(&self, permission: &Permission) -> Result<bool, RequestError> {
        let may = self.may(permission).await?;
        if may || permission.resource != EVERYTHING {
            return Ok(may);
        }
        for (resource, kind) in self.cluster.namespaced_kinds().await? {
            let one = Permission { group: kind.group, resource: resource.plural, ..permission.clone() };
            if !self.may(&one).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn may(&self, permission: &Permission) -> Result<bool, RequestError> {
        let Permission { namespace, group, resource, name, verb } = permission;
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {
                "namespace": namespace, "group": group, "resource": resource, "subresource": subresource,
                "name": name, "verb": verb,
            }},
        });
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let answer = self.post(&format!("ask whether we may {permission}"), path, &review).await?;
        Ok(matches!(answer, Answer::Yes(review) if review.pointer("/status/allowed") == Some(&Value::Bool(true))))
    }
}

/// Who may do everything need not be asked two hundred times.
fn everything() -> Permission {
    let all = || EVERYTHING.to_owned();
    Permission { namespace: None, group: all(), resource: all(), name: None, verb: all() }
}
