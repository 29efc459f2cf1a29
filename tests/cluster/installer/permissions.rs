//! What `cluster check --print-rbac` prints suffices, and nothing of it is too
//! much: a service account that has exactly these rules does the work.

use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use serde_json::json;

use super::adoption::{Helm, install_reference};
use super::*;

/// A verb, a resource, and the namespace of the role that allows it; nothing
/// for what is in no namespace.
type Taken<'a> = (&'a str, &'a str, Option<&'a str>);

/// A service account with printed roles.
struct Account {
    cluster: Arc<Cluster>,
    documents: Vec<Value>,
    kubeconfig: tempfile::NamedTempFile,
    user: String,
}

impl Account {
    /// The account `installer` of this namespace.
    async fn new(cluster: &Arc<Cluster>, namespace: &str, printed: &str) -> anyhow::Result<Self> {
        let documents = parsed(namespace, printed)?;
        kubectl_apply(cluster, &documents)?;
        let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), namespace);
        let request = serde_json::from_value(json!({"spec": {"audiences": []}}))?;
        let token = accounts.create_token_request("installer", &PostParams::default(), &request).await?;
        let kubeconfig = tempfile::NamedTempFile::new()?;
        let token = token.status.and_then(|status| status.token).context("no token")?;
        kubeconfig_with_token(cluster, &token, kubeconfig.path())?;
        let user = format!("system:serviceaccount:{namespace}:installer");
        Ok(Self { cluster: Arc::clone(cluster), documents, kubeconfig, user })
    }

    /// Runs a command as this account.
    async fn run(&self, command: Command) -> anyhow::Result<Run> {
        super::refusals::run_as(&self.kubeconfig, command).await
    }

    /// Runs a command without this verb, which must be named, and gives it back.
    async fn refused(&self, command: Command, taken: Taken<'_>) -> anyhow::Result<Run> {
        let (verb, resource, namespace) = taken;
        let mut less = self.documents.clone();
        let role = less.iter_mut().find(|d| d["rules"].is_array() && d["metadata"]["namespace"].as_str() == namespace);
        let (group, name) = take(role.context("no role")?, resource, verb)?;
        kubectl_apply(&self.cluster, &less)?;
        let asked = (namespace, group.as_str(), resource, name.as_deref(), verb);
        self.until_allowed(asked, false).await?;
        let run = self.run(command).await?.expect(1);
        let resource = if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") };
        let place = namespace.map_or("in the whole cluster".to_owned(), |name| format!("in namespace \"{name}\""));
        let named =
            run.err.lines().any(|line| line.contains(verb) && line.contains(&resource) && line.contains(&place));
        assert!(named, "{verb} {resource} {place} is not named in:\n{}", run.err);
        let account = self.user.replace("system:serviceaccount:", "").replacen(':', "/", 1);
        run.says("cluster check --print-rbac");
        run.says(&format!("--service-account {account} | kubectl apply"));
        kubectl_apply(&self.cluster, &self.documents)?;
        self.until_allowed(asked, true).await?;
        Ok(run)
    }

    /// The API server learns of changed roles a moment later.
    async fn until_allowed(
        &self,
        (namespace, group, resource, name, verb): (Option<&str>, &str, &str, Option<&str>, &str),
        wanted: bool,
    ) -> anyhow::Result<()> {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let attributes = json!({
            "namespace": namespace, "group": group, "resource": resource, "subresource": subresource,
            "name": name, "verb": verb,
        });
        let review = json!({"spec": {"user": self.user, "resourceAttributes": attributes}});
        let review: SubjectAccessReview = serde_json::from_value(review)?;
        let reviews: Api<SubjectAccessReview> = Api::all(self.cluster.client());
        for _ in 0..500 {
            let answer = reviews.create(&PostParams::default(), &review).await?;
            if answer.status.is_some_and(|status| status.allowed == wanted) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        anyhow::bail!("{verb} {resource} never becomes {wanted}")
    }
}

/// The printed manifests. Other tests print roles of the same name for the
/// whole cluster.
fn parsed(namespace: &str, printed: &str) -> anyhow::Result<Vec<Value>> {
    let mut documents = Vec::new();
    for document in serde_yaml::Deserializer::from_str(printed) {
        documents.push(<Value as serde::Deserialize>::deserialize(document)?);
    }
    for document in documents.iter_mut().filter(|d| d["kind"].as_str().is_some_and(|k| k.starts_with("ClusterRole"))) {
        let name = json!(format!("{namespace}-installer"));
        if document.pointer("/roleRef/name").is_some() {
            document["roleRef"]["name"] = name.clone();
        }
        document["metadata"]["name"] = name;
    }
    Ok(documents)
}

/// Takes the verb from the resource's rule; returns its group, and the name of
/// an object that the rule is about.
fn take(role: &mut Value, resource: &str, verb: &str) -> anyhow::Result<(String, Option<String>)> {
    for rule in role["rules"].as_array_mut().context("no rules")? {
        let has =
            |field: &str, wanted: &str| rule[field].as_array().is_some_and(|list| list.iter().any(|v| v == wanted));
        if has("resources", resource) && has("verbs", verb) {
            let group = rule.pointer("/apiGroups/0").and_then(Value::as_str).unwrap_or_default().to_owned();
            let name = rule.pointer("/resourceNames/0").and_then(Value::as_str).map(str::to_owned);
            rule["verbs"].as_array_mut().context("no verbs")?.retain(|v| v != verb);
            if rule["verbs"].as_array().is_some_and(Vec::is_empty) {
                rule["verbs"] = json!(["deletecollection"]);
            }
            return Ok((group, name));
        }
    }
    anyhow::bail!("no rule lets anybody {verb} {resource}")
}

pub(super) fn kubectl_apply(cluster: &Cluster, documents: &[Value]) -> anyhow::Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let list = json!({"apiVersion": "v1", "kind": "List", "items": documents});
    std::fs::write(file.path(), list.to_string())?;
    let output = cluster
        .tools()
        .command("kubectl")
        .args(["apply", "--server-side", "--force-conflicts", "--kubeconfig"])
        .arg(cluster.kubeconfig())
        .args(["--filename"])
        .arg(file.path())
        .output()?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

pub(crate) async fn the_printed_roles_suffice_and_each_of_their_rules_is_needed(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "least");
    let Namespaces { operator, builds, .. } = &farm.names;
    let named = format!("{operator}/installer");
    let printed = farm.run("check", &["--print-rbac=init", "--service-account", &named]).await?.expect(0).out;
    let account = Account::new(&cluster, operator, &printed).await?;
    for taken in [
        ("patch", "deployments", Some(operator.as_str())),
        ("get", "secrets", Some(operator)),
        ("update", "leases", Some(operator)),
        ("create", "configmaps", Some(operator)),
        ("create", "pods", Some(builds)),
        ("watch", "pods", Some(operator)),
        ("get", "pods/log", Some(operator)),
        ("delete", "roles", Some(builds)),
        ("watch", "roles", Some(builds)),
        ("update", "statefulsets", Some(builds)),
        ("list", "customresourcedefinitions", None),
        ("patch", "namespaces", None),
    ] {
        account.refused(farm.command("init", &["--timeout=30s"]), taken).await?;
        assert_eq!(texts(&farm.writes().await?), [""; 0], "{taken:?}");
    }
    account.run(farm.command("init", &["--timeout=60s"])).await?.expect(0);
    account.run(farm.command("plan", &[])).await?.expect(0);
    let check = account.run(farm.command("check", &[])).await?.expect(0);
    assert!(check.out.contains("ok    permissions: user \"system:serviceaccount:"), "{}", check.out);
    // What was printed to install does not remove.
    let mut uninstall = Command::new("bko-install");
    uninstall.args(["cluster", "uninstall", "--namespace", operator, "--kubeconfig", "-"]);
    let run = account.run(uninstall).await?.expect(1);
    run.says("buildprojects.buildkit-operator.socialgouv.github.io in the whole cluster");
    Ok(())
}

/// A definition of this test alone, with nine service accounts to prune.
fn content(farm: &Bundled, accounts: usize) -> anyhow::Result<()> {
    let definition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n\
         metadata: {name: things.NS.example.org}\nspec:\n  group: NS.example.org\n  scope: Namespaced\n  \
         names: {kind: Thing, plural: things, singular: thing}\n  versions:\n  \
         - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}\n";
    farm.component("rc0", "things", "", definition)?;
    let account =
        |n| format!("---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: account-{n}, namespace: NS}}\n");
    farm.component("rc1", "accounts", "", &(0..accounts).map(account).collect::<String>())
}

pub(crate) async fn the_printed_roles_suffice_to_prune_to_go_back_and_to_uninstall(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Bundled::new(Arc::clone(&cluster), "removes")?;
    let (operator, other) = (farm.names.operator.clone(), farm.names.builds.clone());
    content(&farm, 9)?;
    farm.component("rc0", "other", "", &format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {other}}}\n"))?;
    let named = format!("--service-account={operator}/installer");
    let printed = farm.run("check", &["--print-rbac", &named]).await?.expect(0).out;
    let account = Account::new(&cluster, &operator, &printed).await?;
    account.run(farm.command("init", &[])).await?.expect(0);

    // What was printed for one version prunes what the next no longer has.
    content(&farm, 6)?;
    let before = farm.writes().await?.len();
    let taken = ("delete", "serviceaccounts", Some(operator.as_str()));
    account.refused(farm.command("init", &[]), taken).await?;
    assert_eq!(farm.writes().await?.len(), before);
    account.run(farm.command("init", &[])).await?.expect(0);
    assert!(!farm.exists("serviceaccount", "account-8").await?);

    let rollback = || farm.command("rollback", &[]);
    let before = farm.writes().await?.len();
    account.refused(rollback(), ("create", "serviceaccounts", Some(&operator))).await?;
    account.refused(rollback(), ("patch", "serviceaccounts", Some(&operator))).await?;
    assert_eq!(farm.writes().await?.len(), before);
    account.run(rollback()).await?.expect(0);
    assert!(farm.exists("serviceaccount", "account-8").await?);

    // Roles that are printed now hold every revision, and what was pruned.
    content(&farm, 6)?;
    account.run(farm.command("init", &[])).await?.expect(0);
    let again = farm.run("check", &["--print-rbac", &named]).await?.expect(0).out;
    assert!(again.contains("account-8"), "{again}");
    let init = farm.run("check", &["--print-rbac=init", &named]).await?.expect(0).out;
    assert!(!init.contains("account-8") && !init.contains("- \"*\""), "{init}");

    let gvk = GroupVersionKind::gvk(&format!("{operator}.example.org"), "v1", "Thing");
    let things: Api<DynamicObject> =
        Api::namespaced_with(farm.client(), &operator, &ApiResource::from_gvk_with_plural(&gvk, "things"));
    let thing = json!({"apiVersion": gvk.api_version(), "kind": "Thing", "metadata": {"name": "one"}});
    things.create(&PostParams::default(), &serde_json::from_value(thing)?).await?;
    let before = farm.writes().await?.len();
    for taken in [
        ("delete", "serviceaccounts", Some(operator.as_str())),
        ("watch", "serviceaccounts", Some(&operator)),
        ("delete", "leases", Some(&operator)),
        ("list", "*", Some(&operator)),
        ("list", "*", Some(&other)),
        ("list", "things", None),
        ("delete", "things", None),
        ("delete", "customresourcedefinitions", None),
        ("delete", "namespaces", None),
    ] {
        account.refused(farm.command("uninstall", &[]), taken).await?;
        assert_eq!(farm.writes().await?.len(), before, "{taken:?}");
    }
    let caches = account.run(farm.command("uninstall", &["--delete-caches"])).await?.expect(1);
    caches.says("delete, watch persistentvolumeclaims in namespace");
    caches.says("--print-rbac=init,rollback,uninstall,rotate,delete-caches");
    assert_eq!(farm.writes().await?.len(), before);
    let run = account.run(farm.command("uninstall", &[])).await?.expect(0);
    for name in [&operator, &other] {
        assert!(run.out.contains(&format!("kept Namespace {name}: it holds Role bko-install")), "{}", run.out);
    }
    assert!(!farm.exists("serviceaccount", "account-0").await?);
    assert!(!farm.exists("customresourcedefinition", &format!("things.{operator}.example.org")).await?);
    assert!(record(&farm.client(), &operator).await?.is_none());
    Ok(())
}

/// Owns the cluster: the definition is everybody's.
pub(crate) async fn a_release_is_taken_over_with_the_roles_printed_for_that(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "adopter");
    install_reference(&farm, Helm::Applies, "buildkit-operator").await?;
    let operator = &farm.names.operator;
    let named = format!("--service-account={operator}/installer");
    let printed = farm.run("check", &["--print-rbac=init,adopt", &named]).await?.expect(0).out;
    let account = Account::new(&cluster, operator, &printed).await?;
    let run =
        account.refused(farm.command("init", &["--adopt"]), ("delete", "secrets", Some(operator.as_str()))).await?;
    run.says("--print-rbac=init,rollback,uninstall,rotate,adopt");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);
    account.run(farm.command("init", &["--adopt", "--timeout=60s"])).await?.expect(0);
    let mut unadopt = Command::new("bko-install");
    unadopt.args(["cluster", "unadopt", "--namespace", operator, "--kubeconfig", "-"]);
    account.run(unadopt).await?.expect(0);
    Ok(())
}

pub(crate) async fn an_authority_is_replaced_with_the_roles_printed_for_that(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = Farm::new(Arc::clone(&cluster), "rotator");
    farm.init(&[]).await?.expect(0);
    let Namespaces { operator, builds, .. } = &farm.names;
    let named = format!("--service-account={operator}/installer");
    let printed = farm.run("check", &["--print-rbac=rotate", &named]).await?.expect(0).out;
    let account = Account::new(&cluster, operator, &printed).await?;
    let rotate = || {
        let mut command = Command::new("bko-install");
        command.args(["certs", "rotate", "--operator-namespace", operator, "--kubeconfig", "-"]);
        command
    };
    let before = farm.secrets().await?;
    account.refused(rotate(), ("patch", "secrets", Some(builds.as_str()))).await?;
    account.refused(rotate(), ("list", "pods", Some(builds.as_str()))).await?;
    assert_eq!(farm.secrets().await?, before);
    account.run(rotate()).await?.expect(0).says("hand ca.pem out");
    assert_ne!(farm.secrets().await?, before);
    Ok(())
}
