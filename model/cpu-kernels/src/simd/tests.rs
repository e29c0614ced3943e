use baton_kv_cache::e4m3;

use super::*;

#[test]
fn every_kernel_widens_every_code_alike() {
    unsafe fn widened<S: Simd>(codes: &[u8; LANES]) -> [u32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the processor has the instructions by the caller's word; sixteen codes and places.
        unsafe { S::store(out.as_mut_ptr(), E4m3::load::<S>(codes.as_ptr())) };
        out.map(f32::to_bits)
    }
    for first in (0..256).step_by(LANES) {
        // All but the two that are no numbers.
        let codes: [u8; LANES] = std::array::from_fn(|lane| (first + lane) as u8);
        let codes = codes.map(|code| if e4m3::to_f32(code).is_nan() { code - 1 } else { code });
        let expected = codes.map(|code| e4m3::to_f32(code).to_bits());
        for isa in Isa::available() {
            // SAFETY: this processor has it.
            let got = unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => widened::<Avx512>(&codes),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => widened::<Avx2>(&codes),
                    Isa::Portable => widened::<Portable>(&codes),
                }
            };
            assert_eq!(got, expected, "{isa:?} from {first:#x}");
        }
    }
}
