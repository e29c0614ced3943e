//! Chance by seed: the same numbers in every run, on every machine.

/// splitmix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed ^ 0x5851_F42D_4C95_7F2D)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Exponentially distributed.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distributions_have_their_means() {
        let mut random = Random::new(1);
        let num = 200_000;
        let mean = |next: &mut dyn FnMut() -> f64| (0..num).map(|_| next()).sum::<f64>() / f64::from(num);
        let unit = mean(&mut || random.unit());
        assert!((unit - 0.5).abs() < 0.005, "{unit}");
        let exponential = mean(&mut || random.exponential(3.0));
        assert!((exponential - 3.0).abs() < 0.03, "{exponential}");
    }
}
