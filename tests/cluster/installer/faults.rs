//! Runs that are cut off, and the next run that completes them.

use super::*;
use crate::harness::control_plane;

pub(crate) async fn killed_after_the_intent(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    assert!(killed_at(cluster, "kill-intent", "intent").await?.is_empty());
    Ok(())
}

/// The authority's Secret is written, and what it signs is not: the next run
/// must sign with the key that is there.
pub(crate) async fn killed_in_the_middle_of_a_level(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let before = killed_at(cluster, "kill-apply", "apply:6").await?;
    let has = |key: &str| before.keys().any(|name| name.ends_with(key));
    assert!(has("/ca-key.pem") && !has("/cert.pem"), "{:?}", before.keys());
    Ok(())
}

pub(crate) async fn killed_between_two_levels(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let before = killed_at(cluster, "kill-level", "level:rc1").await?;
    assert!(before.keys().any(|name| name.ends_with("/token")), "{:?}", before.keys());
    Ok(())
}

pub(crate) async fn killed_before_the_outcome(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let before = killed_at(cluster, "kill-outcome", "level:rc4").await?;
    assert!(before.len() > 6, "{:?}", before.keys());
    Ok(())
}

/// Kills a run there, completes it by the same command, and returns the Secrets
/// that there were in between.
async fn killed_at(cluster: Arc<Cluster>, prefix: &str, point: &str) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let farm = Farm::new(cluster, prefix);
    let killed = farm.init(&["--stop-after", point]).await?;
    assert_eq!(killed.signal, Some(9), "{}\n{}", killed.out, killed.err);
    let record = farm.record().await?.context("no record")?;
    assert_eq!(record["state"], "applying");
    let planned = record["inventory"].as_array().map_or(0, Vec::len);
    let before = farm.secrets().await?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("record: "), "{}", plan.out);

    farm.init(&[]).await?.expect(0);
    let record = farm.record().await?.context("no record")?;
    assert_eq!(record["state"], "installed");
    assert_eq!(record["inventory"].as_array().map(Vec::len), Some(planned));
    let after = farm.secrets().await?;
    for (name, value) in &before {
        assert_eq!(after.get(name), Some(value), "{name} was made twice");
    }
    no_orphans(&farm, &record).await?;
    farm.run("plan", &[]).await?.expect(0);
    Ok(before)
}

/// Everything that carries our label is in the inventory, with its UID.
pub(super) async fn no_orphans(farm: &Farm, record: &Value) -> anyhow::Result<()> {
    let names = &farm.names;
    let inventory = record["inventory"].as_array().cloned().unwrap_or_default();
    let mut found = 0;
    for kind in ["secrets", "serviceaccounts", "roles", "rolebindings", "networkpolicies", "services", "deployments"] {
        for namespace in [&names.operator, &names.builds, &names.system] {
            let mut kubectl = farm.cluster.tools().command("kubectl");
            kubectl.args(["get", kind, "--namespace", namespace, "--output=json", "--selector"]);
            kubectl.arg("app.kubernetes.io/managed-by=bko-install").arg("--kubeconfig").arg(farm.cluster.kubeconfig());
            let list: Value = serde_json::from_str(&crate::harness::process::output(kubectl).await?)?;
            for object in list["items"].as_array().into_iter().flatten() {
                let uid = &object["metadata"]["uid"];
                assert!(inventory.iter().any(|entry| entry["uid"] == *uid), "orphan: {}", object["metadata"]["name"]);
                found += 1;
            }
        }
    }
    assert!(found > 15, "{found}");
    Ok(())
}

pub(crate) async fn interrupted_it_stops_cleanly_and_goes_on_later(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "interrupt");
    farm.play.switch_off();
    let child = farm.spawn("init", &["--output=json", "--timeout=60s"])?;
    let pid =
        rustix::process::Pid::from_raw(i32::try_from(child.id().context("no process")?)?).context("no process")?;
    let mut child = child;
    wait_for_event(&mut child, "waiting").await?;
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let run = Run::new(child.wait_with_output().await?)?.expect(130);
    run.says("stopping after the requests in flight");
    run.says("hint: run the same command again");
    let record = farm.record().await?.context("no record")?;
    assert_eq!((&record["state"], &record["message"]), (&"failed".into(), &"interrupted".into()));
    assert!(farm.lease().await?.is_none());
    farm.play.switch_on();
    farm.init(&[]).await?.expect(0);
    Ok(())
}

/// Reads events until one of this kind.
pub(super) async fn wait_for_event(child: &mut Child, kind: &str) -> anyhow::Result<()> {
    use tokio::io::{AsyncBufReadExt, BufReader};
    let mut out = BufReader::new(child.stdout.as_mut().context("no output")?);
    let read = async {
        let mut line = String::new();
        while out.read_line(&mut line).await? > 0 {
            if serde_json::from_str::<Value>(&line)?["event"] == kind {
                return Ok(());
            }
            line.clear();
        }
        anyhow::bail!("no event \"{kind}\"")
    };
    tokio::time::timeout(Duration::from_secs(30), read).await?
}

/// Owns the cluster: the API server goes away while a run waits, and comes back.
pub(crate) async fn a_restart_of_the_api_server_is_survived(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "restart");
    farm.play.switch_off();
    let mut child = farm.spawn("init", &["--output=json", "--timeout=90s"])?;
    wait_for_event(&mut child, "waiting").await?;
    let api_server = &cluster.control_plane().api_server;
    api_server.kill()?;
    api_server.start_again()?;
    let client = farm.client();
    api_server.wait_until(Duration::from_secs(30), async || control_plane::is_ready(&client).await).await?;
    let play = Play::start(farm.client(), &farm.names.operator, Duration::ZERO);
    let run = Run::new(child.wait_with_output().await?)?.expect(0);
    drop(play);
    assert_eq!(farm.record().await?.context("no record")?["state"], "installed");
    assert!(run.out.contains(r#""event":"retrying""#), "{}", run.out);
    Ok(())
}
