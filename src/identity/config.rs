//! Which providers are trusted, and for what: a file, and an environment whose
//! every part replaces the file's. Pure; no IO.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use super::allowlist::{Allowlist, Pattern};
use super::provider::{Provider, RawProvider, UNTRUSTED_EVENTS};

/// Where the parts come from. Blank counts as absent.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Path and text of the file: YAML, of which JSON is a part.
    pub file: Option<(String, String)>,
    /// Providers, as a list in YAML or JSON.
    pub providers: Option<String>,
    /// Patterns, separated by commas, spaces or line feeds.
    pub repo_allowlist: Option<String>,
    /// `true`, `1` or `yes` switch it all off.
    pub disable: Option<String>,
    /// Events of [`UNTRUSTED_EVENTS`] that are trusted all the same.
    pub trust_events: Vec<String>,
}

/// Providers, and who of their callers may build. At least one provider.
#[derive(Clone, Debug)]
pub struct Config {
    /// No two with one issuer.
    pub providers: Vec<Provider>,
    /// Which repositories may build.
    pub allowlist: Allowlist,
    trusted_events: BTreeSet<String>,
}

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {what}")]
pub struct ConfigFault {
    /// The file or variable.
    pub place: String,
    /// What is wrong there, and what is wanted.
    pub what: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawFile {
    #[serde(default)]
    providers: Vec<RawProvider>,
    #[serde(default)]
    repo_allowlist: Vec<String>,
    #[serde(default)]
    disable: bool,
}

const PROVIDERS: &str = "BUILDKIT_OPERATOR_OIDC_PROVIDERS (--oidc-providers)";
const ALLOWLIST: &str = "BUILDKIT_OPERATOR_OIDC_REPO_ALLOWLIST (--oidc-repo-allowlist)";
const DISABLE: &str = "BUILDKIT_OPERATOR_OIDC_DISABLE (--oidc-disable)";

impl Config {
    /// Reads it; nothing when no provider is given, or all is switched off.
    ///
    /// # Errors
    /// The first fault.
    pub fn read(sources: Sources) -> Result<Option<Self>, ConfigFault> {
        let (file_place, file) = match sources.file {
            Some((path, text)) => {
                let place = format!("--oidc-config {path:?}");
                let file = file(&text).map_err(|what| ConfigFault { place: place.clone(), what })?;
                (place, file)
            }
            None => (String::new(), RawFile::default()),
        };
        let disable = match given(sources.disable).map(|text| text.to_ascii_lowercase()).as_deref() {
            None => file.disable,
            Some("true" | "1" | "yes") => true,
            Some("false" | "0" | "no") => false,
            Some(other) => return fault(DISABLE, format!("want true or false, found {other:?}")),
        };
        if disable {
            return Ok(None);
        }
        let (place, raw) = match given(sources.providers) {
            Some(text) => (PROVIDERS.to_owned(), list(&text).or_else(|what| fault(PROVIDERS, what))?),
            None => (file_place.clone(), file.providers),
        };
        let providers = match providers(raw) {
            Ok(providers) => providers,
            Err((index, what)) => return fault(&place, format!("providers[{index}].{what}")),
        };
        let (place, patterns): (_, Vec<String>) = match given(sources.repo_allowlist) {
            Some(text) => (ALLOWLIST.to_owned(), words(&text)),
            None => (file_place, file.repo_allowlist),
        };
        let patterns = patterns.iter().map(|pattern| pattern.parse::<Pattern>()).collect::<Result<Vec<_>, _>>();
        let patterns = patterns.or_else(|error| fault(&place, format!("repoAllowlist: {error}")))?;
        let trusted_events = trusted_events(sources.trust_events)?;
        match (providers.is_empty(), patterns.is_empty()) {
            (false, _) => Ok(Some(Self { providers, allowlist: Allowlist::new(patterns), trusted_events })),
            (true, true) => Ok(None),
            (true, false) => fault(
                &place,
                "repoAllowlist: restricts the identities of providers, of which there is none; add one to providers, \
                 or remove the list"
                    .to_owned(),
            ),
        }
    }

    /// The provider that an issuer's name stands for.
    pub fn provider(&self, issuer: &str) -> Option<(usize, &Provider)> {
        self.providers.iter().enumerate().find(|(_, provider)| provider.issuer.is(issuer))
    }

    pub(super) fn trusted_events(&self) -> &BTreeSet<String> {
        &self.trusted_events
    }
}

/// Checks a list of providers as it stands among an installer's values.
///
/// # Errors
/// Which ones are wrong, and what is wrong with each.
pub fn check_providers(items: &[Value]) -> Result<(), Vec<(usize, String)>> {
    let read = |(index, item): (usize, &Value)| {
        if item.get("caFile").is_some() {
            let what = "caFile: nothing mounts such a file in a cluster; put the authority into oidc.caBundle";
            return Err((index, what.to_owned()));
        }
        serde_json::from_value::<RawProvider>(item.clone()).map_err(|error| (index, error.to_string()))
    };
    let alone = |(index, item)| {
        let raw = read((index, item))?;
        Provider::try_from(raw.clone()).map_err(|what| (index, what)).map(|_| raw)
    };
    let (good, bad): (Vec<_>, Vec<_>) = items.iter().enumerate().map(alone).partition(Result::is_ok);
    let bad: Vec<_> = bad.into_iter().filter_map(Result::err).collect();
    if !bad.is_empty() {
        return Err(bad);
    }
    providers(good.into_iter().flatten().collect()).map(|_| ()).map_err(|fault| vec![fault])
}

fn providers(raw: Vec<RawProvider>) -> Result<Vec<Provider>, (usize, String)> {
    let mut all: Vec<Provider> = Vec::new();
    for (index, raw) in raw.into_iter().enumerate() {
        let provider = Provider::try_from(raw).map_err(|what| (index, what))?;
        if let Some(first) = all.iter().position(|other| other.issuer == provider.issuer) {
            return Err((index, format!("issuer: {:?} is that of providers[{first}] too", provider.issuer.as_str())));
        }
        all.push(provider);
    }
    Ok(all)
}

fn file(text: &str) -> Result<RawFile, String> {
    // An empty file configures nothing.
    let file: Option<RawFile> = serde_yaml::from_str(text).map_err(|error| error.to_string())?;
    Ok(file.unwrap_or_default())
}

fn list(text: &str) -> Result<Vec<RawProvider>, String> {
    serde_yaml::from_str(text).map_err(|error| format!("want a list of providers in JSON or YAML: {error}"))
}

fn trusted_events(names: Vec<String>) -> Result<BTreeSet<String>, ConfigFault> {
    let names: BTreeSet<String> = names.iter().map(|name| name.trim().to_owned()).filter(|n| !n.is_empty()).collect();
    match names.iter().find(|name| !UNTRUSTED_EVENTS.contains(&name.as_str())) {
        None => Ok(names),
        Some(other) => {
            let known = UNTRUSTED_EVENTS.join(", ");
            fault("--trust-events", format!("want some of {known}, found {other:?}; other events are trusted anyway"))
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split([',', ' ', '\t', '\r', '\n']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn given(text: Option<String>) -> Option<String> {
    text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn fault<T>(place: &str, what: String) -> Result<T, ConfigFault> {
    Err(ConfigFault { place: place.to_owned(), what })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Repo;

    const FILE: &str = "\
providers:
  - type: github
  - {type: gitlab, audience: ours}
repoAllowlist: [github.com/acme/*]
";

    fn sources(file: &str) -> Sources {
        Sources { file: Some(("oidc.yaml".to_owned(), file.to_owned())), ..Sources::default() }
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn allows(config: &Config, repo: &str) -> bool {
        config.allowlist.allows(&Repo::normalize(repo).unwrap())
    }

    #[test]
    fn the_environment_replaces_the_file_part_by_part() {
        let config = Config::read(sources(FILE)).unwrap().unwrap();
        assert_eq!(config.providers.len(), 2);
        assert_eq!(config.providers[1].audience, "ours");
        assert!(allows(&config, "github.com/acme/shop") && !allows(&config, "github.com/other/shop"));

        let providers = some(r#"[{"type":"forgejo","issuer":"https://codeberg.org/api/actions/"}]"#);
        let config = Config::read(Sources { providers, ..sources(FILE) }).unwrap().unwrap();
        assert_eq!(config.providers.len(), 1);
        assert!(config.provider("https://codeberg.org/api/actions").is_some());
        assert!(allows(&config, "github.com/acme/shop"), "the file's list stays");

        let repo_allowlist = some("codeberg.org/a/*, codeberg.org/b/x\n\ncodeberg.org/c/*");
        let config = Config::read(Sources { repo_allowlist, ..sources(FILE) }).unwrap().unwrap();
        assert_eq!(config.providers.len(), 2);
        assert!(allows(&config, "codeberg.org/c/y") && !allows(&config, "github.com/acme/shop"));
    }

    #[test]
    fn it_can_be_switched_off_and_on() {
        for on in ["true", "1", "yes", " TRUE "] {
            assert!(Config::read(Sources { disable: some(on), ..sources(FILE) }).unwrap().is_none(), "{on}");
        }
        let off = format!("{FILE}disable: true\n");
        assert!(Config::read(sources(&off)).unwrap().is_none());
        assert!(Config::read(Sources { disable: some("false"), ..sources(&off) }).unwrap().is_some());
        assert!(Config::read(sources("")).unwrap().is_none());
        assert!(Config::read(Sources::default()).unwrap().is_none());
    }

    #[test]
    fn every_fault_says_where_it_is() {
        let duplicate = "providers: [{type: github}, {type: a, issuer: 'https://token.actions.githubusercontent.com/', host: h.x, repoClaim: r}]";
        for (sources, want) in [
            (sources("providers: {}"), "--oidc-config \"oidc.yaml\": providers: invalid type: map"),
            (sources("provider: []"), "--oidc-config \"oidc.yaml\": unknown field `provider`"),
            (sources("providers: [{type: forgejo}]"), "--oidc-config \"oidc.yaml\": providers[0].issuer: is missing"),
            (
                sources(duplicate),
                "--oidc-config \"oidc.yaml\": providers[1].issuer: \"https://token.actions.githubusercontent.com\" is that \
                 of providers[0] too",
            ),
            (sources("repoAllowlist: [a/b]"), "--oidc-config \"oidc.yaml\": repoAllowlist: restricts"),
            (
                sources("{providers: [{type: github}], repoAllowlist: ['a*']}"),
                "--oidc-config \"oidc.yaml\": repoAllowlist: want \"*\"",
            ),
            (
                Sources { providers: some("github"), ..Sources::default() },
                "BUILDKIT_OPERATOR_OIDC_PROVIDERS (--oidc-providers): want a list of providers in JSON or YAML",
            ),
            (
                Sources { disable: some("maybe"), ..Sources::default() },
                "BUILDKIT_OPERATOR_OIDC_DISABLE (--oidc-disable): want true or false, found \"maybe\"",
            ),
            (
                Sources { trust_events: vec!["push".to_owned()], ..sources(FILE) },
                "--trust-events: want some of pull_request_target, issue_comment, workflow_run, found \"push\"",
            ),
        ] {
            let got = Config::read(sources).unwrap_err().to_string();
            assert!(got.starts_with(want), "{got}\nwant {want}");
        }
    }
}
