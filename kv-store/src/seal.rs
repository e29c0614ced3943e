//! What leaves the process is sealed by AES-256-GCM, under keys derived from the key of a file.
//!
//! A key is derived (HKDF-SHA256) from the file's key, the root of a tenant's and salt's hashes, and a random seed of 192 bits. So
//! each key seals one record: its head under nonce 0 and its body under nonce 1. A nonce never repeats, unless two seeds do:
//! after 2^64 records the odds are 2^-64. This is the construction of XAES-256-GCM (C2SP), with another derivation.

use std::{fmt, fs, io, path::Path, sync::Arc};

use baton_kv_cache::BlockHash;
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey},
    hkdf,
    rand::{SecureRandom, SystemRandom},
};

/// Bytes of a seed.
pub(crate) const SEED_BYTES: usize = 24;
/// Bytes of a tag.
pub(crate) const TAG_BYTES: usize = 16;

/// What makes a derived key one of its own.
pub(crate) type Seed = [u8; SEED_BYTES];
/// What proves sealed bytes.
pub(crate) type Tag = [u8; TAG_BYTES];

/// The key from which all others are derived. It is never shown.
#[derive(Clone)]
pub struct KvKey(Arc<hkdf::Prk>);

/// What a derived key is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// A record of the chain with this root.
    Record(BlockHash),
    /// The manifest of a segment.
    Manifest,
}

/// A derived key.
pub(crate) struct SealedUnder {
    key: LessSafeKey,
    seed: Seed,
}

/// Why a file is no key.
#[derive(Debug, thiserror::Error)]
pub enum KvKeyError {
    /// It cannot be read.
    #[error("cannot read the key")]
    Io(#[from] io::Error),
    /// It holds something else.
    #[error("expected 64 hexadecimal digits, as `openssl rand -hex 32` prints")]
    NotAKey,
}

impl KvKey {
    /// Reads the key of a file: 32 bytes in hexadecimal digits.
    ///
    /// # Errors
    /// When it cannot be read, or is something else.
    pub fn read(path: &Path) -> Result<KvKey, KvKeyError> {
        let text = fs::read_to_string(path)?;
        let digits = text.trim();
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(KvKeyError::NotAKey);
        }
        let byte = |idx| u8::from_str_radix(&digits[2 * idx..][..2], 16).expect("hexadecimal digits");
        Ok(KvKey::new(std::array::from_fn(byte)))
    }

    pub(crate) fn new(key: [u8; 32]) -> KvKey {
        KvKey(Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, b"baton kv").extract(&key)))
    }

    /// Tells keys apart, and nothing else of them.
    pub(crate) fn name(&self) -> u64 {
        let mut name = [0; 32];
        let derived = self.0.expand(&[b"name"], hkdf::HKDF_SHA256);
        derived.and_then(|derived| derived.fill(&mut name)).expect("32 bytes are few enough");
        u64::from_le_bytes(*name.first_chunk().expect("32 bytes"))
    }

    /// A fresh key.
    pub(crate) fn seal(&self, purpose: Purpose) -> SealedUnder {
        let mut seed = [0; SEED_BYTES];
        SystemRandom::new().fill(&mut seed).expect("the system has random numbers");
        self.open(purpose, seed)
    }

    /// The key of what was sealed under this seed.
    pub(crate) fn open(&self, purpose: Purpose, seed: Seed) -> SealedUnder {
        let (label, root) = match purpose {
            Purpose::Record(root) => (b"record", root.to_bytes()),
            Purpose::Manifest => (b"listed", [0; 16]),
        };
        let info: [&[u8]; 3] = [label, &root, &seed];
        let key: UnboundKey = self.0.expand(&info, &AES_256_GCM).expect("32 bytes are few enough").into();
        SealedUnder { key: LessSafeKey::new(key), seed }
    }
}

impl SealedUnder {
    pub(crate) fn seed(&self) -> &Seed {
        &self.seed
    }

    /// Encrypts the first part in place. `clear` is proved, too. Called once.
    pub(crate) fn seal_first(&self, clear: &[u8], bytes: &mut [u8]) -> Tag {
        self.seal(0, clear, bytes)
    }

    /// Encrypts the second part in place. Called once.
    pub(crate) fn seal_second(&self, bytes: &mut [u8]) -> Tag {
        self.seal(1, &[], bytes)
    }

    /// Decrypts the first part in place. False: it is not what was sealed, and the bytes are of no use.
    pub(crate) fn open_first(&self, clear: &[u8], bytes: &mut [u8], tag: Tag) -> bool {
        self.open(0, clear, bytes, tag)
    }

    /// Decrypts the second part in place. False: as above.
    pub(crate) fn open_second(&self, bytes: &mut [u8], tag: Tag) -> bool {
        self.open(1, &[], bytes, tag)
    }

    fn seal(&self, part: u8, clear: &[u8], bytes: &mut [u8]) -> Tag {
        let tag = self.key.seal_in_place_separate_tag(nonce(part), Aad::from(clear), bytes);
        let tag = tag.expect("fewer than 64 GB");
        tag.as_ref().try_into().expect("a tag of 16 bytes")
    }

    fn open(&self, part: u8, clear: &[u8], bytes: &mut [u8], tag: Tag) -> bool {
        self.key.open_in_place_separate_tag(nonce(part), Aad::from(clear), tag.into(), bytes, 0..).is_ok()
    }
}

fn nonce(part: u8) -> Nonce {
    let mut nonce = [0; 12];
    nonce[11] = part;
    Nonce::assume_unique_for_key(nonce)
}

impl fmt::Debug for KvKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KvKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_holds_64_hexadecimal_digits() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("key");
        let read = |text: &str| {
            fs::write(&path, text).expect("written");
            KvKey::read(&path).map(|key| format!("{key:?}")).map_err(|error| error.to_string())
        };
        assert_eq!(read(&format!("{}\n", "0aB9".repeat(16))), Ok("KvKey".to_owned()));
        for bad in [String::new(), "ab".repeat(31), "xy".repeat(32), "é".repeat(32)] {
            assert!(read(&bad).unwrap_err().contains("openssl rand -hex 32"), "{bad}");
        }
        fs::remove_file(&path).expect("it is there");
        assert!(matches!(KvKey::read(&path), Err(KvKeyError::Io(_))));
    }

    #[test]
    fn each_part_purpose_and_seed_has_a_key_or_nonce_of_its_own() {
        let key = KvKey::new([7; 32]);
        let root = crate::testing::root();
        let sealing = key.seal(Purpose::Record(root));
        let (mut first, mut second) = ([5; 40], [5; 40]);
        let tag = sealing.seal_first(b"clear", &mut first);
        sealing.seal_second(&mut second);
        assert_ne!(first, second);
        let opens = |key: &KvKey, purpose, seed, clear: &[u8]| {
            let mut bytes = first;
            key.open(purpose, seed).open_first(clear, &mut bytes, tag) && bytes == [5; 40]
        };
        assert!(opens(&key, Purpose::Record(root), *sealing.seed(), b"clear"));
        assert!(!opens(&key, Purpose::Record(root), *sealing.seed(), b"other"));
        assert!(!opens(&key, Purpose::Record(root), [0; SEED_BYTES], b"clear"));
        assert!(!opens(&key, Purpose::Record(root.child(&[1])), *sealing.seed(), b"clear"));
        assert!(!opens(&key, Purpose::Manifest, *sealing.seed(), b"clear"));
        assert!(!opens(&KvKey::new([8; 32]), Purpose::Record(root), *sealing.seed(), b"clear"));
        let mut bytes = first;
        assert!(!key.open(Purpose::Record(root), *sealing.seed()).open_second(&mut bytes, tag));
    }
}
