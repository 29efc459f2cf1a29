//! The images that an installation pulls: those of its own pods, and of the
//! daemons that it makes. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{daemon, pods};
use crate::manifest::Rendered;

/// An image, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Image {
    /// Its reference.
    pub image: String,
    /// `Deployment farm/server`, `daemon`.
    pub of: Vec<String>,
}

/// Every image, once, by its reference.
pub fn images(rendered: &Rendered) -> Vec<Image> {
    let daemons = daemon::settings(rendered).map(|settings| daemon::trials(&settings)).unwrap_or_default();
    let mut images: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for trial in pods::trials(rendered).into_iter().chain(daemons) {
        for list in ["initContainers", "containers"] {
            let containers = trial.pod["spec"][list].as_array().into_iter().flatten();
            for image in containers.filter_map(|container| container["image"].as_str()) {
                let of = images.entry(image.to_owned()).or_default();
                if !of.contains(&trial.what) {
                    of.push(trial.what.clone());
                }
            }
        }
    }
    images.into_iter().map(|(image, of)| Image { image, of }).collect()
}
