//! The arguments of `baton inspect`, the device, and the numbers that follow from both.

use std::path::PathBuf;

use anyhow::ensure;
use baton_command::{at_least_one, parse_kv_dtype};
use baton_cost::{StepLine, StepWork};
use baton_kv_cache::KvDtype;
use baton_model::{
    Backend, DecoderSpec, FloatDtype, ModelConfig, Quantisation, StoredWeights,
    cost::{DeviceSpeed, ModelCost, StepCost},
};
use baton_worker::step_profile;
use clap::Args;

use super::peaks::{Device, Peaks, positive};

const NOTES: &str = "\
The times are lower bounds from the device's peak numbers (its roofline). No kernel reaches them, and they
include no time for the network, for queues or for sampling. Only a model that fits into caches can exceed the
rate of memory. What this machine reaches:
  baton bench steps MODEL --json steps.json
  baton inspect MODEL --device cpu --step-profile steps.json --roofline roofline.svg";

/// The arguments of `baton inspect`.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct InspectArgs {
    /// Directory of a Hugging Face model (config.json is enough), or a .gguf file. Default: the tiny model
    /// that is embedded in this program.
    pub(crate) model: Option<PathBuf>,
    /// Type of the weights: f32, f16, bf16, or int8 or int4 as for --quantize. Default: the type in the
    /// files, or in the model's configuration.
    #[arg(long, value_name = "TYPE", value_parser = parse_dtype)]
    pub(crate) dtype: Option<WeightSize>,
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: that of --dtype, else the one that workers take:
    /// bf16 on GPUs, the type of the weights on cpu.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Device whose peak numbers (dense bf16) are used. Those of cpu are measured on this machine.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Device::H100, help_heading = "Device")]
    pub(crate) device: Device,
    /// Threads with which the peaks of cpu are measured. Default: one for each processor.
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Device")]
    pub(crate) threads: Option<usize>,
    /// What steps take, from `baton bench steps --json`: shown beside the least times.
    #[arg(long, value_name = "FILE", help_heading = "Device")]
    pub(crate) step_profile: Option<PathBuf>,
    /// Draw the roofline, and where the model's steps are under it, as an SVG file.
    #[arg(long, value_name = "FILE", help_heading = "Device")]
    pub(crate) roofline: Option<PathBuf>,
    /// Peak TFLOP/s, instead of the device's.
    #[arg(long, value_name = "TFLOPS", help_heading = "Device")]
    pub(crate) flops: Option<f64>,
    /// Memory bandwidth in GB/s, instead of the device's.
    #[arg(long, value_name = "GB/S", help_heading = "Device")]
    pub(crate) bandwidth: Option<f64>,
    /// Network bandwidth in GB/s between a prefill and a decode worker.
    #[arg(long, value_name = "GB/S", default_value_t = 12.5, help_heading = "Device")]
    pub(crate) network: f64,

    /// Tokens of the prompt. Default: 1024, or half of a smaller context.
    #[arg(long, value_name = "TOKENS", help_heading = "Request")]
    pub(crate) prompt: Option<usize>,
    /// Tokens of the answer. Default: 256, or the rest of a smaller context.
    #[arg(long, value_name = "TOKENS", help_heading = "Request")]
    pub(crate) output: Option<usize>,
    /// Sequences that decode together in one step.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Request")]
    pub(crate) batch: usize,
    /// Measured time to first token in milliseconds, used instead of the roofline estimate.
    #[arg(long, value_name = "MS", help_heading = "Request")]
    pub(crate) ttft: Option<f64>,
    /// Measured time per output token in milliseconds, used instead of the roofline estimate.
    #[arg(long, value_name = "MS", help_heading = "Request")]
    pub(crate) tpot: Option<f64>,
}

/// The bytes of a weight, and how it is stored.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightSize {
    /// With its share of scales.
    pub(super) bytes: f64,
    /// The type of KV that goes with it, if it says one.
    pub(super) kv_dtype: Option<KvDtype>,
    /// What decides how it is multiplied.
    pub(super) stored: StoredWeights,
    /// Where that is from.
    pub(super) source: String,
}

impl WeightSize {
    pub(super) fn of(dtype: FloatDtype) -> WeightSize {
        WeightSize {
            bytes: dtype.size_bytes() as f64,
            kv_dtype: Some(dtype.kv_dtype()),
            stored: StoredWeights::Floats(dtype),
            source: dtype.name().to_owned(),
        }
    }

    /// What the weights of a model take on average if they take `num_bytes` in memory.
    pub(super) fn in_memory(num_bytes: u64, config: &ModelConfig) -> WeightSize {
        let parameters = ModelCost::new(&config.decoder, 1.0, KvDtype::F32).num_parameters();
        WeightSize {
            bytes: num_bytes as f64 / parameters as f64,
            kv_dtype: None,
            stored: config.stored,
            source: "as held in memory".to_owned(),
        }
    }
}

pub(super) fn parse_dtype(name: &str) -> Result<WeightSize, String> {
    if let Some(dtype) = FloatDtype::from_name(name) {
        return Ok(WeightSize::of(dtype));
    }
    let quantisation: Quantisation =
        name.parse().map_err(|error| format!("expected f32, f16 or bf16, or as --quantize: {error}"))?;
    Ok(WeightSize {
        bytes: quantisation.bytes_per_weight(),
        kv_dtype: None,
        stored: StoredWeights::Integers(quantisation.format()),
        source: format!("{quantisation} with scales"),
    })
}

/// Everything that is printed.
#[derive(Debug)]
pub(super) struct Inspection {
    pub(super) spec: DecoderSpec,
    pub(super) cost: ModelCost,
    pub(super) weights: WeightSize,
    pub(super) kv_dtype: KvDtype,
    pub(super) context_length: usize,
    pub(super) peaks: Peaks,
    pub(super) network_bytes_per_second: f64,
    pub(super) prompt: usize,
    pub(super) output: usize,
    pub(super) batch: usize,
    /// Measured, in seconds.
    pub(super) ttft: Option<f64>,
    pub(super) tpot: Option<f64>,
    /// What steps take, measured.
    pub(super) steps: Option<StepLine>,
}

impl Inspection {
    pub(super) fn new(config: &ModelConfig, weights: WeightSize, args: &InspectArgs) -> anyhow::Result<Self> {
        let context_length = config.context_length;
        let prompt = args.prompt.unwrap_or(1024.min(context_length / 2)).max(1);
        ensure!(
            prompt < context_length,
            "--prompt {prompt} leaves no room in the context of {context_length}"
        );
        let output = args.output.unwrap_or(256.min(context_length - prompt)).max(1);
        ensure!(
            prompt + output <= context_length,
            "--prompt {prompt} and --output {output} are more than the context of {context_length}"
        );
        ensure!(args.batch > 0, "--batch must be at least 1");
        let seconds = |name, value: Option<f64>| value.map(|ms| positive(name, ms / 1e3)).transpose();
        let of_worker = match args.device.backend() {
            Backend::Cpu => config.dtype.kv_dtype(),
            Backend::Cuda => KvDtype::Bf16,
        };
        let kv_dtype = args.kv_dtype.or(weights.kv_dtype).unwrap_or(of_worker);
        let peaks = Peaks::of(args.device, args.threads, (args.flops, args.bandwidth), weights.stored)?;
        Ok(Self {
            spec: config.decoder.clone(),
            cost: ModelCost::new(&config.decoder, weights.bytes, kv_dtype),
            weights,
            kv_dtype,
            context_length,
            peaks,
            network_bytes_per_second: positive("--network", args.network)? * 1e9,
            prompt,
            output,
            batch: args.batch,
            ttft: seconds("--ttft", args.ttft)?,
            tpot: seconds("--tpot", args.tpot)?,
            steps: args.step_profile.as_deref().map(step_profile).transpose()?,
        })
    }

    /// By the roof of the weights' type.
    pub(super) fn device(&self) -> DeviceSpeed {
        let Peaks { roofs, bytes_per_second, .. } = &self.peaks;
        DeviceSpeed { flops_per_second: roofs[0].1, bytes_per_second: *bytes_per_second }
    }

    /// All of the prompt in one step.
    pub(super) fn prefill(&self) -> StepCost {
        self.cost.prefill(self.prompt, 0)
    }

    /// Seconds of that step, if steps were measured.
    pub(super) fn prefill_seconds(&self) -> Option<f64> {
        Some(self.steps?.seconds(&StepWork::chunk(0.0, self.prompt as f64)))
    }

    /// A step of `batch` sequences in the middle of the answer.
    pub(super) fn decode(&self, batch: usize) -> StepCost {
        self.cost.decode(batch, self.context())
    }

    /// Seconds of that step, if steps were measured.
    pub(super) fn decode_seconds(&self, batch: usize) -> Option<f64> {
        Some(self.steps?.seconds(&StepWork::decode(batch as f64, (batch * self.context()) as f64)))
    }

    /// Tokens of a sequence in the middle of the answer.
    pub(super) fn context(&self) -> usize {
        self.prompt + self.output / 2
    }

    /// The smallest batch, a power of two, whose decode step computes longer than it reads; `None` if there
    /// is none below a million. KV is read per sequence: long contexts never get there.
    pub(super) fn compute_bound_batch(&self) -> Option<usize> {
        (0..20).map(|power| 1 << power).find(|&batch| self.decode(batch).intensity() >= self.device().ridge())
    }
}
