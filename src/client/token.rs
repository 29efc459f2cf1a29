//! Who the client says that it is: a token, or an identity that the CI system
//! vouches for, fetched anew for every call since it lives for minutes only.

use http::header::{ACCEPT, AUTHORIZATION, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode, Uri};

use super::http::{Http, HttpError};

const ADMIN: HeaderName = HeaderName::from_static("x-buildkit-operator-admin-token");

/// A credential, which shows itself to nobody by accident.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// White space around it, as editors and `echo` leave, is not part of it;
    /// a blank one is none.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    /// Whether it can be sent: a part of a file, or a word too many, cannot.
    pub fn is_well_formed(&self) -> bool {
        self.0.bytes().all(|byte| byte.is_ascii_graphic())
    }

    fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Where GitHub and Forgejo give out identities.
#[derive(Debug)]
pub struct Mint {
    /// `ACTIONS_ID_TOKEN_REQUEST_URL`.
    pub url: String,
    /// `ACTIONS_ID_TOKEN_REQUEST_TOKEN`.
    pub token: Token,
    /// Whom the identity is for.
    pub audience: String,
}

/// What to show at each call.
#[derive(Debug)]
pub enum TokenSource {
    /// Nothing.
    Nobody,
    /// The same token every time.
    Fixed(Token),
    /// A fresh identity every time.
    Minted(Mint),
}

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// Not a URL.
    #[error("ACTIONS_ID_TOKEN_REQUEST_URL is no URL")]
    Url,
    /// Not a header's value.
    #[error("the {0} holds characters that no token has: is a line break in it?")]
    Malformed(&'static str),
    /// No answer.
    #[error("cannot fetch an identity token from the CI system")]
    Fetch(#[source] HttpError),
    /// It refuses.
    #[error("the CI system answers {status} when asked for an identity token")]
    Refused {
        /// Its answer.
        status: StatusCode,
    },
    /// It answers something else.
    #[error("the CI system's answer holds no identity token")]
    NoToken,
}

impl TokenError {
    /// Whether the same may work a moment later.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Fetch(error) => error.is_temporary(),
            Self::Refused { status } => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            _ => false,
        }
    }
}

/// What is shown, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Nothing.
    Nothing,
    /// A token of the routing API.
    Token,
    /// An identity that somebody else handed over.
    Identity,
    /// An identity that was asked for a moment ago.
    FreshIdentity,
}

impl TokenSource {
    /// What is shown at each call.
    pub fn shown(&self) -> Shown {
        match self {
            Self::Nobody => Shown::Nothing,
            Self::Fixed(token) if token.reveal().split('.').count() == 3 => Shown::Identity,
            Self::Fixed(_) => Shown::Token,
            Self::Minted(_) => Shown::FreshIdentity,
        }
    }

    /// Whether the server takes the repository from the token.
    pub fn vouches(&self) -> bool {
        matches!(self, Self::Minted(_))
    }

    /// Headers of one call.
    pub(super) async fn headers(&self, http: &Http, admin: Option<&Token>) -> Result<HeaderMap, TokenError> {
        let mut headers = HeaderMap::new();
        if let Some(token) = admin {
            headers.insert(ADMIN, sensitive(token.reveal(), "admin token")?);
        }
        match self {
            Self::Nobody => {}
            Self::Fixed(token) => {
                headers.insert(AUTHORIZATION, bearer(token.reveal())?);
            }
            Self::Minted(mint) => {
                headers.insert(AUTHORIZATION, bearer(&mint.fetch(http).await?)?);
            }
        }
        Ok(headers)
    }
}

impl Mint {
    async fn fetch(&self, http: &Http) -> Result<String, TokenError> {
        let join = if self.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{join}audience={}", self.url, percent(&self.audience));
        let url: Uri = url.parse().map_err(|_| TokenError::Url)?;
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, bearer(self.token.reveal())?);
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let answer = http.send(Method::GET, &url, headers, Vec::new()).await.map_err(TokenError::Fetch)?;
        if answer.status != StatusCode::OK {
            return Err(TokenError::Refused { status: answer.status });
        }
        let value: serde_json::Value = serde_json::from_slice(&answer.body).map_err(|_| TokenError::NoToken)?;
        value["value"].as_str().map(str::to_owned).ok_or(TokenError::NoToken)
    }
}

fn bearer(token: &str) -> Result<HeaderValue, TokenError> {
    sensitive(&format!("Bearer {token}"), "token")
}

fn sensitive(text: &str, what: &'static str) -> Result<HeaderValue, TokenError> {
    let mut value = HeaderValue::from_str(text).map_err(|_| TokenError::Malformed(what))?;
    value.set_sensitive(true);
    Ok(value)
}

fn percent(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audience_is_one_parameter() {
        assert_eq!(percent("buildkit-operator"), "buildkit-operator");
        assert_eq!(percent("https://a b&c=é"), "https%3A%2F%2Fa%20b%26c%3D%C3%A9");
    }

    #[test]
    fn a_token_with_a_line_break_is_refused_and_not_shown() {
        let error = bearer("hunter2\n").unwrap_err().to_string();
        assert!(error.contains("line break") && !error.contains("hunter2"), "{error}");
        assert!(bearer("hunter2").unwrap().is_sensitive());
        assert_eq!(Token::new(" \n"), None);
        assert!(!format!("{:?}", Token::new("hunter2")).contains("hunter2"));
    }
}
