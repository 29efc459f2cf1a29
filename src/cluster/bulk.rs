//! Many live objects in few requests: pages of what carries our label, instead
//! of one request an object. Who may not list, is asked object by object.

use std::collections::BTreeMap;

use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, ListMeta, Request, Resource as _};
use serde::Deserialize;
use serde_json::Value;

use super::{Cluster, RequestError, record};
use crate::manifest::{Object, ObjectId};
use crate::names::INSTALLER_MANAGER;

/// Fewer objects of a kind and namespace are not worth a list.
const FEW: usize = 4;

/// Objects in one answer, so that answers stay small.
const PAGE: u32 = 200;

/// Objects of one kind in one namespace, by name.
pub(super) type Group<'a> = BTreeMap<&'a str, &'a Object>;

#[derive(Deserialize)]
struct Page {
    metadata: ListMeta,
    items: Vec<Value>,
}

/// Objects of whose kind there are many in one namespace.
pub(super) fn groups<'a>(objects: impl IntoIterator<Item = &'a Object>) -> impl Iterator<Item = Group<'a>> {
    let mut groups: BTreeMap<_, Group<'a>> = BTreeMap::new();
    for object in objects {
        let ObjectId { group, version, kind, namespace, name } = &object.id;
        groups.entry((group, version, kind, namespace)).or_default().insert(name, object);
    }
    groups.into_values().filter(|group| group.len() >= FEW)
}

/// What all our objects carry, and the record's parts, which are large, do not.
pub(super) fn selector() -> String {
    format!("app.kubernetes.io/managed-by={INSTALLER_MANAGER},!{},!{}", record::PART, record::LABEL)
}

impl Cluster {
    /// Shows `see` every object of this kind and place that carries our label,
    /// or simply every one; one at a time, to be kept or not.
    pub(super) async fn each(
        &self,
        kind: &ObjectId,
        resource: &ApiResource,
        labelled: bool,
        mut see: impl FnMut(Value),
    ) -> Result<(), RequestError> {
        let request = format!("list {}", resource.plural);
        let mut params = ListParams::default().limit(PAGE);
        if labelled {
            params = params.labels(&selector());
        }
        loop {
            let collection = Request::new(DynamicObject::url_path(resource, kind.namespace.as_deref()));
            let built = collection.list(&params).map_err(|source| RequestError::Other {
                request: request.clone(),
                source: kube::Error::BuildRequest(source),
            })?;
            let page: Page = self.send_raw(&request, kind, built).await?;
            for mut item in page.items {
                // Items of a list carry neither.
                item["apiVersion"] = resource.api_version.as_str().into();
                item["kind"] = resource.kind.as_str().into();
                see(item);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}
