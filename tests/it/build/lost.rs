//! A daemon that goes away: before anything was built, the build is repeated
//! once; afterwards never, unless that is wanted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::daemon::daemon;
use super::farm::{Farm, Running, ends_with};

/// Stands before the daemon: relays so many connections, then cuts all.
struct Cutter {
    address: SocketAddr,
    /// How many more connections are relayed.
    left: Arc<AtomicUsize>,
    cut: watch::Sender<usize>,
}

impl Cutter {
    async fn start(left: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let left = Arc::new(AtomicUsize::new(left));
        let cut = watch::Sender::new(0);
        let (allowed, cuts) = (left.clone(), cut.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let relayed = allowed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
                if relayed.is_err() {
                    continue;
                }
                let mut cut = cuts.subscribe();
                tokio::spawn(async move {
                    let mut daemon = TcpStream::connect(daemon().address).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut daemon) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { address, left, cut }
    }

    fn allow(&self, connections: usize) {
        self.left.store(connections, Ordering::SeqCst);
    }

    fn cut(&self) {
        self.cut.send_modify(|count| *count += 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_gone_at_once_is_asked_for_again() {
    let cutter = Cutter::start(0).await;
    let farm = Farm::behind(cutter.address).await;
    let mut build = Running::start(farm.build(&[]));
    build.until("asking for a daemon once more").await;
    cutter.allow(100);
    let (code, printed) = build.ends().await;
    // The second route may have come before the daemon did.
    let persisted = farm.memory.seen().persisted;
    assert_eq!(persisted, 2, "{printed}");
    assert!(code == Some(0) || printed.contains("does not answer"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_stays_away_is_told() {
    let cutter = Cutter::start(0).await;
    let farm = Farm::behind(cutter.address).await;
    let printed = ends_with(1, farm.build(&[])).await;
    assert!(printed.contains("cannot build on p41bd34a2227aca39"), "{printed}");
    assert_eq!(farm.memory.seen().persisted, 2, "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_builder_that_finds_no_daemon_has_begun_nothing() {
    for builder in ["buildx", "buildctl"] {
        // Ours is let through, the builder's are not.
        let cutter = Cutter::start(1).await;
        let farm = Farm::behind(cutter.address).await;
        let mut build = Running::start(farm.build(&["--builder", builder]));
        build.until("the daemon has gone away; asking for a daemon once more").await;
        cutter.allow(100);
        let (_, printed) = build.ends().await;
        assert_eq!(farm.memory.seen().persisted, 2, "{builder}:\n{printed}");
        farm.is_clean();
    }
}

const SLOW: &str = "RUN echo \"be\"gun && sleep 3 && echo x > /result";

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_began_is_not_repeated_unless_wanted() {
    for (retries, want) in [("0", 1), ("1", 2)] {
        let cutter = Cutter::start(100).await;
        let farm = Farm::behind(cutter.address).await;
        farm.dockerfile(SLOW);
        let mut build = Running::start(farm.build(&["--no-cache", "--retries", retries]));
        build.until("begun").await;
        cutter.cut();
        let (code, printed) = build.ends().await;
        assert_eq!(farm.memory.seen().persisted, want, "{printed}");
        assert_eq!(code == Some(0), want == 2, "{printed}");
        farm.is_clean();
    }
}
