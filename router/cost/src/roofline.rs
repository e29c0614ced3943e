//! What a step takes before any was measured: a roofline of the model on the device.

use crate::{StepLine, step::StepWork};

/// What a model computes and reads, from its configuration alone. All ranks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelShape {
    /// Bytes of weights that a step of few tokens reads.
    pub weight_bytes: f64,
    /// Operations of a token's products with the weights: two for each active parameter.
    pub flops_per_token: f64,
    /// Operations of attention for one pair of a token and one that it sees: 4 x layers x query heads x head size.
    pub flops_per_pair: f64,
    /// Bytes of a token's KV in all layers.
    pub kv_bytes_per_token: f64,
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

/// The part of a GPU's peak arithmetic that prompts reach. Published values for dense models of 7 to 70 B lie between 0.4
/// and 0.6 (DistServe, OSDI 2024; Splitwise, ISCA 2024).
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
    /// A GPU with this peak of dense BF16 arithmetic and of memory bandwidth.
    pub const fn gpu(peak_flops: f64, peak_bytes: f64) -> DeviceProfile {
        DeviceProfile {
            flops_per_second: peak_flops * GPU_FLOPS_UTILISATION,
            bytes_per_second: peak_bytes * GPU_BYTES_UTILISATION,
            overhead_seconds: GPU_OVERHEAD_SECONDS,
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
        }
    }

    /// So many of them, each with its part of a model. All-reduces are not counted.
    #[must_use]
    pub fn times(self, num_devices: usize) -> DeviceProfile {
        let num_devices = num_devices.max(1) as f64;
        DeviceProfile {
            flops_per_second: self.flops_per_second * num_devices,
            bytes_per_second: self.bytes_per_second * num_devices,
            ..self
        }
    }
}

/// The step line of a model on a device. A roofline (Williams et al. 2009) takes the longer of computing and reading; a line
/// takes their sum, which is at most twice as long, and less where one of them dominates: prompts, or decoding.
pub fn prior(model: &ModelShape, device: &DeviceProfile) -> StepLine {
    StepLine {
        fixed: device.overhead_seconds + model.weight_bytes / device.bytes_per_second,
        per_token: model.flops_per_token / device.flops_per_second,
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
