//! Which permissions are needed for what, and what is found of them. Pure.
//!
//! One list for everything that asks: commands before their first write,
//! `cluster check`, and `--print-rbac`.

mod needs;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Check, Finding};

pub use needs::{
    Besides, Known, Plurals, adoption, identities, install, is_role, plurals, pod_namespaces, rotation, uninstall,
};

/// Namespace in which objects are tried whose own does not exist yet.
pub const STAND_IN: &str = "default";

/// What stands for every group, resource, or verb.
pub const EVERYTHING: &str = "*";

/// One thing that somebody may do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// Where; everywhere, and what is in no namespace, when absent.
    pub namespace: Option<String>,
    /// API group; empty for the core group.
    pub group: String,
    /// `deployments`, `pods/log`.
    pub resource: String,
    /// The object; any when absent.
    pub name: Option<String>,
    /// `patch`.
    pub verb: String,
}

/// What permissions are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Purpose {
    /// Install, upgrade, and prune what an upgrade no longer has
    Init,
    /// Go back to any recorded revision
    Rollback,
    /// Uninstall, and leave caches
    Uninstall,
    /// Delete the caches, too
    DeleteCaches,
    /// Replace the certificate authority
    Rotate,
    /// Take over a release of Helm, and give it back
    Adopt,
}

impl Purpose {
    /// What `--print-rbac` prints unless it is told otherwise: what takes
    /// nothing that is not ours.
    pub const USUAL: [Self; 4] = [Self::Init, Self::Rollback, Self::Uninstall, Self::Rotate];

    /// The option that prints the roles for these, without taking the usual
    /// ones away from who has them.
    pub fn printed_by(purposes: &[Self]) -> String {
        let more: BTreeSet<&Self> = purposes.iter().filter(|purpose| !Self::USUAL.contains(purpose)).collect();
        if more.is_empty() {
            return "--print-rbac".to_owned();
        }
        let names: Vec<String> = Self::USUAL.iter().chain(more).map(ToString::to_string).collect();
        format!("--print-rbac={}", names.join(","))
    }
}

/// As the command line calls it.
impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Init => "init",
            Self::Rollback => "rollback",
            Self::Uninstall => "uninstall",
            Self::DeleteCaches => "delete-caches",
            Self::Rotate => "rotate",
            Self::Adopt => "adopt",
        })
    }
}

/// What is needed, and for what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// To do it.
    pub install: BTreeSet<Permission>,
    /// To grant: nobody may give away what they do not have.
    pub grants: BTreeSet<Permission>,
    /// To look at the cluster before; an installation is possible without.
    pub checks: BTreeSet<Permission>,
}

impl Needs {
    /// What is needed to do something that grants nothing.
    pub fn of(install: BTreeSet<Permission>) -> Self {
        Self { install, ..Self::default() }
    }

    /// Adds what is needed for something else.
    pub fn extend(&mut self, other: Self) {
        self.install.extend(other.install);
        self.grants.extend(other.grants);
        self.checks.extend(other.checks);
    }

    /// Everything, with what stands for having all that is granted.
    pub fn all(&self) -> BTreeSet<Permission> {
        let places: BTreeSet<Option<&str>> = self.grants.iter().map(|grant| grant.namespace.as_deref()).collect();
        let escalation = places.into_iter().flat_map(escalation);
        self.install.iter().chain(&self.grants).chain(&self.checks).cloned().chain(escalation).collect()
    }
}

/// What may lack a permission: `deployments.apps`, with names when it is about
/// some objects only.
impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, resource(&self.group, &self.resource))?;
        if let Some(name) = &self.name {
            write!(f, " \"{name}\"")?;
        }
        f.write_str(&place(self.namespace.as_deref()))
    }
}

fn resource(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

fn place(namespace: Option<&str>) -> String {
    namespace.map_or_else(|| " in the whole cluster".to_owned(), |namespace| format!(" in namespace \"{namespace}\""))
}

/// What is lacking of one resource.
#[derive(Default)]
struct Lacking<'a> {
    verbs: BTreeSet<&'a str>,
    /// Of the objects that it is about; nothing when it is about any.
    names: BTreeSet<&'a str>,
}

/// One line for each resource: `create, patch deployments.apps in namespace "x"`.
fn lines(lacking: &BTreeSet<&Permission>) -> Vec<String> {
    let mut by_resource: BTreeMap<(Option<&str>, &str, &str), Lacking<'_>> = BTreeMap::new();
    for permission in lacking {
        let key = (permission.namespace.as_deref(), permission.group.as_str(), permission.resource.as_str());
        let Lacking { verbs, names } = by_resource.entry(key).or_default();
        verbs.insert(&permission.verb);
        names.extend(permission.name.as_deref());
    }
    let line = |((namespace, group, name), Lacking { verbs, names })| {
        let verbs = verbs.into_iter().collect::<Vec<_>>().join(", ");
        let names: Vec<String> = names.into_iter().map(|name| format!(" \"{name}\"")).collect();
        let names = if names.len() > 3 { String::new() } else { names.join(",") };
        format!("{verbs} {}{names}{}", resource(group, name), place(namespace))
    };
    by_resource.into_iter().map(line).collect()
}

/// What is found of the permissions. `user` is who asks, `lacking` what they
/// may not, `purposes` what it is asked for.
pub fn judge(needs: &Needs, lacking: &BTreeSet<Permission>, user: &str, purposes: &[Purpose]) -> Vec<Finding> {
    let missing = |wanted: &BTreeSet<Permission>| {
        let missing: BTreeSet<Permission> = wanted.intersection(lacking).cloned().collect();
        missing
    };
    let mut findings = Vec::new();
    let list = |missing: &BTreeSet<Permission>| {
        let lines = lines(&missing.iter().collect());
        let separator = if lines.len() == 1 { " may not " } else { " may not\n- " };
        format!("{user}{separator}{}", lines.join("\n- "))
    };
    let install = missing(&needs.install);
    let account = user.strip_prefix("user \"system:serviceaccount:").and_then(|rest| rest.strip_suffix('"'));
    let account = account.map_or_else(|| "NAMESPACE/NAME".to_owned(), |account| account.replacen(':', "/", 1));
    let hint = format!(
        "let {user} do so: somebody who may runs `bko-install cluster check {} --service-account {account} | kubectl \
         apply --server-side -f -`",
        Purpose::printed_by(purposes)
    );
    if !install.is_empty() {
        findings.push(Check::Permissions.fail(list(&install), hint.clone()));
    }
    let grants = missing(&needs.grants);
    let unbound: BTreeSet<Permission> = grants.iter().filter(|grant| !may_escalate(grant, lacking)).cloned().collect();
    if !unbound.is_empty() {
        let message = format!("nobody may give away what they do not have, and our Roles give it: {}", list(&unbound));
        findings.push(Check::Permissions.fail(message, hint));
    }
    let checks = missing(&needs.checks);
    if !checks.is_empty() {
        let hint = "the rules of `bko-install cluster check --print-rbac` allow it; the installation does without";
        findings.push(Check::Permissions.warn(format!("for the checks, {}", list(&checks)), hint));
    }
    if findings.is_empty() {
        let all = needs.install.len() + needs.grants.len() + needs.checks.len();
        findings.push(Check::Permissions.ok(format!("{user} may do all {all} things that it takes")));
    }
    findings
}

/// The two verbs that stand for having all rules, in a namespace.
pub fn escalation(namespace: Option<&str>) -> [Permission; 2] {
    let resource = if namespace.is_some() { "roles" } else { "clusterroles" };
    ["escalate", "bind"].map(|verb| Permission {
        namespace: namespace.map(str::to_owned),
        group: "rbac.authorization.k8s.io".into(),
        resource: resource.into(),
        name: None,
        verb: verb.into(),
    })
}

fn may_escalate(grant: &Permission, lacking: &BTreeSet<Permission>) -> bool {
    escalation(grant.namespace.as_deref()).iter().all(|permission| !lacking.contains(permission))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permission(verb: &str, name: Option<&str>) -> Permission {
        Permission {
            namespace: Some("farm".into()),
            group: "apps".into(),
            resource: "deployments".into(),
            name: name.map(str::to_owned),
            verb: verb.into(),
        }
    }

    #[test]
    fn what_is_lacking_is_told_once_for_each_resource() {
        let needs = Needs {
            install: [permission("create", None), permission("patch", Some("a")), permission("patch", Some("b"))]
                .into(),
            ..Needs::default()
        };
        let findings = judge(&needs, &needs.install.clone(), "user \"x\"", &[Purpose::Init]);
        assert_eq!(
            findings[0].message,
            "user \"x\" may not create, patch deployments.apps \"a\", \"b\" in namespace \"farm\""
        );
        assert_eq!(
            judge(&needs, &BTreeSet::new(), "user \"x\"", &[Purpose::Init])[0].verdict,
            super::super::Verdict::Ok
        );
    }

    #[test]
    fn who_may_escalate_need_not_have_what_is_granted() {
        let needs = Needs { grants: [permission("get", None)].into(), ..Needs::default() };
        let without = needs.grants.clone();
        assert!(judge(&needs, &without, "x", &[]).iter().all(|finding| finding.verdict != super::super::Verdict::Fail));
        let mut with = without;
        with.extend(escalation(Some("farm")));
        assert_eq!(judge(&needs, &with, "x", &[])[0].verdict, super::super::Verdict::Fail);
    }
}
