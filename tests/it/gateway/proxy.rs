//! The PROXY protocol, rules that change, and limits by source and daemon.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use bko_install::gateway::metrics::ReloadLabels;
use bko_install::gateway::rules::Rules;
use bko_install::gateway::{Close, Config, Limits, Rejection, reload};
use bko_install::sni::Domains;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::farm::{DAEMON, Farm, RawDaemon, alert, config, limited, read_all, ruled, within};
use super::hellos::{self, Made};

const UNRECOGNIZED_NAME: u8 = 112;
const INTERNAL_ERROR: u8 = 80;

fn hello() -> Vec<u8> {
    hellos::captured().swap_remove(0).2
}

fn v1(source: &str) -> Vec<u8> {
    format!("PROXY TCP4 {source} 10.0.0.1 5000 1234\r\n").into_bytes()
}

/// From 192.0.2.`last`.
fn v2(last: u8) -> Vec<u8> {
    [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c".as_slice(), &[192, 0, 2, last, 10, 0, 0, 1, 0x13, 0x88, 4, 210]].concat()
}

#[tokio::test]
async fn a_proxy_header_of_a_trusted_peer_is_taken_away() {
    let trusting = ruled(|rules| rules.proxy_from = "127.0.0.0/8".parse().unwrap());
    let (farm, daemon) = (Farm::start(trusting).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let local = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0".to_vec();
    for header in [v1("192.0.2.1"), v2(2), b"PROXY UNKNOWN\r\n".to_vec(), local, vec![]] {
        // Byte by byte first, then all at once.
        for segments in [1, 4096] {
            let mut client = farm.connect().await;
            for part in header.chunks(segments) {
                client.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            client.write_all(&hello()).await.unwrap();
            client.shutdown().await.unwrap();
            assert_eq!(read_all(&mut daemon.accept().await).await.unwrap(), hello(), "{header:?}");
        }
    }
    // A load balancer that only looks whether somebody is there.
    drop(farm.send(&v2(1)).await);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Gone), 1);
    assert_eq!(read_all(&mut farm.send(b"PROXY nonsense\r\n").await).await.unwrap(), alert(INTERNAL_ERROR));
    assert_eq!(farm.rejected(Rejection::NotTls), 1);
    farm.ended().await;
}

#[tokio::test]
async fn a_proxy_header_of_anybody_else_is_refused() {
    let elsewhere = ruled(|rules| rules.proxy_from = "10.0.0.0/8".parse().unwrap());
    let (farm, daemon) = (Farm::start(elsewhere).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    for header in [v1("10.0.0.7"), v2(1)] {
        let mut client = farm.send(&[header, hello()].concat()).await;
        assert_eq!(read_all(&mut client).await.unwrap(), alert(INTERNAL_ERROR));
    }
    assert_eq!((farm.rejected(Rejection::NotTls), farm.metrics.routed.get()), (2, 0));
    farm.ended().await;
}

#[tokio::test]
async fn sources_are_limited_by_the_address_that_a_trusted_proxy_tells() {
    let rules = ruled(|rules| {
        rules.proxy_from = "127.0.0.1".parse().unwrap();
        rules.limits = Limits { per_source: 1, ..Limits::default() };
    });
    let (farm, daemon) = (Farm::start(rules).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let first = (farm.send(&[v2(1), hello()].concat()).await, daemon.accept().await);
    let _second = (farm.send(&[v2(2), hello()].concat()).await, daemon.accept().await);
    let mut third = farm.send(&[v1("192.0.2.1"), hello()].concat()).await;
    assert_eq!(read_all(&mut third).await.unwrap(), alert(INTERNAL_ERROR));
    drop((first, third));
    super::farm::until(|| farm.metrics.active.get() == 1).await;
    let _fourth = (farm.send(&[v2(1), hello()].concat()).await, daemon.accept().await);
    assert_eq!(farm.rejected(Rejection::OverLimit), 1);
    farm.ended().await;
}

#[tokio::test]
async fn one_daemon_cannot_take_the_place_of_all() {
    let limits = Limits { per_daemon: 1, ..Limits::default() };
    let (farm, daemon) = (Farm::start(limited(limits)).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    farm.list("buildkitd-other", &[daemon.address]);
    let _first = (farm.send(&hello()).await, daemon.accept().await);
    assert_eq!(read_all(&mut farm.send(&hello()).await).await.unwrap(), alert(INTERNAL_ERROR));
    let _other = (farm.send(&Made::new().sni(b"buildkitd-other.ci.test").wire()).await, daemon.accept().await);
    super::farm::until(|| farm.metrics.routed.get() == 2).await;
    assert_eq!(farm.rejected(Rejection::OverLimit), 1);
    farm.ended().await;
}

#[tokio::test]
async fn rules_change_without_dropping_a_stream() {
    let (sender, rules) = watch::channel(config().rules.borrow().clone());
    let (farm, daemon) = (Farm::start(Config { rules, ..config() }).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let (mut client, mut stream) = (farm.send(&hello()).await, daemon.accept().await);
    sender.send_modify(|rules| {
        rules.domains = Domains::new(vec!["new.test".into()]).unwrap();
        rules.limits = Limits { connections: 1, ..Limits::default() };
    });
    stream.write_all(b"!").await.unwrap();
    assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    assert_eq!(read_all(&mut farm.send(&hello()).await).await.unwrap(), alert(UNRECOGNIZED_NAME), "the old domain");
    let new = Made::new().sni(b"buildkitd-abc123.new.test").wire();
    assert_eq!(read_all(&mut farm.send(&new).await).await.unwrap(), alert(INTERNAL_ERROR), "the new limit");
    drop((client, stream));
    farm.at_rest().await;
    let _second = (farm.send(&new).await, daemon.accept().await);
    farm.ended().await;
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_is_taken_and_a_bad_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    write("domains: [a.test]\n");
    let (first, text) = reload::read(&Rules::default(), &file).unwrap();
    let (sender, mut rules) = watch::channel(first);
    let metrics = {
        let mut registry = prometheus_client::registry::Registry::default();
        std::sync::Arc::new(bko_install::gateway::metrics::Metrics::register(&mut registry))
    };
    let shutdown = CancellationToken::new();
    let following = reload::follow((Rules::default(), file.clone()), text, sender, metrics.clone(), shutdown.clone());
    let following = tokio::spawn(following);
    let count = |result| metrics.reloads.get_or_create(&ReloadLabels { result }).get();

    write("domains: [a.test, b.a.test]\n");
    tokio::time::sleep(Duration::from_secs(21)).await;
    assert_eq!(rules.borrow().domains.to_string(), "a.test");
    assert_eq!((count("ok"), count("error")), (0, 1), "one that stays bad counts once");
    write("domains: [b.test]\nlimits: {perSource: 3}\n");
    rules.changed().await.unwrap();
    assert_eq!(rules.borrow_and_update().domains.to_string(), "b.test");
    assert_eq!(rules.borrow().limits.per_source, 3);
    std::fs::remove_file(&file).unwrap();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!((count("ok"), count("error")), (1, 2));
    assert!(!rules.has_changed().unwrap());
    shutdown.cancel();
    following.await.unwrap();
}

#[tokio::test]
async fn a_stream_without_a_byte_is_ended_where_that_is_limited() {
    let idle = Duration::from_millis(400);
    let (farm, daemon) = (Farm::start(Config { idle: Some(idle), ..config() }).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let (mut client, mut stream) = (farm.send(&hello()).await, daemon.accept().await);
    within(stream.read_exact(&mut vec![0; hello().len()])).await.unwrap();
    for _ in 0..8 {
        tokio::time::sleep(idle / 4).await;
        stream.write_all(b"!").await.unwrap();
        within(client.read_u8()).await.unwrap();
    }
    let began = Instant::now();
    for side in [&mut client, &mut stream] {
        assert_eq!(read_all(side).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    assert!(began.elapsed() >= idle / 2, "{:?}", began.elapsed());
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Idle), 1);
    farm.ended().await;
}

#[tokio::test]
async fn streams_to_a_pod_that_has_left_the_cluster_are_reset_at_once() {
    let (farm, gone, other) = (Farm::start(config()).await, RawDaemon::start().await, RawDaemon::start().await);
    farm.list(DAEMON, &[gone.address]);
    let (mut client, _stream) = (farm.send(&hello()).await, gone.accept().await);
    farm.list("buildkitd-other", &[other.address]);
    let stays = (farm.send(&Made::new().sni(b"buildkitd-other.ci.test").wire()).await, other.accept().await);
    super::farm::until(|| farm.metrics.routed.get() == 2).await;
    let began = Instant::now();
    farm.directory.lose(DAEMON, gone.address.ip());
    assert_eq!(read_all(&mut client).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!((farm.closed(Close::DaemonGone), farm.streams.of("buildkitd-other").open), (1, 1));
    // Another daemon at the same address, later, is none the worse.
    farm.list(DAEMON, &[gone.address]);
    let _again = (farm.send(&hello()).await, gone.accept().await);
    drop(stays);
    farm.ended().await;
}
