//! The companion beside a real buildkitd, with real builds.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "tests fail by panicking, and measure other processes"
)]

mod fixture;
mod histories;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use bko_install::companion::daemon::{AskDaemon, Daemon};
use rustix::process::Signal;
use serde_json::Value;
use tokio::time::{Instant, timeout};

use fixture::{BINARY, Buildkitd, Companion, hook, output, until};

const S: fn(u64) -> Duration = Duration::from_secs;
const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn an_idle_daemon_is_let_go_at_once() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    for path in ["/healthz", "/readyz", "/livez"] {
        assert_eq!(companion.get(path).await.0, 200, "{path}");
    }

    let begun = Instant::now();
    let waited = output(hook(&daemon, &daemon.path("bin/bko-install"), 60)).await;
    assert!(waited.status.success(), "{waited:?}");
    assert!(begun.elapsed() < S(2), "took {:?}", begun.elapsed());
    assert_eq!(companion.get("/readyz").await, (503, "draining\n".to_owned()));
    assert_eq!(companion.get("/livez").await.0, 200, "a daemon that drains is alive");

    companion.terminate();
    let (status, took) = companion.ended(S(5)).await;
    assert!(status.success() && took < SECOND, "{status} after {took:?}");
}

#[tokio::test]
async fn a_build_holds_its_daemon_until_it_has_ended() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    let mut build = daemon.build(&["sleep", "5"]).await;
    let seen = until("the build is seen", S(5), async || companion.active().await == 1).await;
    assert!(seen < SECOND, "seen after {seen:?}");
    assert_eq!(companion.metric("buildkit_operator_companion_active_builds").await, Some(1.0));

    let mut waiting = hook(&daemon, Path::new(BINARY), 60).spawn().unwrap();
    companion.until("/readyz", 503).await;
    while build.runs() {
        assert!(waiting.try_wait().unwrap().is_none(), "the hook ended before the build");
        assert_eq!((companion.get("/readyz").await.0, companion.get("/livez").await.0), (503, 200));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let ended = Instant::now();
    build.succeeds().await;
    assert!(timeout(S(10), waiting.wait()).await.expect("the hook ends").unwrap().success());
    let quiet = ended.elapsed();
    assert!(quiet > Duration::from_millis(1500) && quiet < S(4), "the hook ended {quiet:?} after the build");

    let builds = companion.json("/builds").await;
    let finished = &builds["finished"][0];
    assert!(finished["completed"].is_string() && finished["error"].is_null(), "{builds}");
    assert!(finished["stepsTotal"].as_u64() >= Some(3), "{builds}");
    assert_eq!(companion.metric("buildkit_operator_build_duration_seconds_count").await, Some(1.0));
    assert!(companion.metric("buildkit_operator_build_duration_seconds_sum").await > Some(4.0));
    assert_eq!(companion.metric("buildkit_operator_companion_builds_total{result=\"ok\"}").await, Some(1.0));
    assert_eq!(companion.metric("buildkit_operator_companion_active_builds").await, Some(0.0));
    assert!(companion.metric("buildkit_operator_companion_daemon_resident_bytes").await > Some(1e6));
}

/// While it runs: the steps so far, and at which step it is. Again: from the cache.
#[tokio::test]
async fn a_build_tells_its_steps_while_it_runs_and_what_the_cache_answered_after() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    let build = daemon.build(&["sleep", "3"]).await;
    let mut told = serde_json::Value::Null;
    until("the step is told", S(5), async || {
        told = companion.json("/builds").await["active"][0].clone();
        told["step"].as_str().is_some_and(|step| step.ends_with("RUN"))
    })
    .await;
    assert_eq!(told["step"], "[2/2] RUN", "without its command: {told}");
    assert!(told["stepsTotal"].as_u64() >= Some(3) && told["stepsCompleted"].as_u64() >= Some(1), "{told}");
    assert!(told["stepsCompleted"].as_u64() < told["stepsTotal"].as_u64(), "{told}");
    build.succeeds().await;
    daemon.build_again(&["sleep", "3"]).await.succeeds().await;
    until("both builds have ended", S(5), async || {
        companion.json("/builds").await["finished"].as_array().unwrap().len() == 2
    })
    .await;
    let finished = companion.json("/builds").await["finished"].clone();
    let (again, first) = (&finished[0], &finished[1]);
    assert_eq!((first["stepsCached"].as_u64(), again["error"].as_str()), (Some(0), None), "{finished}");
    assert!(again["stepsCached"].as_u64() >= Some(2), "the copy and the run: {finished}");
    assert!(again["stepsTotal"].as_u64() >= again["stepsCached"].as_u64(), "{finished}");
    let cached = companion.metric("buildkit_operator_build_steps_total{cached=\"true\"}").await;
    assert_eq!(cached, again["stepsCached"].as_f64());
    assert!(companion.metric("buildkit_operator_build_steps_total{cached=\"false\"}").await >= Some(3.0));
}

#[tokio::test]
async fn a_failed_build_is_told_without_its_command() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    daemon.build(&["sh", "-c", "echo s3cret; exit 7"]).await.fails().await;
    let mut text = String::new();
    until("the build has ended", S(5), async || {
        text = companion.get("/builds").await.1;
        text.contains("exit code: 7")
    })
    .await;
    assert!(!text.contains("s3cret"), "{text}");
    assert_eq!(companion.metric("buildkit_operator_companion_builds_total{result=\"error\"}").await, Some(1.0));
}

#[tokio::test]
async fn a_companion_that_is_told_to_end_answers_until_the_build_has_ended() {
    let daemon = Buildkitd::start().await;
    let mut companion = Companion::ready(&daemon, &[]).await;
    let mut build = daemon.build(&["sleep", "3"]).await;
    until("the build is seen", S(5), async || companion.active().await == 1).await;
    companion.terminate();
    companion.until("/readyz", 503).await;
    while build.runs() {
        assert!(companion.child.try_wait().unwrap().is_none(), "ended before the build");
        assert_eq!(companion.get("/livez").await.0, 200);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    build.succeeds().await;
    let (status, took) = companion.ended(S(10)).await;
    assert!(status.success() && took < S(4), "{status} after {took:?}");
}

#[tokio::test]
async fn a_build_is_protected_though_its_companion_is_killed_or_absent() {
    let daemon = Buildkitd::start().await;
    let mut companion = Companion::ready(&daemon, &[]).await;
    let mut build = daemon.build(&["sleep", "5"]).await;
    until("the build is seen", S(5), async || companion.active().await == 1).await;
    let mut asked_companion = hook(&daemon, Path::new(BINARY), 60).spawn().unwrap();
    companion.until("/readyz", 503).await;
    companion.child.kill().await.unwrap();
    let mut asked_daemon = hook(&daemon, Path::new(BINARY), 60).spawn().unwrap();
    while build.runs() {
        assert!(asked_companion.try_wait().unwrap().is_none() && asked_daemon.try_wait().unwrap().is_none());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    build.succeeds().await;
    for waiting in [&mut asked_companion, &mut asked_daemon] {
        assert!(timeout(S(10), waiting.wait()).await.expect("the hook ends").unwrap().success());
    }
}

#[tokio::test]
async fn the_gate_outlives_a_restart_of_the_daemon_only_when_closed_for_good() {
    let mut daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    daemon.kill().await;
    assert!(companion.until("/readyz", 503).await < S(2));
    let (_, reason) = companion.get("/readyz").await;
    assert_eq!(reason, "nothing listens on the daemon's socket\n");
    daemon.restart().await;
    companion.until("/readyz", 200).await;

    // A container that is restarted runs its preStop hook, and comes back.
    assert!(output(hook(&daemon, Path::new(BINARY), 60)).await.status.success());
    assert_eq!(companion.get("/readyz").await.0, 503);
    daemon.kill().await;
    daemon.restart().await;
    companion.until("/readyz", 200).await;

    let (status, body) = companion.control("POST", "/drain?seconds=20").await;
    assert_eq!((status, body.contains("\"outcome\":\"idle\"")), (200, true), "{body}");
    daemon.kill().await;
    companion.until("/livez", 503).await;
    daemon.restart().await;
    companion.until("/livez", 200).await;
    assert_eq!(companion.get("/readyz").await, (503, "draining\n".to_owned()));
    assert_eq!(companion.control("POST", "/undrain").await.0, 204);
    assert_eq!(companion.get("/readyz").await.0, 200);
}

#[tokio::test]
async fn a_stopped_daemon_makes_nothing_hang() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    daemon.signal(Signal::STOP);
    assert!(companion.until("/readyz", 503).await < S(5));
    for (path, want) in
        [("/healthz", 200), ("/readyz", 503), ("/livez", 503), ("/usage", 200), ("/builds", 200), ("/metrics", 200)]
    {
        let begun = Instant::now();
        assert_eq!(companion.get(path).await.0, want, "{path}");
        assert!(begun.elapsed() < SECOND, "{path} took {:?}", begun.elapsed());
    }
    assert_eq!(companion.control("POST", "/prune").await.0, 503);
    assert_eq!(companion.control("GET", "/cache").await.0, 504);
    let begun = Instant::now();
    let waited = output(hook(&daemon, Path::new(BINARY), 2)).await;
    assert_eq!(waited.status.code(), Some(4), "{waited:?}");
    assert!(begun.elapsed() >= S(2) && begun.elapsed() < S(5), "took {:?}", begun.elapsed());
    assert_eq!(companion.control("POST", "/undrain").await.0, 204);
    daemon.signal(Signal::CONT);
    companion.until("/readyz", 200).await;
}

#[tokio::test]
async fn a_starved_daemon_with_a_build_is_alive() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    let build = daemon.build(&["sleep", "2"]).await;
    until("the build is seen", S(5), async || companion.active().await == 1).await;
    daemon.signal(Signal::STOP);
    companion.until("/readyz", 503).await;
    assert_eq!(companion.get("/livez").await.0, 200);
    let waited = output(hook(&daemon, Path::new(BINARY), 3)).await;
    assert_eq!(waited.status.code(), Some(4), "builds may be running: {waited:?}");
    daemon.signal(Signal::CONT);
    build.succeeds().await;
    until("the build has ended", S(5), async || companion.active().await == 0).await;
}

#[tokio::test]
async fn only_the_own_user_controls() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    let mode = std::fs::metadata(daemon.path("control/control.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stranger = hook(&daemon, &daemon.path("bin/bko-install"), 1);
    let stranger = stranger.as_std();
    let mut refused = tokio::process::Command::new("setpriv");
    refused.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    refused.arg(stranger.get_program()).args(stranger.get_args());
    let refused = output(refused).await;
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("asking the daemon instead") && said.contains("cannot connect"), "{said}");
    assert_eq!(companion.get("/readyz").await.0, 200, "the gate is as it was");
    for (method, path) in [("POST", "/drain"), ("POST", "/undrain"), ("POST", "/prune"), ("GET", "/cache")] {
        let (status, _) = companion.get(path).await;
        assert_eq!(status, 404, "{method} {path} is not served to the network");
    }
}

#[tokio::test]
async fn usage_is_what_the_file_system_says() {
    let daemon = Buildkitd::with_volume("size=200m,nr_inodes=20000").await;
    let companion = Companion::ready(&daemon, &[]).await;
    daemon.build(&["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=20"]).await.succeeds().await;
    until("usage is as statfs says", S(10), async || {
        let usage = companion.usage().await;
        let stat = rustix::fs::statvfs(daemon.store()).unwrap();
        let used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize;
        assert_eq!(usage["bytesTotal"].as_u64(), Some(200 << 20));
        assert_eq!(usage.as_object().unwrap().len(), 3, "{usage}");
        #[expect(clippy::cast_precision_loss, reason = "a share")]
        let inodes = (stat.f_files - stat.f_ffree) as f64 / 20_000.0;
        used > 20 << 20 && usage["bytesUsed"].as_u64() == Some(used) && usage["inodeRatio"].as_f64() == Some(inodes)
    })
    .await;
    for name in ["inode_usage_ratio", "inode_used", "inode_total", "cache_bytes_used", "cache_bytes_total"] {
        assert!(companion.metric(name).await > Some(0.0), "{name}");
    }
}

#[tokio::test]
async fn a_prune_by_hand_waits_for_no_build_and_cuts_none() {
    let daemon = Buildkitd::start().await;
    let companion = Companion::ready(&daemon, &[]).await;
    let build = daemon.build(&["sleep", "2"]).await;
    until("the build is seen", S(5), async || companion.active().await == 1).await;
    let (status, body) = companion.control("POST", "/prune").await;
    assert_eq!(status, 409, "{body}");
    build.succeeds().await;
    until("the build has ended", S(5), async || companion.active().await == 0).await;

    let number = |body: &str, name: &str| serde_json::from_str::<serde_json::Value>(body).unwrap()[name].as_u64();
    let (_, before) = companion.control("GET", "/cache").await;
    assert!(number(&before, "bytes") > Some(1 << 20), "{before}");
    let (status, pruned) = companion.control("POST", "/prune").await;
    assert!(status == 200 && number(&pruned, "bytes") > Some(1 << 20), "{status} {pruned}");
    let (_, after) = companion.control("GET", "/cache").await;
    assert_eq!(number(&after, "records"), Some(0), "{after}");
}

/// A daemon that answers every call with these headers and bytes.
async fn answering(path: std::path::PathBuf, status: Option<&'static str>, body: &'static [u8]) {
    let listener = tokio::net::UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let service = hyper::service::service_fn(move |_| async move {
            let mut answer = http::Response::new(http_body_util::Full::new(body));
            answer.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
            if let Some(status) = status {
                answer.headers_mut().insert("grpc-status", status.parse().unwrap());
            }
            Ok::<_, std::convert::Infallible>(answer)
        });
        let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
        let _ = builder.serve_connection(hyper_util::rt::TokioIo::new(stream), service).await;
    });
}

#[tokio::test]
async fn a_cache_that_is_too_large_to_tell_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    // RESOURCE_EXHAUSTED by the daemon; a message of 64 MiB, of which only the
    // head is needed; INTERNAL, which is an error.
    for (name, status, body, tolerated) in [
        ("exhausted", Some("8"), &[][..], true),
        ("huge", None, &[0, 4, 0, 0, 0][..], true),
        ("internal", Some("13"), &[][..], false),
    ] {
        let path = folder.path().join(name);
        answering(path.clone(), status, body).await;
        let daemon = Daemon::new(format!("unix://{}", path.display()).parse().unwrap());
        let cache = daemon.cache(S(5)).await;
        assert_eq!(matches!(cache, Ok(None)), tolerated, "{name}: {cache:?}");
        assert_eq!(matches!(cache, Err(AskDaemon::Refused(..))), !tolerated, "{name}: {cache:?}");
    }
}

/// Fills the volume with one step, and shows that the cache is pruned only
/// once the build has ended.
async fn filled_while_building(volume: &'static str, flags: &[&str], fill: &str, reason: &str) {
    let daemon = Buildkitd::with_volume(volume).await;
    let companion = Companion::ready(&daemon, flags).await;
    let prunes = format!("buildkit_operator_companion_prunes_total{{reason=\"{reason}\"}}");
    let usage = async || {
        let usage = companion.usage().await;
        let (used, total) = (usage["bytesUsed"].as_f64().unwrap(), usage["bytesTotal"].as_f64().unwrap());
        if reason == "bytes" { used / total } else { usage["inodeRatio"].as_f64().unwrap() }
    };
    let mut build = daemon.build(&["sh", "-c", &format!("{fill}; /bin/busybox sleep 6")]).await;
    until("the volume fills", S(10), async || usage().await > 0.5).await;
    while build.runs() && companion.active().await == 1 {
        assert_eq!(companion.metric(&prunes).await, None, "pruned under a build");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    build.succeeds().await;
    until("the volume is pruned", S(10), async || usage().await < 0.5).await;
    assert_eq!(companion.metric(&prunes).await, Some(1.0));
    assert!(companion.metric("buildkit_operator_companion_pruned_bytes_total").await > Some(0.0));
    assert_eq!(companion.get("/readyz").await.0, 200);
}

/// A database that a kill left broken is begun anew: the daemon serves, and it is told that its cache is lost.
#[tokio::test]
async fn a_cache_that_was_lost_is_told() {
    let mut daemon = Buildkitd::on_disk().await;
    let companion = Companion::ready(&daemon, &[]).await;
    daemon.build(&["true"]).await.succeeds().await;
    assert_eq!(companion.json("/builds").await["cacheReset"], Value::Null);
    daemon.kill().await;
    let database = daemon.path("root").join("cache.db");
    let length = std::fs::metadata(&database).unwrap().len();
    std::fs::write(&database, vec![0xa5; usize::try_from(length).unwrap()]).unwrap();
    daemon.restart().await;
    until("the loss is told", S(10), async || companion.json("/builds").await["cacheReset"].is_string()).await;
    daemon.build(&["true"]).await.succeeds().await;
}

/// A build that needs more than there is fails with the reason, and the next finds room.
#[tokio::test]
async fn a_full_volume_fails_the_build_and_nothing_hangs() {
    let daemon = Buildkitd::with_volume("size=120m").await;
    let companion = Companion::ready(&daemon, &[]).await;
    let mut flood = daemon.build(&["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=400"]).await;
    until("the build has failed", S(20), async || !flood.runs()).await;
    flood.fails().await;
    until("there is room again", S(20), async || {
        let stat = rustix::fs::statvfs(daemon.store()).unwrap();
        stat.f_bavail * 2 > stat.f_blocks
    })
    .await;
    daemon.build(&["dd", "if=/dev/zero", "of=/small", "bs=1M", "count=5"]).await.succeeds().await;
    assert_eq!(companion.get("/readyz").await.0, 200);
}

#[tokio::test]
async fn inodes_are_made_room_for_but_not_under_a_build() {
    let fill = "i=0; while [ $i -lt 2500 ]; do i=$((i+1)); : > /f$i; done";
    filled_while_building("size=200m,nr_inodes=4000", &["--inode-threshold", "0.5"], fill, "inodes").await;
}

#[tokio::test]
async fn bytes_are_made_room_for_but_not_under_a_build() {
    let fill = "/bin/busybox dd if=/dev/zero of=/big bs=1M count=80";
    filled_while_building("size=120m", &["--space-threshold", "0.5"], fill, "bytes").await;
}
