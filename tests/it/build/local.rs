//! What can be known on this machine is told before anybody is called.

use std::path::Path;

use tokio::process::Command;

use super::farm::{Farm, ends, ends_with, stderr, which};
use super::refusals::has;

impl Farm {
    fn git(&self, folder: &Path, args: &[&str]) {
        let mut git = std::process::Command::new("git");
        git.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", self.path("home"));
        assert!(git.args(args).current_dir(folder).status().unwrap().success());
    }

    fn nobody_was_called(&self) {
        assert!(self.memory.seen().calls.is_empty());
        self.is_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_work_wakes_nobody_and_a_rehearsal_says_the_same() {
    let farm = Farm::start().await;
    std::fs::write(farm.path("context/Other"), "FROM scratch\n").unwrap();
    std::fs::create_dir(farm.path("empty")).unwrap();
    let long = "n".repeat(129);
    let deep = format!("github.com/{}", "r".repeat(502));
    for (args, parts) in [
        (&["nowhere"][..], &["there is no folder \"nowhere\""][..]),
        (&["Dockerfile"], &["there is no folder \"Dockerfile\""]),
        (&["../empty"], &["there is no Dockerfile \"../empty/Dockerfile\"", "--file"]),
        (&["../context", "--file", "../Other"], &["there is no Dockerfile \"../Other\"", "counts from here"]),
        (&["--file", "Missing"], &["there is no Dockerfile \"Missing\""]),
        (
            &["--digest-file", "no/where", "--output", "type=image"],
            &["--digest-file cannot be written", "folder \"no\""],
        ),
        (&["--metadata-file", "."], &["--metadata-file cannot be written", "is a folder"]),
        (&["--digest-file", "digest"], &["nothing else has a digest"]),
        (&["--digest-file", "digest", "--output", "out"], &["nothing else has a digest"]),
        (&["--arch", "amd64,arm64", "--output", "type=oci,dest=a"], &["one archive, as --output \"type=oci,dest=a\""]),
        (&["--arch", "amd64,arm64", "--output", "type=tar,dest=a"], &["one archive"]),
        (&["--arch", "amd64,arm64", "--load", "--tag", "a"], &["one archive, as --load asks"]),
        (&["--secret", "id=a,src=/"], &["--secret 1 names a folder"]),
        (&["--secrets", "/hunter2/secrets"], &["BUILDKIT_OPERATOR_SECRETS looks like the path of a file"]),
        (&["--ssh", "default"], &["SSH_AUTH_SOCK is not set", "ssh-agent"]),
        (&["--ssh", "key=../none"], &["there is no \"../none\""]),
        (&["--tag", "https://r.example.org/a"], &["is no name of an image", "without https://"]),
        (&["--push", "--tag", "Shop"], &["is no name of an image", "lower case"]),
        (&["--name", &long], &["name is too long", "128"]),
        (&["--repo", &deep], &["repo is too long", "512"]),
        (&["--repo", "../shop"], &["\"../shop\" is a place on this machine", "--repo"]),
        (&["--secret", "hunter2"], &["--secret 1 is not NAME=VALUE"]),
        (&["--secret", "a=hunter2", "--secret", "a=hunter3"], &["--secret 2 has the name of another"]),
        (&["--secret", "a="], &["--secret 1 has a name, but no value"]),
        (&["--secret", "id=a,src=hunter2"], &["--secret 1 names a file that is not there"]),
        (&["--builder", "buildctl", "--load", "--tag", "a"], &["cannot load an image into Docker"]),
        (&["--builder", "buildctl", "--arch", "amd64,arm64"], &["several need `docker buildx`"]),
        (&["--builder", "buildctl", "-"], &["reads nothing from standard input"]),
        (&["--progress", "how"], &["invalid value 'how'", "plain"]),
        (&["--buildd-url", "https://user:hunter2@h"], &["no address of a routing API"]),
        (&["--token", "Bearer hunter2"], &["BUILDKIT_OPERATOR_TOKEN holds white space", "Bearer"]),
        (&["--api-ca", "nonsense"], &["the CA of the routing API is neither PEM"]),
    ] {
        for rehearsal in [&[][..], &["--dry-run"]] {
            let printed = ends_with(2, farm.build(&[rehearsal, args].concat())).await;
            has(&printed, parts);
            assert!(!printed.contains("hunter"), "{printed}");
        }
    }
    farm.nobody_was_called();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_that_fails_is_told_with_its_words() {
    let farm = Farm::start().await;
    farm.remove_tool("docker");
    farm.remove_tool("buildctl");
    std::fs::write(farm.path("bin/docker"), "#!/bin/sh\necho 'docker: no \x1b[31mplugins' >&2\nexit 3\n").unwrap();
    std::fs::set_permissions(farm.path("bin/docker"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let printed = ends_with(1, farm.build(&["--dry-run"])).await;
    has(&printed, &["`docker buildx` fails (exit status: 3): docker: no \u{fffd}[31mplugins", "hint: install Docker"]);
    farm.nobody_was_called();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_has_ended_wakes_nobody() {
    let farm = Farm::start().await;
    let params = {
        let mut params = rcgen::CertificateParams::new(vec!["client".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        params.not_before = rcgen::date_time_ymd(2019, 1, 1);
        params
    };
    let key = rcgen::KeyPair::generate().unwrap();
    std::fs::write(farm.path("certs/cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(farm.path("certs/key.pem"), key.serialize_pem()).unwrap();
    let printed = ends_with(2, farm.build(&[])).await;
    has(&printed, &["the client's certificate has expired on 2020-01-01", "bko-install credentials"]);
    farm.nobody_was_called();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_line_of_a_secret_becomes_a_name() {
    let farm = Farm::start().await;
    for (variable, line) in [
        ("key=-----BEGIN PRIVATE KEY-----\nhunter2AAAA\n-----END PRIVATE KEY-----\n", 2),
        ("npm=aHVudGVyMg\nhunter2abc=\n", 2),
        ("npm=aHVudGVyMg\r\n\r\nhunter2abc==\r\n", 3),
        ("npm=x\n  hunter2=y", 2),
        ("{\"npm\": \"hunter2=\"}", 1),
        ("\"hunter2=a\nb\"", 1),
        ("hunter2", 1),
        ("hunter2=", 1),
        ("npm=x\nenv=hunter2", 2),
        ("npm=x\nid=hunter2", 2),
        ("npm=x\nnpm=hunter2", 2),
    ] {
        let mut command = farm.build(&["--dry-run"]);
        command.env("BUILDKIT_OPERATOR_SECRETS", variable);
        let output = ends(command).await;
        let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
        assert_eq!(output.status.code(), Some(2), "{variable:?}: {printed}");
        has(
            &printed,
            &[&format!("line {line} of BUILDKIT_OPERATOR_SECRETS "), "id=NAME,src=FILE", "id=NAME,env=VARIABLE"],
        );
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    farm.nobody_was_called();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_of_several_lines_reaches_the_build_whole() {
    let farm = Farm::start().await;
    farm.dockerfile(
        "RUN --mount=type=secret,id=key --mount=type=secret,id=npm cat /run/secrets/key /run/secrets/npm > /result",
    );
    let key = "-----BEGIN PRIVATE KEY-----\nAAAA,b\nabc=\n-----END PRIVATE KEY-----\n";
    std::fs::write(farm.path("lines"), "npm=a,b=c\n").unwrap();
    for builder in ["buildx", "buildctl"] {
        let flag = format!("key={key}");
        let args = ["--builder", builder, "--no-cache", "--output", "type=local,dest=out"];
        let mut inline = farm.build(&[&args[..], &["--secret", &flag]].concat());
        inline.env("BUILDKIT_OPERATOR_SECRETS", "npm=a,b=c\n");
        let mut named = farm.build(&args);
        named.env("THE_KEY", key).env("BUILDKIT_OPERATOR_SECRETS", "npm=a,b=c\r\n\r\nid=key,env=THE_KEY\r\n");
        // As GitLab hands over variables of type file.
        let mut file = farm.build(&[&args[..], &["--secret", "id=key,env=THE_KEY"]].concat());
        file.env("THE_KEY", key).env("BUILDKIT_OPERATOR_SECRETS", farm.path("lines"));
        for command in [inline, named, file] {
            let printed = ends_with(0, command).await;
            let result = std::fs::read_to_string(farm.path("context/out/result")).unwrap();
            assert_eq!(result, format!("{key}a,b=c"), "{builder}: {printed}");
        }
    }
    farm.is_clean();
}

fn elsewhere(farm: &Farm, context: &Path) -> Command {
    let mut command = farm.build(&["--dry-run"]);
    command.arg(context).env("BUILDKIT_OPERATOR_REPO", "");
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn why_the_context_names_no_repository_is_told() {
    let farm = Farm::start().await;
    let context = farm.path("context");
    let printed = ends_with(2, elsewhere(&farm, &context)).await;
    has(&printed, &["no repository: git is not installed", "hint: install git, or pass --repo"]);
    farm.tool("git", &which("git"));
    let printed = ends_with(2, elsewhere(&farm, &context)).await;
    has(&printed, &[&format!("no repository: \"{}\" is in no git repository", context.display()), "hint: pass --repo"]);
    farm.git(&context, &["init", "--quiet"]);
    has(
        &ends_with(2, elsewhere(&farm, &context)).await,
        &["the context has no git remote \"origin\"", "hint: pass --repo"],
    );
    let mut foreign = elsewhere(&farm, &context);
    foreign.env("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1");
    let hint = format!("hint: git config --global --add safe.directory '{}', or pass --repo", context.display());
    has(&ends_with(2, foreign).await, &["since it belongs to somebody else", &hint]);
    for local in ["../y", "/srv/git/y.git", "file:///srv/git/y"] {
        farm.git(&context, &["config", "remote.origin.url", local]);
        has(&ends_with(2, elsewhere(&farm, &context)).await, &[&format!("\"{local}\" is a place on this machine")]);
    }
    std::fs::write(context.join(".git/config"), "[remote \"origin\"\nurl = https://a:hunter2@h/x\n").unwrap();
    let printed = ends_with(2, elsewhere(&farm, &context)).await;
    has(&printed, &["no repository: git fails in", "bad config", "hint: pass --repo"]);
    assert!(!printed.contains("hunter2"), "{printed}");
    // A URL is its own repository, in every form that git knows.
    for url in [
        "git@github.com:acme/shop.git#main",
        "https://u:hunter2@github.com/acme/shop.git",
        "ssh://git@github.com/acme/shop",
    ] {
        let output = ends(elsewhere(&farm, Path::new(url))).await;
        let printed = String::from_utf8(output.stdout).unwrap();
        has(&printed, &[r#"/route {"repo":"github.com/acme/shop","#]);
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    let printed = ends_with(2, elsewhere(&farm, Path::new("https://h/x.tar.gz"))).await;
    has(&printed, &["no repository: \"https://h/x.tar.gz\" is an archive"]);
    farm.nobody_was_called();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_without_an_export_is_warned_of() {
    let farm = Farm::start().await;
    for builder in ["buildx", "buildctl"] {
        let args = ["--builder", builder, "--tag", "shop:1"];
        let warning = "warning: nothing is exported, and --tag names nothing";
        has(&ends_with(0, farm.build(&args)).await, &[warning]);
        let out = farm.path(builder).display().to_string();
        let export = format!("type=oci,dest={out}");
        let printed = ends_with(0, farm.build(&[&args[..], &["--output", &export]].concat())).await;
        assert!(!printed.contains(warning), "{printed}");
        let archive = std::fs::read(out).unwrap();
        let archive = String::from_utf8_lossy(&archive);
        assert!(archive.contains("docker.io/library/shop:1"), "{builder} drops the name");
    }
    farm.is_clean();
}

#[tokio::test]
async fn no_help_shows_what_is_secret() {
    for command in ["build", "ps", "key", "credentials"] {
        let mut help = Command::new(env!("CARGO_BIN_EXE_bko-install"));
        help.args([command, "--help"]).env_clear();
        for name in ["BUILDD_URL", "REPO", "SECRETS", "TOKEN", "ADMIN_TOKEN", "ID_TOKEN", "CA", "CERT", "KEY", "API_CA"]
        {
            help.env(format!("BUILDKIT_OPERATOR_{name}"), "https://user:hunter2@h/x");
        }
        help.env("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "hunter2").env("ACTIONS_ID_TOKEN_REQUEST_URL", "https://hunter2@h");
        let output = ends(help).await;
        assert_eq!(output.status.code(), Some(0));
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(shown.len() > 500 && !shown.contains("hunter2"), "{shown}");
    }
}
