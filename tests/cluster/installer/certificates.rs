//! Certificates in a cluster: who makes them, and how they are replaced.

use bko_install::certificate::{LiveCertificate, SecretData};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use serde_json::json;

use super::*;

impl Farm {
    async fn certs(&self, args: &[&str]) -> anyhow::Result<Run> {
        Run::new(self.certs_command(args).output().await?)
    }

    fn certs_command(&self, args: &[&str]) -> Command {
        let mut command = bko_install();
        command.arg("certs").args(args).args(["--operator-namespace", &self.names.operator]);
        command.arg("--kubeconfig").arg(self.cluster.kubeconfig()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    async fn certificate(&self, namespace: &str, name: &str) -> anyhow::Result<(SecretData, String)> {
        let secret = Api::<Secret>::namespaced(self.client(), namespace).get(name).await?;
        let version = secret.metadata.resource_version.clone().unwrap_or_default();
        Ok((secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect(), version))
    }

    /// An installation finds every object as it shall be; its record may follow.
    async fn changes_nothing(&self) -> anyhow::Result<()> {
        let secrets = self.secrets().await?;
        let init = self.init(&[]).await?.expect(0);
        assert!(init.out.contains("plan: 0 to create, 0 to configure"), "{}", init.out);
        assert_eq!(self.secrets().await?, secrets);
        Ok(())
    }

    async fn daemon(&self) -> anyhow::Result<SecretData> {
        Ok(self.certificate(&self.names.builds, "buildkit-daemon-certs").await?.0)
    }

    async fn stage(&self) -> anyhow::Result<String> {
        let run = self.certs(&["list", "--output=json", "--namespace", &self.names.builds]).await?.expect(0);
        let rows: Value = serde_json::from_str(&run.out)?;
        let ca = rows.as_array().into_iter().flatten().find(|row| row["name"] == "ca").context("no authority")?;
        Ok(ca["rotation"].as_str().unwrap_or_default().chars().take(7).collect())
    }
}

fn trusted(data: &SecretData) -> usize {
    LiveCertificate::read_leaf(data).unwrap().trusted.len()
}

pub(crate) async fn a_certificate_is_renewed_when_asked_for_and_only_that(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "issue");
    farm.init(&[]).await?.expect(0);
    let before = farm.secrets().await?;
    let run = farm.certs(&["issue"]).await?.expect(0);
    assert!(!run.out.contains("written"), "{}", run.out);
    assert_eq!(farm.secrets().await?, before);
    farm.certs(&["issue", "--renew=daemon"]).await?.expect(0);
    let after = farm.secrets().await?;
    let changed: Vec<&String> = after.keys().filter(|key| before.get(*key) != after.get(*key)).collect();
    let daemon = format!("{}/buildkit-daemon-certs", farm.names.builds);
    assert_eq!(changed, [&format!("{daemon}/cert.pem"), &format!("{daemon}/key.pem")]);
    farm.certs(&["issue", "--renew=ca"]).await?.expect(2).says("certs rotate");
    // What somebody deleted is made again, tokens too.
    let tokens: Api<Secret> = Api::namespaced(farm.client(), &farm.names.operator);
    tokens.delete("buildkit-operator-internal", &Default::default()).await?;
    let run = farm.certs(&["issue"]).await?.expect(0);
    assert!(run.out.contains("buildkit-operator-internal  make: there is no such Secret"), "{}", run.out);
    assert_eq!(run.out.matches("written").count(), 1, "{}", run.out);
    farm.changes_nothing().await?;
    Ok(())
}

pub(crate) async fn an_authority_is_replaced_stage_by_stage(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "rotate");
    farm.init(&[]).await?.expect(0);
    let first = farm.daemon().await?;
    farm.certs(&["rotate", "--continue"]).await?.expect(5).says("no rotation has begun");
    farm.certs(&["rotate"]).await?.expect(0).says("stage 1 of 3");
    let second = farm.daemon().await?;
    assert_eq!((trusted(&second), farm.stage().await?.as_str()), (2, "stage 1"));
    // Again, and an installation in between: nothing moves.
    farm.certs(&["rotate"]).await?.expect(0).says("stage 1 of 3");
    farm.certs(&["rotate", "--overlap=1h"]).await?.expect(0).says("stage 1 of 3");
    farm.changes_nothing().await?;
    farm.certs(&["rotate", "--continue"]).await?.expect(5).says("nodes show its Secrets from");
    farm.certs(&["rotate", "--continue", "--force"]).await?.expect(0).says("stage 2 of 3");
    let third = farm.daemon().await?;
    assert_eq!((trusted(&third), farm.stage().await?.as_str()), (2, "stage 2"));
    let signers = |data: &SecretData| LiveCertificate::read_leaf(data).unwrap().trusted[0].clone();
    assert_ne!(signers(&second), signers(&third), "the new one comes first");
    farm.certs(&["rotate", "--abort"]).await?.expect(5).says("the new authority signs already");
    farm.certs(&["rotate", "--continue", "--force"]).await?.expect(0).says("no rotation is under way");
    let last = farm.daemon().await?;
    assert_eq!((trusted(&last), farm.stage().await?.as_str()), (1, ""));
    assert_ne!(signers(&first), signers(&last));
    farm.changes_nothing().await?;
    Ok(())
}

/// Daemons read whom to trust when they start.
pub(crate) async fn daemons_that_do_not_know_the_new_authority_stop_a_rotation(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "ignorant");
    farm.init(&[]).await?.expect(0);
    farm.certs(&["rotate"]).await?.expect(0);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "buildkitd-p1-0", "labels": {"app.kubernetes.io/component": "buildkitd"}},
        "spec": {"containers": [{"name": "buildkitd", "image": "moby/buildkit:v1"}]},
    }))?;
    let pods: Api<Pod> = Api::namespaced(farm.client(), &farm.names.builds);
    pods.create(&PostParams::default(), &pod).await?;
    let secrets: Api<Secret> = Api::namespaced(farm.client(), &farm.names.operator);
    let since = |seconds: i64| {
        let at = Timestamp::from_second(Timestamp::now().as_second() - seconds).unwrap();
        json!({"stringData": {"rotation-since": at.to_string()}})
    };
    let as_us = PatchParams { field_manager: Some("bko-install".into()), ..PatchParams::default() };
    // It was there when nodes began to show the new Secrets.
    secrets.patch("buildkit-operator-ca", &as_us, &Patch::Merge(since(118))).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    farm.certs(&["rotate", "--continue"]).await?.expect(5).says("buildkitd-p1-0");
    // It is younger than that.
    secrets.patch("buildkit-operator-ca", &as_us, &Patch::Merge(since(3600))).await?;
    farm.certs(&["rotate", "--overlap=1h"]).await?.expect(0).says("stage 2 of 3");
    Ok(())
}

/// By the server's own service account, whose role is the installation's.
pub(crate) async fn the_server_renews_what_is_about_to_end(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "renewal");
    farm.init(&[]).await?.expect(0);
    let before = farm.secrets().await?;
    let scratch = tempfile::tempdir()?;
    let kubeconfig = farm.as_account("buildkit-operator-buildd", scratch.path()).await?;
    let mut declared: Value = serde_json::from_str(&farm.declared().await?)?;
    // As if it were almost at its end.
    for certificate in declared["certificates"].as_array_mut().into_iter().flatten() {
        if certificate["name"] == "daemon" {
            certificate["renewBefore"] = certificate["lifetime"].clone();
        }
    }
    let file = scratch.path().join("secrets.json");
    std::fs::write(&file, declared.to_string())?;
    let (file, builds, operator) = (file.display().to_string(), &farm.names.builds, &farm.names.operator);
    let flags = ["--namespace", builds, "--pod-namespace", operator, "--renew-certificates", &file];
    let server = crate::farm::Server::through(&kubeconfig, &flags, &[]).await?;
    let key = format!("{builds}/buildkit-daemon-certs/cert.pem");
    let secrets: Api<Secret> = Api::namespaced(farm.client(), builds);
    let renewed = |secret: Option<&Secret>| {
        let live = secret.and_then(|secret| secret.data.as_ref()?.get("cert.pem"));
        live.is_some_and(|live| live.0 != before[&key])
    };
    let wait = kube::runtime::wait::await_condition(secrets, "buildkit-daemon-certs", renewed);
    tokio::time::timeout(Duration::from_secs(30), wait).await.context("it is not renewed")??;
    let after = farm.secrets().await?;
    let changed: Vec<&String> = after.keys().filter(|key| before.get(*key) != after.get(*key)).collect();
    assert_eq!(changed, [&key, &key.replace("cert.pem", "key.pem")]);
    let live = LiveCertificate::read_leaf(&farm.daemon().await?)?;
    assert!(live.is_signed_by(&live.trusted[0]));
    server.terminate().await?;
    farm.changes_nothing().await
}

/// Wherever it is cut, the same command completes it, and no authority is lost.
pub(crate) async fn a_rotation_is_completed_after_a_kill(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "cut");
    farm.init(&[]).await?.expect(0);
    let steps: [&[&str]; 3] = [&["rotate"], &["rotate", "--continue", "--force"], &["rotate", "--continue", "--force"]];
    for (number, step) in steps.into_iter().enumerate() {
        for delay in [1, 20, 45, 70] {
            let mut child = farm.certs_command(step).spawn()?;
            tokio::select! {
                status = child.wait() => drop(status?),
                () = tokio::time::sleep(Duration::from_millis(delay * 3)) => child.kill().await?,
            }
            let daemon = farm.daemon().await?;
            let live = LiveCertificate::read_leaf(&daemon)?;
            assert!(live.trusted.iter().any(|authority| live.is_signed_by(authority)), "cut in stage {number}");
            if farm.stage().await? == format!("stage {}", number + 2) || (number == 2 && farm.stage().await?.is_empty())
            {
                break;
            }
        }
        // Whatever stage it got to, what is cut is completed by looking at it.
        farm.certs(&["issue"]).await?.expect(0);
        let run = farm.certs(&["issue"]).await?.expect(0);
        assert!(!run.out.contains("written"), "{}", run.out);
    }
    for _ in 0..3 {
        if farm.stage().await?.is_empty() {
            break;
        }
        farm.certs(&["rotate", "--continue", "--force"]).await?.expect(0);
    }
    assert_eq!((trusted(&farm.daemon().await?), farm.stage().await?.as_str()), (1, ""));
    farm.changes_nothing().await?;
    Ok(())
}

pub(crate) async fn secrets_that_others_make_are_asked_for_with_the_command(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let (own, farm) = (Farm::new(Arc::clone(&cluster), "giver"), Farm::new(cluster, "provided"));
    own.init(&[]).await?.expect(0);
    let set = ["--set=certs.mode=provided", "--set=auth.generate=false"];
    let run = farm.init(&set).await?.expect(1);
    for name in
        ["buildkit-daemon-certs", "buildkit-client-certs", "buildkit-operator-token", "buildkit-operator-internal"]
    {
        run.says(name);
    }
    run.says("kubectl create namespace");
    assert_eq!(texts(&farm.writes().await?), [""; 0], "nothing was written");
    farm.names.create(&farm.client()).await?;
    for (from, to, names) in [
        (&own.names.builds, &farm.names.builds, ["buildkit-daemon-certs", "buildkit-client-certs"]),
        (&own.names.operator, &farm.names.operator, ["buildkit-operator-token", "buildkit-operator-internal"]),
    ] {
        for name in names {
            let given = Api::<Secret>::namespaced(farm.client(), from).get(name).await?;
            let secret: Secret = serde_json::from_value(json!({"metadata": {"name": name}, "data": given.data}))?;
            Api::namespaced(farm.client(), to).create(&PostParams::default(), &secret).await?;
        }
    }
    let before = farm.secrets().await?;
    let run = farm.init(&set).await?.expect(0);
    // They are another farm's: its names are told of, and it is for their keeper to change them.
    run.says("it does not cover");
    assert_eq!(farm.secrets().await?, before);
    let again = farm.init(&[]).await?.expect(0);
    assert!(again.out.contains("nothing to write"), "{}", again.out);
    Ok(())
}

/// cert-manager is played: it fills Secrets and tells of it.
pub(crate) async fn cert_manager_is_waited_for(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "certman");
    let set = ["--set=certs.mode=cert-manager", &format!("--set=certs.certManagerNamespace={}", farm.names.system)];
    farm.init(&set).await?.expect(1).says("the API server has no kind");
    farm.bring_cert_manager().await?;
    let mut run = farm.spawn("init", &[&["--timeout=60s"], &set[..]].concat())?;
    let certificates = [
        (&farm.names.system, "buildkit-operator-ca"),
        (&farm.names.operator, "buildkit-operator-api-certs"),
        (&farm.names.builds, "buildkit-daemon-certs"),
        (&farm.names.builds, "buildkit-client-certs"),
    ];
    let kind = |kind: &str| ApiResource::from_gvk(&GroupVersionKind::gvk("cert-manager.io", "v1", kind));
    for name in ["buildkit-operator-selfsigned", "buildkit-operator-ca"] {
        tell_ready(&Api::all_with(farm.client(), &kind("ClusterIssuer")), name).await?;
    }
    for (namespace, name) in certificates {
        assert!(run.try_wait()?.is_none(), "it waits for every one");
        tell_ready(&Api::namespaced_with(farm.client(), namespace, &kind("Certificate")), name).await?;
    }
    let output = Run::new(run.wait_with_output().await?)?.expect(0);
    assert!(output.out.contains("waiting for Certificate"), "{}", output.out);
    assert!(farm.secrets().await?.keys().all(|key| !key.contains("certs")), "we make none");
    let get = ["-n", &farm.names.operator, "get", "deploy", "buildkit-operator-buildd", "-o", "yaml"];
    let deployment = farm.kubectl(&get).await?.expect(0).out;
    assert!(deployment.contains("- --cert-manager-certs\n") && deployment.contains("api/tls.crt"), "{deployment}");
    let again = farm.init(&[]).await?.expect(0);
    assert!(again.out.contains("nothing to write"), "{}", again.out);
    farm.take_cert_manager_away().await
}

/// Owns the cluster: definitions of cert-manager are applied.
pub(crate) async fn the_gitops_profile_is_taken_by_the_api_server(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(cluster, "profiled-gitops");
    farm.bring_cert_manager().await?;
    farm.names.create(&farm.client()).await?;
    let issuers = format!("--set=certs.certManagerNamespace={}", farm.names.system);
    let args = ["--profile", "gitops", "--set=gateway.domains=builds.example.com", &issuers];
    farm.run_profile("plan", &args).await?.expect(1).says("buildkit-operator-token");
    for name in ["buildkit-operator-token", "buildkit-operator-internal"] {
        let secret = json!({"metadata": {"name": name}, "stringData": {"token": "0123456789abcdef"}});
        let secrets: Api<Secret> = Api::namespaced(farm.client(), &farm.names.operator);
        secrets.create(&PostParams::default(), &serde_json::from_value(secret)?).await?;
    }
    let plan = farm.run_profile("plan", &args).await?.expect(3);
    for kind in ["Deployment", "Certificate", "ClusterIssuer", "NetworkPolicy"] {
        assert!(plan.out.contains(&format!("create     {kind}")), "{kind}: {}", plan.out);
    }
    assert!(!plan.err.contains("fail "), "{}", plan.err);
    let check = farm.run_profile("check", &args).await?.expect(0);
    assert!(check.out.contains(" 0 failed"), "{}", check.out);
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    let scratch = tempfile::tempdir()?;
    let export = [&["--format=plain"], &args[..]].concat();
    farm.export_profile(scratch.path(), &export).await?;
    farm.apply(&["--dry-run=server", "--force-conflicts", "-f", &scratch.path().display().to_string()]).await?;
    farm.take_cert_manager_away().await
}

impl Farm {
    async fn bring_cert_manager(&self) -> anyhow::Result<()> {
        for name in CERT_MANAGER {
            let file = self.cluster.tools().file("crds").join(format!("cert-manager.io_{name}.yaml"));
            anyhow::ensure!(file.is_file(), "\"{}\" is missing\n\nhint: run `make tools`", file.display());
            self.kubectl(&["apply", "--server-side", "-f", &file.display().to_string()]).await?.expect(0);
            self.defined(&format!("{name}.cert-manager.io")).await?;
        }
        Ok(())
    }

    async fn take_cert_manager_away(&self) -> anyhow::Result<()> {
        for name in CERT_MANAGER {
            self.kubectl(&["delete", "crd", &format!("{name}.cert-manager.io")]).await?.expect(0);
        }
        Ok(())
    }
}

const CERT_MANAGER: [&str; 3] = ["certificates", "issuers", "clusterissuers"];

/// As cert-manager does when it has issued: the condition, with its generation.
async fn tell_ready(api: &Api<DynamicObject>, name: &str) -> anyhow::Result<()> {
    let there =
        kube::runtime::wait::await_condition(api.clone(), name, |object: Option<&DynamicObject>| object.is_some());
    let object = tokio::time::timeout(Duration::from_secs(30), there).await??.context("no object")?;
    let status = json!({"status": {"conditions": [{
        "type": "Ready", "status": "True", "reason": "Ready", "message": "up to date",
        "observedGeneration": object.metadata.generation, "lastTransitionTime": Timestamp::now().to_string(),
    }]}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}
