//! What the API server itself refuses of a `BuildProject`.

use std::sync::Arc;

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::BuildProject;
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
