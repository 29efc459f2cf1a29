//! Values as YAML that every parser reads back alike: block style, each string
//! in double quotes, keys bare only where no parser takes them for something
//! else (`yes`, `on`, `y`, `0644`, `1e3`, `12:30`, `1_000`, `null`, `~`).

use std::fmt::Write as _;

use serde_json::{Number, Value};

/// A document in block style, with a line feed at its end.
pub fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => write_map(&mut out, map, 0),
        Value::Array(list) if !list.is_empty() => write_list(&mut out, list, 0),
        scalar => {
            write_flow(&mut out, scalar);
            out.push('\n');
        }
    }
    out
}

/// On one line: JSON, in the subset that is YAML too.
pub fn to_flow(value: &Value) -> String {
    let mut out = String::new();
    write_flow(&mut out, value);
    out
}

fn write_map(out: &mut String, map: &serde_json::Map<String, Value>, indent: usize) {
    for (position, (key, value)) in map.iter().enumerate() {
        if position > 0 {
            pad(out, indent);
        }
        write_key(out, key);
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                out.push_str(":\n");
                pad(out, indent + 2);
                write_map(out, inner, indent + 2);
            }
            Value::Array(inner) if !inner.is_empty() => {
                out.push_str(":\n");
                pad(out, indent + 2);
                write_list(out, inner, indent + 2);
            }
            scalar => {
                out.push_str(": ");
                write_flow(out, scalar);
                out.push('\n');
            }
        }
    }
}

fn write_list(out: &mut String, list: &[Value], indent: usize) {
    for (position, value) in list.iter().enumerate() {
        if position > 0 {
            pad(out, indent);
        }
        out.push_str("- ");
        match value {
            Value::Object(inner) if !inner.is_empty() => write_map(out, inner, indent + 2),
            Value::Array(inner) if !inner.is_empty() => write_list(out, inner, indent + 2),
            scalar => {
                write_flow(out, scalar);
                out.push('\n');
            }
        }
    }
}

fn pad(out: &mut String, indent: usize) {
    out.extend(std::iter::repeat_n(' ', indent));
}

fn write_flow(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(number) => write_number(out, number),
        Value::String(text) => write_quoted(out, text),
        Value::Array(list) => {
            out.push('[');
            for (position, item) in list.iter().enumerate() {
                out.push_str(if position > 0 { ", " } else { "" });
                write_flow(out, item);
            }
            out.push(']');
        }
        Value::Object(map) => {
            out.push('{');
            for (position, (key, item)) in map.iter().enumerate() {
                out.push_str(if position > 0 { ", " } else { "" });
                write_quoted(out, key);
                out.push_str(": ");
                write_flow(out, item);
            }
            out.push('}');
        }
    }
}

/// A float keeps its point and the sign of its exponent: without them a parser
/// of YAML 1.1 reads a string.
fn write_number(out: &mut String, number: &Number) {
    let text = number.to_string();
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let point = if mantissa.contains('.') { "" } else { ".0" };
            let sign = if exponent.starts_with(['-', '+']) { "" } else { "+" };
            let _ = write!(out, "{mantissa}{point}e{sign}{exponent}");
        }
        None => out.push_str(&text),
    }
}

fn write_key(out: &mut String, key: &str) {
    if is_plain(key) { out.push_str(key) } else { write_quoted(out, key) }
}

/// Letters first, then letters, digits, `.`, `/`, `-`, `_`; and no word that
/// some parser takes for a boolean or null.
fn is_plain(key: &str) -> bool {
    const RESERVED: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    key.starts_with(|c: char| c.is_ascii_alphabetic())
        && key.len() <= 256
        && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"./-_".contains(&b))
        && !RESERVED.contains(&key.to_ascii_lowercase().as_str())
}

/// JSON's escapes, and more: what YAML takes for a line break or refuses to
/// read (C1 controls, U+2028, the byte order mark) never stands bare.
fn write_quoted(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}' | '\u{7f}'..='\u{a0}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_filter("JSON has no such number", |f| f.is_finite()).prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            hostile().prop_map(Value::from),
        ];
        scalar.prop_recursive(5, 64, 6, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..6).prop_map(Value::from),
                btree_map(prop_oneof![any::<String>(), hostile(), "[a-zA-Z0-9._/-]{1,12}"], inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn hostile() -> impl Strategy<Value = String> {
        prop::sample::select(HOSTILE).prop_map(str::to_owned)
    }

    const HOSTILE: &[&str] = &[
        "",
        " ",
        "yes",
        "on",
        "y",
        "N",
        "0644",
        "0o644",
        "1e3",
        "12:30",
        "1_000",
        "null",
        "~",
        "true",
        "No",
        "- a",
        "a: b",
        "a #b",
        "#",
        "|",
        ">",
        "&a",
        "*a",
        "!t",
        "%",
        "@",
        "`",
        "{{ x }}",
        "${x}",
        "a\nkind: Secret",
        "\r\n",
        "\u{85}",
        "\u{2028}",
        "\u{feff}",
        "\u{fffe}",
        "é ✓ 🦀",
        "---",
        "...",
        "? a",
        "[",
        "{",
        "'",
        "\"",
        "\\",
        "\t",
        ".inf",
        "0x1f",
        "2026-01-01",
        "=",
        "<<",
        "+1",
        "-0",
        ".5",
        "1.",
        "1e",
        "\u{7f}",
        "\u{f0000}",
    ];

    proptest! {
        #[test]
        fn what_is_written_reads_back(value in value()) {
            let text = to_yaml(&value);
            prop_assert_eq!(&serde_yaml::from_str::<Value>(&text).unwrap(), &value, "{}", text);
            let flow = to_flow(&value);
            prop_assert!(!flow.contains('\n'));
            prop_assert_eq!(&serde_yaml::from_str::<Value>(&flow).unwrap(), &value, "{}", flow);
        }
    }

    #[test]
    fn block_style_is_what_people_expect() {
        let value = json!({
            "apiVersion": "v1",
            "on": [{"a": 1, "b": [[1, 2], []]}, {}],
            "mode": 420,
            "float": 1e100,
            "app.kubernetes.io/name": "no",
        });
        assert_eq!(
            to_yaml(&value),
            "apiVersion: \"v1\"\n\"on\":\n  - a: 1\n    b:\n      - - 1\n        - 2\n      - []\n  - {}\n\
             mode: 420\nfloat: 1.0e+100\napp.kubernetes.io/name: \"no\"\n"
        );
    }

    /// The point of the quotes: another parser, of YAML 1.1, agrees.
    #[test]
    fn a_parser_of_yaml_1_1_reads_the_same() {
        let Ok(probe) = std::process::Command::new("python3").args(["-c", "import yaml"]).output() else { return };
        if !probe.status.success() {
            return;
        }
        let value = json!({
            "strings": HOSTILE,
            "keys": HOSTILE.iter().map(|key| ((*key).to_owned(), json!(1))).collect::<serde_json::Map<_, _>>(),
            "numbers": [0, -1, 1.5, 1e100, -2.5e-7, u64::MAX, true, null],
        });
        let script = "import json,sys,yaml; json.dump(yaml.safe_load(sys.stdin.buffer), sys.stdout)";
        let mut child = std::process::Command::new("python3")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), to_yaml(&value).as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), value);
    }
}
