//! Credentials in the words of those who need them. Pure; no IO.

use jiff::Timestamp;
use serde::Serialize;

use crate::client::shell::quote_always;

/// What a client needs. As JSON this is an interface: docs/build.md.
#[derive(Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Credentials {
    /// Of this schema.
    pub(super) version: u32,
    pub(super) url: String,
    /// Absent where everybody may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token: Option<String>,
    pub(super) ca: String,
    pub(super) cert: String,
    pub(super) key: String,
    /// When the certificate ends.
    pub(super) expires: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gateway_host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gateway_port: Option<u16>,
}

impl Credentials {
    /// Names of the cluster itself mean nothing elsewhere, nor does a loopback address.
    pub(super) fn reachable_from_outside(&self) -> bool {
        let host = self.url.split("://").nth(1).and_then(|rest| rest.split([':', '/']).next()).unwrap_or_default();
        !host.contains(".svc") && !host.starts_with("127.")
    }

    /// Name, value, and whether it is a secret.
    fn variables(&self) -> Vec<(&'static str, String, bool)> {
        let mut variables = vec![
            ("BUILDKIT_OPERATOR_BUILDD_URL", self.url.clone(), false),
            ("BUILDKIT_OPERATOR_CA", self.ca.clone(), false),
            ("BUILDKIT_OPERATOR_CERT", self.cert.clone(), false),
            ("BUILDKIT_OPERATOR_KEY", self.key.clone(), true),
        ];
        variables.extend(self.token.clone().map(|token| ("BUILDKIT_OPERATOR_TOKEN", token, true)));
        variables.extend(self.gateway_host.clone().map(|host| ("BUILDKIT_OPERATOR_GATEWAY_HOST", host, false)));
        variables.extend(self.gateway_port.map(|port| ("BUILDKIT_OPERATOR_GATEWAY_PORT", port.to_string(), false)));
        variables
    }
}

/// For a POSIX shell to source.
pub(super) fn env(credentials: &Credentials) -> String {
    let mut lines = vec![format!("# The client certificate is valid until {}.", credentials.expires)];
    let variables = credentials.variables();
    lines.extend(variables.iter().map(|(name, value, _)| format!("export {name}={}", quote_always(value))));
    lines.join("\n")
}

/// For the command line of GitHub. A value goes through standard input, so
/// that no process list shows it.
pub(super) fn github(credentials: &Credentials) -> String {
    let mut lines = vec![
        "# Run in a clone of the repository, or add --repo OWNER/NAME, or --org OWNER, to each line.".to_owned(),
        format!("# The client certificate is valid until {}.", credentials.expires),
        "set -e".to_owned(),
    ];
    lines.extend(credentials.variables().iter().map(|(name, value, secret)| {
        let kind = if *secret { "secret" } else { "variable" };
        format!("printf %s {} | gh {kind} set {name}", quote_always(value))
    }));
    lines.join("\n")
}

/// Creates a variable, or changes it: GitLab's command line does only one of
/// the two at a time. What asks must not read the script, which may be piped.
const PUT: &str = r#"where="$*"
put() {
  name=$1 value=$2 how=set
  shift 2
  if glab variable get "$name" $where </dev/null >/dev/null 2>&1; then how=update; fi
  printf %s "$value" | glab variable "$how" "$name" --raw "$@" $where
}"#;

/// For the command line of GitLab: files as variables of type file, since
/// variables with line breaks cannot be masked.
pub(super) fn gitlab(credentials: &Credentials) -> String {
    let mut lines = vec![
        "# Run in a clone of the repository, or with: sh -s -- --repo GROUP/NAME, or --group GROUP.".to_owned(),
        format!("# The client certificate is valid until {}.", credentials.expires),
        "set -e".to_owned(),
        PUT.to_owned(),
    ];
    lines.extend(credentials.variables().iter().map(|(name, value, secret)| {
        let file = value.contains('\n');
        let kind = match (file, secret) {
            (true, _) => " --type file",
            (false, true) => " --masked",
            (false, false) => "",
        };
        format!("put {name} {}{kind}", quote_always(value))
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials() -> Credentials {
        Credentials {
            version: 1,
            url: "https://api.builds.example.org:1234".into(),
            token: Some("to'ken$(id)".into()),
            ca: "-----BEGIN CERTIFICATE-----\nca\n-----END CERTIFICATE-----\n".into(),
            cert: "-----BEGIN CERTIFICATE-----\ncert\n-----END CERTIFICATE-----\n".into(),
            key: "-----BEGIN PRIVATE KEY-----\nkey\n-----END PRIVATE KEY-----\n".into(),
            expires: "2027-11-30T00:00:00Z".parse().unwrap(),
            gateway_host: Some("builds.example.org".into()),
            gateway_port: Some(1234),
        }
    }

    #[test]
    fn each_format_is_as_documented() {
        let credentials = credentials();
        insta::assert_snapshot!("env", env(&credentials));
        insta::assert_snapshot!("github", github(&credentials));
        insta::assert_snapshot!("gitlab", gitlab(&credentials));
        insta::assert_snapshot!("json", serde_json::to_string_pretty(&credentials).unwrap());
    }

    /// Stand-ins for `gh` and `glab`: the latter knows the variables that are
    /// files in a folder, creates none twice, and changes none that is not there.
    const STANDINS: &str = r#"set -u
gh() { printf '%s=' "$3"; cat; echo; }
glab() {
  [ "$1" = variable ] && case $2 in
  get) [ -f "$FOLDER/$3" ] ;;
  set) [ ! -f "$FOLDER/$3" ] && gh "$@" && echo "$*" >"$FOLDER/$3" ;;
  update) [ -f "$FOLDER/$3" ] && gh "$@" && echo "$*" >"$FOLDER/$3" ;;
  esac
}
"#;

    /// What the commands receive, in a script that is piped into a shell.
    fn shell(folder: &std::path::Path, script: &str, then: &str) -> std::process::Output {
        use std::io::Write as _;
        let mut shell = std::process::Command::new("sh")
            .args(["-s", "--", "--repo", "acme/shop"])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("FOLDER", folder)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        write!(shell.stdin.take().unwrap(), "{STANDINS}{script}\n{then}").unwrap();
        shell.wait_with_output().unwrap()
    }

    fn said(output: &std::process::Output) -> String {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "what a command was handed is in a file")]
    fn a_shell_receives_every_value_unchanged() {
        let credentials = credentials();
        let folder = tempfile::tempdir().unwrap();
        // The second time everything is there already.
        let [github, first, second] = [github(&credentials), gitlab(&credentials), gitlab(&credentials)]
            .map(|script| said(&shell(folder.path(), &script, "")));
        for (name, value, _) in credentials.variables() {
            let then = format!("printf %s \"${name}\"");
            assert_eq!(said(&shell(folder.path(), &env(&credentials), &then)), value);
            for received in [&github, &first, &second] {
                assert!(received.contains(&format!("{name}={value}\n")), "{name}: {received}");
            }
        }
        let token = std::fs::read_to_string(folder.path().join("BUILDKIT_OPERATOR_TOKEN")).unwrap();
        assert_eq!(token, "variable update BUILDKIT_OPERATOR_TOKEN --raw --masked --repo acme/shop\n");
    }

    #[test]
    fn the_first_command_that_fails_is_the_last() {
        let folder = tempfile::tempdir().unwrap();
        for script in [github(&credentials()), gitlab(&credentials())] {
            let (head, rest) = script.split_once("set -e\n").unwrap();
            let script = format!("{head}gh() {{ cat >/dev/null; return 3; }}\nset -e\n{rest}");
            let output = shell(folder.path(), &script, "echo on");
            assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        }
    }

    #[test]
    fn an_open_farm_has_no_token_and_a_cluster_s_own_name_is_known() {
        let open = Credentials { token: None, ..credentials() };
        assert!(!env(&open).contains("TOKEN"));
        assert!(!serde_json::to_string(&open).unwrap().contains("token"));
        assert!(open.reachable_from_outside());
        let inside = Credentials { url: "http://buildkit-operator-buildd.buildkit-operator.svc:8080".into(), ..open };
        assert!(!inside.reachable_from_outside());
    }
}
