//! Two values of one field as a message shows them: only what differs, and no
//! more of it than a line holds.

use serde_json::{Map, Value};

/// No value takes more characters.
const LONGEST: usize = 80;

/// Of a text, so many characters before what differs are shown.
const CONTEXT: usize = 20;

/// Both values, as JSON; what they have in common stands as `…`.
pub(super) fn contrast(a: &Value, b: &Value) -> (String, String) {
    let (a, b) = apart(a, b);
    (shortened(&a.to_string()), shortened(&b.to_string()))
}

/// One value that has no other.
pub(super) fn alone(value: &Value) -> String {
    shortened(&value.to_string())
}

fn apart(a: &Value, b: &Value) -> (Value, Value) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let (mut left, mut right) = (Map::new(), Map::new());
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                match (a.get(key), b.get(key)) {
                    (Some(x), Some(y)) if x == y => {}
                    (Some(x), Some(y)) => {
                        let (x, y) = apart(x, y);
                        left.insert(key.clone(), x);
                        right.insert(key.clone(), y);
                    }
                    (x, y) => {
                        left.extend(x.map(|x| (key.clone(), x.clone())));
                        right.extend(y.map(|y| (key.clone(), y.clone())));
                    }
                }
            }
            (left.into(), right.into())
        }
        (Value::Array(a), Value::Array(b)) => {
            let (start, end) = common(a, b);
            let part = |list: &[Value]| -> Value {
                let middle = list[start..list.len() - end].iter().cloned();
                let more = |yes: bool| yes.then(|| Value::from("…")).into_iter();
                more(start > 0).chain(middle).chain(more(end > 0)).collect()
            };
            (part(a), part(b))
        }
        (Value::String(a), Value::String(b)) if a.chars().count().max(b.chars().count()) > LONGEST / 2 => {
            let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
            let (start, end) = common(&a, &b);
            let (start, end) = (start.saturating_sub(CONTEXT), end.saturating_sub(CONTEXT));
            let part = |text: &[char]| {
                let middle: String = text[start..text.len() - end].iter().collect();
                format!("{}{middle}{}", if start > 0 { "…" } else { "" }, if end > 0 { "…" } else { "" }).into()
            };
            (part(&a), part(&b))
        }
        (a, b) => (a.clone(), b.clone()),
    }
}

/// How much is the same at both ends.
fn common<T: PartialEq>(a: &[T], b: &[T]) -> (usize, usize) {
    let start = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let end = a[start..].iter().rev().zip(b[start..].iter().rev()).take_while(|(x, y)| x == y).count();
    (start, end)
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= LONGEST {
        return text.to_owned();
    }
    text.chars().take(LONGEST - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_differs_is_shown_and_never_much() {
        let long =
            |n: usize| format!("{{\"certificates\":[{}],\"n\":{n},\"more\":\"{}\"}}", "x".repeat(200), "y".repeat(200));
        for (a, b, left, right) in [
            (json!("x:1"), json!("x:2"), r#""x:1""#, r#""x:2""#),
            (json!(5), json!("5"), "5", r#""5""#),
            (json!(["a", "b", "c", "d"]), json!(["a", "x", "c", "d"]), r#"["…","b","…"]"#, r#"["…","x","…"]"#),
            (json!(["a"]), json!(["a", "b"]), r#"["…"]"#, r#"["…","b"]"#),
            (json!({"a": 1, "b": {"c": 2, "d": 3}}), json!({"a": 1, "b": {"c": 2}}), r#"{"b":{"d":3}}"#, r#"{"b":{}}"#),
            (
                json!(long(1)),
                json!(long(2)),
                r#""…xxxxxxxxxxxxxx],\"n\":1,\"more\":\"yyyyyyyyyyy…""#,
                r#""…xxxxxxxxxxxxxx],\"n\":2,\"more\":\"yyyyyyyyyyy…""#,
            ),
        ] {
            assert_eq!(contrast(&a, &b), (left.to_owned(), right.to_owned()));
        }
        let (a, b) = contrast(&json!("ä".repeat(500)), &json!("b".repeat(500)));
        assert_eq!((a.chars().count(), b.chars().count()), (80, 80));
        assert_eq!(alone(&json!("c".repeat(500))).chars().count(), 80);
    }
}
