//! The farm on the node, installed by the executable from its own image, and a
//! client outside the cluster that knows only what a CI is told.
#![allow(dead_code, reason = "the demo uses a part of it")]

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bko_install::families::build_farm::api::BuildProject;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use kube::api::{ListParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::ChildStderr;

use crate::shared::harness::{Node, executable, process};

pub(crate) const OPERATOR: &str = "buildkit-operator";
pub(crate) const BUILDS: &str = "buildkit-builds";
/// What a wildcard record would point at the gateway.
pub(crate) const DOMAIN: &str = "builds.example.test";

/// The installed farm.
pub(crate) struct Installation<'a> {
    pub(crate) node: &'a Node,
    /// `http://address:port` of the routing API.
    api: String,
    pub(crate) token: String,
    pub(crate) gateway: IpAddr,
    /// `ca.pem`, `cert.pem`, `key.pem`.
    pub(crate) certificates: PathBuf,
    http: Client<HttpConnector, Full<Bytes>>,
    /// Of the example's base, in the local registry.
    base: String,
}

/// Runs the executable against the node's cluster.
pub(crate) fn bko(node: &Node, arguments: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(executable::executable()?);
    command.args(arguments).env("KUBECONFIG", node.kubeconfig());
    Ok(command)
}

/// Flags of `cluster init` and `cluster plan` that every test uses: idle times
/// that a test can wait for, caches that a test machine can hold.
pub(crate) const FLAGS: [&str; 12] = [
    "--profile=dev",
    "--set",
    "gateway.domains=[builds.example.test]",
    "--set",
    "projects.idleSeconds=8",
    "--set",
    "forks.idleSeconds=5",
    "--set",
    "cache.sizeGi=1",
    // More daemons at once than the node has room for by default.
    "--set",
    "daemon.requests.cpu=50m",
    "--timeout=2m",
];

impl<'a> Installation<'a> {
    /// Installs the farm, and fetches what a client needs.
    pub(crate) async fn install(node: &'a Node) -> anyhow::Result<Self> {
        node.own_image().await?;
        let mut init = bko(node, &["cluster", "init"])?;
        init.args(FLAGS);
        process::combined_output(init).await?;
        Self::open(node).await
    }

    /// Fetches what a client of the installed farm needs.
    pub(crate) async fn open(node: &'a Node) -> anyhow::Result<Self> {
        let base = node.push(&node.archive("busybox.tar")?, "library/busybox:1").await?;
        Self::trust_the_registry(node).await?;

        let certificates = PathBuf::from("/run/bko/client");
        // What an installation before it had left there is of another authority.
        process::output(bko(node, &["certs", "export", "--force", "--dir", &certificates.display().to_string()])?)
            .await?;
        let secret = Api::<Secret>::namespaced(node.client(), OPERATOR).get("buildkit-operator-token").await?;
        let token = secret.data.and_then(|mut data| data.remove("token")).context("the Secret has no token")?;
        Ok(Self {
            node,
            api: format!("http://{}:8080", address_of(node, "buildkit-operator-buildd").await?),
            token: String::from_utf8(token.0)?,
            gateway: address_of(node, "buildkit-operator-gateway").await?,
            certificates,
            http: Client::builder(TokioExecutor::new()).build_http(),
            base,
        })
    }

    /// The example's base image, in the local registry.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// How many builds of a repository are registered.
    pub(crate) async fn inflight(&self, repo: &str) -> anyhow::Result<usize> {
        let key = bko_install::key::Project::new(repo, "", "", "amd64", false)?.key();
        let project = Api::<BuildProject>::namespaced(self.node.client(), BUILDS).get(key.as_str()).await?;
        Ok(project.status.map_or(0, |status| status.inflight.len()))
    }

    /// As an administrator would for a registry without TLS.
    async fn trust_the_registry(node: &Node) -> anyhow::Result<()> {
        let map: ConfigMap = serde_json::from_value(json!({
            "metadata": {"name": "buildkitd-config"}, "data": {"buildkitd.toml": node.buildkitd_toml()},
        }))?;
        match Api::namespaced(node.client(), BUILDS).create(&PostParams::default(), &map).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
            created => created.map(|_| ()).map_err(Into::into),
        }
    }

    /// What `POST` answers.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<(u16, Value)> {
        let request = hyper::Request::post(format!("{}{path}", self.api))
            .header("authorization", format!("Bearer {}", self.token))
            .body(Full::from(body.to_string()))?;
        let response = self.http.request(request).await?;
        let status = response.status().as_u16();
        let text = String::from_utf8(response.into_body().collect().await?.to_bytes().to_vec())?;
        Ok((status, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Routes a build; the daemon is ready when this returns.
    pub(crate) async fn route(&self, body: &Value) -> anyhow::Result<Route> {
        let begun = Instant::now();
        let (status, answer) = self.post("/route", body).await?;
        ensure!(status == 200, "/route {body}: {status} {answer}");
        let text =
            |name: &str| answer[name].as_str().map(str::to_owned).with_context(|| format!("no {name}: {answer}"));
        let route =
            Route { key: text("key")?, build: text("buildId")?, endpoint: text("endpoint")?, took: begun.elapsed() };
        // The wildcard record, as far as this client will ask for it.
        self.node.add_host(self.gateway, &[&format!("buildkitd-{}.{DOMAIN}", route.key)])?;
        Ok(route)
    }

    /// Releases a build.
    pub(crate) async fn complete(&self, route: &Route) -> anyhow::Result<()> {
        let (status, text) = self.post("/complete", &json!({"key": route.key, "buildId": route.build})).await?;
        ensure!(status == 204, "/complete: {status} {text}");
        Ok(())
    }

    /// Builds `examples/hello` with buildx, pushes it, and returns what was printed.
    pub(crate) async fn buildx(&self, route: &Route, image: &str) -> anyhow::Result<Build> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let builder = format!("remote-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let certificate = |file: &str| self.certificates.join(file).display().to_string();
        let options =
            format!("cacert={},cert={},key={}", certificate("ca.pem"), certificate("cert.pem"), certificate("key.pem"));
        let begun = Instant::now();
        let mut create = self.node.tools().command("buildx");
        create.env("BUILDX_CONFIG", "/run/bko/buildx");
        create.args(["create", "--name", &builder, "--driver=remote", "--driver-opt", &options, &route.endpoint]);
        process::combined_output(create).await?;
        let mut build = self.node.tools().command("buildx");
        build.env("BUILDX_CONFIG", "/run/bko/buildx");
        build.args(["build", "--builder", &builder, "--progress=plain", "--push", "--tag", image]);
        build.args(["--build-arg", &format!("BASE={}", self.base)]).arg(example()?);
        let printed = process::combined_output(build).await?;
        Ok(Build { printed, took: begun.elapsed() })
    }

    /// The same with buildctl.
    pub(crate) async fn buildctl(&self, route: &Route, image: &str) -> anyhow::Result<Build> {
        let context = example()?.display().to_string();
        let begun = Instant::now();
        let mut build = self.node.tools().command("buildctl");
        build.arg("--addr").arg(&route.endpoint);
        for (flag, file) in [("--tlscacert", "ca.pem"), ("--tlscert", "cert.pem"), ("--tlskey", "key.pem")] {
            build.arg(flag).arg(self.certificates.join(file));
        }
        build.args(["build", "--progress=plain", "--frontend=dockerfile.v0"]);
        build.args(["--local", &format!("context={context}"), "--local", &format!("dockerfile={context}")]);
        build.args(["--opt", &format!("build-arg:BASE={}", self.base)]);
        build.args(["--output", &format!("type=image,name={image},push=true")]);
        let printed = process::combined_output(build).await?;
        Ok(Build { printed, took: begun.elapsed() })
    }

    /// Begins a build with a step that takes `seconds`, and returns when that step runs.
    pub(crate) async fn begin(&self, address: &str, name: &str, seconds: u32) -> anyhow::Result<Running> {
        self.build(address, name, seconds)?.has_printed(&format!("begun {name}")).await
    }

    /// The same, but returns at once: a step that is cached does not run.
    pub(crate) fn build(&self, address: &str, name: &str, seconds: u32) -> anyhow::Result<Running> {
        self.step(address, None, name, &format!("sleep {seconds}"))
    }

    /// The same past the gateway, for which the daemon has another name.
    pub(crate) async fn begin_direct(&self, address: &str, name: &str, seconds: u32) -> anyhow::Result<Running> {
        let server = format!("any.{BUILDS}.svc.cluster.local");
        let build = self.step(address, Some(&server), name, &format!("sleep {seconds}"))?;
        build.has_printed(&format!("begun {name}")).await
    }

    /// A build with one step, which runs `work`. It has a cache mount at `/shared`.
    pub(crate) fn step(&self, address: &str, server: Option<&str>, name: &str, work: &str) -> anyhow::Result<Running> {
        let context = PathBuf::from("/run/bko/slow");
        std::fs::create_dir_all(&context)?;
        // The step's own command does not read like what it prints.
        let run =
            "RUN --mount=type=cache,target=/shared echo \"be\"gun $NAME && eval \"$WORK\" && echo \"en\"ded $NAME";
        std::fs::write(context.join("Dockerfile"), format!("ARG BASE\nFROM ${{BASE}}\nARG NAME WORK\n{run}\n"))?;
        let context = context.display().to_string();
        let mut build = self.node.tools().command("buildctl");
        build.arg("--addr").arg(address);
        for (flag, file) in [("--tlscacert", "ca.pem"), ("--tlscert", "cert.pem"), ("--tlskey", "key.pem")] {
            build.arg(flag).arg(self.certificates.join(file));
        }
        if let Some(server) = server {
            build.args(["--tlsservername", server]);
        }
        build.args(["build", "--progress=plain", "--frontend=dockerfile.v0"]);
        build.args(["--local", &format!("context={context}"), "--local", &format!("dockerfile={context}")]);
        for (argument, value) in [("BASE", self.base.as_str()), ("NAME", name), ("WORK", work)] {
            build.args(["--opt", &format!("build-arg:{argument}={value}")]);
        }
        Running::start(build)
    }

    /// Where the daemon's Service is, past the gateway.
    pub(crate) async fn direct(&self, namespace: &str, daemon: &str) -> anyhow::Result<String> {
        let service = Api::<Service>::namespaced(self.node.client(), namespace).get(daemon).await?;
        let address = service.spec.and_then(|spec| spec.cluster_ip).context("the daemon has no address")?;
        let address = format!("{address}:1234");
        // kube-proxy refuses until it has learned, up to a second after everybody else, that the pod is ready.
        let learned = async {
            while TcpStream::connect(&address).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), learned).await.context("nobody is behind the Service")?;
        Ok(format!("tcp://{address}"))
    }

    /// What the gateway's metrics say of one series, over its pods.
    pub(crate) async fn gateway_metric(&self, series: &str) -> anyhow::Result<f64> {
        let pods = Api::<Pod>::namespaced(self.node.client(), OPERATOR);
        let selector = ListParams::default().labels("app.kubernetes.io/component=gateway");
        let mut sum = 0.0;
        for pod in pods.list(&selector).await? {
            let address = pod.status.and_then(|status| status.pod_ip).context("a gateway without an address")?;
            let text = process::get(&format!("http://{address}:8081/metrics")).await?;
            let values = text.lines().filter_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
            sum += values.filter_map(|value| value.parse::<f64>().ok()).sum::<f64>();
        }
        Ok(sum)
    }

    /// Waits until the project looks as wanted.
    pub(crate) async fn until(
        &self,
        key: &str,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&BuildProject) -> bool + Send,
    ) -> anyhow::Result<()> {
        let api = Api::<BuildProject>::namespaced(self.node.client(), BUILDS);
        let condition = |project: Option<&BuildProject>| project.is_some_and(&wanted);
        match tokio::time::timeout(limit, await_condition(api.clone(), key, condition)).await {
            Ok(found) => found.map(|_| ()).map_err(Into::into),
            Err(_) => bail!("{key} is not {what} within {limit:?}: {:?}", api.get_opt(key).await?.map(|p| p.status)),
        }
    }
}

/// A build that runs.
pub(crate) struct Running {
    child: tokio::process::Child,
    lines: tokio::io::Lines<BufReader<ChildStderr>>,
    printed: String,
}

impl Running {
    fn start(command: Command) -> anyhow::Result<Self> {
        let mut command = tokio::process::Command::from(command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let lines = BufReader::new(child.stderr.take().context("no output")?).lines();
        Ok(Self { child, lines, printed: String::new() })
    }

    pub(crate) async fn has_printed(mut self, marker: &str) -> anyhow::Result<Self> {
        let begun = async {
            while let Some(line) = self.lines.next_line().await? {
                self.printed += &format!("{line}\n");
                if line.contains(marker) {
                    return Ok(());
                }
            }
            bail!("the build ended before its step ran:\n{}", self.printed)
        };
        tokio::time::timeout(Duration::from_secs(60), begun).await.context("the step does not run")??;
        Ok(self)
    }

    /// Waits until it has ended, and returns its exit code and what it printed.
    pub(crate) async fn ends(mut self) -> anyhow::Result<(Option<i32>, String)> {
        while let Some(line) = self.lines.next_line().await? {
            self.printed += &format!("{line}\n");
        }
        Ok((self.child.wait().await?.code(), self.printed))
    }

    /// It must end well.
    pub(crate) async fn succeeds(self, in_spite_of: &str) -> anyhow::Result<()> {
        let (code, printed) = self.ends().await?;
        ensure!(code == Some(0) && printed.contains("ended "), "cut by {in_spite_of}, exit code {code:?}:\n{printed}");
        Ok(())
    }
}

/// Where a build may go.
pub(crate) struct Route {
    pub(crate) key: String,
    pub(crate) build: String,
    pub(crate) endpoint: String,
    pub(crate) took: Duration,
}

/// A build that succeeded.
pub(crate) struct Build {
    pub(crate) printed: String,
    pub(crate) took: Duration,
}

impl Build {
    /// Whether the step that runs came from the cache.
    pub(crate) fn cached(&self) -> bool {
        self.printed.contains("CACHED") && !self.printed.contains("Built in step")
    }
}

/// Cargo runs tests in the folder of the package.
fn example() -> std::io::Result<PathBuf> {
    std::path::absolute("examples/hello")
}

async fn address_of(node: &Node, service: &str) -> anyhow::Result<IpAddr> {
    let service = Api::<Service>::namespaced(node.client(), OPERATOR).get(service).await?;
    let name = service.name_any();
    let address = service.spec.and_then(|spec| spec.cluster_ip).with_context(|| format!("{name} has no address"))?;
    Ok(address.parse()?)
}
