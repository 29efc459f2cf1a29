//! The main job on a real node, told to a person: `make demo`.

#![expect(clippy::disallowed_methods, reason = "the demo measures time")]
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "speaks to a person")]

#[path = "../cluster"]
mod shared {
    pub(crate) mod harness;
}

use std::process::ExitCode;
use std::sync::Arc;

use shared::harness::{self, Node};

async fn tell(node: Arc<Node>) -> anyhow::Result<()> {
    println!("A Kubernetes node runs at {}, the registry at {}.", node.address(), node.registry_address());
    Ok(())
}

fn main() -> ExitCode {
    harness::enter::<Node>(|node, runtime| match runtime.block_on(tell(node)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}
