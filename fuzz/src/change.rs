//! Changes of a number.

use arbitrary::Arbitrary;

/// A change of a number, mostly to a value near it or near a power of two.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Change {
    /// A small number instead.
    Small(u8),
    /// A number of two bytes.
    Short(u16),
    /// Any number.
    Any(u64),
    /// Adds a small number.
    Plus(i8),
    /// Multiplies.
    Times(u8),
    /// Divides.
    DividedBy(u8),
    /// A number near a power of two.
    PowerOfTwo {
        /// The exponent, modulo 64.
        exponent: u8,
        /// Added to it.
        plus: i8,
    },
}

impl Change {
    /// The number that `from` becomes.
    pub fn of(self, from: u64) -> u64 {
        match self {
            Change::Small(number) => number.into(),
            Change::Short(number) => number.into(),
            Change::Any(number) => number,
            Change::Plus(difference) => from.wrapping_add_signed(difference.into()),
            Change::Times(factor) => from.wrapping_mul(factor.into()),
            Change::DividedBy(divisor) => from / u64::from(divisor).max(1),
            Change::PowerOfTwo { exponent, plus } => {
                (1u64 << (exponent % 64)).wrapping_add_signed(plus.into())
            }
        }
    }
}
