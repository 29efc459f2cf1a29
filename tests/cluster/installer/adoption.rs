//! An installation of the reference, made by Helm, is taken over.

use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::api::{Patch, PatchParams};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use super::*;

const OBJECTS: &str = include_str!("reference.yaml");
const PROJECT: &str = include_str!("reference-project.yaml");
/// A secret value among those that were given to Helm.
const HUSH: &str = "correct-horse";
const CRD: &str = "buildprojects.buildkit-operator.socialgouv.github.io";
const KEY: &str = "p41bd34a2227aca39";

/// The two ways in which Helm manages fields.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Helm {
    /// Helm 4 applies.
    Applies,
    /// Helm 3 updates.
    Updates,
}

/// Owns the cluster: the definition is everybody's.
pub(crate) async fn a_helm_installation_is_adopted_with_its_daemons_and_caches(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    for helm in [Helm::Applies, Helm::Updates] {
        adopted(Arc::clone(&cluster), helm, "buildkit-operator").await?;
    }
    Ok(())
}

/// Owns the cluster. Of a release of another name, the controller has another
/// name, too, and must not go on beside ours.
pub(crate) async fn the_controller_of_another_release_ends_when_ours_is_ready(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = adopted(cluster, Helm::Applies, "farm").await?;
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    assert!(deployments.get_opt("farm-buildkit-operator-buildd").await?.is_none());
    // Daemons that run may still read their configuration.
    let maps: Api<ConfigMap> = Api::namespaced(farm.client(), &farm.names.builds);
    assert!(maps.get_opt("farm-buildkit-operator-buildkitd-config").await?.is_some());
    Ok(())
}

async fn adopted(cluster: Arc<Cluster>, helm: Helm, release: &str) -> anyhow::Result<Farm> {
    let farm = Farm::new(cluster, "adopt");
    install_reference(&farm, helm, release).await?;
    let play = Play::start(farm.client(), &farm.names.builds, Duration::ZERO);
    let daemon = format!("buildkitd-{KEY}-0");
    let pods: Api<Pod> = Api::namespaced(farm.client(), &farm.names.builds);
    let is_ready = kube::runtime::conditions::is_pod_running();
    tokio::time::timeout(
        Duration::from_secs(20),
        kube::runtime::wait::await_condition(pods.clone(), &daemon, is_ready),
    )
    .await??;
    let before = survivors(&farm).await?;

    // Not by accident.
    let refused = farm.init(&[]).await?.expect(5);
    refused.says(&format!("belongs to Helm release {}/{release}", farm.names.operator));
    refused.says("hint: take the installation over with --adopt");
    assert_eq!(texts(&farm.writes().await?), [""; 0]);

    let plan = farm.run("plan", &["--adopt"]).await?.expect(3);
    assert!(plan.out.contains("taking over from helm"), "{}", plan.out);
    assert!(plan.out.contains("Helm is made to forget it"), "{}", plan.out);
    // What somebody had set of the release holds, and what has no equal is named.
    for line in [
        &format!("values of Helm release {}/{release}", farm.names.operator),
        "taken      maxColdStarts: 5",
        "taken      server.resources.limits.memory: \"300Mi\"",
        "left       gateway.image.tag",
        "left       buildkit.image",
        "left       s3.secretKey",
    ] {
        assert!(plan.out.contains(line), "{line}: {}", plan.out);
    }
    let init = farm.init(&["--adopt"]).await?.expect(0);
    init.says("buildkit.image, gateway.image.tag, s3.secretKey");
    for run in [&plan, &init] {
        assert!(!run.out.contains(HUSH) && !run.err.contains(HUSH), "{}{}", run.out, run.err);
    }
    assert_eq!(survivors(&farm).await?, before, "daemon, cache, project and certificates are the same");
    let secrets = farm.secrets().await?;
    assert!(!secrets.keys().any(|name| name.ends_with("ca-key.pem")), "an authority was made: {:?}", secrets.keys());
    let server = server(&farm).await?;
    let labels = &server["metadata"]["labels"];
    assert_eq!((&labels["app.kubernetes.io/managed-by"], labels.get("helm.sh/chart")), (&"bko-install".into(), None));
    assert_eq!(server["metadata"]["annotations"].get("meta.helm.sh/release-name"), None);
    let args = server.pointer("/spec/template/spec/containers/0/args").cloned().unwrap_or_default();
    assert!(!args.to_string().contains("--max-build-seconds=7200\",\"--leader"), "{args}");
    assert!(args.to_string().contains("max-cold-starts=5"), "{args}");
    let memory = server.pointer("/spec/template/spec/containers/0/resources/limits/memory");
    assert_eq!(memory, Some(&"300Mi".into()));
    assert_eq!(releases(&farm).await?, [""; 0]);
    farm.run("plan", &[]).await?.expect(0);

    // One command puts the release back, as it was.
    let mut unadopt = bko_install();
    unadopt.args(["cluster", "unadopt", "--namespace", &farm.names.operator, "--kubeconfig"]);
    let run = Run::new(unadopt.arg(farm.cluster.kubeconfig()).output().await?)?.expect(0);
    assert!(run.out.contains(release), "{}", run.out);
    assert_eq!(releases(&farm).await?, [format!("sh.helm.release.v1.{release}.v1")]);
    drop(play);
    Ok(farm)
}

async fn server(farm: &Farm) -> anyhow::Result<Value> {
    let deployments: Api<Deployment> = Api::namespaced(farm.client(), &farm.names.operator);
    Ok(serde_json::to_value(deployments.get("buildkit-operator-buildd").await?)?)
}

/// The Secrets by which Helm knows its releases.
async fn releases(farm: &Farm) -> anyhow::Result<Vec<String>> {
    let secrets: Api<Secret> = Api::namespaced(farm.client(), &farm.names.operator);
    let list = secrets.list(&ListParams::default().labels("owner=helm").fields("type=helm.sh/release.v1")).await?;
    Ok(list.items.iter().map(ResourceExt::name_any).collect())
}

/// What must not be touched: UIDs of daemon, volume and project, and the bytes of the certificates.
async fn survivors(farm: &Farm) -> anyhow::Result<Vec<String>> {
    let builds = &farm.names.builds;
    let pods: Api<Pod> = Api::namespaced(farm.client(), builds);
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(farm.client(), builds);
    let sets: Api<StatefulSet> = Api::namespaced(farm.client(), builds);
    let mut all = vec![
        format!("{:?}", pods.get(&format!("buildkitd-{KEY}-0")).await?.uid()),
        format!("{:?}", claims.get(&format!("cache-buildkitd-{KEY}-0")).await?.uid()),
        format!("{:?}", sets.get(&format!("buildkitd-{KEY}")).await?.uid()),
        format!("{:?}", Api::<Namespace>::all(farm.client()).get(builds).await?.uid()),
    ];
    let certificates = farm.secrets().await?.into_iter().filter(|(name, _)| name.contains("-certs/"));
    all.extend(
        certificates.filter(|(name, _)| name.starts_with(builds)).map(|(name, bytes)| format!("{name} {bytes:?}")),
    );
    Ok(all)
}

pub(super) async fn install_reference(farm: &Farm, helm: Helm, release: &str) -> anyhow::Result<()> {
    let prefix =
        if release.contains("buildkit-operator") { release.to_owned() } else { format!("{release}-buildkit-operator") };
    let fill = |text: &str| {
        text.replace("PREFIX", &prefix)
            .replace("namespace: OP", &format!("namespace: {}", farm.names.operator))
            .replace("namespace: BU", &format!("namespace: {}", farm.names.builds))
            .replace("name: BU", &format!("name: {}", farm.names.builds))
            .replace("instance: REL", &format!("instance: {release}"))
            .replace("name: REL", &format!("name: {release}"))
    };
    let namespace = json!({"metadata": {"name": farm.names.operator}});
    Api::<Namespace>::all(farm.client()).create(&PostParams::default(), &serde_json::from_value(namespace)?).await?;
    definition(farm, helm).await?;
    let objects = fill(OBJECTS);
    kubectl(farm, &write_as_helm(helm), &objects).await?;
    certificates(farm).await?;
    kubectl(farm, &["create", "--field-manager=buildd", "--filename=-"], &fill(PROJECT)).await?;
    release_secret(farm, release, &objects).await
}

fn write_as_helm(helm: Helm) -> [&'static str; 4] {
    match helm {
        Helm::Applies => ["apply", "--server-side", "--field-manager=helm", "--filename=-"],
        Helm::Updates => ["create", "--validate=true", "--field-manager=helm", "--filename=-"],
    }
}

async fn kubectl(farm: &Farm, args: &[&str], input: &str) -> anyhow::Result<String> {
    use tokio::io::AsyncWriteExt;
    let mut kubectl = farm.cluster.tools().command("kubectl");
    kubectl.arg("--kubeconfig").arg(farm.cluster.kubeconfig()).args(args);
    kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Command::from(kubectl).spawn()?;
    let mut stdin = child.stdin.take().context("no input")?;
    stdin.write_all(input.as_bytes()).await?;
    drop(stdin);
    let output = child.wait_with_output().await?;
    anyhow::ensure!(output.status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The definition as Helm leaves it: no labels, and all fields Helm's.
async fn definition(farm: &Farm, helm: Helm) -> anyhow::Result<()> {
    let crd: Value = serde_yaml::from_str(include_str!("../../../manifests/crd/crd.yaml"))?;
    let mut crd = crd;
    crd["metadata"] = json!({"name": CRD, "annotations": {"controller-gen.kubebuilder.io/version": "v0.21.0"}});
    let api: Api<kube::core::DynamicObject> = Api::all_with(
        farm.client(),
        &kube::core::ApiResource::erase::<
            k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
        >(&()),
    );
    if api.get_opt(CRD).await?.is_some() {
        let reset = json!({"metadata": {"managedFields": [{}], "labels": null}});
        api.patch(CRD, &PatchParams::default(), &Patch::Merge(reset)).await?;
    }
    let manager = match helm {
        Helm::Applies => PatchParams::apply("helm").force(),
        Helm::Updates => PatchParams { field_manager: Some("helm".into()), ..PatchParams::default() },
    };
    match helm {
        Helm::Updates if api.get_opt(CRD).await?.is_some() => {
            api.patch(CRD, &manager, &Patch::Merge(crd)).await?;
        }
        _ => drop(api.patch(CRD, &PatchParams::apply("helm").force(), &Patch::Apply(crd)).await?),
    }
    Ok(())
}

/// Certificates made by hand, of an authority whose key is elsewhere.
async fn certificates(farm: &Farm) -> anyhow::Result<()> {
    let mut authority = CertificateParams::new(Vec::<String>::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = rcgen::CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    for (name, dns) in
        [("buildkit-daemon-certs", format!("*.{}.svc", farm.names.builds)), ("buildkit-client-certs", "client".into())]
    {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![dns])?.signed_by(&key, &authority)?;
        let secret: Secret = serde_json::from_value(json!({
            "metadata": {"name": name},
            "stringData": {"ca.pem": authority.pem(), "cert.pem": certificate.pem(), "key.pem": key.serialize_pem()},
        }))?;
        Api::namespaced(farm.client(), &farm.names.builds).create(&PostParams::default(), &secret).await?;
    }
    Ok(())
}

/// Helm's own state: base64 of compressed JSON.
async fn release_secret(farm: &Farm, release: &str, manifest: &str) -> anyhow::Result<()> {
    let content = json!({
        "name": release, "namespace": farm.names.operator, "version": 1, "manifest": manifest,
        "chart": {"metadata": {"name": "buildkit-operator", "version": "0.21.0"}},
        "info": {"status": "deployed"},
        "config": {
            "maxColdStarts": 5, "gateway": {"image": {"tag": "dev"}},
            "resources": {"limits": {"memory": "300Mi"}}, "s3": {"secretKey": HUSH}, "buildkit": {"image": "latest"},
        },
    });
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(content.to_string().as_bytes())?;
    let secret: Secret = serde_json::from_value(json!({
        "metadata": {
            "name": format!("sh.helm.release.v1.{release}.v1"),
            "labels": {"owner": "helm", "name": release, "status": "deployed", "version": "1", "modifiedAt": "1"},
        },
        "type": "helm.sh/release.v1",
        "stringData": {"release": STANDARD.encode(packed.finish()?)},
    }))?;
    let as_helm = PostParams { field_manager: Some("Helm".into()), ..PostParams::default() };
    Api::namespaced(farm.client(), &farm.names.operator).create(&as_helm, &secret).await?;
    Ok(())
}
