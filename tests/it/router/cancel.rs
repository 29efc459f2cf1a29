//! No build stays registered that nobody will run, and none is lost.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use bko_install::provisioner::ProvisionError;
use bko_install::router::{Config, Metrics, Router, Timeouts};
use prometheus_client::registry::Registry;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::memory::{Memory, Step};
use super::{SHOP, SHOP_KEY, Server, open, post};

const OTHER: &str = r#"{"repo":"acme/shop","arch":"amd64"}"#;
const OTHER_KEY: &str = "p280ada3d8fae4e39";

fn entries(seen: &super::memory::Seen, key: &str) -> usize {
    seen.projects.get(key).map_or(0, |daemon| daemon.inflight.len())
}

#[tokio::test]
async fn a_client_that_leaves_a_cold_wait_releases_its_build() {
    let memory = Arc::new(Memory::new());
    let server = Server::start(open(), &memory, Timeouts::new(open().route_wait)).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST /route HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{SHOP}", SHOP.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    memory.until(|seen| entries(seen, SHOP_KEY) == 1 && seen.calls.contains_key(&Step::Wait)).await;
    drop(stream);
    memory.until(|seen| entries(seen, SHOP_KEY) == 0).await;
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_registration_leaves_no_entry() {
    let memory = Arc::new(Memory::new());
    memory.hold(Step::Begin);
    let mut registry = Registry::default();
    let router = Router::new(open(), memory.clone(), Metrics::register(&mut registry));
    let route = tokio::spawn({
        let router = router.clone();
        async move { post(&router, "/route", SHOP).await }
    });
    memory.until(|seen| seen.calls.contains_key(&Step::Begin)).await;
    route.abort();
    assert!(route.await.unwrap_err().is_cancelled());
    memory.let_go(Step::Begin);
    memory.until(|seen| seen.persisted == 1 && entries(seen, SHOP_KEY) == 0).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert!(text.contains("buildkit_operator_routes_total{result=\"error\"} 1\n"), "{text}");
}

#[tokio::test]
async fn an_entry_that_may_have_been_persisted_is_released_and_a_refused_one_is_not_looked_for() {
    for (fault, ends) in [
        (ProvisionError::Unavailable { message: "timeout".into(), retry_after: Duration::ZERO }, 1),
        (ProvisionError::Saturated { inflight: 2000 }, 0),
    ] {
        let memory = Arc::new(Memory::ready());
        let fault = std::sync::Mutex::new(Some(fault));
        memory.fail(Step::Begin, move || fault.lock().unwrap().take().unwrap());
        let router = Router::new(open(), memory.clone(), Metrics::default());
        assert_ne!(post(&router, "/route", SHOP).await.status, StatusCode::OK);
        router.releases().close();
        router.releases().wait().await;
        assert_eq!(memory.seen().calls.get(&Step::End).copied().unwrap_or_default(), ends);
    }
}

#[tokio::test]
async fn a_completion_goes_on_when_its_client_leaves() {
    let memory = Arc::new(Memory::ready());
    let router = Router::new(open(), memory.clone(), Metrics::default());
    post(&router, "/route", SHOP).await;
    memory.hold(Step::End);
    let complete = tokio::spawn({
        let router = router.clone();
        async move { post(&router, "/complete", r#"{"key":"p41bd34a2227aca39"}"#).await }
    });
    memory.until(|seen| seen.calls.contains_key(&Step::End)).await;
    complete.abort();
    assert!(complete.await.unwrap_err().is_cancelled());
    memory.let_go(Step::End);
    memory.until(|seen| entries(seen, SHOP_KEY) == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_a_503_within_the_budget() {
    for step in [Step::Ensure, Step::Begin] {
        let memory = Arc::new(Memory::ready());
        memory.hold(step);
        let router =
            Router::new(Config { route_wait: Duration::from_secs(7), ..open() }, memory.clone(), Metrics::default());
        let began = tokio::time::Instant::now();
        let got = post(&router, "/route", SHOP).await;
        assert_eq!(got.status, StatusCode::SERVICE_UNAVAILABLE, "{}", got.body);
        assert_eq!(began.elapsed().as_secs(), 7);
        assert!(got.header("retry-after").is_some() && got.body.ends_with(": no answer in time\n"), "{}", got.body);
        memory.let_go(step);
        router.releases().close();
        router.releases().wait().await;
        assert_eq!(memory.inflight(SHOP_KEY).unwrap_or_default(), 0, "{step:?}");
    }
}

#[tokio::test]
async fn two_thousand_routes_at_once_get_as_many_builds() {
    let memory = Arc::new(Memory::ready());
    let router = Router::new(open(), memory.clone(), Metrics::default());
    let mut routes = JoinSet::new();
    for _ in 0..2000 {
        let router = router.clone();
        routes.spawn(async move { post(&router, "/route", SHOP).await });
    }
    let mut ids = BTreeSet::new();
    while let Some(answer) = routes.join_next().await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        ids.insert(answer.json()["buildId"].as_str().unwrap().to_owned());
    }
    assert_eq!(ids.len(), 2000);
    assert_eq!(memory.inflight(SHOP_KEY), Some(2000));
    let stored: BTreeSet<_> = memory.seen().projects[SHOP_KEY].inflight.iter().cloned().collect();
    assert_eq!(stored.len(), 2000);
    assert!(stored.is_disjoint(&ids), "only hashes are stored");
}

fn one_slot(memory: &Arc<Memory>) -> Router {
    let config = Config { max_cold_starts: NonZeroUsize::MIN, route_wait: Duration::from_secs(10), ..open() };
    Router::new(config, memory.clone(), Metrics::default())
}

#[tokio::test(start_paused = true)]
async fn queue_and_wait_share_one_budget_and_the_queue_says_its_place() {
    let memory = Arc::new(Memory::new());
    let router = one_slot(&memory);
    let began = tokio::time::Instant::now();
    let route = |body: &'static str| {
        let router = router.clone();
        tokio::spawn(async move { post(&router, "/route", body).await })
    };
    let first = route(SHOP);
    memory.until(|seen| seen.calls.get(&Step::Wait) == Some(&1)).await;
    let queued = [route(OTHER), route(OTHER)];
    let first = first.await.unwrap();
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT, "{}", first.body);
    for queued in queued {
        let queued = queued.await.unwrap();
        assert_eq!(queued.status, StatusCode::SERVICE_UNAVAILABLE);
        // Both end at once: the second may have left when the third looks.
        let (place, wait) = if queued.body.contains("place 1 ") { (1, "10") } else { (2, "20") };
        assert_eq!(queued.body, format!("too many cold starts: place {place} in the queue for 1 slots\n"));
        assert_eq!(queued.header("retry-after"), Some(wait));
    }
    assert_eq!(began.elapsed().as_secs(), 10);
    router.releases().close();
    router.releases().wait().await;
    assert_eq!((memory.inflight(SHOP_KEY), memory.inflight(OTHER_KEY)), (Some(0), Some(0)));
}

#[tokio::test]
async fn a_stuck_cold_start_holds_no_other_daemon_back() {
    let memory = Arc::new(Memory::new());
    let router = one_slot(&memory);
    let route = |body: &'static str| {
        let router = router.clone();
        tokio::spawn(async move { post(&router, "/route", body).await })
    };
    let stuck = route(SHOP);
    memory.until(|seen| seen.calls.get(&Step::Wait) == Some(&1)).await;
    let queued = route(OTHER);
    memory.until(|seen| seen.calls.get(&Step::Wait) == Some(&2)).await;
    memory.make_ready(OTHER_KEY);
    assert_eq!(queued.await.unwrap().status, StatusCode::OK);
    assert!(!stuck.is_finished());
    memory.make_ready(SHOP_KEY);
    assert_eq!(stuck.await.unwrap().status, StatusCode::OK);
}
