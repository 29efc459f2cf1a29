//! `export` against a real API server: the same objects as `init`, and what
//! kubectl, Flux and Argo CD take.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::ensure;
use bko_install::manifest::{self, Bundle, ObjectId, Runlevel};
use bko_install::profile::{self, Request};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::runtime::wait::await_condition;

use super::*;

impl Farm {
    async fn export(&self, dir: &Path, args: &[&str]) -> anyhow::Result<()> {
        self.export_profile(dir, &[&["--profile=dev"], args].concat()).await
    }

    pub(super) async fn export_profile(&self, dir: &Path, args: &[&str]) -> anyhow::Result<()> {
        let mut command = bko_install();
        command.args(["export", "--image", IMAGE, "--dir"]).arg(dir).args(self.sets()).args(args);
        Run::new(command.output().await?)?.expect(0);
        Ok(())
    }

    pub(super) async fn kubectl(&self, args: &[&str]) -> anyhow::Result<Run> {
        let mut command = Command::from(self.cluster.tools().command("kubectl"));
        command.arg("--kubeconfig").arg(self.cluster.kubeconfig()).args(args).stdin(Stdio::null());
        Run::new(command.output().await?)
    }

    /// Waits until a definition is served.
    pub(super) async fn defined(&self, name: &str) -> anyhow::Result<()> {
        let established = kube::runtime::conditions::is_crd_established();
        let wait = await_condition(Api::<CustomResourceDefinition>::all(self.client()), name, established);
        tokio::time::timeout(Duration::from_secs(30), wait).await??;
        Ok(())
    }

    pub(super) async fn apply(&self, what: &[&str]) -> anyhow::Result<()> {
        self.kubectl(&[&["apply", "--server-side", "--validate=strict"], what].concat()).await?.expect(0);
        Ok(())
    }

    /// A kubeconfig of one of the installation's service accounts.
    pub(super) async fn as_account(&self, name: &str, dir: &Path) -> anyhow::Result<PathBuf> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), &self.names.operator);
        let request = serde_json::from_value(serde_json::json!({"spec": {"audiences": []}}))?;
        let token = accounts.create_token_request(name, &PostParams::default(), &request).await?;
        let token = token.status.and_then(|status| status.token).context("no token")?;
        let kubeconfig = dir.join("kubeconfig");
        kubeconfig_with_token(&self.cluster, &token, &kubeconfig)?;
        Ok(kubeconfig)
    }

    /// What the installation says that it makes.
    pub(super) async fn declared(&self) -> anyhow::Result<String> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client(), &self.names.operator);
        let map = maps.get("buildkit-operator-secrets").await?.data.unwrap_or_default();
        Ok(map.get("secrets.json").context("no declarations")?.clone())
    }

    /// What the Job of an export runs, as its service account, which holds
    /// nothing but the export's own Role.
    async fn bootstrap(&self) -> anyhow::Result<Run> {
        let scratch = tempfile::tempdir()?;
        let kubeconfig = self.as_account("buildkit-operator-bootstrap", scratch.path()).await?;
        let declared = scratch.path().join("secrets.json");
        std::fs::write(&declared, self.declared().await?)?;
        let mut command = bko_install();
        command.args(["certs", "issue", "--declared"]).arg(declared).arg("--kubeconfig").arg(kubeconfig);
        Run::new(command.stdin(Stdio::null()).output().await?)
    }

    fn rendered(&self) -> anyhow::Result<manifest::Rendered> {
        let bundle = Bundle::embedded()?;
        let set = self.sets().iter().map(|set| set.trim_start_matches("--set=").to_owned()).collect();
        let request = Request { image: Some(IMAGE.into()), set, ..Request::named("dev", IMAGE) };
        let (profile, values) = profile::resolve(bundle, &request)?;
        Ok(manifest::render(bundle, &profile, &values)?)
    }

    /// Everything of an installation as it lives, without what the API server
    /// and its controllers give each object, the namespaces under one name.
    async fn normal(&self) -> anyhow::Result<BTreeMap<String, Value>> {
        let rendered = self.rendered()?;
        let secrets = rendered.declarations();
        let mut ids: BTreeSet<ObjectId> = rendered.objects.iter().map(|object| object.id.clone()).collect();
        let secret = |namespace: &str, name: &str| ObjectId {
            group: String::new(),
            version: "v1".into(),
            kind: "Secret".into(),
            namespace: Some(namespace.into()),
            name: name.into(),
        };
        ids.extend(secrets.certificates.iter().map(|spec| secret(&spec.namespace, &spec.secret)));
        ids.extend(secrets.generated.iter().map(|value| secret(&value.namespace, &value.name)));
        let mut all = BTreeMap::new();
        for id in ids {
            let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(&id.group, &id.version, &id.kind));
            let api: Api<DynamicObject> = match &id.namespace {
                Some(namespace) => Api::namespaced_with(self.client(), namespace, &kind),
                None => Api::all_with(self.client(), &kind),
            };
            let live = api.get(&id.name).await.with_context(|| format!("reading {id}"))?;
            all.insert(self.anonymous(&id.to_string()), self.without_identity(serde_json::to_value(live)?)?);
        }
        Ok(all)
    }

    fn anonymous(&self, text: &str) -> String {
        let Namespaces { operator, builds, system } = &self.names;
        text.replace(operator.as_str(), "OPERATOR")
            .replace(builds.as_str(), "BUILDS")
            .replace(system.as_str(), "SYSTEM")
    }

    fn without_identity(&self, mut live: Value) -> anyhow::Result<Value> {
        live.as_object_mut().context("no object")?.remove("status");
        let kept = live["metadata"]["labels"].clone();
        let name = live["metadata"]["name"].clone();
        live["metadata"] = serde_json::json!({"name": name, "labels": kept});
        if let Some(spec) = live.get_mut("spec").and_then(Value::as_object_mut) {
            for field in ["clusterIP", "clusterIPs"] {
                spec.remove(field);
            }
            for port in spec.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                port.as_object_mut().map(|port| port.remove("nodePort"));
            }
        }
        if live["kind"] == "Secret" {
            let keys: Vec<String> =
                live["data"].as_object().into_iter().flat_map(|data| data.keys().cloned()).collect();
            live["data"] = keys.into();
        }
        Ok(serde_json::from_str(&self.anonymous(&live.to_string()))?)
    }

    async fn rolled_out(&self, name: &str) -> anyhow::Result<()> {
        let deployments: Api<Deployment> = Api::namespaced(self.client(), &self.names.operator);
        let ready = |deployment: Option<&Deployment>| {
            deployment.is_some_and(|deployment| {
                let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
                deployment.status.as_ref().and_then(|status| status.available_replicas) == wanted
            })
        };
        tokio::time::timeout(Duration::from_secs(60), await_condition(deployments, name, ready)).await??;
        Ok(())
    }
}

#[track_caller]
fn same(left: &BTreeMap<String, Value>, right: &BTreeMap<String, Value>) {
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>());
    for (id, object) in left {
        assert_eq!(object, &right[id], "{id}");
    }
    assert!(left.len() > 25, "{}", left.len());
}

pub(crate) async fn an_export_applied_in_order_gives_what_init_gives(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (installed, farm) = (Farm::new(Arc::clone(&cluster), "as-init"), Farm::new(cluster, "as-export"));
    installed.init(&[]).await?.expect(0);
    let scratch = tempfile::tempdir()?;
    farm.export(scratch.path(), &["--format=plain"]).await?;
    let mut files: Vec<String> = std::fs::read_dir(scratch.path())?
        .map(|entry| Ok(entry?.path().display().to_string()))
        .collect::<anyhow::Result<_>>()?;
    files.retain(|file| file.ends_with(".yaml"));
    files.sort();
    for file in &files {
        farm.apply(&["-f", file]).await?;
        if file.contains("bootstrap") {
            let run = farm.bootstrap().await?.expect(0);
            assert_eq!(run.out.matches("written").count(), 6, "{}", run.out);
        }
    }
    for name in ["buildkit-operator-buildd", "buildkit-operator-gateway"] {
        farm.rolled_out(name).await?;
    }
    same(&farm.normal().await?, &installed.normal().await?);

    // Kept byte for byte, and not even written, when the step runs again.
    let (secrets, before) = (farm.secrets().await?, farm.writes().await?.len());
    let run = farm.bootstrap().await?.expect(0);
    assert!(!run.out.contains("written"), "{}", run.out);
    for value in secrets.values() {
        assert!(!run.out.contains(String::from_utf8_lossy(value).trim()), "a value is shown");
    }
    assert_eq!(texts(&farm.writes().await?[before..]), [""; 0]);
    // An installation upon it takes its fields into its care, and changes no object.
    let plan: Value = serde_json::from_str(&farm.run("plan", &["--output=json"]).await?.expect(3).out)?;
    let levels = plan["levels"].as_array().into_iter().flatten();
    for change in levels.flat_map(|level| level["changes"].as_array().into_iter().flatten()) {
        assert_ne!(change["action"], "create", "{change}");
        let fields = change["changes"].as_array().into_iter().flatten();
        assert!(fields.clone().all(|field| field["path"] == ".metadata.managedFields"), "{change}");
    }
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.secrets().await?, secrets);

    // What kubectl had applied is ours now, and uninstalling knows what the step has left.
    farm.init(&["--set=server.resources.requests.cpu=150m"]).await?.expect(0);
    let removal = farm.found("uninstall", &["--dry-run"]).await?.expect(3);
    let Namespaces { operator, builds, .. } = &farm.names;
    for gone in [
        format!("delete  Job {operator}/buildkit-operator-bootstrap-"),
        format!("delete  ServiceAccount {operator}/buildkit-operator-bootstrap"),
        format!("delete  RoleBinding {builds}/buildkit-operator-bootstrap"),
        format!("delete  Namespace {operator}"),
        format!("delete  Namespace {builds}"),
    ] {
        assert!(removal.out.contains(&gone), "{gone}: {}", removal.out);
    }

    // What the step may not do it names.
    let role = farm.kubectl(&["-n", &farm.names.builds, "delete", "role", "buildkit-operator-bootstrap"]).await?;
    role.expect(0);
    farm.bootstrap().await?.expect(1).says("may not get secrets in namespace");
    Ok(())
}

pub(crate) async fn kustomize_applies_what_init_would(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (installed, farm) = (Farm::new(Arc::clone(&cluster), "init-k"), Farm::new(cluster, "kustom"));
    installed.init(&[]).await?.expect(0);
    let scratch = tempfile::tempdir()?;
    let root = scratch.path().display().to_string();
    farm.export(scratch.path(), &["--format=kustomize"]).await?;
    let built = farm.kubectl(&["kustomize", &root]).await?.expect(0);
    let mut levels = String::new();
    for level in Runlevel::ALL {
        let folder = scratch.path().join(level.to_string());
        if !folder.exists() {
            continue;
        }
        let folder = folder.display().to_string();
        levels.push_str(&farm.kubectl(&["kustomize", &folder]).await?.expect(0).out);
        farm.apply(&["-k", &folder]).await?;
        if level == Runlevel::Rc1 {
            farm.bootstrap().await?.expect(0);
        }
    }
    let kinds =
        |text: &str| text.lines().filter(|line| line.starts_with("kind: ")).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(kinds(&built.out), kinds(&levels));
    for name in ["buildkit-operator-buildd", "buildkit-operator-gateway"] {
        farm.rolled_out(name).await?;
    }
    same(&farm.normal().await?, &installed.normal().await?);
    Ok(())
}

/// Owns the cluster: definitions of other projects are applied.
pub(crate) async fn flux_and_argo_cd_take_what_is_exported(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "gitops");
    for definition in ["kustomize.toolkit.fluxcd.io_kustomizations.yaml", "application-crd.yaml"] {
        let file = cluster.tools().file("crds").join(definition);
        ensure!(file.is_file(), "\"{}\" is missing\n\nhint: run `make tools`", file.display());
        farm.apply(&["-f", &file.display().to_string()]).await?;
    }
    let names = ["kustomizations.kustomize.toolkit.fluxcd.io", "applications.argoproj.io"];
    for name in names {
        farm.defined(name).await?;
    }
    let scratch = tempfile::tempdir()?;
    let (flux, argo) = (scratch.path().join("flux"), scratch.path().join("argocd"));
    farm.export(&flux, &["--format=flux", "--flux-namespace=default", "--path=clusters/prod"]).await?;
    let url = "--repo=https://git.example.org/farm.git";
    farm.export(&argo, &["--format=argocd", url, "--argocd-namespace=default"]).await?;
    farm.apply(&["--dry-run=server", "-k", &flux.join("flux").display().to_string()]).await?;
    for what in ["root.yaml", "apps"] {
        farm.apply(&["--dry-run=server", "-f", &argo.join(what).display().to_string()]).await?;
    }
    // The schemas are in force: an unknown field is refused.
    let path = flux.join("flux/rc0.yaml");
    let text = std::fs::read_to_string(&path)?;
    std::fs::write(&path, text.replace("retryInterval", "retryIntervals"))?;
    let refused =
        ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", &path.display().to_string()];
    farm.kubectl(&refused).await?.expect(1).says("retryIntervals");

    // The manifests themselves: those of Flux as kustomizations, those of Argo CD as they are.
    for (root, flag) in [(&flux, "-k"), (&argo, "-f")] {
        farm.names.create(&farm.client()).await.or_else(|error| match root == &argo {
            true => Ok(()),
            false => Err(error),
        })?;
        for level in ["rc0", "rc1", "rc3", "rc4"] {
            let folder = root.join(level).display().to_string();
            farm.apply(&["--dry-run=server", "--force-conflicts", flag, &folder]).await?;
        }
    }
    for name in names {
        farm.kubectl(&["delete", "crd", name]).await?.expect(0);
    }
    Ok(())
}
