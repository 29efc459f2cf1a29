//! Everything that shall be there: rendered objects, certificates, random values.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Map, Value};

use super::InstallError;
use crate::certificate::issue::{IssueError, LiveSecrets, materialise};
use crate::certificate::{Gap, LiveSecret, secret_object};
use crate::cluster::{Cluster, Event};
use crate::manifest::{GeneratedSecret, Object, ObjectId, Rendered};
use crate::plan::{self, Desired, Record};
use crate::preflight::secrets;

pub(super) type SecretKey = (String, String);

/// The desired set. Key material that lives is kept byte for byte.
pub(super) async fn desired(cluster: &Cluster, rendered: &Rendered) -> Result<Desired, InstallError> {
    let declared = rendered.declarations();
    let places = declared.places().chain(secrets::places(rendered)).collect();
    let live = live_secrets(cluster, places).await?;
    missing(cluster, rendered, &live)?;
    let mut desired = Desired { objects: rendered.objects.clone(), ..Desired::default() };
    for outcome in materialise(&declared.certificates, &live, super::now()).map_err(InstallError::Certificates)? {
        for message in outcome.warnings {
            cluster.report(Event::Warning { message });
        }
        let Some(data) = outcome.data else { continue };
        let object = secret_object(&outcome.spec, &data);
        if outcome.spec.is_authority() {
            desired.authorities.insert(object.id.clone());
        }
        desired.objects.push(object);
    }
    desired.objects.extend(generated(&declared.generated, &live)?);
    desired.objects.iter_mut().for_each(|object| plan::drop_placeholders(&mut object.body));
    Ok(desired)
}

/// What somebody else has to make: what is unusable ends the run before its
/// first write, what is wrong is told.
fn missing(cluster: &Cluster, rendered: &Rendered, live: &LiveSecrets) -> Result<(), InstallError> {
    let (fatal, told): (Vec<Gap>, _) =
        secrets::gaps(rendered, live, super::now()).into_iter().partition(|gap| gap.fatal);
    for Gap { message, .. } in told {
        cluster.report(Event::Warning { message });
    }
    let fatal: Vec<String> = fatal.into_iter().map(|gap| gap.message).collect();
    if fatal.is_empty() { Ok(()) } else { Err(InstallError::Certificates(IssueError::NotProvided(fatal))) }
}

/// Leaves components out that a run shall not touch.
pub(super) fn leave_out(desired: &mut Desired, installed: Option<&Record>, leaves: impl Fn(&str) -> bool) {
    let recorded = installed.into_iter().flat_map(|record| &record.inventory).map(|entry| entry.component.as_str());
    let all = desired.objects.iter().map(|object| object.component.as_str()).chain(recorded);
    desired.untouched = all.filter(|component| leaves(component)).map(str::to_owned).collect();
    let untouched = &desired.untouched;
    desired.objects.retain(|object| !untouched.contains(&object.component));
}

/// The live Secrets that hold certificates or random values.
pub(super) async fn live_secrets(cluster: &Cluster, keys: BTreeSet<SecretKey>) -> Result<LiveSecrets, InstallError> {
    let read = |(namespace, name): SecretKey| async move {
        let id = secret_id(&namespace, &name);
        let Some(live) = cluster.get(&id).await.map_err(|error| InstallError::Observe(vec![error]))? else {
            return Ok(None);
        };
        let secret = LiveSecret::from_manifest(&live)
            .map_err(|why| InstallError::ReadSecret { secret: format!("{namespace}/{name}"), why: why.to_string() })?;
        Ok::<_, InstallError>(Some(((namespace, name), secret)))
    };
    stream::iter(keys).map(read).buffer_unordered(16).try_filter_map(|found| async { Ok(found) }).try_collect().await
}

/// Secrets of random values, one for all keys of one name.
pub(super) fn generated(wanted: &[GeneratedSecret], live: &LiveSecrets) -> Result<Vec<Object>, InstallError> {
    let mut objects: BTreeMap<SecretKey, Object> = BTreeMap::new();
    for value in wanted {
        let place = (value.namespace.clone(), value.name.clone());
        let kept = live.get(&place).and_then(|secret| secret.data.get(&value.key)).filter(|bytes| !bytes.is_empty());
        let bytes = match kept {
            Some(bytes) => bytes.to_vec(),
            None => random(value.bytes)?.into_bytes(),
        };
        let object = objects.entry(place).or_insert_with(|| empty_secret(value));
        Arc::make_mut(&mut object.body)["data"][&value.key] = STANDARD.encode(bytes).into();
    }
    Ok(objects.into_values().collect())
}

fn empty_secret(value: &GeneratedSecret) -> Object {
    let labels: Map<String, Value> = value.labels.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
    let mut body = Value::Object(Map::new());
    body["apiVersion"] = "v1".into();
    body["kind"] = "Secret".into();
    body["metadata"]["name"] = value.name.as_str().into();
    body["metadata"]["namespace"] = value.namespace.as_str().into();
    body["metadata"]["labels"] = labels.into();
    body["type"] = "Opaque".into();
    Object {
        id: secret_id(&value.namespace, &value.name),
        component: value.component.clone(),
        runlevel: value.runlevel,
        body: Arc::new(body),
        source: format!("generated value \"{}\" of component \"{}\"", value.key, value.component),
    }
}

pub(super) fn secret_id(namespace: &str, name: &str) -> ObjectId {
    ObjectId {
        group: String::new(),
        version: "v1".into(),
        kind: "Secret".into(),
        namespace: Some(namespace.into()),
        name: name.into(),
    }
}

#[expect(clippy::disallowed_methods, reason = "random values are made here, once")]
fn random(bytes: usize) -> Result<String, InstallError> {
    let mut buffer = vec![0; bytes];
    getrandom::fill(&mut buffer).map_err(InstallError::Random)?;
    Ok(URL_SAFE_NO_PAD.encode(buffer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Runlevel;

    fn value(key: &str) -> GeneratedSecret {
        GeneratedSecret {
            component: "server".into(),
            runlevel: Runlevel::Rc1,
            namespace: "farm".into(),
            name: "tokens".into(),
            key: key.into(),
            bytes: 32,
            labels: BTreeMap::from([("app".into(), "farm".into())]),
        }
    }

    #[test]
    fn a_value_that_lives_is_kept_and_a_new_one_is_random() {
        let live = LiveSecrets::from([(
            ("farm".into(), "tokens".into()),
            LiveSecret { data: [("api", "kept")].into_iter().collect(), ..LiveSecret::default() },
        )]);
        let make = || generated(&[value("api"), value("admin")], &live).unwrap();
        let (first, second) = (make(), make());
        assert_eq!(first.len(), 1);
        assert_eq!(first[0].body["data"]["api"], STANDARD.encode("kept"));
        let admin = |objects: &[Object]| objects[0].body["data"]["admin"].as_str().unwrap().to_owned();
        assert_ne!(admin(&first), admin(&second));
        assert_eq!(STANDARD.decode(admin(&first)).unwrap().len(), 43);
    }
}
