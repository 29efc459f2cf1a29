//! What is checked before the first write, and what is installed.

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use serde_json::json;

use super::permissions::kubectl_apply;
use super::*;

impl Farm {
    /// The findings of `cluster check`, by name of the check.
    async fn findings(&self, args: &[&str], code: i32) -> anyhow::Result<Vec<Value>> {
        let run = self.run("check", &[&["--output=json"], args].concat()).await?.expect(code);
        let report: Value = serde_json::from_str(&run.out)?;
        Ok(report["findings"].as_array().cloned().unwrap_or_default())
    }

    /// A run with a profile of its own.
    pub(super) async fn run_profile(&self, verb: &str, args: &[&str]) -> anyhow::Result<Run> {
        let mut command = bko_install();
        command.args(["cluster", verb, "--image", IMAGE, "--kubeconfig"]).arg(self.cluster.kubeconfig());
        Run::new(command.args(self.sets()).args(args).output().await?)
    }

    async fn label_builds(&self, key: &str, value: &str) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client());
        let label = json!({"metadata": {"labels": {key: value}}});
        namespaces.patch(&self.names.builds, &PatchParams::default(), &Patch::Merge(label)).await?;
        Ok(())
    }
}

fn of<'a>(findings: &'a [Value], check: &str) -> Vec<(&'a str, &'a str)> {
    let found = findings.iter().filter(|finding| finding["check"] == check);
    found.map(|f| (f["verdict"].as_str().unwrap_or_default(), f["message"].as_str().unwrap_or_default())).collect()
}

pub(crate) async fn a_cluster_is_checked_and_then_what_is_installed_too(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "checked");
    let before = farm.findings(&[], 0).await?;
    for check in ["server-version", "permissions", "storage-class", "pod-security", "daemon-pods", "nodes"] {
        let found = of(&before, check);
        assert!(!found.is_empty() && found.iter().all(|(verdict, _)| *verdict == "ok"), "{check}: {found:?}");
    }
    assert_eq!(of(&before, "pods").len(), 2, "{before:?}");
    assert!(of(&before, "pods").iter().all(|(verdict, _)| *verdict == "ok"), "{before:?}");
    assert!(of(&before, "daemon-pods")[0].1.contains("tried in namespace \"default\""), "{before:?}");
    assert_eq!(of(&before, "snapshots")[0].0, "warn");
    assert_eq!(of(&before, "volume-expansion")[0].0, "warn");
    for check in ["installation", "certificates", "route", "dns"] {
        assert!(of(&before, check).is_empty(), "{check}");
    }
    let balancer = farm.findings(&["--set=gateway.service.type=LoadBalancer"], 0).await?;
    assert_eq!(of(&balancer, "load-balancer")[0].0, "warn");
    let sandbox = farm.findings(&["--set=forks.sandbox.runtimeClass=kata"], 1).await?;
    assert!(of(&sandbox, "runtime-class")[0].1.contains("\"kata\", which does not exist"), "{sandbox:?}");
    assert_eq!(of(&sandbox, "daemon-pods").len(), 2, "{sandbox:?}");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);

    farm.init(&[]).await?.expect(0);
    let after = farm.findings(&[], 0).await?;
    assert!(of(&after, "installation")[0].1.contains("are ready and as they were installed"), "{after:?}");
    assert_eq!(of(&after, "certificates").len(), 4, "{after:?}");
    assert!(
        of(&after, "certificates").iter().all(|(verdict, said)| *verdict == "ok" && said.contains("days")),
        "{after:?}"
    );
    assert_eq!(of(&after, "dns"), [("ok", "*.buildkit.localhost is the own machine")]);
    // Played pods serve nothing.
    assert!(of(&after, "route")[0].1.contains("gets no answer of the routing API"), "{after:?}");
    let nodes = "--set=server.nodeSelector.disk=ssd";
    assert!(of(&farm.findings(&[nodes], 0).await?, "nodes")[0].1.contains("no node has the labels disk=ssd"));
    // What has nothing to write looks at nothing.
    let requests = farm.init(&["-v"]).await?.expect(0);
    assert!(!requests.err.contains("snapshots:"), "{}", requests.err);
    Ok(())
}

/// Owns the cluster: its one class is the default no more.
pub(crate) async fn without_a_default_class_nothing_is_written(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "classless");
    let classes: Api<StorageClass> = Api::all(cluster.client());
    let default = |is: &str| json!({"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": is}}});
    classes.patch("standard", &PatchParams::default(), &Patch::Merge(default("false"))).await?;
    let run = farm.init(&[]).await?.expect(1);
    run.says(
        "storage-class: no StorageClass is the default, and cache.storageClass names none: there are \"standard\"",
    );
    run.says("nothing was written\n\nhint: set cache.storageClass to one of them");
    let plan = farm.run("plan", &[]).await?.expect(1);
    plan.says("no StorageClass is the default");
    assert!(plan.out.contains("create     Namespace"), "{}", plan.out);
    farm.init(&["--set=cache.storageClass=gone"]).await?.expect(1).says("\"gone\", which does not exist");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    farm.init(&["--set=cache.kind=emptyDir"]).await?.expect(0).says("every scale to zero loses them");
    classes.patch("standard", &PatchParams::default(), &Patch::Merge(default("true"))).await?;
    Ok(())
}

/// By dry run, in a cluster that has what each cloud has.
pub(crate) async fn every_profile_is_taken_by_the_api_server(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "profiled");
    let classes: Api<StorageClass> = Api::all(cluster.client());
    for name in ["premium-rwo", "csi-cinder-high-speed-gen2"] {
        let class = json!({"metadata": {"name": name}, "provisioner": "csi.example", "allowVolumeExpansion": true});
        classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    }
    kubectl_apply(
        &cluster,
        &[json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {
                "name": "volumesnapshotclasses.snapshot.storage.k8s.io",
                "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-csi/external-snapshotter/pull/814"},
            },
            "spec": {
                "group": "snapshot.storage.k8s.io", "scope": "Cluster",
                "names": {"kind": "VolumeSnapshotClass", "plural": "volumesnapshotclasses", "singular": "volumesnapshotclass"},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                    "type": "object", "required": ["driver", "deletionPolicy"], "properties": {
                        "driver": {"type": "string"}, "deletionPolicy": {"type": "string", "enum": ["Delete", "Retain"]},
                        "parameters": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                }}}],
            },
        })],
    )?;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let established = kube::runtime::wait::conditions::is_crd_established();
    let name = "volumesnapshotclasses.snapshot.storage.k8s.io";
    kube::runtime::wait::await_condition(definitions.clone(), name, established).await?;
    for profile in ["default", "ha", "eks", "gke", "ovh"] {
        let args = ["--profile", profile, "--set=gateway.domains=builds.example.com"];
        let plan = farm.run_profile("plan", &args).await?.expect(3);
        assert!(plan.out.contains("create     Deployment"), "{profile}: {}", plan.out);
        assert!(!plan.err.contains("fail "), "{profile}: {}", plan.err);
        let check = farm.run_profile("check", &args).await?.expect(0);
        assert!(check.out.contains(" 0 failed"), "{profile}: {}", check.out);
    }
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    definitions.delete(name, &DeleteParams::default()).await?;
    Ok(())
}

pub(crate) async fn a_namespace_that_takes_no_daemon_is_named(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "restricted");
    farm.names.create(&farm.client()).await?;
    farm.label_builds("pod-security.kubernetes.io/enforce", "restricted").await?;
    let run = farm.init(&["--set=namespaces.create=false"]).await?.expect(1);
    run.says(&format!("pod-security: namespace \"{}\" enforces \"restricted\"", farm.names.builds));
    run.says("violates PodSecurity \"restricted:latest\"");
    run.says("pod-security.kubernetes.io/enforce=privileged --overwrite");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    farm.label_builds("pod-security.kubernetes.io/enforce", "privileged").await?;
    farm.init(&["--set=namespaces.create=false"]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_policy_that_breaks_daemons_is_named_with_its_field(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "hardened");
    farm.names.create(&farm.client()).await?;
    let name = format!("{}-hardened", farm.names.builds);
    let container = "Object.spec.containers";
    let expression = format!(
        "Object{{spec: Object.spec{{containers: object.spec.containers.map(c, {container}{{name: c.name, \
         securityContext: {container}.securityContext{{allowPrivilegeEscalation: false}}}})}}}}"
    );
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": farm.names.builds}},
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]},
                ],
            },
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}],
        },
    });
    let binding = json!({"metadata": {"name": name}, "spec": {"policyName": name}});
    let mut made = Vec::new();
    for (kind, mut body) in [("MutatingAdmissionPolicy", policy), ("MutatingAdmissionPolicyBinding", binding)] {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", kind));
        body["apiVersion"] = resource.api_version.clone().into();
        body["kind"] = kind.into();
        let api: Api<DynamicObject> = Api::all_with(cluster.client(), &resource);
        api.create(&PostParams::default(), &serde_json::from_value(body)?).await?;
        made.push(api);
    }
    // Policies take effect a moment later.
    let found = loop {
        let run = farm.run("check", &["--output=json"]).await?;
        let report: Value = serde_json::from_str(&run.out)?;
        let findings = report["findings"].as_array().cloned().unwrap_or_default();
        if of(&findings, "daemon-pods")[0].0 != "ok" {
            break findings;
        }
    };
    let said = of(&found, "daemon-pods")[0];
    assert_eq!(said.0, "fail", "{said:?}");
    assert!(said.1.contains(&format!("changed by MutatingAdmissionPolicy \"{name}\"")), "{said:?}");
    assert!(
        said.1.contains(
            ".spec.containers[buildkitd].securityContext.allowPrivilegeEscalation is set to false: a rootless"
        ),
        "{said:?}"
    );
    farm.init(&[]).await?.expect(1).says("allowPrivilegeEscalation is set to false");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    for api in made {
        api.delete(&name, &DeleteParams::default()).await?;
    }
    Ok(())
}

/// One finding, whatever was to be made in it, with what holds it.
pub(crate) async fn a_namespace_that_never_ends_is_told_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "ending")?;
    let map = |n| format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m{n}, namespace: NS}}\n");
    farm.component("rc1", "maps", "", &(0..6).map(map).collect::<String>())?;
    farm.init(&[]).await?.expect(0);
    let held =
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: held, namespace: NS, finalizers: [example.org/hold]}\n";
    farm.kubectl(&["create", "--filename=-"], held).await?;
    let name = farm.namespace().to_owned();
    farm.kubectl(&["delete", "namespace", &name, "--wait=false"], "").await?;
    let holds = "--for=condition=NamespaceFinalizersRemaining=True";
    farm.kubectl(&["wait", holds, &format!("namespace/{name}"), "--timeout=60s"], "").await?;
    for verb in ["check", "plan", "init"] {
        let run = farm.run(verb, &[]).await?.expect(1);
        let said = format!("{}{}", run.out, run.err);
        let found = format!("namespace \"{name}\" is being deleted: ");
        assert_eq!(said.matches(&found).count(), 1, "{verb}: {said}");
        assert!(said.contains("example.org/hold in 1 resource instances"), "{verb}: {said}");
        assert!(said.contains(&format!("kubectl -n {name} get configmaps --output yaml")), "{verb}: {said}");
        assert!(!said.contains("because it is being terminated"), "{verb}: {said}");
    }
    let free = r#"{"metadata":{"finalizers":null}}"#;
    farm.kubectl(&["patch", "configmap", "held", "--type=merge", "--patch", free], "").await?;
    farm.kubectl(&["wait", "--for=delete", &format!("namespace/{name}"), "--timeout=60s"], "").await?;
    farm.init(&[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_check_finds_what_init_would_refuse(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "planned")?;
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: NS\n  \
                     labels: {pod-security.kubernetes.io/enforce: privileged}\n";
    farm.component("rc0", "base", "", namespace)?;
    let check = farm.run("check", &[]).await?.expect(0);
    assert!(check.out.contains("ok    plan: the API server takes it: 1 to create"), "{}", check.out);
    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains("plan: 1 to create, 0 to configure, 0 unchanged"), "what plan counts: {}", init.out);
    let name = farm.namespace().to_owned();
    let label = ["label", "namespace", &name, "pod-security.kubernetes.io/enforce=baseline", "--overwrite"];
    farm.kubectl(&label, "").await?;
    let conflict = "of \"kubectl-label\" is \"baseline\" and would become \"privileged\"";
    farm.init(&[]).await?.expect(1).says(conflict);
    let check = farm.run("check", &[]).await?.expect(1);
    assert!(
        check.out.contains(&format!("fail  plan: Namespace {name}: fields belong to other managers")),
        "{}",
        check.out
    );
    assert!(check.out.contains(conflict) && check.out.contains("--force-conflicts"), "{}", check.out);
    // A plan that is refused is told to programs as init tells it.
    for verb in ["plan", "init"] {
        let run = farm.run(verb, &["--output=json"]).await?.expect(1);
        let last: Value = serde_json::from_str(run.out.lines().last().context("nothing")?)?;
        assert_eq!((&last["event"], &last["exitCode"]), (&"failed".into(), &1.into()), "{verb}: {last}");
        assert!(last["message"].as_str().is_some_and(|message| message.contains(conflict)), "{verb}: {last}");
    }
    let quiet = farm.run("plan", &["--force-conflicts", "--quiet"]).await?.expect(3);
    assert_eq!(quiet.out, "");

    // What would leave nothing to do, and every name that there is not.
    farm.run("plan", &["--only=base", "--skip=base"]).await?.expect(2).says("leave no component");
    let wrong = farm.run("init", &["--only=nope", "--skip=bases"]).await?.expect(2);
    wrong.says("--only nope: profile \"default\" has no component \"nope\"");
    wrong.says("--skip bases: profile \"default\" has no component \"bases\"; did you mean \"base\"?");
    // What defines a kind is named where it is known.
    let class = "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotClass\nmetadata: {name: NS}\n\
                 driver: x\ndeletionPolicy: Delete\n";
    farm.component("rc0", "class", "", class)?;
    farm.run("plan", &[]).await?.expect(1).says("storage.snapshotClass.create=false");
    Ok(())
}
