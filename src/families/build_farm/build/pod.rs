//! The pod of a daemon: a stock `buildkitd`, confined as far as it can be. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource, EnvVar, ExecAction,
    ObjectFieldSelector, PodSpec, PodTemplateSpec, Probe, ResourceRequirements, SecretVolumeSource, Volume,
    VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::api::Tier;
use super::super::settings::Settings;
use super::super::validate::Valid;
use super::config::Base;
use super::profile::Confinement;
use super::{UNTRUSTED, config, labels};

const RUNTIME_DIR: &str = "/run/user/1000";
const SOCKET: &str = "unix:///run/user/1000/buildkit/buildkitd.sock";
const CERTS_DIR: &str = "/certs";
const CONFIG_DIR: &str = "/etc/buildkit";

/// Annotation that carries `buildkitd.toml`; mounted as a file through the
/// downward API. So the configuration is a part of the template: one object
/// and one hash, and no daemon ever runs with half of a change.
pub const CONFIG_ANNOTATION: &str = "buildkit-operator.socialgouv.github.io/buildkitd.toml";

/// Longest grace that a daemon gets beyond its build, and in all.
const GRACE_MARGIN_SECONDS: u64 = 120;
const GRACE_MAX_SECONDS: u64 = 3720;

/// Builds the pod template.
pub fn template(project: &Valid<'_>, settings: &Settings, base: &Base) -> PodTemplateSpec {
    let mut labels = labels(project);
    if project.key.is_fork() {
        labels.insert(UNTRUSTED.to_owned(), "true".to_owned());
    }
    let toml = config::buildkitd_toml(base, project.spec.cache_volume_gi);
    let grace = (settings.max_build.as_secs() + GRACE_MARGIN_SECONDS).min(GRACE_MAX_SECONDS);
    let confinement = Confinement::of(project, settings);
    let scheduling = &settings.scheduling;
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(labels),
            annotations: Some(BTreeMap::from([(CONFIG_ANNOTATION.to_owned(), toml)])),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            containers: vec![daemon(project, settings, confinement)],
            volumes: Some(volumes(settings)),
            // Builds run code of strangers: nothing of the cluster is handed to the pod.
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            node_selector: Some(scheduling.selector(project.spec.arch)),
            tolerations: (!scheduling.tolerations.is_empty()).then(|| scheduling.tolerations.clone()),
            affinity: scheduling.affinity.clone(),
            host_users: confinement.host_users(),
            runtime_class_name: confinement.runtime_class(),
            termination_grace_period_seconds: Some(i64::try_from(grace).unwrap_or(i64::MAX)),
            security_context: Some(confinement.pod_security()),
            ..PodSpec::default()
        }),
    }
}

fn daemon(project: &Valid<'_>, settings: &Settings, confinement: Confinement<'_>) -> Container {
    Container {
        name: "buildkitd".to_owned(),
        image: Some(confinement.image(settings)),
        args: Some(arguments(settings.port).into_iter().chain(confinement.arguments()).collect()),
        env: Some(vec![variable("BUILDKIT_HOST", SOCKET), variable("XDG_RUNTIME_DIR", RUNTIME_DIR)]),
        ports: Some(vec![ContainerPort {
            name: Some("buildkit".to_owned()),
            container_port: i32::from(settings.port),
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        startup_probe: Some(probe(1, 5, 120)),
        readiness_probe: Some(probe(5, 5, 3)),
        liveness_probe: Some(probe(30, 10, 6)),
        resources: Some(resources(project)),
        volume_mounts: Some(vec![
            mount("cache", confinement.data_dir(), false),
            mount("run", RUNTIME_DIR, false),
            mount("certs", CERTS_DIR, true),
            mount("config", CONFIG_DIR, true),
        ]),
        security_context: Some(confinement.container_security()),
        ..Container::default()
    }
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

/// The daemon answers its own API. Generous where a failure would end builds.
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
fn resources(project: &Valid<'_>) -> ResourceRequirements {
    let asked = &project.spec.resources;
    let (cpu, memory) = match project.spec.tier {
        Tier::Hot => ("500m", "1Gi"),
        Tier::Warm => ("250m", "512Mi"),
    };
    let mut requests = BTreeMap::from([
        ("cpu".to_owned(), Quantity(cpu.to_owned())),
        ("memory".to_owned(), Quantity(memory.to_owned())),
    ]);
    // A limit below our default request would be refused by the API server.
    for name in asked.limits.iter().flatten().map(|(name, _)| name) {
        requests.remove(name);
    }
    requests.extend(asked.requests.clone().unwrap_or_default());
    ResourceRequirements { requests: Some(requests), ..asked.clone() }
}

fn volumes(settings: &Settings) -> Vec<Volume> {
    vec![
        Volume { name: "run".to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() },
        Volume {
            name: "certs".to_owned(),
            secret: Some(SecretVolumeSource {
                secret_name: Some(settings.certs_secret.clone()),
                default_mode: Some(0o440),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        },
        Volume {
            name: "config".to_owned(),
            downward_api: Some(DownwardAPIVolumeSource {
                items: Some(vec![DownwardAPIVolumeFile {
                    path: "buildkitd.toml".to_owned(),
                    field_ref: Some(ObjectFieldSelector {
                        field_path: format!("metadata.annotations['{CONFIG_ANNOTATION}']"),
                        ..ObjectFieldSelector::default()
                    }),
                    ..DownwardAPIVolumeFile::default()
                }]),
                ..DownwardAPIVolumeSource::default()
            }),
            ..Volume::default()
        },
    ]
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
