//! Names of images, in full. Pure.

/// Why a text names no image.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ReferenceError {
    /// It has a digest, which only a registry or the archive itself can give.
    #[error("image reference \"{0}\" has a digest, want name:tag")]
    Digest(String),
    /// It has no tag: `latest` would be assumed, which names nothing for long.
    #[error("image reference \"{0}\" has no tag, want name:tag")]
    TagMissing(String),
    /// It has a character or a shape that references do not have.
    #[error("image reference \"{0}\" is malformed, want name:tag such as registry.example.org/farm/bko-install:1.2.3")]
    Malformed(String),
}

/// Completes a reference as container tools do: `bko:1` is
/// `docker.io/library/bko:1`.
///
/// # Errors
/// No tag, a digest, or a malformed name.
pub fn normalize_reference(reference: &str) -> Result<String, ReferenceError> {
    if reference.contains('@') {
        return Err(ReferenceError::Digest(reference.to_owned()));
    }
    let slash = reference.rfind('/').map_or(0, |at| at + 1);
    let colon = reference[slash..].find(':').ok_or_else(|| ReferenceError::TagMissing(reference.to_owned()))?;
    let (name, tag) = (&reference[..slash + colon], &reference[slash + colon + 1..]);
    let (host, path) = match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path.to_owned()),
        Some(_) => ("docker.io", name.to_owned()),
        None => ("docker.io", format!("library/{name}")),
    };
    if is_host(host) && path.split('/').all(is_component) && is_tag(tag) {
        Ok(format!("{host}/{path}:{tag}"))
    } else {
        Err(ReferenceError::Malformed(reference.to_owned()))
    }
}

fn is_host(host: &str) -> bool {
    let (name, port) = host.rsplit_once(':').unwrap_or((host, "1"));
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-');
    !name.is_empty()
        && name.bytes().all(inner)
        && name.split('.').all(|label| !label.is_empty() && !label.starts_with('-') && !label.ends_with('-'))
        && port.parse::<u16>().is_ok()
}

/// Lower case and digits, with single separators in between.
fn is_component(component: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = component.as_bytes();
    bytes.first().is_some_and(|b| alphanumeric(*b))
        && bytes.last().is_some_and(|b| alphanumeric(*b))
        && bytes.iter().all(|b| alphanumeric(*b) || matches!(b, b'.' | b'_' | b'-'))
        && !["..", "._", "_.", "-.", ".-", "___"].iter().any(|pair| component.contains(pair))
}

fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.len())
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && !tag.starts_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_completed_or_refused() {
        for (input, want) in [
            ("bko:1", "docker.io/library/bko:1"),
            ("acme/bko:1", "docker.io/acme/bko:1"),
            ("localhost/bko:1", "localhost/bko:1"),
            ("localhost:5000/a/b_c.d-e:V1.2_x", "localhost:5000/a/b_c.d-e:V1.2_x"),
            ("ghcr.io/acme/bko:1", "ghcr.io/acme/bko:1"),
        ] {
            assert_eq!(normalize_reference(input).as_deref(), Ok(want), "{input}");
        }
        let text = |s: &str| s.to_owned();
        for tagless in ["bko", "", "localhost:5000/bko", "a.example/b"] {
            assert_eq!(normalize_reference(tagless), Err(ReferenceError::TagMissing(text(tagless))));
        }
        for malformed in
            ["bko:", ":1", "BKO:1", "a//b:1", "a/:1", "-a:1", "a..b:1", "a:1:2", "a:-1", "a b:1", "x.y:port/a:1", "é:1"]
        {
            assert_eq!(normalize_reference(malformed), Err(ReferenceError::Malformed(text(malformed))));
        }
        assert_eq!(normalize_reference("a:1@sha256:00"), Err(ReferenceError::Digest(text("a:1@sha256:00"))));
    }
}
