//! Each builder builds, with everything that can be asked of it.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;

use tokio::net::{TcpListener, TcpStream};

use super::daemon::tools;
use super::farm::{Farm, KEY, ends, ends_with, stderr};
use crate::router::memory::Step;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Docker,
    Buildx,
    Buildctl,
}

impl Farm {
    fn only(self, kind: Kind) -> Self {
        match kind {
            Kind::Docker => self.remove_tool("buildctl"),
            Kind::Buildx => {
                self.remove_tool("docker");
                self.remove_tool("buildctl");
                self.tool("buildx", &tools().join("buildx"));
            }
            Kind::Buildctl => self.remove_tool("docker"),
        }
        self
    }
}

async fn builds_with(kind: Kind) {
    let farm = Farm::start().await.only(kind);
    farm.dockerfile("ARG WHO\nRUN echo hello $WHO > /result");
    let args = ["--output", "type=local,dest=out", "--build-arg", "WHO=a farm", "--label", "l=v", "--target", ""];
    let printed = ends_with(0, farm.build(&args)).await;
    assert_eq!(std::fs::read_to_string(farm.path("context/out/result")).unwrap(), "hello a farm\n");
    assert!(printed.contains("waiting for a daemon for github.com/acme/shop amd64\n"), "{printed}");
    assert!(printed.contains("[build 3/3] RUN echo hello"), "the builder's own output:\n{printed}");
    let seen = farm.memory.seen();
    assert_eq!((seen.persisted, seen.calls.get(&Step::End)), (1, Some(&1)), "{kind:?}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_buildx_builds() {
    builds_with(Kind::Docker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buildx_by_itself_builds() {
    builds_with(Kind::Buildx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn buildctl_builds() {
    builds_with(Kind::Buildctl).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_builder_s_exit_code_is_ours() {
    for kind in [Kind::Docker, Kind::Buildctl] {
        let farm = Farm::start().await.only(kind);
        farm.dockerfile("RUN echo no >&2; exit 7");
        let printed = ends_with(1, farm.build(&[])).await;
        assert!(printed.contains("exit code: 7"), "{printed}");
        assert_eq!(farm.memory.seen().persisted, 1, "a build that fails by itself is not repeated");
        farm.is_clean();
    }
    let farm = Farm::start().await;
    let script = "#!/bin/sh\n[ \"$1\" = build ] || [ \"$2\" = build ] || exit 0\nexit 42\n";
    farm.remove_tool("docker");
    std::fs::write(farm.path("bin/docker"), script).unwrap();
    std::fs::set_permissions(farm.path("bin/docker"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    ends_with(42, farm.build(&[])).await;
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn further_arguments_reach_the_builder() {
    let farm = Farm::start().await;
    let printed = ends_with(125, farm.build(&["--", "--no-such-flag"])).await;
    assert!(printed.contains("unknown flag: --no-such-flag"), "{printed}");
    ends_with(0, farm.build(&["--output", "type=local,dest=out", ".", "--", "--build-context", "other=."])).await;
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_is_kept_while_its_certificate_is_and_no_longer() {
    let farm = Farm::start().await;
    for _ in 0..2 {
        ends_with(0, farm.build(&[])).await;
        assert_eq!(farm.builders().len(), 1, "{:?}", farm.builders());
    }
    let kept = farm.builders();
    // Another daemon has a builder of its own, and the first stays as it is.
    ends_with(0, farm.build(&["--name", "web"])).await;
    assert_eq!(farm.builders().len(), 2);
    assert!(kept.iter().all(|name| farm.builders().contains(name)));
    let mut command = farm.build(&["--name", "other"]);
    farm.certificates_in_variables(&mut command);
    ends_with(0, command).await;
    assert_eq!(farm.builders().len(), 2, "files that are gone can be used by nobody");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn builds_at_once_do_not_disturb_one_another() {
    let farm = Farm::start().await;
    let build = |name: &str, variables: bool| {
        let mut command = farm.build(&["--name", name, "--output", &format!("type=local,dest=out-{name}")]);
        if variables {
            farm.certificates_in_variables(&mut command);
        }
        ends_with(0, command)
    };
    // The same project twice, each way, and another one.
    tokio::join!(build("a", false), build("a", false), build("a", true), build("a", true), build("b", false));
    assert_eq!(farm.memory.seen().persisted, 5);
    farm.is_clean();
}

/// One address before two daemons: a client that asks for this name gets the second.
async fn two_daemons(name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut hello = vec![0; 4096];
                let length = client.peek(&mut hello).await.unwrap();
                let second = String::from_utf8_lossy(&hello[..length]).contains(name);
                let daemon = if second { super::daemon::second() } else { super::daemon::daemon() };
                let mut daemon = TcpStream::connect(daemon.address).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut daemon).await;
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn several_architectures_are_one_image_from_one_builder() {
    let farm = Farm::behind(two_daemons("buildkitd-p2611681bb1b2345e").await).await;
    // Nothing runs, so that one machine can play both.
    std::fs::write(farm.path("context/Dockerfile"), "FROM scratch\nCOPY Dockerfile /\n").unwrap();
    let args = ["--arch", "amd64,arm64", "--progress", "plain"];
    let printed = ends_with(0, farm.build(&args)).await;
    for arch in ["amd64", "arm64"] {
        let step = format!("[linux/{arch} 1/1] COPY Dockerfile /");
        assert!(printed.contains(&step), "no step for {arch}:\n{printed}");
    }
    let keys: Vec<_> = farm.memory.seen().projects.keys().cloned().collect();
    assert!(keys.len() == 2 && keys.contains(&KEY.to_owned()), "{keys:?}");
    farm.is_clean();
    farm.remove_tool("docker");
    let printed = ends_with(2, farm.build(&args)).await;
    assert!(printed.contains("several need `docker buildx`"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_digest_is_what_the_builder_says() {
    for kind in [Kind::Buildctl, Kind::Docker] {
        let farm = Farm::start().await.only(kind);
        let args = ["--output", "type=image,name=shop", "--digest-file", "digest", "--metadata-file", "metadata.json"];
        ends_with(0, farm.build(&args)).await;
        let digest = std::fs::read_to_string(farm.path("context/digest")).unwrap();
        let metadata = std::fs::read_to_string(farm.path("context/metadata.json")).unwrap();
        assert!(digest.starts_with("sha256:") && metadata.contains(digest.trim()), "{digest}\n{metadata}");
        // As the umask has it, and not as buildctl does.
        let mode = |file: &str| farm.path(file).metadata().unwrap().mode() & 0o777;
        assert_eq!(mode("context/metadata.json"), mode("context/digest"));
        farm.is_clean();
    }
    let farm = Farm::start().await;
    let printed = ends_with(1, farm.build(&["--digest-file", "digest", "--", "--output", "out"])).await;
    assert!(printed.contains("nothing was exported as an image"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_repository_is_the_context_s_own_and_its_password_stays_at_home() {
    let farm = Farm::start().await;
    farm.tool("git", &super::farm::which("git"));
    for args in
        [&["init", "--quiet"][..], &["remote", "add", "origin", "https://oauth2:hunter2@github.com/Acme/Shop.git"]]
    {
        let status = std::process::Command::new("git").args(args).current_dir(farm.path("context")).status().unwrap();
        assert!(status.success());
    }
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_REPO", "");
    let printed = ends_with(0, command).await;
    assert!(farm.memory.seen().projects.contains_key(KEY), "{printed}");
    assert!(!printed.contains("hunter2"), "{printed}");
    std::fs::remove_dir_all(farm.path("context/.git")).unwrap();
    let mut command = farm.build(&[]);
    command.env_remove("BUILDKIT_OPERATOR_REPO");
    let printed = ends_with(2, command).await;
    assert!(printed.contains("no repository") && printed.contains("--repo"), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rehearsal_prints_what_would_be_run_and_calls_nobody() {
    let farm = Farm::start().await;
    let args = ["--dry-run", "--arch", "amd64,arm64", "--tag", "r.example.org/shop:1", "--push"];
    for folder in [true, false] {
        let mut command = farm.build(&[&args[..], &["https://user:hunter2@github.com/acme/shop.git"]].concat());
        command
            .env("BUILDKIT_OPERATOR_CLIENT_CERTS", if folder { "../certs" } else { "" })
            .env("BUILDKIT_OPERATOR_BUILDD_URL", "https://api.builds.example.test:1234")
            .env("BUILDKIT_OPERATOR_GATEWAY_HOST", "builds.example.test")
            .env("BUILDKIT_OPERATOR_GATEWAY_IP", "")
            .env("BUILDKIT_OPERATOR_SECRETS", "npm=hunter2\n");
        let output = ends(command).await;
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!printed.contains("hunter2") && stderr(&output).is_empty(), "{printed}{}", stderr(&output));
        if folder {
            assert!(printed.contains("/context/../certs/ca.pem"), "{printed}");
        } else {
            insta::assert_snapshot!(printed);
        }
    }
    assert!(farm.memory.seen().calls.is_empty());
}
