//! The command lines of stock builders: what is printed is what is run. Pure,
//! but for [`find()`].

mod buildctl;
mod buildx;
mod find;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::Paths;
use super::api::Cache;
use super::dial::Endpoint;

pub use buildctl::Unsupported;
pub use find::{FindError, Wanted, find};

/// What to build, and what to do with it: what both builders understand.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    /// Folder, or the URL of a repository or an archive.
    pub context: String,
    /// Dockerfile, within or beside the context.
    pub file: Option<PathBuf>,
    /// Its target.
    pub target: String,
    /// Names of the image.
    pub tags: Vec<String>,
    /// Whether to push the image.
    pub push: bool,
    /// Whether to hand the image to Docker.
    pub load: bool,
    /// Other exports, as the builders take them.
    pub outputs: Vec<String>,
    /// `NAME=VALUE`, or `NAME` for the variable's own value.
    pub build_args: Vec<String>,
    /// `NAME=VALUE`.
    pub labels: Vec<String>,
    /// `id=NAME,src=FILE` and the like; never a value.
    pub secrets: Vec<String>,
    /// `default`, or `id=socket`.
    pub ssh: Vec<String>,
    /// `mode=max`, `false`.
    pub provenance: Option<String>,
    /// `true`, or a generator.
    pub sbom: Option<String>,
    /// `type=registry,ref=…`.
    pub cache_from: Vec<String>,
    /// The same.
    pub cache_to: Vec<String>,
    /// Where to write what was built, as JSON.
    pub metadata_file: Option<PathBuf>,
    /// `auto`, `plain`, `tty`, `rawjson`, `quiet`.
    pub progress: Option<String>,
    /// Repeats every step.
    pub no_cache: bool,
    /// Further arguments of the builder, untouched.
    pub extra: Vec<OsString>,
}

/// One daemon of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// `amd64` or `arm64`.
    pub arch: String,
    /// Where it is.
    pub endpoint: Endpoint,
    /// A cache outside of it.
    pub cache: Option<Cache>,
}

/// A stock builder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Builder {
    /// `docker buildx`, or `buildx` by itself.
    Buildx(Vec<OsString>),
    /// `buildctl`.
    Buildctl(OsString),
}

/// One command line.
pub type Command = Vec<OsString>;

/// What has to be run, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commands {
    /// Makes the daemons known; none for buildctl.
    pub create: Vec<Command>,
    /// Builds.
    pub build: Command,
    /// Forgets the daemons.
    pub remove: Option<Command>,
}

impl Builder {
    /// What to run to build on these daemons. A build whose certificate does
    /// not outlast it leaves nothing behind.
    ///
    /// # Errors
    /// The builder cannot do something of what is asked.
    pub fn commands(&self, spec: &Spec, nodes: &[Node], paths: &Paths, lasting: bool) -> Result<Commands, Unsupported> {
        let mut spec = spec.clone();
        spec.cache_from.extend(nodes.iter().filter_map(|node| node.cache.as_ref()).filter_map(import));
        if let [node] = nodes {
            // Of several daemons each would write the caches of all.
            spec.cache_to.extend(node.cache.as_ref().and_then(export));
        }
        spec.cache_to.iter_mut().for_each(forgive);
        match self {
            Self::Buildctl(program) => {
                let build = buildctl::build(program, &spec, nodes, paths)?;
                Ok(Commands { create: Vec::new(), build, remove: None })
            }
            Self::Buildx(program) => {
                if let Some(export) = archive(&spec).filter(|_| nodes.len() > 1) {
                    return Err(Unsupported::Archive(export));
                }
                let name = buildx::name(nodes, paths);
                Ok(Commands {
                    create: buildx::create(program, &name, nodes, paths),
                    build: buildx::build(program, &name, &spec, nodes),
                    remove: (!lasting).then(|| buildx::remove(program, &name)),
                })
            }
        }
    }
}

/// An export that buildx takes from one daemon alone.
fn archive(spec: &Spec) -> Option<String> {
    let kinds = ["type=oci", "type=docker", "type=tar"];
    let is_archive =
        |output: &&String| *output == "-" || output.split(',').any(|field| kinds.contains(&field.trim_matches('"')));
    let output = spec.outputs.iter().find(is_archive).map(|output| format!("--output \"{output}\""));
    output.or_else(|| spec.load.then(|| "--load".to_owned()))
}

fn import(cache: &Cache) -> Option<String> {
    if cache.kind != "s3" || cache.bucket.is_empty() {
        return None;
    }
    let mut fields = vec![
        "type=s3".to_owned(),
        format!("region={}", cache.region),
        format!("bucket={}", cache.bucket),
        format!("name={}", cache.name),
    ];
    if !cache.endpoint_url.is_empty() {
        fields.extend([format!("endpoint_url={}", cache.endpoint_url), "use_path_style=true".into()]);
    }
    Some(fields.iter().map(|field| csv(field)).collect::<Vec<_>>().join(","))
}

fn export(cache: &Cache) -> Option<String> {
    if cache.skip_export { None } else { import(cache).map(|fields| format!("{fields},mode=max")) }
}

/// A cache that cannot be written is no reason for a build to fail.
fn forgive(cache_to: &mut String) {
    if !cache_to.contains("ignore-error=") && cache_to.contains('=') {
        cache_to.push_str(",ignore-error=true");
    }
}

/// As Docker tells URLs from folders.
pub fn is_remote(context: &str) -> bool {
    // `user@host:path`, and no folder of that name.
    let ssh = context.split_once(':').is_some_and(|(host, _)| host.contains('@') && !host.contains('/'));
    ssh || ["https://", "http://", "git://", "ssh://", "github.com/"].iter().any(|start| context.starts_with(start))
}

/// A secret whose value is in a file.
pub fn secret_file(id: &str, path: &Path) -> String {
    format!("id={id},{}", csv(&format!("src={}", path.display())))
}

/// One field of a list that the builders split at commas.
pub(super) fn csv(field: &str) -> String {
    if field.contains([',', '"', '\n']) { format!("\"{}\"", field.replace('"', "\"\"")) } else { field.to_owned() }
}

fn words(words: &[&str]) -> Command {
    words.iter().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use super::super::shell::command_line;
    use super::*;

    fn node(arch: &str) -> Node {
        let host = format!("buildkitd-p{arch}.builds.example.org");
        Node { arch: arch.into(), endpoint: Endpoint { host, port: 1234, address: None }, cache: None }
    }

    fn paths() -> Paths {
        Paths { ca: "/c/ca.pem".into(), cert: "/c/cert.pem".into(), key: "/c/key.pem".into() }
    }

    fn everything() -> Spec {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect::<Vec<_>>();
        Spec {
            context: "ctx".into(),
            file: Some("ctx/docker/Dockerfile.web".into()),
            target: "release".into(),
            tags: list(&["r.example.org/a:1", "r.example.org/a:2"]),
            push: true,
            outputs: list(&["type=local,dest=out"]),
            build_args: list(&["A=1 2", "B=$x"]),
            labels: list(&["l=v"]),
            secrets: list(&["id=npm,src=/tmp/s"]),
            ssh: list(&["default"]),
            provenance: Some("mode=max".into()),
            sbom: Some("true".into()),
            cache_from: list(&["type=registry,ref=r/c"]),
            cache_to: list(&["type=registry,ref=r/c", "type=inline,ignore-error=false"]),
            metadata_file: Some("m.json".into()),
            progress: Some("plain".into()),
            no_cache: true,
            extra: vec!["--allow=network.host".into()],
            load: false,
        }
    }

    fn printed(builder: &Builder, spec: &Spec, nodes: &[Node], lasting: bool) -> String {
        let commands = builder.commands(spec, nodes, &paths(), lasting).unwrap();
        let all = commands.create.iter().chain([&commands.build]).chain(&commands.remove);
        all.map(|words| command_line(words)).collect::<Vec<_>>().join("\n")
    }

    fn buildx() -> Builder {
        Builder::Buildx(words(&["docker", "buildx"]))
    }

    #[test]
    fn buildx_is_told_everything() {
        insta::assert_snapshot!(printed(&buildx(), &everything(), &[node("amd64")], true));
    }

    #[test]
    fn buildctl_is_told_everything() {
        insta::assert_snapshot!(printed(&Builder::Buildctl("buildctl".into()), &everything(), &[node("amd64")], true));
    }

    #[test]
    fn each_architecture_is_a_node_that_is_appended() {
        let spec = Spec { context: ".".into(), ..Spec::default() };
        insta::assert_snapshot!(printed(&buildx(), &spec, &[node("amd64"), node("arm64")], false));
        let error =
            Builder::Buildctl("buildctl".into()).commands(&spec, &[node("amd64"), node("arm64")], &paths(), true);
        assert_eq!(error, Err(Unsupported::Architectures));
    }

    #[test]
    fn an_address_keeps_the_name_for_tls() {
        let mut node = node("amd64");
        node.endpoint.address = Some("192.0.2.7".parse().unwrap());
        let spec = Spec { context: ".".into(), ..Spec::default() };
        let text = printed(&buildx(), &spec, std::slice::from_ref(&node), true);
        assert!(text.contains("tcp://192.0.2.7:1234"), "{text}");
        assert!(text.contains(",servername=buildkitd-pamd64.builds.example.org"), "{text}");
        let text = printed(&Builder::Buildctl("buildctl".into()), &spec, &[node], true);
        assert!(text.contains("--tlsservername buildkitd-pamd64.builds.example.org"), "{text}");
    }

    #[test]
    fn the_route_s_cache_is_read_and_written_and_may_fail_without_failing_the_build() {
        let cache = Cache {
            kind: "s3".into(),
            bucket: "b".into(),
            region: "r".into(),
            endpoint_url: "http://minio:9000".into(),
            name: "p1".into(),
            skip_export: false,
        };
        let with = |cache: Cache| Node { cache: Some(cache), ..node("amd64") };
        let spec = Spec { context: ".".into(), ..Spec::default() };
        let fields = "type=s3,region=r,bucket=b,name=p1,endpoint_url=http://minio:9000,use_path_style=true";
        for builder in [buildx(), Builder::Buildctl("buildctl".into())] {
            let text = printed(&builder, &spec, &[with(cache.clone())], true);
            assert!(text.contains(&format!(" {fields} ")), "{text}");
            assert!(text.contains(&format!(" {fields},mode=max,ignore-error=true")), "{text}");
            let text = printed(&builder, &spec, &[with(Cache { skip_export: true, ..cache.clone() })], true);
            assert!(text.contains(fields) && !text.contains("mode=max"), "{text}");
            let text = printed(&builder, &spec, &[with(Cache { kind: "later".into(), ..cache.clone() })], true);
            assert!(!text.contains("cache"), "{text}");
        }
    }

    #[test]
    fn builds_on_other_daemons_or_with_other_certificates_have_builders_of_their_own() {
        let name = |node: &Node, paths: &Paths| buildx::name(std::slice::from_ref(node), paths);
        let (amd64, arm64) = (node("amd64"), node("arm64"));
        let other = Paths { ca: "/d/ca.pem".into(), ..paths() };
        assert_eq!(name(&amd64, &paths()), name(&amd64, &paths()));
        assert_ne!(name(&amd64, &paths()), name(&arm64, &paths()));
        assert_ne!(name(&amd64, &paths()), name(&amd64, &other));
    }

    #[test]
    fn buildctl_drops_no_name_and_understands_what_buildx_does() {
        let tags = || vec!["r.example.org/a:1".to_owned(), "r.example.org/a:2".to_owned()];
        let export = |outputs: &[&str], push| {
            let outputs = outputs.iter().map(|output| (*output).to_owned()).collect();
            let spec = Spec { context: ".".into(), tags: tags(), outputs, push, ..Spec::default() };
            let text = printed(&Builder::Buildctl("buildctl".into()), &spec, &[node("amd64")], true);
            text.split(" --output ")
                .skip(1)
                .map(|part| part.split(" --").next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let name = r#""name=r.example.org/a:1,r.example.org/a:2""#;
        for (outputs, push, want) in [
            (&["type=oci,dest=x"][..], false, vec![format!("'type=oci,dest=x,{name}'")]),
            (&["type=image,name=b"], false, vec!["type=image,name=b".to_owned()]),
            (&["type=local,dest=x"], false, vec!["type=local,dest=x".to_owned()]),
            (&["type=registry"], false, vec![format!("'type=image,push=true,{name}'")]),
            (&["out"], true, vec![format!("'type=image,{name},push=true'"), "type=local,dest=out".to_owned()]),
            (&["-"], false, vec!["type=tar,dest=-".to_owned()]),
        ] {
            assert_eq!(export(outputs, push), want, "{outputs:?}");
        }
    }

    #[test]
    fn urls_are_told_from_folders() {
        for url in ["https://h/x.git", "git@h:x", "alice@h:x/y#main", "ssh://h/x", "github.com/acme/shop"] {
            assert!(is_remote(url), "{url}");
        }
        for folder in [".", "a@b", "./a@b:c", "a:b", "-", "github.com"] {
            assert!(!is_remote(folder), "{folder}");
        }
    }

    #[test]
    fn a_comma_splits_no_field() {
        assert_eq!(csv("name=a,b"), "\"name=a,b\"");
        assert_eq!(csv("a\"b"), "\"a\"\"b\"");
        assert_eq!(csv("name=a"), "name=a");
    }
}
