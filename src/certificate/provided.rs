//! Certificates that somebody else makes: what is missing or wrong, and the
//! command that mends it. Pure.

use jiff::Timestamp;

use super::decide::{Reason, provided_faults};
use super::issue::LiveSecrets;
use super::live::{Layout, LiveCertificate};
use super::secret::{CA, CERT, KEY};
use super::{CertificateSpec, Role, Usage};

/// Something that is wrong with a Secret that is not ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// `namespace/name` of the Secret.
    pub secret: String,
    /// What, and the command that mends it.
    pub message: String,
    /// Whether daemons or clients cannot work with it at all.
    pub fatal: bool,
}

/// Everything that is wrong, in the order of the declarations. The authority
/// is nobody's business but its keeper's.
pub fn provided(specs: &[CertificateSpec], live: &LiveSecrets, now: Timestamp) -> Vec<Gap> {
    specs.iter().filter(|spec| !spec.is_authority()).flat_map(|spec| gaps(spec, live, now)).collect()
}

fn gaps(spec: &CertificateSpec, live: &LiveSecrets, now: Timestamp) -> Vec<Gap> {
    let gap = |why: &str, fatal: bool| Gap {
        secret: spec.secret_path(),
        message: format!("Secret \"{}\": {why}; make it with:\n{}", spec.secret_path(), commands(spec)),
        fatal: fatal && !spec.optional,
    };
    let Some(secret) = live.get(&(spec.namespace.clone(), spec.secret.clone())) else {
        return if spec.optional { Vec::new() } else { vec![gap("is missing", true)] };
    };
    match LiveCertificate::read_leaf(&secret.data) {
        Err(why) => vec![gap(&why.to_string(), true)],
        Ok(live) if live.layout == Layout::Tls => {
            vec![gap(&format!("has keys of cert-manager, want \"{CA}\", \"{CERT}\" and \"{KEY}\""), true)]
        }
        Ok(live) => {
            let fatal = |why: &Reason| {
                matches!(
                    why,
                    Reason::KeyUnreadable
                        | Reason::KeyDiffers
                        | Reason::KeyAbsent
                        | Reason::Expired(_)
                        | Reason::UsageMissing(_)
                )
            };
            provided_faults(spec, &live, now).iter().map(|why| gap(&why.to_string(), fatal(why))).collect()
        }
    }
}

/// The commands that make a certificate's Secret, but for the authority's signature.
fn commands(spec: &CertificateSpec) -> String {
    let dns = spec.dns_names.iter().map(|name| format!("DNS:{name}"));
    let ips = spec.ip_addresses.iter().map(|ip| format!("IP:{ip}"));
    let names: Vec<String> = dns.chain(ips).collect();
    let usages = match &spec.role {
        Role::Authority => Vec::new(),
        Role::Leaf { usages, .. } => usages.iter().map(usage).collect(),
    };
    let (namespace, secret) = (&spec.namespace, &spec.secret);
    format!(
        "  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {KEY} -subj '/CN={}' \
         -addext 'extendedKeyUsage={}' -addext 'subjectAltName={}' -out request.csr\n  \
         # have request.csr signed by your authority, as {CERT}; its own certificate is {CA}\n  \
         kubectl create namespace {namespace} --dry-run=client --output=yaml | kubectl apply --server-side --filename=-\n  \
         kubectl --namespace {namespace} create secret generic {secret} --from-file={CA} --from-file={CERT} \
         --from-file={KEY} --dry-run=client --output=yaml | kubectl apply --server-side --force-conflicts --filename=-",
        spec.common_name,
        usages.join(","),
        names.join(","),
    )
}

fn usage(usage: &Usage) -> &'static str {
    match usage {
        Usage::ServerAuth => "serverAuth",
        Usage::ClientAuth => "clientAuth",
    }
}
