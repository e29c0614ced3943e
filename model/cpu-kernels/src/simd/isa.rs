//! The instruction sets that kernels are compiled for.

/// What the kernels were chosen for; found out once, when an executor is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with bytes and words (F, DQ, BW, VL).
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and half precision.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Plain Rust.
    Portable,
}

impl Isa {
    /// The best one that this processor runs.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// All that this processor runs, best first.
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
            if avx2 && avx512 {
                found.push(Isa::Avx512);
            }
            if avx2 {
                found.push(Isa::Avx2);
            }
        }
        found.push(Isa::Portable);
        found
    }

    /// For logs and `baton inspect`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
}
