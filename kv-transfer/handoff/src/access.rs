//! The right to write into granted blocks. How a transport checks it is not known here.

use std::fmt;

/// Name of one grant: 64 random bits, so that a late write under an older grant finds nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

impl fmt::Debug for Generation {
    /// Shows too little of it to write with.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g…{:04x}", self.0 & 0xffff)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The right to write into a grant's blocks: 128 bits of the kernel's randomness, told to the one peer that shall write.
#[derive(Clone, Copy, Default, Eq)]
pub struct Secret(pub [u8; Secret::NUM_BYTES]);

impl Secret {
    /// Its size.
    pub const NUM_BYTES: usize = 16;
}

impl PartialEq for Secret {
    /// Takes as long wherever the first difference is.
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

/// What a writer shows to write under a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessKey {
    /// Of the grant.
    pub generation: Generation,
    /// Of the grant.
    pub secret: Secret,
}
