//! Whose a field is: autoscalers, predecessors, GitOps tools, injectors.

use kube::api::{Patch, PatchParams};

use super::*;

const DEPLOYMENT: &str = "apiVersion: apps/v1
kind: Deployment
metadata: {name: app, namespace: NS}
spec:
  replicas: 0
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec:
      containers: [{name: app, image: 'registry.example/app:1', ports: [{name: http, containerPort: 8080}]}]
";

pub(crate) async fn an_autoscaler_keeps_its_replicas(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "hpa")?;
    farm.component("rc3", "app", "", DEPLOYMENT)?;
    farm.init(&[]).await?.expect(0);
    // As an autoscaler and `kubectl scale` do it.
    farm.kubectl(&["scale", "deployment", "app", "--replicas=0", "--current-replicas=0"], "").await?;
    let scale = PatchParams { field_manager: Some("kube-controller-manager".into()), ..PatchParams::default() };
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), farm.namespace());
    let play = Play::start(farm.client(), farm.namespace(), Duration::ZERO);
    deployments.patch_scale("app", &scale, &Patch::Merge(json!({"spec": {"replicas": 3}}))).await?;
    farm.init(&[]).await?.expect(0);
    farm.component("rc3", "app", "", &DEPLOYMENT.replace("app:1", "app:2"))?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("leaving .spec.replicas to its owner"), "{}", plan.out);
    farm.init(&[]).await?.expect(0);
    let live = farm.get("deployment", "app").await?;
    assert_eq!(live["spec"]["replicas"], 3);
    assert_eq!(live.pointer("/spec/template/spec/containers/0/image"), Some(&"registry.example/app:2".into()));
    let before = farm.writes().await?.len();
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.writes().await?.len(), before);
    drop(play);
    Ok(())
}

pub(crate) async fn an_edited_field_is_told_with_both_values(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "edit")?;
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: NS}\ndata: {level: low}\n";
    farm.component("rc1", "app", "", map)?;
    farm.init(&[]).await?.expect(0);
    let edit = ["patch", "configmap", "settings", "--field-manager=kubectl-edit", "--type=merge", "--patch"];
    farm.kubectl(&[&edit[..], &[r#"{"data":{"level":"high"}}"#]].concat(), "").await?;
    let run = farm.init(&[]).await?.expect(1);
    run.says(".data.level of \"kubectl-edit\" is \"high\" and would become \"low\"");
    // The component may say that such a field is its user's.
    farm.component("rc1", "app", "policy: {conflicts: [{kind: ConfigMap, field: .data.level, policy: yield}]}\n", map)?;
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.get("configmap", "settings").await?["data"]["level"], "high");
    farm.component("rc1", "app", "policy: {conflicts: [{kind: ConfigMap, field: .data, policy: take}]}\n", map)?;
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.get("configmap", "settings").await?["data"]["level"], "low");
    Ok(())
}

pub(crate) async fn what_kubectl_had_applied_goes_when_it_is_not_wanted(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "csa")?;
    farm.create_namespace().await?;
    let old = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: NS, labels: {team: x}}\n\
               data: {kept: '1', removed: '2'}\n";
    farm.kubectl(&["apply", "--filename=-"], old).await?;
    let new = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: NS}\ndata: {kept: '3'}\n";
    farm.component("rc1", "app", "", new)?;
    let refused = farm.init(&[]).await?.expect(1);
    refused.says(".data.kept of \"kubectl-client-side-apply\" is \"1\" and would become \"3\"");
    refused.says("hint: take over what was installed by other means with --adopt");
    let plan = farm.run("plan", &["--adopt"]).await?.expect(3);
    for line in
        ["taking over from kubectl-client-side-apply", ".data.removed: - \"2\"", ".metadata.labels.team: - \"x\""]
    {
        assert!(plan.out.contains(line), "{line}: {}", plan.out);
    }
    farm.init(&["--adopt"]).await?.expect(0);
    let live = farm.get("configmap", "settings").await?;
    assert_eq!(live["data"], json!({"kept": "3"}));
    assert_eq!(live["metadata"]["labels"].get("team"), None);
    assert_eq!(live["metadata"].get("annotations"), None, "kubectl's copy of what it had applied is gone");
    farm.run("plan", &[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_port_that_is_renumbered_keeps_its_name(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    for predecessor in [false, true] {
        let farm = Bundled::new(Arc::clone(&cluster), "port")?;
        if predecessor {
            farm.create_namespace().await?;
            farm.kubectl(&["apply", "--filename=-"], DEPLOYMENT).await?;
        } else {
            farm.component("rc3", "app", "", DEPLOYMENT)?;
            farm.init(&[]).await?.expect(0);
        }
        farm.component("rc3", "app", "", &DEPLOYMENT.replace("8080", "9090"))?;
        farm.init(if predecessor { &["--adopt"] } else { &[] }).await?.expect(0);
        let live = farm.get("deployment", "app").await?;
        let ports = live.pointer("/spec/template/spec/containers/0/ports").cloned();
        assert_eq!(ports, Some(json!([{"containerPort": 9090, "name": "http", "protocol": "TCP"}])));
    }
    Ok(())
}

pub(crate) async fn a_gitops_tools_object_is_refused_and_its_owner_named(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "gitops")?;
    farm.create_namespace().await?;
    let theirs = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: NS, \
                  annotations: {argocd.argoproj.io/tracking-id: 'shop:/ConfigMap:NS/settings'}}\n";
    farm.kubectl(&["apply", "--server-side", "--filename=-"], theirs).await?;
    farm.component("rc1", "app", "", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: NS}\n")?;
    let run = farm.init(&["--adopt", "--force-conflicts"]).await?.expect(5);
    run.says("belongs to Argo CD application shop");
    assert_eq!(farm.writes().await?, [""; 0]);
    Ok(())
}

pub(crate) async fn a_placeholder_ca_bundle_is_never_sent(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "cabundle")?;
    let hook = format!(
        "apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingWebhookConfiguration\nmetadata: {{name: {0}}}\n\
         webhooks:\n- name: a.example.org\n  admissionReviewVersions: [v1]\n  sideEffects: None\n  \
         namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: none}}}}\n  \
         clientConfig: {{url: 'https://127.0.0.1:1/x', caBundle: Cg==}}\n  \
         rules: [{{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}}]\n",
        farm.namespace()
    );
    farm.component("rc4", "hook", "", &hook)?;
    farm.init(&[]).await?.expect(0);
    let live = farm.get("validatingwebhookconfiguration", farm.namespace()).await?;
    assert_eq!(live.pointer("/webhooks/0/clientConfig/caBundle"), None);
    // An injector puts the real one there, and it stays.
    let pem = rcgen::generate_simple_self_signed(vec!["x".into()])?.cert.pem();
    let bundle = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, pem);
    let patch = json!([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]).to_string();
    let name = farm.namespace().to_owned();
    let inject =
        ["patch", "validatingwebhookconfiguration", &name, "--type=json", "--field-manager=cainjector", "--patch"];
    farm.kubectl(&[&inject[..], &[patch.as_str()]].concat(), "").await?;
    let before = farm.writes().await?.len();
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.writes().await?.len(), before);
    farm.kubectl(&["delete", "validatingwebhookconfiguration", &name], "").await?;
    Ok(())
}

/// What a GitOps tool keeps is not deleted either: it would be made again.
pub(crate) async fn what_a_gitops_tool_tracks_is_not_removed(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "tracked")?;
    let map = |name: &str| format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: NS}}\n");
    farm.component("rc1", "app", "", &["a", "b", "c", "d", "e"].map(map).concat())?;
    farm.init(&[]).await?.expect(0);
    let tracking = format!("argocd.argoproj.io/tracking-id=shop:/ConfigMap:{}/e", farm.namespace());
    farm.kubectl(&["annotate", "configmap", "e", &tracking], "").await?;
    let before = farm.writes().await?.len();
    farm.component("rc1", "app", "", &["a", "b", "c", "d"].map(map).concat())?;
    let owner = format!("ConfigMap {}/e belongs to Argo CD application shop", farm.namespace());
    for (verb, args) in
        [("plan", &[][..]), ("init", &["--confirm-prune"]), ("uninstall", &["--dry-run"]), ("uninstall", &[])]
    {
        farm.run(verb, args).await?.expect(5).says(&owner);
    }
    assert_eq!(farm.writes().await?.len(), before);
    farm.kubectl(&["annotate", "configmap", "e", "argocd.argoproj.io/tracking-id-"], "").await?;
    farm.run("uninstall", &[]).await?.expect(0);
    Ok(())
}

/// Until we have applied it ourselves, what kubectl applied of our export is a
/// predecessor's; from then on it is somebody's own.
pub(crate) async fn what_kubectl_applied_of_an_export_is_taken_over_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "ssa")?;
    farm.create_namespace().await?;
    let ours = DEPLOYMENT.replace(
        "metadata: {name: app, namespace: NS}",
        "metadata: {name: app, namespace: NS, labels: {app.kubernetes.io/managed-by: bko-install, old: x}}",
    );
    let apply = ["apply", "--server-side", "--filename=-"];
    farm.kubectl(&apply, &ours).await?;
    farm.component("rc3", "app", "", DEPLOYMENT)?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("taking over from kubectl"), "{}", plan.out);
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.get("deployment", "app").await?["metadata"]["labels"].get("old"), None);
    farm.component("rc3", "app", "", &DEPLOYMENT.replace("app:1", "app:2"))?;
    farm.init(&[]).await?.expect(0);
    let live = farm.get("deployment", "app").await?;
    let managers = live["metadata"]["managedFields"].as_array().into_iter().flatten().map(|entry| &entry["manager"]);
    assert!(managers.clone().all(|manager| manager != "kubectl"), "{:?}", managers.collect::<Vec<_>>());

    // A person's own, and no more of both values than what differs.
    let edited = ours.replace("app:1'", "app:3', args: [-a, -b, -c]");
    farm.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename=-"], &edited).await?;
    let image = ".spec.template.spec.containers[name=\"app\"].image of \"kubectl\" is \"registry.example/app:3\" and would become \
                 \"registry.example/app:2\"";
    farm.init(&[]).await?.expect(1).says(image);
    farm.component("rc3", "app", "", &DEPLOYMENT.replace("app:1'", "app:3', args: [-a, -x, -c]"))?;
    farm.init(&[])
        .await?
        .expect(1)
        .says(".args of \"kubectl\" is [\"…\",\"-b\",\"…\"] and would become [\"…\",\"-x\",\"…\"]");
    farm.init(&["--force-conflicts"]).await?.expect(0);
    Ok(())
}
