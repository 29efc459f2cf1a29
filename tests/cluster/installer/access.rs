//! What a CI system is handed, and its token's rotation.

use kube::api::PostParams;
use serde_json::json;

use super::*;

impl Farm {
    /// A command that is told where the control plane is.
    async fn told(&self, args: &[&str], kubeconfig: &Path) -> anyhow::Result<Run> {
        let mut command = bko_install();
        command.args(args).args(["--operator-namespace", &self.names.operator]).arg("--kubeconfig").arg(kubeconfig);
        Run::new(command.stdin(Stdio::null()).output().await?)
    }

    async fn secret(&self, key: &str) -> anyhow::Result<Option<String>> {
        let name = format!("{}/buildkit-operator-token/{key}", self.names.operator);
        Ok(self.secrets().await?.remove(&name).map(String::from_utf8).transpose()?)
    }
}

pub(crate) async fn credentials_are_what_is_installed_and_a_rotation_keeps_the_old_token(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "access");
    farm.init(&["--set=gateway.domains=[builds.example.org]", "--set=gateway.externalPort=4321"]).await?.expect(0);
    let kubeconfig = cluster.kubeconfig();
    let run = farm.told(&["credentials", "--format=json"], kubeconfig).await?.expect(0);
    let handed: Value = serde_json::from_str(&run.out)?;
    let secrets = farm.secrets().await?;
    for (field, file) in [("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "key.pem")] {
        let stored = &secrets[&format!("{}/buildkit-client-certs/{file}", farm.names.builds)];
        assert_eq!(handed[field].as_str().map(str::as_bytes), Some(stored.as_slice()), "{field}");
    }
    let first = farm.secret("token").await?.context("no token")?;
    assert_eq!(handed["token"], first.as_str());
    assert_eq!((&handed["gatewayHost"], &handed["gatewayPort"]), (&json!("builds.example.org"), &json!(4321)));
    assert!(handed["expires"].as_str().is_some_and(|text| text.parse::<Timestamp>().is_ok()), "{}", run.out);
    assert_eq!(handed["url"].as_str().is_some_and(|url| url.contains(".svc")), !run.err.is_empty(), "{}", run.err);

    // Whatever is read of a Secret is shown to nobody else.
    for args in [&["token", "rotate"][..], &["token", "rotate", "--drop-previous"]] {
        let run = farm.told(args, kubeconfig).await?.expect(0);
        for (name, value) in farm.secrets().await? {
            let value = String::from_utf8_lossy(&value);
            assert!(!run.out.contains(value.trim()) && !run.err.contains(value.trim()), "the value of {name} is shown");
        }
    }
    let second = farm.secret("token").await?.context("no token")?;
    assert!(first != second && farm.secret("previous").await?.is_none());
    farm.told(&["token", "rotate", "--drop-previous"], kubeconfig).await?.expect(0).says("nothing to do");
    farm.told(&["token", "rotate"], kubeconfig).await?.expect(0);
    assert_eq!(farm.secret("previous").await?, Some(second));
    // The installer keeps both.
    farm.init(&[]).await?.expect(0);
    assert!(farm.secret("previous").await?.is_some());
    Ok(())
}

pub(crate) async fn who_may_only_read_the_secrets_names_the_rest(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "secretsonly");
    farm.init(&["--set=gateway.domains=[builds.example.org]"]).await?.expect(0);
    let Namespaces { operator, builds, .. } = &farm.names;
    for (namespace, secret) in [(operator, "buildkit-operator-token"), (builds, "buildkit-client-certs")] {
        let role = json!({"metadata": {"name": "handover"}, "rules": [
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get"]}]});
        let binding = json!({"metadata": {"name": "handover"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "handover"},
            "subjects": [{"kind": "ServiceAccount", "name": "handover", "namespace": operator}]});
        let (parameters, client) = (PostParams::default(), farm.client());
        Api::<k8s_openapi::api::rbac::v1::Role>::namespaced(client.clone(), namespace)
            .create(&parameters, &serde_json::from_value(role)?)
            .await?;
        Api::<k8s_openapi::api::rbac::v1::RoleBinding>::namespaced(client, namespace)
            .create(&parameters, &serde_json::from_value(binding)?)
            .await?;
    }
    let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(farm.client(), operator);
    accounts
        .create(&PostParams::default(), &serde_json::from_value(json!({"metadata": {"name": "handover"}}))?)
        .await?;
    let request = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
    let token = accounts.create_token_request("handover", &PostParams::default(), &request).await?;
    let token = token.status.and_then(|status| status.token).context("no token")?;
    let scratch = tempfile::tempdir()?;
    let kubeconfig = scratch.path().join("kubeconfig");
    kubeconfig_with_token(&cluster, &token, &kubeconfig)?;

    let args = ["credentials", "--format=env", "--namespace", builds, "--gateway-host", "builds.example.org"];
    let run = farm.told(&[&args[..], &["--url", "https://farm.example.org"]].concat(), &kubeconfig).await?.expect(0);
    assert!(run.out.contains("export BUILDKIT_OPERATOR_BUILDD_URL='https://farm.example.org'\n"), "{}", run.out);
    assert!(run.out.contains("export BUILDKIT_OPERATOR_GATEWAY_HOST='builds.example.org'\n"), "{}", run.out);
    assert!(run.err.is_empty(), "{}", run.err);
    farm.told(&["credentials", "--namespace", builds, "--client-secret", "other"], &kubeconfig)
        .await?
        .expect(1)
        .says("not allowed to read Secret");
    farm.told(&["token", "rotate"], &kubeconfig).await?.expect(1).says("not allowed to write Secret");
    Ok(())
}
