//! A gateway on loopback, with daemons and clients as the tests need them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bko_install::gateway::directory::{Backend, Directory};
use bko_install::gateway::metrics::{CloseLabels, Metrics, RejectedLabels};
use bko_install::gateway::rules::Rules;
use bko_install::gateway::streams::Streams;
use bko_install::gateway::wake::Waker;
use bko_install::gateway::{self, Close, Config, Limits, Links, Rejection};
use bko_install::sni::Domains;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::sync::CancellationToken;

/// The daemon that the captured hellos name.
pub(super) const DAEMON: &str = "buildkitd-abc123";

/// How often a long test repeats: in full when `BKO_REPEAT` is `full`, else a tenth.
pub(super) fn repetitions(full: usize) -> usize {
    let all = std::env::var("BKO_REPEAT").is_ok_and(|repeat| repeat == "full");
    if all { full } else { full.div_ceil(10) }
}

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two domains, and a short drain since most tests leave streams open.
pub(super) fn config() -> Config {
    let domains = ["builds.example.org", "ci.test"].map(str::to_owned).to_vec();
    let rules = Rules { domains: Domains::new(domains).unwrap(), ..Rules::default() };
    Config { rules: rules.fixed(), drain: Duration::from_millis(50), ..Config::default() }
}

/// The same with other limits.
pub(super) fn limited(limits: Limits) -> Config {
    ruled(|rules| rules.limits = limits)
}

/// The same with other rules.
pub(super) fn ruled(change: impl FnOnce(&mut Rules)) -> Config {
    let mut rules = config().rules.borrow().clone();
    change(&mut rules);
    Config { rules: rules.fixed(), ..config() }
}

/// A running gateway.
pub(super) struct Farm {
    pub(super) address: SocketAddr,
    pub(super) directory: Arc<Directory>,
    pub(super) streams: Arc<Streams>,
    pub(super) metrics: Arc<Metrics>,
    registry: Registry,
    shutdown: CancellationToken,
    running: JoinHandle<()>,
}

impl Farm {
    pub(super) async fn start(config: Config) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), config, CancellationToken::new())
    }

    /// With a control plane that can be asked to wake daemons.
    pub(super) async fn waking(config: Config, waker: Waker) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::link(listener, config, waker, CancellationToken::new())
    }

    pub(super) fn serve(listener: TcpListener, config: Config, shutdown: CancellationToken) -> Self {
        Self::link(listener, config, Waker::new(None, 0), shutdown)
    }

    fn link(listener: TcpListener, config: Config, waker: Waker, shutdown: CancellationToken) -> Self {
        let mut registry = Registry::default();
        let metrics = Arc::new(Metrics::register(&mut registry));
        let directory = Arc::new(Directory::default());
        let streams = Arc::new(Streams::default());
        let address = listener.local_addr().unwrap();
        let links = Links {
            directory: directory.clone(),
            streams: streams.clone(),
            metrics: metrics.clone(),
            waker: Arc::new(waker),
        };
        let run = gateway::run(listener, config, links, shutdown.clone());
        Self { address, directory, streams, metrics, registry, shutdown, running: tokio::spawn(run) }
    }

    /// Lists a daemon with its ready addresses.
    pub(super) fn list(&self, daemon: &str, ready: &[SocketAddr]) {
        self.directory.set(daemon, Some(Backend { ready: ready.to_vec(), terminating: vec![] }));
    }

    pub(super) async fn connect(&self) -> TcpStream {
        let stream = within(TcpStream::connect(self.address)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Connects and sends `bytes`.
    pub(super) async fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.unwrap();
        stream
    }

    pub(super) fn rejected(&self, reason: Rejection) -> u64 {
        self.metrics.rejected.get_or_create(&RejectedLabels { reason }).get()
    }

    pub(super) fn closed(&self, cause: Close) -> u64 {
        self.metrics.close.get_or_create(&CloseLabels { cause }).get()
    }

    /// Waits until no connection is left.
    pub(super) async fn at_rest(&self) {
        until(|| self.metrics.active.get() == 0).await;
    }

    /// Begins the shutdown.
    pub(super) fn shut_down(&self) {
        self.shutdown.cancel();
    }

    /// Waits for the end of the shutdown and checks the accounts.
    pub(super) async fn ended(self) {
        self.shutdown.cancel();
        within(self.running).await.unwrap();
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        let sum = |metric: &str| -> u64 {
            let metric = format!("buildkit_operator_gateway_{metric}");
            let lines = text.lines().filter(|line| line.starts_with(&metric));
            lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
        };
        assert_eq!(sum("accepted_total"), sum("rejected_total") + sum("close_total"), "{text}");
        for gauge in ["active", "peeking", "held"] {
            assert_eq!(sum(gauge), 0, "{text}");
        }
    }

    /// The metrics as they are scraped.
    pub(super) fn scrape(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        text
    }
}

pub(super) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("nothing came in time")
}

/// Waits for something that nobody announces: a gauge, the kernel's tables.
pub(super) async fn until(mut holds: impl FnMut() -> bool) {
    within(async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// A daemon's end without TLS: hands out its connections.
pub(super) struct RawDaemon {
    pub(super) address: SocketAddr,
    listener: TcpListener,
}

impl RawDaemon {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self { address: listener.local_addr().unwrap(), listener }
    }

    pub(super) async fn accept(&self) -> TcpStream {
        within(self.listener.accept()).await.unwrap().0
    }
}

/// An address that refuses connections.
pub(super) async fn refusing() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

pub(super) async fn read_all(stream: &mut (impl AsyncReadExt + Unpin)) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    within(stream.read_to_end(&mut bytes)).await?;
    Ok(bytes)
}

/// A fatal alert with this description.
pub(super) fn alert(description: u8) -> Vec<u8> {
    vec![21, 3, 3, 0, 2, 2, description]
}

/// A certificate authority, and TLS ends that trust it.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.as_ref().der().clone()).unwrap();
        Arc::new(roots)
    }

    fn issue(
        &self,
        names: &[&str],
        usage: ExtendedKeyUsagePurpose,
    ) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    /// A daemon that demands a client certificate, and answers every line with
    /// `greeting` and that line. Lists the certificates' count of each client.
    pub(super) async fn daemon(&self, greeting: &'static str) -> TlsDaemon {
        let (chain, key) = self.issue(&["*.builds.example.org", "*.ci.test"], ExtendedKeyUsagePurpose::ServerAuth);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots(), provider.clone()).build().unwrap();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let names = Arc::new(Mutex::new(Vec::new()));
        let seen = names.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), seen.clone());
                tokio::spawn(async move {
                    let mut stream = acceptor.accept(stream).await?;
                    let (_, session) = stream.get_ref();
                    assert!(session.peer_certificates().is_some_and(|chain| chain.len() == 1));
                    seen.lock().unwrap().push(session.server_name().unwrap_or_default().to_owned());
                    let mut line = [0; 64];
                    loop {
                        let count = stream.read(&mut line).await?;
                        if count == 0 {
                            return stream.shutdown().await;
                        }
                        stream.write_all(greeting.as_bytes()).await?;
                        stream.write_all(&line[..count]).await?;
                        stream.flush().await?;
                    }
                });
            }
        });
        TlsDaemon { address, names }
    }

    /// A client's configuration, with or without a certificate.
    pub(super) fn client(&self, with_certificate: bool) -> Arc<ClientConfig> {
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots());
        Arc::new(if with_certificate {
            let (chain, key) = self.issue(&[], ExtendedKeyUsagePurpose::ClientAuth);
            config.with_client_auth_cert(chain, key).unwrap()
        } else {
            config.with_no_client_auth()
        })
    }

    /// Shakes hands through the gateway.
    pub(super) async fn connect(&self, farm: &Farm, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
        connect(self.client(true), farm, name).await
    }
}

pub(super) async fn connect(
    config: Arc<ClientConfig>,
    farm: &Farm,
    name: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    within(TlsConnector::from(config).connect(name, farm.connect().await)).await
}

/// A daemon made by [`Authority::daemon`].
pub(super) struct TlsDaemon {
    pub(super) address: SocketAddr,
    /// Server names of its clients.
    pub(super) names: Arc<Mutex<Vec<String>>>,
}

/// One line there and its answer back.
pub(super) async fn ask(stream: &mut TlsStream<TcpStream>, line: &str, answer: &str) -> std::io::Result<()> {
    stream.write_all(line.as_bytes()).await?;
    stream.flush().await?;
    let mut bytes = vec![0; answer.len()];
    within(stream.read_exact(&mut bytes)).await?;
    assert_eq!(String::from_utf8_lossy(&bytes), answer);
    Ok(())
}
