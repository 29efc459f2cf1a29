//! Where caches are kept: storage classes, expansion, snapshots. Pure.

use serde_json::Value;

use super::{Check, Finding};
use crate::families::build_farm::settings::{CacheKind, Settings};

/// What the installation wants of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caches<'a> {
    /// Volumes of this class, or of the cluster's default one.
    Claims(Option<&'a str>),
    /// The disk of whatever node a daemon runs on.
    Ephemeral,
}

impl<'a> Caches<'a> {
    /// Of these settings of the server.
    pub fn of(settings: &'a Settings) -> Self {
        match settings.cache_kind {
            CacheKind::Pvc => Self::Claims(settings.storage_class.as_deref()),
            CacheKind::EmptyDir => Self::Ephemeral,
        }
    }
}

/// Annotations that make a class the default, the old one included.
const DEFAULT: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];

fn name(object: &Value) -> &str {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default()
}

fn is_default(class: &Value) -> bool {
    let annotations = &class["metadata"]["annotations"];
    DEFAULT.iter().any(|annotation| annotations[*annotation] == "true")
}

fn listed(classes: &[Value]) -> String {
    match classes {
        [] => "there is none at all".to_owned(),
        classes => {
            let names: Vec<String> = classes.iter().map(|class| format!("\"{}\"", name(class))).collect();
            format!("there are {}", names.join(", "))
        }
    }
}

/// What is found of the classes.
pub fn classes(caches: Caches<'_>, classes: &[Value]) -> Vec<Finding> {
    let wanted = match caches {
        Caches::Ephemeral => {
            return vec![Check::StorageClass.warn(
                "caches are on the nodes' own disks (cache.kind: emptyDir): every scale to zero loses them",
                "choose cache.kind: pvc where caches shall last",
            )];
        }
        Caches::Claims(wanted) => wanted,
    };
    let defaults: Vec<&Value> = classes.iter().filter(|class| is_default(class)).collect();
    let class = match (wanted, defaults.as_slice()) {
        (Some(wanted), _) => match classes.iter().find(|class| name(class) == wanted) {
            Some(class) => class,
            None => {
                let message = format!("cache.storageClass is \"{wanted}\", which does not exist: {}", listed(classes));
                let hint = if classes.is_empty() { NO_CLASS } else { "set cache.storageClass to one that exists" };
                return vec![Check::StorageClass.fail(message, hint)];
            }
        },
        (None, []) => {
            let hint = "set cache.storageClass to one of them, mark one as default with kubectl annotate storageclass \
                        NAME storageclass.kubernetes.io/is-default-class=true, or set cache.kind: emptyDir for a try";
            let message =
                format!("no StorageClass is the default, and cache.storageClass names none: {}", listed(classes));
            let hint = if classes.is_empty() { NO_CLASS } else { hint };
            return vec![Check::StorageClass.fail(message, hint)];
        }
        // As the API server chooses: the newest.
        (None, [first, rest @ ..]) => rest.iter().fold(*first, |newest, class| {
            let made =
                |class: &Value| class.pointer("/metadata/creationTimestamp").and_then(Value::as_str).map(str::to_owned);
            if made(class) > made(newest) { class } else { newest }
        }),
    };
    let mut findings = Vec::new();
    if wanted.is_none() && defaults.len() > 1 {
        let names: Vec<String> = defaults.iter().map(|class| format!("\"{}\"", name(class))).collect();
        let message =
            format!("several classes are the default: {}; the newest counts, \"{}\"", names.join(", "), name(class));
        findings.push(Check::StorageClass.warn(message, "set cache.storageClass, or let one alone be the default"));
    } else {
        let provisioner = class["provisioner"].as_str().unwrap_or_default();
        findings.push(Check::StorageClass.ok(format!("caches are of class \"{}\" ({provisioner})", name(class))));
    }
    findings.push(if class["allowVolumeExpansion"] == Value::Bool(true) {
        Check::VolumeExpansion.ok(format!("volumes of class \"{}\" can grow", name(class)))
    } else {
        Check::VolumeExpansion.warn(
            format!("volumes of class \"{}\" cannot grow: a project's cacheVolumeGi stays as it is", name(class)),
            "choose a class with allowVolumeExpansion: true, or caches that are large enough from the start",
        )
    });
    findings
}

/// What is found of snapshots: the classes, or nothing when the kind is not served.
pub fn snapshots(caches: Caches<'_>, classes: Option<&[Value]>) -> Option<Finding> {
    if caches == Caches::Ephemeral {
        return None;
    }
    let lost = "projects with snapshotEverySec or restoreFromSnapshot will not work";
    Some(match classes {
        None => Check::Snapshots.warn(
            format!("VolumeSnapshots are not served: {lost}"),
            "install the CSI snapshot controller with its CRDs, if caches shall be snapshotted",
        ),
        Some([]) => Check::Snapshots.warn(
            format!("there is no VolumeSnapshotClass: {lost}"),
            "make one for the driver of the StorageClass, if caches shall be snapshotted",
        ),
        Some(classes) => {
            let names: Vec<&str> = classes.iter().map(name).collect();
            Check::Snapshots.ok(format!("of class {}", names.join(", ")))
        }
    })
}

/// What to do in a cluster without any class.
const NO_CLASS: &str = "install a storage driver that brings a class, let one be installed with storage.class.create, or set \
                        cache.kind: emptyDir for a try";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Verdict;
    use super::*;

    fn class(name: &str, default: bool, grows: bool, made: &str) -> Value {
        json!({
            "metadata": {"name": name, "annotations": {DEFAULT[0]: default.to_string()}, "creationTimestamp": made},
            "provisioner": "csi.example", "allowVolumeExpansion": grows,
        })
    }

    #[test]
    fn without_a_default_the_classes_are_listed() {
        let found = classes(Caches::Claims(None), &[class("slow", false, true, "1"), class("fast", false, true, "2")]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].verdict, Verdict::Fail);
        assert!(found[0].message.ends_with("there are \"slow\", \"fast\""), "{}", found[0].message);
        let none = classes(Caches::Claims(None), &[]);
        assert!(none[0].message.ends_with("there is none at all"), "{}", none[0].message);
        for wanted in [None, Some("gone")] {
            assert_eq!(classes(Caches::Claims(wanted), &[])[0].hint.as_deref(), Some(NO_CLASS));
        }
    }

    #[test]
    fn the_class_that_counts_is_the_named_one_or_the_newest_default() {
        let all = [class("old", true, false, "2026-01-01"), class("new", true, true, "2026-02-01")];
        let found = classes(Caches::Claims(None), &all);
        assert_eq!((found[0].verdict, found[1].verdict), (Verdict::Warn, Verdict::Ok));
        assert!(found[0].message.ends_with("\"new\""), "{}", found[0].message);
        let found = classes(Caches::Claims(Some("old")), &all);
        assert_eq!((found[0].verdict, found[1].verdict), (Verdict::Ok, Verdict::Warn));
        assert_eq!(classes(Caches::Claims(Some("gone")), &all)[0].verdict, Verdict::Fail);
        assert_eq!(classes(Caches::Ephemeral, &[])[0].verdict, Verdict::Warn);
    }

    #[test]
    fn snapshots_are_looked_for_where_there_are_volumes() {
        let verdict = |classes| snapshots(Caches::Claims(None), classes).unwrap().verdict;
        assert_eq!(verdict(None), Verdict::Warn);
        assert_eq!(verdict(Some(&[])), Verdict::Warn);
        assert_eq!(verdict(Some(&[json!({"metadata": {"name": "s"}})])), Verdict::Ok);
        assert_eq!(snapshots(Caches::Ephemeral, None), None);
    }
}
