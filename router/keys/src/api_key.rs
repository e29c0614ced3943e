//! A key, and its hash: all that a router stores of it.

use std::{fmt, str::FromStr};

/// Secret scanners find keys by it.
const PREFIX: &str = "baton_";
const NUM_DIGITS: usize = 64;
const HASH_PREFIX: &str = "blake3:";

/// A secret of a caller: `baton_` and 256 random bits in hexadecimal. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// A new key of these bits, which come from the kernel's random source.
    pub fn from_random(bits: [u8; 32]) -> ApiKey {
        ApiKey(format!("{PREFIX}{}", blake3::Hash::from_bytes(bits).to_hex()))
    }

    /// As it is sent in headers.
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// What a key file holds of it.
    pub fn hash(&self) -> KeyHash {
        KeyHash(blake3::hash(self.0.as_bytes()))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// BLAKE3 of a key.
///
/// A slow hash such as argon2 protects passwords, which can be guessed. No guess finds 256 random bits, so a fast hash is enough,
/// and a flood of wrong keys costs little. Two hashes are compared in constant time ([`blake3::Hash`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyHash(blake3::Hash);

impl KeyHash {
    /// The hash of a key that a caller has shown. `None` if no key looks like that, as those of other services.
    pub fn of(shown: &str) -> Option<KeyHash> {
        let digits = shown.strip_prefix(PREFIX)?;
        let is_key = digits.len() == NUM_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_key.then(|| KeyHash(blake3::hash(shown.as_bytes())))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HASH_PREFIX}{}", self.0.to_hex())
    }
}

/// A text that is no hash of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a hash of a key is blake3: and 64 hexadecimal digits, as `baton keys new` prints it")]
pub struct BadKeyHash;

impl FromStr for KeyHash {
    type Err = BadKeyHash;

    fn from_str(text: &str) -> Result<KeyHash, BadKeyHash> {
        let digits = text.strip_prefix(HASH_PREFIX).ok_or(BadKeyHash)?;
        blake3::Hash::from_hex(digits).map(KeyHash).map_err(|_| BadKeyHash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_recognised_and_has_one_hash() {
        let key = ApiKey::from_random([0xab; 32]);
        assert_eq!(key.secret(), format!("baton_{}", "ab".repeat(32)));
        assert_eq!(KeyHash::of(key.secret()), Some(key.hash()));
        assert_eq!(key.hash().to_string().parse(), Ok(key.hash()));
        assert_ne!(ApiKey::from_random([0xac; 32]).hash(), key.hash());
        assert!(!format!("{key:?}").contains("abab"));
    }

    #[test]
    fn what_is_no_key_or_hash_is_refused() {
        for shown in ["", "-", "sk-1234", "baton_", &format!("baton_{}g", "a".repeat(63)), &"a".repeat(64)] {
            assert_eq!(KeyHash::of(shown), None, "{shown}");
        }
        for text in ["", "blake3:", "blake3:12", &"a".repeat(64)] {
            assert_eq!(text.parse::<KeyHash>(), Err(BadKeyHash), "{text}");
        }
    }
}
