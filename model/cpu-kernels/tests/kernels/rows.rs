use baton_cpu_kernels::testing::{erf, gated};
use baton_cpu_kernels::{Cpu, GateFunction, add_scaled, rms_norm, rms_norm_in_place, rotate, soft_cap};
use baton_cpu_simd::{Isa, LANES, Simd, kernel};
use baton_model_testing::{hash_of_bits, noise};

/// Calls a function with every instruction set of the CPU.
macro_rules! everywhere {
    ($check:ident) => {
        kernel! { fn on / $check () }
        // SAFETY: this CPU has the instruction sets.
        Isa::available().into_iter().for_each(|isa| unsafe { on(isa) });
    };
}

/// A context for every instruction set of the CPU.
fn cpus() -> impl Iterator<Item = Cpu> {
    Isa::available().into_iter().map(|isa| Cpu::new(isa, 1).unwrap())
}

fn close(got: &[f32], expected: impl Iterator<Item = f64>, tolerance: f64, what: &str) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{what} at {i}: {got} not {expected}");
    }
}

#[test]
fn norms_match_the_formula_to_1e_6() {
    for cpu in cpus() {
        for n in [1, 8, 16, 47, 64, 100] {
            let (x, weight) = (noise(1, n), noise(2, n));
            let mut out = vec![0.0; n];
            rms_norm(&cpu, &x, &weight, 1e-6, &mut out);
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
            let expected =
                x.iter().zip(&weight).map(|(x, w)| f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*w));
            close(&out, expected, 1e-6, "norm");
            let mut in_place = x.clone();
            rms_norm_in_place(&cpu, &mut in_place, &weight, 1e-6);
            assert_eq!(in_place, out);
        }
    }
}

#[test]
fn scaled_rows_are_added_with_the_bits_of_a_plain_loop() {
    for cpu in cpus() {
        for n in [1, 8, 16, 47, 64, 100] {
            let (mut to, from, factor) = (noise(1, n), noise(2, n), noise(3, 1)[0]);
            let mut expected = to.clone();
            expected.iter_mut().zip(&from).for_each(|(to, from)| *to += from * factor);
            add_scaled(&cpu, &mut to, &from, factor);
            assert_eq!(to, expected, "{:?}, {n} numbers", cpu.isa());
        }
    }
}

#[test]
fn gates_match_their_formulas_to_1e_6() {
    #[inline(always)]
    unsafe fn check<S: Simd>() {
        let formula = |gate: GateFunction, x: f64| match gate {
            GateFunction::Silu => x / (1.0 + (-x).exp()),
            GateFunction::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                0.5 * x * (1.0 + inner.tanh())
            }
            GateFunction::GeluErf => 0.5 * x * (1.0 + f64::from(erf((x / std::f64::consts::SQRT_2) as f32))),
        };
        for seed in 0..20 {
            let (x, up) = (noise(seed, LANES).iter().map(|x| x * 8.0).collect::<Vec<_>>(), noise(9, LANES));
            for gate in [GateFunction::Silu, GateFunction::GeluTanh, GateFunction::GeluErf] {
                let mut out = [0.0; LANES];
                // SAFETY: only called with the CPU's instruction sets; sixteen numbers each.
                unsafe {
                    S::store(out.as_mut_ptr(), gated::<S>(gate, S::load(x.as_ptr()), S::load(up.as_ptr())));
                }
                let expected = x.iter().zip(&up).map(|(x, up)| formula(gate, f64::from(*x)) * f64::from(*up));
                close(&out, expected, 1e-6, &format!("{gate:?}"));
            }
        }
    }
    everywhere!(check);
}

#[test]
fn the_error_function_matches_known_values() {
    for (x, expected) in [(0.0, 0.0), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (-2.0, -0.995_322_3)] {
        assert!((erf(x) - expected).abs() < 3e-7, "erf({x})");
    }
}

#[test]
fn soft_caps_match_tanh_to_1e_6_of_the_cap() {
    for cpu in cpus() {
        let mut x: Vec<f32> = noise(4, 37).iter().map(|x| x * 100.0).collect();
        let expected: Vec<f64> = x.iter().map(|x| 30.0 * (f64::from(*x) / 30.0).tanh()).collect();
        soft_cap(&cpu, &mut x, 30.0);
        close(&x, expected.into_iter(), 3e-5, "soft cap");
    }
}

#[test]
fn exponentials_match_to_1e_6_and_vanish_far_below() {
    #[inline(always)]
    unsafe fn check<S: Simd>() {
        for i in -8700..8700 {
            let x = i as f32 / 100.0;
            let mut out = [0.0; LANES];
            // SAFETY: only called with the CPU's instruction sets.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
            let expected = f64::from(x).exp();
            assert!((f64::from(out[3]) / expected - 1.0).abs() < 1e-6, "e^{x} = {}", out[3]);
        }
        for x in [-88.0, -1000.0, f32::NEG_INFINITY] {
            let mut out = [1.0; LANES];
            // SAFETY: as above.
            unsafe { S::store(out.as_mut_ptr(), S::exp(S::splat(x))) };
            assert_eq!(out, [0.0; LANES], "e^{x}");
        }
    }
    everywhere!(check);
}

/// Recorded with AVX-512.
#[test]
fn x86_and_arm_compute_rows_with_the_same_bits() {
    let is_fused = |cpu: &Cpu| cpu.isa() != Isa::Portable || cfg!(target_arch = "aarch64");
    for cpu in cpus().filter(is_fused) {
        let (x, weight) = (noise(1, 100), noise(2, 100));
        let mut out = vec![0.0; 100];
        rms_norm(&cpu, &x, &weight, 1e-6, &mut out);
        soft_cap(&cpu, &mut out, 0.5);
        assert_eq!(hash_of_bits(&out), 0x32e7_c148_f879_fef4, "{:?}", cpu.isa());
    }
}

#[test]
fn rotation_turns_pairs_and_keeps_the_rest() {
    for cpu in cpus() {
        let mut heads = [1.0, 2.0, 3.0, 4.0, 9.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        rotate(&cpu, &mut heads, 5, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(heads, [-3.0, 2.0, 1.0, 4.0, 9.0, -7.0, 6.0, 5.0, 8.0, 9.0]);
    }
}

#[test]
fn rotated_heads_have_the_bits_of_a_plain_loop() {
    for cpu in cpus() {
        for half in [1, 8, 16, 24, 40, 64] {
            // Three numbers of each head are not rotated.
            let head_dim = 2 * half + 3;
            let (mut heads, cos, sin) = (noise(1, 4 * head_dim), noise(2, half), noise(3, half));
            let mut expected = heads.clone();
            for head in expected.chunks_exact_mut(head_dim) {
                for i in 0..half {
                    let (a, b) = (head[i], head[half + i]);
                    head[i] = a * cos[i] - b * sin[i];
                    head[half + i] = b * cos[i] + a * sin[i];
                }
            }
            rotate(&cpu, &mut heads, head_dim, &cos, &sin);
            assert_eq!(heads, expected, "{:?}, {half} pairs", cpu.isa());
        }
    }
}
