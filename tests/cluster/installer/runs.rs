//! Runs that succeed: the first, the second, upgrades, drift.

use super::*;

pub(crate) async fn init_installs_on_an_empty_cluster_and_then_writes_nothing(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "init");
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains(&format!("create     Namespace {} (namespaces)", farm.names.operator)), "{}", plan.out);
    farm.run("status", &[]).await?.expect(4).says("nothing is installed");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);

    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains(&format!("installed profile dev in namespace {}", farm.names.operator)), "{}", init.out);
    let writes = farm.writes().await?;
    let order = texts(&writes);
    assert_eq!(order[..3], ["patch namespaces", "create leases", "patch configmaps"], "{order:?}");
    let end: Vec<_> = order.iter().rev().filter(|write| *write != "update leases").take(2).collect();
    assert_eq!(end, ["delete leases", "patch configmaps"], "{order:?}");
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
pub(crate) async fn what_was_asked_for_once_is_carried_over(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    for map in Api::<ConfigMap>::all(cluster.client()).list(&ListParams::default().labels("bko-install/record")).await?
    {
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), &map.namespace().unwrap_or_default());
        maps.delete(&map.name_any(), &Default::default()).await?;
    }
    let farm = Farm::new(Arc::clone(&cluster), "carried");
    farm.init(&["--set=gateway.domains=[]", "--set=server.replicas=3"]).await?.expect(0);
    let mut bare = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    bare.args(["cluster", "plan", "--output=json", "--kubeconfig"]).arg(cluster.kubeconfig());
    let plan = Run::new(bare.output().await?)?.expect(0);
    let plan: Value = serde_json::from_str(&plan.out)?;
    assert_eq!(plan.get("record"), None);
    let server =
        plan["levels"].as_array().into_iter().flatten().flat_map(|l| l["changes"].as_array().into_iter().flatten());
    let server: Vec<_> = server.filter(|change| change["kind"] == "Deployment").collect();
    assert_eq!(server.len(), 1, "the gateway is back");
    assert_eq!(server[0].pointer("/object/spec/replicas"), Some(&3.into()));

    let mut status = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    status.args(["cluster", "status", "--output=json", "--kubeconfig"]).arg(cluster.kubeconfig());
    let status: Value = serde_json::from_str(&Run::new(status.output().await?)?.expect(0).out)?;
    assert_eq!((&status["state"], &status["image"]), (&"installed".into(), &IMAGE.into()));
    assert_eq!(status["drift"], serde_json::json!([]));
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), &farm.names.operator);
    maps.delete("bko-install", &Default::default()).await?;
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
    let expected = ["create leases", "patch configmaps", "patch deployments", "patch configmaps", "delete leases"];
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

pub(crate) async fn a_load_balancer_that_never_comes_is_a_warning(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "balancer");
    let init = farm.init(&["--set=gateway.service.type=LoadBalancer"]).await?.expect(0);
    init.says("is not ready yet, and is not waited for: waits for a load balancer address");
    Ok(())
}
