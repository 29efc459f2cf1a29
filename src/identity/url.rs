//! The addresses of issuers. Pure; no IO.

use std::fmt;
use std::str::FromStr;

/// An absolute `https` URL without user, query or fragment, in ASCII.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsUrl {
    text: String,
    host: String,
    port: u16,
    path: String,
}

/// Why a text is no such URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("want an https URL in ASCII with a lower-case host and without user, query or fragment, found {0:?}")]
pub struct ParseUrl(String);

impl FromStr for HttpsUrl {
    type Err = ParseUrl;

    fn from_str(s: &str) -> Result<Self, ParseUrl> {
        Self::read(s).ok_or_else(|| ParseUrl(s.to_owned()))
    }
}

impl HttpsUrl {
    fn read(s: &str) -> Option<Self> {
        let rest = s.strip_prefix("https://")?;
        if s.len() > 512 || !s.bytes().all(|b| b.is_ascii_graphic() && !br#"\?#@"<>^`{|}"#.contains(&b)) {
            return None;
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let end = if authority.starts_with('[') {
            authority.find(']')? + 1
        } else {
            authority.find(':').unwrap_or(authority.len())
        };
        let (host, port) = authority.split_at(end);
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().ok().filter(|port| *port != 0)?,
            None if port.is_empty() => 443,
            None => return None,
        };
        let label = |l: &str| !l.is_empty() && l.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'));
        let literal = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host_ok =
            literal.map_or_else(|| host.split('.').all(label), |address| address.parse::<std::net::Ipv6Addr>().is_ok());
        let segments_ok = !path.split('/').any(|segment| matches!(segment, "." | ".."));
        (host_ok && segments_ok).then(|| Self {
            text: s.to_owned(),
            host: literal.unwrap_or(host).to_owned(),
            port,
            path: if path.is_empty() { "/".to_owned() } else { path.to_owned() },
        })
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The host, an IPv6 address without its brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The path, `/` at least.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Host and port as in the header `Host`.
    pub fn authority(&self) -> &str {
        let rest = self.text.strip_prefix("https://").unwrap_or_default();
        rest.split('/').next().unwrap_or_default()
    }
}

impl fmt::Display for HttpsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Who signs tokens. One slash at the end does not count; everything else does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer(HttpsUrl);

impl FromStr for Issuer {
    type Err = ParseUrl;

    fn from_str(s: &str) -> Result<Self, ParseUrl> {
        let bare = s.strip_suffix('/').unwrap_or(s);
        if bare.ends_with('/') {
            return Err(ParseUrl(s.to_owned()));
        }
        bare.parse().map(Self).map_err(|_| ParseUrl(s.to_owned()))
    }
}

impl Issuer {
    /// Without a slash at the end.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Its host.
    pub fn host(&self) -> &str {
        self.0.host()
    }

    /// Whether this text names it: byte for byte, but for one slash at the end.
    pub fn is(&self, claimed: &str) -> bool {
        claimed.strip_suffix('/').unwrap_or(claimed) == self.as_str()
    }

    /// Both ways to write it.
    pub(super) fn spellings(&self) -> [String; 2] {
        [self.as_str().to_owned(), format!("{}/", self.as_str())]
    }

    /// Where it tells about itself.
    ///
    /// # Errors
    /// Never in practice: what is appended keeps a URL one.
    pub fn discovery(&self) -> Result<HttpsUrl, ParseUrl> {
        format!("{}/.well-known/openid-configuration", self.as_str()).parse()
    }
}

impl fmt::Display for Issuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts() {
        for (url, host, port, path) in [
            ("https://a.example", "a.example", 443, "/"),
            ("https://a.example:8443/x/y", "a.example", 8443, "/x/y"),
            ("https://[::1]:8443/x", "::1", 8443, "/x"),
            ("https://127.0.0.1/", "127.0.0.1", 443, "/"),
        ] {
            let parsed: HttpsUrl = url.parse().unwrap();
            assert_eq!((parsed.host(), parsed.port(), parsed.path()), (host, port, path), "{url}");
        }
        assert_eq!("https://[::1]:8443/x".parse::<HttpsUrl>().unwrap().authority(), "[::1]:8443");
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for bad in [
            "http://a.example",
            "HTTPS://a.example",
            "https://",
            "https:///x",
            "https://A.example",
            "https://user@a.example",
            "https://a.example?x",
            "https://a.example#x",
            "https://a.example\\x",
            "https://a.exämple",
            "https://a.example:0",
            "https://a.example:65536",
            "https://a.example:",
            "https://a..example",
            "https://[::1",
            "https://a.example/../b",
            "https://a.example/x y",
            " https://a.example",
            "a.example",
        ] {
            assert!(bad.parse::<HttpsUrl>().is_err(), "{bad}");
        }
    }

    #[test]
    fn one_slash_at_the_end_does_not_count() {
        let issuer: Issuer = "https://a.example/api/".parse().unwrap();
        assert_eq!(issuer.as_str(), "https://a.example/api");
        assert!(issuer.is("https://a.example/api") && issuer.is("https://a.example/api/"));
        for other in
            ["https://a.example/api//", "https://a.example/API", "https://a.example/api/x", "https://a.example"]
        {
            assert!(!issuer.is(other), "{other}");
        }
        assert!("https://a.example//".parse::<Issuer>().is_err());
        assert_eq!(issuer.discovery().unwrap().as_str(), "https://a.example/api/.well-known/openid-configuration");
    }
}
