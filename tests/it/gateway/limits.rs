//! Deadlines, limits, abuse and the end of it all.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use bko_install::gateway::{Close, Config, Limits, Rejection};
use socket2::SockRef;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::router::answers::Log;

use super::farm::{
    Authority, DAEMON, Farm, RawDaemon, alert, ask, config, limited, read_all, repetitions, until, within,
};
use super::hellos;

const INTERNAL_ERROR: u8 = 80;

#[tokio::test]
async fn a_silent_client_is_cut_at_the_first_deadline() {
    let first_byte = Duration::from_millis(200);
    let farm = Farm::start(Config { first_byte, ..config() }).await;
    let began = Instant::now();
    assert_eq!(read_all(&mut farm.connect().await).await.unwrap(), alert(INTERNAL_ERROR));
    assert!(began.elapsed() >= first_byte, "{:?}", began.elapsed());
    assert_eq!(farm.rejected(Rejection::Timeout), 1);
    farm.ended().await;
}

#[tokio::test]
async fn a_dripping_client_gains_no_time() {
    let hello = Duration::from_millis(500);
    let farm = Farm::start(Config { hello, ..config() }).await;
    let (mut read, mut write) = farm.connect().await.into_split();
    let began = Instant::now();
    let dripping = async {
        for byte in &hellos::captured()[0].2 {
            write.write_all(&[*byte]).await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        std::io::Result::Ok(())
    };
    tokio::select! {
        dripped = dripping => panic!("it went on dripping: {dripped:?}"),
        received = read_all(&mut read) => assert_eq!(received.unwrap(), alert(INTERNAL_ERROR)),
    }
    let took = began.elapsed();
    assert!(took >= hello && took < hello * 4, "{took:?}");
    drop((read, write));
    assert_eq!(farm.rejected(Rejection::Timeout), 1);
    farm.ended().await;
}

#[tokio::test]
async fn silent_sockets_do_not_keep_others_out() {
    let (farm, authority) =
        (Farm::start(limited(Limits { unidentified: 50, ..Limits::default() })).await, Authority::new());
    farm.list("buildkitd-one", &[authority.daemon("").await.address]);
    let mut old = authority.connect(&farm, "buildkitd-one.ci.test").await.unwrap();
    let mut silent = Vec::new();
    for round in 1..=4 {
        for _ in 0..50 {
            silent.push(farm.connect().await);
        }
        until(|| farm.metrics.accepted.get() == 50 * round + round).await;
        ask(&mut old, "old", "old").await.unwrap();
        let mut new = authority.connect(&farm, "buildkitd-one.ci.test").await.unwrap();
        ask(&mut new, "new", "new").await.unwrap();
    }
    until(|| farm.metrics.peeking.get() < 50).await;
    // Those that sat there longest have made way, and know it.
    assert_eq!(read_all(&mut silent[0]).await.unwrap(), alert(INTERNAL_ERROR));
    assert!(farm.rejected(Rejection::OverLimit) >= 150);
    drop((silent, old));
    farm.ended().await;
}

#[tokio::test]
async fn routed_traffic_goes_on_beside_thousands_of_silent_sockets() {
    let unlimited = Limits { unidentified: 0, ..Limits::default() };
    let (farm, authority) = (Farm::start(limited(unlimited)).await, Authority::new());
    farm.list("buildkitd-one", &[authority.daemon("").await.address]);
    let mut old = authority.connect(&farm, "buildkitd-one.ci.test").await.unwrap();
    let mut silent = Vec::new();
    for number in 0..repetitions(8000) {
        silent.push(farm.connect().await);
        if number % 100 == 0 {
            ask(&mut old, "old", "old").await.unwrap();
        }
    }
    let began = Instant::now();
    let mut new = authority.connect(&farm, "buildkitd-one.ci.test").await.unwrap();
    ask(&mut new, "new", "new").await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    drop(silent);
    until(|| farm.metrics.peeking.get() == 0).await;
    farm.ended().await;
}

#[tokio::test]
async fn connections_are_limited_in_all() {
    let (farm, daemon) =
        (Farm::start(limited(Limits { connections: 2, ..Limits::default() })).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let hello = &hellos::captured()[0].2;
    let first = (farm.send(hello).await, daemon.accept().await);
    let _second = (farm.send(hello).await, daemon.accept().await);
    assert_eq!(read_all(&mut farm.send(hello).await).await.unwrap(), alert(INTERNAL_ERROR));
    assert_eq!(farm.rejected(Rejection::OverLimit), 1);
    drop(first);
    until(|| farm.metrics.active.get() == 1).await;
    let _third = (farm.send(hello).await, daemon.accept().await);
    until(|| farm.metrics.routed.get() == 3).await;
    farm.ended().await;
}

/// Sockets of this process towards or from a port that are open on the side of
/// the gateway: `local` is its own listener's port, `remote` a daemon's.
fn open_sockets(local: u16, remote: u16) -> usize {
    const LISTEN: &str = "0A";
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let ours = |line: &&str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let port = |column: &str| u16::from_str_radix(column.rsplit(':').next().unwrap(), 16).unwrap();
        let held = columns[9] != "0" && columns[3] != LISTEN;
        held && (port(columns[1]) == local || port(columns[2]) == remote)
    };
    table.lines().skip(1).filter(ours).count()
}

#[tokio::test]
async fn a_storm_of_aborted_connections_leaves_nothing_behind() {
    let (farm, authority) = (Farm::start(config()).await, Authority::new());
    let daemon = authority.daemon("").await;
    farm.list(DAEMON, &[daemon.address]);
    let hello = &hellos::captured()[0].2;
    for number in 0..repetitions(20_000) {
        // At every stage: nothing sent, half a hello, all of it.
        let client = farm.send(&hello[..[0, 700, hello.len()][number % 3]]).await;
        SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
        drop(client);
        if number % 50 == 0 {
            tokio::task::yield_now().await;
        }
    }
    let mut stream = authority.connect(&farm, "buildkitd-abc123.ci.test").await.unwrap();
    ask(&mut stream, "still here", "still here").await.unwrap();
    drop(stream);
    until(|| farm.metrics.accepted.get() == repetitions(20_000) as u64 + 1).await;
    farm.at_rest().await;
    let (local, remote) = (farm.address.port(), daemon.address.port());
    until(|| open_sockets(local, remote) == 0).await;
    farm.ended().await;
}

#[tokio::test]
async fn the_count_of_open_sockets_sees_both_sides_of_a_stream() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let stream = (farm.send(&hellos::captured()[0].2).await, daemon.accept().await);
    assert_eq!(open_sockets(farm.address.port(), daemon.address.port()), 2);
    drop(stream);
    farm.ended().await;
}

#[tokio::test]
async fn a_refused_client_that_goes_on_sending_still_reads_its_alert() {
    let farm = Farm::start(config()).await;
    let mut client = farm.send(b"GET / HTTP/1.1\r\n").await;
    within(client.readable()).await.unwrap();
    for _ in 0..10 {
        client.write_all(b"Header: value\r\n").await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(read_all(&mut client).await.unwrap(), alert(INTERNAL_ERROR), "no reset behind it");
    // One that does not leave is left.
    assert_eq!(farm.metrics.active.get(), 1);
    farm.at_rest().await;
    farm.ended().await;
}

const STARVED_DAEMON: &str = "BKO_TEST_STARVED_DAEMON";

/// A gateway with few descriptors, until its standard input ends.
#[tokio::test]
#[ignore = "a process of its own, started by the test below it"]
async fn a_starved_gateway() {
    let daemon = std::env::var(STARVED_DAEMON).unwrap().parse().unwrap();
    bko_install::telemetry::start("info", bko_install::telemetry::LogFormat::Text);
    let farm = Farm::start(config()).await;
    farm.list(DAEMON, &[daemon]);
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = rustix::process::Rlimit { current: Some(open + 20), maximum: Some(open + 20) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    println!("\nport {}", farm.address.port());
    let mut input = tokio::io::stdin();
    input.read_to_end(&mut Vec::new()).await.unwrap();
    farm.ended().await;
}

#[tokio::test]
async fn a_gateway_out_of_descriptors_rests_complains_once_and_recovers() {
    use std::process::Stdio;
    let daemon = RawDaemon::start().await;
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "gateway::limits::a_starved_gateway", "--ignored", "--nocapture"])
        .env(STARVED_DAEMON, daemon.address.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = tokio::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let port: u16 = loop {
        let line = within(lines.next_line()).await.unwrap().expect("it ended");
        if let Some(port) = line.strip_prefix("port ") {
            break port.parse().unwrap();
        }
    };
    let mut complaints = tokio::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let mut complaint = async || loop {
        let line = within(complaints.next_line()).await.unwrap();
        match line {
            Some(line) if line.contains("cannot accept connections") => return Some(line),
            Some(_) => {}
            None => return None,
        }
    };
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(within(TcpStream::connect(("127.0.0.1", port))).await.unwrap());
    }
    assert!(complaint().await.is_some());
    let before = processor_ticks(child.id().unwrap());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let spent = processor_ticks(child.id().unwrap()) - before;
    assert!(spent < 15, "{spent} hundredths of a second spent in one second of waiting");
    drop(silent);
    let mut client = within(TcpStream::connect(("127.0.0.1", port))).await.unwrap();
    client.write_all(&hellos::captured()[0].2).await.unwrap();
    daemon.accept().await.write_all(b"!").await.unwrap();
    assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    drop((client, child.stdin.take()));
    assert_eq!(complaint().await, None, "one complaint is enough");
    assert!(within(child.wait()).await.unwrap().success());
}

/// Processor time of a process, in hundredths of a second.
fn processor_ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test]
async fn shutdown_lets_a_stream_finish_and_takes_no_new_one() {
    let drain = Config::default().drain;
    let (farm, daemon) = (Farm::start(Config { drain, ..config() }).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let (mut client, mut stream) = (farm.send(&hellos::captured()[0].2).await, daemon.accept().await);
    farm.shut_down();
    // The listener goes; what is being relayed stays.
    within(async { while TcpStream::connect(farm.address).await.is_ok() {} }).await;
    stream.write_all(b"late answer").await.unwrap();
    client.shutdown().await.unwrap();
    let mut rest = Vec::new();
    within(stream.read_to_end(&mut rest)).await.unwrap();
    drop(stream);
    assert_eq!(read_all(&mut client).await.unwrap(), b"late answer");
    farm.ended().await;
}

#[tokio::test]
async fn the_end_of_the_drain_cuts_what_is_left() {
    let log = Log::default();
    let _capture = log.capture();
    let drain = Duration::from_millis(200);
    let (farm, daemon) = (Farm::start(Config { drain, ..config() }).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    farm.list("buildkitd-asleep", &[]);
    let (mut client, mut stream) = (farm.send(&hellos::captured()[0].2).await, daemon.accept().await);
    let asleep = hellos::Made::new().sni(b"buildkitd-asleep.ci.test").wire();
    let mut held = farm.send(&asleep).await;
    let mut silent = farm.connect().await;
    until(|| farm.metrics.held.get() == 1 && farm.metrics.peeking.get() == 1).await;
    let metrics = farm.metrics.clone();
    farm.shut_down();
    let began = Instant::now();
    for (refused, what) in [(&mut held, "held"), (&mut silent, "silent")] {
        assert_eq!(read_all(refused).await.unwrap(), alert(INTERNAL_ERROR), "{what}");
    }
    assert!(began.elapsed() >= drain, "{:?}", began.elapsed());
    for (side, what) in [(&mut client, "client"), (&mut stream, "daemon")] {
        let end = read_all(side).await;
        assert!(matches!(&end, Err(error) if error.kind() == ErrorKind::ConnectionReset), "{what}: {end:?}");
    }
    assert_eq!((farm.rejected(Rejection::Draining), farm.closed(Close::Cut)), (2, 1));
    drop((held, silent));
    farm.ended().await;
    assert_eq!(metrics.active.get(), 0);
    let cut: Vec<serde_json::Value> = log.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cut: Vec<_> = cut.iter().filter(|line| line["message"] == "stream cut at the end of the drain").collect();
    assert!(
        cut.len() == 1 && cut[0]["level"] == "WARN" && cut[0]["sni"].as_str().unwrap().starts_with(DAEMON),
        "{cut:?}"
    );
    assert!(cut[0]["bytes.up"].as_u64().unwrap() > 0 && cut[0]["duration_ms"].as_u64().unwrap() >= 200, "{cut:?}");
}

#[tokio::test]
async fn clients_that_the_kernel_accepted_before_the_shutdown_are_served() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = RawDaemon::start().await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(TcpStream::connect(address).await.unwrap());
    }
    let shutdown = CancellationToken::new();
    shutdown.cancel();
    let drain = Config::default().drain;
    let farm = Farm::serve(listener, Config { drain, ..config() }, shutdown);
    farm.list(DAEMON, &[daemon.address]);
    for client in &mut clients {
        client.write_all(&hellos::captured()[0].2).await.unwrap();
        daemon.accept().await.write_all(b"!").await.unwrap();
        assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    }
    drop(clients);
    farm.ended().await;
}
