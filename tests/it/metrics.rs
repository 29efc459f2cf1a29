//! The page of metrics names every metric that a process can show.
#![allow(clippy::unwrap_used, reason = "helpers of tests, outside of #[test] functions")]

use std::collections::BTreeMap;

use bko_install::companion::daemon::{Daemon, Pruned};
use bko_install::companion::memory::Memory;
use bko_install::companion::metrics::{Counters, Present};
use bko_install::companion::observation::{Build, Link, Observation};
use bko_install::companion::prune::{Reason, Volume};
use bko_install::companion::upkeep::Sample;
use bko_install::companion::watch::Watch;
use bko_install::families::build_farm::metrics::{DaemonMetrics, Metrics as ControllerMetrics};
use bko_install::gateway::metrics::{CloseLabels, Metrics, RejectedLabels, ReloadLabels, WakeLabels};
use bko_install::gateway::wake::Verdict;
use bko_install::gateway::{Close, Rejection};
use bko_install::issuers;
use bko_install::router;
use prometheus_client::registry::Registry;

/// Every metric of a process, with its kind.
fn names(registry: &Registry) -> BTreeMap<String, String> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| {
            let (name, kind) = line.split_once(' ').unwrap();
            let suffix = if kind == "counter" { "_total" } else { "" };
            (format!("{name}{suffix}"), kind.to_owned())
        })
        .collect()
}

/// A metric without any series is not shown: there has to be one of each.
fn gateway(registry: &mut Registry) {
    let metrics = Metrics::register(registry);
    drop(metrics.rejected.get_or_create(&RejectedLabels { reason: Rejection::NoSni }));
    drop(metrics.close.get_or_create(&CloseLabels { cause: Close::Finished }));
    drop(metrics.wakes.get_or_create(&WakeLabels { verdict: Verdict::Starting }));
    drop(metrics.reloads.get_or_create(&ReloadLabels { result: "ok" }));
}

fn identities(registry: &mut Registry) {
    let metrics = issuers::Metrics::default();
    metrics.register(registry);
    metrics.refreshed("https://ci.example", Some(1));
    metrics.verified("https://ci.example", "accepted");
}

fn companion(registry: &mut Registry) {
    let counters = Counters::default();
    counters.register(registry);
    counters.ended(&Build::default());
    counters.pruned(Reason::Inodes, Pruned::default());
    let (watch, observer) = Watch::new(Daemon::new("unix:///nowhere".parse().unwrap()), counters, None);
    observer.observation.send_replace(Observation { link: Link::Answering, ..Observation::default() });
    let memory =
        Memory { resident: Some(1), peak: Some(1), oom_kills: Some(1), throttled: Some(1), pressure: Some(0.5) };
    let sample = Sample { at: std::time::Duration::ZERO, volume: Volume::default(), memory, reset: None };
    let (publish, samples) = tokio::sync::watch::channel(Some(sample));
    registry.register_collector(Box::new(Present { watch, samples }));
    drop(publish);
}

/// Its own metrics, and no other's, under its heading.
#[tokio::test]
async fn the_page_names_every_metric_of_every_role() {
    let page = include_str!("../../docs/reference/metrics.md");
    let sections: BTreeMap<&str, &str> =
        page.split("\n## ").skip(1).map(|section| section.split_once('\n').unwrap()).collect();
    type Register = fn(&mut Registry);
    let roles: [(&str, Register); 6] = [
        ("Daemons", |registry| DaemonMetrics::register(registry).tell("p1", Some(1))),
        ("Controller", |registry| ControllerMetrics::default().register(registry)),
        ("Routing API", |registry| drop(router::Metrics::register(registry))),
        ("Identity providers", identities),
        ("Gateway", gateway),
        ("Companion", companion),
    ];
    for (role, register) in roles {
        let mut registry = Registry::default();
        register(&mut registry);
        let rows = sections[role].lines().filter_map(|row| row.strip_prefix("| `"));
        let told: BTreeMap<String, String> = rows
            .map(|row| {
                let mut cells = row.split('|').map(str::trim);
                let name = cells.next().unwrap().trim_end_matches('`');
                (name.split('{').next().unwrap().to_owned(), cells.next().unwrap().to_owned())
            })
            .collect();
        assert_eq!(told, names(&registry), "{role}");
    }
}
