//! `bko-install token`.

use anyhow::anyhow;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use clap::{Args, Subcommand};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::certs::{fetch_secret, refused};
use super::credentials::{Place, installed};
use super::exit::{Code, Failure};
use super::{Global, block_on, report};
use crate::cluster::client::connect;
use crate::names::INSTALLER_MANAGER;

/// Replace the token of the routing API.
#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Make a new token; the old one stays valid beside it
    ///
    /// The old token is valid until the next rotation, or until `token rotate --drop-previous`. The
    /// server reads both without a restart, within a minute or two: hand the new one out with
    /// `bko-install credentials` after that, then drop the old one.
    Rotate(RotateArgs),
}

/// Which token.
#[derive(Debug, Args)]
pub struct RotateArgs {
    /// Make no new token, but end the old one
    #[arg(long)]
    drop_previous: bool,
    #[command(flatten)]
    place: Place,
}

/// Key of the Secret that holds the token.
const TOKEN: &str = "token";
/// Key of the Secret that holds the one before.
const PREVIOUS: &str = "previous";
/// As the installer makes it.
const BYTES: usize = 32;

/// Runs the command.
pub fn run(command: TokenCommand, global: &Global) -> Result<(), Failure> {
    let TokenCommand::Rotate(args) = command;
    block_on(rotate(args, global))
}

async fn rotate(args: RotateArgs, global: &Global) -> Result<(), Failure> {
    let client = connect(global).await?;
    let namespace = &args.place.operator_namespace;
    let installed = installed::read(&client, &args.place).await?;
    let name = args.place.token_secret.clone().or(installed.token_secret).ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("this farm has no token: everybody may call it"))
            .hint("`bko-install cluster init --set auth.open=false` requires one")
    })?;
    let path = format!("{namespace}/{name}");
    let live = fetch_secret(&client, namespace, &name).await?.ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("there is no Secret \"{path}\""))
            .hint("`bko-install cluster init` makes it; name another with --operator-namespace and --token-secret")
    })?;
    let Some(change) = change(&live, args.drop_previous, random()?)? else {
        report::message(global, &format!("Secret \"{path}\" holds no previous token: nothing to do"));
        return Ok(());
    };
    let manager = PatchParams { field_manager: Some(INSTALLER_MANAGER.to_owned()), ..PatchParams::default() };
    let secrets: Api<Secret> = Api::namespaced(client, namespace);
    match secrets.patch(&name, &manager, &Patch::Merge(change)).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let error = anyhow!("Secret \"{path}\" has changed meanwhile, and was left alone");
            return Err(Failure::new(Code::Refused, error).hint("is somebody else rotating it? look, and run it again"));
        }
        Err(error) => return Err(refused("patch", namespace, &name, &error)),
    }
    report::message(global, if args.drop_previous { DROPPED } else { ROTATED });
    Ok(())
}

const DROPPED: &str = "the previous token is no longer valid";
const ROTATED: &str = "there is a new token; the previous one stays valid beside it\n\
    hand the new one out:  bko-install credentials\n\
    then end the old one:  bko-install token rotate --drop-previous";

/// What to write, if anything; refused by the server if the Secret is not the one that was read.
fn change(live: &Secret, drop_previous: bool, fresh: String) -> Result<Option<Value>, Failure> {
    let held = |key: &str| live.data.as_ref().and_then(|data| data.get(key)).filter(|value| !value.0.is_empty());
    let metadata = json!({"resourceVersion": live.metadata.resource_version, "uid": live.metadata.uid});
    if drop_previous {
        let change = json!({"metadata": metadata, "data": {PREVIOUS: null}});
        return Ok(live.data.as_ref().is_some_and(|data| data.contains_key(PREVIOUS)).then_some(change));
    }
    let current = held(TOKEN).ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("the Secret has no token under the key \"{TOKEN}\""))
            .hint("`bko-install cluster init` makes one")
    })?;
    let data = json!({TOKEN: ByteString(fresh.into_bytes()), PREVIOUS: current});
    Ok(Some(json!({"metadata": metadata, "data": data})))
}

#[expect(clippy::disallowed_methods, reason = "a token that nobody can guess")]
fn random() -> Result<String, Failure> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("the system has no randomness: {error}"))?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(data: Value) -> Secret {
        serde_json::from_value(json!({"metadata": {"resourceVersion": "7", "uid": "u"}, "data": data})).unwrap()
    }

    #[test]
    fn the_old_token_stays_beside_the_new_one() {
        let change = change(&secret(json!({"token": "b2xk", "previous": "b2xkZXI="})), false, "new".into()).unwrap();
        let want = json!({
            "metadata": {"resourceVersion": "7", "uid": "u"},
            "data": {"token": "bmV3", "previous": "b2xk"},
        });
        assert_eq!(change, Some(want));
    }

    #[test]
    fn only_the_previous_one_is_dropped() {
        let change = |data: Value| change(&secret(data), true, "new".into()).unwrap();
        assert_eq!(change(json!({"token": "b2xk", "previous": "eA=="})).unwrap()["data"], json!({"previous": null}));
        assert_eq!(change(json!({"token": "b2xk"})), None);
    }

    #[test]
    fn without_a_token_there_is_nothing_to_rotate() {
        assert!(change(&secret(json!({})), false, "new".into()).is_err());
    }

    #[test]
    fn tokens_differ() {
        let (a, b) = (random().unwrap(), random().unwrap());
        assert!(a != b && a.len() == 43);
    }
}
