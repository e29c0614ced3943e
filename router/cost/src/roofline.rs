//! What a step takes before any was measured: a roofline of the model on the device.

use crate::{StepLine, step::StepWork};

/// What a model computes and reads, from its configuration alone. All ranks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Bytes of weights that a step of few tokens reads: of a mixture of experts those that its tokens select.
    pub weight_bytes: f64,
    /// Operations of a token's products with the weights: two for each active parameter.
    pub flops_per_token: f64,
    /// Operations of attention for one pair of a token and one that it sees: 4 x layers x query heads x head size.
    pub flops_per_pair: f64,
    /// Bytes of a token's KV in all layers. A KV head that several ranks hold counts for each of them.
    pub kv_bytes_per_token: f64,
    /// Layers: each launches its kernels, and its all-reduces.
    pub num_layers: f64,
    /// Bytes of a token's activations that devices sum if they share the model: two all-reduces in each layer.
    pub sum_bytes_per_token: f64,
}

/// What a device does in a second, as far as models reach it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceProfile {
    /// Operations per second in products of large matrices.
    pub flops_per_second: f64,
    /// Bytes of memory per second.
    pub bytes_per_second: f64,
    /// Seconds of a step beside arithmetic and memory: planning, launching, sampling.
    pub overhead_seconds: f64,
    /// As above, for each layer.
    pub layer_seconds: f64,
    /// Bytes that each device sends to the others in a second. Infinite: the utilisation of the arithmetic counts all-reduces.
    pub link_bytes_per_second: f64,
    /// How many devices compute together; arithmetic and memory are those of all of them.
    pub num_devices: usize,
}

/// A GPU of NVIDIA: the SXM module, with the numbers of its data sheet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuKind {
    /// 312 TFLOPS of dense BF16, 2.039 TB/s, 80 GB.
    A100,
    /// 989 TFLOPS, 3.35 TB/s, 80 GB.
    H100,
    /// 989 TFLOPS, 4.8 TB/s, 141 GB.
    H200,
}

impl GpuKind {
    /// All of them.
    pub const ALL: [GpuKind; 3] = [GpuKind::A100, GpuKind::H100, GpuKind::H200];

    /// "A100", "H100" or "H200".
    pub const fn name(self) -> &'static str {
        match self {
            GpuKind::A100 => "A100",
            GpuKind::H100 => "H100",
            GpuKind::H200 => "H200",
        }
    }

    /// All names, as a message lists them.
    pub fn names() -> String {
        GpuKind::ALL.map(GpuKind::name).join(", ")
    }

    /// The inverse of [`name`](Self::name), in upper or lower case.
    pub fn named(name: &str) -> Option<GpuKind> {
        GpuKind::ALL.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of its memory.
    pub const fn memory_bytes(self) -> f64 {
        match self {
            GpuKind::A100 | GpuKind::H100 => 80e9,
            GpuKind::H200 => 141e9,
        }
    }

    /// What models reach of it.
    pub const fn profile(self) -> DeviceProfile {
        match self {
            GpuKind::A100 => DeviceProfile::gpu(312e12, 2.039e12),
            GpuKind::H100 => DeviceProfile::gpu(989e12, 3.35e12),
            GpuKind::H200 => DeviceProfile::gpu(989e12, 4.8e12),
        }
    }
}

/// The part of a GPU's peak arithmetic that prompts reach, all-reduces included. Published values for dense models of 7 to 70 B
/// lie between 0.4 and 0.6 (DistServe, OSDI 2024; Splitwise, ISCA 2024).
const GPU_FLOPS_UTILISATION: f64 = 0.5;
/// The part of a GPU's peak memory bandwidth that decoding reaches, from the same measurements.
const GPU_BYTES_UTILISATION: f64 = 0.7;
const GPU_OVERHEAD_SECONDS: f64 = 0.002;

/// Of one thread of a processor with 256-bit vectors: 16 multiply-adds per cycle at 3 GHz, half of it reached.
const THREAD_FLOPS: f64 = 48e9;
/// Of one thread, and of all together: two channels of DDR4-3200 have 51 GB/s.
const THREAD_BYTES: f64 = 10e9;
const PROCESSOR_BYTES: f64 = 40e9;

impl DeviceProfile {
    /// One device that takes no time: what a profile does not say.
    pub const UNBOUNDED: DeviceProfile = DeviceProfile {
        flops_per_second: f64::INFINITY,
        bytes_per_second: f64::INFINITY,
        overhead_seconds: 0.0,
        layer_seconds: 0.0,
        link_bytes_per_second: f64::INFINITY,
        num_devices: 1,
    };

    /// A GPU with this peak of dense BF16 arithmetic and of memory bandwidth.
    pub const fn gpu(peak_flops: f64, peak_bytes: f64) -> DeviceProfile {
        DeviceProfile {
            flops_per_second: peak_flops * GPU_FLOPS_UTILISATION,
            bytes_per_second: peak_bytes * GPU_BYTES_UTILISATION,
            overhead_seconds: GPU_OVERHEAD_SECONDS,
            ..DeviceProfile::UNBOUNDED
        }
    }

    /// The GPU of this name, as NVIDIA's driver reports it. Any that is not known counts as an A100: the first measured steps
    /// tell.
    pub fn of_gpu(name: &str) -> DeviceProfile {
        let kind = GpuKind::ALL.into_iter().find(|kind| name.contains(kind.name()));
        kind.unwrap_or(GpuKind::A100).profile()
    }

    /// A processor that computes with so many threads.
    pub fn of_processor(num_threads: usize) -> DeviceProfile {
        let num_threads = num_threads.max(1) as f64;
        DeviceProfile {
            flops_per_second: num_threads * THREAD_FLOPS,
            bytes_per_second: (num_threads * THREAD_BYTES).min(PROCESSOR_BYTES),
            overhead_seconds: 0.000_2,
            ..DeviceProfile::UNBOUNDED
        }
    }

    /// So many of them, each with its part of a model.
    #[must_use]
    pub fn times(self, num_devices: usize) -> DeviceProfile {
        let num_devices = num_devices.max(1);
        DeviceProfile {
            flops_per_second: self.flops_per_second * num_devices as f64,
            bytes_per_second: self.bytes_per_second * num_devices as f64,
            num_devices: self.num_devices * num_devices,
            ..self
        }
    }

    /// Seconds until so many bytes are summed on all devices: a ring, which is optimal in bytes (Patarasuk, Yuan 2009).
    fn sum_seconds(&self, num_bytes: f64) -> f64 {
        let num_devices = self.num_devices as f64;
        num_bytes * 2.0 * (num_devices - 1.0) / num_devices / self.link_bytes_per_second
    }
}

/// The step line of a model on a device. A roofline (Williams et al. 2009) takes the longer of computing and reading; a line
/// takes their sum, which is at most twice as long, and less where one of them dominates: prompts, or decoding.
pub fn prior(model: &ModelShape, device: &DeviceProfile) -> StepLine {
    StepLine {
        fixed: device.overhead_seconds
            + model.num_layers * device.layer_seconds
            + model.weight_bytes / device.bytes_per_second,
        per_token: model.flops_per_token / device.flops_per_second
            + device.sum_seconds(model.sum_bytes_per_token),
        per_context_token: model.kv_bytes_per_token / device.bytes_per_second,
        per_pair: model.flops_per_pair / device.flops_per_second,
    }
}

impl StepLine {
    /// A line through one measured step when nothing else is known: a token more costs a twentieth of a step, because the
    /// weights are read anyway, and a pair what it costs a model of a few billion parameters.
    pub fn through(seconds: f64, work: &StepWork) -> StepLine {
        const TOKEN: f64 = 0.05;
        const PAIR: f64 = TOKEN / 8192.0;
        let line = StepLine { fixed: 1.0, per_token: TOKEN, per_context_token: PAIR, per_pair: PAIR };
        let fixed = seconds / line.seconds(work);
        StepLine { fixed, per_token: fixed * TOKEN, per_context_token: fixed * PAIR, per_pair: fixed * PAIR }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PromptWork;

    /// Llama 3.1 8B in BF16: 7.5e9 weights multiply a token.
    const LLAMA_8B: ModelShape = ModelShape {
        weight_bytes: 16e9,
        flops_per_token: 15e9,
        flops_per_pair: 4.0 * 32.0 * 4096.0,
        kv_bytes_per_token: 131_072.0,
        num_layers: 32.0,
        sum_bytes_per_token: 2.0 * 32.0 * 4096.0 * 2.0,
    };

    #[test]
    fn known_gpus_take_what_is_published_for_them() {
        // An 8 B model in BF16 on one GPU: vLLM and TensorRT-LLM decode one sequence in 6 to 11 ms and compute 15,000 to
        // 35,000 prompt tokens a second on H100.
        let h100 = prior(&LLAMA_8B, &DeviceProfile::of_gpu("NVIDIA H100 80GB HBM3"));
        let itl = h100.seconds(&StepWork::decode(1.0, 1000.0));
        assert!((0.006..0.011).contains(&itl), "{itl}");
        let prompt = h100.prompt_seconds(&PromptWork::new(8192, 0), &StepWork::default(), 8192.0);
        assert!((15_000.0..35_000.0).contains(&(8192.0 / prompt)), "{prompt}");
        let of = |name| prior(&LLAMA_8B, &DeviceProfile::of_gpu(name));
        assert!(of("NVIDIA H200").fixed < h100.fixed && of("NVIDIA H200").per_token == h100.per_token);
        assert!(of("NVIDIA A100-SXM4-80GB").per_token > 3.0 * h100.per_token);
        assert_eq!(of("some other GPU"), of("A100"));
        let two = prior(&LLAMA_8B, &DeviceProfile::of_gpu("H100").times(2));
        assert_eq!(two.per_token, h100.per_token / 2.0);
    }

    #[test]
    fn layers_and_all_reduces_take_time_where_a_profile_says_how_much() {
        let profile = DeviceProfile {
            layer_seconds: 50e-6,
            link_bytes_per_second: 100e9,
            ..DeviceProfile::gpu(989e12, 3.35e12)
        };
        let (plain, one) = (prior(&LLAMA_8B, &DeviceProfile::of_gpu("H100")), prior(&LLAMA_8B, &profile));
        assert!((one.fixed - plain.fixed - 32.0 * 50e-6).abs() < 1e-12);
        assert_eq!(one.per_token, plain.per_token, "one device sums nothing");
        let four = prior(&LLAMA_8B, &profile.times(4));
        // 512 KiB of a token, of which each device sends 2 x 3/4.
        let sums = four.per_token - plain.per_token / 4.0;
        assert!((sums - 524_288.0 * 1.5 / 100e9).abs() < 1e-12, "{sums}");
    }

    #[test]
    fn more_threads_compute_faster_and_share_the_memory() {
        let of = |num_threads| prior(&LLAMA_8B, &DeviceProfile::of_processor(num_threads));
        assert_eq!(of(8).per_token, of(1).per_token / 8.0);
        assert_eq!(of(64).fixed, of(8).fixed);
    }

    #[test]
    fn a_line_through_a_step_meets_it() {
        let work = StepWork::chunk(100.0, 40.0);
        let line = StepLine::through(0.25, &work);
        assert!((line.seconds(&work) - 0.25).abs() < 1e-12);
    }
}
