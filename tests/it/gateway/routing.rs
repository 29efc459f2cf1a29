//! From a name to a daemon: matching, holding, dialling, refusing.

use std::time::{Duration, Instant};

use bko_install::gateway::directory::Backend;
use bko_install::gateway::{Close, Config, Limits, Rejection};
use rustls::AlertDescription;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::farm::{
    Authority, DAEMON, Farm, RawDaemon, alert, ask, config, connect, limited, read_all, refusing, repetitions, until,
    within,
};
use super::hellos::{self, Made, NAME};

const UNRECOGNIZED_NAME: u8 = 112;
const INTERNAL_ERROR: u8 = 80;

fn alert_of(error: &std::io::Error) -> Option<AlertDescription> {
    match error.get_ref()?.downcast_ref::<rustls::Error>()? {
        rustls::Error::AlertReceived(description) => Some(*description),
        _ => None,
    }
}

#[tokio::test]
async fn each_name_reaches_its_own_daemon_under_every_domain() {
    let (farm, authority) = (Farm::start(config()).await, Authority::new());
    let (one, two) = (authority.daemon("one: ").await, authority.daemon("two: ").await);
    farm.list("buildkitd-one", &[one.address]);
    farm.list("buildkitd-two", &[two.address]);
    for (name, greeting) in [
        ("buildkitd-one.builds.example.org", "one: "),
        ("buildkitd-one.ci.test", "one: "),
        ("buildkitd-two.builds.example.org", "two: "),
        ("BUILDKITD-TWO.CI.Test", "two: "),
    ] {
        let mut stream = authority.connect(&farm, name).await.unwrap();
        ask(&mut stream, "hello", &format!("{greeting}hello")).await.unwrap();
        ask(&mut stream, "again", &format!("{greeting}again")).await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(read_all(&mut stream).await.unwrap(), b"");
    }
    assert_eq!(*one.names.lock().unwrap(), ["buildkitd-one.builds.example.org", "buildkitd-one.ci.test"]);
    assert_eq!(farm.metrics.routed.get(), 4);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Finished) + farm.closed(Close::ClientReset), 4);
    farm.ended().await;
}

#[tokio::test]
async fn a_client_without_certificate_is_refused_by_the_daemon_itself() {
    let (farm, authority) = (Farm::start(config()).await, Authority::new());
    let daemon = authority.daemon("").await;
    farm.list("buildkitd-one", &[daemon.address]);
    // In TLS 1.3 the refusal comes behind the client's side of the handshake.
    let error = match connect(authority.client(false), &farm, "buildkitd-one.ci.test").await {
        Ok(mut stream) => read_all(&mut stream).await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(alert_of(&error), Some(AlertDescription::CertificateRequired), "{error}");
    assert_eq!(farm.metrics.routed.get(), 1);
    farm.ended().await;
}

#[tokio::test]
async fn every_captured_hello_is_replayed_byte_for_byte() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    for (file, name, hello) in hellos::captured() {
        let mut client = farm.send(&hello).await;
        if name.is_none() {
            assert_eq!(read_all(&mut client).await.unwrap(), alert(UNRECOGNIZED_NAME), "{file}");
            continue;
        }
        let mut stream = daemon.accept().await;
        client.shutdown().await.unwrap();
        assert_eq!(read_all(&mut stream).await.unwrap(), hello, "{file}");
    }
    assert_eq!(farm.rejected(Rejection::NoSni), 1);
    farm.ended().await;
}

#[tokio::test]
async fn without_a_name_the_address_that_was_dialled_tells_the_daemon() {
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let farm = Farm::serve(listener, config(), tokio_util::sync::CancellationToken::new());
    let (one, two) = (RawDaemon::start().await, RawDaemon::start().await);
    let dialled = |last: u8| std::net::SocketAddr::from(([127, 9, 8, last], farm.address.port()));
    for (name, daemon, last) in [("buildkitd-one", &one, 1), ("buildkitd-two", &two, 2)] {
        farm.list(name, &[daemon.address]);
        farm.directory.set_address(dialled(last).ip(), Some(name.parse().unwrap()));
    }
    let unnamed = Made::new().wire();
    for (daemon, last) in [(&two, 2), (&one, 1)] {
        let mut client = within(tokio::net::TcpStream::connect(dialled(last))).await.unwrap();
        client.write_all(&unnamed).await.unwrap();
        let mut stream = within(daemon.accept()).await;
        client.shutdown().await.unwrap();
        assert_eq!(read_all(&mut stream).await.unwrap(), unnamed);
    }
    // A name says more than an address, and an address that is nobody's says nothing.
    let mut client = within(tokio::net::TcpStream::connect(dialled(1))).await.unwrap();
    client.write_all(&Made::new().sni(b"buildkitd-two.ci.test").wire()).await.unwrap();
    drop(within(two.accept()).await);
    let mut client = within(tokio::net::TcpStream::connect(dialled(3))).await.unwrap();
    client.write_all(&unnamed).await.unwrap();
    assert_eq!(read_all(&mut client).await.unwrap(), alert(UNRECOGNIZED_NAME));
    assert_eq!((farm.rejected(Rejection::NoSni), farm.metrics.routed.get()), (1, 3));
}

#[tokio::test]
async fn a_hello_in_segments_of_one_byte_routes() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    for (file, _, hello) in hellos::captured().into_iter().filter(|(_, name, _)| name.is_some()) {
        let mut client = farm.connect().await;
        for byte in &hello {
            client.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut received = vec![0; hello.len()];
        within(daemon.accept().await.read_exact(&mut received)).await.unwrap();
        assert_eq!(received, hello, "{file}");
    }
    farm.ended().await;
}

#[tokio::test]
async fn a_post_quantum_hello_in_two_segments_routes_a_thousand_times() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let (_, _, hello) = hellos::captured().swap_remove(0);
    let (first, second) = hello.split_at(1448);
    for _ in 0..repetitions(1000) {
        let mut client = farm.send(first).await;
        tokio::task::yield_now().await;
        client.write_all(second).await.unwrap();
        let mut stream = daemon.accept().await;
        stream.write_all(b"!").await.unwrap();
        assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    }
    assert_eq!(farm.metrics.routed.get(), repetitions(1000) as u64);
    farm.ended().await;
}

#[tokio::test]
async fn a_name_that_no_project_owns_is_refused_with_a_reason() {
    let (farm, authority) = (Farm::start(config()).await, Authority::new());
    farm.list("buildkitd-one", &[authority.daemon("").await.address]);
    for name in
        ["buildkitd-two.ci.test", "buildkitd-one.evil.test", "buildkitd-one.x.ci.test", "ci.test", "api.ci.test"]
    {
        let error = authority.connect(&farm, name).await.unwrap_err();
        assert_eq!(alert_of(&error), Some(AlertDescription::UnrecognisedName), "{name}: {error}");
    }
    assert_eq!(farm.rejected(Rejection::Unmatched), 5);
    let error = authority.connect(&farm, "192.0.2.7").await.unwrap_err();
    assert_eq!(alert_of(&error), Some(AlertDescription::UnrecognisedName), "{error}");
    assert_eq!((farm.rejected(Rejection::NoSni), farm.metrics.routed.get()), (1, 0));
    farm.ended().await;
}

#[tokio::test]
async fn what_is_no_hello_is_refused_and_counted_by_reason() {
    let farm = Farm::start(config()).await;
    let large = Made::new().sni(NAME.as_bytes()).padded_to(16 * 1024 + 1).wire();
    for (bytes, reason) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), Rejection::NotTls),
        (hellos::record(&[2, 0, 0, 0]), Rejection::Malformed),
        (large, Rejection::TooLarge),
    ] {
        let mut client = farm.send(&bytes).await;
        assert_eq!(read_all(&mut client).await.unwrap(), alert(INTERNAL_ERROR), "{reason:?}");
        assert_eq!(farm.rejected(reason), 1, "{reason:?}");
    }
    // Half a hello and the end of it.
    let mut client = farm.send(&hellos::captured()[0].2[..700]).await;
    client.shutdown().await.unwrap();
    assert_eq!(read_all(&mut client).await.unwrap(), alert(INTERNAL_ERROR));
    assert_eq!(farm.rejected(Rejection::Malformed), 2);
    // A probe of a load balancer is nobody's fault.
    drop(farm.connect().await);
    until(|| farm.closed(Close::Gone) == 1).await;
    farm.ended().await;
}

#[tokio::test]
async fn a_client_is_held_until_its_daemon_is_ready() {
    let (farm, authority) = (Farm::start(config()).await, Authority::new());
    let daemon = authority.daemon("woken: ").await;
    farm.list("buildkitd-one", &[]);
    let waking = async {
        until(|| farm.metrics.held.get() == 1).await;
        // News of somebody else changes nothing.
        farm.list("buildkitd-two", &[refusing().await]);
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(farm.metrics.held.get(), 1);
        farm.list("buildkitd-one", &[daemon.address]);
    };
    let (stream, ()) = tokio::join!(authority.connect(&farm, "buildkitd-one.ci.test"), waking);
    ask(&mut stream.unwrap(), "hello", "woken: hello").await.unwrap();
    assert_eq!(farm.metrics.held.get(), 0);
    assert!(farm.scrape().contains("gateway_wake_seconds_count 1"), "{}", farm.scrape());
    farm.ended().await;
}

#[tokio::test]
async fn a_daemon_that_is_not_ready_in_time_is_told_to_the_client() {
    let hold = Duration::from_millis(300);
    let (farm, authority) = (Farm::start(Config { hold, ..config() }).await, Authority::new());
    farm.list("buildkitd-one", &[]);
    let began = Instant::now();
    let error = authority.connect(&farm, "buildkitd-one.ci.test").await.unwrap_err();
    assert_eq!(alert_of(&error), Some(AlertDescription::InternalError), "{error}");
    assert!(began.elapsed() >= hold, "{:?}", began.elapsed());
    assert_eq!(farm.rejected(Rejection::BackendDown), 1);
    farm.ended().await;
}

#[tokio::test]
async fn a_held_client_whose_project_goes_is_refused() {
    let farm = Farm::start(config()).await;
    farm.list(DAEMON, &[]);
    let mut client = farm.send(&hellos::captured()[0].2).await;
    until(|| farm.metrics.held.get() == 1).await;
    farm.directory.set(DAEMON, None);
    assert_eq!(read_all(&mut client).await.unwrap(), alert(UNRECOGNIZED_NAME));
    farm.ended().await;
}

#[tokio::test]
async fn a_held_client_that_leaves_is_let_go() {
    let farm = Farm::start(config()).await;
    farm.list(DAEMON, &[]);
    let client = farm.send(&hellos::captured()[0].2).await;
    until(|| farm.metrics.held.get() == 1).await;
    socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    farm.at_rest().await;
    assert_eq!(farm.closed(Close::Gone), 1);
    farm.ended().await;
}

#[tokio::test]
async fn clients_that_wait_are_limited_in_number() {
    let farm = Farm::start(limited(Limits { held: 1, ..Limits::default() })).await;
    farm.list(DAEMON, &[]);
    let hello = &hellos::captured()[0].2;
    let _first = farm.send(hello).await;
    until(|| farm.metrics.held.get() == 1).await;
    assert_eq!(read_all(&mut farm.send(hello).await).await.unwrap(), alert(INTERNAL_ERROR));
    assert_eq!(farm.rejected(Rejection::OverLimit), 1);
    farm.shut_down();
    farm.directory.set(DAEMON, None);
    farm.ended().await;
}

#[tokio::test]
async fn the_next_address_is_dialled_when_one_refuses() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[refusing().await, daemon.address]);
    let _client = farm.send(&hellos::captured()[0].2).await;
    daemon.accept().await;
    until(|| farm.metrics.routed.get() == 1).await;
    farm.ended().await;
}

#[tokio::test]
async fn a_daemon_that_moved_just_now_is_found() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[refusing().await]);
    let _client = farm.send(&hellos::captured()[0].2).await;
    until(|| farm.metrics.peeking.get() == 0 && farm.metrics.accepted.get() == 1).await;
    tokio::task::yield_now().await;
    farm.list(DAEMON, &[]);
    until(|| farm.metrics.held.get() == 1).await;
    farm.list(DAEMON, &[daemon.address]);
    daemon.accept().await;
    farm.ended().await;
}

#[tokio::test]
async fn a_daemon_that_refuses_and_stays_is_down() {
    let farm = Farm::start(config()).await;
    farm.list(DAEMON, &[refusing().await]);
    let began = Instant::now();
    let mut client = farm.send(&hellos::captured()[0].2).await;
    assert_eq!(read_all(&mut client).await.unwrap(), alert(INTERNAL_ERROR));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!((farm.rejected(Rejection::BackendDown), farm.metrics.routed.get()), (1, 0));
    farm.ended().await;
}

#[tokio::test]
async fn a_terminating_daemon_takes_more_connections_of_a_running_build_alone() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    let hello = &hellos::captured()[0].2;
    farm.list(DAEMON, &[daemon.address]);
    let first = (farm.send(hello).await, daemon.accept().await);
    farm.directory.set(DAEMON, Some(Backend { ready: vec![], terminating: vec![daemon.address] }));
    let second = (farm.send(hello).await, daemon.accept().await);
    drop((first, second));
    farm.at_rest().await;
    let _third = farm.send(hello).await;
    until(|| farm.metrics.held.get() == 1).await;
    farm.directory.set(DAEMON, None);
    farm.ended().await;
}

#[tokio::test]
async fn metrics_have_the_names_that_dashboards_ask_for() {
    let (farm, daemon) = (Farm::start(config()).await, RawDaemon::start().await);
    farm.list(DAEMON, &[daemon.address]);
    let hello = &hellos::captured()[0].2;
    let mut client = farm.send(hello).await;
    let mut stream = daemon.accept().await;
    stream.write_all(b"12345").await.unwrap();
    within(client.read_exact(&mut [0; 5])).await.unwrap();
    read_all(&mut farm.send(b"GET /").await).await.unwrap();
    until(|| farm.metrics.active.get() == 1).await;
    let text = farm.scrape();
    for line in [
        "accepted_total 2".to_owned(),
        "routed_total 1".to_owned(),
        "active 1".to_owned(),
        r#"rejected_total{reason="not_tls"} 1"#.to_owned(),
        format!(r#"bytes_total{{direction="up"}} {}"#, hello.len()),
        r#"bytes_total{direction="down"} 5"#.to_owned(),
        "hello_seconds_count 1".to_owned(),
        "dial_seconds_count 1".to_owned(),
        "wake_seconds_count 0".to_owned(),
    ] {
        let line = format!("buildkit_operator_gateway_{line}");
        assert!(text.lines().any(|known| known == line), "{line} is not in\n{text}");
    }
    drop((client, stream));
    farm.at_rest().await;
    assert!(farm.scrape().contains("buildkit_operator_gateway_close_total{cause="), "{}", farm.scrape());
    farm.ended().await;
}
