//! What the planner tells by itself, the API server tells too: an apply that
//! [`is_settled`] calls needless changes nothing.

use bko_install::plan::{difference, is_settled};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};

use super::*;

/// Lists by key, sets, values that have defaults, maps that count as one, empty ones.
const OBJECTS: &str = r#"
- {apiVersion: v1, kind: ConfigMap, metadata: {finalizers: [example.org/a, example.org/b]}, data: {a: "1", "b.c-d": "2"}}
- {apiVersion: v1, kind: Secret, type: Opaque, data: {a: YQ==}}
- {apiVersion: v1, kind: ServiceAccount, automountServiceAccountToken: false, imagePullSecrets: [{name: a}, {name: b}]}
- apiVersion: v1
  kind: Service
  spec:
    selector: {app: a}
    ports: [{name: http, port: 80}, {name: dns, port: 53, protocol: UDP, targetPort: 5353}]
- apiVersion: rbac.authorization.k8s.io/v1
  kind: Role
  rules: [{apiGroups: [""], resources: [pods], verbs: [get, list]}]
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  spec:
    podSelector: {matchLabels: {app: a}}
    policyTypes: [Ingress, Egress]
    ingress: [{from: [{namespaceSelector: {}}], ports: [{protocol: TCP, port: 80}]}]
- apiVersion: policy/v1
  kind: PodDisruptionBudget
  spec: {minAvailable: 1, selector: {matchLabels: {app: a}}}
- apiVersion: apps/v1
  kind: Deployment
  spec:
    replicas: 0
    selector: {matchLabels: {app: a}}
    strategy: {rollingUpdate: {maxUnavailable: 0}}
    template:
      metadata: {labels: {app: a}}
      spec:
        securityContext: {runAsNonRoot: true, supplementalGroups: [1, 2]}
        nodeSelector: {kubernetes.io/arch: amd64}
        tolerations: [{key: a, operator: Exists}]
        topologySpreadConstraints:
        - {maxSkew: 1, topologyKey: a, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: a}}}
        initContainers: [{name: init, image: "registry.example/a:1", restartPolicy: Always}]
        containers:
        - name: a
          image: registry.example/a:1
          args: [one, two]
          env:
          - {name: A, value: "1"}
          - {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}
          - {name: C, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.name}}}
          ports: [{containerPort: 80}, {containerPort: 53, protocol: UDP}, {containerPort: 53, protocol: TCP}]
          resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {memory: 128Mi}}
          securityContext: {capabilities: {drop: [ALL]}}
          volumeMounts: [{name: tmp, mountPath: /tmp}, {name: c, mountPath: /c, readOnly: true}]
          readinessProbe: {httpGet: {path: /, port: 80}}
        - {name: b, image: "registry.example/b:1", securityContext: {}}
        volumes:
        - {name: tmp, emptyDir: {}}
        - {name: c, configMap: {name: c, items: [{key: a, path: b}]}}
"#;

/// What somebody else does to them: a merge patch, where it fits.
const MEDDLING: &[&str] = &[
    r#"{"metadata": {"labels": {"other": "x"}, "annotations": {"other": "x"}}}"#,
    r#"{"metadata": {"labels": {"app.kubernetes.io/part-of": null}}}"#,
    r#"{"metadata": {"labels": {"app.kubernetes.io/part-of": "other"}}}"#,
    r#"{"metadata": {"finalizers": ["example.org/b", "example.org/c"]}}"#,
    r#"{"metadata": {"finalizers": ["example.org/b", "example.org/a"]}}"#,
    r#"{"data": {"a": null}}"#,
    r#"{"data": {"more": "YQ=="}}"#,
    r#"{"imagePullSecrets": [{"name": "b"}, {"name": "c"}, {"name": "a"}]}"#,
    r#"{"spec": {"selector": {"app": "a", "more": "b"}}}"#,
    r#"{"spec": {"replicas": 2, "minReadySeconds": 3}}"#,
    r#"{"spec": {"template": {"spec": {"securityContext": {"runAsUser": 1}, "hostNetwork": false}}}}"#,
];

fn labelled(body: &mut Value, namespace: &str, number: usize) {
    let labels = json!({"app.kubernetes.io/managed-by": "bko-install", "app.kubernetes.io/part-of": "x"});
    body["metadata"]["name"] = format!("object-{number}").into();
    body["metadata"]["namespace"] = namespace.into();
    body["metadata"]["labels"] = labels;
}

fn api(client: &Client, body: &Value) -> Api<DynamicObject> {
    let version = body["apiVersion"].as_str().unwrap();
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let gvk = GroupVersionKind::gvk(group, version, body["kind"].as_str().unwrap());
    Api::namespaced_with(client.clone(), body["metadata"]["namespace"].as_str().unwrap(), &ApiResource::from_gvk(&gvk))
}

/// Every body that lacks one field or element, has one value changed, has two
/// elements swapped, or states a value that the API server has filled in.
fn variants(body: &Value, live: &Value) -> Vec<Value> {
    let mut pointers = Vec::new();
    collect(body, "", &mut pointers);
    let mut all = vec![body.clone()];
    let identity = ["/apiVersion", "/kind", "/metadata", "/metadata/name", "/metadata/namespace"];
    for pointer in pointers.iter().filter(|pointer| !identity.contains(&pointer.as_str())) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let key = key.replace("~1", "/");
        let mut gone = body.clone();
        match gone.pointer_mut(parent).unwrap() {
            Value::Object(map) => drop(map.shift_remove(&key)),
            Value::Array(list) => drop(list.remove(key.parse().unwrap())),
            _ => unreachable!(),
        }
        all.push(gone);
        let mut changed = body.clone();
        match changed.pointer_mut(pointer).unwrap() {
            Value::String(text) => text.push('x'),
            Value::Bool(value) => *value = !*value,
            value @ Value::Number(_) => *value = 7.into(),
            Value::Array(list) if list.len() > 1 => list.swap(0, 1),
            Value::Object(map) => {
                let lives = live.pointer(pointer).and_then(Value::as_object).into_iter().flatten();
                for (key, value) in lives.filter(|(key, _)| !body.pointer(pointer).unwrap()[key.as_str()].is_object()) {
                    map.entry(key.clone()).or_insert_with(|| value.clone());
                }
            }
            _ => continue,
        }
        all.push(changed);
    }
    all
}

fn collect(value: &Value, at: &str, pointers: &mut Vec<String>) {
    let mut visit = |key: String, value: &Value| {
        let pointer = format!("{at}/{}", key.replace('/', "~1"));
        collect(value, &pointer, pointers);
        pointers.push(pointer);
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| visit(key.clone(), value)),
        Value::Array(list) => list.iter().enumerate().for_each(|(index, value)| visit(index.to_string(), value)),
        _ => {}
    }
}

/// The object once its controller, if it has one, has seen it.
async fn at_rest(api: &Api<DynamicObject>, name: &str) -> anyhow::Result<Value> {
    for _ in 0..200 {
        let live = serde_json::to_value(api.get(name).await?)?;
        if live["kind"] != "Deployment" || live["status"]["observedGeneration"] == live["metadata"]["generation"] {
            return Ok(live);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!("nobody has seen {name}")
}

/// Whether the API server says of a needless apply that it is needless.
async fn agree(client: &Client, live: &Value, body: &Value) -> anyhow::Result<bool> {
    if !is_settled(live, body) {
        return Ok(false);
    }
    let params = PatchParams { dry_run: true, ..PatchParams::apply("bko-install") }.validation_strict();
    let name = body["metadata"]["name"].as_str().unwrap();
    let predicted =
        api(client, body).patch(name, &params, &Patch::Apply(body)).await.with_context(|| body.to_string())?;
    let predicted = serde_json::to_value(predicted)?;
    // A controller has written it since.
    if predicted["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"] {
        return Ok(false);
    }
    let differences = difference(live, &predicted);
    anyhow::ensure!(differences.is_empty(), "{body} is called settled, and would change {differences:?} of {live}");
    Ok(true)
}

pub(crate) async fn what_is_called_settled_the_api_server_would_not_change(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let names = cluster.namespaces("settled");
    names.create(&cluster.client()).await?;
    let client = cluster.client();
    let bodies: Vec<Value> = serde_yaml::from_str(OBJECTS)?;
    let (mut settled, mut looked) = (0, 0);
    for (number, mut body) in bodies.into_iter().enumerate() {
        labelled(&mut body, &names.operator, number);
        let name = body["metadata"]["name"].as_str().unwrap().to_owned();
        let api = api(&client, &body);
        api.patch(&name, &PatchParams::apply("bko-install"), &Patch::Apply(&body)).await?;
        let live = at_rest(&api, &name).await?;
        assert!(is_settled(&live, &body), "{body} is as it should be, and is not seen to be: {live}");
        for variant in variants(&body, &live) {
            settled += usize::from(agree(&client, &live, &variant).await?);
            looked += 1;
        }
        for patch in MEDDLING {
            let patch: Value = serde_json::from_str(patch)?;
            let params = PatchParams { field_manager: Some("other".into()), ..PatchParams::default() };
            // Not every patch fits every kind.
            if api.patch(&name, &params, &Patch::Merge(&patch)).await.is_err() {
                continue;
            }
            let live = at_rest(&api, &name).await?;
            for variant in variants(&body, &live) {
                settled += usize::from(agree(&client, &live, &variant).await?);
                looked += 1;
            }
            let force = PatchParams::apply("bko-install").force();
            api.patch(&name, &force, &Patch::Apply(&body)).await?;
        }
        api.patch(&name, &PatchParams::default(), &Patch::Merge(&json!({"metadata": {"finalizers": null}}))).await?;
    }
    assert!(looked > 1000 && settled > 20, "{settled} of {looked} are settled");
    Ok(())
}
