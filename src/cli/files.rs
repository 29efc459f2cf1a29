//! Files that appear whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// A file under a temporary name beside its place, which [`commit`] renames
/// over it. Dropped before, it leaves nothing. What is there and no ordinary
/// file, such as `/dev/null` or a pipe, is written to instead.
///
/// [`commit`]: Replacement::commit
#[derive(Debug)]
pub struct Replacement {
    target: PathBuf,
    temporary: Option<PathBuf>,
    writer: BufWriter<File>,
}

impl Replacement {
    /// Opens the temporary file, with the mode that the final one shall have.
    ///
    /// # Errors
    /// The operating system's.
    pub fn new(target: &Path, mode: u32) -> io::Result<Self> {
        let target = match target.metadata() {
            Ok(existing) if existing.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            // Through a link, so that the link stays.
            Ok(existing) if existing.is_file() => target.canonicalize()?,
            Ok(_) => {
                let writer = BufWriter::new(OpenOptions::new().write(true).open(target)?);
                return Ok(Self { target: target.to_owned(), temporary: None, writer });
            }
            Err(_) => target.to_owned(),
        };
        let name = target.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let temporary = target.with_file_name(format!(".{}.{}.tmp", name.display(), std::process::id()));
        // What a killed process of the same number left.
        let _ = std::fs::remove_file(&temporary);
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        Ok(Self { target, temporary: Some(temporary), writer: BufWriter::new(file) })
    }

    /// Where to write.
    pub fn writer(&mut self) -> &mut dyn Write {
        &mut self.writer
    }

    /// Puts the file in its place, on disk first.
    ///
    /// # Errors
    /// The operating system's; the place is then as it was.
    pub fn commit(mut self) -> io::Result<()> {
        self.writer.flush()?;
        if let Some(temporary) = &self.temporary {
            self.writer.get_ref().sync_all()?;
            std::fs::rename(temporary, &self.target)?;
            self.temporary = None;
        }
        Ok(())
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Nothing better can be done about a failure to tidy up.
            let _ = std::fs::remove_file(temporary);
        }
    }
}
