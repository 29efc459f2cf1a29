//! The certificates of a cluster, and the kubeconfigs made of them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use super::{ADDRESS, ROOT};

/// A certificate authority and the folder its files are in.
pub(crate) struct Authority {
    folder: PathBuf,
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate that an authority signed.
pub(crate) struct Leaf {
    certificate: String,
    key: String,
}

impl Authority {
    /// Makes an authority, and writes `<name>.crt` and `<name>.key`.
    ///
    /// # Errors
    /// A key cannot be made or a file not written.
    pub(crate) fn new(folder: &Path, name: &str) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key)?.pem();
        std::fs::create_dir_all(folder)?;
        write(folder, name, &Leaf { certificate: certificate.clone(), key: key.serialize_pem() })?;
        Ok(Self { folder: folder.to_owned(), certificate, issuer: Issuer::new(params, key) })
    }

    /// Signs a certificate, and writes `<name>.crt` and `<name>.key`.
    ///
    /// # Errors
    /// A name is not valid, or a file cannot be written.
    pub(crate) fn sign(&self, name: &str, subject: (&str, &str), hosts: &[&str]) -> anyhow::Result<Leaf> {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts)?;
        let (organisation, common_name) = subject;
        if !organisation.is_empty() {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        params.distinguished_name.push(DnType::CommonName, common_name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        let leaf = Leaf { certificate, key: key.serialize_pem() };
        write(&self.folder, name, &leaf)?;
        Ok(leaf)
    }

    /// Writes a kubeconfig for a user that this authority vouches for.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn kubeconfig(&self, user: &str, leaf: &Leaf) -> anyhow::Result<PathBuf> {
        let path = PathBuf::from(format!("{ROOT}/{user}.kubeconfig"));
        let [ca, certificate, key] =
            [&self.certificate, &leaf.certificate, &leaf.key].map(|pem| BASE64_STANDARD.encode(pem));
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters: [{{name: test, cluster: {{server: 'https://{ADDRESS}:6443', certificate-authority-data: {ca}}}}}]\n\
             users: [{{name: {user}, user: {{client-certificate-data: {certificate}, client-key-data: {key}}}}}]\n\
             contexts: [{{name: test, context: {{cluster: test, user: {user}}}}}]\n"
        );
        std::fs::write(&path, text).with_context(|| format!("writing \"{}\"", path.display()))?;
        Ok(path)
    }
}

/// Writes the key pair that signs service account tokens: `sa.key`, `sa.pub`.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn service_account_keys(folder: &Path) -> anyhow::Result<()> {
    let key = KeyPair::generate()?;
    std::fs::write(folder.join("sa.key"), key.serialize_pem())?;
    std::fs::write(folder.join("sa.pub"), key.public_key_pem())?;
    Ok(())
}

fn write(folder: &Path, name: &str, leaf: &Leaf) -> anyhow::Result<()> {
    std::fs::write(folder.join(format!("{name}.crt")), &leaf.certificate)?;
    std::fs::write(folder.join(format!("{name}.key")), &leaf.key)?;
    Ok(())
}
