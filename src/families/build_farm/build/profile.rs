//! How a daemon is confined: what differs between the security profiles, and
//! the sandbox of untrusted builds. Pure.

use k8s_openapi::api::core::v1::{AppArmorProfile, PodSecurityContext, SeccompProfile, SecurityContext};

use super::super::api::SecurityProfile;
use super::super::settings::{Sandbox, Settings};
use super::super::validate::Valid;

/// User and group of the rootless image.
const ROOTLESS_ID: i64 = 1000;

/// How one daemon is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confinement<'a> {
    /// An ordinary user, with a user namespace that the daemon makes itself.
    Rootless,
    /// Root in a user namespace that the kubelet makes, and so nobody outside.
    Userns,
    /// Root on the node.
    Privileged,
    /// Root in a machine of its own, which the runtime class makes.
    Sandboxed(&'a Sandbox),
}

impl<'a> Confinement<'a> {
    /// Untrusted builds go to the sandbox when there is one, whatever the
    /// project's own profile.
    pub fn of(project: &Valid<'_>, settings: &'a Settings) -> Self {
        match (&settings.sandbox, project.spec.security_profile) {
            (Some(sandbox), _) if project.key.is_fork() => Self::Sandboxed(sandbox),
            (_, SecurityProfile::Rootless) => Self::Rootless,
            (_, SecurityProfile::Userns) => Self::Userns,
            (_, SecurityProfile::Privileged) => Self::Privileged,
        }
    }

    /// The rootless image, or its sibling for root.
    pub fn image(self, settings: &Settings) -> String {
        match self {
            Self::Rootless => settings.daemon_image.clone(),
            Self::Sandboxed(Sandbox { image: Some(image), .. }) => image.clone(),
            Self::Userns | Self::Privileged | Self::Sandboxed(_) => rootful(&settings.daemon_image),
        }
    }

    /// Where the daemon keeps its cache.
    pub fn data_dir(self) -> &'static str {
        if self == Self::Rootless { "/home/user/.local/share/buildkit" } else { "/var/lib/buildkit" }
    }

    /// Arguments beside those that every daemon has.
    pub fn arguments(self) -> impl Iterator<Item = String> {
        // Without privileges there is no second process namespace to be had.
        (self == Self::Rootless).then(|| "--oci-worker-no-process-sandbox".to_owned()).into_iter()
    }

    /// `false`: root in the pod is nobody on the node.
    pub fn host_users(self) -> Option<bool> {
        (self == Self::Userns).then_some(false)
    }

    /// The runtime that makes the sandbox.
    pub fn runtime_class(self) -> Option<String> {
        match self {
            Self::Sandboxed(sandbox) => Some(sandbox.runtime_class.clone()),
            Self::Rootless | Self::Userns | Self::Privileged => None,
        }
    }

    /// User and group of the daemon, and of the companion that reads its files.
    pub fn user(self) -> i64 {
        if self == Self::Rootless { ROOTLESS_ID } else { 0 }
    }

    /// Who the pod's containers run as, and who owns the cache.
    pub fn pod_security(self) -> PodSecurityContext {
        let id = self.user();
        PodSecurityContext {
            run_as_user: Some(id),
            run_as_group: Some(id),
            fs_group: Some(id),
            fs_group_change_policy: Some("OnRootMismatch".to_owned()),
            ..PodSecurityContext::default()
        }
    }

    /// What the daemon's container may do.
    pub fn container_security(self) -> SecurityContext {
        if self != Self::Rootless {
            // runc needs mounts and a writable cgroup tree. In a user namespace
            // or a sandbox these are privileges over that alone.
            return SecurityContext { privileged: Some(true), ..SecurityContext::default() };
        }
        // rootlesskit makes a user namespace of its own and mounts within it,
        // which the default seccomp and AppArmor profiles forbid, and calls
        // newuidmap, which allowPrivilegeEscalation: false would break.
        SecurityContext {
            seccomp_profile: Some(SeccompProfile { type_: "Unconfined".to_owned(), ..SeccompProfile::default() }),
            app_armor_profile: Some(AppArmorProfile { type_: "Unconfined".to_owned(), ..AppArmorProfile::default() }),
            ..SecurityContext::default()
        }
    }
}

/// The image for root beside a rootless one: the tag without its ending. A
/// digest names the rootless image, so it goes too.
fn rootful(image: &str) -> String {
    let tagged = image.split('@').next().unwrap_or(image);
    tagged.strip_suffix("-rootless").unwrap_or(image).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_for_root_is_the_sibling_of_the_rootless_one() {
        for (image, sibling) in [
            ("docker.io/moby/buildkit:v0.34.2-rootless", "docker.io/moby/buildkit:v0.34.2"),
            ("buildkit:v1-rootless@sha256:abc", "buildkit:v1"),
            ("buildkit:v1@sha256:abc", "buildkit:v1@sha256:abc"),
            ("localhost:5000/moby-rootless/buildkit:v1", "localhost:5000/moby-rootless/buildkit:v1"),
        ] {
            assert_eq!(rootful(image), sibling);
        }
    }
}
