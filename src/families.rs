//! What a profile can switch on. A family is a folder here, a group of
//! components under `manifests/`, and one line in the list of families.

pub mod build_farm;
