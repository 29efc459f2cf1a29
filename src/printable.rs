//! Text from elsewhere, made fit to be shown: the one place that decides what a
//! terminal may see. Pure; no IO.

/// Nothing that a terminal obeys, and no password of a URL. Line breaks stay.
pub fn printable(text: &str) -> String {
    let shown = |c: char| if obeyed(c) { '\u{fffd}' } else { c };
    masked(text).replace("\r\n", "\n").chars().map(shown).collect()
}

/// The same as one line of at most so many characters.
pub fn line(text: &str, most: usize) -> String {
    printable(text.trim()).chars().map(|c| if c.is_whitespace() { ' ' } else { c }).take(most).collect()
}

/// JSON that says the same without a character that a terminal obeys.
pub fn json(text: &str) -> String {
    let escaped = |c: char| if obeyed(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    text.chars().map(escaped).collect()
}

/// Moves a cursor, colours, or turns the direction in which text is read.
fn obeyed(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || matches!(c, '\u{2028}' | '\u{2029}') || (c.is_control() && c != '\n' && c != '\t')
}

/// URLs without `user:password@`.
fn masked(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + "://".len());
        shown.push_str(before);
        let secret = credentials(after);
        if secret > 0 {
            shown.push_str("…@");
        }
        rest = &after[secret..];
    }
    shown + rest
}

/// How many bytes of what follows `://` are credentials.
fn credentials(after: &str) -> usize {
    let word = after.split(char::is_whitespace).next().unwrap_or_default();
    let authority = word.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    let port = authority.rsplit_once(':').map_or("", |(_, port)| port);
    // A password that should have been percent-encoded reaches further.
    let odd = !port.bytes().all(|byte| byte.is_ascii_digit());
    let end = authority.rfind('@').or_else(|| word.rfind('@').filter(|_| odd));
    end.map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_password_of_a_url_is_shown() {
        for (text, want) in [
            ("cannot fetch https://user:hunter2@h/x.git", "cannot fetch https://…@h/x.git"),
            ("\"http://hunter2@h:80\", http://a:hunter2@b", "\"http://…@h:80\", http://…@b"),
            ("ssh://git@h/x", "ssh://…@h/x"),
            ("http://u:hunter/2@h/x", "http://…@h/x"),
            ("http://u:hunter#2@h", "http://…@h"),
            ("http://u:a@hunter2@h", "http://…@h"),
            ("https://h:1234/a@b", "https://h:1234/a@b"),
            ("https://h/a@sha256:1", "https://h/a@sha256:1"),
            ("tcp://h:1 a@b", "tcp://h:1 a@b"),
            ("://", "://"),
        ] {
            assert_eq!(printable(text), want);
        }
    }

    #[test]
    fn a_line_is_one() {
        assert_eq!(line("a\r\nb\tc\u{1b}[31m", 100), "a b c\u{fffd}[31m");
        assert_eq!(line("éé é", 3), "éé ");
    }

    proptest! {
        #[test]
        fn nothing_is_obeyed(text in any::<String>()) {
            prop_assert!(!printable(&text).chars().any(obeyed));
            prop_assert!(!line(&text, 20).contains('\n'));
            let written = json(&serde_json::to_string(&text).unwrap());
            prop_assert!(!written.chars().any(obeyed));
            prop_assert_eq!(serde_json::from_str::<String>(&written).unwrap(), text);
        }
    }
}
