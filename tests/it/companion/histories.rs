//! Histories that no real daemon has on demand: too large to be told, endless,
//! or of a daemon that does not count steps. Played on BuildKit's own wire.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bko_install::companion::daemon::Daemon;
use bko_install::companion::metrics::Counters;
use bko_install::companion::observation::Observation;
use bko_install::companion::watch::Watch;
use bollard_buildkit_proto::google::protobuf::Timestamp;
use bollard_buildkit_proto::moby::buildkit::v1::{
    BuildHistoryEvent, BuildHistoryEventType, BuildHistoryRecord, BuildHistoryRequest,
};
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::UnixListener;

use super::fixture::until;

/// What a played daemon answers: messages, then a status of gRPC.
type Answer = (Vec<Bytes>, u8);

const OK: u8 = 0;
const RESOURCE_EXHAUSTED: u8 = 8;

/// One message on the wire of gRPC.
fn framed(message: &impl Message) -> Bytes {
    let body = message.encode_to_vec();
    let mut frame = vec![0];
    frame.extend(u32::try_from(body.len()).unwrap().to_be_bytes());
    frame.extend(body);
    frame.into()
}

fn event(kind: BuildHistoryEventType, record: BuildHistoryRecord) -> Bytes {
    framed(&BuildHistoryEvent { r#type: kind.into(), record: Some(record) })
}

fn record(reference: &str, completed: Option<i64>) -> BuildHistoryRecord {
    let at = |seconds| Timestamp { seconds, nanos: 0 };
    BuildHistoryRecord {
        r#ref: reference.to_owned(),
        created_at: Some(at(1)),
        completed_at: completed.map(at),
        ..BuildHistoryRecord::default()
    }
}

fn running() -> Bytes {
    event(BuildHistoryEventType::Started, record("runs", None))
}

/// Plays a daemon's Control API at a socket.
fn play(socket: &Path, history: impl Fn(&BuildHistoryRequest) -> Answer + Send + Sync + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    let history = Arc::new(history);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let history = history.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let history = history.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    let answer = match path.rsplit('/').next().unwrap() {
                        "ListenBuildHistory" => history(&BuildHistoryRequest::decode(&body[5..]).unwrap()),
                        // An empty message is an answer to all others; of a stream it is the end.
                        "Status" => (vec![], OK),
                        _ => (vec![Bytes::from_static(&[0; 5])], OK),
                    };
                    Ok::<_, Infallible>(respond(answer))
                }
            });
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(async move { server.serve_connection(TokioIo::new(stream), service).await });
        }
    });
}

fn respond((messages, status): Answer) -> Response<impl hyper::body::Body<Data = Bytes, Error = Infallible>> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", u16::from(status).into());
    let frames = messages.into_iter().map(Frame::data).chain([Frame::trailers(trailers)]);
    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
    Response::builder().header("content-type", "application/grpc").body(body).unwrap()
}

/// What a companion makes of it.
async fn observed(
    history: impl Fn(&BuildHistoryRequest) -> Answer + Send + Sync + 'static,
    wanted: impl Fn(&Observation) -> bool,
) -> Observation {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("buildkitd.sock");
    play(&socket, history);
    let daemon = Daemon::new(format!("unix://{}", socket.display()).parse().unwrap());
    let (watch, observer) = Watch::new(daemon, Counters::default(), None);
    let observing = tokio::spawn(observer.run());
    until("it is observed", Duration::from_secs(10), async || wanted(&watch.observation())).await;
    observing.abort();
    watch.observation()
}

#[tokio::test]
async fn a_history_that_is_too_large_does_not_hide_what_runs() {
    let by_the_daemon = |request: &BuildHistoryRequest| {
        if request.active_only { (vec![running()], OK) } else { (vec![], RESOURCE_EXHAUSTED) }
    };
    let by_us = |request: &BuildHistoryRequest| {
        let mut huge = record("huge", Some(5));
        huge.frontend = "x".repeat(17 << 20);
        let history = [event(BuildHistoryEventType::Complete, huge)];
        (history.into_iter().filter(|_| !request.active_only).chain([running()]).collect(), OK)
    };
    let seen = observed(by_the_daemon, |seen| seen.running() == Some(1)).await;
    assert_eq!((seen.active[0].reference.as_str(), seen.finished.len()), ("runs", 0));
    let seen = observed(by_us, |seen| seen.running() == Some(1)).await;
    assert_eq!((seen.active[0].reference.as_str(), seen.finished.len()), ("runs", 0));
}

#[tokio::test]
async fn of_a_huge_history_the_newest_builds_are_kept() {
    let seen = observed(
        |request| {
            assert_eq!(request.limit, if request.active_only { request.limit } else { 50 });
            // One that knows no limit, and no order.
            let all = (0..10_000).map(|i| (i * 7_919) % 10_000);
            let all = all.map(|i| event(BuildHistoryEventType::Complete, record(&i.to_string(), Some(100 + i))));
            (all.collect(), OK)
        },
        |seen| !seen.finished.is_empty(),
    )
    .await;
    let kept: Vec<_> = seen.finished.iter().map(|build| build.reference.clone()).collect();
    assert_eq!(kept, (9_950..10_000).rev().map(|i| i.to_string()).collect::<Vec<_>>());
    assert_eq!(seen.finished[0].steps_total, 0, "a daemon that does not count steps");
}
