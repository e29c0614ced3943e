//! The access key: the right to write into granted blocks. How a transport checks it is not known here.

use std::fmt;

/// Name of one grant: 64 random bits, so that a late write under an older grant finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

impl fmt::Debug for Generation {
    /// Prints only a part of the name: not enough to write with.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g…{:04x}", self.0 & 0xffff)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The secret part of an access key: 128 random bits of the kernel. Only the peer that shall write is told it.
#[derive(Clone, Copy, Default, Eq)]
pub struct Secret(pub [u8; Secret::NUM_BYTES]);

impl Secret {
    /// Bytes of a secret.
    pub const NUM_BYTES: usize = 16;
}

impl PartialEq for Secret {
    /// Compares in constant time, so that the time does not tell where the first difference is.
    fn eq(&self, other: &Secret) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |differing, (a, b)| differing | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The access key of a grant: a writer shows it to write into the grant's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessKey {
    /// Of the grant.
    pub generation: Generation,
    /// Of the grant.
    pub secret: Secret,
}
