//! The live view in a real terminal, which `script` makes.

use std::time::Instant;

use super::*;

pub(crate) async fn runs_draw_on_a_terminal_and_leave_their_last_state(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("the live view: script is not installed (Debian: bsdutils), left out");
        return Ok(());
    }
    let farm = Farm::new(cluster, "terminal");
    // Somebody who watches has to see something that is waited for.
    farm.play.set_delay(Duration::from_secs(2));
    let scratch = tempfile::tempdir()?;
    for (number, colour) in [true, false].into_iter().enumerate() {
        let shown = scratch.path().join(format!("shown-{number}"));
        let replicas = format!("--set=server.replicas={}", number + 2);
        let init = farm.command("init", &["--timeout=60s", &replicas]);
        let words: Vec<_> = init.as_std().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let program = init.as_std().get_program().to_string_lossy().into_owned();
        let line = format!("stty cols 100 rows 40; exec {program} {}", words.join(" "));
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line]).arg(&shown).kill_on_drop(true);
        command.env("TERM", "xterm").env("SHELL", "/bin/sh").env_remove("NO_COLOR").stdin(Stdio::null());
        if !colour {
            command.env("NO_COLOR", "1");
        }
        let began = Instant::now();
        let status = command.stdout(Stdio::null()).status().await?;
        let text = String::from_utf8_lossy(&std::fs::read(&shown)?).into_owned();
        assert!(status.success() && began.elapsed() < Duration::from_secs(60), "{text}");
        assert_eq!(text.contains("\x1b[32m✓\x1b[0m rc0"), colour, "{text}");
        // Each drawing is one that a terminal shows at once, and in place.
        let drawings: Vec<&str> = text.split("\x1b[?2026h").skip(1).collect();
        assert!(drawings.len() > 3, "{text}");
        assert!(drawings.iter().all(|drawing| drawing.contains("\x1b[?2026l")), "{text}");
        let plain = without_colour(&text);
        assert!(plain.contains("… server            Deployment buildkit-operator-buildd"), "{plain}");
        // No line of events beside it, and the last state stays, with what to do next below.
        assert!(!plain.contains("waiting for Deployment"), "{plain}");
        let last = plain.rsplit("\x1b[?2026h").next().unwrap_or_default();
        for shown in ["── everything is ready", "✓ rc0  ready", "✓ server", "✓ rc4  ready", "installed profile dev"]
        {
            assert!(last.contains(shown), "\"{shown}\" is not in:\n{last}");
        }
    }
    // Back to one replica fewer, and then everything goes.
    for (verb, expected) in [
        ("rollback", &["── everything is ready", "✓ server", "rolled back: "][..]),
        (
            "uninstall",
            &["── everything is gone", "✓ everything that was applied, in reverse", "✓ namespaces", "uninstalled"],
        ),
    ] {
        let shown = scratch.path().join(verb);
        let line = format!(
            "stty cols 100 rows 40; exec {} cluster {verb} --namespace {} --kubeconfig {}",
            program().display(),
            farm.names.operator,
            farm.cluster.kubeconfig().display(),
        );
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line]).arg(&shown).kill_on_drop(true);
        command.env("TERM", "xterm").env("SHELL", "/bin/sh").env("NO_COLOR", "1").stdin(Stdio::null());
        let status = command.stdout(Stdio::null()).status().await?;
        let text = String::from_utf8_lossy(&std::fs::read(&shown)?).into_owned();
        assert!(status.success(), "{text}");
        // No line of events beside it.
        let events = ["deleted ", "configured ", "kept "];
        assert!(!text.lines().any(|line| events.iter().any(|event| line.starts_with(event))), "{text}");
        let last = text.rsplit("\x1b[?2026h").next().unwrap_or_default();
        for shown in expected {
            assert!(last.contains(shown), "\"{shown}\" is not in:\n{last}");
        }
    }
    // Told to draw nothing, it does not, even on a terminal.
    let shown = scratch.path().join("dumb");
    let init = farm.command("init", &["--timeout=60s"]);
    let words: Vec<_> = init.as_std().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let line = format!("exec {} {}", init.as_std().get_program().to_string_lossy(), words.join(" "));
    let mut command = Command::new("script");
    command.args(["--quiet", "--flush", "--return", "--command", &line]).arg(&shown).kill_on_drop(true);
    command.env("TERM", "dumb").env("SHELL", "/bin/sh").stdin(Stdio::null()).stdout(Stdio::null());
    assert!(command.status().await?.success());
    let text = String::from_utf8_lossy(&std::fs::read(&shown)?).into_owned();
    assert!(!text.contains('\x1b') && text.contains("created Deployment"), "{text}");
    Ok(())
}

fn without_colour(text: &str) -> String {
    ["0", "2", "31", "32", "33", "36"]
        .iter()
        .fold(text.to_owned(), |text, code| text.replace(&format!("\x1b[{code}m"), ""))
}
