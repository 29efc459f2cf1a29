//! Identities of CI jobs at a farm on one host.

use std::path::Path;
use std::process::Output;
use std::sync::Arc;

use anyhow::ensure;
use serde_json::{Value, json};

use crate::Machine;
use crate::host::{Farm, Who, printed};
use crate::issuer::{Issuer, KEYS, Key};

struct Jobs {
    issuer: Issuer,
    key: Key,
    farm: Farm,
}

impl Jobs {
    async fn start(machine: &Machine) -> anyhow::Result<Self> {
        let key = Key::curve("k1", "ES256");
        let issuer = Issuer::start(&[&key]).await;
        let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
        let file = farm.state.with_extension("oidc.yaml");
        let config = json!({"providers": [issuer.provider("github")], "repoAllowlist": ["github.com/acme/*"]});
        std::fs::write(&file, config.to_string())?;
        farm.set_flags(&["--oidc-config", &file.display().to_string()]);
        farm.start().await?;
        issuer.until_asked(KEYS, 1).await;
        let jobs = Self { issuer, key, farm };
        let probe = json!({"key": "p0000000000000000", "buildId": "0123456789abcdef"}).to_string();
        while jobs.farm.request_as(&jobs.token(&json!({})), "POST", "/complete", &probe)?.0 == 503 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        Ok(jobs)
    }

    fn token(&self, claims: &Value) -> String {
        self.key.token(&self.issuer.claims(claims))
    }

    /// A job that knows the address, has the clients' certificate, and can prove who it is.
    fn build(&self, claims: &Value, context: &Path) -> anyhow::Result<Output> {
        let mut command = self.farm.elsewhere("build");
        command
            .env("BUILDKIT_OPERATOR_BUILDD_URL", format!("http://127.0.0.1:{}", self.farm.ports.api))
            .env("BUILDKIT_OPERATOR_CLIENT_CERTS", self.farm.state.join("certs/client"))
            .env("BUILDKIT_OPERATOR_ID_TOKEN", self.token(claims));
        // What the body says of the repository counts for nothing.
        Ok(command.args(["--builder=buildctl", "--repo=github.com/acme/other"]).arg(context).output()?)
    }
}

pub(crate) async fn a_job_builds_with_its_identity_and_nothing_else(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut jobs = Jobs::start(&machine).await?;
    let context = jobs.farm.state.with_extension("context");
    std::fs::create_dir_all(&context)?;
    std::fs::write(context.join("Dockerfile"), "FROM scratch\nCOPY Dockerfile /\n")?;
    printed(jobs.build(&json!({}), &context)?)?;
    let page = jobs.farm.projects()?;
    let repos: Vec<_> = page.projects.iter().map(|project| (project.repo.as_str(), project.in_flight.count)).collect();
    ensure!(repos == [("github.com/acme/shop", 0)], "{repos:?}");

    for (claims, words, hint) in [
        (json!({"aud": "another"}), "audience", "--oidc-audience"),
        (json!({"iss": "https://localhost:1"}), "issuer", "oidc.providers"),
        (json!({"exp": 1_000_000_000}), "expired", "lives for minutes"),
        (json!({"repository": "evil/shop"}), "Forbidden", "docs/identity.md"),
        (json!({"ref": "refs/pull/7/merge", "event_name": "pull_request"}), "--allow-unisolated-forks", ""),
    ] {
        let refused = jobs.build(&claims, &context)?;
        let said = String::from_utf8_lossy(&refused.stderr);
        ensure!(!refused.status.success() && said.contains(words) && said.contains(hint), "{claims}: {said}");
    }
    // Whoever says who it is means that, also where a token of the host could be found.
    let context = context.display().to_string();
    let build = ["--builder=buildctl", "--repo=github.com/acme/other", context.as_str()];
    let wrong = format!("--id-token={}", jobs.token(&json!({"aud": "another"})));
    let refused = jobs.farm.run("build", &[&[wrong.as_str()], &build[..]].concat())?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("audience"), "{said}");
    let right = format!("--id-token={}", jobs.token(&json!({})));
    printed(jobs.farm.run("build", &[&[right.as_str()], &build[..]].concat())?)?;
    ensure!(jobs.farm.projects()?.projects.len() == 1, "the repository is the identity's");
    // With neither, the host's token is found, and may build what it says.
    printed(jobs.farm.run("build", &build)?)?;
    ensure!(jobs.farm.projects()?.projects.len() == 2);
    jobs.farm.stop().await
}
