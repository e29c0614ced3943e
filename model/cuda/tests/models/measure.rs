//! Runs all measurements on the emulator, which has a fake clock.

use baton_cuda_emulator::emulated_device::EmulatedDevice;
use baton_cuda_emulator::session::Threads;
use baton_model_cuda::executor::sources_of;
use baton_model_cuda::measure::{Amount, Figure, Sizes, llama, measure_on};
use baton_model_spec::{LayerSpec, MlpSpec};

fn small() -> Sizes {
    let layer = LayerSpec { window: None, rope_idx: 0, mlp: MlpSpec::Dense { intermediate_size: 48 } };
    Sizes {
        spec: llama([64, 2, 1, 64], vec![layer; 2], 100),
        context: 33,
        batch: 3,
        prompt: 40,
        copied_bytes: 1000,
        product: 24,
        repetitions: 1,
    }
}

#[test]
fn measurements_stay_within_their_buffers() {
    let sizes = small();
    let open =
        || Ok(EmulatedDevice::new(&sources_of(&sizes.spec, &sizes.layout()), usize::MAX, Threads::Shuffled));
    let mut figures = Vec::new();
    let mut report = |figure: &Figure| figures.push(figure.clone());
    measure_on(&sizes, open, &mut report).unwrap();
    let targets: Vec<Option<f64>> = figures.iter().map(|figure| figure.target).collect();
    let [decode, step, prefill] = [Some(0.85), Some(0.8), Some(0.65)];
    // Attention uses the kernel that all GPUs have, too.
    assert_eq!(targets, [None, None, decode, None, Some(0.6), decode, step, None, step, None, prefill]);
    for figure in &figures[2..] {
        assert!(figure.share.unwrap() > 0.0 && figure.seconds > 0.0, "{figure:?}");
    }
    // One second each: 3 sequences of 33 keys and values of 64 numbers of two bytes, and a copy of 2000 bytes.
    assert_eq!(figures[2].share, Some((3 * 33 * 2 * 64 * 2) as f64 / 2000.0));
    // 40 rows make 820 pairs, with 2 heads of 64 numbers. The product takes 2 x 24^3 operations.
    let of_attention = figures[3..5].iter().map(|figure| figure.share.unwrap());
    assert!(of_attention.into_iter().all(|share| share == 4.0 * 128.0 * 820.0 / 27648.0));
    // Two layers of qkv, output, gate and up, and down; then the head.
    let numbers = 2 * (64 * 256 + 128 * 64 + 2 * 48 * 64 + 64 * 48) + 100 * 64;
    assert_eq!(figures[5].amount, Amount::Bytes(f64::from(2 * numbers)));
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
