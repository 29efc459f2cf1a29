//! What must hold of a cluster before the first write, and of an installation
//! afterwards.
//!
//! In: the rendered bundle, and what the API server showed. Out: a [`Report`]
//! of [`Finding`]s, each with a verdict, a hint and a place in the
//! documentation. Everything that decides is pure; [`ask`] is the shell that
//! asks the cluster.

pub mod access;
pub mod admission;
pub mod ask;
pub mod blame;
pub mod daemon;
pub mod dns;
pub mod facilities;
pub mod images;
pub mod namespaces;
pub mod pods;
pub mod role;
pub mod schema;
pub mod secrets;
pub mod storage;
pub mod understood;

use std::fmt;

use serde::Serialize;
use serde::ser::SerializeStruct as _;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It holds.
    Ok,
    /// An installation is possible; something will not work, or could not be looked at.
    Warn,
    /// An installation would not work.
    Fail,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        })
    }
}

/// What is checked, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Version of the API server.
    ServerVersion,
    /// What the installer may do.
    Permissions,
    /// Where caches are kept.
    StorageClass,
    /// Whether caches can grow.
    VolumeExpansion,
    /// Whether caches can be snapshotted.
    Snapshots,
    /// The runtime class of the sandbox.
    RuntimeClass,
    /// Whether a Service gets an address.
    LoadBalancer,
    /// Whether there are nodes for our pods.
    Nodes,
    /// Whether namespaces are there to stay.
    Namespaces,
    /// Quotas of the namespaces.
    Quota,
    /// Pod Security level of the namespaces.
    PodSecurity,
    /// Whether the API server takes our own pods.
    Pods,
    /// Whether it takes a daemon's pod, and as it is.
    DaemonPods,
    /// Custom resources against their schema.
    CustomResources,
    /// Whether the Secrets that others make are there and as they must be.
    Secrets,
    /// Whether the API server takes everything that would be written.
    Plan,
    /// Whether the installation is ready.
    Installation,
    /// Whether its certificates are valid.
    Certificates,
    /// Whether the routing API answers.
    Route,
    /// Whether names below the gateway's domains lead to the gateway.
    Dns,
}

impl Check {
    /// `storage-class`: also its heading in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::ServerVersion => "server-version",
            Self::Permissions => "permissions",
            Self::StorageClass => "storage-class",
            Self::VolumeExpansion => "volume-expansion",
            Self::Snapshots => "snapshots",
            Self::RuntimeClass => "runtime-class",
            Self::LoadBalancer => "load-balancer",
            Self::Nodes => "nodes",
            Self::Namespaces => "namespaces",
            Self::Quota => "quota",
            Self::PodSecurity => "pod-security",
            Self::Pods => "pods",
            Self::DaemonPods => "daemon-pods",
            Self::CustomResources => "custom-resources",
            Self::Secrets => "secrets",
            Self::Plan => "plan",
            Self::Installation => "installation",
            Self::Certificates => "certificates",
            Self::Route => "route",
            Self::Dns => "dns",
        }
    }

    /// Where it is explained.
    pub fn documentation(self) -> String {
        format!("docs/check.md#{}", self.name())
    }

    /// It holds.
    pub fn ok(self, message: impl Into<String>) -> Finding {
        Finding { check: self, verdict: Verdict::Ok, message: message.into(), hint: None }
    }

    /// Something will not work, or could not be looked at.
    pub fn warn(self, message: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { check: self, verdict: Verdict::Warn, message: message.into(), hint: Some(hint.into()) }
    }

    /// An installation would not work.
    pub fn fail(self, message: impl Into<String>, hint: impl Into<String>) -> Finding {
        Finding { check: self, verdict: Verdict::Fail, message: message.into(), hint: Some(hint.into()) }
    }

    /// What it needs may not be looked at.
    pub fn unseen(self, what: &str) -> Finding {
        self.warn(
            format!("not checked: you may not {what}"),
            "the rules of `bko-install cluster check --print-rbac` allow it; the installation itself does without",
        )
    }
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which check.
    pub check: Check,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found, on one line or more.
    pub message: String,
    /// How to mend it; never with verdict `ok`.
    pub hint: Option<String>,
}

impl Serialize for Finding {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut finding = serializer.serialize_struct("Finding", 5)?;
        finding.serialize_field("check", &self.check)?;
        finding.serialize_field("verdict", &self.verdict)?;
        finding.serialize_field("message", &self.message)?;
        finding.serialize_field("hint", &self.hint)?;
        finding.serialize_field("documentation", &self.check.documentation())?;
        finding.end()
    }
}

/// `fail  storage-class: …`, and the hint below.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<5} {}: {}", self.verdict, self.check.name(), self.message.replace('\n', "\n      "))?;
        if let Some(hint) = &self.hint {
            write!(f, "\n      {hint} ({})", self.check.documentation())?;
        }
        Ok(())
    }
}

/// What all checks found, in the order of [`Check`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The findings; a check may have several.
    pub findings: Vec<Finding>,
}

impl Report {
    /// In the order of the checks, and the worst of each first.
    pub fn new(mut findings: Vec<Finding>) -> Self {
        findings.sort_by(|a, b| (a.check, b.verdict).cmp(&(b.check, a.verdict)));
        Self { findings }
    }

    /// The worst verdict.
    pub fn verdict(&self) -> Verdict {
        self.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok)
    }

    /// The findings of a verdict.
    pub fn with(&self, verdict: Verdict) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |finding| finding.verdict == verdict)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.findings.iter().try_for_each(|finding| writeln!(f, "{finding}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_from_top_to_bottom_and_its_json_has_a_link() {
        let report = Report::new(vec![
            Check::Dns.warn("nothing\nat all", "make a record"),
            Check::StorageClass.ok("\"fast\""),
            Check::StorageClass.fail("none", "choose one"),
        ]);
        assert_eq!(report.verdict(), Verdict::Fail);
        assert_eq!(
            report.to_string(),
            "fail  storage-class: none\n      choose one (docs/check.md#storage-class)\n\
             ok    storage-class: \"fast\"\n\
             warn  dns: nothing\n      at all\n      make a record (docs/check.md#dns)\n"
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["findings"][2]["documentation"], "docs/check.md#dns");
        assert_eq!(
            (&json["findings"][0]["check"], &json["findings"][0]["verdict"]),
            (&"storage-class".into(), &"fail".into())
        );
    }
}
