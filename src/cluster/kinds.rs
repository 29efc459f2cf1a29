//! Which kinds the API server serves, asked one API version at a time, so that
//! one broken APIService does not hide the others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResource;
use kube::core::{ApiResource, GroupVersionKind};
use tokio::sync::OnceCell;

use crate::manifest::ObjectId;

type Served = Arc<OnceCell<Arc<Vec<APIResource>>>>;

pub(super) struct Kinds {
    client: kube::Client,
    versions: Mutex<HashMap<String, Served>>,
}

impl Kinds {
    pub(super) fn new(client: kube::Client) -> Self {
        Self { client, versions: Mutex::default() }
    }

    /// The resource that serves the objects of this kind; `None` when the API
    /// server has no such kind.
    pub(super) async fn find(&self, id: &ObjectId) -> Result<Option<ApiResource>, kube::Error> {
        let resources = self.list(id).await?;
        // Subresources are listed too, as `deployments/scale`.
        let resource = resources.iter().find(|r| r.kind == id.kind && !r.name.contains('/'));
        let gvk = GroupVersionKind::gvk(&id.group, &id.version, &id.kind);
        Ok(resource.map(|r| ApiResource::from_gvk_with_plural(&gvk, &r.name)))
    }

    /// Everything that the API version of an object serves.
    pub(super) async fn list(&self, id: &ObjectId) -> Result<Arc<Vec<APIResource>>, kube::Error> {
        let cell = self.lock().entry(id.api_version()).or_default().clone();
        let list = cell.get_or_try_init(|| async { self.fetch(id).await.map(Arc::new) }).await?;
        Ok(Arc::clone(list))
    }

    /// Asks again next time: a definition has been applied since.
    pub(super) fn forget(&self, id: &ObjectId) {
        self.lock().remove(&id.api_version());
    }

    async fn fetch(&self, id: &ObjectId) -> Result<Vec<APIResource>, kube::Error> {
        let list = if id.group.is_empty() {
            self.client.list_core_api_resources(&id.version).await
        } else {
            self.client.list_api_group_resources(&id.api_version()).await
        };
        match list {
            Ok(list) => Ok(list.resources),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Served>> {
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
