//! The step line against steps that others measured. The data and their licences: `data/README.md`.

mod solve;

use baton_cost::{DeviceProfile, ModelShape, StepWork, prior};
use solve::solve;

const DISTSERVE: &str = include_str!("data/distserve_a100.csv");

/// OPT's decoder in 16 bits: layers, hidden size; 12 hidden² weights in a layer, as many query as kv heads.
fn opt(num_layers: f64, hidden: f64) -> ModelShape {
    let num_weights = 12.0 * num_layers * hidden * hidden;
    ModelShape {
        weight_bytes: 2.0 * num_weights,
        flops_per_token: 2.0 * num_weights,
        flops_per_pair: 4.0 * num_layers * hidden,
        kv_bytes_per_token: 4.0 * num_layers * hidden,
        num_layers,
        sum_bytes_per_token: 4.0 * num_layers * hidden,
    }
}

/// Steps of a profile, in seconds: prompts alone, and batches that decode.
fn steps(profile: &[f64]) -> Vec<(StepWork, f64)> {
    let [a, b, c, threshold, small @ .., _, _, _] = profile else { panic!("eleven numbers") };
    let large = &profile[7..];
    let prompt = |n: f64| (StepWork::chunk(0.0, n), (a + b * n + c * n * n) / 1e3);
    let decode = |batch: f64, context: f64| {
        let line = if batch < *threshold { small } else { large };
        let context = batch * context;
        (StepWork::decode(batch, context), (line[0] + line[1] * context + line[2] * batch) / 1e3)
    };
    let mut steps: Vec<_> = [128.0, 256.0, 512.0, 1024.0, 2048.0].map(prompt).into();
    for batch in [1.0, 4.0, 16.0, 32.0, 64.0, 96.0, 128.0] {
        steps.extend([128.0, 512.0, 1024.0].map(|context| decode(batch, context)));
    }
    steps
}

#[test]
fn one_overhead_utilisation_and_bandwidth_describe_a_published_profile() {
    let a100 =
        DeviceProfile { flops_per_second: 312e12, bytes_per_second: 2.039e12, ..DeviceProfile::UNBOUNDED };
    println!(
        "model, GPUs: overhead, part of peak bandwidth, of peak arithmetic; error mean (wanted: 10 %), worst"
    );
    let mut num_profiles = 0;
    for line in DISTSERVE.lines().skip(1) {
        let (name, rest) = line.split_once(',').expect("a name");
        let numbers: Vec<f64> = rest.split(',').map(|number| number.parse().expect("a number")).collect();
        let (num_gpus, profile) = (numbers[0] as usize, &numbers[1..]);
        let model = match name {
            "facebook/opt-13b" => opt(40.0, 5120.0),
            "facebook/opt-66b" => opt(64.0, 9216.0),
            other => panic!("{other}"),
        };
        let steps = steps(profile);
        // Least squares of relative errors. At the peaks of the data sheet a step takes `memory` and `arithmetic`.
        let peak = prior(&model, &a100.times(num_gpus));
        let parts = |work: &StepWork| {
            let memory = peak.fixed + peak.per_context_token * work.num_context_tokens;
            [1.0, memory, peak.seconds(work) - memory]
        };
        let (mut rows, mut right) = ([[0.0; 3]; 3], [0.0; 3]);
        for (work, seconds) in &steps {
            let parts = parts(work).map(|part| part / seconds);
            for (row, part) in rows.iter_mut().zip(parts) {
                row.iter_mut().zip(parts).for_each(|(sum, other)| *sum += part * other);
            }
            right.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
        let [overhead, memory, arithmetic] = solve(rows, right);
        assert!(overhead > 0.0 && memory > 0.0 && arithmetic > 0.0);
        let device = DeviceProfile {
            flops_per_second: a100.flops_per_second / arithmetic,
            bytes_per_second: a100.bytes_per_second / memory,
            overhead_seconds: overhead,
            ..a100
        };
        let fitted = prior(&model, &device.times(num_gpus));
        let errors: Vec<f64> =
            steps.iter().map(|(work, seconds)| (fitted.seconds(work) / seconds - 1.0).abs()).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().copied().fold(0.0, f64::max);
        println!(
            "{name}, {num_gpus}: {:.1} ms, {:.2}, {:.2}; {:.1} %, {:.1} %",
            1e3 * overhead,
            1.0 / memory,
            1.0 / arithmetic,
            100.0 * mean,
            100.0 * worst
        );
        assert!(mean < 0.1, "{name} on {num_gpus} GPUs: steps differ by {mean}");
        num_profiles += 1;
    }
    assert_eq!(num_profiles, 7);
}
