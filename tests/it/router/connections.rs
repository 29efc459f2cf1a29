//! Time-outs and the end of a server, on real sockets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bko_install::router::Timeouts;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::memory::{Memory, Step};
use super::{SHOP, SHOP_KEY, Server, open};

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(60);

const PATIENT: Timeouts = Timeouts { header: LONG, read: LONG, write: LONG, idle: LONG, shutdown: LONG };

const HEALTH: &str = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

fn route() -> String {
    format!("POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{SHOP}", SHOP.len())
}

async fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.address).await.unwrap()
}

/// Whatever the server says until it closes; a reset is a close.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes)).await.expect("still open");
    String::from_utf8(bytes).unwrap()
}

/// The head of one answer without a body.
async fn head(stream: &mut TcpStream) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        head.push(char::from(stream.read_u8().await.unwrap()));
    }
    head
}

#[tokio::test]
async fn a_head_that_trickles_in_is_cut() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { header: SHORT, ..PATIENT }).await;
    let mut silent = connect(&server).await;
    let mut trickling = connect(&server).await;
    let began = Instant::now();
    for byte in HEALTH.bytes() {
        if trickling.write_all(&[byte]).await.is_err() {
            break;
        }
        tokio::time::sleep(SHORT / 8).await;
    }
    assert_eq!(rest(&mut trickling).await, "");
    assert_eq!(rest(&mut silent).await, "");
    assert!(began.elapsed() < Duration::from_secs(10));
    server.stop().await;
}

#[tokio::test]
async fn an_idle_connection_may_idle_longer_than_a_head_may_take() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { header: SHORT, ..PATIENT }).await;
    let mut stream = connect(&server).await;
    for _ in 0..2 {
        stream.write_all(HEALTH.as_bytes()).await.unwrap();
        assert!(head(&mut stream).await.starts_with("HTTP/1.1 200 OK\r\n"));
        tokio::time::sleep(2 * SHORT).await;
    }
    // But a second head may take no longer than the first.
    stream.write_all(b"GET /heal").await.unwrap();
    assert_eq!(rest(&mut stream).await, "");
    server.stop().await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_the_end() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { idle: SHORT, ..PATIENT }).await;
    let mut stream = connect(&server).await;
    stream.write_all(HEALTH.as_bytes()).await.unwrap();
    assert!(rest(&mut stream).await.starts_with("HTTP/1.1 200 OK\r\n"));
    server.stop().await;
}

#[tokio::test]
async fn a_body_that_does_not_come_is_refused() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { read: SHORT, ..PATIENT }).await;
    let mut stream = connect(&server).await;
    stream.write_all(b"POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{").await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n\r\nbad request: timed out reading the body\n"), "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn a_large_body_is_answered_even_while_it_is_being_sent() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, PATIENT).await;
    let mut stream = connect(&server).await;
    let head = "POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n{\"repo\":\"";
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b'r'; 200_000 - 9]).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.ends_with("\r\n\r\nbad request: http: request body too large\n"), "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_cut_and_its_build_released() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { write: SHORT, ..PATIENT }).await;
    let mut stream = connect(&server).await;
    stream.write_all(route().as_bytes()).await.unwrap();
    assert_eq!(rest(&mut stream).await, "");
    memory.until(|seen| seen.calls.contains_key(&Step::End)).await;
    assert_eq!(memory.inflight(SHOP_KEY), Some(0));
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_ends_answers_what_was_asked_and_takes_nothing_new() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, PATIENT).await;
    let (mut open_call, mut idle) = (connect(&server).await, connect(&server).await);
    idle.write_all(HEALTH.as_bytes()).await.unwrap();
    head(&mut idle).await;
    open_call.write_all(route().as_bytes()).await.unwrap();
    memory.until(|seen| seen.calls.contains_key(&Step::Wait)).await;
    server.shutdown.cancel();
    assert_eq!(rest(&mut idle).await, "", "an idle connection is closed at once");
    while TcpStream::connect(server.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!server.done.is_finished());
    memory.let_pods_become_ready();
    let answer = rest(&mut open_call).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\"ready\":true}\n"), "{answer}");
    server.stop().await;
    assert_eq!(memory.inflight(SHOP_KEY), Some(1), "the client has its endpoint and will build");
}

#[tokio::test]
async fn a_server_that_cuts_a_call_releases_its_build_before_it_is_gone() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts { shutdown: SHORT, ..PATIENT }).await;
    let mut stream = connect(&server).await;
    stream.write_all(route().as_bytes()).await.unwrap();
    memory.until(|seen| seen.calls.contains_key(&Step::Wait)).await;
    server.stop().await;
    assert_eq!(memory.inflight(SHOP_KEY), Some(0));
    assert_eq!(rest(&mut stream).await, "");
}

#[test]
fn the_time_outs_are_the_reference_s() {
    let seconds = Duration::from_secs;
    let timeouts = Timeouts::new(seconds(180));
    let want = Timeouts {
        header: seconds(5),
        read: seconds(15),
        write: seconds(210),
        idle: seconds(60),
        shutdown: seconds(5),
    };
    assert_eq!(timeouts, want);
    assert_eq!(Timeouts::new(Duration::ZERO).write, seconds(30));
}
