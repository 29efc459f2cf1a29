//! What an image was when it first came whole: nothing else is accepted under
//! its name from then on. One line for each image, `NAME DIGEST`.

use std::fs;
use std::io;
use std::path::Path;

use crate::local::certificates::replace;

/// The digest that is held to; none where an image never came.
pub(super) fn read(file: &Path, image: &str) -> io::Result<Option<String>> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(lines(&text).find(|(name, _)| *name == image).map(|(_, digest)| digest.to_owned()))
}

/// Holds to a digest from now on.
pub(super) fn hold(file: &Path, image: &str, digest: &str) -> io::Result<()> {
    if read(file, image)?.is_some() {
        return Ok(());
    }
    let before = fs::read_to_string(file).unwrap_or_default();
    replace(file, format!("{before}{image} {digest}\n").as_bytes())
}

fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.trim().split_once(' '))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::*;

    #[test]
    fn the_first_digest_of_an_image_is_held_to() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("images");
        assert_eq!(read(&file, "a:1").unwrap(), None);
        for (image, digest) in [("a:1", "sha256:aa"), ("a:2", "sha256:bb"), ("a:1", "sha256:cc")] {
            hold(&file, image, digest).unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "a:1 sha256:aa\na:2 sha256:bb\n");
        assert_eq!(read(&file, "a:2").unwrap().as_deref(), Some("sha256:bb"));
        assert_eq!(read(&file, "a").unwrap(), None);
    }
}
