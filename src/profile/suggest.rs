//! The name that somebody probably meant.

/// `; did you mean "x"?`, or nothing when no candidate is near.
pub(crate) fn did_you_mean<'a>(name: &str, candidates: impl Iterator<Item = &'a str> + Clone) -> String {
    let near = candidates
        .clone()
        .map(|candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= 0.6)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate);
    let ends_alike = |candidate: &&str| candidate.strip_suffix(name).is_some_and(|group| group.ends_with('.'));
    match near.or_else(|| candidates.into_iter().find(ends_alike)) {
        Some(candidate) => format!("; did you mean \"{candidate}\"?"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_near_names_are_suggested() {
        let names = ["server.replicas", "gateway.replicas", "auth.open"];
        let ask = |name| did_you_mean(name, names.iter().copied());
        assert_eq!(ask("server.replica"), "; did you mean \"server.replicas\"?");
        assert_eq!(ask("gatway.replicas"), "; did you mean \"gateway.replicas\"?");
        assert_eq!(ask("open"), "; did you mean \"auth.open\"?");
        assert_eq!(ask("something.else"), "");
    }
}
