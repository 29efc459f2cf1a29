//! What is secret reaches the build and nothing else.

use super::farm::{Farm, Running, TOKEN};

const VALUE: &str = "hunter2-of-this-test";

/// What every process of this machine was started with.
fn command_lines() -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir("/proc").unwrap().map_while(Result::ok) {
        all += &String::from_utf8_lossy(&std::fs::read(entry.path().join("cmdline")).unwrap_or_default());
    }
    all
}

/// The environment of the builder's process.
fn environment_of_builders(farm: &Farm) -> Vec<String> {
    let machine = farm.path("docker").display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().map_while(Result::ok) {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let command = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if environment.contains(&machine) && command.trim() != "bko-install" {
            found.push(environment);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_in_no_process_list_no_output_and_no_image() {
    for builder in ["buildx", "buildctl"] {
        let farm = Farm::start().await;
        let step = "RUN --mount=type=secret,id=npm echo \"be\"gun && wc -c < /run/secrets/npm > /result && sleep 2";
        farm.dockerfile(step);
        let mut command = farm.build(&["--builder", builder, "--no-cache", "--output", "type=local,dest=out"]);
        command.env("BUILDKIT_OPERATOR_SECRETS", format!("npm={VALUE}\n"));
        farm.certificates_in_variables(&mut command);
        let mut build = Running::start(command);
        build.until("begun").await;
        let lines = command_lines();
        assert!(lines.contains("id=npm,src="), "the builder is seen, so that its secret would be too");
        assert!(!lines.contains(VALUE) && !lines.contains(TOKEN), "{builder}");
        let builders = environment_of_builders(&farm);
        assert!(!builders.is_empty());
        for environment in builders {
            for secret in [VALUE, "PRIVATE KEY", "BUILDKIT_OPERATOR_TOKEN"] {
                assert!(!environment.contains(secret), "{builder} is given {secret}");
            }
        }
        let (code, printed) = build.ends().await;
        assert_eq!(code, Some(0), "{printed}");
        for secret in [VALUE, TOKEN, "PRIVATE KEY"] {
            assert!(!printed.contains(secret), "{printed}");
        }
        let length = std::fs::read_to_string(farm.path("context/out/result")).unwrap();
        assert_eq!(length.trim(), VALUE.len().to_string());
        farm.is_clean();
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_build_can_be_read_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let farm = Farm::start().await;
    farm.dockerfile("RUN echo \"be\"gun && sleep 1 && echo x > /result");
    let mut command = farm.build(&["--no-cache", "--secret", "id=file,src=Dockerfile", "--secret", "npm=another"]);
    farm.certificates_in_variables(&mut command);
    let mut build = Running::start(command);
    build.until("begun").await;
    let folder = farm.path("tmp").read_dir().unwrap().next().unwrap().unwrap().path();
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder), 0o700);
    let files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4, "{files:?}");
    assert!(files.iter().all(|file| mode(file) == 0o600), "{files:?}");
    assert_eq!(build.ends().await.0, Some(0));
    farm.is_clean();
}
