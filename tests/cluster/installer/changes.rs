//! What cannot simply be changed: immutable fields, definitions, stuck
//! workloads, jobs that are gone.

use kube::api::{DeleteParams, Patch, PatchParams};

use super::*;

const JOB: &str = "apiVersion: batch/v1
kind: Job
metadata: {name: once, namespace: NS}
spec:
  ttlSecondsAfterFinished: 1
  template:
    spec:
      restartPolicy: Never
      containers: [{name: once, image: 'registry.example/once:1'}]
";

/// Says, as a kubelet would, that the pod of a Job has succeeded.
async fn succeed(farm: &Bundled) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(farm.client(), farm.namespace());
    for _ in 0..100 {
        let pod = pods.list(&ListParams::default().labels("job-name=once")).await?.items.into_iter().next();
        if let Some(pod) = pod {
            let status = json!({"status": {"phase": "Succeeded", "conditions": [], "containerStatuses": [{
                "name": "once", "image": "x", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": 0, "reason": "Completed"}},
            }]}});
            pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await?;
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("the Job makes no pod")
}

pub(crate) async fn a_job_that_its_time_to_live_has_removed_is_not_run_again(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "ttl")?;
    farm.component("rc2", "job", "", JOB)?;
    let (init, done) = tokio::join!(farm.init(&[]), succeed(&farm));
    done?;
    init?.expect(0);
    for _ in 0..100 {
        if !farm.exists("job", "once").await? {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!farm.exists("job", "once").await?, "its time to live has not removed it");
    let before = farm.writes().await?.len();
    farm.init(&[]).await?.expect(0);
    assert_eq!(farm.writes().await?.len(), before);
    // Another Job is another one.
    farm.component("rc2", "job", "", &JOB.replace("once:1", "once:2"))?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("create     Job "), "{}", plan.out);
    Ok(())
}

pub(crate) async fn what_is_immutable_is_made_anew_only_where_that_is_allowed(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "immutable")?;
    let deployment = |label: &str| {
        format!(
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: app, namespace: NS}}\nspec:\n  replicas: 0\n  \
             selector: {{matchLabels: {{app: {label}}}}}\n  template:\n    metadata: {{labels: {{app: {label}}}}}\n    \
             spec: {{containers: [{{name: a, image: 'registry.example/a:1'}}]}}\n"
        )
    };
    let binding = |role: &str| {
        format!(
            "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {{name: {role}, namespace: NS}}\nrules: []\n\
             ---\napiVersion: rbac.authorization.k8s.io/v1\nkind: RoleBinding\nmetadata: {{name: bound, namespace: NS}}\n\
             roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {role}}}\nsubjects: []\n"
        )
    };
    farm.component("rc3", "app", "", &deployment("a"))?;
    farm.component("rc1", "roles", "", &binding("one"))?;
    farm.init(&[]).await?.expect(0);

    // Nothing is lost with a binding; a Deployment's pods would be.
    farm.component("rc1", "roles", "", &binding("two"))?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("recreate   RoleBinding "), "{}", plan.out);
    assert!(plan.out.contains("nothing is lost: roleRef cannot be changed"), "{}", plan.out);
    let uid = farm.get("rolebinding", "bound").await?["metadata"]["uid"].clone();
    let init = farm.init(&[]).await?.expect(0);
    assert!(init.out.contains("recreated RoleBinding "), "{}", init.out);
    let bound = farm.get("rolebinding", "bound").await?;
    assert_eq!(bound["roleRef"]["name"], "two");
    assert_ne!(bound["metadata"]["uid"], uid);

    farm.component("rc3", "app", "", &deployment("b"))?;
    let before = farm.writes().await?.len();
    let refused = farm.init(&[]).await?.expect(5);
    refused.says("spec.selector cannot be changed, and making it anew is not allowed here: downtime");
    assert_eq!(farm.writes().await?.len(), before);
    farm.component("rc3", "app", "policy: {recreate: downtime}\n", &deployment("b"))?;
    farm.init(&[]).await?.expect(0);
    let live = farm.get("deployment", "app").await?;
    assert_eq!(live.pointer("/spec/selector/matchLabels/app"), Some(&"b".into()));
    farm.run("plan", &[]).await?.expect(0);
    Ok(())
}

pub(crate) async fn a_stateful_set_with_caches_is_never_made_anew(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "caches")?;
    let set = |size: &str| {
        format!(
            "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: app, namespace: NS}}\nspec:\n  replicas: 0\n  \
             serviceName: app\n  selector: {{matchLabels: {{app: a}}}}\n  template:\n    metadata: {{labels: {{app: a}}}}\n    \
             spec: {{containers: [{{name: a, image: 'registry.example/a:1'}}]}}\n  volumeClaimTemplates:\n  \
             - metadata: {{name: cache}}\n    spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: {size}}}}}}}\n"
        )
    };
    farm.component("rc3", "app", "policy: {recreate: downtime}\n", &set("1Gi"))?;
    farm.init(&[]).await?.expect(0);
    farm.component("rc3", "app", "policy: {recreate: downtime}\n", &set("2Gi"))?;
    let run = farm.init(&[]).await?.expect(5);
    run.says("making it anew is not allowed here: data would be lost");
    Ok(())
}

pub(crate) async fn a_broken_stateful_set_is_mended_and_its_stuck_pod_named(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "ordered")?;
    let set = |tag: &str| {
        format!(
            "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: app, namespace: NS}}\nspec:\n  replicas: 1\n  \
             serviceName: app\n  selector: {{matchLabels: {{app: a}}}}\n  template:\n    metadata: {{labels: {{app: a}}}}\n    \
             spec:\n      terminationGracePeriodSeconds: 0\n      containers: [{{name: a, image: 'registry.example/a:{tag}'}}]\n"
        )
    };
    let play = Play::start(farm.client(), farm.namespace(), Duration::ZERO);
    play.switch_off();
    farm.component("rc3", "app", "", &set("broken"))?;
    let pods: Api<Pod> = Api::namespaced(farm.client(), farm.namespace());
    let broken = async {
        kube::runtime::wait::await_condition(pods.clone(), "app-0", |pod: Option<&Pod>| pod.is_some()).await?;
        let status = json!({"status": {"phase": "Pending", "containerStatuses": [{
            "name": "a", "image": "x", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
        }]}});
        pods.patch_status("app-0", &PatchParams::default(), &Patch::Merge(status)).await?;
        anyhow::Ok(())
    };
    let (init, broken) = tokio::join!(farm.init(&[]), broken);
    broken?;
    init?.expect(4).says("ImagePullBackOff: no such image");

    farm.component("rc3", "app", "", &set("good"))?;
    let run = farm.init(&[]).await?.expect(4);
    run.says("a StatefulSet that goes in order never replaces a broken pod");
    run.says(&format!("`kubectl -n {} delete pod app-0` lets it go on", farm.namespace()));
    pods.delete("app-0", &DeleteParams::default().grace_period(0)).await?;
    play.switch_on();
    farm.init(&[]).await?.expect(0);
    Ok(())
}

/// A definition whose version and schema a test chooses.
fn definition(group: &str, versions: &str) -> String {
    format!(
        "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {{name: things.{group}}}\nspec:\n  \
         group: {group}\n  scope: Namespaced\n  names: {{kind: Thing, plural: things}}\n  versions:\n{versions}"
    )
}

fn version(name: &str, storage: bool, fields: &str) -> String {
    format!(
        "  - name: {name}\n    served: true\n    storage: {storage}\n    schema: {{openAPIV3Schema: {{type: object, \
         properties: {{spec: {{type: object, properties: {{{fields}}}}}}}}}}}\n"
    )
}

pub(crate) async fn a_definition_may_come_with_the_second_version(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "crdlater")?;
    farm.init(&[]).await?.expect(0);
    let group = format!("{}.example.org", farm.namespace());
    farm.component("rc0", "things", "", &definition(&group, &version("v1", true, "size: {type: integer}")))?;
    let thing =
        format!("apiVersion: {group}/v1\nkind: Thing\nmetadata: {{name: one, namespace: NS}}\nspec: {{size: 1}}\n");
    farm.component("rc1", "thing", "", &thing)?;
    farm.run("plan", &[]).await?.expect(3);
    farm.init(&[]).await?.expect(0);
    farm.run("plan", &[]).await?.expect(0);
    assert!(farm.exists(&format!("things.{group}"), "one").await?);

    // Without the component, its objects go before the definition does.
    farm.without("thing")?;
    farm.without("things")?;
    let refused = farm.init(&[]).await?.expect(5);
    refused.says("1 objects of this kind exist");
    farm.init(&["--confirm-prune"]).await?.expect(0);
    assert!(!farm.exists("crd", &format!("things.{group}")).await?);
    Ok(())
}

pub(crate) async fn a_stored_version_is_left_only_when_nothing_is_lost(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "stored")?;
    let group = format!("{}.example.org", farm.namespace());
    let set = |versions: &[String]| farm.component("rc0", "things", "", &definition(&group, &versions.concat()));
    let size = "size: {type: integer}, name: {type: string}";
    set(&[version("v1alpha1", true, size)])?;
    farm.init(&[]).await?.expect(0);
    let thing = format!(
        "apiVersion: {group}/v1alpha1\nkind: Thing\nmetadata: {{name: one, namespace: NS}}\nspec: {{size: 9, name: x}}\n"
    );
    farm.kubectl(&["apply", "--server-side", "--filename=-"], &thing).await?;

    set(&[version("v1", true, size)])?;
    let before = farm.writes().await?.len();
    farm.init(&[]).await?.expect(1).says("version v1alpha1 is the one that is stored");
    assert_eq!(farm.writes().await?.len(), before);

    set(&[version("v1alpha1", false, size), version("v1", true, size)])?;
    farm.init(&[]).await?.expect(0);
    set(&[version("v1", true, size)])?;
    let plan = farm.run("plan", &[]).await?.expect(3);
    assert!(plan.out.contains("moving live objects out of v1alpha1"), "{}", plan.out);
    // What somebody else owns by now is told with the plan, and not when it is written.
    let name = format!("things.{group}");
    let label = "app.kubernetes.io/instance=theirs";
    farm.kubectl(&["label", "crd", &name, label, "--overwrite", "--field-manager=somebody"], "").await?;
    let before = farm.writes().await?.len();
    farm.run("plan", &[]).await?.expect(1).says("\"somebody\"");
    farm.init(&[]).await?.expect(1).says(".metadata.labels.app.kubernetes.io/instance");
    assert_eq!(farm.writes().await?.len(), before);
    let plan = farm.run("plan", &["--force-conflicts"]).await?.expect(3);
    assert!(plan.out.contains("moving live objects out of v1alpha1"), "{}", plan.out);
    farm.init(&["--force-conflicts"]).await?.expect(0).says("1 objects were moved to version v1");
    assert_eq!(farm.get("crd", &name).await?["status"]["storedVersions"], json!(["v1"]));
    assert_eq!(farm.get(&name, "one").await?["spec"]["size"], 9);

    // Tighter is refused where a live object would not fit.
    set(&[version("v1", true, "size: {type: integer, maximum: 5}, name: {type: string}")])?;
    farm.init(&[]).await?.expect(1).says(".spec.size must be at most 5");
    set(&[version("v1", true, "size: {type: integer, maximum: 50}, name: {type: string}")])?;
    farm.init(&[]).await?.expect(0).says("all 1 live objects are accepted");
    farm.kubectl(&["delete", &name, "--all"], "").await?;
    farm.kubectl(&["delete", "crd", &name], "").await?;
    Ok(())
}
