//! The kinds that a bundle may hold: their order, and whether they live in a
//! namespace.

/// Group, kind, and whether it is namespaced, in the order of applying: what
/// others refer to comes first, what intercepts requests comes last.
const KINDS: &[(&str, &str, bool)] = &[
    ("", "Namespace", false),
    ("apiextensions.k8s.io", "CustomResourceDefinition", false),
    ("scheduling.k8s.io", "PriorityClass", false),
    ("node.k8s.io", "RuntimeClass", false),
    ("storage.k8s.io", "StorageClass", false),
    ("snapshot.storage.k8s.io", "VolumeSnapshotClass", false),
    ("", "ResourceQuota", true),
    ("", "LimitRange", true),
    ("", "ServiceAccount", true),
    ("", "Secret", true),
    ("", "ConfigMap", true),
    ("rbac.authorization.k8s.io", "ClusterRole", false),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding", false),
    ("rbac.authorization.k8s.io", "Role", true),
    ("rbac.authorization.k8s.io", "RoleBinding", true),
    ("networking.k8s.io", "NetworkPolicy", true),
    ("policy", "PodDisruptionBudget", true),
    ("", "Service", true),
    ("", "PersistentVolumeClaim", true),
    ("apps", "DaemonSet", true),
    ("apps", "StatefulSet", true),
    ("apps", "Deployment", true),
    ("autoscaling", "HorizontalPodAutoscaler", true),
    ("batch", "Job", true),
    ("batch", "CronJob", true),
    ("networking.k8s.io", "IngressClass", false),
    ("networking.k8s.io", "Ingress", true),
    ("cert-manager.io", "ClusterIssuer", false),
    ("cert-manager.io", "Issuer", true),
    ("cert-manager.io", "Certificate", true),
    ("apiregistration.k8s.io", "APIService", false),
    ("admissionregistration.k8s.io", "ValidatingAdmissionPolicy", false),
    ("admissionregistration.k8s.io", "ValidatingAdmissionPolicyBinding", false),
    ("admissionregistration.k8s.io", "MutatingWebhookConfiguration", false),
    ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration", false),
];

/// What is known of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Position in the order of applying.
    pub(crate) order: usize,
    /// Whether its objects live in a namespace.
    pub(crate) namespaced: bool,
}

/// Looks a kind up.
pub(crate) fn find(group: &str, kind: &str) -> Option<Kind> {
    let order = KINDS.iter().position(|(g, k, _)| *g == group && *k == kind)?;
    Some(Kind { order, namespaced: KINDS[order].2 })
}

/// Position of the objects of a kind that the bundle itself defines: after
/// what serves them, before what intercepts requests.
pub(crate) fn custom(namespaced: bool) -> Kind {
    let order = KINDS.iter().position(|(_, kind, _)| *kind == "APIService").unwrap_or(KINDS.len());
    Kind { order, namespaced }
}

/// Groups that have a kind of this name: for the message about an unknown one.
pub(crate) fn groups_of(kind: &str) -> impl Iterator<Item = &'static str> {
    KINDS.iter().filter(move |(_, k, _)| *k == kind).map(|(group, _, _)| *group)
}
