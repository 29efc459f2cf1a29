//! What went wrong with a build, as an exit code and a way to mend it.

use std::error::Error as _;

use crate::cli::exit::{Code, Failure};
use crate::client::builder::Unsupported;
use crate::client::{ApiError, BuildError, CertificatesError, DialError, HttpError, TlsError, TokenError};

pub(super) fn failure(error: BuildError) -> Failure {
    let code = match &error {
        BuildError::NotInTime { .. } => Code::NotReady,
        BuildError::Unsupported(_) | BuildError::Tls(_) => Code::Usage,
        _ => Code::Failed,
    };
    let hint = hint(&error);
    with_hint(Failure::new(code, error), hint)
}

pub(super) fn certificates(error: CertificatesError) -> Failure {
    Failure::new(Code::Usage, error)
        .hint("`bko-install credentials` prints the certificate, `bko-install certs export` writes its files")
}

pub(super) fn tls(error: TlsError) -> Failure {
    Failure::new(Code::Usage, error).hint(RENEW)
}

pub(super) fn unsupported(error: Unsupported) -> Failure {
    let hint = "choose the builder with --builder buildx".to_owned();
    with_hint(Failure::new(Code::Usage, error), Some(hint))
}

fn with_hint(failure: Failure, hint: Option<String>) -> Failure {
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

const RENEW: &str = "fetch it anew: `bko-install credentials`";

fn hint(error: &BuildError) -> Option<String> {
    Some(match error {
        BuildError::Refused { source, .. } => return api(source),
        BuildError::NotInTime { source: Some(source), .. } => match source {
            ApiError::Refused { .. } => {
                "allow more time with --route-wait; `kubectl get buildprojects` says what daemons wait for".into()
            }
            source => return api(source),
        },
        BuildError::NotInTime { .. } => "allow more time with --route-wait".into(),
        BuildError::Dial { source: DialError::Resolve { host, .. }, .. } if host.contains(".svc") => {
            "that name is known within the cluster only: from outside, install a gateway (gateway.domains)".into()
        }
        BuildError::Dial { source: DialError::Resolve { host, .. }, .. } => {
            let domain = host.split_once('.').map_or("", |(_, domain)| domain);
            format!("create the DNS record *.{domain}, or pass the gateway's address with --gateway-ip")
        }
        BuildError::Dial { source: DialError::NotTrusted { .. }, .. } => {
            format!("the CA is not the daemon's, or its certificate lacks that name; {RENEW}")
        }
        BuildError::Dial { source: DialError::Refused { .. }, .. } => {
            format!("it has expired, or comes from another farm; {RENEW}")
        }
        BuildError::Dial { source: DialError::Away { .. }, .. } => {
            "is the gateway's port open to you? `bko-install cluster status` says whether it is ready".into()
        }
        BuildError::Find(_) => "install Docker with buildx, or buildx, or buildctl: https://github.com/docker/buildx, \
             https://github.com/moby/buildkit/releases"
            .into(),
        BuildError::Tls(_) => RENEW.into(),
        BuildError::Unsupported(_) => "choose the builder with --builder buildx".into(),
        _ => return None,
    })
}

fn api(error: &ApiError) -> Option<String> {
    Some(match error {
        ApiError::Refused { status, .. } if status.as_u16() == 401 => {
            "set BUILDKIT_OPERATOR_TOKEN (`bko-install credentials`; the token may have been rotated), or let the job \
             have an identity (GitHub, Forgejo: `permissions: id-token: write`; GitLab: `id_tokens`). A pull request \
             from a fork has neither: see docs/build.md"
                .into()
        }
        ApiError::Refused { status, .. } if status.as_u16() == 403 => {
            "this repository is not among those that the farm serves".into()
        }
        ApiError::Refused { status, .. } if status.as_u16() == 404 => {
            "is that the address of the routing API? `bko-install credentials` prints it".into()
        }
        ApiError::Refused { .. } => return None,
        ApiError::Http(HttpError::NotTrusted { .. }) => {
            "pass the CA of the routing API with --api-ca; `bko-install credentials` hands it over".into()
        }
        ApiError::Http(_) => "check BUILDKIT_OPERATOR_BUILDD_URL: `bko-install credentials` prints it".into(),
        ApiError::Token(TokenError::Refused { .. } | TokenError::NoToken) => {
            "the job needs the permission `id-token: write`".into()
        }
        ApiError::Token(error) => return error.source().map(|_| "is the CI system reachable from the job?".into()),
        ApiError::Foreign(_) => "use the address that answers by itself; redirections are not followed".into(),
    })
}
