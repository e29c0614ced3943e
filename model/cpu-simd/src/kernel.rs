//! The macro that compiles a kernel for every instruction set.

/// Compiles a generic function for every instruction set and selects one by [`Isa`](crate::Isa).
///
/// `kernel! { fn name / generic(args) }` makes `unsafe fn name(isa, args)` of `generic::<S: Simd>(args)`, which must
/// be `#[inline(always)]`. `fn name / generic<Factor>(args)` uses `generic::<S, Factor>(args)`. The caller guarantees that the
/// CPU has `isa`, and what `generic` needs.
#[macro_export]
macro_rules! kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident / $generic:ident $(<$factor:ty>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) $(-> $out)? {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::Avx512 $(, $factor)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) $(-> $out)? {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::Avx2 $(, $factor)?>($($arg),*) }
            }
            // SAFETY: guaranteed by the caller, also that the CPU has `isa`.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Amx | $crate::Isa::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx2 | $crate::Isa::TileModel => avx2($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::Neon | $crate::Isa::TileModel => $generic::<$crate::Neon $(, $factor)?>($($arg),*),
                    _ => $generic::<$crate::Portable $(, $factor)?>($($arg),*),
                }
            }
        }
    };
}
