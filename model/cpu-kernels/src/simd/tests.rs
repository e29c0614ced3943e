use baton_kv_cache::e4m3;

use super::*;

#[test]
fn all_kernels_widen_every_bit_pattern_equally() {
    unsafe fn widened<S: Simd>(codes: &[u8; LANES]) -> [u32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the caller guarantees the instructions; there are sixteen elements on both sides.
        unsafe { S::store(out.as_mut_ptr(), E4m3::load::<S>(codes.as_ptr())) };
        out.map(f32::to_bits)
    }
    for first in (0..256).step_by(LANES) {
        // All bit patterns but the two NaNs.
        let codes: [u8; LANES] = std::array::from_fn(|lane| (first + lane) as u8);
        let codes = codes.map(|code| if e4m3::to_f32(code).is_nan() { code - 1 } else { code });
        let expected = codes.map(|code| e4m3::to_f32(code).to_bits());
        for isa in Isa::available() {
            // SAFETY: this CPU has the instruction set.
            let got = unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Amx | Isa::Avx512 => widened::<Avx512>(&codes),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => widened::<Avx2>(&codes),
                    Isa::Portable => widened::<Portable>(&codes),
                    #[cfg(target_arch = "x86_64")]
                    Isa::TileModel => unreachable!("not of a CPU"),
                }
            };
            assert_eq!(got, expected, "{isa:?} from {first:#x}");
        }
    }
}
