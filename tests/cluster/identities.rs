//! Identities of CI providers against a real API server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::BuildProject;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::farm::{self, KEY, Server};
use crate::harness::Cluster;
use crate::issuer::{Issuer, Key};
use crate::routes::farm;

struct Jobs {
    issuer: Issuer,
    key: Key,
}

impl Jobs {
    async fn new() -> Self {
        let key = Key::curve("k1", "ES256");
        Self { issuer: Issuer::start(&[&key]).await, key }
    }

    fn token(&self, claims: &Value) -> String {
        self.key.token(&self.issuer.claims(claims))
    }

    fn pull(&self, number: u32) -> String {
        self.token(&json!({"ref": format!("refs/pull/{number}/merge"), "event_name": "pull_request"}))
    }

    /// A server that knows the issuer's keys.
    async fn server(&self, cluster: &Cluster, flags: &[&str]) -> anyhow::Result<Server> {
        self.server_with(cluster, flags, &[]).await
    }

    async fn server_with(&self, cluster: &Cluster, flags: &[&str], env: &[(&str, &str)]) -> anyhow::Result<Server> {
        let providers = json!([self.issuer.provider("github")]).to_string();
        let env = [&[("BUILDKIT_OPERATOR_OIDC_PROVIDERS", providers.as_str())], env].concat();
        let server = Server::with(cluster, flags, &env).await?;
        let probe = json!({"key": "p0000000000000000", "buildId": "0123456789abcdef"});
        let token = self.token(&json!({}));
        while server.post_as(Some(&token), "/complete", &probe).await?.0 == 503 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(server)
    }
}

pub(crate) async fn two_pull_requests_of_one_repository_get_two_daemons(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "pulls").await?;
    let jobs = Jobs::new().await;
    let server = jobs.server(&cluster, &farm.flags(&["--fork-idle-seconds=3", "--cache-volume-gi=7"])).await?;
    let body = json!({"repo": "github.com/victim/secret", "arch": "amd64"});
    let route = async |token: String| -> anyhow::Result<Value> {
        let (status, answer) = server.post_as(Some(&token), "/route", &body).await?;
        ensure!(status == 200, "{status} {answer}");
        Ok(answer)
    };
    let canonical = route(jobs.token(&json!({}))).await?;
    ensure!(canonical["key"] == KEY, "{canonical}");
    let (seven, eight) = (route(jobs.pull(7)).await?, route(jobs.pull(8)).await?);
    ensure!(seven["key"] == format!("fork7-{KEY}") && eight["key"] == format!("fork8-{KEY}"), "{seven} {eight}");
    ensure!(route(jobs.pull(7)).await?["endpoint"] == seven["endpoint"], "one pull request has one daemon");

    // All that is true of a fork is true of these.
    let mut names = farm::names::<StatefulSet>(&cluster, &farm.namespace).await?;
    names.sort();
    let want = [format!("buildkitd-fork7-{KEY}"), format!("buildkitd-fork8-{KEY}"), format!("buildkitd-{KEY}")];
    ensure!(names == want, "{names:?}");
    ensure!(farm::names::<Service>(&cluster, &farm.namespace).await?.len() == 3);
    let sets = kube::Api::<StatefulSet>::namespaced(cluster.client(), &farm.namespace);
    let set = serde_json::to_value(sets.get(&want[0]).await?)?;
    let labels = &set["spec"]["template"]["metadata"]["labels"];
    ensure!(labels["buildkit-operator.socialgouv.github.io/untrusted"] == "true", "{labels}");
    ensure!(set["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete", "{set}");
    let projects = kube::Api::<BuildProject>::namespaced(cluster.client(), &farm.namespace);
    let project = projects.get(&format!("fork7-{KEY}")).await?;
    ensure!(project.spec.repo == "github.com/acme/shop" && project.spec.idle_timeout_sec == 3, "{:?}", project.spec);
    ensure!(project.spec.cache_volume_gi == 7, "a fork is as large as what it is forked from");

    // Each ends its own, and only its own; then both are reaped with their caches.
    let complete = async |token: &str, answer: &Value| -> anyhow::Result<u16> {
        let body = json!({"key": answer["key"], "buildId": answer["buildId"]});
        Ok(server.post_as(Some(token), "/complete", &body).await?.0)
    };
    ensure!(complete(&jobs.pull(8), &seven).await? == 403);
    ensure!(complete(&jobs.pull(8), &canonical).await? == 403);
    ensure!(complete(&jobs.pull(8), &eight).await? == 204);
    let reaped = async {
        let eight = format!("fork8-{KEY}");
        while farm::names::<BuildProject>(&cluster, &farm.namespace).await?.contains(&eight) {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        while farm::names::<PersistentVolumeClaim>(&cluster, &farm.namespace).await?.len() > 2 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(110), reaped).await.context("the fork is still there")??;
    let status = farm::status(&cluster, &farm.namespace, &format!("fork7-{KEY}")).await.context("no fork of 7")?;
    ensure!(status.inflight.len() == 2, "the other pull request's builds go on: {status:?}");
    Ok(())
}

/// A proxy that knows CONNECT alone; says where it was asked to.
async fn proxy(asked: Arc<Mutex<Vec<String>>>) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let asked = asked.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(client.read_u8().await?);
                }
                let head = String::from_utf8_lossy(&head);
                let target = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let mut server = TcpStream::connect(&target).await?;
                asked.lock().unwrap().push(target);
                client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    Ok(address)
}

pub(crate) async fn keys_are_fetched_through_the_proxy_but_for_what_is_excepted(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "proxied").await?;
    for (except, through) in [("", true), ("127.0.0.0/8,localhost", false)] {
        let jobs = Jobs::new().await;
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let address = format!("http://{}", proxy(asked.clone()).await?);
        let env = [("HTTPS_PROXY", address.as_str()), ("NO_PROXY", except)];
        let server = jobs.server_with(&cluster, &farm.flags(&[]), &env).await?;
        let (status, answer) =
            server.post_as(Some(&jobs.token(&json!({}))), "/prewarm", &json!({"arch": "amd64"})).await?;
        ensure!(status == 202, "{status} {answer}");
        let asked = asked.lock().unwrap().clone();
        let asks = |target: &String| jobs.issuer.url.starts_with(&format!("https://{target}/"));
        ensure!(asked.iter().any(asks) == through, "{asked:?} {}", jobs.issuer.url);
    }
    Ok(())
}

pub(crate) async fn a_job_ends_its_own_builds_on_every_replica(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "jobs").await?;
    let jobs = Jobs::new().await;
    let one = jobs.server(&cluster, &farm.flags(&[])).await?;
    let two = jobs.server(&cluster, &farm.flags(&[])).await?;
    let (own, other) = (jobs.token(&json!({})), jobs.token(&json!({"repository": "acme/other"})));
    let (status, answer) = one.post_as(Some(&own), "/route", &json!({"arch": "amd64"})).await?;
    ensure!(status == 200, "{answer}");
    let body = json!({"key": answer["key"], "buildId": answer["buildId"]});
    // The other replica has not made the project: it must not take it for unknown.
    ensure!(two.post_as(Some(&other), "/complete", &body).await?.0 == 403);
    ensure!(farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?.inflight.len() == 1);
    ensure!(two.post_as(Some(&own), "/complete", &body).await?.0 == 204);
    ensure!(farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?.inflight.is_empty());
    Ok(())
}

pub(crate) async fn a_rotated_token_is_accepted_without_a_restart(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "rotate").await?;
    let folder = tempfile::tempdir()?;
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text);
    write("token", "one\n")?;
    let path = folder.path().display().to_string();
    // Any variable keeps the server from being started as open.
    let env = [("BUILDKIT_OPERATOR_ADMIN_TOKEN", "root-tok")];
    let server = Server::with(&cluster, &farm.flags(&["--auth-token-dir", &path]), &env).await?;
    let accepted = async |token: &str| -> anyhow::Result<bool> {
        let body = json!({"repo": "acme/rotate", "arch": "amd64"});
        match server.post_as(Some(token), "/prewarm", &body).await?.0 {
            202 => Ok(true),
            401 => Ok(false),
            other => anyhow::bail!("{other}"),
        }
    };
    ensure!(accepted("one").await? && !accepted("two").await?);
    write("previous", "one")?;
    write("token", "two")?;
    let rotated = async {
        while !accepted("two").await? {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(15), rotated).await.context("the new token is not accepted")??;
    ensure!(accepted("one").await?, "the previous one is accepted too");
    Ok(())
}
