//! The order of kinds within a level.

use serde::Serialize;

use crate::manifest::ObjectId;

/// Objects of one wave do not need one another and are written at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wave {
    /// What holds everything else.
    Namespaces,
    /// Custom resource definitions.
    Definitions,
    /// Classes, quotas and service accounts: what pods refer to by name.
    Accounts,
    /// Secrets of authorities, which others are made from.
    Authorities,
    /// Secrets and ConfigMaps.
    Configuration,
    /// Roles.
    Roles,
    /// What binds roles to accounts.
    Bindings,
    /// Services, volumes, network policies, and custom resources.
    Services,
    /// What runs pods.
    Workloads,
    /// What points at workloads from outside.
    Exposure,
    /// What the API server calls while it serves requests, ours too.
    Webhooks,
}

impl Wave {
    /// The wave of a kind. Unknown kinds are custom resources that workloads may need.
    pub fn of(id: &ObjectId) -> Self {
        match (id.group.as_str(), id.kind.as_str()) {
            ("", "Namespace") => Self::Namespaces,
            ("apiextensions.k8s.io", "CustomResourceDefinition") => Self::Definitions,
            ("", "ServiceAccount" | "ResourceQuota" | "LimitRange")
            | ("scheduling.k8s.io" | "node.k8s.io" | "storage.k8s.io" | "snapshot.storage.k8s.io", _) => Self::Accounts,
            ("", "Secret" | "ConfigMap") => Self::Configuration,
            ("rbac.authorization.k8s.io", "Role" | "ClusterRole") => Self::Roles,
            ("rbac.authorization.k8s.io", _) => Self::Bindings,
            ("apps" | "batch", _) | ("", "Pod" | "ReplicationController") => Self::Workloads,
            ("networking.k8s.io", "Ingress") | ("autoscaling", _) => Self::Exposure,
            ("admissionregistration.k8s.io" | "apiregistration.k8s.io", _) => Self::Webhooks,
            _ => Self::Services,
        }
    }
}
