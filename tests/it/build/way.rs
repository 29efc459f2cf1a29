//! On the way to the routing API: what will not heal ends at once, and says
//! what was on the way.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::ExtendedKeyUsagePurpose;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::daemon::{Authority, daemon};
use super::farm::{Farm, ends_with};
use super::refusals::has;

/// A server that wants a client certificate, as a daemon does.
async fn demanding(authority: &Authority) -> SocketAddr {
    let (cert, key) = authority.issue(&["localhost"], ExtendedKeyUsagePurpose::ServerAuth);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let chain = vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = config.with_client_cert_verifier(verifier).with_single_cert(chain, key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = acceptor.accept(stream).await;
        }
    });
    address
}

/// Reads something, and answers this.
async fn says(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut begin = [0; 4096];
            if stream.read(&mut begin).await.is_ok() {
                let _ = stream.write_all(answer).await;
                let _ = stream.read(&mut begin).await;
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn what_will_not_heal_is_not_waited_for() {
    let farm = Farm::start().await;
    let unknown_name = says(&[21, 3, 3, 0, 2, 2, 112]).await;
    let handshake_failure = says(&[21, 3, 3, 0, 2, 2, 40]).await;
    let demanding = demanding(&daemon().authority).await;
    let plain = farm.server.address;
    for (url, part) in [
        (format!("https://localhost:{}", demanding.port()), "it wants a client certificate"),
        (format!("https://localhost:{}", unknown_name.port()), "it knows no such name"),
        (format!("https://localhost:{}", handshake_failure.port()), "no TLS with \"localhost\""),
        (format!("https://localhost:{}", plain.port()), "is it an http:// address?"),
        (format!("http://localhost:{}", demanding.port()), "is it an https:// address?"),
    ] {
        let begun = Instant::now();
        let mut command = farm.build(&["--route-wait", "60s"]);
        command.env("BUILDKIT_OPERATOR_BUILDD_URL", &url);
        has(&ends_with(1, command).await, &[part, "hint: "]);
        assert!(begun.elapsed() < Duration::from_secs(10), "{url} is asked again");
    }
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_whose_backend_is_away_is_asked_again() {
    let farm = Farm::start().await;
    let away = says(&[21, 3, 3, 0, 2, 2, 80]).await;
    let mut command = farm.build(&["--route-wait", "3s"]);
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("https://localhost:{}", away.port()));
    has(&ends_with(4, command).await, &["no daemon for github.com/acme/shop amd64 after ", "broke off"]);
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_was_used_is_named_and_its_password_is_not() {
    let farm = Farm::start().await;
    let wants = "HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n";
    let squid = "HTTP/1.1 403 No\r\ncontent-length: 6\r\n\r\n<html>";
    for (variable, url, answer, code, parts) in [
        ("https_proxy", "https://api.example.test", Some(wants), 1, &["the proxy answers 407", "USER:PASSWORD@"][..]),
        ("http_proxy", "http://api.example.test", Some(wants), 1, &["the proxy answers 407", "USER:PASSWORD@"]),
        ("http_proxy", "http://api.example.test", Some(squid), 1, &["answers 403: Forbidden, with a page in HTML"]),
        ("https_proxy", "https://api.example.test", None, 4, &["cannot connect to 127.0.0.1:1", "no_proxy"]),
    ] {
        let proxy = match answer {
            Some(answer) => says(answer.as_bytes()).await,
            None => "127.0.0.1:1".parse().unwrap(),
        };
        let mut command = farm.build(&["--route-wait", "2s"]);
        command.env("BUILDKIT_OPERATOR_BUILDD_URL", url).env("BUILDKIT_OPERATOR_GATEWAY_IP", "");
        command.env(variable, format!("http://user:hunter2@{proxy}"));
        let printed = ends_with(code, command).await;
        has(&printed, parts);
        has(&printed, &[&format!("through the proxy {proxy}")]);
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", "https://api.example.test").env("BUILDKIT_OPERATOR_GATEWAY_IP", "");
    command.env("https_proxy", "socks5://user:hunter2@127.0.0.1:1");
    let printed = ends_with(1, command).await;
    has(&printed, &["the proxy socks5://127.0.0.1:1/ of the environment cannot be used", "no_proxy"]);
    assert!(!printed.contains("hunter2"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_commands_the_terminal_of_a_build() {
    let farm = Farm::start().await;
    let answer = "HTTP/1.1 400 No\r\ncontent-length: 10\r\n\r\n\x1b[2Jre\u{9b}1m";
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("http://{}", says(answer.as_bytes()).await));
    let printed = ends_with(1, command).await;
    has(&printed, &["answers 400: \u{fffd}[2Jre\u{fffd}1m"]);
    assert!(!printed.contains(|c: char| c.is_control() && c != '\n'), "{printed:?}");
}
