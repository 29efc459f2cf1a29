//! Namespaces of one test's own.

use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};

/// The three namespaces of an installation: only names, until something
/// creates them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Namespaces {
    /// Of the control plane.
    pub(crate) operator: String,
    /// Of the daemons.
    pub(crate) builds: String,
    /// Of node plumbing.
    pub(crate) system: String,
}

impl Namespaces {
    /// Names that begin with `prefix` and were never given before.
    pub(crate) fn unused(prefix: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let [operator, builds, system] =
            ["operator", "builds", "system"].map(|purpose| format!("{prefix}-{number}-{purpose}"));
        Self { operator, builds, system }
    }

    /// All three.
    pub(crate) fn all(&self) -> [&str; 3] {
        [&self.operator, &self.builds, &self.system]
    }

    /// Creates them, and returns when pods can be created in them.
    ///
    /// # Errors
    /// The API server refuses.
    pub(crate) async fn create(&self, client: &Client) -> anyhow::Result<()> {
        for name in self.all() {
            let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
            let namespace = Namespace { metadata, ..Namespace::default() };
            Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
        }
        for name in self.all() {
            let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), name);
            await_condition(accounts, "default", |account: Option<&ServiceAccount>| account.is_some()).await?;
        }
        Ok(())
    }

    /// Deletes those that exist, without waiting: for tests whose pods would keep the node busy.
    ///
    /// # Errors
    /// The API server refuses.
    pub(crate) async fn delete(&self, client: &Client) -> anyhow::Result<()> {
        let api: Api<Namespace> = Api::all(client.clone());
        for name in self.all() {
            if api.get_opt(name).await?.is_some() {
                api.delete(name, &DeleteParams::background()).await?;
            }
        }
        Ok(())
    }
}
