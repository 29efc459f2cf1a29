//! Makes certificates: the shell of [`certificate`](super). Keys and serial
//! numbers are drawn here; the time is still an argument.
#![expect(clippy::disallowed_methods, reason = "keys and serial numbers are random")]

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber,
};
use time::OffsetDateTime;

use super::key::Key;
use super::live::{KeyState, Layout, LiveCertificate, Malformed};
use super::secret::{CA, CA_KEY, CERT, KEY, LiveSecret, SecretData};
use super::{
    Authority, CertificateSpec, Decision, Reason, Role, Usage, decide_authority, decide_leaf, hand_over_command, rotate,
};

/// Clocks of clients may be behind ours by this much.
const BACKDATE: Duration = Duration::from_secs(300);

/// Live Secrets by namespace and name.
pub type LiveSecrets = BTreeMap<(String, String), LiveSecret>;

/// What became of one declaration.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The declaration.
    pub spec: CertificateSpec,
    /// What was decided, and why.
    pub decision: Decision,
    /// The whole data of its Secret, byte-identical when kept. `None`: the
    /// Secret is not ours to write.
    pub data: Option<SecretData>,
    /// What a person should know, each with the command that mends it.
    pub warnings: Vec<String>,
}

/// Why certificates cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// Certificates have to be made and the key to sign them is elsewhere.
    #[error("certificate Secrets {secrets} must be issued, and no usable key of their authority is held")]
    AuthorityKeyMissing {
        /// `"buildkit-builds/buildkit-client-certs" (there is no such Secret)`, all of them.
        secrets: String,
        /// The command that hands the key over.
        command: String,
    },
    /// Secrets that somebody else has to make are missing or cannot be used.
    #[error("Secrets that are yours to make are missing or cannot be used:{}", list(.0))]
    NotProvided(Vec<String>),
    /// An authority that cannot be succeeded.
    #[error("the authority \"{secret}\" cannot be rotated: {why}")]
    NotRotatable {
        /// `namespace/name` of its Secret.
        secret: String,
        /// Why.
        why: String,
    },
    /// A leaf names an authority that is not declared.
    #[error("certificate \"{name}\" is to be signed by \"{issuer}\", which is not declared")]
    UnknownAuthority {
        /// Name of the leaf.
        name: String,
        /// Name of the authority.
        issuer: String,
    },
    /// A key or certificate could not be made.
    #[error("cannot make certificate \"{name}\"")]
    Make {
        /// Name of the certificate.
        name: String,
        /// Why.
        #[source]
        source: rcgen::Error,
    },
    /// The certificate just made cannot be read back: a defect.
    #[error("certificate \"{name}\" cannot be read back")]
    ReadBack {
        /// Name of the certificate.
        name: String,
        /// Why.
        #[source]
        source: Malformed,
    },
    /// The operating system gives no random numbers.
    #[error("cannot draw a serial number: {0}")]
    Random(getrandom::Error),
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

impl IssueError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::AuthorityKeyMissing { command, .. } => {
                Some(format!("hand the authority over, then run this again:\n  {command}"))
            }
            _ => None,
        }
    }
}

/// Decides about every declaration and makes what has to be made: authorities
/// first, then what they sign, each in the order given. Write Secrets in that
/// order, an authority's before those it signed: a run cut in between must
/// leave no certificate whose authority's key is lost.
///
/// # Errors
/// See [`IssueError`].
pub fn materialise(specs: &[CertificateSpec], live: &LiveSecrets, now: Timestamp) -> Result<Vec<Outcome>, IssueError> {
    let outcomes = rehearse(specs, live, now)?;
    let blocked: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| match &outcome.decision {
            Decision::Blocked(why) => Some(format!("\"{}\" ({why})", outcome.spec.secret_path())),
            _ => None,
        })
        .collect();
    if blocked.is_empty() {
        return Ok(outcomes);
    }
    let command = outcomes.iter().map(|outcome| &outcome.spec).find(|spec| spec.is_authority()).map(hand_over_command);
    Err(IssueError::AuthorityKeyMissing { secrets: blocked.join(", "), command: command.unwrap_or_default() })
}

/// [`materialise`], but what cannot be signed is an outcome like any other:
/// what a run would do, for those who only look.
///
/// # Errors
/// See [`IssueError`].
pub fn rehearse(specs: &[CertificateSpec], live: &LiveSecrets, now: Timestamp) -> Result<Vec<Outcome>, IssueError> {
    let mut outcomes = Vec::new();
    let mut signers = BTreeMap::new();
    for spec in specs.iter().filter(|spec| spec.is_authority()) {
        let (outcome, signer) = materialise_authority(spec, specs, live, now)?;
        outcomes.push(outcome);
        signers.insert(spec.name.as_str(), (spec, signer));
    }
    for spec in specs {
        let Role::Leaf { issuer, usages } = &spec.role else { continue };
        let (authority, signer) = signers
            .get(issuer.as_str())
            .ok_or_else(|| IssueError::UnknownAuthority { name: spec.name.clone(), issuer: issuer.clone() })?;
        outcomes.push(materialise_leaf(spec, usages, authority, signer.as_ref(), find(live, spec), now)?);
    }
    Ok(outcomes)
}

fn find<'a>(live: &'a LiveSecrets, spec: &CertificateSpec) -> Option<&'a LiveSecret> {
    live.get(&(spec.namespace.clone(), spec.secret.clone()))
}

/// An authority whose key we hold.
struct Signer {
    certificate: LiveCertificate,
    /// Its `ca.pem`, which everything that it signs carries along.
    pem: Vec<u8>,
    issuer: Issuer<'static, Key>,
}

fn materialise_authority(
    spec: &CertificateSpec,
    specs: &[CertificateSpec],
    live: &LiveSecrets,
    now: Timestamp,
) -> Result<(Outcome, Option<Signer>), IssueError> {
    let signed = |leaf: &&CertificateSpec| matches!(&leaf.role, Role::Leaf { issuer, .. } if *issuer == spec.name);
    let adopted = specs
        .iter()
        .filter(signed)
        .filter_map(|leaf| find(live, leaf))
        .any(|secret| LiveCertificate::read_leaf(&secret.data).is_ok());
    let secret = find(live, spec);
    let read = secret.map(|secret| LiveCertificate::read_authority(&secret.data));
    let decision = decide_authority(spec, read.as_ref(), adopted, now);
    let current = secret.map(|secret| &secret.data);
    let data = match &decision {
        Decision::Keep => current.cloned(),
        Decision::Issue(_) => Some(make_authority(spec, None, now)?),
        Decision::Renew(_) => Some(renew_authority(spec, current, now)?),
        Decision::Provided(_) | Decision::Blocked(_) => None,
    };
    let signer = data.as_ref().or(current).and_then(|data| signer(spec, data, now).transpose()).transpose()?;
    let warnings = match &decision {
        Decision::Provided(faults) => faults
            .iter()
            .map(|why| {
                format!("authority \"{}\": {why}; replace it with:\n  {}", spec.secret_path(), hand_over_command(spec))
            })
            .collect(),
        _ => Vec::new(),
    };
    Ok((Outcome { spec: spec.clone(), decision, data, warnings }, signer))
}

fn materialise_leaf(
    spec: &CertificateSpec,
    usages: &[Usage],
    authority: &CertificateSpec,
    signer: Option<&Signer>,
    live: Option<&LiveSecret>,
    now: Timestamp,
) -> Result<Outcome, IssueError> {
    let read = live.map(|secret| LiveCertificate::read_leaf(&secret.data));
    let held = signer.map_or(Authority::NotHeld, |signer| Authority::Held(&signer.certificate));
    let decision = match decide_leaf(spec, read.as_ref(), held, now) {
        Decision::Blocked(why) if spec.optional => Decision::Provided(vec![why]),
        decision => decision,
    };
    let data = match (&decision, signer) {
        (Decision::Keep, _) => live.map(|secret| secret.data.clone()),
        (Decision::Issue(_) | Decision::Renew(_), Some(signer)) => Some(make_leaf(spec, usages, signer, now)?),
        _ => None,
    };
    let layout = read.and_then(Result::ok).map_or(Layout::Pem, |live| live.layout);
    let warnings = match &decision {
        Decision::Provided(faults) => faults.iter().map(|why| advise(spec, authority, why, layout, live)).collect(),
        _ => Vec::new(),
    };
    Ok(Outcome { spec: spec.clone(), decision, data, warnings })
}

/// What is wrong with a certificate that is not ours, and the command for it.
fn advise(
    spec: &CertificateSpec,
    authority: &CertificateSpec,
    why: &Reason,
    layout: Layout,
    live: Option<&LiveSecret>,
) -> String {
    let head = format!("certificate \"{}\": {why}", spec.secret_path());
    let keeper = live.and_then(|secret| secret.certificate_name.as_deref());
    match (layout, keeper, why) {
        (Layout::Pem, _, _) => {
            let command = hand_over_command(authority);
            format!("{head}; hand its authority over, and the next run issues it:\n  {command}")
        }
        (Layout::Tls, Some(keeper), Reason::NamesMissing(names)) => {
            let namespace = &spec.namespace;
            let field =
                |name: &String| if name.parse::<std::net::IpAddr>().is_ok() { "ipAddresses" } else { "dnsNames" };
            let add: Vec<_> = names
                .iter()
                .map(|name| format!(r#"{{"op":"add","path":"/spec/{}/-","value":"{name}"}}"#, field(name)))
                .collect();
            let patch = add.join(",");
            format!(
                "{head}; add it to its Certificate:\n  kubectl --namespace {namespace} patch certificate {keeper} \
                 --type=json --patch='[{patch}]'"
            )
        }
        (Layout::Tls, Some(keeper), _) => {
            format!("{head}; see:\n  kubectl --namespace {} describe certificate {keeper}", spec.namespace)
        }
        (Layout::Tls, None, _) => {
            format!("{head}; replace it with:\n  kubectl --namespace {} edit secret {}", spec.namespace, spec.secret)
        }
    }
}

/// The authority as a signer, if its key is here and it may sign today.
fn signer(spec: &CertificateSpec, data: &SecretData, now: Timestamp) -> Result<Option<Signer>, IssueError> {
    let Ok(certificate) = LiveCertificate::read_authority(data) else { return Ok(None) };
    let valid = certificate.not_before <= now && now < certificate.not_after;
    if certificate.key != KeyState::Matches || !certificate.is_authority || !valid {
        return Ok(None);
    }
    let layout = certificate.layout;
    let (cert, key) = if layout == Layout::Pem { (CA, CA_KEY) } else { ("tls.crt", "tls.key") };
    let (Some(pem), Some(key)) = (data.get(cert), data.get(key).and_then(Key::from_pem)) else { return Ok(None) };
    let issuer = Issuer::from_ca_cert_der(&certificate.der, key).map_err(|source| make_error(spec, source))?;
    Ok(Some(Signer { pem: pem.to_vec(), certificate, issuer }))
}

fn make_authority(spec: &CertificateSpec, key: Option<&[u8]>, now: Timestamp) -> Result<SecretData, IssueError> {
    let error = |source| make_error(spec, source);
    let mut params = params(spec, spec_end(spec, now), now)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let (certificate, key) = match key.and_then(|pem| Some((pem, Key::from_pem(pem)?))) {
        Some((pem, key)) => (params.self_signed(&key).map_err(error)?, pem.to_vec()),
        None => {
            let key = KeyPair::generate().map_err(error)?;
            (params.self_signed(&key).map_err(error)?, key.serialize_pem().into_bytes())
        }
    };
    Ok([(CA, certificate.pem().into_bytes()), (CA_KEY, key)].into_iter().collect())
}

/// A successor with the same key; a rotation goes on where it was.
fn renew_authority(
    spec: &CertificateSpec,
    current: Option<&SecretData>,
    now: Timestamp,
) -> Result<SecretData, IssueError> {
    let made = make_authority(spec, current.and_then(|data| data.get(CA_KEY)), now)?;
    let Some(current) = current else { return Ok(made) };
    let mut data = current.clone();
    let others = data.get(CA).map(rotate::without_first).unwrap_or_default();
    data.insert(CA, [made.get(CA).unwrap_or_default(), &others].concat());
    Ok(data)
}

/// An authority with a key of its own, to succeed the present one: certificate and key.
pub(super) fn successor(spec: &CertificateSpec, now: Timestamp) -> Result<(Vec<u8>, Vec<u8>), IssueError> {
    let mut made = make_authority(spec, None, now)?;
    Ok((made.remove(CA).unwrap_or_default(), made.remove(CA_KEY).unwrap_or_default()))
}

fn make_leaf(
    spec: &CertificateSpec,
    usages: &[Usage],
    signer: &Signer,
    now: Timestamp,
) -> Result<SecretData, IssueError> {
    let error = |source| make_error(spec, source);
    let end = spec_end(spec, now).min(signer.certificate.not_after);
    let mut params = params(spec, end, now)?;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usages
        .iter()
        .map(|usage| match usage {
            Usage::ServerAuth => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::ClientAuth => ExtendedKeyUsagePurpose::ClientAuth,
        })
        .collect();
    for name in &spec.dns_names {
        params.subject_alt_names.push(SanType::DnsName(name.as_str().try_into().map_err(error)?));
    }
    params.subject_alt_names.extend(spec.ip_addresses.iter().copied().map(SanType::IpAddress));
    let key = KeyPair::generate().map_err(error)?;
    let certificate = params.signed_by(&key, &signer.issuer).map_err(error)?;
    let data: SecretData =
        [(CA, signer.pem.clone()), (CERT, certificate.pem().into_bytes()), (KEY, key.serialize_pem().into_bytes())]
            .into_iter()
            .collect();
    match LiveCertificate::read_leaf(&data) {
        Ok(_) => Ok(data),
        Err(source) => Err(IssueError::ReadBack { name: spec.name.clone(), source }),
    }
}

fn params(spec: &CertificateSpec, end: Timestamp, now: Timestamp) -> Result<CertificateParams, IssueError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, spec.common_name.as_str());
    params.not_before = date(now.saturating_sub(BACKDATE).unwrap_or(now));
    params.not_after = date(end);
    params.serial_number = Some(serial()?);
    Ok(params)
}

fn spec_end(spec: &CertificateSpec, now: Timestamp) -> Timestamp {
    let lifetime = SignedDuration::try_from(spec.lifetime).unwrap_or(SignedDuration::MAX);
    now.saturating_add(lifetime).unwrap_or(Timestamp::MAX)
}

/// 127 random bits, positive and never zero.
fn serial() -> Result<SerialNumber, IssueError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(IssueError::Random)?;
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn date(at: Timestamp) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(at.as_second()).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn make_error(spec: &CertificateSpec, source: rcgen::Error) -> IssueError {
    IssueError::Make { name: spec.name.clone(), source }
}
