//! The step line against times between tokens of real deployments: dense models, prompts and decoding on the same workers. The
//! data and their licences: `data/README.md`.
//!
//! A deployment has `concurrency` sequences at any time, and each brings a prompt when it begins. So on average a step decodes
//! all of them and computes `concurrency / output` prompts. What follows is the crate's [`prior`] of such a step, with four
//! numbers of devices and one of servers, the same for all models, GPUs, precisions and engines:
//!
//! ```text
//! part of the peak arithmetic, of the peak bandwidth of memory and of links; seconds of a layer; seconds of a stream's token
//! ```

mod solve;

use baton_cost::{DeviceProfile, ModelShape, StepWork, prior};
use solve::solve;

const SILICON: &str = include_str!("data/silicon_dense.csv");
const NUM_PARTS: usize = 5;
/// A prompt waits on average for half of the others if an engine computes prompts first and they come together: this part of
/// them is before the first token, and not between tokens.
const PROMPTS_FIRST: f64 = 0.5;
/// The part of a GPU's memory that weights and KV take.
const MEMORY: f64 = 0.9;

/// What a data sheet says of one GPU.
#[derive(Clone, Copy)]
struct Gpu {
    /// In 16 bits, dense.
    flops: f64,
    bytes: f64,
    memory: f64,
    /// NVLink, one direction.
    link: f64,
}

/// A deployment and what was measured of it.
struct Row {
    name: String,
    model: &'static str,
    shape: ModelShape,
    /// At the peaks of the data sheet.
    peak: DeviceProfile,
    degree: usize,
    /// Sequences that run; the others wait for blocks.
    num_running: f64,
    step: StepWork,
    seconds: f64,
}

fn gpu(name: &str) -> Gpu {
    let (flops, bytes, memory, link) = match name {
        "H100" => (989e12, 3.35e12, 80e9, 450e9),
        "H200" => (989e12, 4.8e12, 141e9, 450e9),
        "B200" => (2250e12, 8e12, 180e9, 900e9),
        "GB200" => (2450e12, 8e12, 186e9, 900e9),
        other => panic!("{other}"),
    };
    Gpu { flops, bytes, memory, link }
}

/// Name, layers, hidden size, weights that a step reads, query width; 8 kv heads of 128 in all of them.
fn model(name: &str) -> (&'static str, f64, f64, f64, f64) {
    match name {
        "llama-8b" => ("llama-8b", 32.0, 4096.0, 7.5e9, 4096.0),
        "qwen-32b" => ("qwen-32b", 64.0, 5120.0, 32.0e9, 8192.0),
        "llama-70b" => ("llama-70b", 80.0, 8192.0, 69.5e9, 8192.0),
        other => panic!("{other}"),
    }
}

/// Bytes of a weight with its scales, and the arithmetic as a multiple of that in 16 bits. Kernels reach less of the peak the
/// narrower it is: 3/4 of it in 8 bits, 1/2 in 4, beside 16.
fn precision(name: &str) -> (f64, f64) {
    match name {
        "bf16" => (2.0, 1.0),
        "fp8" => (1.0, 2.0 * 0.75),
        "fp4" => (0.5625, 4.0 * 0.5),
        other => panic!("{other}"),
    }
}

impl Row {
    fn parse(line: &str) -> Row {
        let [name, engine, device, format, numbers @ ..] = &line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let numbers: Vec<f64> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
        let [degree, concurrency, input, output, milliseconds] = numbers[..] else { panic!("{line}") };
        let (model, num_layers, hidden, num_weights, query) = model(name);
        let (weight_bytes, speed) = precision(format);
        let gpu = gpu(device);
        // TensorRT-LLM keeps KV in 8 bits where its checkpoints are quantised.
        let kv_bytes = if *engine == "trtllm" && *format != "bf16" { 1.0 } else { 2.0 };
        let shape = ModelShape {
            weight_bytes: weight_bytes * num_weights,
            flops_per_token: 2.0 * num_weights,
            flops_per_pair: 4.0 * num_layers * query,
            kv_bytes_per_token: 2.0 * num_layers * 1024.0 * kv_bytes,
            num_layers,
            sum_bytes_per_token: 4.0 * num_layers * hidden,
        };
        let room = (MEMORY * gpu.memory * degree - shape.weight_bytes) / shape.kv_bytes_per_token;
        let num_running = concurrency.min((room / (input + output)).max(1.0));
        let prompts_between = if *engine == "sglang" { PROMPTS_FIRST } else { 1.0 };
        // In each step this part of a prompt.
        let part = prompts_between * num_running / output;
        let prompt = StepWork::chunk(0.0, input);
        let prompt = StepWork {
            num_tokens: part * prompt.num_tokens,
            num_context_tokens: part * prompt.num_context_tokens,
            num_pairs: part * prompt.num_pairs,
        };
        Row {
            name: line.to_owned(),
            model,
            shape,
            peak: DeviceProfile {
                flops_per_second: speed * gpu.flops,
                bytes_per_second: gpu.bytes,
                link_bytes_per_second: gpu.link,
                layer_seconds: 1e-6,
                ..DeviceProfile::UNBOUNDED
            },
            degree: degree as usize,
            num_running,
            step: StepWork::decode(num_running, num_running * (input + output / 2.0)).plus(prompt),
            seconds: milliseconds / 1e3,
        }
    }

    /// Seconds between tokens on a device that takes so many times as long as the data sheet says for arithmetic, memory, links
    /// and a microsecond a layer, behind a server that takes so many microseconds for a token of a stream.
    fn predict(&self, times: [f64; NUM_PARTS]) -> f64 {
        let [arithmetic, memory, link, layer, stream] = times;
        let device = DeviceProfile {
            flops_per_second: self.peak.flops_per_second / arithmetic,
            bytes_per_second: self.peak.bytes_per_second / memory,
            link_bytes_per_second: self.peak.link_bytes_per_second / link,
            layer_seconds: self.peak.layer_seconds * layer,
            ..self.peak
        };
        prior(&self.shape, &device.times(self.degree)).seconds(&self.step) + 1e-6 * stream * self.num_running
    }

    /// What each number adds to the time if it is 1, as part of the measured time.
    fn parts(&self) -> [f64; NUM_PARTS] {
        std::array::from_fn(|idx| {
            let mut times = [0.0; NUM_PARTS];
            times[idx] = 1.0;
            self.predict(times) / self.seconds
        })
    }

    fn error(&self, times: [f64; NUM_PARTS]) -> f64 {
        (self.predict(times) / self.seconds - 1.0).abs()
    }
}

/// The numbers with the least mean relative error: least squares, where each row weighs by the inverse of its error.
fn fit<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> [f64; NUM_PARTS] {
    const NUM_ROUNDS: usize = 60;
    /// Smaller errors weigh no more.
    const LEAST_ERROR: f64 = 0.02;
    let mut times = [1.0; NUM_PARTS];
    for round in 0..NUM_ROUNDS {
        let (mut left, mut right) = ([[0.0; NUM_PARTS]; NUM_PARTS], [0.0; NUM_PARTS]);
        for row in rows.clone() {
            let weight = if round == 0 { 1.0 } else { 1.0 / row.error(times).max(LEAST_ERROR) };
            let parts = row.parts();
            for (sums, part) in left.iter_mut().zip(parts) {
                sums.iter_mut().zip(parts).for_each(|(sum, other)| *sum += weight * part * other);
            }
            right.iter_mut().zip(parts).for_each(|(sum, part)| *sum += weight * part);
        }
        times = solve(left, right);
    }
    assert!(times.iter().all(|&time| time > 0.0), "a device takes negative time: {times:?}");
    times
}

fn mean_error<'a>(rows: impl Iterator<Item = &'a Row>, times: [f64; NUM_PARTS]) -> f64 {
    let errors: Vec<f64> = rows.map(|row| row.error(times)).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

fn describe([arithmetic, memory, link, layer, stream]: [f64; NUM_PARTS]) -> String {
    let [arithmetic, memory, link] = [arithmetic, memory, link].map(|times| 1.0 / times);
    format!(
        "{arithmetic:.2} of arithmetic, {memory:.2} of memory, {link:.2} of links, {layer:.0} us a layer, {stream:.0} us a stream"
    )
}

fn rows() -> Vec<Row> {
    SILICON.lines().skip(1).map(Row::parse).collect()
}

/// Whether a row is in the first of two random halves (splitmix64; Steele, Lea, Flood 2014).
fn is_in_half(idx: usize, seed: u64) -> bool {
    let mut z = (seed << 32 | idx as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) & 1 == 0
}

#[test]
fn half_of_the_deployments_predicts_the_other_half() {
    const NUM_SEEDS: u64 = 8;
    let rows = rows();
    assert_eq!(rows.len(), 503);
    let mut errors = Vec::new();
    for seed in 0..NUM_SEEDS {
        let half = |first: bool| {
            rows.iter()
                .enumerate()
                .filter(move |&(idx, _)| is_in_half(idx, seed) == first)
                .map(|(_, row)| row)
        };
        let times = fit(half(true));
        let error = mean_error(half(false), times);
        println!("half {seed}: mean error {:.1} % (wanted: 12); {}", 100.0 * error, describe(times));
        errors.push(error);
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    println!("mean of the halves: {:.1} %", 100.0 * mean);
    assert!(mean < 0.12, "{mean}");
    assert!(errors.iter().all(|&error| error < 0.13), "{errors:?}");
}

#[test]
fn other_models_predict_a_model() {
    let rows = rows();
    for model in ["llama-8b", "qwen-32b", "llama-70b"] {
        let times = fit(rows.iter().filter(|row| row.model != model));
        let left_out = || rows.iter().filter(|row| row.model == model);
        let error = mean_error(left_out(), times);
        let worst = left_out().max_by(|a, b| a.error(times).total_cmp(&b.error(times)));
        let worst = worst.expect("the model has rows");
        println!("{model}: mean error {:.1} % (wanted: 25); {}", 100.0 * error, describe(times));
        println!("    worst: {}, {:.1} ms", worst.name, 1e3 * worst.predict(times));
        assert!(error < 0.25, "{model}: {error}");
    }
}
