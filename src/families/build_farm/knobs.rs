//! Which setting of a node keeps a rootless daemon from starting, from the last
//! words of the daemon. Pure.

/// What a daemon says, and what to do about it.
const KNOBS: [(&[&str], &str); 6] = [
    (
        &["newuidmap", "uid_map failed: Operation not permitted"],
        "newuidmap may not raise its privileges: allow privilege escalation to daemons (no policy may force \
         allowPrivilegeEscalation: false, and /usr/bin/newuidmap of the image must be setuid)",
    ),
    (&["newuidmap", "executable file not found"], "the image has no newuidmap: use one whose tag ends in -rootless"),
    (
        &["no subuid ranges found"],
        "the image has no subordinate ids for this user: use one whose tag ends in -rootless, which runs as 1000",
    ),
    (
        &["/proc/self/exe", "operation not permitted"],
        "the node lets no ordinary user make user namespaces: sysctl -w \
         kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 23.10 and later), or \
         kernel.unprivileged_userns_clone=1 (Debian), or use securityProfile: userns",
    ),
    (
        &["/proc/self/exe", "no space left on device"],
        "the node allows no user namespaces: sysctl -w user.max_user_namespaces=28633",
    ),
    (
        &["failed to share mount point"],
        "AppArmor or seccomp forbids mounts to the daemon: the node must let pods be Unconfined, or use \
         securityProfile: userns",
    ),
];

/// What to change so that a daemon that ended with these words starts.
pub fn advice(words: &str) -> Option<&'static str> {
    KNOBS.iter().find(|(said, _)| said.iter().all(|part| words.contains(part))).map(|(_, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `rootlesskit` 3 says it where the knob is so.
    #[test]
    fn the_setting_is_named() {
        for (words, named) in [
            (
                "[rootlesskit:parent] error: failed to setup UID/GID map: newuidmap 29438 [0 65534 1 1 300000 65536] \
                 failed: newuidmap: write to uid_map failed: Operation not permitted\n: exit status 1",
                "allowPrivilegeEscalation",
            ),
            (
                "[rootlesskit:parent] error: failed to setup UID/GID map: newuidmap 29532 [0 65534 1 1 300000 65536] \
                 failed: : exec: \"newuidmap\": executable file not found in $PATH",
                "no newuidmap",
            ),
            (
                "[rootlesskit:parent] error: failed to setup UID/GID map: failed to compute uid/gid map: no subuid \
                 ranges found for user 65534 (\"nobody\")",
                "subordinate ids",
            ),
            (
                "[rootlesskit:parent] error: failed to start the child: fork/exec /proc/self/exe: operation not \
                 permitted",
                "apparmor_restrict_unprivileged_userns",
            ),
            (
                "[rootlesskit:parent] error: failed to start the child: fork/exec /proc/self/exe: no space left on \
                 device",
                "user.max_user_namespaces",
            ),
            ("[rootlesskit:child ] error: failed to share mount point: /: permission denied", "AppArmor"),
        ] {
            assert!(advice(words).is_some_and(|advice| advice.contains(named)), "{words}");
        }
        assert_eq!(advice("buildkitd: invalid value \"x\" for flag"), None);
    }
}
