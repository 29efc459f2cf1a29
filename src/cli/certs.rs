//! `bko-install certs`.

pub(super) mod export;
mod list;

use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;

use super::bundle::{self, BundleArgs, Recorded};
use super::exit::{Code, Failure};
use super::{Global, block_on};
use crate::certificate::{CertificateSpec, LiveSecret};
use crate::cluster::client::{connect, plain};
use crate::manifest;
use crate::names::{BUILDS_NAMESPACE, OPERATOR_NAMESPACE, object_name};

/// List and export certificates.
#[derive(Debug, Subcommand)]
pub enum CertsCommand {
    /// List the certificates in the cluster, with their age and what is wrong with them
    ///
    /// The verdict is what the next `cluster init` would do: keep, issue, renew, provided
    /// (somebody else's, never written) or blocked (nothing here can sign it). Whether their names
    /// suffice is judged by `cluster plan`, which knows the gateway's domains.
    List(list::ListArgs),
    /// Write the client certificate to files, for a CI system: ca.pem, cert.pem, key.pem
    ///
    /// The files have mode 0600, and a directory that is made has mode 0700. Files with other
    /// content are not overwritten, and then nothing is written. Prints the paths.
    Export(export::ExportArgs),
}

/// Where the Secrets are.
#[derive(Clone, Debug, Args)]
struct Namespaces {
    /// Namespace of the daemons and their certificates
    #[arg(long, value_name = "NAMESPACE", default_value = BUILDS_NAMESPACE)]
    namespace: String,
    /// Namespace of the control plane and the authority
    #[arg(long, value_name = "NAMESPACE", default_value = OPERATOR_NAMESPACE)]
    operator_namespace: String,
}

/// Runs the command.
pub fn run(command: CertsCommand, global: &Global) -> Result<(), Failure> {
    block_on(async {
        let client = connect(global).await?;
        match command {
            CertsCommand::List(args) => list::run(args, client).await,
            CertsCommand::Export(args) => export::run(args, client, global).await,
        }
    })
}

/// No certificate names an image.
const UNUSED_IMAGE: &str = "bko-install:none";

/// The declared certificates, without the names that they must cover: those
/// come from the values of the installation, which are not known here.
fn declared(namespaces: &Namespaces) -> Result<Vec<CertificateSpec>, Failure> {
    let set = [("operator", &namespaces.operator_namespace), ("builds", &namespaces.namespace)];
    let set = set.map(|(name, namespace)| format!("namespaces.{name}={namespace}")).to_vec();
    let args = BundleArgs { set, ..BundleArgs::default() };
    let (profile, values) = args.resolve(Recorded::default(), UNUSED_IMAGE)?;
    let mut specs = manifest::certificates(bundle::bundle()?, &profile, &values).map_err(bundle::usage)?;
    specs.sort_by_key(|spec| !spec.is_authority());
    for spec in &mut specs {
        spec.dns_names.clear();
        spec.ip_addresses.clear();
    }
    Ok(specs)
}

/// The Secret, if it is there.
pub(super) async fn fetch(client: &kube::Client, namespace: &str, name: &str) -> Result<Option<LiveSecret>, Failure> {
    Ok(fetch_secret(client, namespace, name).await?.map(LiveSecret::from))
}

/// The same with all that the API server says of it.
pub(super) async fn fetch_secret(
    client: &kube::Client,
    namespace: &str,
    name: &str,
) -> Result<Option<Secret>, Failure> {
    object_name(name).map_err(|error| Failure::new(Code::Usage, error))?;
    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    secrets.get_opt(name).await.map_err(|error| refused("get", namespace, name, &error))
}

/// What the API server's refusal to `get` or `patch` a Secret is about.
pub(super) fn refused(verb: &str, namespace: &str, name: &str, error: &kube::Error) -> Failure {
    let what = format!("{} Secret \"{namespace}/{name}\"", if verb == "get" { "read" } else { "write" });
    if matches!(error, kube::Error::Api(status) if status.code == 403) {
        let hint = format!("check with: kubectl --namespace {namespace} auth can-i {verb} secret/{name}");
        return Failure::new(Code::Failed, anyhow::anyhow!("not allowed to {what}")).hint(hint);
    }
    plain(error).context(format!("cannot {what}")).into()
}
