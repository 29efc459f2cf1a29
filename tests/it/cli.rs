//! The command line as a whole: reference, completions, exit codes.
#![allow(clippy::disallowed_methods, reason = "reads and, on request, rewrites the reference")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use bko_install::cli::Cli;
use bko_install::cli::exit::Code;
use clap::CommandFactory;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bko-install")).args(args).env_clear().output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const HEAD: &str = "# Command line\n\n\
    Generated from the program. After a change: `BKO_UPDATE=1 cargo test --test it cli::reference`.\n\n\
    Data goes to standard output, messages to standard error. An error is printed as `error: …`, its causes as\n\
    `caused by: …`, and how to mend it, after a blank line, as `hint: …`. The global options of the first section\n\
    are those of every command.\n";

const CODES: [(u8, Option<Code>, &str); 8] = [
    (0, None, "success"),
    (1, Some(Code::Failed), "something failed"),
    (2, Some(Code::Usage), "the command line, a profile or a value is wrong"),
    (3, Some(Code::ChangesPending), "`cluster plan`: there are changes"),
    (4, Some(Code::NotReady), "not ready, or timed out"),
    (5, Some(Code::Refused), "refused by a safety brake"),
    (130, Some(Code::Interrupted), "interrupted by a signal"),
    (143, None, "`build`: interrupted by SIGTERM"),
];

/// Every code in the table above; a new one does not compile until it is there.
fn is_documented(code: Code) -> bool {
    match code {
        Code::Failed | Code::Usage | Code::ChangesPending | Code::NotReady | Code::Refused | Code::Interrupted => {
            CODES.iter().any(|(number, of, _)| *of == Some(code) && *number == code as u8)
        }
    }
}

fn reference() -> String {
    let mut text = HEAD.to_owned();
    text.push_str("\n## Exit codes\n\n| Code | Meaning |\n|---|---|\n");
    for (number, _, meaning) in CODES {
        writeln!(text, "| {number} | {meaning} |").unwrap();
    }
    let mut root = Cli::command().term_width(100).max_term_width(100);
    root.build();
    describe(&root, &mut text);
    text
}

/// What the command says itself to `--help`, at a fixed width and without the
/// values that variables have where the test runs.
fn describe(command: &clap::Command, text: &mut String) {
    let is_root = command.get_bin_name().is_none();
    let path = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let mut shown = command.clone().term_width(100).max_term_width(100).mut_args(|arg| {
        let everywhere = arg.is_global_set() || matches!(arg.get_id().as_str(), "help" | "version");
        let hidden = arg.is_hide_set() || (everywhere && !is_root);
        arg.hide_env_values(true).hide(hidden)
    });
    writeln!(text, "\n## `{path}`\n\n```text").unwrap();
    for line in shown.render_long_help().to_string().lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str("```\n");
    command.get_subcommands().filter(|sub| !sub.is_hide_set()).for_each(|sub| describe(sub, text));
}

#[test]
fn reference_is_what_the_commands_say_of_themselves() {
    let path = Path::new("docs/reference/cli.md");
    let want = reference();
    if std::env::var_os("BKO_UPDATE").is_some_and(|value| value == "1") {
        std::fs::write(path, &want).unwrap();
    }
    let have = std::fs::read_to_string(path).unwrap_or_default();
    let diff = similar::TextDiff::from_lines(&have, &want).unified_diff().to_string();
    assert!(diff.is_empty(), "docs/reference/cli.md is out of date: BKO_UPDATE=1 cargo test --test it cli\n{diff}");
}

#[test]
fn reference_documents_every_exit_code() {
    for (_, code, _) in CODES {
        assert!(code.is_none_or(is_documented), "{code:?}");
    }
    for (code, _, _) in CODES {
        assert!(reference().contains(&format!("\n| {code} | ")));
    }
}

#[test]
fn help_of_every_command_is_what_the_reference_shows() {
    fn walk(command: &clap::Command, found: &mut Vec<String>) {
        found.push(command.get_bin_name().unwrap_or_default().to_owned());
        command.get_subcommands().for_each(|sub| walk(sub, found));
    }
    let mut root = Cli::command();
    root.build();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    assert!(paths.len() > 8, "{paths:?}");
    for path in paths {
        let args: Vec<_> = path.split(' ').skip(1).chain(["--help"]).collect();
        let output = run(&args);
        assert_eq!(output.status.code(), Some(0), "{path}: {}", stderr(&output));
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Usage: ") && help.contains(&path), "{help}");
    }
}

#[test]
fn every_option_and_command_has_a_description() {
    fn walk(command: &clap::Command) {
        let path = command.get_bin_name().unwrap_or_default();
        assert!(command.get_about().is_some(), "{path}");
        for arg in command.get_arguments() {
            assert!(arg.get_help().is_some(), "{path}: {}", arg.get_id());
        }
        command.get_subcommands().for_each(walk);
    }
    let mut root = Cli::command();
    root.build();
    walk(&root);
    root.debug_assert();
}

#[test]
fn completions_are_generated_and_the_shells_that_are_here_can_read_them() {
    let scratch = tempfile::tempdir().unwrap();
    for (shell, marker, check) in [
        ("bash", "complete -F _bko", Some(("bash", "-n"))),
        ("zsh", "#compdef bko-install", Some(("zsh", "-n"))),
        ("fish", "complete -c bko-install", Some(("fish", "--no-execute"))),
        ("elvish", "edit:completion", None),
        ("powershell", "Register-ArgumentCompleter", None),
    ] {
        let output = run(&["completions", shell]);
        assert!(output.status.success(), "{shell}: {}", stderr(&output));
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains(marker) && script.contains("gateway-host"), "{shell}");
        let path = scratch.path().join(shell);
        std::fs::write(&path, script).unwrap();
        let Some((program, flag)) = check else { continue };
        match Command::new(program).arg(flag).arg(&path).output() {
            Ok(parsed) => assert!(parsed.status.success(), "{shell}: {}", stderr(&parsed)),
            // Only bash is asked of a machine; the others are checked where they are.
            Err(error) if program != "bash" && error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("{program} is not installed, its completions are not parsed");
            }
            Err(error) => panic!("{program}: {error}"),
        }
    }
}

#[test]
fn a_wrong_command_line_is_exit_code_2_and_says_what_is_wrong() {
    for (args, want) in [
        (vec![], "Usage: bko-install"),
        (vec!["frobnicate"], "unrecognized subcommand 'frobnicate'"),
        (vec!["key", "--repo=x", "--frobnicate"], "unexpected argument '--frobnicate'"),
        (vec!["key", "--repo=x", "--outptu=json"], "'--output'"),
        (vec!["key", "--repo=x", "--output=yaml"], "[possible values: text, json]"),
        (vec!["key", "--repo=x", "--quiet", "--verbose"], "cannot be used with"),
        (vec!["completions", "tcsh"], "[possible values: bash"),
        (vec!["image"], "--output <FILE>"),
        (vec!["certs"], "Usage: bko-install certs"),
        (vec!["certs", "export"], "--dir <DIR>"),
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(want), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn an_unusable_kubeconfig_is_one_clear_error() {
    for command in [["certs", "list"].as_slice(), &["certs", "export", "--dir=/nowhere/x"]] {
        let output = run(&[command, &["--kubeconfig", "/nowhere/config"]].concat());
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        let text = stderr(&output);
        assert!(text.starts_with("error: ") && text.contains("/nowhere/config"), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn help_and_version_succeed_on_standard_output() {
    for args in [["--help"].as_slice(), &["--version"], &["key", "--version"], &["certs", "list", "-h"]] {
        let output = run(args);
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{args:?}");
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn a_wrong_file_is_not_quoted() {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), "hush:x:0:0:hush:/root:/bin/bash\nhush:x:1:1:hush:/:/bin/false\n").unwrap();
    let path = file.path().to_str().unwrap();
    for args in
        [["profile", "show", "--image=r/i:1", path].as_slice(), &["profile", "show", "--image=r/i:1", "-f", path]]
    {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = stderr(&output);
        assert!(said.contains("want a mapping, found a string") && !said.contains("hush"), "{said}");
    }
}

#[test]
fn the_gateways_file_is_checked_before_a_cluster_is_asked() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (text, want) in
        [("limit: {}", "unknown field `limit`"), ("proxyFrom: [x]", "proxyFrom: \"x\" is not a network")]
    {
        std::fs::write(path, text).unwrap();
        let args = ["server", "--roles=gateway", "--domain=a.test", "--kubeconfig=/nowhere/config", "--config", path];
        let output = run(&args);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: --config\n") && said.contains(path) && said.contains(want), "{said}");
    }
    let output =
        run(&["server", "--roles=gateway", "--domain=a.test", "--kubeconfig=/nowhere/config", "--config=/nowhere/x"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

/// The executable behind `bash -c`, with `$BKO` for its path.
fn bash(script: &str) -> Option<Output> {
    match Command::new("bash").args(["-c", script]).env("BKO", env!("CARGO_BIN_EXE_bko-install")).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("bash: {error}"),
    }
}

#[test]
fn bash_completes_below_the_first_word() {
    for (words, cur, want) in [
        ("bko-install", "", "cluster"),
        ("bko-install cluster", "", "status"),
        ("bko-install cluster", "in", "init"),
        ("bko-install cluster init", "--", "--force-conflicts"),
        ("bko-install certs list", "--", "--output"),
    ] {
        let script = format!(
            "source <($BKO completions bash); words=({words}); COMP_WORDS=(\"${{words[@]}}\" '{cur}'); \
             COMP_CWORD=${{#words[@]}}; _bko__install bko-install '{cur}' \"${{words[-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        );
        let Some(output) = bash(&script) else { return };
        let offered = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(offered.lines().any(|line| line == want), "{words} {cur}: {offered}{}", stderr(&output));
    }
}

#[test]
fn nobody_who_reads_is_no_panic() {
    for (script, code) in [
        // Data without a reader: a quiet success, as for `--help`.
        ("$BKO profile show --image r/i:1 | true; exit ${PIPESTATUS[0]}", 0),
        ("$BKO completions zsh | true; exit ${PIPESTATUS[0]}", 0),
        ("{ sleep 0.2; $BKO profile show --image r/i:1; } 2>&1 | true; exit ${PIPESTATUS[0]}", 0),
        // Errors without a reader keep their code.
        ("$BKO profile show --image r/i:1 /nowhere/x.yaml 2>&-", 2),
        ("{ sleep 0.2; $BKO profile show --image r/i:1 /nowhere/x.yaml; } 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
        ("$BKO profile show --image r/i:1 /nowhere/x.yaml 2>/dev/full", 2),
        ("$BKO key --repo=x 2>/dev/full >/dev/full", 1),
    ] {
        let Some(output) = bash(script) else { return };
        assert_eq!(output.status.code(), Some(code), "{script}: {}", stderr(&output));
        assert_eq!(stderr(&output), "", "{script}");
    }
}

#[test]
fn a_full_output_is_a_plain_error() {
    for command in ["completions bash", "profile show --image r/i:1", "profile list -o json", "key --repo=x"] {
        let Some(output) = bash(&format!("$BKO {command} >/dev/full")) else { return };
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        assert!(said.starts_with("error: cannot write to standard output\ncaused by: No space left"), "{said}");
    }
}

#[test]
fn every_fault_of_values_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("out");
    let output = run(&[
        "export",
        "--image=registry.test/bko:1",
        "--dir",
        dir.to_str().unwrap(),
        "-f",
        "/nonexistent/values.yaml",
        "--set=gateway.domains=A.test,b.test,C.test",
        "--set=server.replicas=x",
        "--set=oidc.providers=[{type: forgejo}, {type: nope}]",
    ]);
    assert_eq!(output.status.code(), Some(2));
    let err = stderr(&output);
    for said in [
        "4 faults",
        "/nonexistent/values.yaml: cannot read it: No such file",
        "found \"A.test\" as item 0; ",
        "found \"C.test\" as item 2",
        "--set server.replicas",
        "as item 0: issuer: is missing",
        "as item 1: ",
    ] {
        assert!(err.contains(said), "\"{said}\" is not in:\n{err}");
    }
}
