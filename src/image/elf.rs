//! Whether a file can run in an image that holds nothing but it: a static
//! 64-bit Linux executable of the wanted architecture. Reads headers only.

use std::io::{self, Read, Seek, SeekFrom};

use crate::key::Arch;

/// Why a file cannot run in the image.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum ElfError {
    /// Not ELF at all: a script, or another system's executable.
    #[error("it is no ELF executable")]
    NotElf,
    /// ELF, but not what runs here.
    #[error("its ELF header is unusable: {0}")]
    Malformed(&'static str),
    /// It is built for another machine.
    #[error("it is built for {found}")]
    Machine {
        /// What it is built for.
        found: String,
    },
    /// It needs a dynamic loader, which the image does not have.
    #[error("it is dynamically linked: it needs \"{interpreter}\", which the image does not have")]
    Dynamic {
        /// The loader.
        interpreter: String,
    },
}

const PT_INTERP: u32 = 3;
const HEADER: usize = 64;
const ENTRY: u16 = 56;
/// Far beyond any real loader's path.
const INTERPRETER_MAX: u64 = 4096;

/// Checks a file.
///
/// # Errors
/// Outer: it cannot be read. Inner: it is unfit.
pub fn check(file: &mut (impl Read + Seek), arch: Arch) -> io::Result<Result<(), ElfError>> {
    let mut header = [0; HEADER];
    file.rewind()?;
    if read_full(file, &mut header)? < HEADER {
        let is_elf = header.starts_with(b"\x7fELF");
        return Ok(Err(if is_elf { ElfError::Malformed("it is cut short") } else { ElfError::NotElf }));
    }
    let (offset, count) = match program_headers(&header, arch) {
        Ok(found) => found,
        Err(error) => return Ok(Err(error)),
    };
    for index in 0..u64::from(count) {
        let mut entry = [0; ENTRY as usize];
        let Some(at) = offset.checked_add(index * u64::from(ENTRY)) else {
            return Ok(Err(ElfError::Malformed("its program headers are out of range")));
        };
        file.seek(SeekFrom::Start(at))?;
        if read_full(file, &mut entry)? < entry.len() {
            return Ok(Err(ElfError::Malformed("its program headers are cut short")));
        }
        if u32_at(&entry, 0) == PT_INTERP {
            let interpreter = interpreter(file, u64_at(&entry, 8), u64_at(&entry, 32))?;
            return Ok(Err(ElfError::Dynamic { interpreter }));
        }
    }
    Ok(Ok(()))
}

/// Offset and number of the program headers.
fn program_headers(header: &[u8; HEADER], arch: Arch) -> Result<(u64, u16), ElfError> {
    if !header.starts_with(b"\x7fELF") {
        return Err(ElfError::NotElf);
    }
    if header[4] != 2 || header[5] != 1 {
        return Err(ElfError::Malformed("it is not 64-bit little-endian"));
    }
    if !matches!(u16_at(header, 16), 2 | 3) {
        return Err(ElfError::Malformed("it is no executable"));
    }
    let machine = u16_at(header, 18);
    if machine != machine_of(arch) {
        let known = [Arch::Amd64, Arch::Arm64].into_iter().find(|arch| machine_of(*arch) == machine);
        let found = known.map_or_else(|| format!("ELF machine {machine}"), |arch| arch.to_string());
        return Err(ElfError::Machine { found });
    }
    let count = u16_at(header, 56);
    if count == 0 {
        return Err(ElfError::Malformed("it has no program headers"));
    }
    if u16_at(header, 54) != ENTRY {
        return Err(ElfError::Malformed("its program headers have an unknown size"));
    }
    Ok((u64_at(header, 32), count))
}

fn machine_of(arch: Arch) -> u16 {
    match arch {
        Arch::Amd64 => 62,
        Arch::Arm64 => 183,
    }
}

fn interpreter(file: &mut (impl Read + Seek), at: u64, size: u64) -> io::Result<String> {
    let mut path = Vec::new();
    file.seek(SeekFrom::Start(at))?;
    file.take(size.min(INTERPRETER_MAX)).read_to_end(&mut path)?;
    let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(path.escape_ascii().to_string())
}

fn read_full(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match file.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}
