//! Every instruction set gives the same bits, and those of the `half` crate.

use half::{bf16, f16};

use super::{
    isa::Isa,
    portable::{INT4_GROUP, bf16_bits, bf16_value, f16_bits, f16_value},
};
use crate::KvDtype;

/// The instruction sets of this processor, the portable one last.
fn available() -> Vec<Isa> {
    let mut found = vec![Isa::Portable];
    #[cfg(target_arch = "x86_64")]
    if Isa::detect() != Isa::Portable {
        found.insert(0, Isa::Avx2);
    }
    if found[0] != Isa::detect() {
        found.insert(0, Isa::detect());
    }
    found
}

#[test]
fn numbers_of_two_bytes_are_those_of_the_half_crate() {
    for bits in 0..=u16::MAX {
        assert_eq!(f16_value(bits).to_bits(), f16::from_bits(bits).to_f32().to_bits(), "{bits:#x}");
        assert_eq!(f32::from_bits(u32::from(bits) << 16).to_bits(), bf16_value(bits).to_bits());
        // Every number of either type, the middle between two of them, and its neighbours.
        for x in [f16_value(bits), bf16_value(bits)] {
            for offset in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                let x = f32::from_bits(x.to_bits().wrapping_add(offset));
                assert_eq!(f16_bits(x), f16::from_f32(x).to_bits(), "{x} ({:#x})", x.to_bits());
                assert_eq!(bf16_bits(x), bf16::from_f32(x).to_bits(), "{x} ({:#x})", x.to_bits());
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state
    };
    for dtype in KvDtype::ALL {
        for head_dim in [1, 3, 16, 31, 64, 80, 128] {
            for num_vectors in [1, 2, 5] {
                let len = head_dim * num_vectors;
                // Arbitrary bits, and numbers of one magnitude.
                let wild: Vec<f32> = (0..len).map(|_| f32::from_bits(random())).collect();
                let tame: Vec<f32> =
                    (0..len).map(|_| (random() as i32) as f32 / (1u32 << 30) as f32).collect();
                for vectors in [wild, tame] {
                    check(dtype, &vectors, head_dim);
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_int4() {
    for head_dim in [1usize, 17, 32, 33, 64, 80, 128] {
        let mut vectors: Vec<f32> = (0..3 * head_dim).map(|n| (n as f32).sin() * 3.0).collect();
        vectors[head_dim / 2] = f32::INFINITY;
        let results = available().into_iter().map(|isa| {
            let mut codes = vec![0xa5; 3 * head_dim.div_ceil(2)];
            let mut scales = vec![0xa5; 3 * head_dim.div_ceil(INT4_GROUP) * 2];
            isa.quantise_int4(&vectors, head_dim, &mut codes, &mut scales);
            let mut read = vec![0.0; vectors.len()];
            isa.dequantise_int4(&codes, &scales, head_dim, &mut read);
            (codes, scales, read.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        let results: Vec<_> = results.collect();
        assert!(results.iter().all(|result| *result == results[0]), "{head_dim}");
    }
}

fn check(dtype: KvDtype, vectors: &[f32], head_dim: usize) {
    let mut results = Vec::new();
    for isa in available() {
        let mut elements = vec![0xa5; vectors.len() * dtype.size_bytes()];
        let mut scales = vec![0xa5; vectors.len() / head_dim * dtype.scale_bytes()];
        isa.quantise(dtype, vectors, head_dim, &mut elements, &mut scales);
        let mut read = vec![0.0; vectors.len()];
        isa.dequantise(dtype, &elements, &scales, head_dim, &mut read);
        let read: Vec<u32> = read.iter().map(|x| x.to_bits()).collect();
        results.push((isa, elements, scales, read));
    }
    let (_, elements, scales, read) = results.pop().expect("there is always one");
    for result in results {
        assert_eq!(
            result,
            (result.0, elements.clone(), scales.clone(), read.clone()),
            "{dtype:?} {head_dim}"
        );
    }
}
