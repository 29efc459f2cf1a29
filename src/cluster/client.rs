//! The way to the API server: kubeconfig, context, credentials, and one clear
//! error for each way in which that can go wrong.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::Duration;

use http::header::{HeaderValue, USER_AGENT};
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

use crate::VERSION;
use crate::cli::Global;
use crate::cli::exit::{Code, Failure};
use crate::names::INSTALLER_MANAGER;

const CONNECT: Duration = Duration::from_secs(10);

/// Why there is no way to the API server.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither a kubeconfig nor a pod's service account.
    #[error("no kubeconfig, and this is not a pod with a service account")]
    NoConfiguration,
    /// The file cannot be read.
    #[error("cannot read kubeconfig \"{}\"", path.display())]
    ReadFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no kubeconfig.
    #[error("kubeconfig {file} is malformed: {why}")]
    Malformed {
        /// Which file.
        file: String,
        /// Why.
        why: String,
    },
    /// No context was named.
    #[error("kubeconfig {file} has no current context")]
    NoContext {
        /// Which file.
        file: String,
        /// The contexts that there are.
        known: Vec<String>,
    },
    /// The context does not exist.
    #[error("kubeconfig {file} has no context \"{context}\"")]
    UnknownContext {
        /// Which file.
        file: String,
        /// What was asked for.
        context: String,
        /// The contexts that there are.
        known: Vec<String>,
    },
    /// The client cannot be set up with these credentials.
    #[error("cannot use the credentials for {address}")]
    Credentials {
        /// The API server.
        address: String,
        /// Why.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// Nobody answers.
    #[error("cannot reach the API server at {address}: {why}")]
    Unreachable {
        /// The API server.
        address: String,
        /// Why.
        why: String,
    },
    /// The certificate does not come from the authority in the kubeconfig.
    #[error("the certificate of the API server at {address} is not trusted: {why}")]
    NotTrusted {
        /// The API server.
        address: String,
        /// Why.
        why: String,
    },
    /// The credentials are not accepted.
    #[error("the API server at {address} does not accept the credentials")]
    Unauthorized {
        /// The API server.
        address: String,
    },
    /// It answers, but not like an API server.
    #[error("{address} does not answer like an API server: {why}")]
    NoApiServer {
        /// The address.
        address: String,
        /// What it said.
        why: String,
    },
}

impl ConnectError {
    /// How to mend it.
    pub fn hint(&self) -> String {
        let contexts = |known: &[String]| match known {
            [] => "the kubeconfig has no contexts".to_owned(),
            known => format!("pass --context with one of: {}", known.join(", ")),
        };
        match self {
            Self::NoConfiguration | Self::ReadFile { .. } => {
                "pass --kubeconfig FILE, or set KUBECONFIG to a file that exists".into()
            }
            Self::Malformed { .. } => "`kubectl config view` reads the same file and shows what it holds".into(),
            Self::NoContext { known, .. } | Self::UnknownContext { known, .. } => contexts(known),
            Self::Credentials { .. } | Self::Unauthorized { .. } => {
                "log in again, or choose other credentials with --context".into()
            }
            Self::Unreachable { .. } | Self::NoApiServer { .. } => {
                "check that the cluster runs and that its address is right: `kubectl version`".into()
            }
            Self::NotTrusted { .. } => {
                "certificate-authority-data of the kubeconfig belongs to another cluster: fetch a new kubeconfig".into()
            }
        }
    }
}

/// Connects to the API server that the flags and the environment name, and
/// asks it for its version, so that a later error is about what was asked.
///
/// # Errors
/// A [`ConnectError`], with its hint.
pub async fn connect(global: &Global) -> Result<kube::Client, Failure> {
    connect_as(INSTALLER_MANAGER, global).await
}

/// The same under another name, which audit logs show as the user agent.
///
/// # Errors
/// A [`ConnectError`], with its hint.
pub async fn connect_as(name: &str, global: &Global) -> Result<kube::Client, Failure> {
    try_connect(name, global).await.map_err(|error| {
        let hint = error.hint();
        let code = match error {
            ConnectError::UnknownContext { .. } => Code::Usage,
            _ => Code::Failed,
        };
        Failure::new(code, error).hint(hint)
    })
}

async fn try_connect(name: &str, global: &Global) -> Result<kube::Client, ConnectError> {
    let mut config = configuration(global).await?;
    config.connect_timeout = Some(CONNECT);
    // Repetitions are ours: they are reported and end at the run's deadline.
    config.default_retry = false;
    if let Ok(agent) = HeaderValue::try_from(format!("{name}/{VERSION}")) {
        config.headers.push((USER_AGENT, agent));
    }
    let address = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    let client = kube::Client::try_from(config)
        .map_err(|source| ConnectError::Credentials { address: address.clone(), source: conceal(source) })?;
    match tokio::time::timeout(CONNECT * 2, client.apiserver_version()).await {
        Ok(Ok(_)) => Ok(client),
        Ok(Err(error)) => Err(probe_error(address, error)),
        Err(_) => Err(ConnectError::Unreachable { address, why: "no answer in time".into() }),
    }
}

fn probe_error(address: String, error: kube::Error) -> ConnectError {
    match error {
        kube::Error::Api(status) if status.code == 401 => ConnectError::Unauthorized { address },
        kube::Error::Api(status) => ConnectError::NoApiServer { address, why: first_line(&status.message) },
        kube::Error::SerdeError(source) => ConnectError::NoApiServer { address, why: source.to_string() },
        kube::Error::Auth(_) => ConnectError::Credentials { address, source: conceal(error) },
        error => match not_trusted(&error) {
            Some(why) => ConnectError::NotTrusted { address, why },
            None => ConnectError::Unreachable { address, why: root_cause(&error) },
        },
    }
}

async fn configuration(global: &Global) -> Result<Config, ConnectError> {
    let (file, kubeconfig) = match &global.kubeconfig {
        Some(path) => (format!("\"{}\"", path.display()), Kubeconfig::read_from(path)),
        None => match Kubeconfig::from_env() {
            Ok(Some(kubeconfig)) => ("of $KUBECONFIG".to_owned(), Ok(kubeconfig)),
            Ok(None) => ("\"~/.kube/config\"".to_owned(), Kubeconfig::read()),
            Err(error) => ("of $KUBECONFIG".to_owned(), Err(error)),
        },
    };
    let is_default = file.starts_with("\"~");
    let kubeconfig = match kubeconfig {
        Ok(kubeconfig) => kubeconfig,
        Err(KubeconfigError::ReadConfig(..) | KubeconfigError::FindPath) if is_default && global.context.is_none() => {
            return Config::incluster().map_err(|_| ConnectError::NoConfiguration);
        }
        Err(error) => return Err(file_error(file, error)),
    };
    let known: Vec<String> = kubeconfig.contexts.iter().map(|context| context.name.clone()).collect();
    let Some(context) = global.context.clone().or_else(|| kubeconfig.current_context.clone()) else {
        return Err(ConnectError::NoContext { file, known });
    };
    if !known.contains(&context) {
        return Err(ConnectError::UnknownContext { file, context, known });
    }
    let options = KubeConfigOptions { context: Some(context), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| file_error(file, error))
}

fn file_error(file: String, error: KubeconfigError) -> ConnectError {
    match error {
        // Bytes that are no text are a malformed file, not an unreadable one.
        KubeconfigError::ReadConfig(source, path) if source.kind() != std::io::ErrorKind::InvalidData => {
            ConnectError::ReadFile { path, source }
        }
        // Further lines would show the file itself, which holds credentials.
        KubeconfigError::Parse(error) => {
            let why = first_line(&error.to_string()).trim_start_matches("error: ").to_owned();
            ConnectError::Malformed { file, why }
        }
        error => ConnectError::Malformed { file, why: first_line(&error.to_string()) },
    }
}

/// The output of an exec plugin may hold a token, and is left out.
fn conceal(error: kube::Error) -> Box<dyn StdError + Send + Sync> {
    match error {
        kube::Error::Auth(kube::client::AuthError::AuthExecRun { cmd, out }) => {
            let said = String::from_utf8_lossy(&out.stderr);
            format!("credential command {cmd} failed with {}: {}", out.status, said.trim()).into()
        }
        error => error.into(),
    }
}

/// Whether a lost connection will not come back by waiting.
pub(super) fn is_hopeless(error: &kube::Error) -> bool {
    not_trusted(error).is_some()
}

fn not_trusted(error: &kube::Error) -> Option<String> {
    chain(error).find_map(|cause| match cause.downcast_ref::<rustls::Error>()? {
        rustls::Error::InvalidCertificate(why) => Some(why.to_string()),
        _ => None,
    })
}

/// The innermost cause, which is what a person can act on.
pub(super) fn root_cause(error: &kube::Error) -> String {
    chain(error).last().map_or_else(|| error.to_string(), |cause| first_line(&cause.to_string()))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(200).collect()
}

/// An error and its causes. An `io::Error` hides the error that it wraps.
fn chain<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| cause(*error))
}

fn cause<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a (dyn StdError + 'static)> {
    match error.downcast_ref::<std::io::Error>() {
        Some(io) => io.get_ref().map(|inner| inner as &(dyn StdError + 'static)),
        None => error.source(),
    }
}
