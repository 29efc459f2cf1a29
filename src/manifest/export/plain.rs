//! One file a component, named so that their order is the order of applying.

use super::{File, Group, documents};

pub(super) fn name(number: usize, group: &Group<'_>) -> String {
    format!("{number:02}-{}-{}.yaml", group.runlevel, group.component)
}

pub(super) fn files(groups: &[Group<'_>]) -> Vec<File> {
    let file = |(number, group): (usize, &Group<'_>)| {
        (name(number, group), documents(group.objects.iter().map(|object| &*object.body)))
    };
    groups.iter().enumerate().map(file).collect()
}
