use baton_cpu_kernels::has_pairs;
use baton_cpu_simd::{Isa, LANES, Words, pair_kernel};
use baton_model_testing::noise;

/// What adding a pair of products to a sum gives on this kind of processor.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) fn add_pair(sum: f32, a: [f32; 2], b: [f32; 2]) -> f32 {
    a[0].mul_add(b[0], a[1].mul_add(b[1], sum))
}

/// What adding a pair of products to a sum gives on this kind of processor. Products of two bf16 are exact.
#[cfg(target_arch = "aarch64")]
pub(crate) fn add_pair(sum: f32, a: [f32; 2], b: [f32; 2]) -> f32 {
    add_to_odd(sum, add_to_odd(a[0] * b[0], a[1] * b[1]))
}

/// The sum, rounded to odd: if it is not exact, the neighbour whose last bit is one.
#[cfg(target_arch = "aarch64")]
fn add_to_odd(a: f32, b: f32) -> f32 {
    let (a, b) = (f64::from(a), f64::from(b));
    let sum = a + b;
    // What the rounding of that sum lost: Knuth's two-sum.
    let from_b = sum - a;
    let lost = (a - (sum - from_b)) + (b - from_b);
    let mut odd = sum;
    if lost != 0.0 && odd.to_bits() & 1 == 0 {
        odd = if lost > 0.0 { odd.next_up() } else { odd.next_down() };
    }
    let mut rounded = odd as f32;
    if f64::from(rounded).abs() > odd.abs() {
        rounded = f32::from_bits(rounded.to_bits() - 1);
    }
    if f64::from(rounded) == odd { rounded } else { f32::from_bits(rounded.to_bits() | 1) }
}

#[test]
#[cfg(target_arch = "aarch64")]
fn sums_are_rounded_to_odd() {
    let ulp = f32::EPSILON;
    for (a, b, expected) in [
        (1.0, 2.0, 3.0),
        (1.0, ulp / 2.0, 1.0 + ulp),
        (1.0, ulp / 1e9, 1.0 + ulp),
        (1.0, -ulp / 1e9, 1.0 - ulp / 2.0),
        (1.0 + ulp, ulp / 1e9, 1.0 + ulp),
        (-1.0 - ulp, ulp / 1e9, -1.0 - ulp),
        (1.0, 1e-30, 1.0 + ulp),
    ] {
        assert_eq!(add_to_odd(a, b), expected, "{a} + {b}");
        assert_eq!(add_to_odd(-b, -a), -expected, "{a} + {b}, negated");
    }
}

pair_kernel! {
    /// `sums += dot(join(a[0], a[1]), join(b[0], b[1]))`, sixteen of each.
    ///
    /// # Safety
    /// All pointers are valid.
    fn dot / dot_of (a: [*const u16; 2], b: [*const u16; 2], sums: *mut f32)
}

#[inline(always)]
unsafe fn dot_of<S: Words>(a: [*const u16; 2], b: [*const u16; 2], sums: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (a, b) = (S::join_bf16(a[0], a[1]), S::join_bf16(b[0], b[1]));
        S::store(sums, S::dot_bf16(a, b, S::load(sums)));
    }
}

#[test]
fn a_pair_is_added_as_in_products() {
    let Some(isa) = Isa::available().into_iter().find(|isa| has_pairs(*isa)) else {
        eprintln!("skipped: this CPU has no instruction for pairs of bf16");
        return;
    };
    for round in 0..100 {
        let bits =
            |seed: u64| noise(100 * round + seed, LANES).iter().map(|x| (x.to_bits() >> 16) as u16).collect();
        let [a0, a1, b0, b1]: [Vec<u16>; 4] = [1, 2, 3, 4].map(bits);
        let mut sums = noise(100 * round + 5, LANES);
        let expected: Vec<f32> = (0..LANES)
            .map(|i| {
                let [a0, a1, b0, b1] = [&a0, &a1, &b0, &b1].map(|x| f32::from_bits(u32::from(x[i]) << 16));
                add_pair(sums[i], [a0, a1], [b0, b1])
            })
            .collect();
        // SAFETY: there are sixteen of each, and the CPU has the instruction.
        unsafe { dot(isa, [a0.as_ptr(), a1.as_ptr()], [b0.as_ptr(), b1.as_ptr()], sums.as_mut_ptr()) };
        assert_eq!(sums, expected);
    }
}
