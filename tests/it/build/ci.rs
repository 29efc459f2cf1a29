//! `examples/ci`: every script and every `run:` body runs, in a machine that
//! has what the CI system gives it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use serde_yaml::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use super::access::mint;
use super::daemon::DOMAIN;
use super::farm::{Farm, KEY, REPO, Running, TOKEN, ends, ends_with, stderr, which};

const FOLDER: &str = "examples/ci";
const SHA: &str = "0123456789abcdef";

/// A registry on loopback, and a machine to build for it.
struct Ci {
    farm: Farm,
    registry: SocketAddr,
    _process: Child,
    /// Where the executable can be fetched.
    executable: SocketAddr,
}

impl Ci {
    async fn start() -> Self {
        let farm = Farm::start().await;
        // The listener is closed before the registry binds: nobody else takes the port meanwhile.
        let registry = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{registry}'}}\n",
            farm.path("registry").display()
        );
        std::fs::write(farm.path("registry.yaml"), config).unwrap();
        let mut command = Command::new(which("docker-registry"));
        command.arg("serve").arg(farm.path("registry.yaml")).kill_on_drop(true);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let process = command.spawn().unwrap();
        let up = async {
            while TcpStream::connect(registry).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), up).await.expect("the registry does not start");
        std::fs::create_dir_all(farm.path("context/ci")).unwrap();
        std::fs::copy(Path::new(FOLDER).join("build-curl.sh"), farm.path("context/ci/build-curl.sh")).unwrap();
        std::fs::create_dir_all(farm.path("runner")).unwrap();
        Self { farm, registry, _process: process, executable: serve_the_executable().await }
    }

    /// A shell on the machine, with what `bko-install credentials` handed over.
    fn shell(&self, shell: &[&str], script: &str) -> Command {
        // A shell cannot trap what was ignored when it began, as it is in the background of another.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").args(shell).arg(script).current_dir(self.farm.path("context"));
        self.farm.environment(&mut command);
        self.farm.certificates_in_variables(&mut command);
        let path = format!("{}:/usr/bin:/bin", self.farm.path("bin").display());
        command.env("PATH", path);
        command
    }

    /// The image is in the registry.
    async fn has(&self, image: &str) {
        let (name, tag) = image.rsplit_once(':').unwrap();
        let name = name.strip_prefix(&format!("{}/", self.registry)).unwrap();
        let url = format!("http://{}/v2/{name}/manifests/{tag}", self.registry);
        let mut curl = Command::new("curl");
        curl.args(["-fsS", "--noproxy", "*", &url]);
        for kind in ["application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"] {
            curl.args(["-H", &format!("Accept: {kind}")]);
        }
        let output = ends(curl).await;
        assert!(output.status.success(), "no {image}: {}", stderr(&output));
    }
}

/// As a server of files has it.
async fn serve_the_executable() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                let mut file = tokio::fs::File::open(env!("CARGO_BIN_EXE_bko-install")).await.unwrap();
                let length = file.metadata().await.unwrap().len();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).await.unwrap();
                tokio::io::copy(&mut file, &mut stream).await.unwrap();
            });
        }
    });
    address
}

fn example(name: &str) -> Value {
    serde_yaml::from_str(&std::fs::read_to_string(Path::new(FOLDER).join(name)).unwrap()).unwrap()
}

/// `${{ name }}` as the CI system fills it in; an unknown name is a mistake of the example.
fn filled(text: &str, values: &BTreeMap<&str, String>) -> String {
    let mut parts = text.split("${{");
    let mut filled = parts.next().unwrap().to_owned();
    for part in parts {
        let (name, rest) = part.split_once("}}").unwrap();
        filled += values.get(name.trim()).unwrap_or_else(|| panic!("nobody gives {name}"));
        filled += rest;
    }
    filled
}

fn environment(of: &Value, values: &BTreeMap<&str, String>) -> Vec<(String, String)> {
    let entries = of.get("env").and_then(Value::as_mapping).into_iter().flatten();
    entries.map(|(name, value)| (name.as_str().unwrap().to_owned(), filled(value.as_str().unwrap(), values))).collect()
}

/// Runs the `run:` bodies of the one job as GitHub and Forgejo do.
async fn actions(name: &str, token: bool) {
    let ci = Ci::start().await;
    let pem = |file: &str| std::fs::read_to_string(ci.farm.path("certs").join(file)).unwrap();
    let values = BTreeMap::from([
        ("github.repository", "Acme/Shop".to_owned()),
        ("forgejo.repository", "Acme/Shop".to_owned()),
        ("forgejo.server_url", "https://github.com".to_owned()),
        ("forgejo.actor", "alice".to_owned()),
        ("vars.REGISTRY", ci.registry.to_string()),
        ("secrets.REGISTRY_PASSWORD", "pass".to_owned()),
        ("vars.BKO_INSTALL_URL", format!("http://{}/bko-install", ci.executable)),
        ("vars.BUILDKIT_OPERATOR_BUILDD_URL", format!("http://{}", ci.farm.server.address)),
        ("vars.BUILDKIT_OPERATOR_CA", pem("ca.pem")),
        ("vars.BUILDKIT_OPERATOR_CERT", pem("cert.pem")),
        ("secrets.BUILDKIT_OPERATOR_KEY", pem("key.pem")),
        ("secrets.BUILDKIT_OPERATOR_TOKEN", if token { TOKEN.to_owned() } else { String::new() }),
    ]);
    let (identities, heads) = mint(r#"{"value":"s3cret"}"#).await;
    let workflow = example(name);
    let jobs = workflow["jobs"].as_mapping().unwrap();
    let (_, job) = jobs.iter().next().unwrap();
    let mut ran = 0;
    for step in job["steps"].as_sequence().unwrap() {
        let Some(body) = step.get("run").and_then(Value::as_str) else { continue };
        let mut command = ci.shell(&["bash", "-e", "-c"], body);
        command
            .env_remove("BUILDKIT_OPERATOR_TOKEN")
            .env("RUNNER_TEMP", ci.farm.path("runner"))
            .env("GITHUB_OUTPUT", ci.farm.path("output"))
            .env("GITHUB_SHA", SHA)
            .env("GITHUB_REPOSITORY", "Acme/Shop")
            .env("ACTIONS_ID_TOKEN_REQUEST_URL", format!("http://{identities}/token?v=2"))
            .env("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-job");
        for (name, value) in environment(job, &values).into_iter().chain(environment(step, &values)) {
            // The one registry that a test cannot have.
            command.env(name, value.replace("ghcr.io/", &format!("{}/", ci.registry)));
        }
        let printed = ends_with(0, command).await;
        assert!(!printed.contains(TOKEN), "{printed}");
        ran += 1;
    }
    assert!(ran > 0, "{name} runs nothing");
    ci.has(&format!("{}/acme/shop:{SHA}", ci.registry)).await;
    assert_eq!(ci.farm.memory.seen().persisted, 1);
    assert_eq!(heads.lock().unwrap().len(), if token { 0 } else { 2 }, "an identity for each call");
    ci.farm.is_clean();
    if job.get("outputs").is_some() {
        assert!(std::fs::read_to_string(ci.farm.path("output")).unwrap().starts_with("digest=sha256:"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn github_builds() {
    actions("github.yaml", false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn github_builds_with_curl() {
    actions("github-curl.yaml", false).await;
    actions("github-curl.yaml", true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forgejo_builds() {
    actions("forgejo.yaml", true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forgejo_builds_with_curl() {
    actions("forgejo-curl.yaml", false).await;
}

/// Runs the one job as GitLab does: one script in one shell.
async fn gitlab(name: &str) {
    let ci = Ci::start().await;
    // The package manager of the job's image, which has nothing to install here.
    std::fs::write(ci.farm.path("bin/apk"), "#!/bin/sh\n[ \"$1\" = add ]\n").unwrap();
    std::fs::set_permissions(ci.farm.path("bin/apk"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let pipeline = example(name);
    let (_, job) = pipeline.as_mapping().unwrap().iter().next().unwrap();
    let lines = ["before_script", "script"].map(|part| job[part].as_sequence().unwrap().clone()).concat();
    let script: Vec<_> = lines.iter().map(|line| line.as_str().unwrap()).collect();
    let mut command = ci.shell(&["sh", "-e", "-c"], &script.join("\n"));
    command
        .env("BUILDKIT_OPERATOR_TOKEN", "")
        .env("BUILDKIT_OPERATOR_ID_TOKEN", TOKEN)
        .env("BKO_INSTALL_URL", format!("http://{}/bko-install", ci.executable))
        .env("CI_REGISTRY", ci.registry.to_string())
        .env("CI_REGISTRY_USER", "alice")
        .env("CI_REGISTRY_PASSWORD", "pass")
        .env("CI_REGISTRY_IMAGE", format!("{}/acme/shop", ci.registry))
        .env("CI_COMMIT_SHA", SHA);
    for (name, value) in job["variables"].as_mapping().unwrap() {
        let value = value.as_str().unwrap().replace("$CI_PROJECT_URL", "https://github.com/acme/shop");
        command.env(name.as_str().unwrap(), value);
    }
    // Variables of type file.
    for (name, file) in [("CA", "ca.pem"), ("CERT", "cert.pem"), ("KEY", "key.pem")] {
        command.env(format!("BUILDKIT_OPERATOR_{name}"), ci.farm.path("certs").join(file));
    }
    let printed = ends_with(0, command).await;
    assert!(!printed.contains(TOKEN), "{printed}");
    ci.has(&format!("{}/acme/shop:{SHA}", ci.registry)).await;
    assert!(job["id_tokens"]["BUILDKIT_OPERATOR_ID_TOKEN"]["aud"] == "buildkit-operator");
    ci.farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn gitlab_builds() {
    gitlab("gitlab.yaml").await;
    gitlab("gitlab-curl.yaml").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_builds() {
    let ci = Ci::start().await;
    let image = format!("{}/acme/shop:sh", ci.registry);
    let script = std::fs::canonicalize(Path::new(FOLDER).join("build.sh")).unwrap();
    let mut command = ci.shell(&["sh"], script.to_str().unwrap());
    command.arg("--label").arg("a=b").env("IMAGE", &image).env("BKO_INSTALL", env!("CARGO_BIN_EXE_bko-install"));
    ends_with(0, command).await;
    ci.has(&image).await;
    ci.farm.is_clean();
}

fn curl_script(ci: &Ci, arguments: &[&str]) -> Command {
    let mut command = ci.shell(&["sh"], "ci/build-curl.sh");
    command.args(arguments).env("BUILDKIT_OPERATOR_REPO", REPO);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_and_buildx_build_and_release_however_it_ends() {
    let ci = Ci::start().await;
    let image = format!("{}/acme/shop:curl", ci.registry);
    ends_with(0, curl_script(&ci, &["--push", "--tag", &image, "."])).await;
    ci.has(&image).await;
    ci.farm.is_clean();
    assert!(ci.farm.builders().is_empty());

    ci.farm.dockerfile("RUN exit 7");
    ends_with(1, curl_script(&ci, &["."])).await;
    ci.farm.is_clean();

    ci.farm.dockerfile("RUN echo \"be\"gun && sleep 60 && echo x > /result");
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let mut build = Running::start(curl_script(&ci, &["--no-cache", "."]));
        build.until("begun").await;
        build.signal(signal);
        let (ended, printed) = build.ends().await;
        assert_eq!(ended, Some(code), "{printed}");
        ci.farm.is_clean();
        assert!(ci.farm.builders().is_empty());
    }

    let mut wrong = curl_script(&ci, &["."]);
    wrong.env("BUILDKIT_OPERATOR_TOKEN", "hunter2");
    let printed = ends_with(1, wrong).await;
    assert!(printed.contains("error: no daemon: Unauthorized") && !printed.contains("hunter2"), "{printed}");
    ci.farm.is_clean();
}

/// A farm on whose machine `docker` only notes what it is told.
async fn noted() -> Farm {
    let farm = Farm::start().await;
    farm.remove_tool("docker");
    std::fs::write(farm.path("bin/docker"), "#!/bin/sh\necho \"$*\" >>\"$HOME/docker\"\n").unwrap();
    std::fs::set_permissions(farm.path("bin/docker"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    farm
}

fn noting(farm: &Farm, shell: &str) -> Command {
    let mut command = Command::new(shell);
    command.arg(std::fs::canonicalize(Path::new(FOLDER).join("build-curl.sh")).unwrap()).arg(".");
    farm.environment(&mut command);
    farm.certificates_in_variables(&mut command);
    command.env("PATH", format!("{}:/usr/bin:/bin", farm.path("bin").display()));
    command
}

fn key(name: &str, target: &str, arch: &str, untrusted: bool) -> String {
    bko_install::key::Project::requested(REPO, name, target, arch, untrusted).unwrap().key().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_script_honours_every_variable() {
    let farm = noted().await;
    let pem = |file: &str| std::fs::read_to_string(farm.path("certs").join(file)).unwrap();
    let packed = |file: &str| base64::Engine::encode(&base64::engine::general_purpose::STANDARD, pem(file));
    let one_line = pem("cert.pem").trim().replace('\n', "\\n");
    let file = farm.path("certs/key.pem").display().to_string();
    let certs = farm.path("certs").display().to_string();
    let blank = " ".to_owned();
    let own = |name: &str, value: &str| (format!("BUILDKIT_OPERATOR_{name}"), value.to_owned());
    let cases = [
        (vec![own("UNTRUSTED", "true")], key("", "", "amd64", true), ""),
        (vec![own("UNTRUSTED", "No"), own("NAME", "web")], key("web", "", "amd64", false), ""),
        (
            vec![own("TARGET", "build"), own("ARCH", "linux/arm64")],
            key("", "build", "arm64", false),
            "--target build .",
        ),
        (vec![own("GATEWAY_PORT", "4321"), own("GATEWAY_IP", "::1")], KEY.to_owned(), " tcp://[::1]:4321"),
        (
            vec![own("GATEWAY_HOST", "else.where"), own("GATEWAY_PORT", "9"), own("GATEWAY_IP", "")],
            KEY.to_owned(),
            &format!(" tcp://buildkitd-{KEY}.else.where:9"),
        ),
        (vec![own("GATEWAY_HOST", "else.where")], KEY.to_owned(), &format!("servername=buildkitd-{KEY}.else.where ")),
        (vec![own("ROUTE_WAIT", "5m")], KEY.to_owned(), &format!("servername=buildkitd-{KEY}.{DOMAIN} ")),
        (vec![own("CA", &packed("ca.pem")), own("CERT", &one_line), own("KEY", &file)], KEY.to_owned(), ""),
        (vec![own("CLIENT_CERTS", &certs), own("KEY", "")], KEY.to_owned(), ""),
        (vec![own("API_CA", &packed("ca.pem"))], KEY.to_owned(), ""),
        (vec![own("NAME", &blank), own("SECRETS", ""), own("TOKEN", " s3cret\n")], KEY.to_owned(), ""),
        (vec![own("REPO", "https://oauth2:hunter2@github.com/Acme/Shop.git")], KEY.to_owned(), ""),
    ];
    for (variables, key, told) in cases {
        for shell in ["dash", "bash"] {
            let before = farm.memory.seen().persisted;
            let _ = std::fs::remove_file(farm.path("home/docker"));
            let mut command = noting(&farm, shell);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            ends_with(0, command).await;
            let seen = farm.memory.seen();
            assert!(seen.projects.contains_key(&key) && seen.persisted > before, "{variables:?}: no {key}");
            let commands = std::fs::read_to_string(farm.path("home/docker")).unwrap();
            assert!(commands.contains(told), "{variables:?}: no \"{told}\" in {commands}");
            farm.is_clean();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_script_refuses_what_it_cannot_honour_before_anybody_is_called() {
    let farm = noted().await;
    for (name, value, part) in [
        ("UNTRUSTED", "perhaps", "want true or false"),
        ("ARCH", "amd64,arm64", "want amd64 or arm64"),
        ("ARCH", "riscv64", "want amd64 or arm64"),
        ("ROUTE_WAIT", "soon", "want seconds"),
        ("ROUTE_WAIT", "m", "want seconds"),
        ("ROUTE_WAIT", "1h30m", "want seconds"),
        ("SECRETS", "npm=hunter2", "--secret id=NAME,env=VARIABLE"),
        ("GATEWAY_HOST", "a/b", "want a domain"),
        ("GATEWAY_PORT", "x", "want 1 to 65535"),
        ("GATEWAY_IP", "here", "want an IPv4 or IPv6 address"),
        ("TOKEN", "Bearer hunter2", "is not the token alone"),
        ("CA", "hunter2", "BUILDKIT_OPERATOR_CA is neither PEM"),
        ("CERT", "aHVudGVyMg==", "BUILDKIT_OPERATOR_CERT is neither PEM"),
        ("KEY", "/no/such/file", "BUILDKIT_OPERATOR_KEY is neither PEM"),
        ("API_CA", "hunter2", "BUILDKIT_OPERATOR_API_CA is neither PEM"),
        ("CLIENT_CERTS", "/no/such/folder", "wants a folder with ca.pem"),
        ("KEY", "", "BUILDKIT_OPERATOR_KEY is not set"),
        ("BUILDD_URL", "", "BUILDKIT_OPERATOR_BUILDD_URL is not set"),
        ("REPO", "", "BUILDKIT_OPERATOR_REPO is not set"),
    ] {
        let mut command = noting(&farm, "dash");
        command.env(format!("BUILDKIT_OPERATOR_{name}"), value);
        let printed = ends_with(2, command).await;
        assert!(printed.starts_with("error: ") && printed.contains(part), "{name}={value}: {printed}");
        assert_eq!(printed.lines().count(), 1, "{printed}");
        assert!(!printed.contains("hunter2"), "{printed}");
        farm.is_clean();
    }
    assert!(farm.memory.seen().calls.is_empty() && !farm.path("home/docker").exists());
}

/// A variable that docs/build.md gains must be in the script, too.
#[test]
fn every_documented_variable_is_in_the_script() {
    let docs = std::fs::read_to_string("docs/build.md").unwrap();
    let script = std::fs::read_to_string(Path::new(FOLDER).join("build-curl.sh")).unwrap();
    let rows = docs.lines().filter(|line| line.starts_with("| `BUILDKIT_OPERATOR_"));
    let cells: Vec<_> = rows.map(|row| row.split('|').nth(1).unwrap()).collect();
    let names: Vec<_> = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(names.len() > 12, "{names:?}");
    let first = |name: &str| name.strip_prefix("BUILDKIT_OPERATOR_").or(name.strip_prefix('_')).map(str::to_owned);
    for name in names {
        // `BUILDKIT_OPERATOR_GATEWAY_HOST`, `_PORT`: the second one is GATEWAY_PORT.
        let name = first(name).map(|name| if name == "PORT" { "GATEWAY_PORT".to_owned() } else { name }).unwrap();
        let read = ["given", "need", "secret", "pem"].iter().any(|how| script.contains(&format!("{how} {name}")));
        assert!(read, "the script does not read BUILDKIT_OPERATOR_{name}");
    }
}

/// The lines of the README, for a machine on which DNS knows no daemon.
fn readme(ci: &Ci) -> String {
    let text = std::fs::read_to_string("README.md").unwrap();
    let (_, rest) = text.split_once("with `curl` and `docker buildx`:\n\n```sh\n").unwrap();
    let (snippet, _) = rest.split_once("```").unwrap();
    let daemon = ci.farm.gateway;
    let ours = snippet
        .replace("--driver remote \"$(field endpoint)\"", &format!("--driver remote \"tcp://{daemon}\""))
        .replace("\"cacert=", &format!("\"servername=buildkitd-{KEY}.{DOMAIN},cacert="))
        .replace("registry.example.org", &ci.registry.to_string());
    assert!(ours.contains("servername=") && ours.contains(&format!("tcp://{daemon}")), "{ours}");
    ours
}

#[tokio::test(flavor = "multi_thread")]
async fn the_readme_s_lines_build_again_and_again_and_stop_at_the_first_error() {
    let ci = Ci::start().await;
    let (script, image) = (readme(&ci), format!("{}/shop:1", ci.registry));
    for shell in ["dash", "dash", "bash"] {
        ends_with(0, ci.shell(&[shell, "-c"], &script)).await;
        ci.has(&image).await;
        ci.farm.is_clean();
        assert!(ci.farm.builders().is_empty());
    }
    ci.farm.dockerfile("RUN exit 7");
    ends_with(1, ci.shell(&["dash", "-c"], &script)).await;
    ci.farm.is_clean();
    assert!(ci.farm.builders().is_empty());
    let calls = ci.farm.memory.seen().calls.clone();
    let mut wrong = ci.shell(&["dash", "-c"], &script);
    wrong.env("BUILDKIT_OPERATOR_TOKEN", "hunter2");
    let printed = ends_with(22, wrong).await;
    assert!(printed.contains("401") && !printed.contains("buildx"), "{printed}");
    assert_eq!(ci.farm.memory.seen().calls, calls);
    ci.farm.is_clean();
}

/// What GitLab reads as settings of the whole pipeline can be no job's name.
#[test]
fn the_examples_are_workflows_with_one_job() {
    const SETTINGS: [&str; 13] = [
        "image",
        "services",
        "stages",
        "types",
        "before_script",
        "after_script",
        "variables",
        "cache",
        "include",
        "true",
        "false",
        "nil",
        "pages:deploy",
    ];
    for name in ["gitlab.yaml", "gitlab-curl.yaml"] {
        let pipeline = example(name);
        let jobs = pipeline.as_mapping().unwrap();
        assert_eq!(jobs.len(), 1, "{name}");
        assert!(jobs.keys().all(|job| !SETTINGS.contains(&job.as_str().unwrap())), "{name}");
    }
    for name in ["github.yaml", "github-curl.yaml", "forgejo.yaml", "forgejo-curl.yaml"] {
        let workflow = example(name);
        assert_eq!(workflow["jobs"].as_mapping().unwrap().len(), 1, "{name}");
        let identity = match name.starts_with("github") {
            true => workflow["permissions"]["id-token"] == "write",
            false => workflow["enable-openid-connect"] == true,
        };
        assert!(identity, "{name}");
    }
    let entries = std::fs::read_dir(FOLDER).unwrap().count();
    assert_eq!(entries, 8, "a new example needs a test");
}
