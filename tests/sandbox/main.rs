//! The harness leaves nothing behind, however it ends: this binary starts
//! itself as a victim, looks at what that started, ends it, and looks again.

#![expect(clippy::disallowed_methods, reason = "tests read clocks, files and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a victim tells when it is up")]

#[path = "../cluster"]
mod shared {
    pub(crate) mod harness;
}
mod traces;
mod victim;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use shared::harness;

use harness::{Cluster, Node, process};
use victim::Victim;

/// How a victim ends that is told to go on.
const PASSES: &str = "pass";
const PANICS: &str = "panic";

fn succeeds() -> anyhow::Result<()> {
    let victim = Victim::start("control-plane", PASSES)?;
    victim.tell()?;
    assert_eq!(victim.end()?, Some(0));
    Ok(())
}

fn panics() -> anyhow::Result<()> {
    let victim = Victim::start("control-plane", PANICS)?;
    victim.tell()?;
    assert_eq!(victim.end()?, Some(101));
    Ok(())
}

fn is_interrupted() -> anyhow::Result<()> {
    let victim = Victim::start("node", PASSES)?;
    // As a terminal does it: the whole process group of what was started.
    victim.interrupt_group()?;
    assert_eq!(victim.end()?, Some(130));
    Ok(())
}

fn is_killed() -> anyhow::Result<()> {
    let victim = Victim::start("node", PASSES)?;
    victim.kill()?;
    assert_eq!(victim.end()?, None);
    Ok(())
}

fn loses_its_keeper() -> anyhow::Result<()> {
    let victim = Victim::start("node", PASSES)?;
    victim.kill_keeper()?;
    assert_eq!(victim.end()?, Some(137));
    Ok(())
}

fn is_interrupted_before_it_is_up() -> anyhow::Result<()> {
    let victim = Victim::start_only("node", PASSES)?;
    std::thread::sleep(std::time::Duration::from_millis(1500));
    victim.interrupt_group()?;
    assert_eq!(victim.end()?, Some(130));
    Ok(())
}

/// So that there are containers, with mounts and cgroups, when it ends.
async fn run_pod(node: &Node) -> anyhow::Result<()> {
    let mut run = node.tools().command("kubectl");
    run.args(["run", "victim", "--image-pull-policy=Never", "--image", node.archive("busybox.tar")?.reference()]);
    run.args(["--", "sleep", "1000"]);
    process::output(run).await?;
    node.wait_ready("default", "victim").await?;
    Ok(())
}

fn trial(name: &str, run: fn() -> anyhow::Result<()>) -> Trial {
    Trial::test(name, move || run().map_err(|error| harness::registration::failed(&error)))
}

fn main() -> ExitCode {
    if let Ok(tier) = std::env::var(victim::TIER) {
        return match tier.as_str() {
            "node" => harness::enter::<Node>(|node, runtime| {
                runtime.block_on(run_pod(&node)).unwrap();
                victim::live()
            }),
            _ => harness::enter::<Cluster>(|_, _| victim::live()),
        };
    }
    // One after another: each compares the machine before and after.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    let trials = vec![
        trial("nothing_is_left_when_it_succeeds", succeeds),
        trial("nothing_is_left_when_it_panics", panics),
        trial("nothing_is_left_when_it_is_interrupted", is_interrupted),
        trial("nothing_is_left_when_it_is_interrupted_before_it_is_up", is_interrupted_before_it_is_up),
        trial("nothing_is_left_when_it_is_killed", is_killed),
        trial("nothing_is_left_when_it_loses_its_keeper", loses_its_keeper),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}
