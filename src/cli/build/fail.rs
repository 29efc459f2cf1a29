//! What went wrong with a build, as an exit code and a way to mend it.

use crate::cli::access::{self, RENEW};
use crate::cli::exit::{Code, Failure};
use crate::client::builder::{FindError, Unsupported};
use crate::client::{ApiError, BuildError, DialError, Shown};

pub(super) fn failure(error: BuildError, shown: Shown) -> Failure {
    let code = match &error {
        BuildError::NotInTime { .. } => Code::NotReady,
        BuildError::Unsupported(_) | BuildError::Tls(_) => Code::Usage,
        _ => Code::Failed,
    };
    let hint = hint(&error, shown);
    Failure { hint, ..Failure::new(code, error) }
}

const BUILDX: &str = "choose the builder with --builder buildx";

pub(super) fn unsupported(error: Unsupported) -> Failure {
    Failure::new(Code::Usage, error).hint(BUILDX)
}

pub(super) fn no_builder(error: FindError) -> Failure {
    Failure::new(Code::Failed, error).hint(
        "install Docker with buildx, or buildx, or buildctl: https://github.com/docker/buildx, \
         https://github.com/moby/buildkit/releases",
    )
}

fn hint(error: &BuildError, shown: Shown) -> Option<String> {
    Some(match error {
        BuildError::Refused { source, .. } => return access::hint(source, shown),
        BuildError::NotInTime { source: Some(source), .. } => match source {
            ApiError::Refused { .. } => {
                "allow more time with --route-wait; `kubectl get buildprojects` says what daemons wait for".into()
            }
            source => return access::hint(source, shown),
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
        BuildError::Tls(_) => RENEW.into(),
        BuildError::Unsupported(_) => BUILDX.into(),
        _ => return None,
    })
}
