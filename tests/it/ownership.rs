//! Whose a field is, and what becomes of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use bko_install::manifest::ObjectId;
use bko_install::plan::{
    Consent, FieldConflict, FieldPolicy, Policy, drop_placeholders, helm_release, predecessors, resolve, taken_over,
    tracker, without, without_predecessors,
};
use serde_json::{Value, json};

fn entry(manager: &str, operation: &str, subresource: Option<&str>, fields: Value) -> Value {
    let mut entry = json!({
        "manager": manager, "operation": operation, "apiVersion": "apps/v1", "fieldsType": "FieldsV1", "fieldsV1": fields,
    });
    if let Some(subresource) = subresource {
        entry["subresource"] = subresource.into();
    }
    entry
}

fn live(labels: Value, managed: Vec<Value>) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "server", "namespace": "farm", "labels": labels, "managedFields": managed},
        "spec": {"replicas": 5, "paused": true, "template": {"spec": {"containers": [{"name": "a", "image": "x:1"}]}}},
    })
}

fn wanted() -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "server", "namespace": "farm"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "a", "image": "x:2"}]}}},
    })
}

fn conflict(manager: &str, field: &str) -> FieldConflict {
    FieldConflict { manager: manager.into(), field: field.into() }
}

const IMAGE: &str = r#".spec.template.spec.containers[name="a"].image"#;

#[test]
fn an_autoscaler_keeps_the_replicas_and_a_person_is_named() {
    let scaled = live(json!({}), vec![entry("kube-controller-manager", "Update", Some("scale"), json!({}))]);
    let none = Consent::default();
    let conflicts = [conflict("kube-controller-manager", ".spec.replicas")];
    let resolution = resolve(&scaled, &wanted(), &conflicts, &[], none).unwrap();
    assert_eq!((resolution.force, resolution.yields.as_slice()), (false, [".spec.replicas".to_owned()].as_slice()));
    assert_eq!(without(&wanted().into(), &resolution.yields)["spec"].get("replicas"), None);

    let edited = live(json!({}), vec![entry("kubectl-edit", "Update", None, json!({}))]);
    let conflicts = [conflict("kubectl-edit", ".spec.replicas"), conflict("kubectl-edit", IMAGE)];
    let contested = resolve(&edited, &wanted(), &conflicts, &[], none).unwrap_err();
    assert_eq!(contested[0].to_string(), ".spec.replicas of \"kubectl-edit\" is 5 and would become 2");
    assert_eq!(
        contested[1].to_string(),
        ".spec.template.spec.containers[name=\"a\"].image of \"kubectl-edit\" is \"x:1\" and would become \"x:2\""
    );
    let forced = resolve(&edited, &wanted(), &conflicts, &[], Consent { force: true, ..none }).unwrap();
    assert!(forced.force && forced.yields.is_empty());
}

#[test]
fn a_component_says_what_becomes_of_its_fields() {
    let policy = |field: &str, policy| FieldPolicy { kind: "Deployment".into(), field: field.into(), policy };
    let policies = [policy(".spec.template", Policy::Take), policy(".spec.paused", Policy::Yield)];
    let conflicts = [conflict("x", IMAGE), conflict("x", ".spec.paused")];
    let resolution =
        resolve(&live(json!({}), Vec::new()), &wanted(), &conflicts, &policies, Consent::default()).unwrap();
    assert_eq!((resolution.force, resolution.yields), (true, vec![".spec.paused".to_owned()]));
    // A longer name is another field.
    let other = [conflict("x", ".spec.templates")];
    assert!(resolve(&live(json!({}), Vec::new()), &wanted(), &other, &policies, Consent::default()).is_err());
}

#[test]
fn secret_data_is_not_shown_by_a_conflict() {
    let secret = |value: &str| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"token": value}});
    let contested =
        resolve(&secret("b2xk"), &secret("bmV3"), &[conflict("kubectl", ".data.token")], &[], Consent::default());
    let text = contested.unwrap_err()[0].to_string();
    assert_eq!(text, ".data.token of \"kubectl\" is <secret> and would become <secret>");
}

#[test]
fn predecessors_are_those_and_no_others() {
    let ours = json!({"app.kubernetes.io/managed-by": "bko-install"});
    for (manager, operation, subresource, is) in [
        ("kubectl-client-side-apply", "Update", None, true),
        ("before-first-apply", "Update", None, true),
        ("helm", "Apply", None, true),
        ("helm", "Update", None, true),
        ("buildd", "Update", None, true),
        ("buildd", "Apply", None, false),
        ("kubectl", "Apply", None, false),
        ("kubectl-edit", "Update", None, false),
        ("helm", "Update", Some("status"), false),
        ("kubectl-client-side-apply", "Apply", None, false),
    ] {
        let object = live(json!({}), vec![entry(manager, operation, subresource, json!({}))]);
        assert_eq!(
            predecessors(&object),
            if is { vec![manager.to_owned()] } else { Vec::new() },
            "{manager} {operation}"
        );
        let conflicts = [conflict(manager, ".spec.replicas")];
        let resolved = |labels: &Value, adopt| {
            let object = live(labels.clone(), vec![entry(manager, operation, subresource, json!({}))]);
            resolve(&object, &wanted(), &conflicts, &[], Consent { adopt, ..Consent::default() })
        };
        assert_eq!(resolved(&json!({}), true).is_ok(), is, "{manager} {operation}");
        // What applies exports has applied ours, as long as we have not.
        let exported = (manager, operation) == ("kubectl", "Apply");
        assert_eq!(resolved(&ours, false).is_ok(), is || exported, "{manager} {operation}");
        let contested = resolved(&json!({}), false).unwrap_err();
        assert_eq!(contested[0].adoptable, is, "{manager} {operation}");
    }
}

#[test]
fn what_applied_an_export_is_a_predecessor_until_we_have_applied() {
    let ours = json!({"app.kubernetes.io/managed-by": "bko-install"});
    let fields = json!({"f:spec": {"f:replicas": {}, "f:paused": {}}});
    for manager in ["kubectl", "kustomize-controller", "argocd-controller"] {
        let theirs = entry(manager, "Apply", None, fields.clone());
        let exported = live(ours.clone(), vec![theirs.clone()]);
        assert_eq!(predecessors(&exported), [manager.to_owned()]);
        let managed = taken_over(&exported);
        assert_eq!((&managed[0]["manager"], &managed[0]["fieldsV1"]), (&"bko-install".into(), &fields));
        assert_eq!(managed.as_array().unwrap().len(), 1);
        let own = entry("bko-install", "Apply", None, json!({"f:spec": {"f:replicas": {}}}));
        let mut predicted = exported.clone();
        predicted["metadata"]["managedFields"].as_array_mut().unwrap().push(own.clone());
        assert_eq!(without_predecessors(&exported, &predicted)["spec"].get("paused"), None);

        // From then on it is somebody's own; and so it is of what never was ours.
        for object in [live(ours.clone(), vec![own, theirs.clone()]), live(json!({}), vec![theirs])] {
            assert_eq!(predecessors(&object), [""; 0]);
            let conflicts = [conflict(manager, ".spec.replicas")];
            let contested = resolve(&object, &wanted(), &conflicts, &[], Consent::default()).unwrap_err();
            assert_eq!(contested[0].manager, manager);
        }
    }
}

#[test]
fn what_a_predecessor_alone_had_set_goes() {
    let theirs = json!({
        "f:metadata": {"f:labels": {".": {}, "f:helm.sh/chart": {}, "f:app": {}}},
        "f:spec": {"f:replicas": {}, "f:paused": {}},
    });
    let status = entry("kube-controller-manager", "Update", Some("status"), json!({"f:status": {}}));
    let object =
        live(json!({"helm.sh/chart": "b-1", "app": "x"}), vec![entry("helm", "Apply", None, theirs), status.clone()]);
    let mut predicted = object.clone();
    predicted["spec"]["replicas"] = 2.into();
    let own = json!({"f:metadata": {"f:labels": {"f:app": {}}}, "f:spec": {"f:replicas": {}}});
    predicted["metadata"]["managedFields"].as_array_mut().unwrap().push(entry("bko-install", "Apply", None, own));
    let left = without_predecessors(&object, &predicted);
    assert_eq!(left["metadata"]["labels"], json!({"app": "x"}));
    assert_eq!(left["spec"].get("paused"), None);
    assert_eq!(left["spec"]["replicas"], 2);

    let managed = taken_over(&object);
    assert_eq!(managed[0]["manager"], "bko-install");
    assert_eq!(managed[0]["operation"], "Apply");
    assert_eq!(managed[0]["fieldsV1"]["f:spec"], json!({"f:replicas": {}, "f:paused": {}}));
    assert_eq!(managed[1], status);
    assert_eq!(managed.as_array().unwrap().len(), 2);
}

#[test]
fn gitops_tools_are_known_by_what_they_leave_on_an_object() {
    let id = |name: &str| ObjectId {
        group: "apps".into(),
        version: "v1".into(),
        kind: "Deployment".into(),
        namespace: Some("farm".into()),
        name: name.into(),
    };
    let annotated = |name: &str, value: &str| {
        let mut object = live(json!({}), Vec::new());
        object["metadata"]["annotations"][name] = value.into();
        object
    };
    let flux =
        json!({"kustomize.toolkit.fluxcd.io/name": "farm", "kustomize.toolkit.fluxcd.io/namespace": "flux-system"});
    assert_eq!(tracker(&id("server"), &live(flux, Vec::new())).unwrap(), "Flux Kustomization flux-system/farm");
    let argo = annotated("argocd.argoproj.io/tracking-id", "shop:apps/Deployment:farm/server");
    assert_eq!(tracker(&id("server"), &argo).unwrap(), "Argo CD application shop");
    // A copy of somebody else's annotation does not speak of this object.
    assert_eq!(tracker(&id("other"), &argo), None);
    assert_eq!(tracker(&id("server"), &live(json!({}), Vec::new())), None);

    let mut helm = annotated("meta.helm.sh/release-name", "farm");
    helm["metadata"]["annotations"]["meta.helm.sh/release-namespace"] = "ops".into();
    assert_eq!(helm_release(&helm).unwrap().to_string(), "Helm release ops/farm");
}

#[test]
fn a_placeholder_ca_bundle_is_never_sent() {
    for placeholder in ["", "Cg==", "\n"] {
        let mut hook = json!({"webhooks": [{"clientConfig": {"caBundle": placeholder, "url": "https://x"}}]}).into();
        drop_placeholders(&mut hook);
        assert_eq!(*hook, json!({"webhooks": [{"clientConfig": {"url": "https://x"}}]}));
    }
    let mut real = json!({"webhooks": [{"clientConfig": {"caBundle": "TUlJ"}}]}).into();
    let before = Arc::clone(&real);
    drop_placeholders(&mut real);
    assert!(Arc::ptr_eq(&real, &before));
}
