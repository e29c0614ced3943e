//! Runs all measurements on the emulator, which has a fake clock.

use baton_cuda_emulator::emulated_device::EmulatedDevice;
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::tested::tested_sources;
use baton_model_cuda::measure::{Amount, ExpertSizes, Figure, Finding, Scope, Sizes, llama, measure_on};
use baton_model_spec::{LayerSpec, MlpSpec};

fn small() -> Sizes {
    let layer = LayerSpec { window: None, rope_idx: 0, mlp: MlpSpec::Dense { intermediate_size: 48 } };
    Sizes {
        spec: llama([64, 2, 1, 64], vec![layer; 2], 100),
        context: 33,
        batch: 3,
        attention_batches: vec![1, 3],
        prompt: 40,
        experts: vec![ExpertSizes { num_experts: 3, num_active: 2, hidden_size: 24, intermediate_size: 40 }],
        copied_bytes: 1000,
        product: 24,
        repetitions: 1,
    }
}

/// What is found on an emulated device with this much memory.
fn findings(scope: Scope, memory_bytes: usize) -> Vec<Finding> {
    let sizes = small();
    let open = || Ok(EmulatedDevice::new(&sizes.sources(), memory_bytes, Threads::Shuffled));
    let mut findings = Vec::new();
    measure_on(&sizes, scope, open, &mut |finding| findings.push(finding.clone())).unwrap();
    findings
}

fn figures(findings: Vec<Finding>) -> Vec<Figure> {
    let figure = |finding| match finding {
        Finding::Measured(figure) => figure,
        left_out => panic!("{left_out:?}"),
    };
    findings.into_iter().map(figure).collect()
}

#[test]
fn measurements_stay_within_their_buffers() {
    let figures = figures(findings(Scope::All, usize::MAX));
    let targets: Vec<Option<f64>> = figures.iter().map(|figure| figure.target).collect();
    let [decode, prefill, experts, step, prompt] = [0.85, 0.6, 0.5, 0.85, 0.7].map(Some);
    // Attention and experts are measured with the kernels that all GPUs have, too. Experts have 16 rows each, then those
    // of the prompt. Two matrices of two kinds are multiplied in two ways, with seven
    // numbers of rows.
    let few_rows = [None; 56];
    let expected = [
        &[None, None, None, decode, None, prefill, None, None, None, experts][..],
        &few_rows,
        &[decode, decode, step, None, step, None, prompt],
    ];
    let expected: Vec<Option<f64>> = expected.concat();
    assert_eq!(targets, expected);
    for figure in &figures[2..] {
        assert!(figure.share.unwrap() > 0.0 && figure.seconds > 0.0, "{figure:?}");
    }
    // One second each, and a copy of 2000 bytes. A sequence has 33 keys and values of 64 numbers of two bytes in each of
    // two layers.
    let of_attention: Vec<f64> = figures[2..4].iter().map(|figure| figure.share.unwrap()).collect();
    let sequence = f64::from(33 * 2 * 64 * 2 * 2) / 2000.0;
    assert_eq!(of_attention, [sequence, 3.0 * sequence]);
    // 40 rows make 820 pairs, with 2 heads of 64 numbers. The product takes 2 x 24^3 operations.
    let of_attention = figures[4..6].iter().map(|figure| figure.share.unwrap());
    assert!(of_attention.into_iter().all(|share| share == 4.0 * 128.0 * 820.0 / 27648.0));
    // All weights of three experts of three matrices of 24 x 40; then 40 rows, each with two experts.
    let (weights, operations) = (f64::from(3 * 3 * 24 * 40 * 2), f64::from(2 * 40 * 2 * 3 * 24 * 40));
    let of_experts = figures[6..10].iter().map(|figure| figure.amount);
    let (bytes, operations) = (Amount::Bytes(weights), Amount::Operations(operations));
    assert!(of_experts.eq([bytes, bytes, operations, operations]));
    // A step of 64 bytes for the 64 or 48 numbers of each row, half of it padding in 4 bits; and scales of groups of 32 numbers,
    // or of rows.
    let of_few_rows: Vec<&Figure> = figures[10..66].iter().collect();
    let bytes = |rows: u32, row: u32| Amount::Bytes(f64::from(rows * row));
    let expected = [bytes(96, 64 + 8), bytes(64, 64 + 8), bytes(96, 64 + 4), bytes(64, 48 + 4)];
    for (figures, expected) in of_few_rows.chunks(14).zip(expected) {
        assert!(figures.iter().all(|figure| figure.amount == expected), "{:?}", figures[0]);
    }
    assert_eq!(of_few_rows[0].what, "few rows, 4-bit weights of 96 x 64, 1 rows, as they are");
    assert_eq!(of_few_rows[55].what, "few rows, fp8 weights of 64 x 48, 256 rows, widened");
    // Two layers of qkv, output, gate and up, and down; then the head.
    let numbers = 2 * (64 * 256 + 128 * 64 + 2 * 48 * 64 + 64 * 48) + 100 * 64;
    assert_eq!(figures[66].amount, Amount::Bytes(f64::from(2 * numbers)));
}

/// The archive of `gpu-check --pack` has the kernels of [`tested_sources`], and fakes are too small for figures.
#[test]
fn kernels_of_all_measurements_are_packed() {
    let packed = tested_sources();
    for source in Sizes::full().sources() {
        assert!(packed.contains(&source), "add {source:?} to model/cuda-emulator/src/tested.rs");
    }
}

#[test]
fn what_does_not_fit_is_left_out() {
    // One copy of 1000 bytes fits, two do not.
    let [Finding::LeftOut { what, needed_bytes: 5456, free_bytes: 1500 }] = &findings(Scope::All, 1500)[..]
    else {
        panic!("nothing can be compared without the ceilings");
    };
    assert!(what.starts_with("the ceilings"), "{what}");
    // Noise takes one MiB of its own.
    let findings = findings(Scope::All, 4 << 20);
    let left_out = |finding: &Finding| match finding {
        Finding::LeftOut { what, needed_bytes, free_bytes } => {
            assert!(needed_bytes > free_bytes);
            Some(what.clone())
        }
        Finding::Measured(_) => None,
    };
    let left_out: Vec<String> = findings.iter().filter_map(left_out).collect();
    assert_eq!(findings.len() - left_out.len(), 2, "the ceilings");
    assert_eq!(left_out.len(), 9, "{left_out:?}");
    assert_eq!(left_out[1], "decode attention, 2 layers, 3 x 33");
}

#[test]
fn ceilings_are_measured_alone() {
    assert_eq!(figures(findings(Scope::Ceilings, usize::MAX)).len(), 2);
}

#[test]
fn a_share_below_its_target_is_missed() {
    let figure = |share, target| {
        let (what, amount) = (String::new(), Amount::Bytes(1.0));
        Figure { what, seconds: 1.0, amount, share, target }.is_missed()
    };
    assert!(figure(Some(0.5), Some(0.6)) && figure(Some(f64::NAN), Some(0.6)));
    assert!(!figure(Some(0.6), Some(0.6)) && !figure(Some(0.1), None) && !figure(None, None));
}
