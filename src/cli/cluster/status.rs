//! `bko-install cluster status`.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, OutputArgs, report};
use super::{LimitArgs, WhereArgs, bundle, session};
use crate::install::{self, ComponentStatus, Installation, Status};
use crate::plan::Progress;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Print components, levels, readiness and drift.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Which installation.
    #[command(flatten)]
    pub place: WhereArgs,
    /// How to print the status.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: LimitArgs,
}

pub(super) async fn run(args: StatusArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, args.limits.concurrency, TIMEOUT, report::warnings(global)).await?;
    let Some(wanted) = bundle::installed(&cluster, &args.place.bundle()).await? else {
        if args.output.output == Output::Json {
            report::print_json(&serde_json::json!({ "installed": false }))?;
        }
        let error = anyhow::anyhow!("nothing is installed in this cluster");
        return Err(Failure::new(Code::NotReady, error).hint("install it with `bko-install cluster init`"));
    };
    let Some(record) = wanted.record else { return Err(Failure::silent(Code::NotReady)) };
    let installation = Installation::of(wanted.rendered, wanted.settings);
    let status = install::status(&cluster, &installation, &record).await.map_err(session::failure)?;
    match args.output.output {
        Output::Json => report::print_json(&status)?,
        Output::Text => report::print(&text(&status))?,
    }
    if status.is_ready() { Ok(()) } else { Err(Failure::silent(Code::NotReady)) }
}

fn text(status: &Status) -> String {
    let mut out = format!("profile {}, version {}, image {}\n", status.profile, status.version, status.image);
    let state = match status.state {
        Progress::Installed => "installed".to_owned(),
        Progress::Applying => "the last run was cut off, or is still at work".to_owned(),
        Progress::Uninstalling => "being uninstalled, or that was cut off".to_owned(),
        Progress::Failed => {
            let why = status.message.as_deref().unwrap_or("unknown reason");
            format!("the last run failed: {}", why.lines().next().unwrap_or_default())
        }
    };
    let _ = writeln!(out, "{state}, namespace {}", status.namespace);
    for level in &status.levels {
        for component in &level.components {
            let _ = writeln!(out, "{}  {:<20} {}", level.runlevel, component.name, readiness(component));
            for object in &component.pending {
                let _ = writeln!(out, "       {}: {}", object.object, object.why);
            }
        }
    }
    if !status.missing.is_empty() {
        let _ = writeln!(out, "missing: {}", objects(status.missing.len(), "does not exist", "do not exist"));
        for object in &status.missing {
            let _ = writeln!(out, "  {object}");
        }
    }
    if !status.drift.is_empty() {
        let are = objects(status.drift.len(), "is not as it was installed", "are not as they were installed");
        let _ = writeln!(out, "drift: {are}");
        status.drift.iter().for_each(|change| out.push_str(&change.to_string()));
    }
    out
}

fn readiness(component: &ComponentStatus) -> String {
    let waiting = component.pending.iter().filter(|object| !object.optional).count();
    match (waiting, component.objects) {
        (0, 1) => "ready (1 object)".to_owned(),
        (0, all) => format!("ready ({all} objects)"),
        (waiting, all) => format!("not ready ({} of {all} objects ready)", all.saturating_sub(waiting)),
    }
}

fn objects(count: usize, one: &str, many: &str) -> String {
    if count == 1 { format!("1 object {one}") } else { format!("{count} objects {many}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::{LevelStatus, ObjectStatus};
    use crate::manifest::{ObjectId, Runlevel};

    fn object(name: &str) -> ObjectId {
        let (group, version, kind) = (String::new(), "v1".into(), "Secret".into());
        ObjectId { group, version, kind, namespace: Some("farm".into()), name: name.into() }
    }

    #[test]
    fn what_does_not_exist_is_missing_and_no_drift() {
        let pending = |name| ObjectStatus { object: object(name), why: "does not exist".into(), optional: false };
        let component = ComponentStatus { name: "farm".into(), objects: 3, pending: vec![pending("a"), pending("b")] };
        let status = Status {
            installed: true,
            state: Progress::Failed,
            message: Some("broke".into()),
            profile: "default".into(),
            version: "1".into(),
            namespace: "farm".into(),
            image: "i".into(),
            levels: vec![LevelStatus { runlevel: Runlevel::Rc0, components: vec![component] }],
            missing: vec![object("a"), object("b")],
            drift: Vec::new(),
        };
        let text = text(&status);
        assert!(text.contains("not ready (1 of 3 objects ready)\n"), "{text}");
        assert!(text.contains("missing: 2 objects do not exist\n  Secret farm/a\n  Secret farm/b\n"), "{text}");
        assert!(!text.contains("drift"), "{text}");
    }
}
