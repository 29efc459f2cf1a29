//! What the installation itself says: the arguments of the server's Deployment,
//! ours or the reference's.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use kube::Api;

use super::Place;
use crate::cli::exit::Failure;
use crate::cluster::client::plain;
use crate::names::{BUILDS_NAMESPACE, DAEMON_PORT, domain_or_nothing};

/// The facts, or their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Installed {
    /// Namespace of the daemons.
    pub(in crate::cli) namespace: String,
    /// Secret with the token; none where everybody may call.
    pub(in crate::cli) token_secret: Option<String>,
    /// First domain of the gateway.
    pub(in crate::cli) gateway_host: Option<String>,
    /// Its port.
    pub(in crate::cli) gateway_port: u16,
    /// Whether the gateway relays `api.<domain>` to the routing API.
    pub(in crate::cli) api_tls: bool,
    /// The Deployment that could not be read for want of permission.
    pub(in crate::cli) unread: Option<String>,
}

impl Default for Installed {
    fn default() -> Self {
        Self {
            namespace: BUILDS_NAMESPACE.to_owned(),
            token_secret: Some(TOKEN_SECRET.to_owned()),
            gateway_host: None,
            gateway_port: DAEMON_PORT,
            api_tls: false,
            unread: None,
        }
    }
}

/// The installer's name for it.
const TOKEN_SECRET: &str = "buildkit-operator-token";
const SERVER: &str = "buildkit-operator-buildd";
const TOKEN_VARIABLE: &str = "BUILDKIT_OPERATOR_AUTH_TOKEN";

/// Reads them. Who may only read Secrets gets the defaults.
pub(in crate::cli) async fn read(client: &kube::Client, place: &Place) -> Result<Installed, Failure> {
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), &place.operator_namespace);
    let path = format!("{}/{SERVER}", place.operator_namespace);
    match deployments.get_opt(SERVER).await {
        Ok(Some(deployment)) => Ok(facts(&deployment)),
        Ok(None) => Ok(Installed::default()),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            Ok(Installed { unread: Some(path), ..Installed::default() })
        }
        Err(error) => Err(plain(&error).context(format!("cannot read Deployment \"{path}\"")).into()),
    }
}

fn facts(deployment: &Deployment) -> Installed {
    let mut facts = Installed::default();
    let pod = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
    let Some(server) =
        pod.and_then(|pod| pod.containers.iter().find(|container| flag(container, "--namespace").is_some()))
    else {
        return facts;
    };
    if let Some(namespace) = flag(server, "--namespace") {
        facts.namespace = namespace;
    }
    let host = flag(server, "--gateway-host").and_then(|host| domain_or_nothing(&host).ok());
    facts.gateway_host = host.filter(|host| !host.is_empty());
    let port = flag(server, "--gateway-port").and_then(|port| port.parse().ok()).filter(|port| *port > 0);
    facts.gateway_port = port.or_else(|| flag(server, "--port")?.parse().ok()).unwrap_or(DAEMON_PORT);
    facts.api_tls = flag(server, "--api-tls-listen").is_some();
    facts.token_secret = mounted_token(server, pod).or_else(|| token_variable(server));
    facts
}

/// The Secret that is mounted as the folder of tokens.
fn mounted_token(server: &Container, pod: Option<&PodSpec>) -> Option<String> {
    let folder = flag(server, "--auth-token-dir")?;
    let mount = server.volume_mounts.iter().flatten().find(|mount| mount.mount_path == folder)?;
    let volume = pod?.volumes.iter().flatten().find(|volume| volume.name == mount.name)?;
    volume.secret.as_ref()?.secret_name.clone()
}

/// The Secret that the token's variable comes from, as the reference has it.
fn token_variable(server: &Container) -> Option<String> {
    let variable = server.env.iter().flatten().find(|variable| variable.name == TOKEN_VARIABLE)?;
    let key = variable.value_from.as_ref().and_then(|from| from.secret_key_ref.as_ref());
    Some(key.map_or_else(|| TOKEN_SECRET.to_owned(), |key| key.name.clone()))
}

/// The value of `--flag=value`.
fn flag(container: &Container, name: &str) -> Option<String> {
    let mut args = container.args.iter().flatten().chain(container.command.iter().flatten());
    args.find_map(|arg| arg.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(args: &str, env: &str) -> Deployment {
        let yaml = format!(
            "spec: {{selector: {{}}, template: {{spec: {{containers: [{{name: other}}, {{name: buildd, args: {args}, env: {env}}}]}}}}}}"
        );
        serde_yaml::from_str(&yaml).unwrap()
    }

    #[test]
    fn the_server_s_arguments_are_the_facts() {
        let args = "[server, --namespace=builds, --port=1234, --gateway-host=b.example.org, --gateway-port=443, '--api-tls-listen=:8443']";
        let env = "[{name: BUILDKIT_OPERATOR_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: mine, key: token}}}]";
        let want = Installed {
            namespace: "builds".into(),
            token_secret: Some("mine".into()),
            gateway_host: Some("b.example.org".into()),
            gateway_port: 443,
            api_tls: true,
            unread: None,
        };
        assert_eq!(facts(&deployment(args, env)), want);
    }

    #[test]
    fn the_token_may_be_mounted_as_a_folder() {
        let yaml = "spec: {selector: {}, template: {spec: {containers: [{name: buildd, \
            args: [--namespace=builds, --auth-token-dir=/tokens], \
            volumeMounts: [{name: tls, mountPath: /tls}, {name: token, mountPath: /tokens}]}], \
            volumes: [{name: tls, secret: {secretName: tls}}, {name: token, secret: {secretName: mine}}]}}}";
        assert_eq!(facts(&serde_yaml::from_str(yaml).unwrap()).token_secret, Some("mine".to_owned()));
    }

    #[test]
    fn an_open_farm_without_a_gateway_has_neither() {
        let found = facts(&deployment("[--namespace=builds, --gateway-port=0, --port=4321]", "[]"));
        assert_eq!(
            (found.token_secret, found.gateway_host, found.gateway_port, found.api_tls),
            (None, None, 4321, false)
        );
    }
}
