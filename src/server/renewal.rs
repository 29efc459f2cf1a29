//! Certificates that end while the server runs: their successors, made by the
//! replica that leads.
//!
//! The same declarations and decisions as the installer's. Only Secrets that
//! are there, and no authority: the server's role allows no more.
#![expect(clippy::disallowed_methods, reason = "shell: reads the file that a flag names; a look has a deadline")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::cluster::{Cluster, Event, Limits};
use crate::install::secrets::{How, ensure};
use crate::manifest::Declarations;

/// How often it is looked. Windows are days long.
const EVERY: Duration = Duration::from_secs(3600);

/// After a failure.
const AGAIN: Duration = Duration::from_secs(60);

/// No look takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks whenever this replica begins to lead, and every hour that it does.
pub(super) async fn run(
    client: Client,
    file: PathBuf,
    mut leading: watch::Receiver<bool>,
    shutdown: CancellationToken,
) {
    let renew = async {
        loop {
            if leading.wait_for(|leads| *leads).await.is_err() {
                return;
            }
            let pause = if look(&client, &file).await { EVERY } else { AGAIN };
            tokio::select! {
                () = sleep(pause) => {}
                // One that leads no more has nothing to wait for.
                _ = leading.wait_for(|leads| !*leads) => {}
            }
        }
    };
    shutdown.run_until_cancelled(renew).await;
}

/// Whether all is as it should be.
async fn look(client: &Client, file: &Path) -> bool {
    // Read anew each time: the ConfigMap is mounted, and follows the installation.
    let declared = match read(file) {
        Ok(declared) => declared,
        Err(why) => {
            tracing::error!(file = %file.display(), error = %why, "certificates are not renewed");
            return false;
        }
    };
    let report = Arc::new(|event: Event| match event {
        Event::Warning { message } => tracing::warn!(message, "certificate"),
        event => tracing::debug!(%event, "certificate"),
    });
    let limits = Limits { concurrency: 4, deadline: Instant::now() + PATIENCE };
    let cluster = Cluster::new(client.clone(), limits, CancellationToken::new(), report);
    let how = How { leaves_only: true, ..How::default() };
    match ensure(&cluster, &declared, &how).await {
        Ok(ensured) => {
            for renewed in ensured.iter().filter(|ensured| ensured.written) {
                tracing::info!(secret = renewed.secret, decision = renewed.decision, "certificate renewed");
            }
            true
        }
        Err(error) => {
            tracing::error!(error = %error, "certificates are not renewed");
            false
        }
    }
}

fn read(file: &Path) -> Result<Declarations, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}
