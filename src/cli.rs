//! The command line: parse, dispatch, exit code. One file per verb.

mod access;
pub mod build;
pub mod bundle;
pub mod certs;
pub mod cluster;
pub mod companion;
pub mod completions;
pub mod credentials;
pub mod exit;
pub mod export;
pub mod files;
pub mod host;
pub mod image;
pub mod images;
pub mod key;
pub mod log;
pub mod profile;
pub mod ps;
pub mod report;
pub mod screen;
pub mod server;
pub mod token;
pub mod up;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use exit::Failure;

/// A self-hosted BuildKit build farm that installs itself.
#[derive(Debug, Parser)]
#[command(name = "bko-install", version, propagate_version = true, disable_help_subcommand = true)]
pub struct Cli {
    /// Options that every command takes.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Path to the kubeconfig file [default: $KUBECONFIG, then ~/.kube/config, then the pod's service account]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<std::path::PathBuf>,
    /// Context of the kubeconfig to use; of `build`, which uses none, what to build
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Never use colour
    #[arg(long, global = true)]
    pub no_color: bool,
    /// Print errors only
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more; twice prints everything
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// How to print results; flattened into every command that prints any. Not
/// global, because `image --output FILE` means a file.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// How to print results
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// How results are printed: data goes to standard output, messages to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs: one JSON document, or one event a line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the farm on this host; needs no cluster
    Up(Box<up::UpCommand>),
    /// Print what the daemon of a project on this host has said
    Logs(Box<host::LogsArgs>),
    /// Send the daemon of a project on this host to zero before its time; its cache stays
    Stop(Box<host::StopArgs>),
    /// Remove a project on this host with its cache and snapshots
    Rm(Box<host::RmArgs>),
    /// Empty the caches of projects on this host that nobody has used for long
    Prune(Box<host::PruneArgs>),
    /// Install, plan, check and inspect the farm in a cluster
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Write the manifests for GitOps; needs no cluster
    Export(export::ExportArgs),
    /// Build an image on the farm: route, build with docker buildx or buildctl, release
    Build(Box<build::BuildArgs>),
    /// Print what a CI system needs: address, token, certificate
    Credentials(credentials::CredentialsArgs),
    /// Replace the token of the routing API
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// List and show profiles
    #[command(subcommand)]
    Profile(profile::ProfileCommand),
    /// List, export, make and replace certificates
    #[command(subcommand)]
    Certs(certs::CertsCommand),
    /// Write this executable as an OCI image; needs no Docker
    Image(image::ImageArgs),
    /// List the images that an installation pulls; needs no cluster
    #[command(subcommand)]
    Images(images::ImagesCommand),
    /// Run the roles controller, route and gateway
    Server(Box<server::ServerCommand>),
    /// Run the sidecar of a daemon
    Companion(Box<companion::CompanionCommand>),
    /// Show what runs where: daemons, their builds, and when they go to zero
    Ps(Box<ps::PsArgs>),
    /// Print the project key of a repository; needs no cluster
    Key(key::KeyArgs),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Runs one command line to its exit code.
pub fn run(cli: Cli) -> ExitCode {
    let global = &cli.global;
    exit::finish(match cli.command {
        Command::Up(command) => up::run(*command, global),
        Command::Logs(args) => host::logs(&args),
        Command::Stop(args) => host::stop(&args, global),
        Command::Rm(args) => host::rm(&args, global),
        Command::Prune(args) => host::prune(&args, global),
        Command::Cluster(command) => cluster::run(command, global),
        Command::Export(args) => export::run(args, global),
        // Its exit code is the builder's.
        Command::Build(args) => return build::run(*args, global),
        Command::Credentials(args) => credentials::run(args, global),
        Command::Token(command) => token::run(command, global),
        Command::Profile(command) => profile::run(command, global),
        Command::Certs(command) => certs::run(command, global),
        Command::Image(args) => image::run(args, global),
        Command::Images(command) => images::run(command),
        Command::Server(args) => server::run(*args, global),
        Command::Companion(command) => companion::run(*command, global),
        Command::Ps(args) => ps::run(*args, global),
        Command::Key(args) => key::run(args, global),
        Command::Completions { shell } => completions::run(shell),
    })
}

/// Runs an asynchronous command to its end.
///
/// # Errors
/// The command's own, or that the runtime cannot start.
pub fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::runtime::Runtime::new()?.block_on(future)
}
