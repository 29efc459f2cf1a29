//! The daemon's `buildkitd.toml`: what the user gave for all daemons, and
//! garbage collection derived from the size of the project's volume. Pure.

use toml::{Table, Value};

/// Share of the volume that the cache may fill, in percent: the ceiling.
const CEILING_PERCENT: u64 = 85;
/// Share that is always kept for this project's cache: the floor.
const FLOOR_PERCENT: u64 = 40;
/// Share of the volume that stays free for builds in progress.
const FREE_PERCENT: u64 = 10;

/// Settings of the worker that older daemons know for the same thing.
const REPLACED: [&str; 4] = ["gckeepstorage", "reservedSpace", "maxUsedSpace", "minFreeSpace"];

/// What the user gave for all daemons: mirrors, certificate authorities,
/// registries. Kept as it is, but for garbage collection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Base {
    table: Table,
    keep_gc: bool,
}

/// Why a user's configuration cannot be the base.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum BaseError {
    /// It is not TOML.
    #[error("buildkitd.toml: {0}")]
    Toml(String),
    /// The worker is not configured by tables.
    #[error("buildkitd.toml: \"{0}\" must be a table")]
    NotATable(&'static str),
    /// The switch has a third value.
    #[error("gc: \"{0}\" is not known; \"keep\" keeps the garbage collection of buildkitd.toml")]
    Gc(String),
}

impl Base {
    /// Reads a user's configuration. `gc` is the switch beside it: `keep` keeps
    /// the user's garbage collection too.
    ///
    /// # Errors
    /// See [`BaseError`].
    pub fn parse(text: &str, gc: Option<&str>) -> Result<Self, BaseError> {
        let table: Table =
            text.parse().map_err(|e: toml::de::Error| BaseError::Toml(e.to_string().trim().replace('\n', " ")))?;
        if let Some(worker) = table.get("worker") {
            let worker = worker.as_table().ok_or(BaseError::NotATable("worker"))?;
            if worker.get("oci").is_some_and(|oci| !oci.is_table()) {
                return Err(BaseError::NotATable("worker.oci"));
            }
        }
        match gc.map(str::trim) {
            None | Some("") => Ok(Self { table, keep_gc: false }),
            Some("keep") => Ok(Self { table, keep_gc: true }),
            Some(other) => Err(BaseError::Gc(other.to_owned())),
        }
    }
}

/// Renders the configuration for a volume of `volume_gi` GiB.
///
/// One policy for every kind of record: below the floor nothing is pruned,
/// above the ceiling or with less than the margin free the least recently used
/// records go first. Sizes are in bytes: a percentage would be one of the disk
/// under the volume, which may be far larger than the volume's quota.
pub fn buildkitd_toml(base: &Base, volume_gi: i32) -> String {
    let mut table = base.table.clone();
    if !base.keep_gc {
        let worker = table.entry("worker").or_insert_with(|| Value::Table(Table::new()));
        let oci = worker.as_table_mut().map(|worker| worker.entry("oci").or_insert_with(|| Value::Table(Table::new())));
        if let Some(oci) = oci.and_then(Value::as_table_mut) {
            oci.retain(|key, _| !REPLACED.contains(&key));
            oci.insert("gc".to_owned(), Value::Boolean(true));
            oci.insert("gcpolicy".to_owned(), Value::Array(vec![policy(volume_gi)]));
        }
    }
    toml::to_string(&table).unwrap_or_default()
}

fn policy(volume_gi: i32) -> Value {
    let bytes = u64::try_from(volume_gi).unwrap_or(0) << 30;
    let share = |percent: u64| Value::String((bytes * percent / 100).to_string());
    let mut policy = Table::new();
    policy.insert("all".to_owned(), Value::Boolean(true));
    policy.insert("reservedSpace".to_owned(), share(FLOOR_PERCENT));
    policy.insert("maxUsedSpace".to_owned(), share(CEILING_PERCENT));
    policy.insert("minFreeSpace".to_owned(), share(FREE_PERCENT));
    Value::Table(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = r#"
debug = true
[worker.oci]
  max-parallelism = 4
  gckeepstorage = "10GB"
  [[worker.oci.gcpolicy]]
    all = false
[registry."docker.io"]
  mirrors = ["mirror.example.org"]
"#;

    #[test]
    fn the_policy_follows_the_volume() {
        insta::assert_snapshot!(buildkitd_toml(&Base::default(), 60), @r#"
        [worker.oci]
        gc = true

        [[worker.oci.gcpolicy]]
        all = true
        maxUsedSpace = "54760833024"
        minFreeSpace = "6442450944"
        reservedSpace = "25769803776"
        "#);
    }

    #[test]
    fn a_users_configuration_is_kept_but_for_garbage_collection() {
        let base = Base::parse(USERS, None).unwrap();
        insta::assert_snapshot!(buildkitd_toml(&base, 1), @r#"
        debug = true

        [registry."docker.io"]
        mirrors = ["mirror.example.org"]

        [worker.oci]
        gc = true
        max-parallelism = 4

        [[worker.oci.gcpolicy]]
        all = true
        maxUsedSpace = "912680550"
        minFreeSpace = "107374182"
        reservedSpace = "429496729"
        "#);
        let kept: Table = buildkitd_toml(&Base::parse(USERS, Some("keep")).unwrap(), 1).parse().unwrap();
        assert_eq!(kept, USERS.parse::<Table>().unwrap());
    }

    #[test]
    fn what_is_no_configuration_says_where() {
        let error = |text, gc| Base::parse(text, gc).unwrap_err().to_string();
        assert!(error("a = [1\n", None).contains("line"), "{}", error("a = [1\n", None));
        assert_eq!(error("worker = 1", None), "buildkitd.toml: \"worker\" must be a table");
        assert_eq!(error("[worker]\noci = 1", None), "buildkitd.toml: \"worker.oci\" must be a table");
        assert!(error("", Some("drop")).contains("\"drop\" is not known"));
    }
}
