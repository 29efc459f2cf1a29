//! What the API server itself says of a `BuildProject`, and of what is made of it.

use std::sync::Arc;

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::BuildProject;
use bko_install::families::build_farm::build::build;
use bko_install::families::build_farm::build::config::Base;
use bko_install::families::build_farm::settings::{Sandbox, Settings};
use bko_install::families::build_farm::validate::validate;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::{Value, json};

use crate::farm::{self, Server};
use crate::harness::Cluster;
use crate::routes;

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

pub(crate) async fn an_architecture_without_a_companion_is_refused(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = routes::farm(&cluster, "arches").await?;
    let flags = farm.flags(&["--companion-image=i:1", "--companion-architectures=amd64"]);
    let server = Server::start(&cluster, &flags).await?;
    server.route(farm::REPO).await?;
    let (status, answer) = server.post("/route", &json!({"repo": farm::REPO, "arch": "arm64"})).await?;
    let reason = "spec.arch is \"arm64\", and the companion's image is for amd64";
    ensure!(status == 503 && answer.to_string().replace('\\', "").contains(reason), "{status} {answer}");
    // Nothing was made of it; and one that somebody else makes says why it does not start.
    let api: Api<BuildProject> = Api::namespaced(cluster.client(), &farm.namespace);
    ensure!(api.list(&ListParams::default()).await?.items.len() == 1);
    api.create(&PostParams::default(), &project("parm", json!({"arch": "arm64"}))?).await?;
    let told = |project: &BuildProject| {
        project.status_or_default().conditions.iter().any(|condition| condition.message.contains(reason))
    };
    farm::until(&cluster, &farm.namespace, "parm", "refused with its reason", told).await?;
    ensure!(farm::names::<StatefulSet>(&cluster, &farm.namespace).await? == [format!("buildkitd-{}", farm::KEY)]);
    Ok(())
}

/// The claims of a StatefulSet can never be changed, so that the API server
/// would refuse to move a cache.
pub(crate) async fn a_cache_stays_where_its_daemon_was_made(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = routes::farm(&cluster, "ephemeral").await?;
    let ephemeral = farm.flags(&["--cache-kind=emptyDir", "--cache-volume-gi=3", "--idle-seconds=1"]);
    let server = Server::start(&cluster, &ephemeral).await?;
    let answer = server.route(farm::REPO).await?;
    ensure!(farm::names::<PersistentVolumeClaim>(&cluster, &farm.namespace).await?.is_empty());
    let pods: Api<Pod> = Api::namespaced(cluster.client(), &farm.namespace);
    let pod = serde_json::to_value(pods.get(routes::POD).await?.spec)?;
    let volumes = pod["volumes"].as_array().context("no volumes")?;
    ensure!(volumes.iter().any(|v| v["name"] == "cache" && v["emptyDir"]["sizeLimit"] == "3Gi"), "{pod}");
    server.complete(&answer).await?;
    drop(server);

    // New daemons get volumes; this one takes a changed template, and keeps its place.
    let server = Server::start(&cluster, &farm.flags(&["--daemon-no-proxy=a.test"])).await?;
    let sets: Api<StatefulSet> = Api::namespaced(cluster.client(), &farm.namespace);
    let changed = |set: Option<&StatefulSet>| {
        let spec = set.and_then(|set| set.spec.as_ref());
        spec.is_some_and(|spec| serde_json::to_string(&spec.template).is_ok_and(|text| text.contains("a.test")))
    };
    let name = format!("buildkitd-{}", farm::KEY);
    let limit = std::time::Duration::from_secs(30);
    tokio::time::timeout(limit, await_condition(sets.clone(), &name, changed)).await.context("no new template")??;
    let set = sets.get(&name).await?.spec.context("no spec")?;
    ensure!(set.volume_claim_templates.is_none(), "{:?}", set.volume_claim_templates);
    server.route(farm::REPO).await?;
    let other = server.route("github.com/acme/other").await?;
    let claims = farm::names::<PersistentVolumeClaim>(&cluster, &farm.namespace).await?;
    let key = other["key"].as_str().context("no key")?;
    ensure!(claims == [format!("cache-buildkitd-{key}-0")], "{claims:?}");
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
