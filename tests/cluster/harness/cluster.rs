//! A cluster as a test sees it; this is the tier that has a control plane only.

use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;

use super::audit::Audit;
use super::control_plane::{self, ControlPlane};
use super::namespaces::Namespaces;
use super::tools::Tools;
use super::{Tier, play};

/// Of a user that may do everything.
pub(crate) const KUBECONFIG: &str = "/run/bko/admin.kubeconfig";

/// Without nodes there is nothing to keep alive: the node controllers would
/// only declare played nodes dead.
const CONTROLLERS: &str = "*,-node-ipam-controller,-node-lifecycle-controller,-cloud-node-lifecycle-controller";

/// A Kubernetes that answers. By itself it has no node: pods are created but
/// run nowhere, and [`play`](super::play) plays the kubelet.
pub(crate) struct Cluster {
    client: Client,
    control_plane: ControlPlane,
    tools: Arc<Tools>,
}

impl Tier for Cluster {
    const NAME: &'static str = "control-plane";
    const PROGRAMS: &'static [&'static str] = control_plane::PROGRAMS;

    async fn start(tools: Arc<Tools>) -> anyhow::Result<Self> {
        let cluster = Self::with_controllers(tools, CONTROLLERS).await?;
        play::create_node(cluster.client()).await?;
        Ok(cluster)
    }
}

impl Cluster {
    /// Starts a control plane with a default storage class.
    ///
    /// # Errors
    /// A program does not start.
    pub(crate) async fn with_controllers(tools: Arc<Tools>, controllers: &str) -> anyhow::Result<Self> {
        let (control_plane, client) = control_plane::start(&tools, controllers).await?;
        let class = serde_json::from_value(json!({
            "metadata": {
                "name": "standard",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/host-path",
            "reclaimPolicy": "Delete",
        }))?;
        Api::<StorageClass>::all(client.clone()).create(&PostParams::default(), &class).await?;
        Ok(Self { client, control_plane, tools })
    }

    /// A client that may do everything.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// A kubeconfig for [`client`](Self::client)'s user.
    pub(crate) fn kubeconfig(&self) -> &Path {
        Path::new(KUBECONFIG)
    }

    /// What the API server was asked so far.
    pub(crate) fn audit(&self) -> Audit {
        Audit::new(self.client())
    }

    /// Three names that no other test has.
    pub(crate) fn namespaces(&self, prefix: &str) -> Namespaces {
        Namespaces::unused(prefix)
    }

    /// Its programs, to be killed and started again by tests that own the cluster.
    pub(crate) fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }

    /// Programs to run against it, such as `kubectl`.
    pub(crate) fn tools(&self) -> &Tools {
        &self.tools
    }
}
