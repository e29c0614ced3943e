//! Numbers that look random: the same by the same seed, on every machine and with every version of every dependency.
//!
//! SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). Not for secrets.
#![forbid(unsafe_code)]

/// The odd number closest to 2^64 by the golden ratio: multiples of it are spread evenly.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection after which every bit depends on every bit.
#[inline]
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The first number of a generator: a hash of its seed, which may be 0.
#[inline]
pub const fn hash(seed: u64) -> u64 {
    mix(seed.wrapping_add(GOLDEN))
}

/// A generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// By this seed.
    pub const fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A generator of its own for each `stream` of a seed.
    pub fn stream(seed: u64, stream: u64) -> Random {
        let mut random = Random(seed ^ stream.wrapping_mul(0xD1B5_4A32_D192_ED03));
        random.next();
        random
    }

    /// Any number.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "it never ends, and nothing iterates over it")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// In [0, 1).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Fisher and Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for idx in (1..items.len()).rev() {
            items.swap(idx, self.below(idx as u64 + 1) as usize);
        }
    }

    /// Of mean 1: the gaps of a Poisson process of rate 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }

    /// Of mean 0 and deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        (2.0 * self.exponential()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_paper() {
        // Of the reference implementation with seed 1234567.
        let mut random = Random::new(1_234_567);
        let numbers = [6457827717110365317, 3203168211198807973, 9817491932198370423];
        assert_eq!([random.next(), random.next(), random.next()], numbers);
    }

    #[test]
    fn moments() {
        let mut random = Random::new(1);
        let n = 100_000;
        let mean = |f: &mut dyn FnMut() -> f64| (0..n).map(|_| f()).sum::<f64>() / f64::from(n);
        assert!((mean(&mut || random.unit()) - 0.5).abs() < 0.01);
        assert!((mean(&mut || random.exponential()) - 1.0).abs() < 0.02);
        assert!(mean(&mut || random.normal()).abs() < 0.02);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 0.03);
        assert!((mean(&mut || random.below(10) as f64) - 4.5).abs() < 0.05);
    }

    #[test]
    fn a_shuffle_keeps_everything_and_moves_it() {
        let mut items: Vec<u32> = (0..100).collect();
        Random::new(1).shuffle(&mut items);
        let num_kept = items.iter().enumerate().filter(|&(idx, &item)| idx == item as usize).count();
        assert!(num_kept < 10, "{items:?}");
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn streams_differ_and_repeat() {
        let draw = |seed, stream| Random::stream(seed, stream).next();
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }
}
