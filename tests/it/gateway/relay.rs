//! Bytes, ends and resets between a client and its daemon. A gateway cannot
//! tell TLS from other bytes behind the hello, so these are others.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use bko_install::gateway::{Close, Config};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::farm::{DAEMON, Farm, RawDaemon, config, read_all, repetitions, until, within};
use super::hellos;

/// A client and its daemon, connected through the gateway, the hello read.
async fn pair(farm: &Farm, daemon: &RawDaemon) -> (TcpStream, TcpStream) {
    farm.list(DAEMON, &[daemon.address]);
    let hello = &hellos::captured()[0].2;
    let client = farm.send(hello).await;
    let mut stream = daemon.accept().await;
    let mut received = vec![0; hello.len()];
    within(stream.read_exact(&mut received)).await.unwrap();
    assert_eq!(&received, hello);
    (client, stream)
}

#[tokio::test]
async fn a_stream_is_told_while_it_is_open() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (client, mut stream) = pair(&farm, &daemon).await;
    assert_eq!(farm.streams.of(DAEMON).open, 1);
    assert_eq!(farm.streams.of("buildkitd-other").open, 0);
    // Real time: that a byte moved is what makes this end.
    until(|| farm.streams.of(DAEMON).idle_ms >= 100).await;
    stream.write_all(b"x").await.unwrap();
    until(|| farm.streams.of(DAEMON).idle_ms < 100).await;
    drop((client, stream));
    farm.at_rest().await;
    assert_eq!(farm.streams.of(DAEMON).open, 0);
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

fn abort(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

#[tokio::test]
async fn hello_and_body_and_end_in_one_write_are_answered_in_full() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let (up, down) = ([hellos::captured()[0].2.clone(), noise(100_000)].concat(), noise(3_000_000));
    for _ in 0..20 {
        let mut client = farm.connect().await;
        let asking = async {
            client.write_all(&up).await.unwrap();
            client.shutdown().await.unwrap();
            read_all(&mut client).await.unwrap()
        };
        let answering = async {
            let mut stream = daemon.accept().await;
            assert!(read_all(&mut stream).await.unwrap() == up);
            stream.write_all(&down).await.unwrap();
        };
        let (answer, ()) = tokio::join!(asking, answering);
        assert!(answer == down, "{} of {} bytes", answer.len(), down.len());
    }
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Finished), 20);
    assert_eq!(farm.metrics.up.get(), 20 * up.len() as u64);
    assert_eq!(farm.metrics.down.get(), 20 * down.len() as u64);
    farm.ended().await;
}

#[tokio::test]
async fn a_daemon_may_end_its_half_first() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (mut client, mut stream) = pair(&farm, &daemon).await;
    stream.write_all(b"all that I say").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut client).await.unwrap(), b"all that I say");
    let up = noise(500_000);
    let (received, ()) = tokio::join!(async { read_all(&mut stream).await.unwrap() }, async {
        client.write_all(&up).await.unwrap();
        client.shutdown().await.unwrap();
    });
    assert!(received == up);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Finished), 1);
    farm.ended().await;
}

#[tokio::test]
async fn both_directions_at_once_lose_nothing() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (client, stream) = pair(&farm, &daemon).await;
    let (up, down) = (noise(8_000_000), noise(9_000_000));
    let talk = async |stream: TcpStream, bytes: &[u8]| {
        let (mut read, mut write) = stream.into_split();
        let writing = async {
            write.write_all(bytes).await.unwrap();
            write.shutdown().await.unwrap();
        };
        tokio::join!(read_all(&mut read), writing).0.unwrap()
    };
    let (got_down, got_up) = tokio::join!(talk(client, &up), talk(stream, &down));
    assert!(got_down == down && got_up == up);
    farm.ended().await;
}

#[tokio::test]
async fn bulk_never_stalls() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (mut client, mut stream) = pair(&farm, &daemon).await;
    let megabytes = repetitions(10_000);
    let block = noise(1 << 20);
    let writing = tokio::spawn(async move {
        for _ in 0..megabytes {
            stream.write_all(&block).await.unwrap();
        }
        stream.shutdown().await.unwrap();
    });
    let (mut buffer, mut received, mut longest) = (vec![0; 1 << 18], 0, Duration::ZERO);
    loop {
        let began = Instant::now();
        let count = within(client.read(&mut buffer)).await.unwrap();
        longest = longest.max(began.elapsed());
        if count == 0 {
            break;
        }
        received += count;
    }
    writing.await.unwrap();
    assert_eq!(received, megabytes << 20);
    assert!(longest < Duration::from_secs(1), "nothing came for {longest:?}");
    farm.ended().await;
}

#[tokio::test]
async fn a_slow_reader_gets_every_byte_before_the_end() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    // As small a window as the kernel grants.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(1).unwrap();
    let mut client = socket.connect(farm.address).await.unwrap();
    client.write_all(&hellos::captured()[0].2).await.unwrap();
    let mut stream = daemon.accept().await;
    let down = noise(2_000_000);
    let writing = async {
        stream.write_all(&down).await.unwrap();
        stream.shutdown().await.unwrap();
    };
    let reading = async {
        let (mut received, mut buffer) = (Vec::new(), [0; 7001]);
        loop {
            let count = within(client.read(&mut buffer)).await.unwrap();
            if count == 0 {
                return received;
            }
            received.extend_from_slice(&buffer[..count]);
            tokio::task::yield_now().await;
        }
    };
    let (received, ()) = tokio::join!(reading, writing);
    assert!(received == down, "{} of {} bytes", received.len(), down.len());
    farm.ended().await;
}

#[tokio::test]
async fn nothing_is_read_for_a_client_that_does_not_read() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (client, stream) = pair(&farm, &daemon).await;
    // Fill every buffer on the way until nothing moves any more.
    let (block, mut sent, mut still) = (noise(65_536), 0, 0);
    while still < 20 {
        match stream.try_write(&block) {
            Ok(count) => (sent, still) = (sent + count, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                still += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
                let _ = tokio::time::timeout(Duration::from_millis(5), stream.writable()).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let kept_by_the_gateway = sent as u64 - farm.metrics.down.get();
    let in_its_socket = SockRef::from(&stream).recv_buffer_size().unwrap() as u64;
    assert!(farm.metrics.down.get() < sent as u64);
    assert!(kept_by_the_gateway < 16 << 20, "{kept_by_the_gateway} bytes, buffers of {in_its_socket}");
    // It is told all the same when the daemon dies.
    let began = Instant::now();
    abort(stream);
    until(|| farm.metrics.active.get() == 0).await;
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(farm.closed(Close::DaemonReset), 1);
    drop(client);
    farm.ended().await;
}

#[tokio::test]
async fn a_reset_of_the_daemon_resets_its_client() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (mut client, mut stream) = pair(&farm, &daemon).await;
    stream.write_all(b"before").await.unwrap();
    within(client.read_exact(&mut [0; 6])).await.unwrap();
    let began = Instant::now();
    abort(stream);
    assert_eq!(read_all(&mut client).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::DaemonReset), 1);
    farm.ended().await;
}

#[tokio::test]
async fn a_reset_of_the_client_resets_its_daemon() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let (client, mut stream) = pair(&farm, &daemon).await;
    abort(client);
    assert_eq!(read_all(&mut stream).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::ClientReset), 1);
    farm.ended().await;
}

#[tokio::test]
async fn a_silent_surviving_half_is_freed() {
    let half_close = Duration::from_millis(300);
    let (farm, daemon) = (Farm::start(Config { half_close, ..config() }).await, RawDaemon::start().await);
    for client_ends in [true, false] {
        let (mut client, mut stream) = pair(&farm, &daemon).await;
        let (ends, stays) = if client_ends { (&mut client, &mut stream) } else { (&mut stream, &mut client) };
        let began = Instant::now();
        ends.shutdown().await.unwrap();
        assert_eq!(read_all(stays).await.unwrap(), b"", "the end is passed on at once");
        assert_eq!(read_all(ends).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(began.elapsed() >= half_close, "{:?}", began.elapsed());
    }
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::HalfCloseTimeout), 2);
    farm.ended().await;
}

#[tokio::test]
async fn a_surviving_half_that_speaks_lives_on() {
    let half_close = Duration::from_millis(400);
    let (farm, daemon) = (Farm::start(Config { half_close, ..config() }).await, RawDaemon::start().await);
    let (mut client, mut stream) = pair(&farm, &daemon).await;
    client.shutdown().await.unwrap();
    for byte in 0..8 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(&[byte]).await.unwrap();
    }
    stream.shutdown().await.unwrap();
    assert_eq!(read_all(&mut client).await.unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Finished), 1);
    farm.ended().await;
}
