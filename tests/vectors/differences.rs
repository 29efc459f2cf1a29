//! Where we answer otherwise than the record, on purpose.

use super::replay::Difference;

/// Every wanted difference; the rows are explained in `docs/compatibility.md`.
pub(crate) const DIFFERENCES: [Difference; 4] = [
    Difference {
        exchanges: &[
            "prewarm-absent",
            "prewarm-again-cold",
            "prewarm-warm",
            "prewarm-ignores-untrusted",
            "token-scheme-any-case",
            "admin-right",
            "admin-right-bearer-only",
            "oidc-repo-omitted",
            "oidc-admin-header-trusts-body",
            "gateway-port-443",
            "port-4321-prewarm",
        ],
        row: "BF-41",
        ours: |response| {
            response.headers.insert("content-type".to_owned(), "application/json".to_owned());
        },
        last: false,
    },
    Difference {
        exchanges: &["oidc-pull-request-is-untrusted"],
        row: "BF-13",
        ours: |response| {
            response.body["key"] = "fork7-p41bd34a2227aca39".into();
            response.body["endpoint"] = "tcp://buildkitd-fork7-p41bd34a2227aca39.buildkit-builds.svc:1234".into();
        },
        last: false,
    },
    Difference {
        exchanges: &["double-slash-redirects"],
        row: "BF-41",
        ours: |response| {
            response.status = 404;
            response.headers.clear();
            response.headers.insert("content-type".to_owned(), "text/plain; charset=utf-8".to_owned());
            response.headers.insert("x-content-type-options".to_owned(), "nosniff".to_owned());
            response.body = "404 page not found\n".into();
        },
        last: false,
    },
    // Last: it makes a project and waits for its daemon.
    Difference {
        exchanges: &["route-unknown-field"],
        row: "BF-21",
        ours: |response| {
            response.status = 200;
            response.headers.clear();
            response.headers.insert("content-type".to_owned(), "application/json".to_owned());
            response.headers.insert("x-buildkit-operator-ignored-fields".to_owned(), "branch".to_owned());
            response.body = serde_json::json!({
                "key": "p280ada3d8fae4e39",
                "buildId": "<buildId>",
                "endpoint": "tcp://buildkitd-p280ada3d8fae4e39.buildkit-builds.svc:1234",
                "namespace": "buildkit-builds",
                "ready": true,
            });
        },
        last: true,
    },
];
