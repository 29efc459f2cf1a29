//! Runs that succeed: the first, the second, upgrades, drift.

use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;

use super::*;

pub(crate) async fn init_installs_on_an_empty_cluster_and_then_writes_nothing(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "init");
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains(&format!("create     Namespace {} (namespaces)", farm.names.operator)), "{}", plan.out);
    assert_eq!(texts(&farm.writes().await?), [""; 0]);

    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains(&format!("installed profile dev in namespace {}", farm.names.operator)), "{}", init.out);
    let writes = farm.writes().await?;
    let order = texts(&writes);
    assert_eq!(order[..3], ["patch namespaces", "create leases", "patch configmaps"], "{order:?}");
    // Parts of the record that nothing names any more go last.
    let end: Vec<_> = order.iter().rev().filter(|write| *write != "update leases").take(3).collect();
    assert_eq!(end, ["delete leases", "delete configmaps", "patch configmaps"], "{order:?}");
    assert!(writes.iter().all(|write| write.status < 300), "{writes:?}");

    let record = farm.record().await?.context("no record")?;
    assert_eq!((&record["state"], &record["profile"]), (&"installed".into(), &"dev".into()));
    let inventory = record["inventory"].as_array().context("no inventory")?;
    assert!(inventory.len() > 20 && inventory.iter().all(|entry| entry["uid"].is_string()), "{inventory:?}");
    let text = record.to_string();
    for (name, value) in farm.secrets().await? {
        let value = String::from_utf8_lossy(&value);
        assert!(!text.contains(value.trim()) && !init.out.contains(value.trim()), "the value of {name} is shown");
    }

    let before = farm.writes().await?.len();
    let again = farm.init(&[]).await?.expect(0);
    assert!(again.out.contains("nothing to write"), "{}", again.out);
    let plan = farm.run("plan", &[]).await?.expect(0);
    assert!(plan.out.starts_with("0 to create, 0 to configure, "), "{}", plan.out);
    assert_eq!(texts(&farm.writes().await?[before..]), [""; 0]);
    assert!(farm.lease().await?.is_none());
    Ok(())
}

/// Owns the cluster: the record is found by its label, wherever it is.
pub(crate) async fn what_was_asked_for_once_is_carried_over_and_status_tells_it(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    for map in Api::<ConfigMap>::all(cluster.client()).list(&ListParams::default().labels("bko-install/record")).await?
    {
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), &map.namespace().unwrap_or_default());
        maps.delete(&map.name_any(), &Default::default()).await?;
    }
    let farm = Farm::new(Arc::clone(&cluster), "carried");
    farm.run("status", &[]).await?.expect(4).says("nothing is installed");
    farm.init(&["--set=gateway.domains=[]", "--set=server.replicas=3"]).await?.expect(0);
    let mut bare = bko_install();
    bare.args(["cluster", "plan", "--output=json", "--kubeconfig"]).arg(cluster.kubeconfig());
    let plan = Run::new(bare.output().await?)?.expect(0);
    let plan: Value = serde_json::from_str(&plan.out)?;
    assert_eq!(plan.get("record"), None);
    let server =
        plan["levels"].as_array().into_iter().flatten().flat_map(|l| l["changes"].as_array().into_iter().flatten());
    let server: Vec<_> = server.filter(|change| change["kind"] == "Deployment").collect();
    assert_eq!(server.len(), 1, "the gateway is back");
    assert_eq!(server[0].pointer("/object/spec/replicas"), Some(&3.into()));

    let status = status(&cluster, 0).await?;
    assert_eq!((&status["state"], &status["image"]), (&"installed".into(), &IMAGE.into()));
    assert_eq!(status["drift"], serde_json::json!([]));
    status_after_a_change(&farm).await?;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), &farm.names.operator);
    maps.delete("bko-install", &Default::default()).await?;
    Ok(())
}

async fn status(cluster: &Cluster, code: i32) -> anyhow::Result<Value> {
    let mut status = bko_install();
    status.args(["cluster", "status", "--output=json", "--kubeconfig"]).arg(cluster.kubeconfig());
    Ok(serde_json::from_str(&Run::new(status.output().await?)?.expect(code).out)?)
}

/// Drift alone is ready; a pod that is not is told with its cause.
async fn status_after_a_change(farm: &Farm) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(farm.client());
    let label = serde_json::json!({"metadata": {"labels": {"bko-install/component": "somebody-else"}}});
    namespaces.patch(&farm.names.builds, &PatchParams::default(), &Patch::Merge(label)).await?;
    let drift = status(&farm.cluster, 0).await?["drift"].clone();
    assert_eq!(drift.as_array().map(Vec::len), Some(1), "{drift}");
    assert_eq!((&drift[0]["kind"], &drift[0]["action"]), (&"Namespace".into(), &"configure".into()));

    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    let is_short = |deployment: Option<&Deployment>| {
        deployment.and_then(|d| d.status.as_ref()?.available_replicas).is_some_and(|available| available < 3)
    };
    let pods: Api<Pod> = Api::namespaced(farm.client(), &farm.names.operator);
    let pod = pods.list(&ListParams::default()).await?.items.first().context("no pod")?.name_any();
    farm.play.make_unready(&pod).await?;
    tokio::time::timeout(Duration::from_secs(20), await_condition(deployments, "buildkit-operator-buildd", is_short))
        .await??;
    let status = status(&farm.cluster, 4).await?;
    let pending = status.pointer("/levels").and_then(Value::as_array).into_iter().flatten();
    let pending = pending.flat_map(|level| level["components"].as_array().into_iter().flatten());
    let pending: Vec<_> = pending.flat_map(|c| c["pending"].as_array().into_iter().flatten()).collect();
    assert_eq!(pending.len(), 1, "{status}");
    let why = pending[0]["why"].as_str().unwrap_or_default();
    assert!(why.starts_with("2 of 3 replicas available"), "{why}");
    Ok(())
}

pub(crate) async fn an_upgrade_writes_what_changes_and_events_are_lines_of_json(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "upgrade");
    farm.init(&[]).await?.expect(0);
    let secrets = farm.secrets().await?;
    let before = farm.writes().await?.len();
    let plan = farm.run("plan", &["--set=server.resources.limits.memory=600Mi"]).await?.expect(3);
    assert!(plan.out.contains(".resources.limits.memory: \"512Mi\" → \"600Mi\""), "{}", plan.out);
    let init = farm.init(&["--set=server.resources.limits.memory=600Mi", "--output=json"]).await?.expect(0);
    let events: Vec<Value> = init.out.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let applied: Vec<_> = events.iter().filter(|event| event["event"] == "applied").collect();
    assert_eq!(applied.len(), 1, "{}", init.out);
    assert_eq!((&applied[0]["object"]["kind"], &applied[0]["verb"]), (&"Deployment".into(), &"configured".into()));
    assert_eq!(events.last().map(|event| &event["event"]), Some(&"installed".into()));
    let writes = texts(&farm.writes().await?[before..]);
    let writes: Vec<_> = writes.iter().filter(|write| *write != "update leases").collect();
    // What the revision remembers, the inventory and the record; then the same
    // again for the outcome, and the part of the inventory that it replaces.
    let expected = [
        "create leases",
        "patch configmaps",
        "patch configmaps",
        "patch configmaps",
        "patch deployments",
        "patch configmaps",
        "delete configmaps",
        "delete leases",
    ];
    assert_eq!(writes, expected);
    assert_eq!(farm.secrets().await?, secrets);
    Ok(())
}

pub(crate) async fn an_installer_that_left_its_lease_behind_is_waited_for(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "stale");
    farm.names.create(&farm.client()).await?;
    let lease: Lease = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "bko-install"},
        "spec": {"holderIdentity": "crashed", "leaseDurationSeconds": 1, "renewTime": "2001-01-01T00:00:00.000000Z"},
    }))?;
    let leases: Api<Lease> = Api::namespaced(farm.client(), &farm.names.operator);
    leases.create(&Default::default(), &lease).await?;
    farm.init(&[]).await?.expect(0).says("another installer holds the lock: crashed");
    assert!(farm.lease().await?.is_none());
    Ok(())
}

/// Between the checks and the lock, somebody takes a field.
pub(crate) async fn what_changed_before_the_lock_ends_the_run_before_its_intent(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "meanwhile");
    farm.init(&[]).await?.expect(0);
    let lease: Lease = serde_json::from_value(json!({
        "metadata": {"name": "bko-install"}, "spec": {"holderIdentity": "crashed", "leaseDurationSeconds": 5},
    }))?;
    let leases: Api<Lease> = Api::namespaced(farm.client(), &farm.names.operator);
    leases.create(&PostParams::default(), &lease).await?;
    let (record, before) = (farm.record().await?, farm.writes().await?.len());
    let args = ["--timeout=60s", "--output=json", "--set=server.resources.limits.memory=600Mi"];
    let mut run = farm.spawn("init", &args)?;
    wait_for_event(&mut run, "warning").await?;
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    let name = "buildkit-operator-buildd";
    let live = serde_json::to_value(deployments.get(name).await?)?;
    let container = live.pointer("/spec/template/spec/containers/0/name").context("no container")?;
    let theirs = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "spec": {"template": {"spec": {"containers": [
            {"name": container, "resources": {"limits": {"memory": "700Mi"}}},
        ]}}},
    });
    deployments.patch(name, &PatchParams::apply("somebody").force(), &Patch::Apply(theirs)).await?;
    let run = Run::new(run.wait_with_output().await?)?.expect(1);
    run.says("\"somebody\"");
    assert_eq!(farm.record().await?, record);
    let writes = texts(&farm.writes().await?[before..]);
    assert!(writes.iter().all(|write| write.ends_with("leases")), "{writes:?}");
    Ok(())
}

pub(crate) async fn a_load_balancer_that_never_comes_is_a_warning(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "balancer");
    let init = farm.init(&["--set=gateway.service.type=LoadBalancer"]).await?.expect(0);
    init.says("is not ready yet, and is not waited for: waits for a load balancer address");
    Ok(())
}

pub(crate) async fn the_records_to_create_are_told_when_the_address_is_known(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "records");
    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains("dns      point *.buildkit.localhost at the address of Service"), "{}", init.out);
    let patch = r#"{"spec":{"externalIPs":["192.0.2.7"]}}"#;
    let service = ["patch", "service", "buildkit-operator-gateway", "--type=merge", "--patch", patch, "--namespace"];
    farm.kubectl(&[&service[..], &[&farm.names.operator]].concat()).await?.expect(0);
    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains("dns      *.buildkit.localhost. A 192.0.2.7\n"), "{}", init.out);
    Ok(())
}
