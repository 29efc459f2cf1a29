//! Publishes what happens to daemons as Kubernetes Events, beside the reconcile:
//! an Event is worth no delay and no failure.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::Recorder;
use kube::{Client, Resource};
use tokio::sync::mpsc;

use super::super::api::BuildProject;
use super::super::moment::Moment;
use crate::names::CONTROLLER_MANAGER;

/// Events that may wait while the API server is slow; more are dropped.
const QUEUE: usize = 1024;

/// Hands moments to a task that publishes them in order.
#[derive(Clone, Debug)]
pub(super) struct Notifier(mpsc::Sender<(ObjectReference, Moment)>);

impl Notifier {
    /// Starts the task; it ends with the last copy of the value.
    pub(super) fn start(client: Client) -> Self {
        let (sender, mut receiver) = mpsc::channel::<(ObjectReference, Moment)>(QUEUE);
        tokio::spawn(async move {
            let recorder = Recorder::new(client, CONTROLLER_MANAGER.into());
            while let Some((about, moment)) = receiver.recv().await {
                if let Err(error) = recorder.publish(&moment.event(), &about).await {
                    let key = about.name.as_deref().unwrap_or_default();
                    tracing::warn!(project.key = key, ?moment, %error, "an event was not published");
                }
            }
        });
        Self(sender)
    }

    /// Tells of a moment in a project's life.
    pub(super) fn tell(&self, project: &BuildProject, moment: Moment) {
        // A full queue means an API server that does not answer: others say so.
        let _ = self.0.try_send((project.object_ref(&()), moment));
    }
}
