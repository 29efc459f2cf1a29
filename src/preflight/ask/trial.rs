//! Pods created by dry run: refused, taken, or changed on the way.

use std::collections::BTreeSet;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Map, Value};

use super::super::access::STAND_IN;
use super::super::admission::{self, Mutation};
use super::super::blame::{self, Interceptors};
use super::super::namespaces::level_to_be;
use super::super::pods::{self, Room, Trial};
use super::super::{Check, Finding, Verdict, daemon};
use super::{Asker, Listed};
use crate::cluster::{Answer, RequestError};
use crate::families::build_farm::settings::Settings;
use crate::names::INSTALLER_MANAGER;

impl Asker<'_> {
    /// Tries our own pods and the daemons'.
    pub(super) async fn pods(&self, settings: Option<&Settings>) -> Result<Vec<Finding>, RequestError> {
        let absent = self.absent_accounts().await?;
        let ours = pods::trials(self.rendered).into_iter().map(|trial| (Check::Pods, trial));
        let daemons = settings.map(daemon::trials).unwrap_or_default();
        let all = ours.chain(daemons.into_iter().map(|trial| (Check::DaemonPods, trial)));
        let all = all.filter(|(_, trial)| !self.is_terminating(&trial.namespace));
        let absent = &absent;
        let findings = stream::iter(all).map(|(check, trial)| async move { self.attempt(check, &trial, absent).await });
        let findings: Vec<Option<Finding>> =
            findings.buffer_unordered(self.cluster.concurrency()).try_collect().await?;
        Ok(findings.into_iter().flatten().collect())
    }

    /// Service accounts of ours that are not there yet.
    async fn absent_accounts(&self) -> Result<BTreeSet<(String, String)>, RequestError> {
        let accounts = self.rendered.objects.iter().map(|object| &object.id).filter(|id| id.kind == "ServiceAccount");
        let accounts = accounts.filter_map(|id| Some((id.namespace.clone()?, id.name.clone())));
        let look = |(namespace, name): (String, String)| async move {
            let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}");
            let there = self.live.contains_key(&namespace) && matches!(self.get(&path).await?, Answer::Yes(_));
            Ok::<_, RequestError>((!there).then_some((namespace, name)))
        };
        let looks = stream::iter(accounts).map(look).buffer_unordered(self.cluster.concurrency());
        looks.try_filter_map(|absent| async { Ok(absent) }).try_collect().await
    }

    async fn attempt(
        &self,
        check: Check,
        trial: &Trial,
        absent: &BTreeSet<(String, String)>,
    ) -> Result<Option<Finding>, RequestError> {
        let stand_in = !self.live.contains_key(&trial.namespace);
        let room = Room { stand_in, relabelled: level_to_be(self.rendered, &trial.namespace).is_some() };
        let sent = pods::prepared(trial, absent, stand_in);
        let namespace = if stand_in { STAND_IN } else { &trial.namespace };
        let path = format!("/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldManager={INSTALLER_MANAGER}");
        match self.post(&format!("try the pod of {}", trial.what), &path, &sent).await? {
            // Named among the permissions already.
            Answer::No { forbidden: true, .. } => Ok(None),
            Answer::No { code, message, .. } => Ok(Some(pods::refused(check, trial, code, &message, room))),
            Answer::Yes(got) => {
                let mutations = admission::mutations(&sent, &got);
                self.judge(check, trial, &mutations, stand_in).await.map(Some)
            }
        }
    }

    async fn judge(
        &self,
        check: Check,
        trial: &Trial,
        mutations: &[Mutation],
        stand_in: bool,
    ) -> Result<Finding, RequestError> {
        let Trial { what, namespace, .. } = trial;
        let tried = if stand_in {
            format!(" (tried in namespace \"{STAND_IN}\", since \"{namespace}\" does not exist yet)")
        } else {
            String::new()
        };
        // What our own pods lose breaks nothing that they need: they ask for little.
        let effect = |mutation: &Mutation| match (check, admission::effect(mutation)) {
            (Check::DaemonPods, effect) => effect,
            (_, (verdict, _)) => (verdict.min(Verdict::Warn), "the pod is not as it was asked for"),
        };
        let worst = mutations.iter().map(|mutation| effect(mutation).0).max().unwrap_or(Verdict::Ok);
        if worst == Verdict::Ok {
            return Ok(check.ok(format!("{what}: taken as it is{tried}")));
        }
        let all: Vec<&Mutation> = mutations.iter().collect();
        let suspects = blame::suspects(&all, &self.interceptors(trial).await?, &self.labels_to_be(namespace));
        let lines: Vec<String> = mutations
            .iter()
            .filter(|mutation| effect(mutation).0 > Verdict::Ok)
            .map(|mutation| format!("{mutation}: {}", effect(mutation).1))
            .collect();
        let by = if suspects.is_empty() { "somebody unknown".to_owned() } else { suspects.join(" or ") };
        let message = format!("{what}: changed by {by}{tried}\n- {}", lines.join("\n- "));
        let hint = format!("exempt namespace \"{namespace}\" from it");
        // Whoever does this in another namespace need not do it in the daemons'.
        let certain = !stand_in || !suspects.is_empty();
        Ok(if worst == Verdict::Fail && certain { check.fail(message, hint) } else { check.warn(message, hint) })
    }

    /// The labels that the namespace has, or will have.
    fn labels_to_be(&self, namespace: &str) -> Value {
        let mut labels = Map::new();
        labels.insert("kubernetes.io/metadata.name".into(), namespace.into());
        let live = self.live.get(namespace).map(|live| &live["metadata"]["labels"]);
        let ours = self.rendered.objects.iter().find(|o| o.id.kind == "Namespace" && o.id.name == namespace);
        for more in [live, ours.map(|object| &object.body["metadata"]["labels"])].into_iter().flatten() {
            labels.extend(more.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
        }
        Value::Object(labels)
    }

    async fn interceptors(&self, trial: &Trial) -> Result<Interceptors, RequestError> {
        let limits = format!("/api/v1/namespaces/{}/limitranges", trial.namespace);
        Ok(Interceptors {
            policies: self.first_served("mutatingadmissionpolicies").await?,
            bindings: self.first_served("mutatingadmissionpolicybindings").await?,
            webhooks: self.first_served("mutatingwebhookconfigurations").await?,
            limits: self.items(&limits).await?.unwrap_or_default(),
        })
    }

    async fn first_served(&self, resource: &str) -> Result<Vec<Value>, RequestError> {
        for version in ["v1", "v1beta1", "v1alpha1"] {
            let path = format!("/apis/admissionregistration.k8s.io/{version}/{resource}");
            if let Some(items) = self.items(&path).await? {
                return Ok(items);
            }
        }
        Ok(Vec::new())
    }

    /// Nothing when the kind is not served.
    async fn items(&self, path: &str) -> Result<Option<Vec<Value>>, RequestError> {
        Ok(match self.list(path).await? {
            Listed::Items(items) => Some(items),
            Listed::Forbidden => Some(Vec::new()),
            Listed::Unserved => None,
        })
    }
}
