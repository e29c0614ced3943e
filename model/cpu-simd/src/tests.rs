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
