//! What is served: the one table behind both the routes and the document of
//! `/openapi.json`, so that neither can have what the other has not.

use std::sync::Arc;

use axum::routing::{MethodRouter, any};
use utoipa::openapi::path::Operation;

use super::{Shared, handlers, openapi, projects};

/// The methods of a path. Others are answered 405, after the caller has been
/// identified and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Methods {
    /// Does something.
    Post,
    /// Can only be read.
    Read,
    /// Whatever the probe of a load balancer uses.
    All,
}

/// One path.
pub(super) struct Endpoint {
    /// As axum and OpenAPI both spell it.
    pub(super) path: &'static str,
    pub(super) methods: Methods,
    pub(super) handler: fn() -> MethodRouter<Arc<Shared>>,
    /// What it takes and gives.
    pub(super) operation: fn() -> Operation,
    /// Whether the caller must have an identity.
    pub(super) identified: bool,
}

pub(super) const ENDPOINTS: [Endpoint; 7] = [
    Endpoint {
        path: "/route",
        methods: Methods::Post,
        handler: || any(handlers::route),
        operation: openapi::route,
        identified: true,
    },
    Endpoint {
        path: "/prewarm",
        methods: Methods::Post,
        handler: || any(handlers::prewarm),
        operation: openapi::prewarm,
        identified: true,
    },
    Endpoint {
        path: "/complete",
        methods: Methods::Post,
        handler: || any(handlers::complete),
        operation: openapi::complete,
        identified: true,
    },
    Endpoint {
        path: "/projects",
        methods: Methods::Read,
        handler: || any(projects::list),
        operation: openapi::projects,
        identified: true,
    },
    Endpoint {
        path: "/projects/{key}",
        methods: Methods::Read,
        handler: || any(projects::show),
        operation: openapi::project,
        identified: true,
    },
    Endpoint {
        path: "/openapi.json",
        methods: Methods::Read,
        handler: || any(openapi::serve),
        operation: openapi::openapi,
        identified: false,
    },
    Endpoint {
        path: "/healthz",
        methods: Methods::All,
        handler: || any(openapi::health),
        operation: openapi::healthz,
        identified: false,
    },
];
