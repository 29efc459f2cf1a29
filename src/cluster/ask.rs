//! Questions to the API server whose answer may be no: reads, reviews of
//! access, pods created by dry run. Nothing is written.

use http::Request;
use serde_json::Value;

use super::refusal::{lacking, may_pass};
use super::{Cluster, RequestError};

/// What came of a question.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// The API server's answer.
    Yes(Value),
    /// It refuses.
    No {
        /// Its HTTP status.
        code: u16,
        /// Its words.
        message: String,
        /// Whether a permission is lacking, and not an admission plugin against it.
        forbidden: bool,
    },
}

impl Cluster {
    /// Reads a path.
    pub(crate) async fn ask(&self, path: &str) -> Result<Answer, RequestError> {
        self.question(&format!("read {path}"), || Request::get(path).body(Vec::new())).await
    }

    /// Posts to a path what changes nothing: a review, a dry run.
    pub(crate) async fn ask_with(&self, what: &str, path: &str, body: &Value) -> Result<Answer, RequestError> {
        let request = || {
            let json = Request::post(path).header(http::header::CONTENT_TYPE, "application/json");
            json.body(body.to_string().into_bytes())
        };
        self.question(what, request).await
    }

    /// What somebody behind the API server answers, once; `Err` in its words.
    pub(crate) async fn ask_through(&self, path: &str) -> Result<String, String> {
        let request = Request::get(path).body(Vec::new()).map_err(|error| error.to_string())?;
        match self.attempt(self.client.request_text(request)).await {
            Some(Ok(text)) => Ok(text),
            Some(Err(kube::Error::Api(status))) => Err(format!("{}: {}", status.code, status.message)),
            Some(Err(error)) => Err(super::client::root_cause(&error)),
            None => Err("no answer in time".into()),
        }
    }

    async fn question(
        &self,
        what: &str,
        request: impl Fn() -> Result<Request<Vec<u8>>, http::Error>,
    ) -> Result<Answer, RequestError> {
        let ask = || async {
            let request = request().map_err(kube::Error::HttpError)?;
            match self.client.request::<Value>(request).await {
                Ok(value) => Ok(Answer::Yes(value)),
                Err(kube::Error::Api(status)) if status.code != 401 && !may_pass(&status) => Ok(Answer::No {
                    code: status.code,
                    forbidden: status.code == 403 && lacking(&status.message).is_some(),
                    message: status.message.clone(),
                }),
                Err(error) => Err(error),
            }
        };
        self.repeat(what, ask, |_| RequestError::Unauthorized { request: what.to_owned() }).await
    }
}
