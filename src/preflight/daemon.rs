//! The daemons' pods as the controller that is to be installed would make them.
//! Pure: what the server is told is read from its rendered arguments.

use clap::Parser as _;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

use super::pods::Trial;
use crate::cli::{Cli, Command};
use crate::families::build_farm::api::{BuildProject, BuildProjectSpec, SecurityProfile};
use crate::families::build_farm::build::config::Base;
use crate::families::build_farm::build::{build, pod};
use crate::families::build_farm::settings::Settings;
use crate::families::build_farm::validate::validate;
use crate::key::Arch;
use crate::manifest::Rendered;

/// Key of the project that a daemon is tried for.
const KEY: &str = "preflight";

/// What the server of this installation is told; nothing when none is installed.
pub fn settings(rendered: &Rendered) -> Option<Settings> {
    let arguments = rendered.objects.iter().filter(|object| object.id.kind == "Deployment").find_map(|object| {
        let arguments = object.body.pointer("/spec/template/spec/containers/0/args")?.as_array()?;
        let arguments: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
        arguments.iter().any(|argument| argument.contains("controller")).then_some(arguments)
    })?;
    // These files exist in the pod only.
    let files = ["--project-defaults-config", "--registry-ca-file"];
    let arguments = arguments.into_iter().filter(|argument| !files.iter().any(|flag| argument.starts_with(flag)));
    let cli = Cli::try_parse_from([crate::names::INSTALLER_MANAGER].into_iter().chain(arguments)).ok()?;
    let Command::Server(command) = cli.command else { return None };
    Settings::try_from(&command.server.farm).ok()
}

/// The pods to try: of a trusted build, and of an untrusted one where that has
/// a sandbox.
pub fn trials(settings: &Settings) -> Vec<Trial> {
    let mut keys = vec![("daemon", KEY.to_owned())];
    if settings.sandbox.is_some() {
        keys.push(("daemon of untrusted builds", format!("fork{KEY}")));
    }
    keys.into_iter().filter_map(|(what, key)| trial(settings, what, &key)).collect()
}

fn trial(settings: &Settings, what: &str, key: &str) -> Option<Trial> {
    let spec: BuildProjectSpec = serde_json::from_value(serde_json::json!({
        "key": key,
        "arch": Arch::Amd64,
        "cacheVolumeGi": settings.cache_volume_gi,
        "securityProfile": SecurityProfile::default(),
    }))
    .ok()?;
    let project = BuildProject::new(key, spec);
    let valid = validate(&project).ok()?;
    let resources = build(&valid, settings, &Base::default());
    let set = resources.stateful_set.spec?;
    let mut template: PodTemplateSpec = set.template;
    // As the StatefulSet controller does for each claim template.
    if let Some(spec) = &mut template.spec {
        let claims = set.volume_claim_templates.into_iter().flatten().filter_map(|claim| claim.metadata.name);
        spec.volumes.get_or_insert_default().extend(claims.map(|name| pod::claimed(&name, &valid.key.cache_claim())));
    }
    Some(Trial {
        what: what.to_owned(),
        namespace: settings.namespace.clone(),
        pod: super::pods::pod(&format!("{}-0", valid.key.daemon()), &serde_json::to_value(template).ok()?),
    })
}
