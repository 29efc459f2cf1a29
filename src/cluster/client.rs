//! The way to the API server: kubeconfig, context, credentials, and one clear
//! error for each way in which that can go wrong.

use std::error::Error as StdError;
use std::path::PathBuf;
use std::time::Duration;

use http::header::{HeaderValue, USER_AGENT};
use kube::Config;
use kube::client::AuthError;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

use tokio::time::Instant;

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
    /// The context names a user or a cluster that does not exist.
    #[error("kubeconfig {file} has no {what} \"{name}\", which context \"{context}\" names")]
    Dangling {
        /// Which file.
        file: String,
        /// `user` or `cluster`.
        what: &'static str,
        /// The name that is not there.
        name: String,
        /// The context that has it.
        context: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// The client cannot be set up with these credentials.
    #[error("cannot use the credentials for {address}: {why}")]
    Credentials {
        /// The API server.
        address: String,
        /// Why.
        why: String,
    },
    /// The program that gives out credentials does not.
    #[error("the credential plugin \"{plugin}\" gives none for {address}: {why}")]
    Plugin {
        /// The program.
        plugin: String,
        /// The API server.
        address: String,
        /// Why.
        why: String,
    },
    /// Nobody answers before the run has to end.
    #[error("no answer from the API server at {address} before the deadline")]
    Deadline {
        /// The API server.
        address: String,
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
    /// Not even its version may be asked for.
    #[error("the API server at {address} forbids asking for its version: {why}")]
    Forbidden {
        /// The API server.
        address: String,
        /// In its words.
        why: String,
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
            Self::Dangling { what, known, .. } => match known.as_slice() {
                [] => format!("the kubeconfig has no {what}s: fetch a new one"),
                known => {
                    format!("the {what}s that there are: {}; correct the context, or pass --context", known.join(", "))
                }
            },
            Self::Plugin { plugin, .. } => {
                format!(
                    "is \"{plugin}\" installed, on the PATH, and logged in? Or choose other credentials with --context"
                )
            }
            Self::Credentials { .. } | Self::Unauthorized { .. } => {
                "log in again, or choose other credentials with --context".into()
            }
            Self::Forbidden { .. } => {
                "check with: kubectl auth can-i get /version; the ClusterRole system:public-info-viewer allows it, or \
                 choose other credentials with --context"
                    .into()
            }
            Self::Unreachable { .. } | Self::NoApiServer { .. } | Self::Deadline { .. } => {
                "check that the cluster runs and that its address is right: `kubectl version`".into()
            }
            Self::NotTrusted { .. } => {
                "the kubeconfig has no certificate-authority-data, or that of another cluster: fetch a new kubeconfig"
                    .into()
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

/// The same within the deadline of a run.
///
/// # Errors
/// A [`ConnectError`], with its hint.
pub async fn connect_until(global: &Global, deadline: Instant) -> Result<kube::Client, Failure> {
    try_connect(INSTALLER_MANAGER, global, Some(deadline)).await.map_err(failure)
}

/// The same under another name, which audit logs show as the user agent.
///
/// # Errors
/// A [`ConnectError`], with its hint.
pub async fn connect_as(name: &str, global: &Global) -> Result<kube::Client, Failure> {
    try_connect(name, global, None).await.map_err(failure)
}

fn failure(error: ConnectError) -> Failure {
    let hint = error.hint();
    let code = match error {
        ConnectError::UnknownContext { .. } => Code::Usage,
        ConnectError::Deadline { .. } => Code::NotReady,
        _ => Code::Failed,
    };
    Failure::new(code, error).hint(hint)
}

async fn try_connect(name: &str, global: &Global, deadline: Option<Instant>) -> Result<kube::Client, ConnectError> {
    let mut config = configuration(global).await?;
    config.connect_timeout = Some(CONNECT);
    // Repetitions are ours: they are reported and end at the run's deadline.
    config.default_retry = false;
    if let Ok(agent) = HeaderValue::try_from(format!("{name}/{VERSION}")) {
        config.headers.push((USER_AGENT, agent));
    }
    let address = config.cluster_url.to_string().trim_end_matches('/').to_owned();
    let plugin = config.auth_info.exec.as_ref().map(|exec| exec.command.clone().unwrap_or_default());
    let client =
        kube::Client::try_from(config).map_err(|error| no_credentials(address.clone(), plugin.clone(), &error))?;
    let patience = super::request::now() + CONNECT * 2;
    let until = deadline.map_or(patience, |deadline| deadline.min(patience));
    match tokio::time::timeout_at(until, client.apiserver_version()).await {
        Ok(Ok(_)) => Ok(client),
        Ok(Err(error)) => Err(probe_error(address, plugin, error)),
        Err(_) if until < patience => Err(ConnectError::Deadline { address }),
        Err(_) => Err(ConnectError::Unreachable { address, why: "no answer in time".into() }),
    }
}

fn probe_error(address: String, plugin: Option<String>, error: kube::Error) -> ConnectError {
    match error {
        kube::Error::Api(status) if status.code == 401 => ConnectError::Unauthorized { address },
        kube::Error::Api(status) if status.code == 403 => {
            ConnectError::Forbidden { address, why: first_line(&status.message) }
        }
        kube::Error::Api(status) => ConnectError::NoApiServer { address, why: first_line(&status.message) },
        kube::Error::SerdeError(source) => ConnectError::NoApiServer { address, why: source.to_string() },
        error if of_credentials(&error).is_some() => no_credentials(address, plugin, &error),
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
    check_context(&file, &context, &kubeconfig)?;
    let options = KubeConfigOptions { context: Some(context), ..KubeConfigOptions::default() };
    Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(|error| file_error(file, error))
}

/// A user that does not exist would make us anonymous, and the error one about
/// permissions.
fn check_context(file: &str, name: &str, kubeconfig: &Kubeconfig) -> Result<(), ConnectError> {
    let context = kubeconfig.contexts.iter().find(|context| context.name == name);
    let Some(context) = context.and_then(|context| context.context.as_ref()) else { return Ok(()) };
    let users: Vec<String> = kubeconfig.auth_infos.iter().map(|user| user.name.clone()).collect();
    let clusters: Vec<String> = kubeconfig.clusters.iter().map(|cluster| cluster.name.clone()).collect();
    let user = context.user.as_ref().filter(|user| !user.is_empty());
    for (what, wanted, known) in [("cluster", Some(&context.cluster), clusters), ("user", user, users)] {
        if let Some(wanted) = wanted.filter(|wanted| !known.contains(wanted)) {
            let (file, name, context) = (file.to_owned(), wanted.clone(), name.to_owned());
            return Err(ConnectError::Dangling { file, what, name, context, known });
        }
    }
    Ok(())
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
            ConnectError::Malformed { file, why: unquoted(&why) }
        }
        error => ConnectError::Malformed { file, why: first_line(&error.to_string()) },
    }
}

/// Without the text that was found in the place of something else: it may be
/// a credential, or the whole of a file that is none of ours.
fn unquoted(why: &str) -> String {
    match (why.find('"'), why.rfind('"')) {
        (Some(first), Some(last)) if why.contains("invalid ") => {
            // A message that was cut short has no second quote.
            let rest = if last > first { why.get(last + 1..).unwrap_or_default() } else { "" };
            format!("{}{rest}", why.get(..first).unwrap_or_default().trim_end())
        }
        _ => why.to_owned(),
    }
}

/// The standard output of a plugin may hold a token, and is left out.
fn no_credentials(address: String, plugin: Option<String>, error: &kube::Error) -> ConnectError {
    let why = match of_credentials(error) {
        Some(AuthError::AuthExecRun { out, .. }) => {
            let said = String::from_utf8_lossy(&out.stderr);
            let said = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            format!("{}: {}", out.status, first_line(said.trim()))
        }
        Some(AuthError::AuthExecParse(_)) => "its output is no ExecCredential".to_owned(),
        _ => root_cause(error),
    };
    match plugin {
        Some(plugin) => ConnectError::Plugin { plugin, address, why },
        None => ConnectError::Credentials { address, why },
    }
}

/// What went wrong with credentials, wherever the library puts it.
fn of_credentials(error: &kube::Error) -> Option<&AuthError> {
    match error {
        kube::Error::Auth(error) => Some(error),
        error => chain(error).find_map(|cause| cause.downcast_ref()),
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

/// What the API server says, or what is in the way, without the library's words
/// around it, which repeat all of that.
pub fn plain(error: &kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => {
            anyhow::anyhow!("the API server answers {}: {}", status.code, first_line(&status.message))
        }
        error => anyhow::anyhow!(root_cause(error)),
    }
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
