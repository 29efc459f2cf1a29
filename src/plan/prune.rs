//! What the installation no longer has, and whether it may go.

use std::fmt;

use serde::Serialize;

use super::{Entry, Wave};
use crate::manifest::{ObjectId, Runlevel};

/// What became of an object that is recorded and no longer wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remains {
    /// It does not exist any more.
    Gone,
    /// It is another object of that name, or no longer labelled as ours.
    NotOurs(String),
    /// It carries the annotation that keeps it.
    Kept,
    /// It is there and ours.
    Ours {
        /// Its UID.
        uid: String,
        /// Why it must not go without consent.
        brakes: Vec<Brake>,
    },
}

/// Why something must not be deleted without consent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "brake")]
pub enum Brake {
    /// A namespace holds what is not ours.
    Foreign {
        /// Some of it.
        objects: Vec<String>,
    },
    /// A definition has live objects.
    Instances {
        /// How many.
        count: usize,
    },
    /// A volume holds data.
    Volume,
    /// Too much would go at once.
    Share {
        /// How many objects go.
        deleted: usize,
        /// Of how many.
        of: usize,
    },
}

impl fmt::Display for Brake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign { objects } => write!(f, "holds what is not ours: {}", objects.join(", ")),
            Self::Instances { count } => write!(f, "{count} objects of this kind exist"),
            Self::Volume => write!(f, "holds data"),
            Self::Share { deleted, of } => write!(f, "{deleted} of {of} objects would go"),
        }
    }
}

/// An object that will be deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deletion {
    /// The object.
    #[serde(flatten)]
    pub id: ObjectId,
    /// Which one of that name.
    #[serde(skip)]
    pub uid: String,
    /// Component that it belonged to.
    pub component: String,
    /// Its level.
    pub runlevel: Runlevel,
    /// What needs consent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub brakes: Vec<Brake>,
}

/// What happens to objects that are recorded and no longer wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Those that go, in order: what came last goes first.
    pub deletions: Vec<Deletion>,
    /// Those that stay in the inventory.
    pub kept: Vec<Entry>,
    /// Those that are left alone and forgotten, and why.
    pub forgotten: Vec<(ObjectId, String)>,
}

impl Pruned {
    /// Sorts out the remains; `inventory` is how many objects are recorded.
    pub fn new(remains: impl IntoIterator<Item = (Entry, Remains)>) -> Self {
        let mut pruned = Self::default();
        for (entry, remains) in remains {
            match remains {
                Remains::Gone => {}
                Remains::NotOurs(why) => pruned.forgotten.push((entry.id, why)),
                Remains::Kept => pruned.kept.push(entry),
                Remains::Ours { uid, brakes } => pruned.deletions.push(Deletion {
                    id: entry.id,
                    uid,
                    component: entry.component,
                    runlevel: entry.runlevel,
                    brakes,
                }),
            }
        }
        let place = |deletion: &Deletion| (deletion.runlevel, Wave::of(&deletion.id), deletion.id.clone());
        pruned.deletions.sort_by_key(|deletion| std::cmp::Reverse(place(deletion)));
        pruned
    }

    /// Everything that needs consent: the object, or the whole, and why.
    pub fn brakes(&self, inventory: usize) -> Vec<(Option<ObjectId>, Brake)> {
        let own = self.deletions.iter().flat_map(|d| d.brakes.iter().map(|brake| (Some(d.id.clone()), brake.clone())));
        let mut all: Vec<_> = own.collect();
        let deleted = self.deletions.len();
        if deleted * 3 > inventory {
            all.push((None, Brake::Share { deleted, of: inventory }));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(runlevel: Runlevel, kind: &str, name: &str) -> Entry {
        let id = ObjectId {
            group: String::new(),
            version: "v1".into(),
            kind: kind.into(),
            namespace: None,
            name: name.into(),
        };
        Entry { id, uid: None, component: "c".into(), runlevel, digest: String::new() }
    }

    fn ours() -> Remains {
        Remains::Ours { uid: "u".into(), brakes: Vec::new() }
    }

    #[test]
    fn what_came_last_goes_first_and_only_what_is_ours() {
        let pruned = Pruned::new([
            (entry(Runlevel::Rc0, "Namespace", "farm"), ours()),
            (entry(Runlevel::Rc1, "ConfigMap", "a"), ours()),
            (entry(Runlevel::Rc3, "Service", "s"), ours()),
            (entry(Runlevel::Rc1, "ServiceAccount", "acc"), ours()),
            (entry(Runlevel::Rc3, "Service", "gone"), Remains::Gone),
            (entry(Runlevel::Rc3, "Service", "kept"), Remains::Kept),
            (entry(Runlevel::Rc3, "Service", "theirs"), Remains::NotOurs("another".into())),
        ]);
        let order: Vec<&str> = pruned.deletions.iter().map(|d| d.id.name.as_str()).collect();
        assert_eq!(order, ["s", "a", "acc", "farm"]);
        assert_eq!(pruned.kept.len(), 1);
        assert_eq!(pruned.forgotten.len(), 1);
        assert_eq!(pruned.brakes(12), []);
        assert_eq!(pruned.brakes(11), [(None, Brake::Share { deleted: 4, of: 11 })]);
    }
}
