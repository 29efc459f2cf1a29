//! The bundle: every component, profile and certificate declaration that is
//! embedded in the executable.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use include_dir::{Dir, include_dir};
use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::profile::ValueSpec;

use super::fault::{Fault, Faults, unless};
use super::policy::DeclaredPolicy;
use super::yaml;

static MANIFESTS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/manifests");
static PROFILES: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/profiles");

static EMBEDDED: LazyLock<Result<Bundle, Faults>> = LazyLock::new(|| {
    let mut files = Vec::new();
    for (root, folder) in [("manifests", &MANIFESTS), ("profiles", &PROFILES)] {
        collect(root, folder, &mut files);
    }
    files.extend(crate::certificate::embedded());
    Bundle::parse(files)
});

fn collect(root: &str, folder: &Dir<'_>, files: &mut Vec<(String, String)>) {
    for file in folder.files() {
        let text = String::from_utf8_lossy(file.contents()).into_owned();
        files.push((format!("{root}/{}", file.path().display()), text));
    }
    folder.dirs().for_each(|inner| collect(root, inner, files));
}

/// Owner of the values that belong to no component.
pub const GLOBAL: &str = "global";

/// All components and profiles.
#[derive(Clone, Debug)]
pub struct Bundle {
    /// Components by name.
    pub components: BTreeMap<String, Component>,
    /// Text of the profiles by name.
    pub profiles: BTreeMap<String, String>,
    /// `certs/*.yaml`: path and text.
    pub certificates: Vec<(String, String)>,
    /// Every value that may be set, in the order of its declaration.
    pub values: IndexMap<String, Declared>,
}

/// A value and who declares it.
#[derive(Clone, Debug)]
pub struct Declared {
    /// A component, or [`GLOBAL`].
    pub owner: String,
    /// Type, default, bounds, description.
    pub spec: ValueSpec,
}

/// A folder under `manifests/`.
#[derive(Clone, Debug)]
pub struct Component {
    /// Name of the folder.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Components that must be in the same level or an earlier one.
    pub needs: Vec<String>,
    /// A template expression over the values; unless it is true, nothing is rendered.
    pub enabled: Option<String>,
    /// Names of the values that hold the images of its pods.
    pub images: Vec<String>,
    /// Random values that are made once and kept.
    pub generated: Vec<Generated>,
    /// How its objects are applied and waited for.
    pub policy: DeclaredPolicy,
    /// Its objects: path and text; `.yaml.j2` are templates, `.yaml` are not.
    pub files: Vec<(String, String)>,
}

/// A random value that is made once; texts are templates.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generated {
    /// Namespace of its Secret.
    pub namespace: String,
    /// Name of its Secret.
    pub secret: String,
    /// Key within the Secret.
    pub key: String,
    /// How many random bytes.
    pub bytes: usize,
    /// A template expression: whether it is wanted. Always, when left out.
    pub when: Option<String>,
    /// Likewise: whether we make it; if not, somebody else has to.
    pub make: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ComponentFile {
    description: String,
    #[serde(default)]
    needs: Vec<String>,
    enabled: Option<String>,
    #[serde(default)]
    images: Vec<String>,
    #[serde(default)]
    values: IndexMap<String, ValueSpec>,
    #[serde(default)]
    generated: Vec<Generated>,
    #[serde(default)]
    policy: DeclaredPolicy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GlobalsFile {
    values: IndexMap<String, ValueSpec>,
}

impl Bundle {
    /// The bundle of this executable.
    ///
    /// # Errors
    /// Faults of the embedded files; a test keeps them out of a release.
    pub fn embedded() -> Result<&'static Self, Faults> {
        EMBEDDED.as_ref().map_err(Clone::clone)
    }

    /// Reads a bundle from its files: path and text.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(files: impl IntoIterator<Item = (String, String)>) -> Result<Self, Faults> {
        let mut reader = Reader::default();
        let mut files: Vec<_> = files.into_iter().collect();
        // Global values are declared first; then as the folders are named.
        files.sort_by(|(a, _), (b, _)| (a.matches('/').count(), a).cmp(&(b.matches('/').count(), b)));
        for (path, text) in files {
            reader.file(path, text);
        }
        reader.finish()
    }
}

#[derive(Default)]
struct Reader {
    components: BTreeMap<String, Component>,
    profiles: BTreeMap<String, String>,
    certificates: Vec<(String, String)>,
    values: IndexMap<String, Declared>,
    objects: Vec<(String, String, String)>,
    faults: Vec<Fault>,
}

impl Reader {
    fn file(&mut self, path: String, text: String) {
        let parts: Vec<&str> = path.split('/').collect();
        match parts.as_slice() {
            ["manifests", "globals.yaml"] => {
                if let Some(GlobalsFile { values }) = self.read(&path, &text) {
                    self.declare(&path, GLOBAL, values);
                }
            }
            ["manifests", component, "component.yaml"] => self.component(component, &path, &text),
            ["manifests", component, file] if file.ends_with(".yaml") || file.ends_with(".yaml.j2") => {
                self.objects.push(((*component).to_owned(), path.clone(), text));
            }
            ["profiles", file] if file.ends_with(".yaml") => {
                self.profiles.insert(file.trim_end_matches(".yaml").to_owned(), text);
            }
            ["certs", file] if file.ends_with(".yaml") => self.certificates.push((path.clone(), text)),
            _ => self.faults.push(Fault::of(path.clone(), "no part of a bundle")),
        }
    }

    fn component(&mut self, name: &str, path: &str, text: &str) {
        let Some(file) = self.read::<ComponentFile>(path, text) else { return };
        for image in &file.images {
            if !file.values.contains_key(image) && !self.values.contains_key(image) {
                self.faults.push(Fault::of(path, format!("image value \"{image}\" is not declared")));
            }
        }
        self.faults.extend(file.policy.fault().map(|message| Fault::of(path, format!("policy: {message}"))));
        self.declare(path, name, file.values);
        let component = Component {
            name: name.to_owned(),
            description: file.description,
            needs: file.needs,
            enabled: file.enabled,
            images: file.images,
            generated: file.generated,
            policy: file.policy,
            files: Vec::new(),
        };
        self.components.insert(name.to_owned(), component);
    }

    fn read<T: DeserializeOwned>(&mut self, path: &str, text: &str) -> Option<T> {
        let parsed = yaml::parse_mapping(path, text).and_then(|_| {
            serde_yaml::from_str(text).map_err(|error| {
                let line = error.location().map_or(1, |location| location.line());
                Fault::at(path, line, error.to_string().split(" at line ").next().unwrap_or_default())
            })
        });
        parsed.map_err(|fault| self.faults.push(fault)).ok()
    }

    fn declare(&mut self, path: &str, owner: &str, values: IndexMap<String, ValueSpec>) {
        for (name, spec) in values {
            match spec.accept(&spec.default) {
                Ok(default) => {
                    let declared = Declared { owner: owner.to_owned(), spec: ValueSpec { default, ..spec } };
                    if self.values.insert(name.clone(), declared).is_some() {
                        self.faults.push(Fault::of(path, format!("value \"{name}\" is declared twice")));
                    }
                }
                Err(problem) => self.faults.push(Fault::of(path, format!("default of \"{name}\": {problem}"))),
            }
        }
    }

    fn finish(mut self) -> Result<Bundle, Faults> {
        for (component, path, text) in std::mem::take(&mut self.objects) {
            match self.components.get_mut(&component) {
                Some(component) => component.files.push((path, text)),
                None => self.faults.push(Fault::of(path, "has no component.yaml beside it")),
            }
        }
        self.check_names();
        let unknown = self.components.values().flat_map(|component| {
            let missing = component.needs.iter().filter(|needed| !self.components.contains_key(*needed));
            missing.map(|needed| {
                Fault::of(
                    format!("manifests/{}/component.yaml", component.name),
                    format!("needs \"{needed}\", which does not exist"),
                )
            })
        });
        let unknown: Vec<_> = unknown.collect();
        self.faults.extend(unknown);
        let Self { components, profiles, certificates, values, faults, .. } = self;
        unless(faults, Bundle { components, profiles, certificates, values })
    }

    /// `a` and `a.b` cannot both be values: one is a group of the other.
    fn check_names(&mut self) {
        let owners: HashMap<&str, &str> =
            self.values.iter().map(|(name, declared)| (name.as_str(), declared.owner.as_str())).collect();
        for (name, declared) in &self.values {
            let groups = name.match_indices('.').map(|(at, _)| &name[..at]);
            for group in groups.filter(|group| owners.contains_key(group)) {
                let message = format!("value \"{name}\" lies within value \"{group}\"");
                self.faults.push(Fault::of(format!("manifests/{}", declared.owner), message));
            }
        }
    }
}
