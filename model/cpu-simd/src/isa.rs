//! The instruction sets for which kernels are compiled.

#[cfg(target_arch = "x86_64")]
use baton_cpu_threads::has_tiles;

/// The instruction set of the kernels, detected once when an executor is built.
///
/// Kernels run its instructions. A safe function that takes one for them asserts that it [is available](Isa::is_available).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with bf16 and VNNI, and the tiles of AMX.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX-512 with F, DQ, BW and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and half precision.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON, with instructions for integers and bf16 if the CPU has them.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Plain Rust.
    Portable,
    /// AVX2, or elsewhere the vectors that every CPU has, and a software model of tiles. Only tests use it.
    TileModel,
}

impl Isa {
    /// The best one of this CPU.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All of this CPU, best first.
    #[allow(clippy::vec_init_then_push)] // the architectures push different ones
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 && has_tiles() {
                found.push(Isa::Amx);
            }
            if avx2 && avx512 {
                found.push(Isa::Avx512);
            }
            if avx2 {
                found.push(Isa::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(Isa::Neon);
        found.push(Isa::Portable);
        found
    }

    /// Whether this CPU has it; for the software model of tiles, the vectors beside it.
    pub fn is_available(self) -> bool {
        let found = Isa::available();
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::TileModel => found.contains(&Isa::Avx2),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::TileModel => true,
            _ => found.contains(&self),
        }
    }

    /// The name for logs and `baton inspect`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            Isa::Portable => "portable",
            Isa::TileModel => "tile model",
        }
    }

    /// Whether products are computed in tiles.
    pub fn has_tiles(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => true,
            Isa::TileModel => true,
            _ => false,
        }
    }
}
