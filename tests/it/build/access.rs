//! Identities from CI systems, and the way to the routing API: TLS, proxies.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::farm::{Farm, TOKEN, ends_with};

pub(super) type Heads = Arc<Mutex<Vec<String>>>;

/// Stands for GitHub's: answers every request with a token, and keeps the heads.
pub(super) async fn mint(answer: &'static str) -> (SocketAddr, Heads) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let heads = Heads::default();
    let seen = heads.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = head(&mut stream).await;
            seen.lock().unwrap().push(head);
            let length = answer.len();
            let status = if answer.is_empty() { "403 Forbidden" } else { "200 OK" };
            let response =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{answer}");
            stream.write_all(response.as_bytes()).await.unwrap();
        }
    });
    (address, heads)
}

async fn head(stream: &mut TcpStream) -> String {
    let mut lines = BufReader::new(stream).lines();
    let mut head = String::new();
    while let Some(line) = lines.next_line().await.unwrap().filter(|line| !line.is_empty()) {
        head += &format!("{line}\n");
    }
    head
}

#[tokio::test(flavor = "multi_thread")]
async fn an_identity_is_asked_for_anew_for_every_call() {
    let (address, heads) = mint(r#"{"count": 1, "value": "s3cret"}"#).await;
    let farm = Farm::start().await;
    let mut command = farm.build(&[]);
    command
        .env("BUILDKIT_OPERATOR_TOKEN", "")
        .env("ACTIONS_ID_TOKEN_REQUEST_URL", format!("http://{address}/token?api-version=2"))
        .env("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-job");
    let printed = ends_with(0, command).await;
    let heads = heads.lock().unwrap().clone();
    assert_eq!(heads.len(), 2, "one for /route, one for /complete: {heads:?}");
    for head in heads {
        assert!(head.starts_with("GET /token?api-version=2&audience=buildkit-operator HTTP/1.1\n"), "{head}");
        assert!(head.to_lowercase().contains("authorization: bearer of-the-job"), "{head}");
    }
    assert!(!printed.contains(TOKEN) && !printed.contains("of-the-job"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_audience_may_be_asked_for_and_a_refusal_is_told() {
    let (address, heads) = mint("").await;
    let farm = Farm::start().await;
    let mut command = farm.build(&["--oidc-audience", "https://farm example"]);
    command
        .env_remove("BUILDKIT_OPERATOR_TOKEN")
        .env("ACTIONS_ID_TOKEN_REQUEST_URL", format!("http://{address}/token"))
        .env("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "of-the-job");
    let printed = ends_with(1, command).await;
    assert!(printed.contains("answers 403") && printed.contains("id-token: write"), "{printed}");
    let head = heads.lock().unwrap()[0].clone();
    assert!(head.starts_with("GET /token?audience=https%3A%2F%2Ffarm%20example HTTP/1.1\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn gitlab_s_identity_is_shown_as_it_is_and_a_token_comes_first() {
    let farm = Farm::start().await;
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_TOKEN", "").env("BUILDKIT_OPERATOR_ID_TOKEN", TOKEN);
    ends_with(0, command).await;
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_ID_TOKEN", "wrong");
    ends_with(0, command).await;
    farm.is_clean();
}

/// TLS before the routing API, as the gateway has it.
async fn terminator(farm: &Farm, names: &[&str]) -> SocketAddr {
    let (cert, key) = farm.issue(names);
    let chain = vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, api) = (listener.local_addr().unwrap(), farm.server.address);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(stream).await else { return };
                let mut server = TcpStream::connect(api).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn the_routing_api_is_reached_through_the_gateway_without_dns() {
    let farm = Farm::start().await;
    let address = terminator(&farm, &["api.builds.example.test"]).await;
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("https://api.builds.example.test:{}", address.port()));
    ends_with(0, command).await;
    farm.is_clean();
    // A name that its certificate lacks.
    let mut command = farm.build(&[]);
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("https://localhost:{}", address.port()));
    let printed = ends_with(1, command).await;
    assert!(printed.contains("the certificate of \"localhost\" is not trusted"), "{printed}");
    assert!(printed.contains("hint: use a name that the certificate has"), "{printed}");
    // An authority of its own replaces that of the daemons.
    let mut command = farm.build(&["--api-ca", &farm.path("other/ca.pem").display().to_string()]);
    super::daemon::Authority::new().client_folder(&super::daemon::Authority::new(), &farm.path("other"));
    command.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("https://api.builds.example.test:{}", address.port()));
    let printed = ends_with(1, command).await;
    assert!(printed.contains("is not trusted") && printed.contains("--api-ca"), "{printed}");
    farm.is_clean();
}

/// A proxy that knows CONNECT and whole addresses, and whom it let through.
async fn proxy() -> (SocketAddr, Heads) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let heads = Heads::default();
    let seen = heads.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let seen = seen.clone();
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(client.read_u8().await.unwrap());
                }
                let text = String::from_utf8(request.clone()).unwrap();
                seen.lock().unwrap().push(text.clone());
                let target = text.split(' ').nth(1).unwrap();
                let connects = text.starts_with("CONNECT ");
                let authority = target.trim_start_matches("http://").split('/').next().unwrap().to_owned();
                let mut server = TcpStream::connect(authority.replace("localhost", "127.0.0.1")).await.unwrap();
                if connects {
                    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                } else {
                    server.write_all(text.replacen(&format!("http://{authority}"), "", 1).as_bytes()).await.unwrap();
                }
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, heads)
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_of_the_environment_are_used() {
    let farm = Farm::start().await;
    let tls = terminator(&farm, &["localhost"]).await;
    for (variable, url, want) in [
        ("http_proxy", format!("http://{}", farm.server.address), format!("POST http://{}/route", farm.server.address)),
        ("HTTPS_PROXY", format!("https://localhost:{}", tls.port()), format!("CONNECT localhost:{}", tls.port())),
    ] {
        let (address, heads) = proxy().await;
        let mut command = farm.build(&[]);
        command.env("BUILDKIT_OPERATOR_BUILDD_URL", url).env(variable, format!("http://{address}"));
        ends_with(0, command).await;
        let heads = heads.lock().unwrap().clone();
        assert_eq!(heads.len(), 2, "{heads:?}");
        assert!(heads[0].starts_with(&want), "{heads:?}");
    }
    let (address, heads) = proxy().await;
    let mut command = farm.build(&[]);
    command.env("http_proxy", format!("http://{address}")).env("no_proxy", "127.0.0.1");
    ends_with(0, command).await;
    assert!(heads.lock().unwrap().is_empty());
    farm.is_clean();
}
