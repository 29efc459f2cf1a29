//! The image archive, read back as a container tool would, and the checks on
//! what goes in.
#![allow(clippy::disallowed_methods, reason = "reads and writes fixtures")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use bko_install::image::elf::{ElfError, check};
use bko_install::image::{ImageError, Platform, Written, default_reference, native_arch, write};
use bko_install::key::Arch;
use serde_json::Value;
use sha2::{Digest, Sha256};

const AMD64: u16 = 62;
const ARM64: u16 = 183;

/// A minimal ELF executable: header, program headers of the given types, and a
/// body, in which an interpreter's path begins.
fn elf(machine: u16, segments: &[u32], body: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend(2u16.to_le_bytes());
    bytes.extend(machine.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    bytes.extend(0x40_0000u64.to_le_bytes());
    bytes.extend(64u64.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    for half in [64, 56, segments.len() as u16, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    assert_eq!(bytes.len(), 64);
    let body_at = 64 + 56 * segments.len() as u64;
    for kind in segments {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(4u32.to_le_bytes());
        for word in [body_at, 0, 0, body.len() as u64, body.len() as u64, 1] {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes.extend(body);
    bytes
}

fn machine(arch: Arch) -> u16 {
    if arch == Arch::Amd64 { AMD64 } else { ARM64 }
}

fn native() -> Arch {
    native_arch().expect("tests run on amd64 or arm64")
}

fn other() -> Arch {
    if native() == Arch::Amd64 { Arch::Arm64 } else { Arch::Amd64 }
}

struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn executable(&self, arch: Arch, body: &[u8]) -> Platform {
        let executable = self.path(&format!("bko-{arch}-{}", body.len()));
        std::fs::write(&executable, elf(machine(arch), &[1], body)).unwrap();
        Platform { arch, executable }
    }
}

fn image(platforms: &[Platform], reference: Option<&str>) -> (Written, Vec<u8>) {
    let mut out = Vec::new();
    let written = write(platforms, reference, &mut out).unwrap();
    assert_eq!(written.size, out.len() as u64);
    (written, out)
}

/// Files of a tar archive, after the checks that hold for every entry of ours.
fn untar(bytes: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let header = entry.header().clone();
        assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
        let path = entry.path().unwrap().display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert!(files.insert(path, (header.mode().unwrap(), content)).is_none());
    }
    files
}

struct Layout(BTreeMap<String, (u32, Vec<u8>)>);

impl Layout {
    fn file(&self, path: &str) -> Value {
        serde_json::from_slice(&self.0[path].1).unwrap()
    }

    /// The content of a descriptor, with size and digest checked.
    fn blob(&self, descriptor: &Value) -> &[u8] {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let content = &self.0[&format!("blobs/sha256/{digest}")].1;
        assert_eq!(descriptor["size"], content.len());
        assert_eq!(hex::encode(Sha256::digest(content)), digest);
        content
    }

    fn json(&self, descriptor: &Value) -> Value {
        serde_json::from_slice(self.blob(descriptor)).unwrap()
    }
}

#[test]
fn two_writes_are_the_same_bytes() {
    let fixture = Fixture::new();
    let one = fixture.executable(native(), &[7; 300_000]);
    let two = fixture.executable(other(), &[8; 1000]);
    let (first, bytes) = image(&[one.clone(), two.clone()], None);
    let (second, again) = image(&[two.clone(), one.clone()], None);
    assert_eq!((&first, &bytes), (&second, &again), "whatever the order");
    let (third, changed) = image(&[one, fixture.executable(other(), &[9; 999])], None);
    assert_eq!(first.reference, third.reference, "the native executable names the image");
    assert_ne!((first.digest, bytes), (third.digest, changed));
}

#[test]
fn the_layout_reads_back_with_every_digest_size_and_type() {
    let fixture = Fixture::new();
    let body = vec![3; 100_001];
    let platform = fixture.executable(native(), &body);
    let (written, bytes) = image(std::slice::from_ref(&platform), None);
    let layout = Layout(untar(&bytes));
    assert_eq!(layout.file("oci-layout")["imageLayoutVersion"], "1.0.0");
    let index = layout.file("index.json");
    assert_eq!(index["schemaVersion"], 2);
    assert_eq!(index["mediaType"], "application/vnd.oci.image.index.v1+json");
    let [root] = index["manifests"].as_array().unwrap().as_slice() else { panic!("{index}") };
    assert_eq!(root["digest"], written.digest);
    assert_eq!(root["mediaType"], "application/vnd.oci.image.manifest.v1+json");
    assert_eq!(root["platform"], serde_json::json!({"architecture": native().as_str(), "os": "linux"}));
    let tag = written.reference.strip_prefix("docker.io/library/bko-install:").unwrap();
    assert_eq!(root["annotations"]["io.containerd.image.name"], written.reference);
    assert_eq!(root["annotations"]["org.opencontainers.image.ref.name"], tag);

    let manifest = layout.json(root);
    assert_eq!(manifest["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    let layers = manifest["layers"].as_array().unwrap();
    assert!(layers.iter().all(|l| l["mediaType"] == "application/vnd.oci.image.layer.v1.tar"));
    let config = layout.json(&manifest["config"]);
    let diff_ids: Vec<_> =
        layers.iter().map(|l| format!("sha256:{}", hex::encode(Sha256::digest(layout.blob(l))))).collect();
    assert_eq!(config["rootfs"], serde_json::json!({"type": "layers", "diff_ids": diff_ids}));
    assert_eq!(config["history"].as_array().unwrap().len(), layers.len());
    assert_eq!((&config["architecture"], &config["os"]), (&native().as_str().into(), &"linux".into()));
    let run = &config["config"];
    assert_eq!((&run["User"], &run["Entrypoint"][0]), (&"65532:65532".into(), &"/bko-install".into()));
    assert_eq!(run["Env"][1], "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt");
    assert_eq!(run["Labels"]["org.opencontainers.image.version"], bko_install::VERSION);

    let docker = layout.file("manifest.json");
    assert_eq!(docker[0]["RepoTags"], serde_json::json!([written.reference]));
    let path = |d: &Value| format!("blobs/{}", d["digest"].as_str().unwrap().replace(':', "/"));
    assert_eq!(docker[0]["Config"], path(&manifest["config"]));
    assert_eq!(docker[0]["Layers"], Value::from(layers.iter().map(path).collect::<Vec<_>>()));
    let known: Vec<_> = layout.0.keys().filter(|path| !path.ends_with('/')).collect();
    assert_eq!(known.len(), 3 + 4, "nothing that nobody refers to: {known:?}");
}

#[test]
fn the_root_file_system_holds_what_a_static_program_needs() {
    let fixture = Fixture::new();
    let platform = fixture.executable(native(), &[5; 4000]);
    let (_, bytes) = image(std::slice::from_ref(&platform), None);
    let layout = Layout(untar(&bytes));
    let manifest = layout.json(&layout.file("index.json")["manifests"][0]);
    let mut root = BTreeMap::new();
    for layer in manifest["layers"].as_array().unwrap() {
        root.extend(untar(layout.blob(layer)));
    }
    let (mode, executable) = &root["bko-install"];
    assert_eq!(*mode, 0o755);
    assert_eq!(executable, &std::fs::read(&platform.executable).unwrap());
    assert_eq!(root["tmp/"].0, 0o1777);
    let text = |path: &str| String::from_utf8(root[path].1.clone()).unwrap();
    assert!(text("etc/passwd").lines().any(|line| line.starts_with("nonroot:x:65532:65532:")));
    assert!(text("etc/group").lines().any(|line| line == "nonroot:x:65532:"));
    use rustls::pki_types::pem::PemObject;
    let pem = &root["etc/ssl/certs/ca-certificates.crt"].1;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls::pki_types::CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.unwrap()).unwrap();
    }
    assert_eq!(roots.len(), webpki_root_certs::TLS_SERVER_ROOT_CERTS.len());
}

#[test]
fn several_platforms_make_an_index_whose_images_share_a_layer() {
    let fixture = Fixture::new();
    let platforms = [fixture.executable(Arch::Arm64, &[1; 10]), fixture.executable(Arch::Amd64, &[2; 20])];
    let (written, bytes) = image(&platforms, Some("registry.example.org/farm/bko-install:1"));
    assert_eq!(written.reference, "registry.example.org/farm/bko-install:1");
    assert_eq!(written.architectures, [Arch::Amd64, Arch::Arm64]);
    let layout = Layout(untar(&bytes));
    let index = layout.file("index.json");
    let root = &index["manifests"][0];
    assert_eq!(root["mediaType"], "application/vnd.oci.image.index.v1+json");
    assert_eq!((root["digest"].as_str(), root.get("platform")), (Some(written.digest.as_str()), None));
    assert_eq!(root["annotations"]["io.containerd.image.name"], written.reference);
    let images = layout.json(root);
    let mut base = Vec::new();
    for (image, arch) in images["manifests"].as_array().unwrap().iter().zip(["amd64", "arm64"]) {
        assert_eq!(image["platform"], serde_json::json!({"architecture": arch, "os": "linux"}));
        let manifest = layout.json(image);
        assert_eq!(layout.json(&manifest["config"])["architecture"], arch);
        let content = untar(layout.blob(&manifest["layers"][1]))["bko-install"].1.clone();
        let path = &platforms.iter().find(|p| p.arch.as_str() == arch).unwrap().executable;
        assert_eq!(content, std::fs::read(path).unwrap());
        base.push(manifest["layers"][0]["digest"].clone());
    }
    assert_eq!(base[0], base[1]);
    let docker = layout.file("manifest.json");
    let tagged: Vec<_> = docker.as_array().unwrap().iter().filter(|i| i["RepoTags"][0] == written.reference).collect();
    assert_eq!(tagged.len(), 1);
}

#[test]
fn the_default_reference_is_version_and_digest_of_the_executable() {
    let fixture = Fixture::new();
    let platform = fixture.executable(native(), b"x");
    let digest = hex::encode(Sha256::digest(std::fs::read(&platform.executable).unwrap()));
    let want = format!("docker.io/library/bko-install:{}-{}", bko_install::VERSION, &digest[..12]);
    assert_eq!(default_reference(&platform.executable).unwrap(), want);
    assert_eq!(image(&[platform], None).0.reference, want);
    assert!(default_reference(Path::new("/nowhere")).unwrap_err().to_string().contains("\"/nowhere\""));
}

#[test]
fn only_static_linux_executables_of_the_right_architecture_are_fit() {
    const INTERP: u32 = 3;
    let static_one = elf(AMD64, &[1, 6], b"code");
    let with = |at: usize, bytes: &[u8]| {
        let mut elf = static_one.clone();
        elf[at..at + bytes.len()].copy_from_slice(bytes);
        elf
    };
    let malformed = |why| Err(ElfError::Malformed(why));
    let interpreter = |path: &str| Err(ElfError::Dynamic { interpreter: path.to_owned() });
    let built_for = |found: &str| Err(ElfError::Machine { found: found.to_owned() });
    for (name, bytes, want) in [
        ("static", static_one.clone(), Ok(())),
        ("static, position independent", with(16, &[3, 0]), Ok(())),
        ("dynamic", elf(AMD64, &[6, INTERP, 1], b"/lib64/ld.so\0"), interpreter("/lib64/ld.so")),
        ("dynamic, cut", elf(AMD64, &[INTERP], b""), interpreter("")),
        ("dynamic, hostile path", elf(AMD64, &[INTERP], b"\x1b[2J"), interpreter("\\x1b[2J")),
        ("other machine", elf(ARM64, &[1], b""), built_for("arm64")),
        ("unknown machine", elf(8, &[1], b""), built_for("ELF machine 8")),
        (
            "script",
            b"#!/bin/sh\nexec true # and so on, longer than a header would be ....".to_vec(),
            Err(ElfError::NotElf),
        ),
        ("empty", vec![], Err(ElfError::NotElf)),
        ("cut in the header", static_one[..63].to_vec(), malformed("it is cut short")),
        ("cut in the program headers", static_one[..64 + 60].to_vec(), malformed("its program headers are cut short")),
        ("32 bit", with(4, &[1]), malformed("it is not 64-bit little-endian")),
        ("big endian", with(5, &[2]), malformed("it is not 64-bit little-endian")),
        ("object file", with(16, &[1, 0]), malformed("it is no executable")),
        ("no segments", elf(AMD64, &[], b""), malformed("it has no program headers")),
        ("odd entry size", with(54, &[32, 0]), malformed("its program headers have an unknown size")),
        ("offset overflow", with(32, &[0xff; 8]), malformed("its program headers are out of range")),
    ] {
        let got = check(&mut Cursor::new(bytes), Arch::Amd64);
        if name == "offset overflow" {
            // The first header is beyond any file; what seeking there says is the system's.
            assert!(!matches!(got, Ok(Ok(()))), "{got:?}");
            continue;
        }
        assert_eq!(got.unwrap(), want, "{name}");
    }
}

#[test]
fn an_unreadable_executable_is_named() {
    let fixture = Fixture::new();
    for (path, want) in [(fixture.path("nowhere"), "nowhere"), (fixture.path(""), "cannot read executable")] {
        let error = write(&[Platform { arch: native(), executable: path }], None, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, ImageError::Read { .. }) && error.to_string().contains(want), "{error}");
    }
    assert!(matches!(write(&[], None, &mut Vec::new()), Err(ImageError::Empty)));
}

#[test]
fn a_full_disk_is_a_write_error() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let fixture = Fixture::new();
    let platform = fixture.executable(native(), &[1; 3_000_000]);
    for room in [0, 700, 400_000, 2_000_000] {
        let result = write(std::slice::from_ref(&platform), None, &mut Full(room));
        assert!(matches!(result, Err(ImageError::Write(_))), "{room}: {result:?}");
    }
}

// ── the command ─────────────────────────────────────────────────────────────

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bko-install")).arg("image").args(args).env_clear().output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn this_test_build_is_dynamic_and_is_refused_with_the_way_out() {
    let fixture = Fixture::new();
    let tar = fixture.path("image.tar");
    let output = run(&["--output", tar.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(
        text.contains("executable \"/")
            && !text.contains("/proc/self")
            && text.contains("dynamically linked")
            && text.contains("hint: ")
            && text.contains("make build"),
        "{text}"
    );
    assert_eq!(fixture.dir.path().read_dir().unwrap().count(), 0, "no half-written file stays");
}

#[test]
fn the_command_writes_the_file_and_prints_reference_and_digest() {
    let fixture = Fixture::new();
    let platform = fixture.executable(native(), b"static");
    let (written, bytes) = image(std::slice::from_ref(&platform), None);
    let named = format!("{}={}", native(), platform.executable.display());
    let tar = fixture.path("image.tar");
    std::fs::write(&tar, "an older one").unwrap();
    let output = run(&["--output", tar.to_str().unwrap(), "--executable", &named]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, format!("reference  {}\ndigest     {}\n", written.reference, written.digest));
    assert_eq!(std::fs::read(&tar).unwrap(), bytes);
    assert_eq!(tar.metadata().unwrap().permissions().mode() & 0o600, 0o600);

    let output = run(&["-o", "-", "--executable", &named, "--json", "--reference", "farm:1"]);
    let summary: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(summary["reference"], "docker.io/library/farm:1");
    assert_eq!(summary["size"], output.stdout.len());
    assert_eq!(summary["architectures"], serde_json::json!([native().as_str()]));
    assert_eq!(image(&[platform], Some("docker.io/library/farm:1")).1, output.stdout);

    let output = run(&["-o", "/dev/null", "--executable", &named]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!Path::new("/dev/null").is_file(), "a device is written to, not replaced");
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    let fixture = Fixture::new();
    let right = fixture.executable(native(), b"x").executable.display().to_string();
    let tar = fixture.path("image.tar").display().to_string();
    let twice = [format!("{}={right}", native()), format!("{}={right}", native())];
    for (args, want) in [
        (vec!["-o", &tar, "--executable", "arm64"], "want ARCH=PATH"),
        (vec!["-o", &tar, "--executable", "arm64="], "the path is empty"),
        (vec!["-o", &tar, "--executable", "riscv64=x"], "unsupported arch"),
        (vec!["-o", &tar, "--executable", &twice[0], "--executable", &twice[1]], "twice"),
        (vec!["-o", &tar, "--reference", "farm"], "has no tag"),
        (vec![], "--output <FILE>"),
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(want), "{args:?}: {}", stderr(&output));
    }
    let wrong = format!("{}={right}", other());
    let own = format!("{}={right}", native());
    let output = run(&["-o", &tar, "--executable", &wrong, "--executable", &own]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("it is built for"), "{}", stderr(&output));
    let output = run(&["-o", "/nowhere/image.tar", "--executable", &own]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: cannot write \"/nowhere/image.tar\"\ncaused by: No such file"));
}
