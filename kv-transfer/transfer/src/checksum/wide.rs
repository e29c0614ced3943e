//! XXH3-64 of long inputs with the vector instructions of this processor, alone or fused with a copy.
//!
//! The algorithm is that of <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>, "XXH3 Algorithm (for
//! large inputs)". Eight 64-bit accumulators add up stripes of 64 bytes. Each stripe is combined with a window of the secret that
//! moves by eight bytes per stripe. After 16 stripes the accumulators are scrambled. The crate xxhash-rust is the reference; it
//! selects its vector instructions at compile time.

use std::arch::x86_64::*;

use xxhash_rust::const_xxh3::const_custom_default_secret;

/// XXH3 hashes inputs of at most this length with other algorithms, for which the crate is used.
const MAX_SHORT_BYTES: usize = 240;
const STRIPE_BYTES: usize = 64;
const STRIPES_PER_BLOCK: usize = 16;
const SECRET_BYTES: usize = 192;
/// The offsets of the secret's windows for scrambling, for the last stripe and for merging.
const SCRAMBLE_AT: usize = SECRET_BYTES - STRIPE_BYTES;
const LAST_AT: usize = SCRAMBLE_AT - 7;
const MERGE_AT: usize = 11;

const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;

/// How far ahead a streaming copy prefetches its source. 512 to 2,048 bytes perform alike.
pub(super) const PREFETCH_BYTES: usize = 1024;

/// Pieces of at least this size are stored past the caches. A smaller piece is better read from a cache by a reader that
/// follows at once, and a fence would cost more than the streaming stores save.
const MIN_STREAM_BYTES: usize = 4 << 10;

/// The vector instructions to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Avx2,
    Avx512,
}

/// Stripes are only hashed.
const HASH: u8 = 0;
/// Stripes are hashed and stored.
const STORE: u8 = 1;
/// Stripes are hashed and stored past the caches.
const STREAM: u8 = 2;

impl Kernel {
    /// The widest available one for inputs of this length; `None` when the crate must be used.
    pub(super) fn best(num_bytes: usize) -> Option<Kernel> {
        match num_bytes {
            0..=MAX_SHORT_BYTES => None,
            _ if is_x86_feature_detected!("avx512f") => Some(Kernel::Avx512),
            _ if is_x86_feature_detected!("avx2") => Some(Kernel::Avx2),
            _ => None,
        }
    }

    /// XXH3-64 of more than 240 bytes.
    pub(super) fn hash(self, bytes: &[u8], seed: u64) -> u64 {
        // SAFETY: nothing is written; `best` has found that the processor has these instructions.
        unsafe { self.run::<HASH>(bytes, std::ptr::null_mut(), seed) }
    }

    /// XXH3-64 of more than 240 bytes, which are copied to `target`.
    ///
    /// # Safety
    /// As for [`copy`](super::copy).
    pub(super) unsafe fn copy(self, source: &[u8], target: *mut u8, seed: u64) -> u64 {
        // A streamed store must be aligned.
        let is_streamed = source.len() >= MIN_STREAM_BYTES && target.addr().is_multiple_of(STRIPE_BYTES);
        // SAFETY: the caller guarantees the pointers; `best` has found that the processor has these instructions.
        unsafe {
            if is_streamed {
                self.run::<STREAM>(source, target, seed)
            } else {
                self.run::<STORE>(source, target, seed)
            }
        }
    }

    /// # Safety
    /// The processor must have the instructions. Except in mode `HASH`, `target` must be valid for `source.len()` bytes.
    unsafe fn run<const MODE: u8>(self, source: &[u8], target: *mut u8, seed: u64) -> u64 {
        assert!(source.len() > MAX_SHORT_BYTES);
        let secret = secret(seed);
        // SAFETY: guaranteed by the caller.
        let lanes = unsafe {
            match self {
                Kernel::Avx512 => avx512::<MODE>(source, target, &secret),
                Kernel::Avx2 => avx2::<MODE>(source, target, &secret),
            }
        };
        merge(lanes, &secret, source.len())
    }
}

fn secret(seed: u64) -> [u8; SECRET_BYTES] {
    const DEFAULT: [u8; SECRET_BYTES] = const_custom_default_secret(0);
    let mut secret = DEFAULT;
    for pair in secret.as_chunks_mut::<16>().0 {
        let (low, high) = (u64_at(pair, 0).wrapping_add(seed), u64_at(pair, 8).wrapping_sub(seed));
        pair[..8].copy_from_slice(&low.to_le_bytes());
        pair[8..].copy_from_slice(&high.to_le_bytes());
    }
    secret
}

fn merge(lanes: [u64; 8], secret: &[u8; SECRET_BYTES], num_bytes: usize) -> u64 {
    let mut sum = (num_bytes as u64).wrapping_mul(PRIME64_1);
    for (idx, pair) in lanes.as_chunks::<2>().0.iter().enumerate() {
        let at = MERGE_AT + 16 * idx;
        let left = u128::from(pair[0] ^ u64_at(secret, at));
        let product = left * u128::from(pair[1] ^ u64_at(secret, at + 8));
        sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(0x1656_6791_9E37_79F9);
    sum ^ (sum >> 32)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[target_feature(enable = "avx512f")]
unsafe fn avx512<const MODE: u8>(source: &[u8], target: *mut u8, secret: &[u8; SECRET_BYTES]) -> [u64; 8] {
    // SAFETY: the caller guarantees the pointers, and the feature is enabled.
    unsafe { stripes::<__m512i, MODE>(source, target, secret) }
}

#[target_feature(enable = "avx2")]
unsafe fn avx2<const MODE: u8>(source: &[u8], target: *mut u8, secret: &[u8; SECRET_BYTES]) -> [u64; 8] {
    // SAFETY: the caller guarantees the pointers, and the feature is enabled.
    unsafe { stripes::<[__m256i; 2], MODE>(source, target, secret) }
}

/// Eight lanes of 64 bits. Methods are inlined into a function that enables the instructions.
trait Lanes: Copy {
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    /// Stores past the caches; `to` is aligned to 64 bytes.
    unsafe fn stream(self, to: *mut u8);
    unsafe fn accumulate(self, data: Self, secret: Self) -> Self;
    unsafe fn scramble(self, secret: Self) -> Self;
}

#[inline(always)]
unsafe fn stripes<L: Lanes, const MODE: u8>(
    source: &[u8],
    target: *mut u8,
    secret: &[u8; SECRET_BYTES],
) -> [u64; 8] {
    const FIRST: [u64; 8] =
        [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];
    let from = source.as_ptr();
    // The last stripe is the last 64 bytes of the input. It is added after the loop, and may overlap the stripe before it.
    let num_stripes = (source.len() - 1) / STRIPE_BYTES;
    // SAFETY: stripes are inside the source and, if there is one, the target. Windows are inside the secret.
    unsafe {
        let window = |at: usize| L::load(secret.as_ptr().add(at));
        let mut lanes = L::load(FIRST.as_ptr().cast());
        let mut stripe_idx = 0;
        while stripe_idx < num_stripes {
            let num = STRIPES_PER_BLOCK.min(num_stripes - stripe_idx);
            for idx in 0..num {
                let at = (stripe_idx + idx) * STRIPE_BYTES;
                let data = L::load(from.add(at));
                match MODE {
                    STORE => data.store(target.add(at)),
                    STREAM => {
                        // The address may be past the end: a prefetch does not fault.
                        _mm_prefetch(from.wrapping_add(at + PREFETCH_BYTES).cast(), _MM_HINT_T0);
                        data.stream(target.add(at));
                    }
                    _ => {}
                }
                lanes = lanes.accumulate(data, window(8 * idx));
            }
            stripe_idx += num;
            if num == STRIPES_PER_BLOCK {
                lanes = lanes.scramble(window(SCRAMBLE_AT));
            }
        }
        let at = num_stripes * STRIPE_BYTES;
        if MODE == STREAM && source.len() == at + STRIPE_BYTES {
            L::load(from.add(at)).stream(target.add(at));
        } else if MODE != HASH {
            std::ptr::copy_nonoverlapping(from.add(at), target.add(at), source.len() - at);
        }
        if MODE == STREAM {
            // Streaming stores are not ordered with later stores, so a fence precedes the caller's report of the copy.
            _mm_sfence();
        }
        lanes = lanes.accumulate(L::load(from.add(source.len() - STRIPE_BYTES)), window(LAST_AT));
        let mut sums = [0; 8];
        lanes.store(sums.as_mut_ptr().cast());
        sums
    }
}

impl Lanes for __m512i {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(to.cast(), self) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_stream_si512(to.cast(), self) }
    }

    #[inline(always)]
    unsafe fn accumulate(self, data: Self, secret: Self) -> Self {
        // SAFETY: no memory is accessed, and the caller has enabled the instructions.
        unsafe {
            let key = _mm512_xor_si512(data, secret);
            let product = _mm512_mul_epu32(key, _mm512_srli_epi64::<32>(key));
            let swapped = _mm512_shuffle_epi32::<_MM_PERM_BADC>(data);
            _mm512_add_epi64(_mm512_add_epi64(self, swapped), product)
        }
    }

    #[inline(always)]
    unsafe fn scramble(self, secret: Self) -> Self {
        // SAFETY: as above.
        unsafe {
            let mixed = _mm512_xor_si512(_mm512_xor_si512(self, _mm512_srli_epi64::<47>(self)), secret);
            let prime = _mm512_set1_epi64(PRIME32_1 as i64);
            let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
            _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64::<32>(high))
        }
    }
}

impl Lanes for [__m256i; 2] {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_storeu_si256(to.cast(), self[0]);
            _mm256_storeu_si256(to.add(32).cast(), self[1]);
        }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_stream_si256(to.cast(), self[0]);
            _mm256_stream_si256(to.add(32).cast(), self[1]);
        }
    }

    #[inline(always)]
    unsafe fn accumulate(self, data: Self, secret: Self) -> Self {
        std::array::from_fn(
            #[inline(always)]
            // SAFETY: no memory is accessed, and the caller has enabled the instructions.
            |half| unsafe {
                let key = _mm256_xor_si256(data[half], secret[half]);
                let product = _mm256_mul_epu32(key, _mm256_srli_epi64::<32>(key));
                let swapped = _mm256_shuffle_epi32::<_MM_PERM_BADC>(data[half]);
                _mm256_add_epi64(_mm256_add_epi64(self[half], swapped), product)
            },
        )
    }

    #[inline(always)]
    unsafe fn scramble(self, secret: Self) -> Self {
        std::array::from_fn(
            #[inline(always)]
            // SAFETY: as above.
            |half| unsafe {
                let own = self[half];
                let mixed =
                    _mm256_xor_si256(_mm256_xor_si256(own, _mm256_srli_epi64::<47>(own)), secret[half]);
                let prime = _mm256_set1_epi64x(PRIME32_1 as i64);
                let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high))
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;

    fn kernels() -> impl Iterator<Item = Kernel> {
        [
            (Kernel::Avx2, is_x86_feature_detected!("avx2")),
            (Kernel::Avx512, is_x86_feature_detected!("avx512f")),
        ]
        .into_iter()
        .filter_map(|(kernel, is_here)| is_here.then_some(kernel))
    }

    #[test]
    fn every_kernel_equals_the_crate_at_every_length() {
        let mut random = 1_u64;
        let bytes: Vec<u8> = (0..40_000)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            })
            .collect();
        let mut target = vec![0_u8; bytes.len() + 2 * STRIPE_BYTES];
        let aligned = target.as_ptr().align_offset(STRIPE_BYTES);
        for kernel in kernels() {
            let lengths = (241..2500).chain((8192 - 70)..(8192 + 70)).chain([16_384, 32_769, 40_000]);
            for len in lengths {
                for seed in [0, 1, u64::MAX, 0x0123_4567_89AB_CDEF ^ len as u64] {
                    let source = &bytes[..len];
                    let expected = xxh3_64_with_seed(source, seed);
                    assert_eq!(kernel.hash(source, seed), expected, "{kernel:?} {len}");
                    for offset in [aligned, aligned + 1] {
                        target.fill(0);
                        // SAFETY: the target has room, and only this call uses it.
                        let sum = unsafe { kernel.copy(source, target.as_mut_ptr().add(offset), seed) };
                        assert_eq!(sum, expected, "{kernel:?} {len}");
                        assert!(target[offset..offset + len] == *source, "{kernel:?} {len}");
                        assert!(target[offset + len..].iter().all(|&byte| byte == 0), "{kernel:?} {len}");
                    }
                }
            }
        }
    }
}
