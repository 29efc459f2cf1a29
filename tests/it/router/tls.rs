//! The routing API's own TLS, and who `ps` trusts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bko_install::router::{Metrics, Router, Timeouts, run};
use bko_install::runtime::tls::{Certificate, Files};
use rcgen::ExtendedKeyUsagePurpose;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::memory::Memory;
use super::tokens;
use crate::build::daemon::Authority;

/// The routing API behind its own certificate, as the server has it.
async fn listener(authority: &Authority, folder: &std::path::Path) -> (SocketAddr, CancellationToken) {
    let (certificate, key) = authority.issue(&["api.builds.example.test"], ExtendedKeyUsagePurpose::ServerAuth);
    let files = Files { certificate: folder.join("tls.crt"), key: folder.join("tls.key") };
    std::fs::write(&files.certificate, certificate).unwrap();
    std::fs::write(&files.key, key).unwrap();
    let acceptor = Certificate::read(files).unwrap().acceptor().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, shutdown) = (listener.local_addr().unwrap(), CancellationToken::new());
    let router = Router::new(tokens(), Arc::new(Memory::ready()), Metrics::default());
    tokio::spawn(run(listener, router, Timeouts::new(Duration::from_secs(5)), Some(acceptor), shutdown.clone()));
    (address, shutdown)
}

async fn ps(port: u16, variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    command
        .args(["ps", "--all"])
        .env_clear()
        .env("BUILDKIT_OPERATOR_BUILDD_URL", format!("https://api.builds.example.test:{port}"))
        .env("BUILDKIT_OPERATOR_GATEWAY_IP", "127.0.0.1")
        .env("BUILDKIT_OPERATOR_TOKEN", "s3cret")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(20), command.output()).await.unwrap().unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[tokio::test]
async fn ps_trusts_the_authority_in_every_way_that_it_is_handed_over() {
    let (ours, other) = (Authority::new(), Authority::new());
    let scratch = tempfile::tempdir().unwrap();
    let (address, shutdown) = listener(&ours, scratch.path()).await;
    let (text, packed) = (ours.pem(), STANDARD.encode(ours.pem()));
    let file = scratch.path().join("ca.pem");
    std::fs::write(&file, &text).unwrap();
    let (file, folder, other) = (file.to_str().unwrap(), scratch.path().to_str().unwrap(), other.pem());
    let (api_ca, ca, certs) = ("BUILDKIT_OPERATOR_API_CA", "BUILDKIT_OPERATOR_CA", "BUILDKIT_OPERATOR_CLIENT_CERTS");
    for variable in [api_ca, ca] {
        for value in [&text, &packed, file] {
            let (code, said) = ps(address.port(), &[(variable, value)]).await;
            assert_eq!((code, said.contains("there is no project yet")), (Some(0), true), "{variable}={value}: {said}");
        }
    }
    for variables in [
        &[(api_ca, ""), (ca, &text)][..],
        &[(api_ca, " "), (ca, ""), (certs, folder)],
        &[(api_ca, &text), (ca, &other), (certs, "")],
    ] {
        let (code, said) = ps(address.port(), variables).await;
        assert_eq!(code, Some(0), "{variables:?}: {said}");
    }
    for (variables, code, part) in [
        (&[(api_ca, ""), (ca, "")][..], 1, "the certificate of \"api.builds.example.test\" is not trusted"),
        (&[(api_ca, &other), (ca, &text)], 1, "--api-ca"),
        (&[(ca, "nonsense")], 2, "the CA is neither PEM"),
        (&[(certs, "/no/such/folder")], 2, "there is no folder \"/no/such/folder\""),
        (&[(certs, "/proc")], 2, "holds no client certificate"),
        (&[("BUILDKIT_OPERATOR_TOKEN", file)], 2, "BUILDKIT_OPERATOR_TOKEN is the path of a file"),
    ] {
        let (got, said) = ps(address.port(), variables).await;
        assert!(got == Some(code) && said.contains(part), "{variables:?}: {said}");
    }
    shutdown.cancel();
}
