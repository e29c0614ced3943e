//! The arguments of `baton inspect`, the device, and the numbers that follow from both.

use std::path::PathBuf;

use anyhow::ensure;
use baton_command::parse_kv_dtype;
use baton_kv_cache::KvDtype;
use baton_model::{
    DecoderSpec, FloatDtype, ModelConfig, Quantisation,
    cost::{DeviceSpeed, ModelCost, StepCost},
};
use clap::{Args, ValueEnum};

const NOTES: &str = "\
The times are lower bounds from the device's peak numbers (its roofline). No kernel reaches them, and they
include no time for the network, for queues or for sampling.";

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
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: the type of the weights, or of the model's
    /// configuration.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Device whose peak numbers (dense bf16) are used.
    #[arg(long, value_enum, default_value_t = Device::H100, help_heading = "Device")]
    pub(crate) device: Device,
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

/// A device by its peak numbers, as its maker states them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// NVIDIA A100 SXM 80 GB: 312 TFLOP/s, 2039 GB/s
    A100,
    /// NVIDIA H100 SXM: 989 TFLOP/s, 3350 GB/s
    H100,
    /// NVIDIA H200 SXM: 989 TFLOP/s, 4800 GB/s
    H200,
    /// NVIDIA B200: 2250 TFLOP/s, 8000 GB/s
    B200,
    /// NVIDIA L40S: 362 TFLOP/s, 864 GB/s
    L40s,
    /// NVIDIA L4: 121 TFLOP/s, 300 GB/s
    L4,
    /// AMD MI300X: 1307 TFLOP/s, 5300 GB/s
    Mi300x,
    /// Two AVX-512 cores of a server: 0.45 TFLOP/s, 36 GB/s
    Cpu,
}

impl Device {
    /// TFLOP/s and GB/s.
    pub(super) fn peaks(self) -> (f64, f64) {
        match self {
            Self::A100 => (312.0, 2039.0),
            Self::H100 => (989.0, 3350.0),
            Self::H200 => (989.0, 4800.0),
            Self::B200 => (2250.0, 8000.0),
            Self::L40s => (362.0, 864.0),
            Self::L4 => (121.0, 300.0),
            Self::Mi300x => (1307.0, 5300.0),
            Self::Cpu => (0.45, 36.0),
        }
    }
}

/// The bytes of a weight.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightSize {
    /// With its share of scales.
    pub(super) bytes: f64,
    /// The type of KV that goes with it, if it says one.
    pub(super) kv_dtype: Option<KvDtype>,
    /// Where that is from.
    pub(super) source: String,
}

impl WeightSize {
    pub(super) fn of(dtype: FloatDtype) -> WeightSize {
        WeightSize {
            bytes: dtype.size_bytes() as f64,
            kv_dtype: Some(dtype.kv_dtype()),
            source: dtype.name().to_owned(),
        }
    }

    /// What the files of quantised weights hold on average.
    pub(super) fn of_files(num_bytes: u64, config: &ModelConfig) -> WeightSize {
        let parameters = ModelCost::new(&config.decoder, 1.0, KvDtype::F32).num_parameters();
        WeightSize {
            bytes: num_bytes as f64 / parameters as f64,
            kv_dtype: None,
            source: "as in the files".to_owned(),
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
    pub(super) device_name: String,
    pub(super) device: DeviceSpeed,
    pub(super) network_bytes_per_second: f64,
    pub(super) prompt: usize,
    pub(super) output: usize,
    pub(super) batch: usize,
    /// Measured, in seconds.
    pub(super) ttft: Option<f64>,
    pub(super) tpot: Option<f64>,
}

impl Inspection {
    pub(super) fn new(config: &ModelConfig, weights: WeightSize, args: &InspectArgs) -> anyhow::Result<Self> {
        let (peak_tflops, peak_gigabytes) = args.device.peaks();
        let positive = |name: &str, value: f64| {
            ensure!(value.is_finite() && value > 0.0, "{name} must be more than 0");
            Ok(value)
        };
        let device = DeviceSpeed {
            flops_per_second: positive("--flops", args.flops.unwrap_or(peak_tflops))? * 1e12,
            bytes_per_second: positive("--bandwidth", args.bandwidth.unwrap_or(peak_gigabytes))? * 1e9,
        };
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
        let kv_dtype = args.kv_dtype.or(weights.kv_dtype).unwrap_or(config.dtype.kv_dtype());
        let device_name = match (args.flops, args.bandwidth) {
            (Some(_), Some(_)) => "given".to_owned(),
            _ => {
                args.device.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
            }
        };
        Ok(Self {
            spec: config.decoder.clone(),
            cost: ModelCost::new(&config.decoder, weights.bytes, kv_dtype),
            weights,
            kv_dtype,
            context_length,
            device_name,
            device,
            network_bytes_per_second: positive("--network", args.network)? * 1e9,
            prompt,
            output,
            batch: args.batch,
            ttft: seconds("--ttft", args.ttft)?,
            tpot: seconds("--tpot", args.tpot)?,
        })
    }

    pub(super) fn prefill(&self) -> StepCost {
        self.cost.prefill(self.prompt, 0)
    }

    /// In the middle of the answer.
    pub(super) fn decode(&self) -> StepCost {
        self.cost.decode(self.batch, self.prompt + self.output / 2)
    }

    /// The smallest batch, a power of two, whose decode step computes longer than it reads; `None` if there
    /// is none below a million. KV is read per sequence: long contexts never get there.
    pub(super) fn compute_bound_batch(&self) -> Option<usize> {
        let context = self.prompt + self.output / 2;
        (0..20)
            .map(|power| 1 << power)
            .find(|&batch| self.cost.decode(batch, context).intensity() >= self.device.ridge())
    }
}
