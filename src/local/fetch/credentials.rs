//! Credentials of a registry, as Docker keeps them: in its configuration, or
//! with a helper that the configuration names.
#![expect(clippy::disallowed_methods, reason = "shell: reads Docker's configuration")]

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oci_client::secrets::RegistryAuth;
use serde::Deserialize;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

/// How long a helper may take.
const HELPER: Duration = Duration::from_secs(10);

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: HashMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: HashMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Told {
    username: String,
    secret: String,
}

/// What is known for a registry; public images need nothing.
pub(super) async fn find(config: Option<&Path>, registry: &str) -> RegistryAuth {
    let text = config.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let config: Config = serde_json::from_str(&text).unwrap_or_default();
    let names = names(registry);
    if let Some(auth) = names.iter().find_map(|name| basic(&config.auths.get(name)?.auth)) {
        return auth;
    }
    let own = names.iter().find_map(|name| config.cred_helpers.get(name));
    let Some(helper) = own.or(config.creds_store.as_ref()) else { return RegistryAuth::Anonymous };
    for name in &names {
        if let Some(auth) = ask(helper, name).await {
            return auth;
        }
    }
    RegistryAuth::Anonymous
}

/// Under which names Docker keeps it.
fn names(registry: &str) -> Vec<String> {
    let mut names = vec![registry.to_owned(), format!("https://{registry}")];
    if matches!(registry, "docker.io" | "index.docker.io" | "registry-1.docker.io") {
        names.insert(0, "https://index.docker.io/v1/".to_owned());
    }
    names
}

fn basic(auth: &str) -> Option<RegistryAuth> {
    let decoded = String::from_utf8(STANDARD.decode(auth.trim()).ok()?).ok()?;
    let (user, password) = decoded.split_once(':')?;
    (!user.is_empty()).then(|| RegistryAuth::Basic(user.to_owned(), password.to_owned()))
}

async fn ask(helper: &str, name: &str) -> Option<RegistryAuth> {
    // It names a program, not a path.
    if helper.contains('/') {
        return None;
    }
    let mut command = Command::new(format!("docker-credential-{helper}"));
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
    let mut child = command.spawn().ok()?;
    let mut input = child.stdin.take()?;
    input.write_all(name.as_bytes()).await.ok()?;
    drop(input);
    let output = timeout(HELPER, child.wait_with_output()).await.ok()?.ok()?;
    let Told { username, secret } = serde_json::from_slice(&output.stdout).ok()?;
    Some(if username == "<token>" { RegistryAuth::Bearer(secret) } else { RegistryAuth::Basic(username, secret) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_docker_knows_is_used_for_its_registry_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let hub = STANDARD.encode("me:with:colon");
        std::fs::write(
            &path,
            format!(r#"{{"auths": {{"https://index.docker.io/v1/": {{"auth": "{hub}"}}, "r.example.org": {{}}}}}}"#),
        )
        .unwrap();
        let found = async |registry: &str| find(Some(&path), registry).await;
        assert_eq!(found("docker.io").await, RegistryAuth::Basic("me".into(), "with:colon".into()));
        assert_eq!(found("r.example.org").await, RegistryAuth::Anonymous);
        assert_eq!(find(None, "docker.io").await, RegistryAuth::Anonymous);
        std::fs::write(&path, "not json").unwrap();
        assert_eq!(found("docker.io").await, RegistryAuth::Anonymous);
    }
}
