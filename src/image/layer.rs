//! The two layers: what every version shares, and the executable. Both are
//! plain tar, so that no compressor's version changes a digest. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tar::{EntryType, Header};

use super::{ENTRYPOINT, USER};

const BLOCK: u64 = 512;

/// Where TLS libraries look for authorities, and what `SSL_CERT_FILE` says.
pub(super) const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The layer below the executable, the same for every version and architecture:
/// public authorities, the users, and a folder for scratch files.
pub(super) fn base() -> Vec<u8> {
    let passwd = format!("root:x:0:0:root:/:/sbin/nologin\nnonroot:x:{USER}:{USER}:nonroot:/tmp:/sbin/nologin\n");
    let group = format!("root:x:0:\nnonroot:x:{USER}:\n");
    let mut tar = Vec::new();
    for (path, mode) in [("etc/", 0o755), ("etc/ssl/", 0o755), ("etc/ssl/certs/", 0o755), ("tmp/", 0o1777)] {
        tar.extend_from_slice(header(path, EntryType::Directory, mode, 0).as_bytes());
    }
    for (path, content) in [
        (CERTIFICATES.trim_start_matches('/'), authorities()),
        ("etc/group", group.into_bytes()),
        ("etc/passwd", passwd.into_bytes()),
    ] {
        let size = content.len() as u64;
        tar.extend_from_slice(header(path, EntryType::Regular, 0o644, size).as_bytes());
        tar.extend(content);
        tar.resize(tar.len() + padding(size), 0);
    }
    tar.resize(tar.len() + 2 * BLOCK as usize, 0);
    tar
}

/// The public authorities that Mozilla trusts, in PEM, by content: their order
/// in the package is nobody's promise.
fn authorities() -> Vec<u8> {
    let mut all: Vec<&[u8]> = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().map(AsRef::as_ref).collect();
    all.sort_unstable();
    let mut pem = String::new();
    for der in all {
        pem.push_str("-----BEGIN CERTIFICATE-----\n");
        let text = STANDARD.encode(der);
        for (i, c) in text.chars().enumerate() {
            if i > 0 && i % 64 == 0 {
                pem.push('\n');
            }
            pem.push(c);
        }
        pem.push_str("\n-----END CERTIFICATE-----\n");
    }
    pem.into_bytes()
}

/// The layer that holds the executable, but for its content.
pub(super) struct ExecutableLayer {
    header: Header,
    size: u64,
}

impl ExecutableLayer {
    pub(super) fn new(size: u64) -> Self {
        let path = ENTRYPOINT.trim_start_matches('/');
        Self { header: header(path, EntryType::Regular, 0o755, size), size }
    }

    /// What comes before the content.
    pub(super) fn head(&self) -> &[u8] {
        self.header.as_bytes()
    }

    /// What comes after the content.
    pub(super) fn tail(&self) -> Vec<u8> {
        vec![0; padding(self.size) + 2 * BLOCK as usize]
    }

    /// Bytes of the whole layer.
    pub(super) fn size(&self) -> u64 {
        BLOCK + self.size + self.tail().len() as u64
    }
}

/// An entry whose every field is fixed: owner root, time zero, no names.
pub(super) fn header(path: &str, kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_ustar();
    // Every path here is a literal or a digest, shorter than the field's 100 bytes.
    let field = &mut header.as_old_mut().name;
    for (byte, value) in field.iter_mut().zip(path.bytes()) {
        *byte = value;
    }
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header.set_cksum();
    header
}

/// Zeros that fill the last block of an entry.
pub(super) fn padding(size: u64) -> usize {
    (size.next_multiple_of(BLOCK) - size) as usize
}
