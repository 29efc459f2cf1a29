//! The syntax of hosts, quantities, durations and images.

use std::time::Duration;

/// A DNS-1123 label.
pub(crate) fn is_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Labels with dots between them: a host, or a DNS-1123 subdomain.
pub(crate) fn is_host(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// A Kubernetes quantity that is not negative.
pub(crate) fn is_quantity(text: &str) -> bool {
    const SUFFIXES: [&str; 15] = ["n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let digits = number.bytes().any(|b| b.is_ascii_digit());
    let exponent = suffix.strip_prefix(['e', 'E']).is_some_and(|exponent| exponent.parse::<i8>().is_ok());
    digits && number.matches('.').count() <= 1 && (suffix.is_empty() || exponent || SUFFIXES.contains(&suffix))
}

/// What a quantity amounts to, for comparisons.
pub(crate) fn amount(text: &str) -> Option<f64> {
    if !is_quantity(text) {
        return None;
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let power = |list: &[&str], base: f64| list.iter().position(|s| *s == suffix).map(|at| base.powi(at as i32));
    let factor = power(&["", "k", "M", "G", "T", "P", "E"], 1e3)
        .or_else(|| power(&["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], 1024.0))
        .or_else(|| power(&["", "m", "u", "n"], 1e-3))
        .or_else(|| suffix.get(1..)?.parse().ok().map(|exponent: i32| 10_f64.powi(exponent)));
    Some(number.parse::<f64>().ok()? * factor?)
}

/// A duration with units, in whole seconds.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|duration| duration.subsec_nanos() == 0)
}

/// Why an image reference cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ImageProblem {
    /// No reference at all.
    Malformed,
    /// No digest and no tag, or the tag `latest`.
    Unpinned,
}

/// Whether an image reference is well formed and pinned.
pub(crate) fn image(text: &str) -> Result<(), ImageProblem> {
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    let name_at = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (path, tag) = match rest[name_at..].find(':') {
        Some(colon) => (&rest[..name_at + colon], Some(&rest[name_at + colon + 1..])),
        None => (rest, None),
    };
    if !is_image_path(path) || !tag.is_none_or(is_tag) || !digest.is_none_or(is_digest) {
        return Err(ImageProblem::Malformed);
    }
    match (digest, tag) {
        (None, None | Some("latest")) => Err(ImageProblem::Unpinned),
        _ => Ok(()),
    }
}

/// `registry:port/repository/name`; a registry is what has a dot, a port, or is `localhost`.
fn is_image_path(path: &str) -> bool {
    let part = |part: &str| {
        let allowed = |b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
        part.bytes().all(allowed)
            && part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && !part.ends_with(['-', '_', '.'])
    };
    match path.split_once('/') {
        Some((registry, rest)) if registry.contains(['.', ':', '[']) || registry == "localhost" => {
            let registry_ok = registry.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.:[]".contains(&b));
            registry_ok && rest.split('/').all(part)
        }
        _ => path.split('/').all(part),
    }
}

/// A registry, with a path where it has one.
pub(crate) fn is_registry(text: &str) -> bool {
    !text.contains('@') && image(&format!("{text}/image:1")).is_ok()
}

/// `http://HOST:PORT`, and nothing that is secret.
pub(crate) fn is_proxy(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("http://") else { return false };
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, "80"),
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let known = address.map_or_else(|| is_host(host), |address| address.parse::<std::net::Ipv6Addr>().is_ok());
    known && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// An image as another registry has it: below that registry's path, under the
/// same name. One that is there already stays.
pub(crate) fn relocated(image: &str, registry: &str) -> String {
    let registry = registry.trim_end_matches('/');
    if image.strip_prefix(registry).is_some_and(|rest| rest.starts_with('/')) {
        return image.to_owned();
    }
    let path = match image.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => path,
        _ => image,
    };
    format!("{registry}/{path}")
}

fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.len())
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !tag.starts_with(['-', '.'])
}

fn is_digest(digest: &str) -> bool {
    digest
        .strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_moves_to_another_registry_once() {
        for (image, registry, moved) in [
            ("docker.io/moby/buildkit:v1", "mirror.test", "mirror.test/moby/buildkit:v1"),
            ("moby/buildkit:v1", "mirror.test/hub", "mirror.test/hub/moby/buildkit:v1"),
            ("bko:1", "mirror.test:5000", "mirror.test:5000/bko:1"),
            ("localhost:5000/a@sha256:0", "mirror.test", "mirror.test/a@sha256:0"),
            ("mirror.test/hub/a:1", "mirror.test/hub", "mirror.test/hub/a:1"),
            ("mirror.test/hubs/a:1", "mirror.test/hub", "mirror.test/hub/hubs/a:1"),
        ] {
            assert_eq!(relocated(image, registry), moved);
            assert_eq!(relocated(moved, registry), moved);
        }
    }

    #[test]
    fn registries_and_proxies() {
        for good in ["docker.io", "mirror.test:5000/a/b", "localhost", "a"] {
            assert!(is_registry(good), "{good}");
        }
        for bad in ["", "https://a", "a/", "a b", "u@a"] {
            assert!(!is_registry(bad), "{bad}");
        }
        for good in ["http://proxy.test:3128", "http://10.0.0.1:80/", "http://proxy", "http://[fd00::1]:3128"] {
            assert!(is_proxy(good), "{good}");
        }
        for bad in ["", "proxy:3128", "https://proxy", "http://u:p@proxy", "http://", "http://a:0", "http://a/b"] {
            assert!(!is_proxy(bad), "{bad}");
        }
    }

    #[test]
    fn images_are_pinned_by_digest_or_tag() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for good in [
            "a:1",
            "docker.io/moby/buildkit:v0.34.2-rootless",
            "localhost:5000/a_b/c.d:x",
            "[::1]:5000/a:1",
            &format!("a/b@{digest}"),
            &format!("a/b:latest@{digest}"),
        ] {
            assert_eq!(image(good), Ok(()), "{good}");
        }
        for unpinned in ["a", "a/b", "a/b:latest", "r.io:5000/a"] {
            assert_eq!(image(unpinned), Err(ImageProblem::Unpinned), "{unpinned}");
        }
        for bad in
            ["", "A:1", "a:", "a b:1", "a//b:1", "a@sha256:12", "a:1\nkind: Secret", "-a:1", "https://a/b:1", "a:1:2"]
        {
            assert_eq!(image(bad), Err(ImageProblem::Malformed), "{bad}");
        }
    }

    #[test]
    fn quantities_and_durations_are_those_of_kubernetes_and_people() {
        for good in ["0", "1", "1.5", "500m", "2Gi", "1e3", "1E-3", "100k", ".5"] {
            assert!(is_quantity(good), "{good}");
        }
        for bad in ["", "-1", "Gi", "1gi", "1 Gi", "1.2.3", "1e", "0x1", "1Gi\n"] {
            assert!(!is_quantity(bad), "{bad}");
        }
        for (less, more) in [("999m", "1"), ("1G", "1Gi"), ("1Mi", "1e7"), ("500n", "1u"), ("0.5Ki", "513")] {
            assert!(amount(less) < amount(more), "{less} {more}");
        }
        assert_eq!((amount("1Gi"), amount("2e3"), amount("1 Gi")), (Some(1_073_741_824.0), Some(2000.0), None));
        assert_eq!(duration("1h 30m"), Some(Duration::from_secs(5400)));
        assert_eq!(duration("100ms"), None);
        assert_eq!(duration("-1s"), None);
    }
}
