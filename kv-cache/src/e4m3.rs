//! FP8 E4M3 in plain Rust: the conversion of numbers to codes, and the reference of the kernels that convert codes to
//! numbers.
//!
//! Sign, four bits of exponent (bias 7), three of mantissa, as in the Open Compute Project's "8-bit Floating Point
//! Specification" (2023): there are no infinities, 448 is the largest number, all ones is the only NaN.

/// The largest number.
pub const MAX: f32 = 448.0;

/// The value of a code.
#[inline(always)]
pub fn to_f32(code: u8) -> f32 {
    // Read as exponent and mantissa of an f32, the code is too small by the ratio of the biases, denormal codes
    // included.
    let magnitude = f32::from_bits(u32::from(code & 0x7f) << 20) * f32::from_bits((127 + 120) << 23);
    let magnitude = if code & 0x7f == 0x7f { f32::NAN } else { magnitude };
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

/// The nearest code, ties to even. Numbers beyond [`MAX`] become [`MAX`], NaN stays NaN.
#[inline(always)]
pub fn from_f32(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) & 0x80;
    let magnitude = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    // Steps of 1/512, the steps of an f32 at 2^14: the addition rounds.
    let denormal = (magnitude + 16384.0).to_bits().wrapping_sub(16384.0f32.to_bits());
    let bits = if magnitude < MAX { magnitude } else { MAX }.to_bits();
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let code = if magnitude < 1.0 / 64.0 { denormal } else { normal };
    let code = if magnitude.is_nan() { 0x7f } else { code };
    (sign | code) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formula of the specification.
    fn reference(code: u8) -> f64 {
        let sign = if code < 0x80 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * 2f64.powi(-6) * mantissa / 8.0,
            _ => sign * 2f64.powi(exponent - 7) * (1.0 + mantissa / 8.0),
        }
    }

    #[test]
    fn every_code_has_the_value_of_the_specification_and_round_trips() {
        for code in 0..=255u8 {
            let (got, expected) = (f64::from(to_f32(code)), reference(code));
            assert!(got == expected || got.is_nan() && expected.is_nan(), "{code:#x}: {got} not {expected}");
            assert_eq!(got.is_sign_negative(), code >= 0x80, "{code:#x}");
            assert_eq!(from_f32(to_f32(code)), code);
        }
        assert_eq!(to_f32(0x7e), MAX);
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        let nearest = |x: f32| {
            let within = f64::from(x.clamp(-MAX, MAX));
            let distance = |code: &u8| (f64::from(to_f32(*code)) - within).abs();
            let codes = || (0..=255u8).filter(|&code| !to_f32(code).is_nan());
            let best = codes().map(|code| distance(&code)).fold(f64::INFINITY, f64::min);
            // Of two equally near codes the even one; of the zeroes the one with the same sign.
            let mut ties: Vec<u8> = codes().filter(|code| distance(code) == best).collect();
            ties.retain(|&code| to_f32(code) != 0.0 || (code >= 0x80) == x.is_sign_negative());
            if ties.len() > 1 {
                ties.retain(|code| code & 1 == 0);
            }
            assert_eq!(ties.len(), 1, "{x}: {ties:?}");
            ties[0]
        };
        // Every code, the middle between every two, and their neighbours.
        let positive: Vec<f32> = (0..0x7f).map(to_f32).collect();
        let mut points = positive.clone();
        points.extend(positive.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0));
        points.extend([500.0, 1e9, f32::MAX, f32::MIN_POSITIVE, 1e-45, 0.37, 11.1]);
        for point in points {
            for x in [point.next_down(), point, point.next_up()] {
                for x in [x, -x] {
                    assert_eq!(from_f32(x), nearest(x), "{x}");
                }
            }
        }
        assert_eq!([from_f32(f32::INFINITY), from_f32(f32::NEG_INFINITY)], [0x7e, 0xfe]);
        assert_eq!([from_f32(f32::NAN) & 0x7f, from_f32(-f32::NAN) & 0x7f], [0x7f, 0x7f]);
    }
}
