//! CI jobs: each routes a build, runs it for a while, and releases it, or
//! vanishes at any step.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bko_install::provisioner::BuildId;
use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tower::ServiceExt;

use crate::check;
use crate::replica::Replica;
use crate::world::World;

/// The servers that run at present.
pub(crate) type Servers = Arc<Mutex<Vec<Arc<Replica>>>>;

/// What a server said.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

/// One job, from its route to its end.
pub(crate) async fn job(world: Arc<World>, servers: Servers, number: usize, request: Value) {
    let who = format!("build {number}");
    let Some((key, id)) = route(&world, &servers, number, &request).await else { return };
    if world.percent(10) {
        world.state().builds.over(number);
        world.say(&who, "vanishes");
        return;
    }
    let longest = match (world.temper.long, world.percent(10)) {
        (true, false) => 9_000_000,
        (false, true) => 250_000,
        _ => 60_000,
    };
    world.pause(0, longest).await;
    world.state().builds.over(number);
    if world.percent(15) {
        world.say(&who, "vanishes after its build");
        return;
    }
    world.say(&who, "completes");
    // A stray name releases nothing.
    if world.percent(10) {
        let stray = json!({"key": key, "buildId": "0123456789abcdef"});
        call(&world, &servers, &who, "/complete", &stray).await;
    }
    let body = json!({"key": key, "buildId": id});
    for _ in 0..5 {
        match call(&world, &servers, &who, "/complete", &body).await {
            Some(Answer { status: 204, .. }) => {
                let digest = BuildId::parse(&id).unwrap().digest();
                check::released(&mut world.state(), &who, &key, &digest);
                world.reached("entry released");
                return;
            }
            _ => world.pause(100, 5_000).await,
        }
    }
}

/// Routes a build; its key and identifier, once it has an endpoint.
pub(crate) async fn route(
    world: &Arc<World>,
    servers: &Servers,
    number: usize,
    request: &Value,
) -> Option<(String, String)> {
    let who = format!("build {number}");
    for _ in 0..4 {
        let asked = world.ms();
        let answer = call(world, servers, &who, "/route", request).await;
        if let Some(Answer { status: 200, body }) = answer {
            let (key, id) = (body["key"].as_str()?.to_owned(), body["buildId"].as_str()?.to_owned());
            let digest = BuildId::parse(&id).unwrap().digest();
            let mut state = world.state();
            let pod = check::answered(&mut state, &who, &key, &digest)?;
            state.say(&who, format_args!("builds on {key} in {pod}"));
            state.builds.answered(number, &key, digest, pod, asked, world.temper.max_build());
            return Some((key, id));
        }
        world.pause(200, 5_000).await;
    }
    world.say(&who, "gives up");
    None
}

/// Calls some server that serves; nothing when it ends, or the client is
/// impatient.
pub(crate) async fn call(world: &World, servers: &Servers, who: &str, path: &str, body: &Value) -> Option<Answer> {
    let serving: Vec<_> = servers.lock().unwrap().iter().filter(|server| server.serves()).cloned().collect();
    if serving.is_empty() {
        sleep(Duration::from_secs(1)).await;
        return None;
    }
    let server = &serving[usize::try_from(world.below(serving.len() as u64)).unwrap()];
    let patience = if world.percent(10) { world.below(5_000) } else { 90_000 };
    world.say(who, format_args!("{path} {} at {}", body["repo"], server.node.name));
    let request = Request::post(path).body(Body::from(body.to_string())).unwrap();
    let exchange = async {
        let response = server.router.service().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        let body = serde_json::from_slice(&bytes).unwrap_or_else(|_| Value::String(text.trim().to_owned()));
        Answer { status, body }
    };
    let answer = tokio::select! {
        biased;
        () = server.node.died() => None,
        answer = timeout(Duration::from_millis(patience), exchange) => answer.ok(),
    };
    match &answer {
        Some(Answer { status: 200 | 204, .. }) => {}
        Some(Answer { status, body }) => {
            if *status == 429 {
                world.reached("build refused at the limit");
            }
            world.say(who, format_args!("{path} is answered {status} {body}"));
        }
        None => world.say(who, format_args!("{path} is not answered")),
    }
    answer
}
