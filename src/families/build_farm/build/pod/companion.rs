//! The companion in the daemon's pod: a native sidecar that knows whether a
//! build runs, so that probes and the end of the pod can ask it. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, ExecAction, HTTPGetAction, Lifecycle, LifecycleHandler, Probe,
    ResourceRequirements, SeccompProfile, SecurityContext, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::super::profile::Confinement;
use super::{RUNTIME_DIR, SOCKET, mount};

/// Name of the sidecar.
pub const COMPANION: &str = "companion";

/// Port of its read-only HTTP.
pub const COMPANION_PORT: u16 = 8080;

/// Its own volumes: the control socket, and the executable for the hook. Build
/// steps have neither.
pub(super) const VOLUMES: [&str; 2] = [COMPANION, "companion-bin"];

const CONTROL_DIR: &str = "/run/companion";
const CONTROL_SOCKET: &str = "--control-socket=/run/companion/control.sock";
const BIN_DIR: &str = "/run/companion-bin";

/// The sidecar. It has no startup probe: the daemon need not wait for it.
pub(super) fn container(image: &str, confinement: Confinement<'_>, drain_seconds: u64) -> Container {
    let user = confinement.user();
    Container {
        name: COMPANION.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        restart_policy: Some("Always".to_owned()),
        args: Some(vec![
            "companion".to_owned(),
            format!("--buildkit-addr={SOCKET}"),
            format!("--cache-dir={}", confinement.data_dir()),
            format!("--listen=:{COMPANION_PORT}"),
            CONTROL_SOCKET.to_owned(),
            format!("--install-to={BIN_DIR}"),
            format!("--drain-seconds={drain_seconds}"),
            "--log-format=json".to_owned(),
        ]),
        ports: Some(vec![ContainerPort {
            name: Some(COMPANION.to_owned()),
            container_port: i32::from(COMPANION_PORT),
            protocol: Some("TCP".to_owned()),
            ..ContainerPort::default()
        }]),
        liveness_probe: Some(probe("/healthz", 30, 10, 6)),
        resources: Some(ResourceRequirements {
            requests: Some(BTreeMap::from([
                ("cpu".to_owned(), Quantity("10m".to_owned())),
                ("memory".to_owned(), Quantity("32Mi".to_owned())),
            ])),
            ..ResourceRequirements::default()
        }),
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        // As the daemon's user, whose socket and files it reads.
        security_context: Some(SecurityContext {
            run_as_user: Some(user),
            run_as_group: Some(user),
            run_as_non_root: (user != 0).then_some(true),
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Capabilities::default() }),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), ..SeccompProfile::default() }),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(vec![
            mount("run", RUNTIME_DIR, false),
            mount("cache", confinement.data_dir(), false),
            mount(VOLUMES[0], CONTROL_DIR, false),
            mount(VOLUMES[1], BIN_DIR, false),
        ]),
        ..Container::default()
    }
}

/// What the daemon's container needs for its hook.
pub(super) fn daemon_mounts() -> [VolumeMount; 2] {
    [mount(VOLUMES[0], CONTROL_DIR, true), mount(VOLUMES[1], BIN_DIR, true)]
}

/// Startup, readiness and liveness of the daemon, asked of the companion, which
/// answers at once however busy the daemon is. Liveness never fails while a
/// build is active.
pub(super) fn daemon_probes() -> [Probe; 3] {
    [probe("/livez", 1, 5, 120), probe("/readyz", 5, 5, 3), probe("/livez", 30, 10, 6)]
}

/// The daemon's container ends when no build runs in it any more.
pub(super) fn wait_idle(drain_seconds: u64) -> Lifecycle {
    let command = [
        &format!("{BIN_DIR}/{}", crate::companion::hook::EXECUTABLE),
        "companion",
        "wait-idle",
        CONTROL_SOCKET,
        &format!("--buildkit-addr={SOCKET}"),
        &format!("--drain-seconds={drain_seconds}"),
    ];
    let exec = ExecAction { command: Some(command.map(str::to_owned).to_vec()) };
    Lifecycle {
        pre_stop: Some(LifecycleHandler { exec: Some(exec), ..LifecycleHandler::default() }),
        ..Lifecycle::default()
    }
}

fn probe(path: &str, period: i32, timeout: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(i32::from(COMPANION_PORT)),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period),
        timeout_seconds: Some(timeout),
        failure_threshold: Some(failures),
        ..Probe::default()
    }
}
