//! Faults of the API server and of what it calls: throttling, webhooks that do
//! not serve yet, kills at any moment.

use std::net::Ipv4Addr;

use axum::{Json, Router, routing::post};
use kube::api::{Patch, PatchParams};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use super::*;
use crate::harness::fault_proxy::{At, FaultProxy};
use crate::harness::repetitions;

/// Kills runs at requests of any kind, before, at and after they are carried
/// out, and completes them by the same command: no orphan, no second key.
pub(crate) async fn killed_at_random_requests_it_converges(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let proxy = FaultProxy::start(cluster.client()).await?;
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..repetitions(50) {
        let farm = Farm::new(Arc::clone(&cluster), "kill");
        let cut = killed_through(&farm, &proxy, "init", &mut random, 120).await?;
        let before = farm.secrets().await?;
        let init = farm.init(&[]).await?.expect(0);
        let after = farm.secrets().await?;
        for (name, value) in &before {
            assert_eq!(after.get(name), Some(value), "round {round}, {cut}: {name} was made twice");
        }
        let record = farm.record().await?.context("no record")?;
        assert_eq!(record["state"], "installed", "{}", init.out);
        no_orphans(&farm, &record).await?;
        farm.run("plan", &[]).await?.expect(0);

        eprintln!("round {round}: {cut}");

        let cut = killed_through(&farm, &proxy, "uninstall", &mut random, 80).await?;
        eprintln!("round {round}: {cut}");
        farm.found("uninstall", &[]).await?.expect(0);
        let namespaces: Api<Namespace> = Api::all(farm.client());
        for name in farm.names.all() {
            let left = namespaces.get_opt(name).await?;
            assert!(left.is_none_or(|left| left.metadata.deletion_timestamp.is_some()), "round {round}, {cut}: {name}");
        }
    }
    Ok(())
}

/// Runs a command through the proxy, which kills it at one of its first
/// `most` requests; it may end before. Says where that was.
async fn killed_through(
    farm: &Farm,
    proxy: &FaultProxy,
    verb: &str,
    random: &mut fastrand::Rng,
    most: usize,
) -> anyhow::Result<String> {
    let (spare, at) = (random.usize(..most), At::ALL[random.usize(..At::ALL.len())]);
    let mut command = farm.command_through(proxy.kubeconfig(), verb);
    let mut child = command.spawn()?;
    let id = child.id().context("no process")?;
    let pid = rustix::process::Pid::from_raw(i32::try_from(id)?).context("no process")?;
    proxy.arm(
        |_, _| true,
        spare,
        at,
        move || {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        },
    );
    let status = child.wait().await?;
    Ok(format!("{verb} at request {spare}, {at:?}, {status}"))
}

/// A real 429: the API server gives the installer's account no room at first.
pub(crate) async fn a_throttling_api_server_is_waited_for(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(Arc::clone(&cluster), "throttle")?;
    let maps =
        (0..60).map(|n| format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m{n}, namespace: NS}}\n"));
    farm.component("rc1", "maps", "", &maps.collect::<String>())?;
    farm.create_namespace().await?;
    let file = account(&farm).await?;
    let levels = "apiVersion: flowcontrol.apiserver.k8s.io/v1\nkind: PriorityLevelConfiguration\nmetadata: {name: NS}\nspec:\n  \
                  type: Limited\n  limited: {nominalConcurrencyShares: 0, lendablePercent: 0, borrowingLimitPercent: 0, limitResponse: {type: Reject}}\n---\n\
                  apiVersion: flowcontrol.apiserver.k8s.io/v1\nkind: FlowSchema\nmetadata: {name: NS}\nspec:\n  matchingPrecedence: 2\n  \
                  priorityLevelConfiguration: {name: NS}\n  rules:\n  - subjects: [{kind: ServiceAccount, serviceAccount: {name: installer, namespace: NS}}]\n    \
                  resourceRules: [{apiGroups: ['*'], resources: ['*'], verbs: ['*'], clusterScope: true, namespaces: ['*']}]\n";
    farm.kubectl(&["create", "--filename=-"], levels).await?;
    throttles(file.path()).await?;
    let mut command = farm.command("init", &["--output=json"]);
    command.arg("--kubeconfig").arg(file.path());
    let args: Vec<_> = command.as_std().get_args().map(ToOwned::to_owned).collect();
    let at = args.iter().position(|arg| arg == "--kubeconfig").context("no kubeconfig")?;
    let args: Vec<_> = args.iter().enumerate().filter(|(n, _)| *n != at && *n != at + 1).map(|(_, arg)| arg).collect();
    let mut child =
        bko_install().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    let retried = wait_for_event(&mut child, "retrying").await;
    let name = farm.namespace().to_owned();
    farm.kubectl(&["delete", "flowschema", &name], "").await?;
    let run = Run::new(child.wait_with_output().await?)?;
    retried.with_context(|| format!("{}\n{}", run.out, run.err))?;
    run.expect(0);
    farm.kubectl(&["delete", "prioritylevelconfiguration", &name], "").await?;
    Ok(())
}

/// Waits until the API server gives the account no room.
async fn throttles(kubeconfig: &Path) -> anyhow::Result<()> {
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig)?;
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
    config.default_retry = false;
    let maps: Api<ConfigMap> = Api::all(Client::try_from(config)?);
    // One request at a time always has a seat.
    for _ in 0..200 {
        let many = (0..32).map(|_| async { maps.list(&ListParams::default()).await });
        let answers = futures::future::join_all(many).await;
        if answers.iter().any(|answer| matches!(answer, Err(kube::Error::Api(status)) if status.code == 429)) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    anyhow::bail!("the flow schema does not take effect")
}

/// A kubeconfig of an account that may do anything.
async fn account(farm: &Bundled) -> anyhow::Result<tempfile::NamedTempFile> {
    let objects = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: installer, namespace: NS}\n---\n\
                   apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: NS-installer}\n\
                   roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}\n\
                   subjects: [{kind: ServiceAccount, name: installer, namespace: NS}]\n";
    farm.kubectl(&["create", "--filename=-"], objects).await?;
    let token = farm.kubectl(&["create", "token", "installer"], "").await?;
    let file = tempfile::NamedTempFile::new()?;
    kubeconfig_with_token(&farm.cluster, token.trim(), file.path())?;
    Ok(file)
}

/// Registered in one level and serving later: what it guards is tried again
/// until it answers, and the probes prove that it answers rightly.
pub(crate) async fn a_webhook_that_does_not_serve_yet_is_waited_for(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "webhook")?;
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    drop(listener);
    let mut authority = CertificateParams::new(Vec::<String>::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let authority = rcgen::CertifiedIssuer::self_signed(authority, key)?;
    let own = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec!["127.0.0.1".into()])?.signed_by(&own, &authority)?;
    let bundle = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, authority.pem());
    let hook = format!(
        "apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingWebhookConfiguration\nmetadata: {{name: NS}}\nwebhooks:\n\
         - name: guard.example.org\n  admissionReviewVersions: [v1]\n  sideEffects: None\n  failurePolicy: Fail\n  timeoutSeconds: 2\n  \
         namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: NS}}}}\n  \
         objectSelector: {{matchLabels: {{guarded: 'yes'}}}}\n  \
         clientConfig: {{url: 'https://127.0.0.1:{port}/guard', caBundle: {bundle}}}\n  \
         rules: [{{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}}]\n"
    );
    let probe = |name: &str| {
        format!(
            "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}, namespace: NS, labels: {{guarded: \"yes\"}}}}}}"
        )
    };
    let probes = format!(
        "policy:\n  probes:\n  - webhook: NS\n    accept: '{}'\n    reject: '{}'\n",
        probe("good"),
        probe("bad")
    );
    farm.component("rc1", "hook", &probes, &hook)?;
    farm.component(
        "rc2",
        "guarded",
        "",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: guarded, namespace: NS, labels: {guarded: 'yes'}}\n",
    )?;
    let serve = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        guard(port, certificate.pem(), own.serialize_pem()).await
    };
    let (init, server) = tokio::join!(farm.init(&[]), serve);
    let server = server?;
    let init = init?.expect(0);
    assert!(init.out.contains("waiting for ValidatingWebhookConfiguration "), "{}", init.out);
    let plan = farm.run("plan", &[]).await?.expect(0);
    drop(plan);
    server.abort();
    let name = farm.namespace().to_owned();
    farm.kubectl(&["delete", "validatingwebhookconfiguration", &name], "").await?;
    Ok(())
}

/// A webhook that refuses what is called `bad`.
async fn guard(port: u16, certificate: String, key: String) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
    let config = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key)?;
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let review = |Json(review): Json<Value>| async move {
        let allowed = review.pointer("/request/name") != Some(&"bad".into());
        Json(json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "response": {"uid": review["request"]["uid"], "allowed": allowed, "status": {"message": "bad is refused"}},
        }))
    };
    let app = Router::new().route("/guard", post(review));
    Ok(tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, app) = (acceptor.clone(), app.clone());
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = hyper_util::service::TowerToHyperService::new(app);
                let io = hyper_util::rt::TokioIo::new(stream);
                let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
            });
        }
    }))
}

pub(crate) async fn a_lease_of_another_clock_is_judged_by_ours(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    for renewed in ["2001-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z"] {
        let farm = Bundled::new(Arc::clone(&cluster), "skew")?;
        farm.create_namespace().await?;
        let lease: Lease = serde_json::from_value(json!({
            "metadata": {"name": "bko-install"},
            "spec": {"holderIdentity": "crashed", "leaseDurationSeconds": 2, "renewTime": renewed},
        }))?;
        let leases: Api<Lease> = Api::namespaced(farm.client(), farm.namespace());
        leases.create(&PostParams::default(), &lease).await?;
        farm.init(&[]).await?.expect(0).says("another installer holds the lock: crashed");
        // One that is renewed, whatever its clock says, is respected.
        let mut held = lease.clone();
        held.metadata.resource_version = None;
        leases.create(&PostParams::default(), &held).await?;
        farm.component("rc1", "map", "", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: NS}\n")?;
        let renew = async {
            for second in 0..20 {
                let time = format!("2001-01-01T00:00:{second:02}.000000Z");
                let patch = Patch::Merge(json!({"spec": {"renewTime": time}}));
                leases.patch("bko-install", &PatchParams::default(), &patch).await?;
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            run = farm.init(&[]) => run?.expect(5).says("another installer is at work: crashed"),
            result = renew => { result?; anyhow::bail!("the run does not end") }
        }
    }
    Ok(())
}

/// What a person may type comes out unchanged at the other end.
pub(crate) async fn any_text_reaches_its_object_unchanged(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "text")?;
    farm.component(
        "rc1",
        "text",
        "values:\n  text:\n    type: string\n    default: x\n    description: Any text\n",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: fixed, namespace: NS}\n",
    )?;
    farm.template(
        "text",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: text, namespace: NS}\ndata: {text: {{ text }}}\n",
    )?;
    for text in [
        "a\nkind: Secret\n",
        "\"'\\",
        "{{ x }}{% y %}",
        "${HOME}$(id)`id`",
        "äöü€🚀\u{2028}",
        "yes",
        "0644",
        "1e3",
        "~",
        "",
    ] {
        let values = json!({"text": text}).to_string();
        let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
        std::fs::write(file.path(), values)?;
        farm.init(&["-f", file.path().to_str().context("path")?]).await?.expect(0);
        assert_eq!(farm.get("configmap", "text").await?["data"]["text"], text);
    }
    // Files of another system end their lines otherwise.
    let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    std::fs::write(file.path(), "# values\r\ntext: \"one\"\r\n")?;
    farm.init(&["-f", file.path().to_str().context("path")?]).await?.expect(0);
    assert_eq!(farm.get("configmap", "text").await?["data"]["text"], "one");
    Ok(())
}

pub(crate) async fn a_claim_that_waits_for_its_pod_is_deferred(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "wffc")?;
    let objects = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: NS}\nprovisioner: example.org/none\n\
                   volumeBindingMode: WaitForFirstConsumer\n---\napiVersion: v1\nkind: PersistentVolumeClaim\n\
                   metadata: {name: data, namespace: NS}\nspec: {storageClassName: NS, accessModes: [ReadWriteOnce], \
                   resources: {requests: {storage: 1Gi}}}\n";
    farm.component("rc1", "data", "", objects)?;
    let began = std::time::Instant::now();
    farm.init(&[]).await?.expect(0).says("is bound when a pod uses it");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // Data is never pruned without consent.
    farm.without("data")?;
    farm.init(&[]).await?.expect(5).says("holds data");
    Ok(())
}

/// Told of once, with what it belongs to, and with the objects as they are meant.
pub(crate) async fn a_webhook_that_is_down_is_named_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = Bundled::new(cluster, "hookdown")?;
    let name = farm.namespace().to_owned();
    let hook = format!(
        "apiVersion: admissionregistration.k8s.io/v1\nkind: ValidatingWebhookConfiguration\nmetadata: {{name: NS}}\n\
         webhooks:\n- name: down.example.org\n  admissionReviewVersions: [v1]\n  sideEffects: None\n  failurePolicy: Fail\n  \
         objectSelector: {{matchLabels: {{hook: {name}}}}}\n  clientConfig: {{url: 'https://127.0.0.1:1/x'}}\n  \
         rules: [{{apiGroups: [''], apiVersions: [v1], operations: ['*'], resources: [configmaps]}}]\n"
    );
    farm.kubectl(&["create", "--filename=-"], &hook).await?;
    let map = |n| {
        format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: m{n}, namespace: NS, labels: {{hook: NS}}}}\n")
    };
    farm.component("rc1", "maps", "", &(0..6).map(map).collect::<String>())?;
    let run = farm.init(&["--timeout=5s"]).await?.expect(4);
    farm.kubectl(&["delete", "validatingwebhookconfiguration", &name], "").await?;
    let named = format!("webhook \"down.example.org\" of ValidatingWebhookConfiguration \"{name}\" does not answer");
    run.says(&format!("error: {named}, and the API server refuses what it is to see: Post \"https://127.0.0.1:1/x"));
    run.says("failurePolicy");
    assert_eq!(run.err.matches("trying again").count(), 1, "{}", run.err);
    assert!(run.err.contains(&format!("to check ConfigMap {name}/m")), "{}", run.err);
    assert!(!run.err.contains("default/"), "{}", run.err);
    Ok(())
}
