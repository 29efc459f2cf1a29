use super::line::wrapped;
use super::*;
use crate::cluster::PlannedStep;
use crate::cluster::{PlannedComponent, PlannedKept, Verb};

fn id(kind: &str, name: &str) -> ObjectId {
    let namespace = Some("buildkit-operator".to_owned());
    ObjectId { group: "apps".into(), version: "v1".into(), kind: kind.into(), namespace, name: name.into() }
}

fn component(name: &str, writes: usize, objects: &[(&str, &str)]) -> PlannedComponent {
    PlannedComponent { name: name.into(), writes, objects: objects.iter().map(|(kind, name)| id(kind, name)).collect() }
}

fn planned() -> Event {
    Event::Planned {
        counts: Counts { create: 9, configure: 1, unchanged: 3, ..Counts::default() },
        levels: vec![
            PlannedLevel {
                runlevel: Runlevel::Rc0,
                components: vec![
                    component("crd", 1, &[("CustomResourceDefinition", "buildprojects")]),
                    component("namespaces", 0, &[("Namespace", "a"), ("Namespace", "b"), ("Namespace", "c")]),
                ],
            },
            PlannedLevel {
                runlevel: Runlevel::Rc3,
                components: vec![
                    component("network-policies", 1, &[("NetworkPolicy", "egress")]),
                    component(
                        "server",
                        2,
                        &[("Deployment", "buildkit-operator-buildd"), ("Service", "buildkit-operator-buildd")],
                    ),
                ],
            },
            PlannedLevel {
                runlevel: Runlevel::Rc4,
                components: vec![component("gateway", 2, &[("Deployment", "gateway"), ("Service", "gateway")])],
            },
        ],
        steps: Vec::new(),
    }
}

const WHY: &str = "0 of 2 replicas available; pod \"buildkit-operator-buildd-5c9f-x2x\": waits for an image: \
                   registry.example.com/bko-install:1.2.3 is being pulled";

/// A run, as far as the number of its events.
fn run(events: usize, colour: bool) -> View {
    let applied = |kind: &str, name: &str| Event::Applied { object: id(kind, name), verb: Verb::Created };
    let level = |runlevel| Event::Level { runlevel, writes: 1, objects: 4 };
    let ready = |runlevel| Event::LevelReady { runlevel, duration_ms: 900 };
    let server = id("Deployment", "buildkit-operator-buildd");
    let all = [
        planned(),
        level(Runlevel::Rc0),
        applied("CustomResourceDefinition", "buildprojects"),
        ready(Runlevel::Rc0),
        level(Runlevel::Rc3),
        applied("NetworkPolicy", "egress"),
        applied("Deployment", "buildkit-operator-buildd"),
        applied("Service", "buildkit-operator-buildd"),
        Event::Waiting { object: server.clone(), why: WHY.into() },
        Event::Ready { object: server },
        ready(Runlevel::Rc3),
        level(Runlevel::Rc4),
        applied("Deployment", "gateway"),
        applied("Service", "gateway"),
        ready(Runlevel::Rc4),
    ];
    let mut view = View::new(colour);
    for (number, event) in all.iter().take(events).enumerate() {
        assert_eq!(view.take(event, Duration::from_millis(700 * number as u64)), None);
    }
    view
}

fn drawn(view: &View, columns: u16, rows: u16, at: u64) -> String {
    let lines = view.lines(Size { columns, rows }, Duration::from_secs(at));
    assert!(lines.iter().all(|line| line.chars().count() <= columns.into()), "{lines:#?}");
    assert!(lines.len() <= usize::from(rows).max(3), "{lines:#?}");
    lines.join("\n")
}

#[test]
fn a_run_at_80_and_120_columns() {
    for columns in [80, 120] {
        for (name, events) in [("planned", 1), ("writing", 6), ("waiting", 9), ("ready", 10)] {
            insta::assert_snapshot!(format!("{columns}_{name}"), drawn(&run(events, false), columns, 40, 75));
        }
    }
}

#[test]
fn the_last_state_tells_how_it_ended() {
    let mut well = run(15, false);
    well.end(End::Well, Duration::from_secs(12));
    insta::assert_snapshot!("ended_well", drawn(&well, 80, 40, 99));
    let mut badly = run(9, false);
    badly.end(End::Badly, Duration::from_secs(75));
    insta::assert_snapshot!("ended_badly", drawn(&badly, 80, 40, 99));
}

#[test]
fn before_there_is_a_plan_it_says_what_it_does() {
    assert_eq!(drawn(&View::new(false), 40, 24, 3), "── looking at the cluster          3.0 s");
}

#[test]
fn a_narrow_terminal_clips_and_a_low_one_shows_what_is_at_work() {
    for columns in [10, 20, 31, 40] {
        drawn(&run(9, false), columns, 40, 75);
    }
    let low = drawn(&run(9, false), 80, 11, 75);
    for shown in ["✓ rc0  ready", "… server", "· rc4  later"] {
        assert!(low.contains(shown), "{low}");
    }
    assert!(!low.contains("namespaces") && !low.contains("gateway"), "{low}");
    assert!(drawn(&run(9, false), 80, 6, 75).ends_with("lines more"));
}

#[test]
fn colour_is_there_when_asked_for_alone() {
    let lines = |colour| run(9, colour).lines(Size { columns: 80, rows: 40 }, Duration::from_secs(75));
    assert!(lines(false).iter().all(|line| !line.contains('\x1b')));
    let coloured = lines(true).join("\n");
    for shown in ["\x1b[32m✓\x1b[0m rc0", "\x1b[33m…\x1b[0m server", "\x1b[2m· rc4  later"] {
        assert!(coloured.contains(shown), "{coloured}");
    }
}

#[test]
fn warnings_and_what_is_tried_again_are_said() {
    let mut view = run(3, false);
    let warning = Event::Warning { message: "no address".into() };
    assert_eq!(view.take(&warning, Duration::ZERO).as_deref(), Some("warning: no address"));
    let again = Event::Retrying { request: "get x".into(), why: "no answer".into(), delay_ms: 5 };
    assert!(view.take(&again, Duration::ZERO).is_some_and(|line| line.contains("no answer")));
    assert!(view.take(&Event::Stopping, Duration::ZERO).is_some());
}

#[test]
fn a_cause_is_broken_between_words() {
    let lines = |text: &str, width| wrapped(text, width).collect::<Vec<_>>();
    assert_eq!(lines("one two three", 20), ["one two three"]);
    assert_eq!(lines("one two three", 8), ["one two", "three"]);
    assert_eq!(lines("one two three four", 8), ["one two", "three f…"]);
    assert_eq!(lines("unbreakable", 5), ["unbr…"]);
}

/// What comes from a cluster commands no terminal.
#[test]
fn what_is_waited_for_is_printable() {
    let mut view = run(8, false);
    let why = "pulled\x1b[2J\nand more".to_owned();
    view.take(&Event::Waiting { object: id("Deployment", "buildkit-operator-buildd"), why }, Duration::ZERO);
    let drawn = drawn(&view, 120, 40, 75);
    assert!(!drawn.contains('\x1b') && drawn.contains("and more"), "{drawn}");
}

fn planned_step(title: &str, objects: &[(&str, &str)]) -> PlannedStep {
    PlannedStep { title: title.into(), objects: objects.iter().map(|(kind, name)| id(kind, name)).collect() }
}

/// A removal, as far as the number of its events.
fn removal(events: usize) -> View {
    let steps = vec![
        planned_step("custom resources, while their controller runs", &[("BuildProject", "a"), ("BuildProject", "b")]),
        planned_step(
            "everything that was applied, in reverse",
            &[("Deployment", "gateway"), ("Service", "gateway"), ("Secret", "token")],
        ),
        planned_step("namespaces", &[("Namespace", "builds")]),
    ];
    let kept = |kind, name, why: &str| PlannedKept { object: id(kind, name), why: why.into() };
    let kept = vec![
        kept("PersistentVolumeClaim", "cache-a", "it is a cache; --delete-caches deletes it"),
        kept("Namespace", "buildkit-operator", "it holds PersistentVolumeClaim cache-a"),
    ];
    let step = |title: &str| Event::Step { title: title.into(), deletions: 2 };
    let done = |title: &str| Event::StepDone { title: title.into(), duration_ms: 3 };
    let (first, second) = (steps[0].title.clone(), steps[1].title.clone());
    let service = id("Service", "gateway");
    let why = "is being deleted: finalizer \"service.kubernetes.io/load-balancer-cleanup\": the cloud's controller \
               removes the load balancer; is it running?";
    let all = [
        Event::Removing { steps, kept },
        step(&first),
        Event::Deleted { object: id("BuildProject", "a") },
        Event::Deleted { object: id("BuildProject", "b") },
        done(&first),
        step(&second),
        Event::Deleted { object: id("Deployment", "gateway") },
        Event::Deleted { object: service.clone() },
        Event::Waiting { object: service.clone(), why: why.into() },
        Event::Gone { object: service },
        Event::Deleted { object: id("Secret", "token") },
        done(&second),
        step("namespaces"),
        Event::Deleted { object: id("Namespace", "builds") },
        done("namespaces"),
    ];
    let mut view = View::new(false);
    for (number, event) in all.iter().take(events).enumerate() {
        assert_eq!(view.take(event, Duration::from_millis(700 * number as u64)), None);
    }
    view
}

#[test]
fn a_removal_at_80_and_120_columns() {
    for columns in [80, 120] {
        for (name, events) in [("removal_planned", 1), ("removal_waiting", 9), ("removal_working", 10)] {
            insta::assert_snapshot!(format!("{columns}_{name}"), drawn(&removal(events), columns, 40, 75));
        }
    }
    let mut well = removal(15);
    well.end(End::Well, Duration::from_secs(12));
    insta::assert_snapshot!("removal_ended_well", drawn(&well, 80, 40, 99));
    let mut badly = removal(9);
    badly.end(End::Badly, Duration::from_secs(60));
    insta::assert_snapshot!("removal_ended_badly", drawn(&badly, 80, 40, 99));
    drawn(&removal(9), 30, 8, 75);
}

#[test]
fn what_is_pruned_and_kept_is_below_the_levels() {
    let mut view = View::new(false);
    let gone = vec![planned_step("what is no longer wanted", &[("ConfigMap", "old"), ("Service", "old")])];
    let Event::Planned { counts, levels, .. } = planned() else { panic!("no plan") };
    let counts = Counts { delete: 2, ..counts };
    let kept = Event::Kept { object: id("ConfigMap", "mine"), why: "annotation bko-install/keep asks for it".into() };
    assert_eq!(view.take(&kept, Duration::ZERO), None);
    view.take(&Event::Planned { counts, levels, steps: gone }, Duration::from_secs(59));
    for runlevel in [Runlevel::Rc0, Runlevel::Rc3, Runlevel::Rc4] {
        view.take(&Event::Level { runlevel, writes: 1, objects: 4 }, Duration::from_secs(60));
        view.take(&Event::LevelReady { runlevel, duration_ms: 900 }, Duration::from_secs(61));
    }
    let title = "what is no longer wanted".to_owned();
    view.take(&Event::Step { title, deletions: 2 }, Duration::from_secs(70));
    view.take(&Event::Deleted { object: id("Service", "old") }, Duration::from_secs(71));
    insta::assert_snapshot!("80_pruned", drawn(&view, 80, 40, 75));
    insta::assert_snapshot!("120_pruned", drawn(&view, 120, 40, 75));
    // What belongs to no step is told.
    let other = Event::Deleted { object: id("Secret", "release") };
    assert!(view.take(&other, Duration::ZERO).is_some());
}

#[test]
fn of_many_that_stay_some_are_named() {
    let kept = |n: usize| PlannedKept { object: id("Secret", &format!("s{n}")), why: "foreign".into() };
    let mut view = View::new(false);
    view.take(&Event::Removing { steps: Vec::new(), kept: (0..9).map(kept).collect() }, Duration::ZERO);
    let shown = drawn(&view, 80, 40, 1);
    assert!(shown.contains("= kept  9") && shown.contains("s4: foreign") && shown.ends_with("· and 4 more"), "{shown}");
}
