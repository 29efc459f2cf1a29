//! Words that a POSIX shell reads as they were meant. Pure; no IO.

use std::ffi::OsStr;

/// One word, quoted where it must be.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { quote_always(word) }
}

/// One word, always in single quotes: within those, nothing means anything.
pub fn quote_always(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A command line that a person can copy.
pub fn command_line<S: AsRef<OsStr>>(words: &[S]) -> String {
    words.iter().map(|word| quote(&word.as_ref().to_string_lossy())).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_needs_no_quotes_has_none() {
        assert_eq!(command_line(&["a", "b c", "", "it's", "$HOME"]), r"a 'b c' '' 'it'\''s' '$HOME'");
    }

    fn echo(word: &str) -> String {
        let script = format!("printf %s {}", quote(word));
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn a_shell_gives_back_what_was_quoted(word in "[^\0]{0,20}") {
            prop_assert_eq!(echo(&word), word);
        }
    }

    #[test]
    fn nothing_is_run() {
        for word in ["$(id)", "`id`", "'; id; '", "\\", "a\nb", "!x", "~", "*"] {
            assert_eq!(echo(word), word);
        }
    }
}
