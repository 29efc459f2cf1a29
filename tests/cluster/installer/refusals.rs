//! Runs that must not succeed, and what they say.

use super::*;
use k8s_openapi::api::core::v1::{ResourceQuota, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};

const SERVER: &str = "buildkit-operator-buildd";

pub(crate) async fn another_manager_is_named_and_overruled_only_by_force(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "conflict");
    farm.init(&[]).await?.expect(0);
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    let scale = PatchParams { field_manager: Some("somebody".into()), ..PatchParams::default() };
    deployments.patch(SERVER, &scale, &Patch::Merge(json!({"spec": {"replicas": 2}}))).await?;
    let before = farm.writes().await?.len();
    let refused = farm.init(&[]).await?.expect(1);
    refused.says(&format!("Deployment {}/{SERVER}: fields belong to other managers", farm.names.operator));
    refused.says(".spec.replicas of \"somebody\"");
    refused.says("hint: take the fields over with --force-conflicts");
    assert_eq!(farm.writes().await?.len(), before);
    let forced = farm.run("plan", &["--force-conflicts"]).await?.expect(3);
    assert!(forced.out.contains("taking over fields of other managers"), "{}", forced.out);
    farm.init(&["--force-conflicts"]).await?.expect(0);
    farm.run("plan", &[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_lacking_permission_is_named_before_the_first_write(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "forbidden");
    farm.names.create(&farm.client()).await?;
    let (operator, name) = (&farm.names.operator, format!("{}-installer", farm.names.operator));
    let (file, nobody) = (account(&farm, "installer").await?, account(&farm, "nobody").await?);
    // Everything but to write Deployments.
    let rest = ["get", "list", "watch", "create", "update", "patch", "delete", "bind", "escalate"];
    let role: ClusterRole = serde_json::from_value(json!({
        "metadata": {"name": name},
        "rules": [
            {"apiGroups": ["", "rbac.authorization.k8s.io", "networking.k8s.io", "policy", "coordination.k8s.io",
                "apiextensions.k8s.io", "buildkit-operator.socialgouv.github.io"], "resources": ["*"], "verbs": rest},
            {"apiGroups": ["apps"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        ],
    }))?;
    Api::all(farm.client()).create(&PostParams::default(), &role).await?;
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": "installer", "namespace": operator}],
    }))?;
    Api::all(farm.client()).create(&PostParams::default(), &binding).await?;

    let run = run_as(&file, farm.command("init", &["--timeout=30s"])).await?.expect(1);
    run.says(&format!(
        "may not create, delete, patch, update deployments.apps \"{SERVER}\", \"buildkit-operator-gateway\" in"
    ));
    run.says(&format!("in namespace \"{operator}\""));
    run.says("let user \"system:serviceaccount:");

    // Who may not even look at the record is told everything at once.
    for verb in ["init", "plan", "check"] {
        let run = run_as(&nobody, farm.command(verb, &[])).await?.expect(1);
        let told = format!("{}{}", run.out, run.err);
        for lacking in ["configmaps", "deployments.apps", "--print-rbac --service-account"] {
            assert!(told.contains(lacking), "{verb}: no {lacking} in\n{told}");
        }
    }
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    assert!(farm.record().await?.is_none());
    Ok(())
}

/// A service account in the operator's namespace, and its kubeconfig.
async fn account(farm: &Farm, name: &str) -> anyhow::Result<tempfile::NamedTempFile> {
    let accounts: Api<ServiceAccount> = Api::namespaced(farm.client(), &farm.names.operator);
    accounts.create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": name}}))?).await?;
    let request = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
    let token = accounts.create_token_request(name, &PostParams::default(), &request).await?;
    let file = tempfile::NamedTempFile::new()?;
    let token = token.status.and_then(|status| status.token).context("no token")?;
    kubeconfig_with_token(&farm.cluster, &token, file.path())?;
    Ok(file)
}

/// Runs a command with another kubeconfig.
pub(super) async fn run_as(file: &tempfile::NamedTempFile, command: Command) -> anyhow::Result<Run> {
    let mut args: Vec<_> = command.as_std().get_args().map(ToOwned::to_owned).collect();
    let position = args.iter().position(|arg| arg == "--kubeconfig").context("no kubeconfig")?;
    args[position + 1] = file.path().into();
    let output = bko_install().args(args).stdin(Stdio::null()).output().await?;
    Run::new(output)
}

pub(crate) async fn an_installer_at_work_is_named_to_the_other(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "two");
    farm.play.switch_off();
    let mut first = farm.spawn("init", &["--timeout=60s"])?;
    wait_for_pod(&farm, SERVER).await?;
    let second = farm.init(&[]).await?.expect(5);
    second.says("another installer is at work: ");
    second.says(&format!(", process {}, ", first.id().context("no process")?));
    farm.play.switch_on();
    assert!(first.wait().await?.success());
    assert!(farm.lease().await?.is_none());
    Ok(())
}

pub(crate) async fn an_image_that_is_missing_ends_the_run_at_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "image");
    farm.play.switch_off();
    let init = farm.spawn("init", &["--timeout=100s"])?;
    let pod = wait_for_pod(&farm, SERVER).await?;
    let began = std::time::Instant::now();
    container_waits(&farm, &pod, "ImagePullBackOff", "Back-off pulling image").await?;
    let run = Run::new(init.wait_with_output().await?)?.expect(4);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    run.says(&format!("Deployment {}/{SERVER} will not become ready", farm.names.operator));
    run.says(&format!("pod \"{}\": container \"", pod.name_any()));
    run.says("ImagePullBackOff: Back-off pulling image");
    run.says(&format!("hint: the nodes cannot get image \"{IMAGE}\""));
    run.says("bko-install image --output");
    let record = farm.record().await?.context("no record")?;
    assert_eq!(record["state"], "failed");
    assert!(record["message"].as_str().unwrap_or_default().contains("ImagePullBackOff"), "{record}");
    let status = farm.run("plan", &[]).await?.expect(3);
    assert!(status.out.contains("record: objects change"), "{}", status.out);
    Ok(())
}

pub(crate) async fn what_is_not_ready_in_time_is_exit_code_4(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "slow");
    farm.play.switch_off();
    let run = farm.run("init", &["--timeout=15s"]).await?.expect(4);
    run.says("is not ready in time: 0 of 1 replicas available");
    run.says("\n  pod \"");
    run.says(&format!("hint: look closer with `kubectl -n {} describe pod ", farm.names.operator));
    assert!(farm.lease().await?.is_none());
    farm.play.switch_on();
    farm.init(&[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_quota_that_is_used_up_is_the_reason_told(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "quota");
    farm.names.create(&farm.client()).await?;
    let quotas: Api<ResourceQuota> = Api::namespaced(farm.client(), &farm.names.operator);
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota)?).await?;
    let run = farm.init(&[]).await?.expect(1);
    run.says("takes no such pod: pods \"buildkit-operator-buildd-");
    run.says("exceeded quota: none");
    run.says(&format!(
        "quota \"none\" of namespace \"{}\" leaves 0 of pods; our pods there need 2",
        farm.names.operator
    ));
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    // It may be full a moment later as well.
    let run = farm.init(&["--skip-checks"]).await?.expect(4);
    run.says("exceeded quota: none");
    Ok(())
}

/// The controller tells of its first failure only, and tries again by and by.
pub(crate) async fn a_failure_that_a_run_has_mended_is_waited_out(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "stale")?;
    let play = Play::start(farm.client(), farm.namespace(), Duration::ZERO);
    let account = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: worker, namespace: NS}\n";
    let app = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: app, namespace: NS}\nspec:\n  \
               selector: {matchLabels: {app: a}}\n  template:\n    metadata: {labels: {app: a}}\n    \
               spec: {serviceAccountName: worker, containers: [{name: app, image: 'registry.example/app:1'}]}\n";
    farm.component("rc1", "account", "", account)?;
    farm.component("rc3", "app", "", app)?;
    farm.init(&[]).await?.expect(0);
    let fails = "--for=condition=ReplicaFailure";
    farm.kubectl(&["delete", "serviceaccount", "worker"], "").await?;
    farm.kubectl(&["delete", "pods", "--selector=app=a", "--wait=false"], "").await?;
    farm.kubectl(&["wait", fails, "deployment/app", "--timeout=30s"], "").await?;
    let run = farm.init(&[]).await?.expect(0);
    assert!(run.out.contains("not found (before this run; its controller will try again)"), "{}", run.out);
    // What nobody has mended is told when it has failed again, not at the deadline.
    let quota =
        "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: none, namespace: NS}\nspec: {hard: {pods: '0'}}\n";
    farm.kubectl(&["apply", "--filename=-"], quota).await?;
    farm.kubectl(&["wait", "--for=jsonpath={.status.hard.pods}=0", "resourcequota/none", "--timeout=30s"], "").await?;
    farm.kubectl(&["delete", "pods", "--selector=app=a", "--wait=false"], "").await?;
    farm.kubectl(&["wait", fails, "deployment/app", "--timeout=30s"], "").await?;
    let run = farm.init(&["--timeout=100s"]).await?.expect(4);
    run.says("Deployment");
    run.says("will not become ready: FailedCreate: ");
    run.says("exceeded quota: none");
    drop(play);
    Ok(())
}

pub(crate) async fn what_somebody_changed_is_planned_back(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "drift");
    farm.init(&[]).await?.expect(0);
    let namespaces: Api<Namespace> = Api::all(farm.client());
    let label = json!({"metadata": {"labels": {"bko-install/component": "somebody-else"}}});
    namespaces.patch(&farm.names.builds, &PatchParams::default(), &Patch::Merge(label)).await?;
    let drift = farm.run("plan", &["--force-conflicts"]).await?.expect(3);
    assert!(drift.out.contains("[\"bko-install/component\"]: \"somebody-else\" → \"namespaces\""), "{}", drift.out);
    Ok(())
}

/// The first pod of a workload.
async fn wait_for_pod(farm: &Farm, prefix: &str) -> anyhow::Result<Pod> {
    use futures::TryStreamExt;
    let pods: Api<Pod> = Api::namespaced(farm.client(), &farm.names.operator);
    let mut pods = std::pin::pin!(watcher(pods, watcher::Config::default()).default_backoff().applied_objects());
    let wait = async {
        while let Some(pod) = pods.try_next().await? {
            if pod.name_any().starts_with(prefix) {
                return Ok(pod);
            }
        }
        anyhow::bail!("the watch ended")
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await?
}

async fn container_waits(farm: &Farm, pod: &Pod, reason: &str, message: &str) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(farm.client(), &farm.names.operator);
    let container = pod.spec.as_ref().and_then(|spec| spec.containers.first()).context("no container")?;
    let status = json!({"status": {"phase": "Pending", "containerStatuses": [{
        "name": container.name, "image": container.image, "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}},
    }]}});
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
