//! The daemon's `buildkitd.toml`: garbage collection derived from the size of
//! its cache volume. Pure.

use serde::Serialize;

/// Share of the volume that the cache may fill, in percent: the ceiling.
const CEILING_PERCENT: u64 = 85;
/// Share that is always kept for this project's cache: the floor.
const FLOOR_PERCENT: u64 = 40;
/// Share of the volume that stays free for builds in progress.
const FREE_PERCENT: u64 = 10;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Policy {
    all: bool,
    reserved_space: String,
    max_used_space: String,
    min_free_space: String,
}

#[derive(Serialize)]
struct Config {
    worker: Worker,
}

#[derive(Serialize)]
struct Worker {
    oci: Oci,
}

#[derive(Serialize)]
struct Oci {
    enabled: bool,
    gc: bool,
    gcpolicy: Vec<Policy>,
}

/// Renders the configuration for a volume of `volume_gi` GiB.
///
/// One policy for every kind of record: below the floor nothing is pruned,
/// above the ceiling or with less than the margin free the least recently used
/// records go first. Sizes are in bytes: a percentage would be one of the disk
/// under the volume, which may be far larger than the volume's quota.
pub fn buildkitd_toml(volume_gi: i32) -> String {
    let bytes = u64::try_from(volume_gi).unwrap_or(0) << 30;
    let share = |percent: u64| (bytes * percent / 100).to_string();
    let config = Config {
        worker: Worker {
            oci: Oci {
                enabled: true,
                gc: true,
                gcpolicy: vec![Policy {
                    all: true,
                    reserved_space: share(FLOOR_PERCENT),
                    max_used_space: share(CEILING_PERCENT),
                    min_free_space: share(FREE_PERCENT),
                }],
            },
        },
    };
    toml::to_string(&config).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_follows_the_volume() {
        insta::assert_snapshot!(buildkitd_toml(60), @r#"
        [worker.oci]
        enabled = true
        gc = true

        [[worker.oci.gcpolicy]]
        all = true
        reservedSpace = "25769803776"
        maxUsedSpace = "54760833024"
        minFreeSpace = "6442450944"
        "#);
    }
}
