//! What can be read of projects.

use std::sync::Arc;

use bko_install::router::{Config, Metrics, RateLimit, Router};
use serde_json::Value;

use super::memory::Memory;
use super::{SHOP, SHOP_KEY, call, open, post, tokens};

async fn get(router: &Router, path: &str) -> super::Answered {
    call(router, "GET", path, &[], "").await
}

fn keys(page: &Value) -> Vec<&str> {
    page["projects"].as_array().unwrap().iter().map(|project| project["key"].as_str().unwrap()).collect()
}

/// Seven projects of three repositories, one of them twice.
async fn farm() -> (Router, Arc<Memory>) {
    let memory = Arc::new(Memory::ready());
    let router = Router::new(open(), memory.clone(), Metrics::default());
    for (repo, name) in
        [("shop", ""), ("shop", "web"), ("blog", ""), ("blog", "a"), ("blog", "b"), ("blog", "c"), ("docs", "")]
    {
        let body = format!(r#"{{"repo":"https://github.com/acme/{repo}","name":"{name}","arch":"amd64"}}"#);
        assert_eq!(post(&router, "/route", &body).await.status, 200);
    }
    (router, memory)
}

#[tokio::test(start_paused = true)]
async fn pages_are_sorted_whole_and_end() {
    let (router, memory) = farm().await;
    let all = get(&router, "/projects").await;
    assert_eq!((all.status.as_u16(), all.header("content-type")), (200, Some("application/json")));
    let all = all.json();
    let wanted: Vec<String> = memory.seen().projects.into_keys().collect();
    assert_eq!(keys(&all), wanted);
    assert!(all.get("continue").is_none(), "{all}");

    let (mut seen, mut path) = (Vec::new(), "/projects?limit=3".to_owned());
    for _ in 0..3 {
        let page = get(&router, &path).await.json();
        seen.extend(keys(&page).into_iter().map(str::to_owned));
        let Some(next) = page["continue"].as_str() else { break };
        assert_eq!(seen.last().map(String::as_str), Some(next));
        path = format!("/projects?limit=3&continue={next}");
    }
    assert_eq!(seen, wanted);
    assert_eq!(keys(&get(&router, "/projects?limit=7").await.json()).len(), 7);
    assert!(get(&router, "/projects?limit=7").await.json().get("continue").is_none(), "the last page says so");
}

#[tokio::test(start_paused = true)]
async fn filters_take_any_spelling_of_a_repository_and_phases() {
    let (router, memory) = farm().await;
    for (query, count) in [
        ("repo=git%40github.com%3Aacme%2Fblog.git", 4),
        ("repo=https://GitHub.com/acme/shop/", 2),
        ("repo=acme/none", 0),
        ("phase=warm", 7),
        ("phase=Idle", 0),
        ("repo=github.com/acme/blog&phase=Warm&limit=2", 2),
        ("repo=github.com/acme/docs&colour=blue", 1),
    ] {
        let answer = get(&router, &format!("/projects?{query}")).await;
        assert_eq!((answer.status.as_u16(), keys(&answer.json()).len()), (200, count), "{query}");
        let ignored = answer.header("x-buildkit-operator-ignored-fields");
        assert_eq!(ignored, query.contains("colour").then_some("colour"), "{query}");
    }
    assert_eq!(memory.seen().projects.len(), 7, "reading makes nothing");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_meant_is_refused() {
    let (router, _) = farm().await;
    for (query, want) in [
        ("limit=0", "limit must be a number from 1 to 500"),
        ("limit=501", "limit must be a number from 1 to 500"),
        ("limit=-1", "limit must be a number from 1 to 500"),
        ("limit=", "limit must be a number from 1 to 500"),
        ("limit=ten", "limit must be a number from 1 to 500"),
        ("limit=1&limit=2", "limit must be given once"),
        ("phase=", "phase must be one of Pending, Idle, Scaling, Warm, Failed"),
        ("phase=hot", "phase must be one of Pending, Idle, Scaling, Warm, Failed"),
        ("continue=", "continue must be what the page before gave"),
        ("continue=a/b", "continue must be what the page before gave"),
        ("repo=", "repo is required"),
        ("repo=ftp://x/y", "repo has the scheme \"ftp\", want https, http, ssh, git or git+ssh"),
    ] {
        let answer = get(&router, &format!("/projects?{query}")).await;
        assert_eq!((answer.status.as_u16(), answer.body), (400, format!("bad request: {want}\n")), "{query}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_project_shows_how_many_builds_it_has_and_never_which() {
    let memory = Arc::new(Memory::ready());
    let router = Router::new(open(), memory.clone(), Metrics::default());
    assert_eq!(get(&router, &format!("/projects/{SHOP_KEY}")).await.body, "no such project\n");
    let routed = post(&router, "/route", SHOP).await.json();
    let shown = get(&router, &format!("/projects/{SHOP_KEY}")).await;
    assert_eq!((shown.status.as_u16(), shown.header("content-type")), (200, Some("application/json")));
    let project = shown.json();
    assert_eq!(project["inFlight"]["count"], 1);
    assert_eq!((&project["key"], &project["repo"]), (&SHOP_KEY.into(), &"github.com/acme/shop".into()));
    assert_eq!((&project["endpoint"], &project["namespace"]), (&routed["endpoint"], &routed["namespace"]));
    let digest = &memory.seen().projects[SHOP_KEY].inflight[0];
    assert!(!shown.body.contains(routed["buildId"].as_str().unwrap()) && !shown.body.contains(digest.as_str()));
    for path in ["/projects/x/y", "/projects/", "/projects/UPPER", "/projects/%ff", "/projects/a%2Fb", "/projects/..."]
    {
        assert_eq!(get(&router, path).await.status, 404, "{path}");
    }
}

/// Prewarming is idempotent, and its answer is the reference's; what there is to
/// know beside it has a path of its own.
#[tokio::test(start_paused = true)]
async fn prewarming_again_changes_nothing_and_the_state_can_be_read() {
    let memory = Arc::new(Memory::new());
    let router = Router::new(open(), memory.clone(), Metrics::default());
    let endpoint = format!("tcp://buildkitd-{SHOP_KEY}.buildkit-builds.svc:1234");
    for ready in [false, false, true, true] {
        if ready {
            memory.make_ready(SHOP_KEY);
        }
        let answer = post(&router, "/prewarm", SHOP).await;
        let body = format!(
            "{{\"key\":\"{SHOP_KEY}\",\"endpoint\":\"{endpoint}\",\"namespace\":\"buildkit-builds\",\"ready\":{ready}}}\n"
        );
        assert_eq!((answer.status.as_u16(), answer.body.as_str()), (202, body.as_str()));
        let state = get(&router, &format!("/projects/{SHOP_KEY}")).await.json();
        assert_eq!((&state["ready"], &state["inFlight"]["count"]), (&ready.into(), &0.into()));
    }
    assert_eq!(memory.seen().projects.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn reading_needs_an_identity_and_counts() {
    let memory = Arc::new(Memory::ready());
    let rate = RateLimit::new(0.001, 2).unwrap();
    let router = Router::new(Config { rate, ..tokens() }, memory, Metrics::default());
    let bearer = ("Authorization", "Bearer s3cret");
    for path in ["/projects", "/projects/p41bd34a2227aca39"] {
        let refused = get(&router, path).await;
        assert_eq!((refused.status.as_u16(), refused.body.as_str()), (401, "Unauthorized\n"), "{path}");
        assert_eq!(call(&router, "GET", path, &[("Authorization", "Bearer nope")], "").await.status, 401);
        let admin = ("X-Buildkit-Operator-Admin-Token", "nope");
        assert_eq!(call(&router, "GET", path, &[bearer, admin], "").await.status, 401);
    }
    assert_eq!(call(&router, "GET", "/projects", &[bearer], "").await.status, 200);
    let wrong = call(&router, "POST", "/projects", &[bearer], "").await;
    assert_eq!((wrong.status.as_u16(), wrong.body.as_str()), (405, "GET only\n"));
    assert_eq!(wrong.header("allow"), Some("GET, HEAD"));
    let limited = call(&router, "GET", "/projects", &[bearer], "").await;
    assert_eq!((limited.status.as_u16(), limited.header("retry-after")), (429, Some("1000")));
}
