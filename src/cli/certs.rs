//! `bko-install certs`.

pub(super) mod export;
mod issue;
mod list;
mod rotate;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;

use super::bundle::{self, BundleArgs, Recorded};
use super::exit::{Code, Failure};
use super::{Global, block_on};
use crate::certificate::{CertificateSpec, LiveSecret};
use crate::cluster::client::{connect, plain};
use crate::manifest::{self, Declarations};
use crate::names::{BUILDS_NAMESPACE, OPERATOR_NAMESPACE, object_name};

/// List, export, make and replace certificates.
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
    /// Make or renew in the cluster, now, what the next `cluster init` would
    ///
    /// Certificates by their declarations in the cluster, and tokens that are missing. What is as
    /// wanted is not written. A daemon reads its certificate when it starts.
    Issue(issue::IssueArgs),
    /// Replace the certificate authority while builds go on, in three stages
    ///
    /// 1: there is a new authority, and everybody trusts both; the old one signs. 2: the new one
    /// signs. 3: the old one is trusted no more. The first call begins; every other one completes
    /// the stage that it finds. Between stages, export the client certificate again
    /// (`certs export`), so that no client trusts the old authority alone, and let daemons end that
    /// were started before: they read whom to trust when they start. `certs list` tells the stage.
    Rotate(rotate::RotateArgs),
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
        match command {
            CertsCommand::List(args) => list::run(args, connect(global).await?).await,
            CertsCommand::Export(args) => export::run(args, connect(global).await?, global).await,
            CertsCommand::Issue(args) => issue::run(args, global).await,
            CertsCommand::Rotate(args) => rotate::run(args, global).await,
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

/// What is made, as the installation in the cluster declares it.
async fn declarations(client: &kube::Client, namespace: &str) -> Result<Declarations, Failure> {
    let (name, key) = (Declarations::CONFIG_MAP, Declarations::KEY);
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let map = maps.get_opt(name).await.map_err(|error| plain(&error))?;
    let text = map.and_then(|map| map.data?.remove(key)).ok_or_else(|| {
        Failure::new(Code::Failed, anyhow::anyhow!("there is no ConfigMap \"{namespace}/{name}\" with key \"{key}\""))
            .hint(
                "`bko-install cluster init` makes it, unless certificates are made by others; another namespace is \
                   named with --operator-namespace",
            )
    })?;
    parse(&text, &format!("ConfigMap \"{namespace}/{name}\""))
}

fn parse(text: &str, place: &str) -> Result<Declarations, Failure> {
    let parsed = serde_json::from_str(text);
    Ok(parsed.with_context(|| format!("{place} holds no declarations of Secrets that this version understands"))?)
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
