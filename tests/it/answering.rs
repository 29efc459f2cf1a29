//! A server on loopback that answers as a test says, also what no real one would.
#![allow(clippy::unwrap_used, reason = "this is a test, also outside of #[test] functions")]

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Answers each call of a path with these bytes, and closes.
pub(crate) async fn answering(answer: impl Fn(&str) -> String + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            stream.write_all(answer(head.split(' ').nth(1).unwrap()).as_bytes()).await.unwrap();
        }
    });
    address
}
