//! What the file system of the state folder can do, found out by doing it.
#![expect(clippy::disallowed_methods, reason = "shell: probes the file system")]

use std::fs::{self, File};
use std::io;

use rustix::fs::{ioctl_ficlone, statfs};

use super::{BTRFS, Storage, StorageError, UNFINISHED};

impl Storage {
    pub(super) async fn probe_btrfs(&self) -> Result<(), StorageError> {
        let unusable = |why: String| StorageError::Unusable { kind: "btrfs", why };
        let caches = self.layout.caches();
        let magic = statfs(&caches).map_err(|error| StorageError::Folder(caches.clone(), error.into()))?.f_type;
        if magic as i64 != BTRFS {
            return Err(unusable(format!("\"{}\" is not on btrfs", caches.display())));
        }
        let probe = caches.join(format!("{UNFINISHED}probe"));
        let made = self.run("btrfs", &["subvolume".as_ref(), "create".as_ref(), probe.as_ref()]).await;
        let made = made.and(self.run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), probe.as_ref()]).await);
        made.map_err(|error| unusable(format!("{error}; it needs btrfs-progs and the right to delete subvolumes")))
    }

    pub(super) fn probe_reflink(&self) -> Result<(), StorageError> {
        let caches = self.layout.caches();
        let paths = ["probe-a", "probe-b"].map(|name| caches.join(format!("{UNFINISHED}{name}")));
        let probe = || {
            fs::write(&paths[0], [1; 4096])?;
            ioctl_ficlone(File::create(&paths[1])?, File::open(&paths[0])?)?;
            Ok::<_, io::Error>(())
        };
        let result = probe();
        paths.iter().for_each(|path| drop(fs::remove_file(path)));
        result.map_err(|error| StorageError::Unusable {
            kind: "reflink",
            why: format!("the file system of \"{}\" cannot share blocks between files: {error}", caches.display()),
        })
    }
}
