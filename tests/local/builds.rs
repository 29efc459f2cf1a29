//! The main job.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;

use crate::Machine;
use crate::host::{Farm, Who, cached, printed};

const REPO: &str = "github.com/acme/shop";

async fn main_job(machine: &Machine, who: Who) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, who, &[]).await?;
    let begun = Instant::now();
    let routed = farm.route(REPO)?;
    let cold = begun.elapsed();
    ensure!(routed.endpoint.starts_with("tcp://127."), "{}", routed.endpoint);
    ensure!(routed.endpoint.ends_with(&format!(":{}", farm.ports.gateway)), "{}", routed.endpoint);
    let first = farm.build(&routed.endpoint, "main").await?;
    let second = farm.buildx(&routed.endpoint, "main").await?;
    ensure!(!cached(&first) && cached(&second), "first:\n{first}\nsecond:\n{second}");
    farm.complete(&routed)?;
    let warm = Instant::now();
    let again = farm.route(REPO)?;
    eprintln!("{who:?}: first route {} ms, warm {:.1} ms", cold.as_millis(), warm.elapsed().as_secs_f64() * 1e3);
    ensure!(again.endpoint == routed.endpoint);
    farm.complete(&again)?;
    farm.until("the builds are told", Duration::from_secs(10), |farm| {
        let project = farm.project(&routed.key)?;
        Ok(project.builds.len() == 2 && project.builds[0].steps.is_some_and(|steps| steps.cached > 0))
    })
    .await?;
    // The client finds the farm, and the builder, by itself.
    let listed = farm.run("ps", &["--all"])?;
    ensure!(String::from_utf8_lossy(&listed.stdout).contains(REPO), "{listed:?}");
    let context = "/tmp/hostpath_pv/contexts/main".to_owned();
    let one = farm.run("build", &["--repo", REPO, "--builder", "buildctl", "--progress", "plain", &context])?;
    let text = printed(one)?;
    ensure!(cached(&text), "{text}");
    let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(farm.state.join("certs/client/key.pem"))?);
    ensure!((owner == 0) == (who == Who::Root), "files of {owner}");
    farm.stop().await?;
    ensure!(farm.daemons().is_empty(), "{:?}", farm.daemons());
    Ok(())
}

pub(crate) async fn a_stock_client_builds_without_dns_and_the_second_time_from_the_cache(
    machine: Arc<Machine>,
) -> anyhow::Result<()> {
    main_job(&machine, Who::Root).await
}

pub(crate) async fn an_ordinary_user_runs_a_farm(machine: Arc<Machine>) -> anyhow::Result<()> {
    main_job(&machine, Who::Ordinary).await
}

pub(crate) async fn names_below_a_domain_lead_there_too(machine: Arc<Machine>) -> anyhow::Result<()> {
    let farm = Farm::up(&machine.tools, Who::Root, &["--domain=builds.example.test"]).await?;
    let routed = farm.route(REPO)?;
    let name = format!("buildkitd-{}.builds.example.test", routed.key);
    ensure!(routed.endpoint == format!("tcp://{name}:{}", farm.ports.gateway), "{}", routed.endpoint);
    let by_address = format!("tcp://127.0.0.1:{}", farm.ports.gateway);
    // As if the name led to this host.
    let mut command = farm.buildctl(&by_address, "named", 0.1)?;
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let program = command.get_program().to_owned();
    command = std::process::Command::new(program);
    command.env_clear().env("HOME", "/tmp").arg("--tlsservername").arg(&name).args(arguments);
    printed(tokio::process::Command::from(command).output().await?)?;
    // What another host needs to do the same.
    let json: serde_json::Value = serde_json::from_str(&printed(farm.run("credentials", &["--format", "json"])?)?)?;
    ensure!(json["url"] == format!("https://api.builds.example.test:{}", farm.ports.gateway), "{}", json["url"]);
    ensure!(json["gatewayHost"] == "builds.example.test" && json["gatewayPort"] == farm.ports.gateway);
    ensure!(json["token"] == std::fs::read_to_string(farm.state.join("token"))?.trim());
    for (field, file) in [("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "key.pem")] {
        ensure!(json[field] == std::fs::read_to_string(farm.state.join("certs/client").join(file))?, "{field}");
    }
    // This host needs no DNS for it.
    let context = farm.state.with_extension("context");
    std::fs::create_dir_all(&context)?;
    std::fs::write(context.join("Dockerfile"), "FROM scratch\nCOPY Dockerfile /\n")?;
    let context = context.display().to_string();
    printed(farm.run("build", &["--repo", REPO, "--builder", "buildctl", &context])?)?;
    // Nobody's name, and no name at an address that is nobody's.
    let refused = tokio::process::Command::from(farm.buildctl(&by_address, "named", 0.1)?).output().await?;
    ensure!(!refused.status.success(), "an address that belongs to no project was served");
    Ok(())
}

pub(crate) async fn untrusted_builds_are_refused_unless_they_are_allowed(machine: Arc<Machine>) -> anyhow::Result<()> {
    let body = json!({"repo": REPO, "arch": "amd64", "untrusted": true});
    let farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let (status, said) = farm.post("/route", &body)?;
    ensure!(status == 403 && said.contains("--allow-unisolated-forks"), "{status} {said}");
    let other = if cfg!(target_arch = "aarch64") { "amd64" } else { "arm64" };
    let (status, said) = farm.post("/route", &json!({"repo": REPO, "arch": other}))?;
    ensure!(status == 403 && said.contains("this host builds"), "{status} {said}");
    drop(farm);

    // A fork begins with what its project has built, and leaves it as it is.
    let flags = ["--allow-unisolated-forks", "--idle-seconds=1", "--adaptive-idle-max-seconds=0"];
    let mut farm = Farm::up(&machine.tools, Who::Root, &flags).await?;
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "fork").await?;
    farm.complete(&routed)?;
    farm.until("the daemon goes to zero", Duration::from_secs(30), |farm| Ok(farm.daemons().is_empty())).await?;
    let fork = farm.route_as(REPO, true)?;
    ensure!(fork.key == format!("fork{}", routed.key) && fork.endpoint != routed.endpoint, "{fork:?}");
    let seeded = farm.build(&fork.endpoint, "fork").await?;
    ensure!(cached(&seeded), "the fork began without the cache of its project:\n{seeded}");
    farm.build(&fork.endpoint, "of-the-fork").await?;
    farm.complete(&fork)?;
    let again = farm.route(REPO)?;
    let apart = farm.build(&again.endpoint, "of-the-fork").await?;
    ensure!(!cached(&apart), "the fork wrote to the cache of its project:\n{apart}");
    farm.complete(&again)?;

    // An `up` that was not told to starts no fork that is still wanted.
    let fork = farm.route_as(REPO, true)?;
    farm.complete(&fork)?;
    farm.stop().await?;
    farm.set_flags(&[]);
    farm.start().await?;
    let routed = farm.route(REPO)?;
    let mut dialled = farm.buildctl(&fork.endpoint, "fork", 0.1)?.spawn()?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let keys: Vec<_> = farm.daemons().into_iter().map(|(_, key)| key).collect();
    ensure!(keys == [routed.key], "{keys:?}");
    dialled.kill()?;
    dialled.wait()?;
    Ok(())
}
