//! The pod of a daemon: a stock `buildkitd`, confined as far as it can be, and
//! the companion beside it. Pure.

mod companion;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource, EnvVar, ExecAction,
    KeyToPath, LocalObjectReference, ObjectFieldSelector, PersistentVolumeClaimVolumeSource, PodSpec, PodTemplateSpec,
    Probe, ResourceRequirements, SecretVolumeSource, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::api::Tier;
use super::super::settings::{CacheKind, Settings};
use super::super::validate::Valid;
use super::config::Base;
use super::profile::Confinement;
use super::{UNTRUSTED, config, labels};
pub use companion::{COMPANION, COMPANION_PORT};

const RUNTIME_DIR: &str = "/run/user/1000";
const SOCKET: &str = "unix:///run/user/1000/buildkit/buildkitd.sock";
const CERTS_DIR: &str = "/certs";
const CONFIG_DIR: &str = "/etc/buildkit";

/// Annotation that carries `buildkitd.toml`; mounted as a file through the
/// downward API. So the configuration is a part of the template: one object
/// and one hash, and no daemon ever runs with half of a change.
pub const CONFIG_ANNOTATION: &str = "buildkit-operator.socialgouv.github.io/buildkitd.toml";

/// Annotation that carries authorities of registries in the same way.
pub const REGISTRY_CA_ANNOTATION: &str = "buildkit-operator.socialgouv.github.io/registry-ca.pem";

/// Where the daemon looks for authorities beside its own file of the public
/// ones: where distributions have them, and where ours are mounted.
const CERTIFICATE_DIRS: &str = "/etc/ssl/certs:/etc/buildkit";

/// Longest grace that a daemon gets beyond its build, and in all.
const GRACE_MARGIN_SECONDS: u64 = 120;
const GRACE_MAX_SECONDS: u64 = 3720;

/// What is left of the grace when the drain has used up its budget: for the
/// daemon to write what it holds, and for the companion to end.
const FLUSH_SECONDS: u64 = 30;

/// Builds the pod template.
pub fn template(project: &Valid<'_>, settings: &Settings, base: &Base) -> PodTemplateSpec {
    let mut labels = labels(project);
    if project.key.is_fork() {
        labels.insert(UNTRUSTED.to_owned(), "true".to_owned());
    }
    let toml = config::buildkitd_toml(base, project.spec.cache_volume_gi);
    let companion = settings.companion.as_deref();
    let confinement = Confinement::of(project, settings);
    let scheduling = &settings.scheduling;
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(labels),
            annotations: Some(annotations(toml, settings)),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            init_containers: companion
                .map(|image| vec![companion::container(image, confinement, drain_seconds(settings))]),
            containers: vec![daemon(project, settings, confinement)],
            volumes: Some(volumes(project, settings)),
            // Builds run code of strangers: nothing of the cluster is handed to the pod.
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            node_selector: Some(scheduling.selector(project.spec.arch)),
            tolerations: (!scheduling.tolerations.is_empty()).then(|| scheduling.tolerations.clone()),
            affinity: scheduling.affinity.clone(),
            image_pull_secrets: pull_secrets(settings),
            host_users: confinement.host_users(),
            runtime_class_name: confinement.runtime_class(),
            termination_grace_period_seconds: Some(i64::try_from(grace_seconds(settings)).unwrap_or(i64::MAX)),
            security_context: Some(confinement.pod_security()),
            ..PodSpec::default()
        }),
    }
}

fn annotations(toml: String, settings: &Settings) -> BTreeMap<String, String> {
    let mut annotations = BTreeMap::from([(CONFIG_ANNOTATION.to_owned(), toml)]);
    if !settings.registry_ca.is_empty() {
        annotations.insert(REGISTRY_CA_ANNOTATION.to_owned(), settings.registry_ca.clone());
    }
    annotations
}

fn pull_secrets(settings: &Settings) -> Option<Vec<LocalObjectReference>> {
    let secrets = settings.pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    (!settings.pull_secrets.is_empty()).then(|| secrets.collect())
}

/// How long a pod may take to end.
fn grace_seconds(settings: &Settings) -> u64 {
    (settings.max_build.as_secs() + GRACE_MARGIN_SECONDS).min(GRACE_MAX_SECONDS)
}

/// How much of that a running build may use.
fn drain_seconds(settings: &Settings) -> u64 {
    grace_seconds(settings) - FLUSH_SECONDS
}

fn daemon(project: &Valid<'_>, settings: &Settings, confinement: Confinement<'_>) -> Container {
    let mut mounts = vec![
        mount("cache", confinement.data_dir(), false),
        mount("run", RUNTIME_DIR, false),
        mount("certs", CERTS_DIR, true),
        mount("config", CONFIG_DIR, true),
    ];
    let (probes, lifecycle) = if settings.companion.is_some() {
        mounts.extend(companion::daemon_mounts());
        (companion::daemon_probes(), Some(companion::wait_idle(drain_seconds(settings))))
    } else {
        ([probe(1, 5, 120), probe(5, 5, 3), probe(30, 10, 6)], None)
    };
    let [startup, readiness, liveness] = probes;
    Container {
        name: "buildkitd".to_owned(),
        image: Some(confinement.image(settings)),
        args: Some(arguments(settings.port).into_iter().chain(confinement.arguments()).collect()),
        env: Some(variables(settings)),
        ports: Some(vec![ContainerPort {
            name: Some("buildkit".to_owned()),
            container_port: i32::from(settings.port),
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        startup_probe: Some(startup),
        readiness_probe: Some(readiness),
        liveness_probe: Some(liveness),
        lifecycle,
        resources: Some(resources(project, settings)),
        // Why it ended, in its own words: some causes show nowhere else.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts),
        security_context: Some(confinement.container_security()),
        ..Container::default()
    }
}

fn variables(settings: &Settings) -> Vec<EnvVar> {
    let mut variables = vec![variable("BUILDKIT_HOST", SOCKET), variable("XDG_RUNTIME_DIR", RUNTIME_DIR)];
    if !settings.registry_ca.is_empty() {
        variables.push(variable("SSL_CERT_DIR", CERTIFICATE_DIRS));
    }
    variables.extend(settings.proxy.iter().map(|(name, value)| variable(name, value)));
    variables
}

fn arguments(port: u16) -> Vec<String> {
    [
        "--addr",
        SOCKET,
        "--addr",
        // No address: every family that the pod has.
        &format!("tcp://:{port}"),
        "--tlscacert",
        "/certs/ca.pem",
        "--tlscert",
        "/certs/cert.pem",
        "--tlskey",
        "/certs/key.pem",
        "--config",
        "/etc/buildkit/buildkitd.toml",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Without a companion: the daemon answers its own API. Generous where a
/// failure would end builds.
fn probe(period: i32, timeout: i32, failures: i32) -> Probe {
    Probe {
        exec: Some(ExecAction { command: Some(["buildctl", "debug", "workers"].map(str::to_owned).to_vec()) }),
        period_seconds: Some(period),
        timeout_seconds: Some(timeout),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}

/// Requests always, so that the scheduler sees a daemon. No memory limit by
/// default: on cgroup v2 one hungry step would end the whole daemon.
fn resources(project: &Valid<'_>, settings: &Settings) -> ResourceRequirements {
    let asked = &project.spec.resources;
    let (cpu, memory) = match project.spec.tier {
        Tier::Hot => ("500m", "1Gi"),
        Tier::Warm => ("250m", "512Mi"),
    };
    let or = |asked: &Option<String>, tier: &str| Quantity(asked.as_deref().unwrap_or(tier).to_owned());
    let mut requests = BTreeMap::from([
        ("cpu".to_owned(), or(&settings.cpu_request, cpu)),
        ("memory".to_owned(), or(&settings.memory_request, memory)),
    ]);
    // A limit below our default request would be refused by the API server.
    for name in asked.limits.iter().flatten().map(|(name, _)| name) {
        requests.remove(name);
    }
    requests.extend(asked.requests.clone().unwrap_or_default());
    ResourceRequirements { requests: Some(requests), ..asked.clone() }
}

/// Keys of cert-manager's Secrets, and the names that the daemon is given.
const CERT_MANAGER_KEYS: [(&str, &str); 3] = [("ca.crt", "ca.pem"), ("tls.crt", "cert.pem"), ("tls.key", "key.pem")];

fn key_to_path((key, path): (&str, &str)) -> KeyToPath {
    KeyToPath { key: key.to_owned(), path: path.to_owned(), mode: None }
}

fn volumes(project: &Valid<'_>, settings: &Settings) -> Vec<Volume> {
    let mut volumes = vec![
        empty_dir("run"),
        Volume {
            name: "certs".to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(settings.certs_secret.clone()),
                items: settings.cert_manager_certs.then(|| CERT_MANAGER_KEYS.map(key_to_path).to_vec()),
                default_mode: Some(0o440),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        },
        Volume {
            name: "config".to_owned(),
            downward_api: Some(DownwardAPIVolumeSource {
                items: Some(files(settings)),
                ..DownwardAPIVolumeSource::default()
            }),
            ..Volume::default()
        },
    ];
    if settings.companion.is_some() {
        volumes.extend(companion::VOLUMES.map(empty_dir));
    }
    if settings.cache_kind == CacheKind::EmptyDir {
        volumes.push(bounded_dir("cache", project.spec.cache_volume_gi));
    }
    volumes
}

/// Annotations as files.
fn files(settings: &Settings) -> Vec<DownwardAPIVolumeFile> {
    let file = |path: &str, annotation: &str| DownwardAPIVolumeFile {
        path: path.to_owned(),
        field_ref: Some(ObjectFieldSelector {
            field_path: format!("metadata.annotations['{annotation}']"),
            ..ObjectFieldSelector::default()
        }),
        ..DownwardAPIVolumeFile::default()
    };
    let mut files = vec![file("buildkitd.toml", CONFIG_ANNOTATION)];
    if !settings.registry_ca.is_empty() {
        files.push(file("registry-ca.pem", REGISTRY_CA_ANNOTATION));
    }
    files
}

/// A volume of the pod that is a claim, as the StatefulSet's own controller
/// would add it.
pub fn claimed(name: &str, claim: &str) -> Volume {
    let source = PersistentVolumeClaimVolumeSource { claim_name: claim.to_owned(), ..Default::default() };
    Volume { name: name.to_owned(), persistent_volume_claim: Some(source), ..Volume::default() }
}

/// On the node's disk, of which it may take so much: beyond, the kubelet evicts
/// the pod before the node is full.
fn bounded_dir(name: &str, gib: i32) -> Volume {
    let source = EmptyDirVolumeSource { size_limit: Some(Quantity(format!("{gib}Gi"))), ..Default::default() };
    Volume { name: name.to_owned(), empty_dir: Some(source), ..Volume::default() }
}

fn empty_dir(name: &str) -> Volume {
    Volume { name: name.to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() }
}

fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None }
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_drain_ends_well_before_the_pod_is_killed() {
        for max_build in [1, 60, 600, 3600, 7200, 86_400] {
            let settings = Settings { max_build: Duration::from_secs(max_build), ..Settings::default() };
            let (grace, drain) = (grace_seconds(&settings), drain_seconds(&settings));
            assert!(drain < grace - 10, "{drain} of {grace}");
            assert!(grace == max_build + 120 || grace == 3720);
            assert!(drain > max_build || grace == 3720, "a build that may take {max_build} s gets {drain} s");
        }
    }
}
