//! YAML text → documents, each with the line of every node.

use serde_json::{Map, Value};

use super::fault::Fault;
use super::position::Positions;

/// One document of a file.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// What it holds.
    pub(crate) value: Value,
    /// Lines within the file that come before it.
    offset: usize,
    positions: Positions,
}

impl Document {
    /// The line, within the whole file, of a node or of its nearest ancestor.
    pub(crate) fn line<S: AsRef<str>>(&self, path: &[S]) -> usize {
        self.offset + self.positions.line(path)
    }
}

/// All documents of a text; empty ones are left out. One fault a document.
pub(crate) fn parse(place: &str, text: &str) -> (Vec<Document>, Vec<Fault>) {
    let mut documents = Vec::new();
    let mut faults = Vec::new();
    for (offset, text) in split(text) {
        match parse_one(place, text, offset) {
            Ok(document) if document.value.is_null() => {}
            Ok(document) => documents.push(document),
            Err(fault) => faults.push(fault),
        }
    }
    (documents, faults)
}

/// A file of one document; an empty file is an empty mapping.
pub(crate) fn parse_mapping(place: &str, text: &str) -> Result<(Map<String, Value>, Document), Fault> {
    let (mut documents, faults) = parse(place, text);
    if let Some(fault) = faults.into_iter().next() {
        return Err(fault);
    }
    if let Some(second) = documents.get(1) {
        return Err(Fault::at(place, second.line::<&str>(&[]), "want one YAML document, found another"));
    }
    let document = match documents.pop() {
        Some(document) => document,
        None => Document { value: Value::Object(Map::new()), offset: 0, positions: Positions::default() },
    };
    match &document.value {
        Value::Object(map) => Ok((map.clone(), document)),
        other => Err(Fault::at(place, document.line::<&str>(&[]), format!("want a mapping, found {}", kind_of(other)))),
    }
}

/// One value on a command line or in a file. A key given twice is an error.
pub(crate) fn parse_value(text: &str) -> Result<Value, String> {
    let parsed: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| {
        // A list's item is `.[0]` there.
        let said = error.to_string();
        said.strip_prefix('.').unwrap_or(&said).to_owned()
    })?;
    to_json(parsed, &mut Vec::new()).map_err(|(path, message)| match path.is_empty() {
        true => message,
        false => format!("{}: {message}", path.join(".")),
    })
}

/// What kind of value it is, for messages about a text that may be anything.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

/// What a single value is, for messages. Not for whole documents: see [`kind_of`].
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
        scalar => super::emit::to_flow(scalar),
    }
}

/// A marker in the first column always ends a document, so that the text can
/// be cut before it is parsed, and one bad document hides no other.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut at) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let next = at + line.len();
        if let Some(rest) = line.strip_prefix("---").filter(|rest| rest.trim_start() != *rest || rest.is_empty()) {
            documents.push((first_line, &text[start..at]));
            (start, first_line) = (next - rest.len(), number);
        }
        at = next;
    }
    documents.push((first_line, &text[start..]));
    documents
}

fn parse_one(place: &str, text: &str, offset: usize) -> Result<Document, Fault> {
    let parsed: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| syntax_fault(place, offset, &error))?;
    let positions = Positions::of(text);
    let value = to_json(parsed, &mut Vec::new())
        .map_err(|(path, message)| Fault::at(place, offset + positions.line(&path), message))?;
    Ok(Document { value, offset, positions })
}

fn syntax_fault(place: &str, offset: usize, error: &serde_yaml::Error) -> Fault {
    let line = offset + error.location().map_or(1, |location| location.line());
    let message = error.to_string();
    // The place is printed before the message already.
    let message = message.split(" at line ").next().unwrap_or_default();
    Fault::at(place, line, message)
}

type Unconvertible = (Vec<String>, String);

fn to_json(value: serde_yaml::Value, path: &mut Vec<String>) -> Result<Value, Unconvertible> {
    use serde_yaml::Value as Yaml;
    Ok(match value {
        Yaml::Null => Value::Null,
        Yaml::Bool(b) => Value::Bool(b),
        Yaml::String(text) => Value::String(text),
        Yaml::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(n), _, _) => n.into(),
            (_, Some(n), _) => n.into(),
            (_, _, Some(f)) if f.is_finite() => f.into(),
            _ => return Err((path.clone(), format!("{number} is no number of JSON"))),
        },
        Yaml::Sequence(list) => {
            let mut items = Vec::with_capacity(list.len());
            for (position, item) in list.into_iter().enumerate() {
                path.push(position.to_string());
                items.push(to_json(item, path)?);
                path.pop();
            }
            Value::Array(items)
        }
        Yaml::Mapping(mapping) => {
            let mut map = Map::new();
            for (key, item) in mapping {
                let Yaml::String(key) = key else {
                    if !matches!(key, Yaml::Null | Yaml::Bool(_) | Yaml::Number(_)) {
                        return Err((path.clone(), "a key is no string".to_owned()));
                    }
                    let key = serde_yaml::to_string(&key).unwrap_or_default();
                    let key = key.trim();
                    path.push(key.to_owned());
                    return Err((path.clone(), format!("key {key} is no string: write \"{key}\"")));
                };
                path.push(key.clone());
                map.insert(key, to_json(item, path)?);
                path.pop();
            }
            Value::Object(map)
        }
        Yaml::Tagged(tagged) => return Err((path.clone(), format!("tag {} is not understood", tagged.tag))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        parse("f.yaml", text).1[0].to_string()
    }

    #[test]
    fn documents_know_their_lines() {
        let (documents, faults) = parse("f.yaml", "# nothing\n---\na: 1\n\n--- # second\n# comment\nb:\n  c: 2\n---\n");
        assert!(faults.is_empty());
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].line(&["a"]), 3);
        assert_eq!(documents[1].line(&["b", "c"]), 8);
        assert_eq!(documents[1].line::<&str>(&[]), 7);
    }

    #[test]
    fn faults_name_line_and_reason() {
        assert_eq!(fault("a: 1\na: 2\n"), "f.yaml:1: duplicate entry with key \"a\"");
        assert_eq!(fault("---\na: 1\n---\nb: [\n"), "f.yaml:5: did not find expected node content");
        assert_eq!(fault("a:\n  8080: x\n"), "f.yaml:2: key 8080 is no string: write \"8080\"");
        assert_eq!(fault("a:\n- !x 1\n"), "f.yaml:2: tag !x is not understood");
        assert_eq!(fault("a: .inf\n"), "f.yaml:1: .inf is no number of JSON");
        assert_eq!(parse("f.yaml", "a: [\n---\nb: {\n").1.len(), 2);
    }
}
