//! Host-path volumes are made for root alone, and a pod's `fsGroup` is not
//! applied to them. Real storage does so; here they are opened from outside, so
//! that nothing in the product has to work around it.

use std::fs::{Permissions, set_permissions};
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};

/// Where the controller manager makes them; it cannot be told another place.
const FOLDER: &str = "/tmp/hostpath_pv";

/// Opens each volume as it is made, for the rest of the run.
///
/// # Errors
/// The folder cannot be watched.
pub(crate) fn loosen_in_background() -> anyhow::Result<()> {
    let inotify = init(CreateFlags::CLOEXEC)?;
    add_watch(&inotify, FOLDER, WatchFlags::CREATE)?;
    std::thread::spawn(move || {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(inotify, &mut buffer);
        while let Ok(event) = events.next() {
            if let Some(name) = event.file_name().and_then(|name| name.to_str().ok()) {
                // Gone again already: nothing to open.
                let _ = set_permissions(Path::new(FOLDER).join(name), Permissions::from_mode(0o777));
            }
        }
    });
    Ok(())
}
