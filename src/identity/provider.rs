//! What the claims of each provider mean. Pure; no IO.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::PathBuf;

use serde::Deserialize;

use super::claims::Claims;
use super::url::Issuer;
use super::{Refused, Verified};
use crate::key::Repo;

/// The audience that clients ask for when nobody says otherwise.
pub const AUDIENCE: &str = "buildkit-operator";

/// Events in which GitHub and Forgejo run a trusted workflow on behalf of
/// whoever opened or commented: what it builds may be theirs.
pub const UNTRUSTED_EVENTS: [&str; 3] = ["pull_request_target", "issue_comment", "workflow_run"];

/// A provider as it is written down.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawProvider {
    #[serde(rename = "type")]
    kind: String,
    issuer: Option<String>,
    audience: Option<String>,
    repo_claim: Option<String>,
    host: Option<String>,
    #[serde(default)]
    strict_unprotected_refs: bool,
    ca_file: Option<PathBuf>,
}

/// A provider whose tokens are accepted.
#[derive(Clone, Debug)]
pub struct Provider {
    kind: Kind,
    /// Its type, as it is written.
    name: String,
    /// Who signs.
    pub issuer: Issuer,
    /// Whom its tokens must be for.
    pub audience: String,
    repo_claim: String,
    host: String,
    /// Whom its address is believed of, instead of the public authorities.
    pub ca_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// GitHub, Forgejo and Gitea: the same claims.
    Actions,
    Gitlab {
        strict: bool,
    },
    Custom,
}

impl TryFrom<RawProvider> for Provider {
    type Error = String;

    /// Says which field is wrong, and what is wanted.
    fn try_from(raw: RawProvider) -> Result<Self, String> {
        let name = raw.kind.trim().to_owned();
        let (kind, issuer, claim) = match name.as_str() {
            "github" => (Kind::Actions, Some("https://token.actions.githubusercontent.com"), Some("repository")),
            "forgejo" | "gitea" => (Kind::Actions, None, Some("repository")),
            "gitlab" => {
                (Kind::Gitlab { strict: raw.strict_unprotected_refs }, Some("https://gitlab.com"), Some("project_path"))
            }
            "" => return Err("type: want github, gitlab, forgejo, gitea, or a name of your own".to_owned()),
            _ => (Kind::Custom, None, None),
        };
        if raw.strict_unprotected_refs && name != "gitlab" {
            return Err(format!("strictUnprotectedRefs: only type gitlab has protected refs, not {name:?}"));
        }
        let text = |field: &str, given: Option<String>, default: Option<&str>| match given.as_deref().map(str::trim) {
            Some("") => Err(format!("{field}: is blank")),
            Some(text) => Ok(text.to_owned()),
            None => default.map(str::to_owned).ok_or_else(|| format!("{field}: is missing; type {name:?} needs it")),
        };
        let issuer: Issuer = text("issuer", raw.issuer, issuer)?.parse().map_err(|error| format!("issuer: {error}"))?;
        let host = match name.as_str() {
            "github" => Some("github.com"),
            "gitlab" | "forgejo" | "gitea" => Some(issuer.host()),
            _ => None,
        };
        let host = text("host", raw.host, host)?;
        if host.contains(['/', '@', '?', '#', ' ']) || Repo::normalize(&format!("{host}/x")).is_err() {
            return Err(format!("host: want a host such as git.example.org, found {host:?}"));
        }
        Ok(Self {
            kind,
            audience: text("audience", raw.audience, Some(AUDIENCE))?,
            repo_claim: text("repoClaim", raw.repo_claim, claim)?,
            host,
            ca_file: raw.ca_file,
            issuer,
            name,
        })
    }
}

impl Provider {
    /// Who a job is, by claims whose signature was checked.
    pub(super) fn identity(&self, claims: &Claims, trusted_events: &BTreeSet<String>) -> Result<Verified, Refused> {
        Ok(Verified {
            provider: self.name.clone(),
            subject: claims.text("sub").unwrap_or_default().chars().filter(|c| !c.is_control()).take(256).collect(),
            repo: self.repo(claims)?,
            untrusted: self.untrusted(claims, trusted_events),
            pull_request: self.pull_request(claims),
        })
    }

    fn repo(&self, claims: &Claims) -> Result<Repo, Refused> {
        let path = claims.need_text(&self.repo_claim)?;
        let wrong = || Refused::Claim(format!("{} is no path of a repository", self.repo_claim));
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '~' | '+');
        let segment = |s: &str| !s.is_empty() && s != "." && s != ".." && s.chars().all(plain);
        if path.len() > 256 || !path.split('/').all(segment) {
            return Err(wrong());
        }
        Repo::normalize(&format!("{}/{path}", self.host)).map_err(|_| wrong())
    }

    /// What a token does not say counts against it.
    fn untrusted(&self, claims: &Claims, trusted_events: &BTreeSet<String>) -> bool {
        match self.kind {
            Kind::Actions => {
                let event = claims.text("event_name").unwrap_or_default();
                let proposed = claims.text("ref").is_none_or(|name| name.starts_with("refs/pull/"));
                proposed || (UNTRUSTED_EVENTS.contains(&event) && !trusted_events.contains(event))
            }
            Kind::Gitlab { strict } => {
                let protected = claims.get("ref_protected").is_some_and(|it| it == "true" || *it == true);
                strict && !protected
            }
            Kind::Custom => false,
        }
    }

    fn pull_request(&self, claims: &Claims) -> Option<NonZeroU32> {
        let (claim, prefix) = match self.kind {
            Kind::Actions => ("ref", "refs/pull/"),
            Kind::Gitlab { .. } => ("ref_path", "refs/merge-requests/"),
            Kind::Custom => return None,
        };
        let (number, rest) = claims.text(claim)?.strip_prefix(prefix)?.split_once('/')?;
        let canonical = !number.starts_with(['0', '+']) && !rest.is_empty();
        canonical.then(|| number.parse().ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn provider(yaml: &str) -> Result<Provider, String> {
        serde_yaml::from_str::<RawProvider>(yaml).map_err(|error| error.to_string())?.try_into()
    }

    fn identity(yaml: &str, claims: &Value, trusted: &[&str]) -> Result<(String, bool, Option<u32>), Refused> {
        let claims = Claims::parse(claims.to_string().as_bytes()).unwrap();
        let trusted = trusted.iter().map(|event| (*event).to_owned()).collect();
        let verified = provider(yaml).unwrap().identity(&claims, &trusted)?;
        Ok((verified.repo.to_string(), verified.untrusted, verified.pull_request.map(NonZeroU32::get)))
    }

    #[test]
    fn each_provider_says_whose_code_it_is() {
        let forgejo = "{type: forgejo, issuer: https://codeberg.org/api/actions}";
        let gitlab = "{type: gitlab, issuer: 'https://git.acme.example:8443'}";
        let strict = "{type: gitlab, strictUnprotectedRefs: true}";
        let custom = "{type: acme, issuer: https://ci.acme.example, repoClaim: repo, host: git.acme.example}";
        let push = json!({"repository": "Acme/Shop", "ref": "refs/heads/main", "event_name": "push"});
        let with = |key: &str, value: Value| {
            let mut claims = push.clone();
            claims[key] = value;
            claims
        };
        let merge_request =
            json!({"project_path": "a/b/c", "ref_path": "refs/merge-requests/12/head", "ref_protected": "false"});
        for (yaml, claims, want) in [
            ("{type: github}", push.clone(), ("github.com/acme/shop", false, None)),
            ("{type: github, host: ghe.acme.example}", push.clone(), ("ghe.acme.example/acme/shop", false, None)),
            (forgejo, push.clone(), ("codeberg.org/acme/shop", false, None)),
            (forgejo, with("ref", json!("refs/pull/7/head")), ("codeberg.org/acme/shop", true, Some(7))),
            ("{type: github}", with("ref", json!("refs/pull/7/merge")), ("github.com/acme/shop", true, Some(7))),
            ("{type: github}", with("ref", json!("refs/pull/07/merge")), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("ref", json!("refs/pull/99999999999/merge")), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("ref", json!("refs/pull/-1/merge")), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("ref", json!(null)), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("event_name", json!("pull_request_target")), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("event_name", json!("issue_comment")), ("github.com/acme/shop", true, None)),
            ("{type: github}", with("event_name", json!("workflow_run")), ("github.com/acme/shop", true, None)),
            (gitlab, merge_request.clone(), ("git.acme.example/a/b/c", false, Some(12))),
            (strict, merge_request, ("gitlab.com/a/b/c", true, Some(12))),
            (strict, json!({"project_path": "a/b", "ref_protected": "true"}), ("gitlab.com/a/b", false, None)),
            (strict, json!({"project_path": "a/b", "ref_protected": true}), ("gitlab.com/a/b", false, None)),
            (strict, json!({"project_path": "a/b"}), ("gitlab.com/a/b", true, None)),
            (
                custom,
                json!({"repo": "acme/shop", "ref": "refs/pull/7/merge"}),
                ("git.acme.example/acme/shop", false, None),
            ),
        ] {
            let got = identity(yaml, &claims, &[]).unwrap();
            assert_eq!((got.0.as_str(), got.1, got.2), want, "{yaml} {claims}");
        }
        let target = with("event_name", json!("pull_request_target"));
        assert!(!identity("{type: github}", &target, &["pull_request_target"]).unwrap().1);
        assert!(identity("{type: github}", &target, &["workflow_run"]).unwrap().1);
    }

    #[test]
    fn a_claim_that_is_no_path_gives_no_repository() {
        for repo in [
            "",
            " ",
            "acme//shop",
            "/acme",
            "acme/",
            "../secret",
            "a/./b",
            "a b/c",
            "a\u{0}/b",
            "u@h/x",
            "h:1/x",
            "a?b",
            "a#b",
            "a\\b",
            "https://x/y",
        ] {
            let claims = json!({"repository": repo, "ref": "refs/heads/main"});
            assert!(matches!(identity("{type: github}", &claims, &[]), Err(Refused::Claim(_))), "{repo:?}");
        }
        for repo in [json!(null), json!(7), json!(["acme/shop"])] {
            let claims = json!({"repository": repo, "ref": "refs/heads/main"});
            assert!(identity("{type: github}", &claims, &[]).is_err(), "{repo}");
        }
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (yaml, want) in [
            ("{type: forgejo}", "issuer: is missing; type \"forgejo\" needs it"),
            ("{type: acme, issuer: https://ci.acme.example}", "host: is missing; type \"acme\" needs it"),
            ("{type: acme, issuer: https://a.b, host: a.b}", "repoClaim: is missing; type \"acme\" needs it"),
            ("{type: github, audience: ' '}", "audience: is blank"),
            ("{type: github, host: a/b}", "host: want a host such as git.example.org, found \"a/b\""),
            (
                "{type: github, issuer: http://a.b}",
                "issuer: want an https URL in ASCII with a lower-case host and without user, query or fragment, \
                 found \"http://a.b\"",
            ),
            (
                "{type: github, strictUnprotectedRefs: true}",
                "strictUnprotectedRefs: only type gitlab has protected refs, not \"github\"",
            ),
        ] {
            assert_eq!(provider(yaml).unwrap_err(), want, "{yaml}");
        }
        assert!(provider("{type: github, isuer: x}").unwrap_err().contains("unknown field `isuer`"));
    }
}
