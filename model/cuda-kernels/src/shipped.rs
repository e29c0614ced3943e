//! Compiled kernels in one file, installed beside a program: a first start compiles nothing and needs no NVRTC.
//!
//! The file begins with [`MAGIC`]. Entries follow, in little endian:
//!
//! ```text
//! length of the name   u32
//! length of the code   u32, compressed
//! name                 as of a file in the cache: "KEY.cuda12.cubin"
//! code                 a zlib stream (RFC 1950), whose checksum detects damage
//! ```

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use miniz_oxide::deflate::compress_to_vec_zlib;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;

/// The name of the file. It is in the folder of the program that reads it.
pub const FILE_NAME: &str = "kernels.cubins";

const MAGIC: &[u8; 8] = b"BATONCU1";

/// More than any kernel file compiles to. Limits what a damaged file can allocate.
const MAX_CODE_BYTES: usize = 64 << 20;

const COMPRESSION_LEVEL: u8 = 9;

/// The path of the file beside this program, if there is one.
pub fn beside_program() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(FILE_NAME);
    path.is_file().then_some(path)
}

/// The file in memory, with the places of its entries.
#[derive(Debug)]
pub struct ShippedCubins {
    path: PathBuf,
    bytes: Vec<u8>,
    entries: HashMap<String, Range<usize>>,
}

impl ShippedCubins {
    /// Reads the file.
    ///
    /// # Errors
    /// When it cannot be read, or is not such a file.
    pub fn open(path: &Path) -> io::Result<ShippedCubins> {
        let bytes = std::fs::read(path)?;
        let entries = entries(&bytes).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "it is damaged, or holds no compiled kernels")
        })?;
        Ok(ShippedCubins { path: path.to_owned(), bytes, entries })
    }

    /// The code of this name. A damaged entry counts as missing.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let code = &self.bytes[self.entries.get(name)?.clone()];
        let code = decompress_to_vec_zlib_with_limit(code, MAX_CODE_BYTES);
        if code.is_err() {
            tracing::warn!(path = %self.path.display(), name, "an installed kernel is damaged and is not used");
        }
        code.ok()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Names and places of the compressed code. `None`: this is not the whole of such a file.
fn entries(bytes: &[u8]) -> Option<HashMap<String, Range<usize>>> {
    let mut at = MAGIC.len();
    (bytes.get(..at)? == MAGIC).then_some(())?;
    let mut entries = HashMap::new();
    while at < bytes.len() {
        let mut next = |len: usize| {
            let range = at..at.checked_add(len)?;
            at = range.end;
            bytes.get(range.clone()).map(|_| range)
        };
        let mut length = || {
            let word = bytes[next(4)?].try_into().expect("four bytes");
            Some(u32::from_le_bytes(word) as usize)
        };
        let [name_bytes, code_bytes] = [length()?, length()?];
        let name = String::from_utf8(bytes[next(name_bytes)?].to_vec()).ok()?;
        entries.insert(name, next(code_bytes)?);
    }
    Some(entries)
}

/// Writes a file with these names and codes. It appears complete or not at all. Returns its size in bytes.
///
/// # Errors
/// When it cannot be written.
pub fn write<'a>(path: &Path, cubins: impl Iterator<Item = (&'a str, &'a [u8])>) -> io::Result<u64> {
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let mut file = io::BufWriter::new(std::fs::File::create(&new)?);
    file.write_all(MAGIC)?;
    for (name, code) in cubins {
        let code = compress_to_vec_zlib(code, COMPRESSION_LEVEL);
        for len in [name.len(), code.len()] {
            file.write_all(&u32::try_from(len).expect("below 4 GiB").to_le_bytes())?;
        }
        file.write_all(name.as_bytes())?;
        file.write_all(&code)?;
    }
    file.into_inner()?.sync_all()?;
    std::fs::rename(&new, path)?;
    Ok(std::fs::metadata(path)?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_and_damage_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let code: Vec<u8> = (0..5000u32).map(|i| (i % 7 * i % 251) as u8).collect();
        let cubins = [("a.cuda12.cubin", &code[..]), ("b.cuda12.cubin", &[7; 900])];
        let size_bytes = write(&path, cubins.into_iter()).unwrap();
        let shipped = ShippedCubins::open(&path).unwrap();
        assert_eq!(shipped.len(), 2);
        assert_eq!(shipped.get("a.cuda12.cubin").as_deref(), Some(&code[..]));
        assert_eq!(shipped.get("b.cuda12.cubin"), Some(vec![7; 900]));
        assert_eq!(shipped.get("a.cuda13.cubin"), None);

        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len() as u64, size_bytes);
        assert!(whole.len() < code.len(), "{} bytes", whole.len());
        let mut inverted = whole.clone();
        inverted[MAGIC.len() + 8 + 14 + 40] ^= 0xff;
        std::fs::write(&path, &inverted).unwrap();
        let damaged = ShippedCubins::open(&path).unwrap();
        assert_eq!(damaged.get("a.cuda12.cubin"), None);
        assert_eq!(damaged.get("b.cuda12.cubin"), Some(vec![7; 900]));
        for cut in [0, 5, MAGIC.len() + 3, whole.len() - 1] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(ShippedCubins::open(&path).is_err(), "cut to {cut} bytes");
        }
    }
}
