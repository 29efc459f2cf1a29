//! What the API server itself says of a `BuildProject`, and of what is made of it.

use std::sync::Arc;

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::BuildProject;
use bko_install::families::build_farm::build::build;
use bko_install::families::build_farm::build::config::Base;
use bko_install::families::build_farm::settings::{Sandbox, Settings};
use bko_install::families::build_farm::validate::validate;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod, Volume};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::farm;
use crate::harness::Cluster;

fn project(name: &str, spec: Value) -> anyhow::Result<BuildProject> {
    let mut whole = json!({"key": name, "arch": "amd64"});
    for (field, value) in spec.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    Ok(serde_json::from_value(json!({
        "apiVersion": "buildkit-operator.socialgouv.github.io/v1alpha1", "kind": "BuildProject",
        "metadata": {"name": name}, "spec": whole,
    }))?)
}

async fn projects(cluster: &Cluster, prefix: &str) -> anyhow::Result<Api<BuildProject>> {
    farm::define(cluster).await?;
    let namespaces = cluster.namespaces(prefix);
    namespaces.create(&cluster.client()).await?;
    Ok(Api::namespaced(cluster.client(), &namespaces.builds))
}

pub(crate) async fn what_cannot_take_effect_is_refused_with_its_reason(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let api = projects(&cluster, "cel").await?;
    api.create(&PostParams::default(), &project("pa", json!({}))?).await?;
    let stored = json!({"storageClass": "fast", "restoreFromSnapshot": "snap-1"});
    api.create(&PostParams::default(), &project("pb", stored)?).await?;
    for (name, change, reason) in [
        ("pa", json!({"key": "pz"}), "key cannot change"),
        ("pa", json!({"arch": "arm64"}), "arch cannot change"),
        ("pa", json!({"storageClass": "slow"}), "storageClass cannot change"),
        ("pb", json!({"storageClass": "slow"}), "storageClass cannot change"),
        ("pb", json!({"storageClass": null}), "storageClass cannot change"),
        ("pa", json!({"restoreFromSnapshot": "snap-2"}), "restoreFromSnapshot cannot change"),
        ("pb", json!({"restoreFromSnapshot": null}), "restoreFromSnapshot cannot change"),
        ("pa", json!({"cacheVolumeGi": 0}), "greater than or equal to 1"),
        ("pa", json!({"cacheVolumeGi": 65537}), "less than or equal to 65536"),
        ("pa", json!({"idleTimeoutSec": -1}), "greater than or equal to 0"),
        ("pa", json!({"fanout": 65}), "less than or equal to 64"),
        ("pa", json!({"securityProfile": "none"}), "supported values"),
    ] {
        let patch = Patch::Merge(json!({"spec": change}));
        let refused = api.patch(name, &PatchParams::default(), &patch).await.err();
        let refused = refused.with_context(|| format!("{name} took {change}"))?.to_string();
        ensure!(refused.contains(reason), "{change}: {refused}");
    }
    let other = project("pc", json!({"key": "pd"}))?;
    let refused = api.create(&PostParams::default(), &other).await.err().context("a name that is not the key")?;
    ensure!(refused.to_string().contains("spec.key must equal metadata.name"), "{refused}");
    for (name, change) in [
        ("pa", json!({"cacheVolumeGi": 80, "tier": "hot", "idleTimeoutSec": 60, "securityProfile": "userns"})),
        ("pb", json!({"storageClass": "fast", "restoreFromSnapshot": "snap-1", "repo": "acme/shop"})),
    ] {
        api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": change}))).await?;
    }
    Ok(())
}

/// Some profiles need nodes that no test has: the API server at least takes
/// what is made for them.
pub(crate) async fn daemons_of_every_profile_are_accepted(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let namespaces = cluster.namespaces("profiles");
    namespaces.create(&cluster.client()).await?;
    let scheduling = r#"{"nodeSelector": {"pool": "builds"}, "tolerations": [{"key": "builds", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms":
        [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}}}}"#;
    let settings = Settings {
        namespace: namespaces.builds.clone(),
        sandbox: Some(Sandbox { runtime_class: "kata-clh".into(), image: None }),
        scheduling: scheduling.parse()?,
        ..Settings::default()
    };
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let (sets, pods) = (
        Api::<StatefulSet>::namespaced(cluster.client(), &namespaces.builds),
        Api::<Pod>::namespaced(cluster.client(), &namespaces.builds),
    );
    let class = json!({"metadata": {"name": "kata-clh"}, "handler": "kata"});
    Api::<RuntimeClass>::all(cluster.client())
        .create(&PostParams::default(), &serde_json::from_value(class)?)
        .await
        .context("creating the runtime class")?;
    for (key, profile) in [("pa", "rootless"), ("pa", "userns"), ("pa", "privileged"), ("forkpa", "rootless")] {
        let mut project = project(key, json!({"securityProfile": profile}))?;
        project.metadata.uid = Some("00000000-0000-0000-0000-000000000001".into());
        let valid = validate(&project)?;
        let made = build(&valid, &settings, &Base::default());
        let set = sets.create(&dry, &made.stateful_set).await.with_context(|| format!("{key} {profile}"))?;
        let template = set.spec.context("a set without a spec")?.template;
        let pod = Pod {
            metadata: ObjectMeta { name: Some(format!("{key}-{profile}")), ..template.metadata.unwrap_or_default() },
            spec: template.spec,
            status: None,
        };
        let pod = pods.create(&dry, &with_cache(pod)).await.with_context(|| format!("pod of {key} {profile}"))?;
        let spec = pod.spec.context("a pod without a spec")?;
        ensure!(spec.host_users == (profile == "userns").then_some(false), "{profile}: {:?}", spec.host_users);
        ensure!(spec.runtime_class_name.is_some() == key.starts_with("fork"), "{key}: {:?}", spec.runtime_class_name);
    }
    Ok(())
}

/// What the StatefulSet's controller adds.
fn with_cache(mut pod: Pod) -> Pod {
    let volume = Volume { name: "cache".into(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() };
    if let Some(spec) = &mut pod.spec {
        spec.volumes.get_or_insert_default().push(volume);
    }
    pod
}
