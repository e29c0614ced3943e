use baton_kv_cache::e4m3;

use super::*;

kernel! {
    /// Sixteen E4M3 as f32.
    ///
    /// # Safety
    /// The CPU has the instructions.
    fn widened / widen (codes: &[u8; LANES]) -> [f32; LANES]
}

#[inline(always)]
unsafe fn widen<S: Simd>(codes: &[u8; LANES]) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: the caller guarantees the instructions; there are sixteen elements on both sides.
    unsafe { S::store(out.as_mut_ptr(), E4m3::load::<S>(codes.as_ptr())) };
    out
}

#[test]
fn all_kernels_widen_every_bit_pattern_equally() {
    for first in (0..256).step_by(LANES) {
        // All bit patterns but the two NaNs.
        let codes: [u8; LANES] = std::array::from_fn(|lane| (first + lane) as u8);
        let codes = codes.map(|code| if e4m3::to_f32(code).is_nan() { code - 1 } else { code });
        let expected = codes.map(|code| e4m3::to_f32(code).to_bits());
        for isa in Isa::available() {
            // SAFETY: this CPU has the instruction set.
            let got = unsafe { widened(isa, &codes) }.map(f32::to_bits);
            assert_eq!(got, expected, "{isa:?} from {first:#x}");
        }
    }
}

kernel! {
    /// 2^x of sixteen numbers, and these rounded to words of two bf16, each with the next lane.
    ///
    /// # Safety
    /// The CPU has the instructions.
    fn short_powers / short_powers_of (x: &[f32; LANES]) -> ([f32; LANES], [u32; LANES])
}

#[inline(always)]
unsafe fn short_powers_of<S: Words>(x: &[f32; LANES]) -> ([f32; LANES], [u32; LANES]) {
    let (mut powers, mut words) = ([0.0; LANES], [0; LANES]);
    // SAFETY: the caller guarantees the instructions; there are sixteen elements on all sides.
    unsafe {
        S::store(powers.as_mut_ptr(), S::exp2_short(S::load(x.as_ptr())));
        let mut next = powers;
        next.rotate_left(1);
        S::store(
            words.as_mut_ptr().cast(),
            S::round_to_pairs(S::load(powers.as_ptr()), S::load(next.as_ptr())),
        );
    }
    (powers, words)
}

#[test]
fn short_powers_of_two_are_as_exact_as_bf16_needs_and_have_the_same_bits_everywhere() {
    let fused = |isa: &Isa| *isa != Isa::Portable || cfg!(target_arch = "aarch64");
    let isas: Vec<Isa> = Isa::available().into_iter().filter(fused).collect();
    for step in 0..4000 {
        let mut x: [f32; LANES] =
            std::array::from_fn(|lane| -125.9 * (step * LANES + lane) as f32 / 64_000.0);
        // Fractions near one, which are rounded.
        x[3] = -1.0 - x[3] * 1e-9;
        x[4] *= 1e-9;
        // SAFETY: this CPU has the instruction sets.
        let found: Vec<_> = isas.iter().map(|&isa| unsafe { short_powers(isa, &x) }).collect();
        assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{isas:?} differ near 2^{}", x[0]);
        for (powers, words) in found {
            for lane in 0..LANES {
                let error = f64::from(powers[lane]) / f64::from(x[lane]).exp2() - 1.0;
                assert!(error.abs() < 8.7e-5, "2^{} is off by {error:e}", x[lane]);
                // Half up instead of half to even: the same but for ties.
                let halves = [words[lane] as u16, (words[lane] >> 16) as u16];
                for (half, number) in halves.into_iter().zip([powers[lane], powers[(lane + 1) % LANES]]) {
                    let error = f64::from(half::bf16::from_bits(half).to_f32()) / f64::from(number) - 1.0;
                    assert!(error.abs() <= 1.0 / 256.0, "{number} is rounded by {error:e}");
                }
            }
        }
    }
    for isa in isas {
        let mut x = [0.0; LANES];
        x[1..6].copy_from_slice(&[-3.0, -127.5, -1e9, f32::NEG_INFINITY, f32::NAN]);
        // SAFETY: as above.
        let (powers, words) = unsafe { short_powers(isa, &x) };
        assert_eq!(powers[..2], [1.0, 0.125], "{isa:?}");
        assert!(
            powers[2] <= f32::MIN_POSITIVE && powers[3] == 0.0 && powers[4] == 0.0,
            "{isa:?}: {powers:?}"
        );
        assert!(powers[5].is_nan() && half::bf16::from_bits(words[5] as u16).is_nan(), "{isa:?}");
    }
}
