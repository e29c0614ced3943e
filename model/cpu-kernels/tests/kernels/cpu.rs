use baton_cpu_kernels::Cpu;
use baton_cpu_simd::Isa;
use baton_cpu_simd::tiles::tested_isas;

#[test]
fn an_instruction_set_that_the_cpu_lacks_is_refused() {
    let mut all = vec![Isa::Portable, Isa::TileModel];
    #[cfg(target_arch = "x86_64")]
    all.extend([Isa::Amx, Isa::Avx512, Isa::Avx2]);
    #[cfg(target_arch = "aarch64")]
    all.push(Isa::Neon);
    for isa in all {
        let is_accepted = std::panic::catch_unwind(|| Cpu::new(isa, 1).unwrap()).is_ok();
        assert_eq!(is_accepted, tested_isas().contains(&isa), "{isa:?}");
    }
}
