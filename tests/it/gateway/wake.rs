//! A client dials a daemon at zero: it is held, the control plane is asked, and
//! it is relayed once the daemon is ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bko_install::gateway::directory::{API, Backend};
use bko_install::gateway::metrics::WakeLabels;
use bko_install::gateway::wake::{Verdict, Waker};
use bko_install::gateway::{Close, Config, Rejection};
use bko_install::names::DaemonName;
use futures::FutureExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::farm::{Authority, DAEMON, Farm, RawDaemon, alert, ask, config, read_all, until, within};
use super::hellos;

const UNRECOGNIZED_NAME: u8 = 112;
const INTERNAL_ERROR: u8 = 80;

/// A control plane that always says the same, and tells what it was asked.
fn control_plane(verdict: Verdict, per_source: u32) -> (Waker, mpsc::UnboundedReceiver<DaemonName>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let ask = Arc::new(move |daemon| {
        // Some tests do not want to know.
        let _ = sender.send(daemon);
        async move { Ok(verdict) }.boxed()
    });
    (Waker::new(Some(ask), per_source), receiver)
}

fn hello() -> Vec<u8> {
    hellos::captured().swap_remove(0).2
}

#[tokio::test]
async fn a_dial_at_zero_wakes_the_daemon_and_is_served_by_it() {
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let (farm, authority) = (Farm::waking(config(), waker).await, Authority::new());
    let daemon = authority.daemon("good morning ").await;
    farm.list("buildkitd-one", &[]);
    let waking = async {
        assert_eq!(within(asked.recv()).await.unwrap().as_str(), "buildkitd-one");
        assert_eq!((farm.metrics.held.get(), farm.metrics.routed.get()), (1, 0));
        farm.list("buildkitd-one", &[daemon.address]);
    };
    let (stream, ()) = tokio::join!(authority.connect(&farm, "buildkitd-one.ci.test"), waking);
    ask(&mut stream.unwrap(), "x", "good morning x").await.unwrap();
    let starting = WakeLabels { verdict: Verdict::Starting };
    assert_eq!(farm.metrics.wakes.get_or_create(&starting).get(), 1);
    assert!(farm.scrape().contains("buildkit_operator_gateway_wake_seconds_count 1"));
    farm.ended().await;
}

#[tokio::test]
async fn a_wake_that_is_refused_does_not_keep_its_client_waiting() {
    for (verdict, description, reason) in [
        (Verdict::Asleep, INTERNAL_ERROR, Rejection::BackendDown),
        (Verdict::Unknown, UNRECOGNIZED_NAME, Rejection::Unmatched),
    ] {
        let farm = Farm::waking(config(), control_plane(verdict, 0).0).await;
        farm.list(DAEMON, &[]);
        let began = Instant::now();
        assert_eq!(read_all(&mut farm.send(&hello()).await).await.unwrap(), alert(description));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        assert_eq!(farm.rejected(reason), 1);
        farm.ended().await;
    }
}

#[tokio::test]
async fn many_clients_of_one_daemon_ask_once_and_are_all_served() {
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let (farm, daemon) = (Farm::waking(config(), waker).await, RawDaemon::start().await);
    farm.list(DAEMON, &[]);
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(farm.send(&hello()).await);
    }
    until(|| farm.metrics.held.get() == 20).await;
    farm.list(DAEMON, &[daemon.address]);
    for _ in 0..20 {
        daemon.accept().await.write_all(b"!").await.unwrap();
    }
    for client in &mut clients {
        assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    }
    assert!(asked.try_recv().is_ok() && asked.try_recv().is_err());
    farm.ended().await;
}

#[tokio::test]
async fn a_dial_during_a_scale_down_wakes_and_is_served_by_the_next_pod() {
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let farm = Farm::waking(config(), waker).await;
    let (old, next) = (RawDaemon::start().await, RawDaemon::start().await);
    farm.directory.set(DAEMON, Some(Backend { ready: vec![], terminating: vec![old.address] }));
    let mut client = farm.send(&hello()).await;
    within(asked.recv()).await.unwrap();
    assert_eq!(farm.metrics.held.get(), 1);
    farm.list(DAEMON, &[]);
    farm.list(DAEMON, &[next.address]);
    next.accept().await.write_all(b"!").await.unwrap();
    assert_eq!(within(client.read_u8()).await.unwrap(), b'!');
    farm.ended().await;
}

#[tokio::test]
async fn a_client_is_held_no_longer_than_it_would_wait_and_the_wake_goes_on() {
    let hold = Duration::from_millis(300);
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let farm = Farm::waking(Config { hold, ..config() }, waker).await;
    farm.list(DAEMON, &[]);
    let began = Instant::now();
    assert_eq!(read_all(&mut farm.send(&hello()).await).await.unwrap(), alert(INTERNAL_ERROR));
    assert!(began.elapsed() >= hold, "{:?}", began.elapsed());
    assert_eq!(farm.rejected(Rejection::BackendDown), 1);
    assert!(asked.try_recv().is_ok());
    // A client that leaves has asked all the same.
    farm.list("buildkitd-other", &[]);
    let other = farm.send(&hellos::Made::new().sni(b"buildkitd-other.ci.test").wire()).await;
    drop(other);
    assert_eq!(within(asked.recv()).await.unwrap().as_str(), "buildkitd-other");
    farm.ended().await;
}

#[tokio::test]
async fn one_source_may_not_wake_every_daemon() {
    let (waker, _asked) = control_plane(Verdict::Starting, 2);
    let farm = Farm::waking(config(), waker).await;
    let mut held = Vec::new();
    for number in 0..3 {
        farm.list(&format!("buildkitd-{number}"), &[]);
        let name = format!("buildkitd-{number}.ci.test");
        held.push(farm.send(&hellos::Made::new().sni(name.as_bytes()).wire()).await);
        until(|| farm.metrics.held.get() + i64::try_from(farm.rejected(Rejection::OverLimit)).unwrap() > number).await;
    }
    assert_eq!(read_all(&mut held[2]).await.unwrap(), alert(INTERNAL_ERROR));
    assert_eq!((farm.metrics.held.get(), farm.rejected(Rejection::OverLimit)), (2, 1));
    drop(held);
    farm.ended().await;
}

#[tokio::test]
async fn a_name_without_a_project_wakes_nobody() {
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let farm = Farm::waking(config(), waker).await;
    assert_eq!(read_all(&mut farm.send(&hello()).await).await.unwrap(), alert(UNRECOGNIZED_NAME));
    assert!(asked.try_recv().is_err());
    farm.ended().await;
}

#[tokio::test]
async fn the_routing_api_has_a_name_of_its_own_and_is_never_woken() {
    let (waker, mut asked) = control_plane(Verdict::Starting, 0);
    let farm = Farm::waking(Config { hold: Duration::from_millis(200), ..config() }, waker).await;
    let api = RawDaemon::start().await;
    let hello = hellos::Made::new().sni(b"api.ci.test").wire();
    assert_eq!(read_all(&mut farm.send(&hello).await).await.unwrap(), alert(UNRECOGNIZED_NAME), "not served");
    farm.directory.set(API, Some(Backend::default()));
    assert_eq!(read_all(&mut farm.send(&hello).await).await.unwrap(), alert(INTERNAL_ERROR), "no server is ready");
    farm.list(API, &[api.address]);
    let mut client = farm.send(&hello).await;
    let mut server = api.accept().await;
    within(server.read_exact(&mut vec![0; hello.len()])).await.unwrap();
    drop(server);
    assert_eq!(read_all(&mut client).await.unwrap(), b"");
    drop(client);
    farm.at_rest().await;
    assert!(asked.try_recv().is_err());
    assert_eq!(farm.closed(Close::Finished), 1);
    farm.ended().await;
}
