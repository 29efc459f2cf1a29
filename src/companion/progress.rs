//! How far a running build has come, from what BuildKit says of its vertices:
//! the same counts that its history has of the build in the end. Pure.

use std::collections::HashMap;

use jiff::Timestamp;

/// Vertices of one build that are told apart; later ones are not counted.
const VERTICES: usize = 10_000;

/// Longest label of a step, in characters.
const LABEL: usize = 100;

/// The instructions of a Dockerfile that make steps.
const INSTRUCTIONS: [&str; 9] = ["RUN", "COPY", "ADD", "FROM", "WORKDIR", "ONBUILD", "USER", "HEALTHCHECK", "VOLUME"];

/// What BuildKit's own steps begin with. What follows may be anybody's.
const OWN: [&str; 9] = [
    "exporting to",
    "exporting cache",
    "exporting layers",
    "exporting",
    "importing cache manifest",
    "pushing",
    "sending tarball",
    "inferring cache",
    "resolve image config",
];

/// One vertex, as BuildKit tells it whenever it changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vertex {
    /// Tells it from others.
    pub digest: String,
    /// What BuildKit calls it: its command, and so perhaps a secret.
    pub name: String,
    /// Whether the cache answers it.
    pub cached: bool,
    /// When it began.
    pub started: Option<Timestamp>,
    /// Whether it is done.
    pub completed: bool,
}

/// One running build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    vertices: HashMap<String, State>,
    cached: u32,
    completed: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    cached: bool,
    completed: bool,
    running: Option<(Timestamp, Option<String>)>,
}

impl Progress {
    /// Takes over what BuildKit says of a vertex.
    pub fn update(&mut self, vertex: Vertex) {
        if self.vertices.len() >= VERTICES && !self.vertices.contains_key(&vertex.digest) {
            return;
        }
        let state = self.vertices.entry(vertex.digest).or_default();
        self.cached += u32::from(vertex.cached && !state.cached);
        self.completed += u32::from(vertex.completed && !state.completed);
        state.cached |= vertex.cached;
        state.completed |= vertex.completed;
        let running = vertex.started.filter(|_| !state.completed);
        state.running = running.map(|started| (started, label(&vertex.name)));
    }

    /// Steps in all, so far.
    pub fn total(&self) -> u32 {
        u32::try_from(self.vertices.len()).unwrap_or(u32::MAX)
    }

    /// Steps that the cache answered.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Steps that are done.
    pub fn completed(&self) -> u32 {
        self.completed
    }

    /// The step that has run longest.
    pub fn step(&self) -> Option<&str> {
        let running = self.vertices.values().filter_map(|state| state.running.as_ref());
        running.filter_map(|(since, label)| Some((since, label.as_deref()?))).min().map(|(_, label)| label)
    }
}

/// A step without its command, which may hold secrets: its place and its
/// instruction, as in `[build 2/5] RUN`. `None` where neither can be told from
/// what somebody else has written.
fn label(name: &str) -> Option<String> {
    if let Some(own) = OWN.into_iter().find(|own| name.starts_with(own)) {
        return Some(own.to_owned());
    }
    let (place, rest) = name.strip_prefix('[')?.split_once("] ")?;
    if place == "internal" {
        return Some("[internal]".to_owned());
    }
    let (_, number) = place.rsplit_once(' ').unwrap_or(("", place));
    let is_number = number
        .split_once('/')
        .is_some_and(|(i, n)| [i, n].iter().all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())));
    let word = rest.split_whitespace().next()?;
    let instruction = INSTRUCTIONS.into_iter().find(|instruction| *instruction == word)?;
    (is_number && place.chars().count() <= LABEL).then(|| format!("[{place}] {instruction}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vertex(digest: &str, name: &str, started: Option<i64>, cached: bool, completed: bool) -> Vertex {
        let started = started.map(|s| Timestamp::from_second(s).unwrap());
        Vertex { digest: digest.into(), name: name.into(), cached, started, completed }
    }

    #[test]
    fn steps_are_counted_once_and_the_longest_running_is_the_step() {
        let mut progress = Progress::default();
        for update in [
            vertex("a", "[internal] load build definition from Dockerfile", Some(1), false, false),
            vertex("b", "[1/3] FROM scratch", None, false, false),
            vertex("a", "[internal] load build definition from Dockerfile", Some(1), false, true),
            vertex("c", "[build 2/3] RUN sleep 5", Some(3), false, false),
            vertex("d", "[build 3/3] COPY a b", Some(2), true, false),
            vertex("d", "[build 3/3] COPY a b", Some(2), true, false),
        ] {
            progress.update(update);
        }
        assert_eq!((progress.total(), progress.cached(), progress.completed()), (4, 1, 1));
        assert_eq!(progress.step(), Some("[build 3/3] COPY"));
        progress.update(vertex("d", "[build 3/3] COPY a b", Some(2), true, true));
        assert_eq!((progress.cached(), progress.completed(), progress.step()), (1, 2, Some("[build 2/3] RUN")));
        progress.update(vertex("c", "[build 2/3] RUN sleep 5", Some(3), false, true));
        assert_eq!(progress.step(), None);
    }

    #[test]
    fn a_label_holds_nothing_that_somebody_wrote_into_a_command() {
        for (name, want) in [
            ("[build 2/5] RUN curl -H 'X: s3cret'", Some("[build 2/5] RUN")),
            ("[2/5] COPY --from=x /s3cret /", Some("[2/5] COPY")),
            ("[linux/amd64 build 12/15] ADD https://s3cret@host/ /", Some("[linux/amd64 build 12/15] ADD")),
            ("[internal] load metadata for s3cret.example/x", Some("[internal]")),
            ("[internal] s3cret", Some("[internal]")),
            ("[auth] s3cret/repo:pull token", None),
            ("exporting to image", Some("exporting to")),
            ("exporting cache to registry s3cret", Some("exporting cache")),
            ("importing cache manifest from s3cret", Some("importing cache manifest")),
            ("resolve image config for docker-image://s3cret", Some("resolve image config")),
            ("[s3cret] RUN x", None),
            ("[a 1/2] s3cret", None),
            ("sh -c 'login s3cret'", None),
            ("s3cret", None),
            ("", None),
        ] {
            assert_eq!(label(name).as_deref(), want, "{name}");
            assert!(!label(name).is_some_and(|label| label.contains("s3cret")), "{name}");
        }
    }

    #[test]
    fn a_build_of_very_many_steps_takes_no_more_room() {
        let mut progress = Progress::default();
        (0..20_000).for_each(|i| progress.update(vertex(&i.to_string(), "", None, true, true)));
        assert_eq!(progress.total(), 10_000);
    }
}
