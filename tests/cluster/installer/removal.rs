//! What goes: prune, rollback, uninstall, and what must not go.

use kube::api::{DeleteParams, Patch, PatchParams};

use super::*;

fn map(name: &str, value: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: NS}}\ndata: {{value: '{value}'}}\n"
    )
}

pub(crate) async fn what_is_no_longer_wanted_is_deleted_when_all_is_ready(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "prune")?;
    let maps: Vec<String> = (0..9).map(|n| map(&format!("m{n}"), "1")).collect();
    farm.component("rc1", "maps", "", &maps.concat())?;
    farm.init(&[]).await?.expect(0);
    farm.component("rc1", "maps", "", &maps[..6].concat())?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("when all is ready\n  delete     ConfigMap "), "{}", plan.out);

    // One is somebody's by now, one is to be kept: neither goes.
    farm.kubectl(&["label", "configmap", "m8", "app.kubernetes.io/managed-by=somebody", "--overwrite"], "").await?;
    farm.kubectl(&["annotate", "configmap", "m7", "bko-install/keep=true"], "").await?;
    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains("deleted ConfigMap "), "{}", init.out);
    for (name, there) in [("m6", false), ("m7", true), ("m8", true), ("m5", true)] {
        assert_eq!(farm.exists("configmap", name).await?, there, "{name}");
    }
    let before = farm.writes().await?.len();
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.writes().await?.len(), before);
    let inventory = farm.record().await?["inventory"].as_array().map_or(0, Vec::len);
    assert_eq!(inventory, 8, "the namespace, six, and the one that is kept");

    // More than a third needs consent, and nothing is written without.
    farm.component("rc1", "maps", "", &maps[..2].concat())?;
    let refused = farm.init(&[]).await?.expect(5);
    refused.says("4 of 8 objects would go");
    assert_eq!(farm.writes().await?.len(), before);
    farm.init(&["--confirm-prune"]).await?.expect(0);
    assert!(!farm.exists("configmap", "m4").await?);
    Ok(())
}

pub(crate) async fn a_namespace_with_foreign_objects_is_not_pruned(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "foreign")?;
    let other = &farm.names.builds.clone();
    let namespace = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {other}}}\n");
    let more: String = (0..4).map(|n| map(&format!("m{n}"), "1")).collect();
    farm.component("rc1", "maps", "", &more)?;
    farm.component("rc0", "other", "", &namespace)?;
    farm.init(&[]).await?.expect(0);
    let foreign = format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: theirs, namespace: {other}}}\n");
    farm.kubectl(&["create", "--namespace", other, "--filename=-"], &foreign).await?;
    farm.without("other")?;
    let refused = farm.init(&[]).await?.expect(5);
    refused.says(&format!("Namespace {other} holds what is not ours: Secret theirs"));
    farm.kubectl(&["delete", "secret", "theirs", "--namespace", other], "").await?;
    farm.init(&[]).await?.expect(0);
    assert!(!farm.exists("namespace", other).await?);
    Ok(())
}

pub(crate) async fn a_delete_that_admission_denies_stays_recorded(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "denied")?;
    let maps: Vec<String> = (0..4).map(|n| map(&format!("m{n}"), "1")).collect();
    farm.component("rc1", "maps", "", &maps.concat())?;
    farm.init(&[]).await?.expect(0);
    let policy = "apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingAdmissionPolicy\nmetadata: {name: NS}\nspec:\n  \
                  failurePolicy: Fail\n  matchConstraints:\n    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NS}}\n    \
                  resourceRules: [{apiGroups: [''], apiVersions: [v1], operations: [DELETE], resources: [configmaps], resourceNames: [m3]}]\n  \
                  validations: [{expression: 'false', message: nobody deletes this}]\n---\n\
                  apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingAdmissionPolicyBinding\nmetadata: {name: NS}\nspec: {policyName: NS, validationActions: [Deny]}\n";
    farm.kubectl(&["create", "--filename=-"], policy).await?;
    denies(&farm).await?;
    farm.component("rc1", "maps", "", &maps[..3].concat())?;
    let run = farm.init(&[]).await?.expect(1);
    run.says("could not be deleted, and stay recorded");
    run.says("nobody deletes this");
    let record = farm.record().await?;
    let is_recorded =
        |name: &str| record["inventory"].as_array().into_iter().flatten().any(|entry| entry["name"] == name);
    assert!(record["state"] == "failed" && is_recorded("m3"), "{record}");
    let history = farm.run("history", &[]).await?.expect(0);
    assert!(history.out.contains("nobody deletes this"), "{}", history.out);
    let name = farm.namespace().to_owned();
    farm.kubectl(&["delete", "validatingadmissionpolicybinding", &name], "").await?;
    farm.kubectl(&["delete", "validatingadmissionpolicy", &name], "").await?;
    for _ in 0..50 {
        if farm.init(&[]).await?.code == Some(0) {
            break;
        }
    }
    assert!(!farm.exists("configmap", "m3").await?);
    Ok(())
}

/// Waits until the API server knows the policy.
async fn denies(farm: &Bundled) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(farm.client(), farm.namespace());
    for _ in 0..100 {
        let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
        if maps.delete("m3", &params).await.is_err() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("the policy does not take effect")
}

pub(crate) async fn an_api_service_that_is_down_is_named_and_does_not_stop_a_run(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "apiservice")?;
    let down = "apiVersion: apiregistration.k8s.io/v1\nkind: APIService\nmetadata: {name: v1.down.example.org}\nspec:\n  \
                group: down.example.org\n  version: v1\n  groupPriorityMinimum: 1\n  versionPriority: 1\n  insecureSkipTLSVerify: true\n  \
                service: {name: nobody, namespace: NS}\n";
    farm.create_namespace().await?;
    farm.kubectl(&["create", "--filename=-"], down).await?;
    let other = &farm.names.builds.clone();
    farm.component("rc0", "other", "", &format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {other}}}\n"))?;
    farm.component("rc1", "maps", "", &(map("a", "1") + &map("b", "1")))?;
    farm.init(&[]).await?.expect(0);
    farm.without("other")?;
    let plan = farm.run("plan", &[]).await?;
    // Kubernetes itself deletes no namespace as long as an API is down.
    let run = farm.init(&["--timeout=10s"]).await?;
    farm.kubectl(&["delete", "apiservice", "v1.down.example.org"], "").await?;
    plan.expect(3).says("API down.example.org/v1 does not answer");
    run.expect(1).says("Discovery failed for some groups");
    farm.init(&[]).await?.expect(0);
    assert!(!farm.exists("namespace", other).await?);
    Ok(())
}

pub(crate) async fn a_record_beyond_one_mebibyte_is_kept_in_parts_and_rolled_back(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "large")?;
    let random = |seed: u64| {
        let mut random = fastrand::Rng::with_seed(seed);
        std::iter::repeat_with(|| random.lowercase()).take(800_000).collect::<String>()
    };
    let large: String = (0..10).map(|n| map(&format!("large-{n}"), &random(n))).collect();
    farm.component("rc1", "maps", "", &(large + &map("small", "first")))?;
    farm.init(&[]).await?.expect(0);
    let maps: Api<ConfigMap> = Api::namespaced(farm.client(), farm.namespace());
    let parts =
        || async { anyhow::Ok(maps.list(&ListParams::default().labels("bko-install/record-part")).await?.items.len()) };
    let first = parts().await?;
    assert!(first > 4, "5 MB of random text in {first} parts");
    farm.component("rc1", "maps", "", &(map("small", "second") + &map("large-0", "tiny")))?;
    farm.init(&["--confirm-prune"]).await?.expect(0);
    assert_eq!(farm.get("configmap", "small").await?["data"]["value"], "second");
    assert!(!farm.exists("configmap", "large-1").await?);

    farm.run("rollback", &["1"]).await?.expect(0);
    assert_eq!(farm.get("configmap", "small").await?["data"]["value"], "first");
    assert_eq!(farm.get("configmap", "large-1").await?["data"]["value"], random(1));
    let record = farm.record().await?;
    let origins: Vec<&Value> =
        record["history"].as_array().into_iter().flatten().map(|r| &r["origin"]["run"]).collect();
    assert_eq!(origins, ["init", "init", "rollback"]);
    assert_eq!(record["history"][2]["origin"]["of"], 1);
    assert_eq!(record["history"][0]["objects"], record["history"][2]["objects"], "the same is kept once");
    Ok(())
}

pub(crate) async fn a_farm_is_rolled_back_with_its_keys_and_history_tells_it(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "rollback");
    farm.init(&["--set=server.resources.limits.memory=400Mi"]).await?.expect(0);
    let secrets = farm.secrets().await?;
    farm.init(&["--set=server.resources.limits.memory=600Mi"]).await?.expect(0);
    let dry = farm.found("rollback", &["--dry-run"]).await?.expect(3);
    assert!(dry.out.contains(".resources.limits.memory: \"600Mi\" → \"400Mi\""), "{}", dry.out);
    farm.found("rollback", &[]).await?.expect(0);
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    let server = serde_json::to_value(deployments.get("buildkit-operator-buildd").await?)?;
    let memory = server.pointer("/spec/template/spec/containers/0/resources/limits/memory");
    assert_eq!(memory, Some(&"400Mi".into()));
    assert_eq!(farm.secrets().await?, secrets);
    let history = farm.found("history", &[]).await?.expect(0);
    let lines: Vec<&str> = history.out.lines().collect();
    assert_eq!(lines.len(), 4, "{}", history.out);
    assert!(lines[3].starts_with("3 ") && lines[3].contains("rollback to 1"), "{}", history.out);
    farm.found("rollback", &["9"]).await?.expect(1).says("there is no revision 9: the recorded ones are 1, 2, 3");
    // What the rolled back one was asked for is what a plain run carries over.
    farm.run("plan", &[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn uninstalled_caches_stay_until_they_are_asked_for(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "uninstall");
    farm.init(&[]).await?.expect(0);
    let builds = farm.names.builds.clone();
    cache(&farm, "one", None).await?;
    cache(&farm, "forkone", Some("StatefulSet")).await?;
    cache(&farm, "backup", Some("Backup")).await?;
    let foreign: Secret = serde_json::from_value(json!({"metadata": {"name": "theirs"}}))?;
    Api::namespaced(farm.client(), &farm.names.operator).create(&PostParams::default(), &foreign).await?;
    let dry = farm.found("uninstall", &["--dry-run"]).await?.expect(3);
    for line in [
        "keep    PersistentVolumeClaim ",
        "it holds PersistentVolumeClaim cache-buildkitd-backup-0, PersistentVolumeClaim cache-buildkitd-one-0",
        "it holds Secret theirs",
    ] {
        assert!(dry.out.contains(line), "{line}: {}", dry.out);
    }
    assert!(!dry.out.contains("cache-buildkitd-forkone-0"), "it goes with its daemon: {}", dry.out);
    let run = farm.found("uninstall", &[]).await?.expect(0);
    for (key, kept) in [("one", true), ("backup", true), ("forkone", false)] {
        let line = format!("kept PersistentVolumeClaim {builds}/cache-buildkitd-{key}-0: ");
        assert_eq!(run.out.contains(&line), kept, "{key}: {}", run.out);
    }
    let namespaces: Api<Namespace> = Api::all(farm.client());
    assert!(namespaces.get_opt(&builds).await?.is_some() && namespaces.get_opt(&farm.names.operator).await?.is_some());
    assert!(namespaces.get_opt(&farm.names.system).await?.is_none());
    assert!(farm.record().await?.is_none() && farm.lease().await?.is_none());
    let left: Vec<String> = farm.secrets().await?.into_keys().collect();
    assert_eq!(left, [""; 0]);
    farm.found("uninstall", &[]).await?.expect(0).says("nothing is installed");

    // It is there again, and then everything goes: also what an export's first step had needed.
    farm.init(&[]).await?.expect(0);
    let step: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "first-step", "labels": {
        "app.kubernetes.io/managed-by": "bko-install", "bko-install/component": "bootstrap",
    }}}))?;
    Api::namespaced(farm.client(), &farm.names.operator).create(&PostParams::default(), &step).await?;
    Api::<Secret>::namespaced(farm.client(), &farm.names.operator).delete("theirs", &DeleteParams::default()).await?;
    farm.found("uninstall", &["--delete-caches"]).await?.expect(0);
    for name in farm.names.all() {
        assert!(namespaces.get_opt(name).await?.is_none(), "{name}");
    }
    Ok(())
}

/// A cache as the controller's StatefulSets leave it, or make it for a fork: owned.
async fn cache(farm: &Farm, key: &str, owner: Option<&str>) -> anyhow::Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(farm.client(), &farm.names.builds);
    let owners = owner.map(|kind| {
        json!({"apiVersion": "example.org/v1", "kind": kind, "name": "owner", "uid": "0b2a2b1e-6f4c-4f0e-9a53-0c4a8f6d7e11"})
    });
    let owners: Vec<Value> = owners.into_iter().collect();
    let claim = json!({
        "metadata": {"name": format!("cache-buildkitd-{key}-0"), "ownerReferences": owners, "labels": {
            "app.kubernetes.io/name": "buildkit-operator", "app.kubernetes.io/component": "buildkitd",
            "buildkit-operator.socialgouv.github.io/project-key": key,
        }},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
    Ok(())
}

/// Owns the cluster: the definition is everybody's.
pub(crate) async fn running_builds_and_finalizers_are_told_before_anything_is_removed(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "finalizer");
    farm.init(&[]).await?.expect(0);
    let resource = kube::core::ApiResource::from_gvk_with_plural(
        &kube::core::GroupVersionKind::gvk("buildkit-operator.socialgouv.github.io", "v1alpha1", "BuildProject"),
        "buildprojects",
    );
    let projects: Api<kube::core::DynamicObject> = Api::namespaced_with(farm.client(), &farm.names.builds, &resource);
    let project = json!({
        "apiVersion": "buildkit-operator.socialgouv.github.io/v1alpha1", "kind": "BuildProject",
        "metadata": {"name": "p1", "finalizers": ["example.org/guard"]},
        "spec": {"key": "p1", "repo": "github.com/a/b", "target": "default", "arch": "amd64"},
    });
    let named = PostParams { field_manager: Some("guardian".into()), ..PostParams::default() };
    projects.create(&named, &serde_json::from_value(project)?).await?;
    let inflight = json!({"status": {"inflight": [{"id": "b1", "since": "2026-01-01T00:00:00Z"}]}});
    projects.patch_status("p1", &PatchParams::default(), &Patch::Merge(inflight)).await?;
    farm.found("uninstall", &[]).await?.expect(5).says("1 builds run: BuildProject ");
    let run = farm.found("uninstall", &["--cut-builds", "--timeout=12s"]).await?.expect(1);
    run.says("finalizer \"example.org/guard\" of \"guardian\", of which no pod is running");
    let server: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    assert!(server.get_opt("buildkit-operator-buildd").await?.is_some(), "its controller must live as long");
    let record = farm.record().await?.context("no record")?;
    assert_eq!(record["state"], "uninstalling");
    projects.patch("p1", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": []}}))).await?;
    farm.found("uninstall", &[]).await?.expect(0);
    Ok(())
}
