//! The recorded exchanges against the real server on a real API server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use bko_install::families::build_farm::api::{BuildProject, Phase};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;

use crate::differences::DIFFERENCES;
use crate::farm::{self, Server};
use crate::harness::Cluster;
use crate::harness::play::Play;
use crate::issuer;
use crate::replay::{self, GROUPS, Subject};

const NAMESPACE: &str = "buildkit-builds";

struct Recorded<'a> {
    cluster: &'a Cluster,
    play: &'a Play,
    address: SocketAddr,
    issuer: Option<issuer::Recorded>,
}

impl Subject for Recorded<'_> {
    fn address(&self) -> SocketAddr {
        self.address
    }

    async fn inflight(&self, key: &str) -> Option<usize> {
        farm::status(self.cluster, NAMESPACE, key).await.map(|status| status.inflight.len())
    }

    async fn let_pods_become_ready(&self) {
        self.play.switch_on();
        for project in farm::names::<BuildProject>(self.cluster, NAMESPACE).await.unwrap() {
            // All of them were just asked for. One that has not been reconciled
            // since may still be called idle.
            let settled = |p: &BuildProject| p.status.as_ref().and_then(|s| s.phase) == Some(Phase::Warm);
            farm::until(self.cluster, NAMESPACE, &project, "warm", settled).await.unwrap();
        }
    }

    fn token(&self, claims: &str) -> String {
        self.issuer.as_ref().unwrap().token(claims)
    }
}

pub(crate) async fn every_recorded_exchange_comes_out_the_same(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    farm::define(&cluster).await?;
    let metadata = ObjectMeta { name: Some(NAMESPACE.into()), ..ObjectMeta::default() };
    let namespace = Namespace { metadata, ..Namespace::default() };
    Api::<Namespace>::all(cluster.client()).create(&PostParams::default(), &namespace).await?;
    let play = Play::start(cluster.client(), NAMESPACE, Duration::ZERO);
    let mut differed = Vec::new();
    for name in GROUPS {
        play.switch_off();
        let group = replay::group(name);
        let mut recorded = group[0].server.clone();
        let issuer = issuer::Recorded::of(&mut recorded.env).await;
        let flags: Vec<_> = recorded.flags.iter().map(String::as_str).chain(["--pod-namespace=default"]).collect();
        let env: Vec<_> = recorded.env.iter().map(|(k, v)| (k.as_str(), v.as_str().unwrap_or_default())).collect();
        let server = Server::with(&cluster, &flags, &env).await?;
        let subject = Recorded { cluster: &cluster, play: &play, address: server.api, issuer };
        differed.extend(replay::replay(group, &subject, &DIFFERENCES).await);
        server.kill().await?;
        empty(&cluster).await?;
    }
    let mut wanted: Vec<_> = DIFFERENCES.iter().flat_map(|d| d.exchanges).copied().collect();
    wanted.sort_unstable();
    differed.sort_unstable();
    ensure!(differed == wanted, "{differed:?} and {wanted:?}");
    Ok(())
}

/// The next group begins with nothing.
async fn empty(cluster: &Cluster) -> anyhow::Result<()> {
    let (all, now) = (ListParams::default(), DeleteParams::default());
    let projects = Api::<BuildProject>::namespaced(cluster.client(), NAMESPACE);
    projects.delete_collection(&now, &all).await?;
    gone::<StatefulSet>(cluster).await?;
    gone::<Service>(cluster).await?;
    gone::<Pod>(cluster).await
}

async fn gone<K>(cluster: &Cluster) -> anyhow::Result<()>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned,
{
    let api = Api::<K>::namespaced(cluster.client(), NAMESPACE);
    for object in api.list(&ListParams::default()).await? {
        // The garbage collector may have been faster.
        let _ = api.delete(&object.name_any(), &DeleteParams::default()).await;
    }
    while !api.list(&ListParams::default()).await?.items.is_empty() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
