//! The document of `/openapi.json`: what each endpoint takes and gives, from
//! the types that it takes and gives. Pure, but for the one handler.

#[expect(dead_code, reason = "describes what is read field by field")]
mod requests;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, OperationBuilder, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{
    ComponentsBuilder, ContentBuilder, HttpMethod, InfoBuilder, Object, ObjectBuilder, OpenApiBuilder, PathsBuilder,
    Ref, RefOr, Required, ResponseBuilder, Schema, Type,
};
use utoipa::{PartialSchema, ToSchema};

use super::answer::{Endpoint as Routed, IGNORED_FIELDS, Refusal, WAITING_FOR};
use super::endpoints::{ENDPOINTS, Endpoint, Methods};
use super::identity::ADMIN_HEADER;
use super::projects::{LARGEST_PAGE, PAGE};
use super::{Config, Shared};
use crate::key::Arch;
use crate::provisioner::project::{Detail, Page, Phase};
use requests::{BuildEnded, OldestEnded, ProjectRequest, RequestedArch};

/// `GET /openapi.json`.
pub(super) async fn serve(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Refusal::read_only().into_response();
    }
    ([(header::CONTENT_TYPE, "application/json")], shared.document.clone()).into_response()
}

/// `/healthz`: by any method that there is, as load balancers differ.
pub(super) async fn health(request: Request) -> Response {
    if Methods::All.names().contains(&request.method().as_str()) {
        return StatusCode::OK.into_response();
    }
    Refusal::unknown_method(&Methods::All.names().join(", ")).into_response()
}

/// The document of an API that runs with this configuration.
pub(super) fn document(config: &Config) -> String {
    let open = config.auth.is_open();
    let identities = config.auth.has_providers();
    let paths = ENDPOINTS.iter().fold(PathsBuilder::new(), |paths, endpoint| {
        let methods = endpoint.methods.documented().into_iter();
        let operations = methods.map(|method| (method.clone(), operation(endpoint, &method, open, identities)));
        let item = operations.fold(PathItem::default(), |mut item, (method, operation)| {
            item.merge_operations(PathItem::new(method, operation));
            item
        });
        paths.path(endpoint.path, item)
    });
    let components = components(open);
    let info = InfoBuilder::new().title("bko-install routing API").version(crate::VERSION).description(Some(ABOUT));
    let document = OpenApiBuilder::new().info(info).paths(paths).components(Some(components)).build();
    // The document is made of plain values: it always has a JSON form.
    document.to_json().unwrap_or_default()
}

const ABOUT: &str = "Endpoints of warm BuildKit daemons, one per project. Every refusal is one line of text. A method that \
     a path does not have is answered 405 with `Allow`, after the caller has been identified.";

const BEARER: &str = "bearer";
const ADMIN: &str = "admin";

fn components(open: bool) -> utoipa::openapi::Components {
    let mut schemas = Vec::new();
    Page::schemas(&mut schemas);
    Detail::schemas(&mut schemas);
    let components = ComponentsBuilder::new()
        .schemas_from_iter(schemas)
        .schema(Page::name(), Page::schema())
        .schema(Detail::name(), Detail::schema())
        .schema(Phase::name(), Phase::schema())
        .schema(Arch::name(), Arch::schema())
        .schema(ProjectRequest::name(), ProjectRequest::schema())
        .schema(RequestedArch::name(), RequestedArch::schema())
        .schema(BuildEnded::name(), BuildEnded::schema())
        .schema(OldestEnded::name(), OldestEnded::schema())
        .schema("Endpoint", Routed::schema());
    if open {
        return components.build();
    }
    let bearer = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("the shared token, or a CI job's token of a configured provider"))
        .build();
    let admin = ApiKeyValue::with_description(ADMIN_HEADER.as_str(), "the admin token");
    components
        .security_scheme(BEARER, SecurityScheme::Http(bearer))
        .security_scheme(ADMIN, SecurityScheme::ApiKey(ApiKey::Header(admin)))
        .build()
}

impl Methods {
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Post => &["POST"],
            Self::Read => &["GET", "HEAD"],
            Self::All => &["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"],
        }
    }

    fn documented(self) -> Vec<HttpMethod> {
        let method = |name: &str| match name {
            "HEAD" => HttpMethod::Head,
            "POST" => HttpMethod::Post,
            "PUT" => HttpMethod::Put,
            "DELETE" => HttpMethod::Delete,
            "OPTIONS" => HttpMethod::Options,
            "PATCH" => HttpMethod::Patch,
            "TRACE" => HttpMethod::Trace,
            _ => HttpMethod::Get,
        };
        self.names().iter().map(|name| method(name)).collect()
    }
}

fn operation(endpoint: &Endpoint, method: &HttpMethod, open: bool, identities: bool) -> Operation {
    let mut operation = (endpoint.operation)();
    if !identities {
        // Only a caller that is bound to a repository can be told that another is not its own.
        operation.responses.responses.remove(StatusCode::FORBIDDEN.as_str());
        if endpoint.methods == Methods::Read {
            // And nothing else that they need can be away.
            operation.responses.responses.remove(StatusCode::SERVICE_UNAVAILABLE.as_str());
        }
    }
    let id = operation.operation_id.take().unwrap_or_default();
    operation.operation_id = Some(match method {
        HttpMethod::Get | HttpMethod::Post if endpoint.methods != Methods::All => id,
        HttpMethod::Get => id,
        method => format!("{id}-{}", json!(method).as_str().unwrap_or_default()),
    });
    if *method == HttpMethod::Head {
        // The same head, no body.
        for response in operation.responses.responses.values_mut() {
            if let RefOr::T(response) = response {
                response.content.clear();
            }
        }
    }
    if endpoint.identified && !open {
        let either = [BEARER, ADMIN].map(|scheme| SecurityRequirement::new(scheme, Vec::<String>::new()));
        operation.security = Some(either.to_vec());
    }
    operation
}

pub(super) fn route() -> Operation {
    let endpoint = ResponseBuilder::new().description("the endpoint; the build is registered, the daemon ready");
    refusals(start("route", "An endpoint for one build"), IDENTIFIED)
        .request_body(Some(project_request()))
        .response("200", with_ignored(endpoint.content("application/json", content("Endpoint"))))
        .response("500", text("the store of projects refuses, and waiting does not help"))
        .response("503", retry("the store is away, the queue is full, the daemon fails to start, or the issuer's keys are not known yet"))
        .response("504", waiting())
        .build()
}

pub(super) fn prewarm() -> Operation {
    let woken = ResponseBuilder::new()
        .description(
            "the daemon is wanted; `ready` says whether a route would be answered at once, `/projects/{key}` the rest",
        )
        .content("application/json", content("Endpoint"));
    refusals(start("prewarm", "Wake a project's daemon; wait for nothing, register nothing"), IDENTIFIED)
        .request_body(Some(project_request()))
        .response("202", with_ignored(woken))
        .response("500", text("the store of projects refuses, and waiting does not help"))
        .response("503", retry("the store is away, or the issuer's keys are not known yet"))
        .build()
}

pub(super) fn complete() -> Operation {
    let either = utoipa::openapi::schema::AnyOfBuilder::new()
        .item(Ref::from_schema_name(BuildEnded::name()))
        .item(Ref::from_schema_name(OldestEnded::name()));
    let body = ContentBuilder::new().schema(Some(either)).build();
    let ended = ResponseBuilder::new().description("the build has ended, or was not known");
    refusals(start("complete", "A build has ended"), IDENTIFIED)
        .request_body(Some(RequestBodyBuilder::new().content(JSON, body).required(Some(Required::True)).build()))
        .response("204", with_ignored(ended))
        .response("500", text("the store of projects refuses, and waiting does not help"))
        .response("503", retry("the store is away, or the issuer's keys are not known yet"))
        .build()
}

pub(super) fn projects() -> Operation {
    let page = ResponseBuilder::new().description("one page, in the order of keys").content(JSON, content("Page"));
    let limit = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(LARGEST_PAGE));
    refusals(start("projects", "What runs where, page by page"), IDENTIFIED)
        .parameter(query("repo", "Of this repository alone, in any spelling", reference()))
        .parameter(query("phase", "In this phase alone", Ref::from_schema_name(Phase::name())))
        .parameter(query("limit", "Projects of a page", limit.default(Some(json!(PAGE)))))
        .parameter(query("continue", "As the page before gave it", project_key()))
        .response("200", with_ignored(page))
        .build()
}

pub(super) fn project() -> Operation {
    let key = ParameterBuilder::new().name("key").parameter_in(ParameterIn::Path).required(Required::True);
    let key = key.description(Some("Routing key, as `/route` gives it")).schema(Some(project_key()));
    let found = ResponseBuilder::new().description("all that is known").content(JSON, content("Detail"));
    refusals(start("project", "All that is known of one project"), &IDENTIFIED[1..])
        .parameter(key)
        .response("200", found)
        .response("404", text("no such project, or none that the caller may know of"))
        .build()
}

pub(super) fn openapi() -> Operation {
    let schema = ObjectBuilder::new().schema_type(Type::Object).build();
    let this = ContentBuilder::new().schema(Some(schema)).build();
    start("openapi", "This document; for anybody")
        .response("200", ResponseBuilder::new().description("this document").content(JSON, this))
        .build()
}

pub(super) fn healthz() -> Operation {
    start("healthz", "For probes, by any of these methods and for anybody")
        .response("200", ResponseBuilder::new().description("the process serves"))
        .build()
}

const JSON: &str = "application/json";

fn start(id: &str, summary: &str) -> OperationBuilder {
    OperationBuilder::new().operation_id(Some(id)).summary(Some(summary))
}

/// What every call of an identified caller may be answered; the first only
/// where there is anything to get wrong.
const IDENTIFIED: &[StatusCode] = &[
    StatusCode::BAD_REQUEST,
    StatusCode::UNAUTHORIZED,
    StatusCode::FORBIDDEN,
    StatusCode::TOO_MANY_REQUESTS,
    StatusCode::SERVICE_UNAVAILABLE,
];

fn refusals(operation: OperationBuilder, statuses: &[StatusCode]) -> OperationBuilder {
    statuses.iter().fold(operation, |operation, status| {
        let response = match *status {
            StatusCode::UNAUTHORIZED => text("no credential that is accepted")
                .header("WWW-Authenticate", header("the scheme; of a JWT, what is wrong with it")),
            StatusCode::FORBIDDEN => text("the repository is not on the allowlist, or the build is another's"),
            StatusCode::SERVICE_UNAVAILABLE => {
                retry("the keys of the token's issuer, or the projects, are not known yet")
            }
            StatusCode::TOO_MANY_REQUESTS => retry("too many calls, or too many builds of the project"),
            _ => text("what is wrong with the request"),
        };
        operation.response(status.as_str(), response)
    })
}

fn text(description: &str) -> ResponseBuilder {
    let line = ContentBuilder::new().schema(Some(Object::with_type(Type::String))).build();
    ResponseBuilder::new().description(description).content("text/plain", line)
}

fn retry(description: &str) -> ResponseBuilder {
    let seconds = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1));
    let after = HeaderBuilder::new().schema(Some(seconds)).description(Some("seconds to wait before the next try"));
    text(description).header(header::RETRY_AFTER.as_str(), after.build())
}

fn waiting() -> ResponseBuilder {
    text("the daemon did not become ready in time")
        .header(WAITING_FOR.as_str(), header("what was missing, where that is known"))
}

fn with_ignored(response: ResponseBuilder) -> ResponseBuilder {
    response.header(IGNORED_FIELDS.as_str(), header("what was sent and not known, if anything"))
}

fn header(description: &str) -> utoipa::openapi::Header {
    HeaderBuilder::new().schema(Some(Object::with_type(Type::String))).description(Some(description)).build()
}

fn content(schema: &str) -> utoipa::openapi::Content {
    ContentBuilder::new().schema(Some(Ref::from_schema_name(schema))).build()
}

fn project_request() -> utoipa::openapi::request_body::RequestBody {
    let body = content(&ProjectRequest::name());
    RequestBodyBuilder::new().content(JSON, body).required(Some(Required::True)).build()
}

fn query(name: &str, description: &str, schema: impl Into<RefOr<Schema>>) -> ParameterBuilder {
    let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Query).required(Required::False);
    parameter.description(Some(description)).schema(Some(schema))
}

fn reference() -> Object {
    let format = utoipa::openapi::SchemaFormat::Custom("git-reference".to_owned());
    ObjectBuilder::new().schema_type(Type::String).format(Some(format)).min_length(Some(1)).build()
}

fn project_key() -> Object {
    ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[0-9a-z-]{0,52}[0-9a-z]$")).build()
}
