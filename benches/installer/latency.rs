//! A way to the API server that takes longer. `tc netem` is not in every
//! kernel: a proxy holds back what passes, half of the latency each way.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

const API_SERVER: &str = "192.168.64.2:6443";

/// Serves until the value is dropped.
pub(crate) struct Proxy {
    kubeconfig: PathBuf,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Proxy {
    /// A proxy that adds `latency` to every round trip; none at all for zero.
    pub(crate) async fn start(kubeconfig: &Path, latency: Duration) -> anyhow::Result<Self> {
        if latency.is_zero() {
            return Ok(Self { kubeconfig: kubeconfig.to_owned(), task: None });
        }
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let text = std::fs::read_to_string(kubeconfig)?;
        anyhow::ensure!(text.contains(API_SERVER), "the kubeconfig does not name {API_SERVER}");
        let path = PathBuf::from(format!("/run/bko/late-{}.kubeconfig", listener.local_addr()?.port()));
        std::fs::write(&path, text.replace(API_SERVER, &address))?;
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    if let Err(error) = join(client, latency / 2).await {
                        eprintln!("proxy: {error:#}");
                    }
                });
            }
        });
        Ok(Self { kubeconfig: path, task: Some(task) })
    }

    /// For who is to take this way.
    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn join(client: TcpStream, delay: Duration) -> anyhow::Result<()> {
    let server = TcpStream::connect(API_SERVER).await.context("connecting")?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::join!(pass(from_client, to_server, delay), pass(from_server, to_client, delay));
    Ok(())
}

/// Holds back every piece for `delay`, however many are on their way. Either
/// end may close at any time.
async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, delay: Duration) {
    let (send, mut receive) = tokio::sync::mpsc::channel::<(Instant, Vec<u8>)>(256);
    let read = async move {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            if send.send((Instant::now() + delay, buffer[..count].to_vec())).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, piece)) = receive.recv().await {
            tokio::time::sleep_until(due).await;
            if to.write_all(&piece).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(read, write);
}
