//! Bodies of requests, for the document alone: they are read field by field, in
//! any case and with unknown fields named. A test holds the two together.

use utoipa::ToSchema;

/// Body of `/route` and `/prewarm`. Unknown fields are ignored, and named in a header.
#[derive(ToSchema)]
pub(super) struct ProjectRequest {
    /// Repository in any spelling; all of one repository converge. At most 512 bytes.
    #[schema(format = "git-reference", min_length = 1, max_length = 512)]
    repo: String,
    /// Component of a monorepo, without control characters. At most 128 bytes.
    #[schema(format = "label", max_length = 128)]
    name: Option<String>,
    /// Target of the Dockerfile, without control characters; `default` when absent. At most 128 bytes.
    #[schema(format = "label", max_length = 128)]
    target: Option<String>,
    // What is said of a reference beside it becomes a second, contradictory type.
    arch: RequestedArch,
    /// The build comes from code that nobody has reviewed: it gets a daemon of its own.
    untrusted: Option<bool>,
}

/// Architecture to build natively; `x86_64` is `amd64`, `aarch64` is `arm64`.
#[derive(ToSchema)]
pub(super) enum RequestedArch {
    #[schema(rename = "amd64")]
    Amd64,
    #[schema(rename = "arm64")]
    Arm64,
    #[schema(rename = "x86_64")]
    X86,
    #[schema(rename = "aarch64")]
    Aarch,
}

/// Body of `/complete`: which build has ended. Unknown fields are ignored.
#[derive(ToSchema)]
pub(super) struct BuildEnded {
    /// As `/route` gave it.
    #[schema(min_length = 1, max_length = 64, pattern = r"\S")]
    key: String,
    /// As `/route` gave it.
    #[serde(rename = "buildId")]
    #[schema(pattern = "^[0-9A-Fa-f]{16}$")]
    build_id: String,
}

/// Body of `/complete` without a build: the oldest entry of the project has
/// ended. Refused with `--require-build-id`.
#[derive(ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OldestEnded {
    /// As `/route` gave it.
    #[schema(min_length = 1, max_length = 64, pattern = r"\S")]
    key: String,
    /// Nothing.
    #[serde(rename = "buildId")]
    #[schema(max_length = 0)]
    build_id: Option<String>,
}
