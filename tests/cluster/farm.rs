//! The real server against the real API server; pods are played.
#![allow(dead_code, reason = "the benchmark uses a part of it")]

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use bko_install::families::build_farm::api::{BuildProject, BuildProjectStatus};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, CustomResourceExt, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::shared::harness::{Cluster, executable, process};

/// One project used by many tests, and its key.
pub(crate) const REPO: &str = "github.com/acme/shop";
pub(crate) const KEY: &str = "p41bd34a2227aca39";

/// Defines the BuildProject, once per cluster.
pub(crate) async fn define(cluster: &Cluster) -> anyhow::Result<()> {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    let define = async || -> anyhow::Result<()> {
        let api = Api::<CustomResourceDefinition>::all(cluster.client());
        let name = BuildProject::crd_name();
        // An installation of another test may have brought it already.
        if api.get_opt(name).await?.is_none() {
            api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(BuildProject::crd())).await?;
        }
        await_condition(api, name, conditions::is_crd_established()).await?;
        Ok(())
    };
    DEFINED.get_or_try_init(define).await.map(|_| ())
}

/// A `bko-install server` process; ends with the value.
pub(crate) struct Server {
    child: tokio::process::Child,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
    http: Client<HttpConnector, Full<Bytes>>,
    token: Option<String>,
}

impl Server {
    /// Starts controller and route server on ports of their own, and returns
    /// when it is ready.
    pub(crate) async fn start(cluster: &Cluster, flags: &[&str]) -> anyhow::Result<Self> {
        Self::with(cluster, flags, &[]).await
    }

    /// The same, with an environment.
    pub(crate) async fn with(cluster: &Cluster, flags: &[&str], env: &[(&str, &str)]) -> anyhow::Result<Self> {
        Self::through(cluster.kubeconfig(), flags, env).await
    }

    /// The same, by a kubeconfig.
    pub(crate) async fn through(kubeconfig: &Path, flags: &[&str], env: &[(&str, &str)]) -> anyhow::Result<Self> {
        static PORT: AtomicU16 = AtomicU16::new(21_000);
        let [api, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], PORT.fetch_add(1, Ordering::Relaxed))));
        let log = format!("/run/bko/logs/server-{}.log", api.port());
        let output = std::fs::File::create(&log)?;
        let mut command = Command::new(executable::executable()?);
        command
            .arg("server")
            .args(["--kubeconfig", &kubeconfig.display().to_string(), "--roles", "controller,route"])
            .args(["--api-listen", &api.to_string(), "--metrics-addr", &admin.to_string(), "-v"])
            .args(flags)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        if env.is_empty() {
            command.arg("--auth-open");
        }
        if !flags.iter().any(|flag| flag.starts_with("--companion")) {
            command.arg("--companion-image=bko-install:test");
        }
        let child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        let token = env.iter().find(|(name, _)| name.ends_with("AUTH_TOKEN")).map(|(_, token)| (*token).to_owned());
        let http = Client::builder(TokioExecutor::new()).build_http();
        let mut server = Self { child, api, admin, http, token };
        for _ in 0..1000 {
            if process::answers(&format!("http://{admin}/readyz")).await {
                return Ok(server);
            }
            if let Some(status) = server.child.try_wait()? {
                bail!("the server ended with {status}:\n{}", std::fs::read_to_string(&log)?);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bail!("the server is not ready:\n{}", std::fs::read_to_string(&log)?)
    }

    /// Sends a body and returns status and answer.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        self.post_as(self.token.as_deref(), path, body).await
    }

    /// The same, with a token of one's own.
    pub(crate) async fn post_as(&self, token: Option<&str>, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        let mut request = hyper::Request::post(format!("http://{}{path}", self.api));
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let response = self.http.request(request.body(Full::from(body.to_string()))?).await?;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Reads a path and returns status and answer.
    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<(u16, Value)> {
        let response = self.http.get(format!("http://{}{path}", self.api).parse()?).await?;
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Routes a build and returns the answer.
    pub(crate) async fn route(&self, repo: &str) -> anyhow::Result<Value> {
        let (status, answer) = self.post("/route", &json!({"repo": repo, "arch": "amd64"})).await?;
        if status != 200 {
            bail!("/route of {repo}: {status} {answer}");
        }
        Ok(answer)
    }

    /// Releases what [`route`](Self::route) returned.
    pub(crate) async fn complete(&self, answer: &Value) -> anyhow::Result<()> {
        let body = json!({"key": answer["key"], "buildId": answer["buildId"]});
        let (status, text) = self.post("/complete", &body).await?;
        if status != 204 {
            bail!("/complete: {status} {text}");
        }
        Ok(())
    }

    /// What `/metrics` says of one series.
    pub(crate) async fn metric(&self, series: &str) -> anyhow::Result<f64> {
        let text = process::get(&format!("http://{}/metrics", self.admin)).await?;
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        Ok(line.unwrap_or(" 0").trim().parse()?)
    }

    /// Ends it as a cluster would, and waits for its end.
    pub(crate) async fn terminate(mut self) -> anyhow::Result<std::process::ExitStatus> {
        let pid = self.child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?));
        rustix::process::kill_process(pid.context("it has ended already")?, rustix::process::Signal::TERM)?;
        Ok(self.child.wait().await?)
    }

    /// What ends it by SIGKILL, at once.
    pub(crate) fn killer(&self) -> anyhow::Result<impl FnOnce() + Send + use<>> {
        let pid = self.child.id().and_then(|id| rustix::process::Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.context("it has ended already")?;
        Ok(move || rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap())
    }

    /// Ends it by SIGKILL.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

/// The status of a project; `None` when there is no such project.
pub(crate) async fn status(cluster: &Cluster, namespace: &str, key: &str) -> Option<BuildProjectStatus> {
    let api = Api::<BuildProject>::namespaced(cluster.client(), namespace);
    api.get_opt(key).await.ok().flatten().map(|project| project.status_or_default())
}

/// Waits until the project looks as wanted.
pub(crate) async fn until(
    cluster: &Cluster,
    namespace: &str,
    key: &str,
    what: &str,
    wanted: impl Fn(&BuildProject) -> bool + Send,
) -> anyhow::Result<BuildProject> {
    let api = Api::<BuildProject>::namespaced(cluster.client(), namespace);
    let condition = |project: Option<&BuildProject>| project.is_some_and(&wanted);
    let found = tokio::time::timeout(Duration::from_secs(30), await_condition(api.clone(), key, condition)).await;
    match found {
        Ok(project) => project?.context("the project went away"),
        Err(_) => bail!("project {key} is not {what} within 30 s: {:?}", api.get_opt(key).await?.map(|p| p.status)),
    }
}

/// Replicas that the daemon's StatefulSet asks for.
pub(crate) async fn replicas(cluster: &Cluster, namespace: &str, key: &str) -> anyhow::Result<i32> {
    let api = Api::<StatefulSet>::namespaced(cluster.client(), namespace);
    let set = api.get(&format!("buildkitd-{key}")).await?;
    set.spec
        .and_then(|spec| spec.replicas)
        .with_context(|| format!("{} without replicas", set.metadata.name.unwrap_or_default()))
}

/// Names of all objects of a kind in a namespace.
pub(crate) async fn names<K>(cluster: &Cluster, namespace: &str) -> anyhow::Result<Vec<String>>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    let list = Api::<K>::namespaced(cluster.client(), namespace).list(&kube::api::ListParams::default()).await?;
    Ok(list.items.iter().map(ResourceExt::name_any).collect())
}
