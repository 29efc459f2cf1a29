//! What went wrong with a build, as an exit code and a way to mend it.

use crate::cli::access::{self, RENEW};
use crate::cli::exit::{Code, Failure};
use crate::client::builder::{FindError, Unsupported};
use crate::client::{ApiError, BuildError, DialError, Shown};
use crate::local::control::Info;

/// `local`: of the farm on this host.
pub(super) fn failure(error: BuildError, shown: Shown, local: Option<&Info>) -> Failure {
    let code = match &error {
        BuildError::NotInTime { .. } => Code::NotReady,
        BuildError::Unsupported(_) | BuildError::Tls(_) => Code::Usage,
        _ => Code::Failed,
    };
    let hint = hint(&error, shown, local);
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

fn hint(error: &BuildError, shown: Shown, local: Option<&Info>) -> Option<String> {
    let state = local.map(Info::state_flag).unwrap_or_default();
    Some(match error {
        BuildError::Refused { source, .. } => return access::hint(source, shown),
        BuildError::NotInTime { source: Some(source), .. } => match source {
            ApiError::Refused { .. } if local.is_some() => format!(
                "allow more time with --route-wait; `bko-install logs KEY{state}` prints what its daemon says, and \
                 `bko-install ps --all{state}` the keys"
            ),
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
        BuildError::Dial { source: DialError::Away { .. }, key } if local.is_some() => {
            format!("`bko-install ps{state}` says whether it is up, `bko-install logs {key}{state}` what it says")
        }
        BuildError::Dial { source: DialError::Away { .. }, .. } => {
            "is the gateway's port open to you? `bko-install cluster status` says whether it is ready".into()
        }
        BuildError::Tls(_) => RENEW.into(),
        BuildError::Unsupported(_) => BUILDX.into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    fn info() -> Info {
        Info {
            pid: 1,
            state: "/my farm".into(),
            usual: false,
            api: String::new(),
            port: 1,
            token: None,
            certificates: "/c".into(),
            domain: None,
            gateway: None,
            buildkit: String::new(),
            storage: String::new(),
        }
    }

    fn refused(status: StatusCode, text: &str) -> ApiError {
        ApiError::Refused { status, text: text.into(), retry_after: None, waiting_for: None }
    }

    #[test]
    fn hints_speak_of_the_farm_that_was_asked() {
        let late = BuildError::NotInTime {
            what: "x".into(),
            waited: std::time::Duration::ZERO,
            source: Some(refused(StatusCode::SERVICE_UNAVAILABLE, "not ready")),
        };
        let (local, cluster) = (hint(&late, Shown::Token, Some(&info())), hint(&late, Shown::Token, None));
        assert!(local.unwrap().contains("`bko-install logs KEY --state-dir '/my farm'`"));
        assert!(cluster.unwrap().contains("kubectl"));
    }

    #[test]
    fn a_403_with_a_reason_has_no_other() {
        let hint = |text| {
            let source = refused(StatusCode::FORBIDDEN, text);
            hint(&BuildError::Refused { what: "x".into(), source }, Shown::Token, Some(&info()))
        };
        assert_eq!(hint("untrusted builds are not isolated from others on this host"), None);
        assert!(hint("Forbidden").unwrap().contains("docs/identity.md"));
    }
}
