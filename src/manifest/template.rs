//! Strict templates. What an expression writes is one JSON value, so that no
//! value can inject YAML; an expression that is only a part of a scalar would
//! come out wrong, and is an error.

use std::collections::BTreeMap;

use minijinja::value::{Serde, Value as Jinja};
use minijinja::{Environment, Error, ErrorKind, Output, OutputSpan, OutputSpanKind, State, UndefinedBehavior};
use serde_json::Value;

use crate::profile::{Values, syntax};

use super::Declarations;
use super::emit;
use super::fault::Fault;
use crate::certificate::CertificateSpec;

/// Renders templates with one set of values.
#[derive(Debug)]
pub struct Renderer {
    environment: Environment<'static>,
    context: Jinja,
}

/// A scalar or an expression that cannot be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RenderError {
    /// Line within the template, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// Rendered text that knows its template.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    pub(crate) text: String,
    /// For each line of the text, the line of the template.
    lines: Vec<usize>,
}

impl Text {
    /// Text that is no template.
    pub(crate) fn plain(text: &str) -> Self {
        Self { text: text.to_owned(), lines: Vec::new() }
    }

    /// The template's line for a line of the text.
    pub(crate) fn line(&self, line: usize) -> usize {
        if self.lines.is_empty() {
            return line;
        }
        self.lines.get(line.saturating_sub(1)).or(self.lines.last()).copied().unwrap_or(line)
    }
}

impl Renderer {
    /// A renderer for resolved values.
    pub fn new(values: &Values) -> Self {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_formatter(write_value);
        environment.add_filter("seconds", seconds);
        environment.add_filter("tojson", to_json);
        environment.add_filter("sha256", sha256);
        environment.add_function("fail", fail);
        Self { environment, context: Jinja::from(Serde(values.tree())) }
    }

    /// Lets templates name the certificates that are wanted, as `certificates`,
    /// and the Secrets that we make, as `secrets`.
    pub(crate) fn declare(&mut self, certificates: &[CertificateSpec], secrets: &Declarations) {
        self.context = minijinja::context! {
            certificates => Jinja::from(Serde(certificates)),
            secrets => Jinja::from(Serde(secrets)),
            ..self.context.clone()
        };
    }

    /// Renders one scalar, unescaped: for texts that were parsed as YAML before.
    ///
    /// # Errors
    /// What is wrong with the template, by line.
    pub fn scalar(&self, text: &str) -> Result<String, RenderError> {
        self.environment.render_named_str("scalar", text, &self.context).map_err(|error| (&error).into())
    }

    /// Renders one scalar that may name `item`, one of a list's texts.
    ///
    /// # Errors
    /// What is wrong with the template, by line.
    pub fn scalar_with(&self, text: &str, item: &str) -> Result<String, RenderError> {
        let context = minijinja::context! { item, ..self.context.clone() };
        self.environment.render_named_str("scalar", text, context).map_err(|error| (&error).into())
    }

    /// Whether an expression is true: not false, zero, or empty.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub fn holds(&self, expression: &str) -> Result<bool, RenderError> {
        let compiled = self.environment.compile_expression(expression).map_err(|error| RenderError::from(&error))?;
        let value = compiled.eval(&self.context).map_err(|error| RenderError::from(&error))?;
        if value.is_undefined() {
            return Err(RenderError { line: 1, message: format!("undefined value in \"{expression}\"") });
        }
        Ok(value.is_true())
    }

    /// Renders a file whose name ends in `.yaml.j2` to YAML.
    pub(crate) fn yaml(&self, path: &str, source: &str) -> Result<Text, Vec<Fault>> {
        let fault = |error: Error| {
            let RenderError { line, message } = (&error).into();
            vec![Fault::at(path, line, message)]
        };
        let template = self.environment.template_from_named_str(path, source).map_err(fault)?;
        let (text, spans) = template.render_with_spans(&self.context).map_err(fault)?;
        let partial: Vec<Fault> = partial_interpolations(source, &text, &spans)
            .into_iter()
            .map(|(line, expression)| {
                let message = format!(
                    "\"{{{{ {expression} }}}}\" is only a part of a scalar: write the whole scalar as one expression, \
                     as in {{{{ '*.' ~ name ~ '.svc' }}}}"
                );
                Fault::at(path, line, message)
            })
            .collect();
        if !partial.is_empty() {
            return Err(partial);
        }
        let lines = line_map(&text, &spans);
        Ok(Text { text, lines })
    }
}

impl From<&Error> for RenderError {
    fn from(error: &Error) -> Self {
        let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
        let message = match error.kind() {
            ErrorKind::SyntaxError => format!("template: {detail}"),
            _ => detail,
        };
        Self { line: error.line().unwrap_or(1), message }
    }
}

/// Nothing is safe from escaping: neither the filter `safe` nor a macro's
/// output nor `autoescape false` turns it off in YAML.
fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Jinja) -> Result<(), Error> {
    let yaml = state.name().ends_with(".yaml.j2");
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an expression without a value"));
    }
    if let (false, Some(text)) = (yaml, value.as_str()) {
        return out.write_str(text).map_err(Error::from);
    }
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "no value of JSON").with_source(error))?;
    out.write_str(&emit::to_flow(&value)).map_err(Error::from)
}

/// `{{ routeWait | seconds }}`: a duration as a number.
fn seconds(duration: &str) -> Result<u64, Error> {
    syntax::duration(duration)
        .map(|duration| duration.as_secs())
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("\"{duration}\" is no duration")))
}

/// `{{ '--flag=' ~ x|tojson }}`: the text of a value. The engine's own filter
/// marks its text as escaped, so that whatever it is joined to would be quoted.
fn to_json(value: Jinja) -> Result<String, Error> {
    serde_json::to_string(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "no value of JSON").with_source(error))
}

/// `{{ x|tojson|sha256 }}`: an annotation that changes with what a pod reads.
fn sha256(text: &str) -> String {
    use sha2::{Digest, Sha256};
    hex::encode(Sha256::digest(text))
}

/// `{{ fail('…') }}`: values that do not go together.
fn fail(message: &str) -> Result<Jinja, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// Line and text of every expression that does not make a whole scalar.
///
/// Two tests. What stands beside an expression on its line must be YAML's own
/// punctuation. And with every expression replaced by a quoted mark, each mark
/// must parse as a scalar of its own: this finds those within block scalars
/// and within scalars of several lines.
fn partial_interpolations<'s>(source: &'s str, text: &str, spans: &[OutputSpan]) -> Vec<(usize, &'s str)> {
    let expressions: Vec<&OutputSpan> = spans.iter().filter(|span| span.kind() == OutputSpanKind::Expression).collect();
    let mut partial: BTreeMap<usize, &OutputSpan> = expressions
        .iter()
        .enumerate()
        .filter(|(_, span)| !stands_alone(text, span))
        .map(|(position, span)| (position, *span))
        .collect();
    if partial.is_empty() {
        let marked = mark(text, &expressions);
        let (documents, _) = super::yaml::parse("", &marked);
        for document in &documents {
            find_embedded(&document.value, &mut |position| {
                if let Some(span) = expressions.get(position) {
                    partial.insert(position, span);
                }
            });
        }
    }
    let describe = |span: &&OutputSpan| (span.line(), source.get(span.source_range()).unwrap_or_default().trim());
    let mut found: Vec<_> = partial.values().map(describe).collect();
    // A loop runs over the same expression again and again.
    found.dedup();
    found
}

fn stands_alone(text: &str, span: &OutputSpan) -> bool {
    let range = span.output_range();
    let start = text[..range.start].rfind('\n').map_or(0, |line_feed| line_feed + 1);
    let end = text[range.end..].find('\n').map_or(text.len(), |line_feed| range.end + line_feed);
    let (before, after) = (&text[start..range.start], &text[range.end..end]);
    let opened = before.trim_end().chars().next_back();
    let before_ok = match opened {
        None | Some('[' | '{' | ',') => true,
        Some(':' | '-' | '?') => before.ends_with(' '),
        Some(_) => false,
    };
    let after_ok = match after.trim_start().chars().next() {
        None | Some(',' | ']' | '}') => true,
        Some(':') => after.trim_start()[1..].chars().next().is_none_or(char::is_whitespace),
        Some('#') => after.starts_with(' '),
        Some(_) => false,
    };
    before_ok && after_ok
}

const MARK: &str = "bko-interpolation-";

fn mark(text: &str, expressions: &[&OutputSpan]) -> String {
    let mut marked = String::with_capacity(text.len());
    let mut at = 0;
    for (position, span) in expressions.iter().enumerate() {
        marked.push_str(&text[at..span.output_range().start]);
        marked.push_str(&format!("\"{MARK}{position}-\""));
        at = span.output_range().end;
    }
    marked.push_str(&text[at..]);
    marked
}

fn find_embedded(value: &Value, found: &mut impl FnMut(usize)) {
    let mut scalar = |text: &str| {
        for (at, _) in text.match_indices(MARK) {
            let number = text[at + MARK.len()..].split('-').next().unwrap_or_default();
            if let (true, Ok(number)) = (text.len() != MARK.len() + number.len() + 1, number.parse()) {
                found(number);
            }
        }
    };
    match value {
        Value::String(text) => scalar(text),
        Value::Array(list) => list.iter().for_each(|item| find_embedded(item, found)),
        Value::Object(map) => {
            map.keys().for_each(|key| scalar(key));
            map.values().for_each(|item| find_embedded(item, found));
        }
        _ => {}
    }
}

/// The template's line at the beginning of each line of the text.
fn line_map(text: &str, spans: &[OutputSpan]) -> Vec<usize> {
    let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1));
    let mut spans = spans.iter().peekable();
    let mut lines = Vec::new();
    for start in starts {
        // Leading blanks may come from another place than what they indent.
        let content = start + text[start..].bytes().take_while(|b| *b == b' ').count();
        while spans.next_if(|span| span.output_range().end <= content).is_some() {}
        let line = match spans.peek() {
            Some(span) if span.kind() == OutputSpanKind::Raw => {
                let range = span.output_range();
                span.line() + text[range.start..content.max(range.start)].matches('\n').count()
            }
            Some(span) => span.line(),
            None => lines.last().copied().unwrap_or(1),
        };
        lines.push(line);
    }
    lines
}
