//! The macro that compiles a kernel for CPUs that have tiles.

/// As [`kernel!`](crate::kernel), for CPUs that have tiles, and over their software model.
///
/// `tile_kernel! { fn name / generic(args) }` makes `unsafe fn name(isa, args)` of `generic::<S, T>(&mut tiles, args)`.
#[macro_export]
macro_rules! tile_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident / $generic:ident ($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        #[cfg_attr(not(any(test, target_arch = "x86_64")), allow(unused_variables, unused_unsafe))]
        $vis unsafe fn $name(isa: $crate::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
            unsafe fn amx($($arg: $ty),*) {
                // SAFETY: guaranteed by the caller.
                unsafe { $generic::<$crate::Avx512, $crate::tiles::Amx>(&mut $crate::tiles::Amx, $($arg),*) }
            }
            // SAFETY: guaranteed by the caller.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Amx => amx($($arg),*),
                    $crate::Isa::TileModel => $crate::with_tile_model! {{
                        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
                        unsafe fn model($($arg: $ty),*) {
                            let mut tiles = $crate::tiles::TileModel::default();
                            // SAFETY: guaranteed by the caller.
                            unsafe {
                                $generic::<$crate::tiles::ModelVectors, $crate::tiles::TileModel>(&mut tiles, $($arg),*)
                            }
                        }
                        model($($arg),*)
                    }},
                    _ => unreachable!("only where there are tiles"),
                }
            }
        }
    };
}

/// The block, in crates that test with the software model of tiles.
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
#[macro_export]
macro_rules! with_tile_model {
    ($block:block) => {
        $block
    };
}

/// The block, in crates that test with the software model of tiles.
#[cfg(not(any(test, feature = "testing")))]
#[doc(hidden)]
#[macro_export]
macro_rules! with_tile_model {
    ($block:block) => {
        unreachable!("only tests have the software model of tiles")
    };
}
