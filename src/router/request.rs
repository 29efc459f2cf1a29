//! Bodies: bytes → fields → what is asked for.
//!
//! Field names match in any case, of a repeated field the last wins, `null` is
//! as good as absent, and what is unknown is ignored, but named.

use std::fmt;
use std::time::Duration;

use axum::body::Body;
use futures::StreamExt;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::identity::Verified;
use crate::key::{KeyError, Project};

/// Largest body, in bytes.
pub(super) const MAX_BODY: usize = 8 << 10;

/// Of a larger body, so much is read and thrown away: an answer that meets a
/// client still writing would be lost with the connection.
const MAX_DISCARD: usize = 256 << 10;

/// Patience with a body when the connection set no deadline.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Why a request is refused with 400.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadRequest {
    #[error("http: request body too large")]
    TooLarge,
    #[error("body must contain a single JSON object")]
    NotSingle {
        /// More than [`MAX_BODY`] bytes were sent.
        too_large: bool,
    },
    #[error("timed out reading the body")]
    TimedOut,
    #[error("reading the body: {0}")]
    Read(#[source] axum::Error),
    #[error("{0}")]
    Json(#[source] serde_json::Error),
    #[error("{field} must be {want}, not {got}")]
    WrongType { field: &'static str, want: &'static str, got: &'static str },
    #[error("{0}")]
    Key(#[source] KeyError),
    #[error("need {{\"key\":\"...\"}}")]
    NeedKey,
    #[error("buildId is required")]
    NeedBuildId,
    #[error("malformed buildId")]
    MalformedBuildId,
    #[error("{name} must be {want}")]
    Parameter { name: &'static str, want: &'static str },
    #[error("{0}")]
    Query(#[source] axum::extract::rejection::QueryRejection),
    #[error("unknown field {0:?}, and no buildId")]
    UnknownWithoutId(String),
}

impl BadRequest {
    /// Whether bytes of the body may still be on their way, so that no further
    /// request can be read from this connection.
    pub(super) fn closes(&self) -> bool {
        matches!(self, Self::TooLarge | Self::NotSingle { too_large: true } | Self::TimedOut | Self::Read(_))
    }
}

/// The fields of one JSON object, in order.
#[derive(Debug, Default)]
pub(super) struct Fields(Vec<(String, Value)>);

impl Fields {
    /// Reads a body to its end, until `deadline` at the latest.
    pub(super) async fn read(body: Body, deadline: Option<Instant>) -> Result<Self, BadRequest> {
        let read = collect(body);
        let body = match deadline {
            Some(deadline) => timeout_at(deadline, read).await,
            None => tokio::time::timeout(READ_TIMEOUT, read).await,
        };
        Self::parse(&body.map_err(|_| BadRequest::TimedOut)??)
    }

    /// Parses a body of which all that counts was read.
    fn parse(body: &[u8]) -> Result<Self, BadRequest> {
        let too_large = body.len() > MAX_BODY;
        let mut json = serde_json::Deserializer::from_slice(&body[..body.len().min(MAX_BODY)]);
        match Self::deserialize(&mut json) {
            Ok(_) if too_large => Err(BadRequest::NotSingle { too_large }),
            Ok(fields) => json.end().map(|()| fields).map_err(|_| BadRequest::NotSingle { too_large }),
            Err(_) if too_large => Err(BadRequest::TooLarge),
            Err(error) => Err(BadRequest::Json(error)),
        }
    }

    /// Takes out every spelling of a field; the last that is not `null` counts.
    fn take(&mut self, name: &str) -> Option<Value> {
        let mut last = None;
        self.0.retain_mut(|(field, value)| {
            let same = field.eq_ignore_ascii_case(name);
            if same && !value.is_null() {
                last = Some(value.take());
            }
            !same
        });
        last
    }

    fn text(&mut self, field: &'static str) -> Result<String, BadRequest> {
        match self.take(field) {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(BadRequest::WrongType { field, want: "a string", got: kind(&other) }),
        }
    }

    fn flag(&mut self, field: &'static str) -> Result<bool, BadRequest> {
        match self.take(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(BadRequest::WrongType { field, want: "a boolean", got: kind(&other) }),
        }
    }

    /// The names that nobody took.
    fn unknown(self) -> Vec<String> {
        self.0.into_iter().map(|(name, _)| name).collect()
    }
}

/// Reads one byte more than is allowed, and then throws away.
async fn collect(body: Body) -> Result<Vec<u8>, BadRequest> {
    let mut kept = Vec::new();
    let mut read = 0;
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(BadRequest::Read)?;
        read += chunk.len();
        let room = (MAX_BODY + 1).saturating_sub(kept.len()).min(chunk.len());
        kept.extend_from_slice(&chunk[..room]);
        if read > MAX_DISCARD {
            break;
        }
    }
    Ok(kept)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_unit<E>(self) -> Result<Fields, E> {
                Ok(Fields::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_any(Object)
    }
}

/// What `/route` and `/prewarm` ask for, and which fields were ignored. A
/// verified identity says itself which repository it is of: what the body
/// declares is not looked at. Whether its code is trusted, the body can only
/// deny.
pub(super) fn project(
    mut fields: Fields,
    bound: Option<&Verified>,
) -> Result<(Result<Project, BadRequest>, Vec<String>), BadRequest> {
    let (repo, name) = (fields.text("repo")?, fields.text("name")?);
    let (target, arch) = (fields.text("target")?, fields.text("arch")?);
    let untrusted = fields.flag("untrusted")?;
    let project = match bound {
        None => Project::requested(&repo, &name, &target, &arch, untrusted),
        Some(who) => Project::requested(who.repo.as_str(), &name, &target, &arch, untrusted || who.untrusted)
            .map(|project| Project { pull_request: who.pull_request, ..project }),
    };
    Ok((project.map_err(BadRequest::Key), fields.unknown()))
}

/// What `/complete` asks for.
#[derive(Debug)]
pub(super) struct Completion {
    /// Whatever was sent; perhaps no project key.
    pub(super) key: String,
    /// Empty when absent.
    pub(super) build_id: String,
}

/// What `/complete` asks for, and which fields were ignored.
///
/// Without a build id the oldest entry is released. So an unknown field beside
/// an absent id is refused rather than ignored: it may be the id, misspelt, and
/// the release would be somebody else's.
pub(super) fn completion(mut fields: Fields) -> Result<(Result<Completion, BadRequest>, Vec<String>), BadRequest> {
    let (key, build_id) = (fields.text("key")?, fields.text("buildId")?);
    let unknown = fields.unknown();
    if let Some(field) = unknown.first().filter(|_| build_id.is_empty()) {
        return Err(BadRequest::UnknownWithoutId(field.clone()));
    }
    let valid = !key.trim().is_empty() && key.len() <= 64;
    Ok((if valid { Ok(Completion { key, build_id }) } else { Err(BadRequest::NeedKey) }, unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<Project, String> {
        let fields = Fields::parse(body.as_bytes()).map_err(|e| e.to_string())?;
        project(fields, None).and_then(|(project, _)| project).map_err(|e| e.to_string())
    }

    #[test]
    fn null_leaves_what_stands_before_it() {
        let project = parse(r#"{"repo":"acme/shop","REPO":null,"arch":"arm64","Arch":"amd64"}"#).unwrap();
        assert_eq!((project.repo.as_str(), project.arch.as_str()), ("acme/shop", "amd64"));
    }

    #[test]
    fn unknown_fields_are_named_in_order() {
        let fields = Fields::parse(br#"{"branch":{"a":[1]},"repo":"r","arch":"amd64","pr":7}"#).unwrap();
        let (project, unknown) = project(fields, None).unwrap();
        assert!(project.is_ok());
        assert_eq!(unknown, ["branch", "pr"]);
    }

    #[test]
    fn what_is_no_request_says_so() {
        for (body, want) in [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[]", "invalid type: sequence, expected an object at line 1 column 2"),
            (r#"{"untrusted":"yes"}"#, "untrusted must be a boolean, not a string"),
            (r#"{"repo":7}"#, "repo must be a string, not a number"),
            (r#"{} {}"#, "body must contain a single JSON object"),
            (r#"{"repo":"a\u0000b","arch":"amd64"}"#, "repo contains a control character (U+0000)"),
            (r#"{"repo":"a","name":"b\u001bc","arch":"amd64"}"#, "name contains a control character (U+001B)"),
            (r#"{"repo":"a","target":"b\u007fc"}"#, "target contains a control character (U+007F)"),
            (
                r#"{"repo":"ftp://a/b","arch":"amd64"}"#,
                "repo has the scheme \"ftp\", want https, http, ssh, git or git+ssh",
            ),
        ] {
            assert_eq!(parse(body).unwrap_err(), want, "{body}");
        }
    }

    #[test]
    fn lengths_are_looked_at_in_order_and_in_bytes() {
        let long = |n| "é".repeat(n);
        for (repo, name, target, want) in [
            (257, 65, 65, "repo is too long"),
            (256, 65, 65, "name is too long"),
            (256, 64, 65, "target is too long"),
            (256, 64, 64, "unsupported arch \"mips\""),
        ] {
            let got = Project::requested(&long(repo), &long(name), &long(target), "mips", false).unwrap_err();
            assert_eq!(got.to_string(), want);
        }
        let blank = Project::requested(&" ".repeat(600), "", "", "amd64", false).unwrap_err();
        assert_eq!(blank.to_string(), "repo is required");
    }

    #[test]
    fn eight_kibibytes_are_enough_and_no_more() {
        let object = r#"{"repo":"r","arch":"amd64"}"#;
        let full = format!("{object}{}", " ".repeat(MAX_BODY - object.len()));
        assert!(parse(&full).is_ok());
        assert_eq!(parse(&format!("{full} ")).unwrap_err(), "body must contain a single JSON object");
        let open = format!(r#"{{"repo":"{}"#, "r".repeat(MAX_BODY));
        assert!(matches!(Fields::parse(open.as_bytes()), Err(e @ BadRequest::TooLarge) if e.closes()));
    }

    #[tokio::test]
    async fn an_endless_body_is_not_read_to_its_end() {
        let endless = futures::stream::repeat_with(|| Ok::<_, std::io::Error>("x".repeat(1000)));
        assert!(matches!(Fields::read(Body::from_stream(endless), None).await, Err(BadRequest::TooLarge)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_comes_times_out() {
        let never = Body::from_stream(futures::stream::pending::<Result<String, std::io::Error>>());
        assert!(matches!(Fields::read(never, None).await, Err(BadRequest::TimedOut)));
    }
}
