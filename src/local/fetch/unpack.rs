//! The programs of BuildKit out of the layers of its image. Everything else in
//! them stays where it is: nothing is written but files of these names.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use tar::Archive;

use super::FetchError;

/// What is taken, from `/usr/bin`; those marked so must be there.
const PROGRAMS: [(&str, bool); 4] =
    [("buildkitd", true), ("buildkit-runc", true), ("buildctl", false), ("rootlesskit", false)];

/// Unpacks layers, lowest first, into a folder that appears whole or not at all.
pub(super) fn programs(layers: &[(PathBuf, String)], bin: &Path, image: &str) -> Result<(), FetchError> {
    let draft = bin.with_file_name("bin.unfinished");
    let file = |path: &Path| {
        let path = path.to_owned();
        move |error| FetchError::File(path, error)
    };
    if draft.exists() {
        fs::remove_dir_all(&draft).map_err(file(&draft))?;
    }
    fs::create_dir_all(&draft).map_err(file(&draft))?;
    for (layer, media_type) in layers {
        let failed = |error: io::Error| FetchError::Unpack(layer.display().to_string(), error.to_string());
        let input = File::open(layer).map_err(failed)?;
        match media_type.rsplit(['.', '+']).next() {
            Some("gzip") => unpack(GzDecoder::new(input), &draft).map_err(failed)?,
            Some("tar") => unpack(input, &draft).map_err(failed)?,
            _ => return Err(FetchError::Unpack(image.to_owned(), format!("its layers are {media_type}, want gzip"))),
        }
    }
    for (name, needed) in PROGRAMS {
        if needed && !draft.join(name).is_file() {
            return Err(FetchError::NotBuildkit(image.to_owned(), name));
        }
    }
    if bin.exists() {
        fs::remove_dir_all(bin).map_err(file(bin))?;
    }
    fs::rename(&draft, bin).map_err(file(bin))
}

fn unpack(input: impl Read, draft: &Path) -> io::Result<()> {
    for entry in Archive::new(input).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let path = path.strip_prefix("./").or_else(|_| path.strip_prefix("/")).unwrap_or(&path);
        let Some(name) = path.strip_prefix("usr/bin").ok().and_then(Path::to_str) else { continue };
        // A layer above may take away what one below has.
        let (name, gone) = name.strip_prefix(".wh.").map_or((name, false), |name| (name, true));
        if !PROGRAMS.iter().any(|(program, _)| *program == name) {
            continue;
        }
        let target = draft.join(name);
        if target.exists() {
            fs::remove_file(&target)?;
        }
        if !gone && entry.header().entry_type().is_file() {
            let mut out = OpenOptions::new().write(true).create_new(true).mode(0o755).open(&target)?;
            io::copy(&mut entry, &mut out)?;
            out.sync_all()?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use std::io::Write as _;

    use super::*;

    const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    const DOCKER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";

    fn layer(folder: &Path, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let path = folder.join(name);
        let mut gzip = flate2::write::GzEncoder::new(File::create(&path).unwrap(), flate2::Compression::fast());
        let mut archive = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o4755);
            archive.append_data(&mut header, name, content.as_bytes()).unwrap();
        }
        gzip.write_all(&archive.into_inner().unwrap()).unwrap();
        gzip.finish().unwrap();
        path
    }

    #[test]
    fn the_programs_are_taken_from_the_layers_in_their_order_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        let layers = [
            (
                layer(
                    folder.path(),
                    "a",
                    &[("usr/bin/buildkitd", "old"), ("etc/passwd", "x"), ("usr/bin/rootlesskit", "r")],
                ),
                GZIP,
            ),
            (layer(folder.path(), "b", &[("./usr/bin/buildkitd", "new"), ("usr/bin/buildkit-runc", "runc")]), DOCKER),
            (layer(folder.path(), "c", &[("usr/bin/.wh.rootlesskit", ""), ("usr/bin/sub/buildctl", "x")]), GZIP),
        ]
        .map(|(path, kind)| (path, kind.to_owned()));
        programs(&layers, &bin, "i").unwrap();
        let mut names: Vec<_> =
            fs::read_dir(&bin).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["buildkit-runc", "buildkitd"]);
        assert_eq!(fs::read_to_string(bin.join("buildkitd")).unwrap(), "new");
        let mode = std::os::unix::fs::PermissionsExt::mode(&bin.join("buildkitd").metadata().unwrap().permissions());
        assert_eq!(mode & 0o7777, 0o755, "no setuid is taken over");

        let other = [(layers[0].0.clone(), GZIP.to_owned())];
        let error = programs(&other, &bin, "docker.io/library/x").unwrap_err().to_string();
        assert_eq!(error, "\"docker.io/library/x\" has no buildkit-runc: want an image as moby/buildkit");
        assert_eq!(fs::read_to_string(bin.join("buildkitd")).unwrap(), "new", "what was there stays");
        let zstd = [(layers[0].0.clone(), "application/vnd.oci.image.layer.v1.tar+zstd".to_owned())];
        assert!(programs(&zstd, &bin, "i").unwrap_err().to_string().contains("want gzip"));
    }
}
