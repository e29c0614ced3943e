//! `baton inspect`: what a model costs, on paper, with the formulas.
//!
//! Reads `config.json` or a GGUF file's metadata, and the sizes of files, never a weight. The numbers come from
//! [`baton_model::cost`]; here they are only asked for and printed.

mod text;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use baton_kv_cache::KvDtype;
use baton_model::{
    DecoderSpec, FloatDtype, ModelConfig, Quantisation,
    cost::{DeviceSpeed, ModelCost, StepCost},
    gguf_files, load_config,
};
use clap::{Args, ValueEnum};

use self::text::bytes_text;
use crate::{args::parse_kv_dtype, embedded_model};

const NOTES: &str = "\
The times are the least that the device's peak numbers allow (its roofline): no kernel reaches them, and
no time is counted for the network, for queues or for sampling.";

/// Which model, which device, which request.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct InspectArgs {
    /// Directory of a Hugging Face model, of which config.json is enough, or a .gguf file. Without it: the tiny
    /// model of this program.
    pub(crate) model: Option<PathBuf>,
    /// Type of the weights: f32, f16, bf16, or int8 and int4 as for --quantize. Default: what the files hold, or as the
    /// model says.
    #[arg(long, value_name = "TYPE", value_parser = parse_dtype)]
    pub(crate) dtype: Option<WeightSize>,
    /// Type of KV elements: f32, f16, bf16, fp8 or int8. Default: that of --dtype, if it has one, or as the model says.
    #[arg(long, value_name = "TYPE", value_parser = parse_kv_dtype)]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Peak numbers of a device (dense bf16).
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
    /// Tokens of the answer. Default: 256, or what is left of a smaller context.
    #[arg(long, value_name = "TOKENS", help_heading = "Request")]
    pub(crate) output: Option<usize>,
    /// Sequences that decode together.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Request")]
    pub(crate) batch: usize,
    /// A measured time to the first token, in milliseconds, instead of the roofline's.
    #[arg(long, value_name = "MS", help_heading = "Request")]
    pub(crate) ttft: Option<f64>,
    /// A measured time per output token, in milliseconds, instead of the roofline's.
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
    fn peaks(self) -> (f64, f64) {
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

/// How much a weight takes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WeightSize {
    /// With its share of scales.
    bytes: f64,
    /// The type of KV that goes with it, if it says one.
    kv_dtype: Option<KvDtype>,
    /// Where that is from.
    source: String,
}

impl WeightSize {
    fn of(dtype: FloatDtype) -> WeightSize {
        WeightSize {
            bytes: dtype.size_bytes() as f64,
            kv_dtype: Some(dtype.kv_dtype()),
            source: dtype.name().to_owned(),
        }
    }

    /// What the files of quantised weights hold on average.
    fn of_files(num_bytes: u64, config: &ModelConfig) -> WeightSize {
        let parameters = ModelCost::new(&config.decoder, 1.0, KvDtype::F32).num_parameters();
        WeightSize {
            bytes: num_bytes as f64 / parameters as f64,
            kv_dtype: None,
            source: "as in the files".to_owned(),
        }
    }
}

fn parse_dtype(name: &str) -> Result<WeightSize, String> {
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

/// Prints what the model costs.
pub(crate) fn run(args: InspectArgs) -> anyhow::Result<()> {
    let model = match &args.model {
        Some(model) => model.clone(),
        None => embedded_model::directory()?,
    };
    let config = load_config(&model)?;
    let file_bytes = weight_file_bytes(&model)?;
    let weights = match (&args.dtype, file_bytes) {
        (Some(given), _) => given.clone(),
        (None, Some(bytes)) if model.is_file() || config.is_quantised() => {
            WeightSize::of_files(bytes, &config)
        }
        _ => WeightSize::of(config.dtype),
    };
    let inspection = Inspection::new(&config, weights, &args)?;
    print!("{} in {}\n\n{inspection}", config.architecture, model.display());
    if let Some(bytes) = file_bytes {
        println!("\nThe weight files here hold {}.", bytes_text(bytes as f64));
    }
    Ok(())
}

/// `None` if there are none.
fn weight_file_bytes(model: &Path) -> anyhow::Result<Option<u64>> {
    if !model.is_dir() {
        let sizes = gguf_files(model)?.into_iter().map(|path| Ok(fs::metadata(path)?.len()));
        return sizes.sum::<anyhow::Result<u64>>().map(Some);
    }
    let entries = fs::read_dir(model).with_context(|| format!("cannot list {}", model.display()))?;
    let mut total = None;
    for entry in entries {
        let entry = entry?;
        if entry.path().extension().is_some_and(|extension| extension == "safetensors") {
            *total.get_or_insert(0) += fs::metadata(entry.path())?.len();
        }
    }
    Ok(total)
}

/// Everything that is printed.
#[derive(Debug)]
struct Inspection {
    spec: DecoderSpec,
    cost: ModelCost,
    weights: WeightSize,
    kv_dtype: KvDtype,
    context_length: usize,
    device_name: String,
    device: DeviceSpeed,
    network_bytes_per_second: f64,
    prompt: usize,
    output: usize,
    batch: usize,
    /// Measured, in seconds.
    ttft: Option<f64>,
    tpot: Option<f64>,
}

impl Inspection {
    fn new(config: &ModelConfig, weights: WeightSize, args: &InspectArgs) -> anyhow::Result<Self> {
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

    fn prefill(&self) -> StepCost {
        self.cost.prefill(self.prompt, 0)
    }

    /// In the middle of the answer.
    fn decode(&self) -> StepCost {
        self.cost.decode(self.batch, self.prompt + self.output / 2)
    }

    /// The smallest batch, a power of two, whose decode step computes longer than it reads; `None` if there
    /// is none below a million. KV is read per sequence: long contexts never get there.
    fn compute_bound_batch(&self) -> Option<usize> {
        let context = self.prompt + self.output / 2;
        (0..20)
            .map(|power| 1 << power)
            .find(|&batch| self.cost.decode(batch, context).intensity() >= self.device.ridge())
    }
}

#[cfg(test)]
mod tests {
    use super::{text::time_text, *};

    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "torch_dtype": "bfloat16",
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}"#;

    fn args() -> InspectArgs {
        InspectArgs {
            model: None,
            dtype: None,
            kv_dtype: None,
            device: Device::H100,
            flops: None,
            bandwidth: None,
            network: 12.5,
            prompt: None,
            output: None,
            batch: 1,
            ttft: None,
            tpot: None,
        }
    }

    fn inspect(args: &InspectArgs) -> anyhow::Result<String> {
        let config = ModelConfig::parse(Path::new("config.json"), LLAMA.as_bytes())?;
        let weights = args.dtype.clone().unwrap_or_else(|| WeightSize::of(config.dtype));
        Ok(Inspection::new(&config, weights, args)?.to_string())
    }

    #[test]
    fn llama_8b_on_an_h100() {
        let text = inspect(&args()).unwrap();
        for line in [
            "8.03 B",
            "16.1 GB",
            "131 kB",
            "1.07 GB",
            "compute-bound here",
            "memory-bound here",
            "TTFT + TPOT x (256 - 1)",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        // 15 GB of weights (not the embedding) and 151 MB of KV at 3350 GB/s.
        assert!(text.contains("4.53 ms"), "{text}");
    }

    #[test]
    fn scales_of_8_bit_kv_are_counted() {
        let text = inspect(&InspectArgs { kv_dtype: Some(KvDtype::Fp8), ..args() }).unwrap();
        assert!(text.contains("66.6 kB") && text.contains("128 elements x 1 byte + 2 bytes"), "{text}");
    }

    #[test]
    fn kv_is_of_the_type_that_weights_are_given() {
        let of = |args: InspectArgs| inspect(&args).unwrap();
        let wide = || InspectArgs { dtype: Some(parse_dtype("f32").unwrap()), ..args() };
        assert!(of(wide()).contains("128 elements x 4 bytes (f32)"));
        assert!(of(InspectArgs { kv_dtype: Some(KvDtype::F16), ..wide() }).contains("x 2 bytes (f16)"));
        let rounded = InspectArgs { dtype: Some(parse_dtype("int4").unwrap()), ..args() };
        assert!(of(rounded).contains("x 2 bytes (bf16)"));
    }

    #[test]
    fn scales_of_quantised_weights_are_counted() {
        let given = |name| InspectArgs { dtype: Some(parse_dtype(name).unwrap()), ..args() };
        let text = inspect(&given("int4")).unwrap();
        assert!(text.contains("4.52 GB") && text.contains("parameters x 0.562 bytes"), "{text}");
        assert!(inspect(&given("int8")).unwrap().contains("8.16 GB"));
        assert!(inspect(&given("int8:32")).unwrap().contains("parameters x 1.062 bytes"));
        assert!(parse_dtype("int2").is_err());
        let config = ModelConfig::parse(Path::new("config.json"), LLAMA.as_bytes()).unwrap();
        assert_eq!(WeightSize::of_files(8_030_261_248, &config).bytes, 1.0);
    }

    #[test]
    fn given_speeds_are_used() {
        let args = InspectArgs { ttft: Some(100.0), tpot: Some(10.0), output: Some(101), ..args() };
        let text = inspect(&args).unwrap();
        assert!(text.contains("as given") && text.contains("1.10 s"), "{text}");
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let cases = [
            (InspectArgs { prompt: Some(9000), ..args() }, "--prompt 9000"),
            (InspectArgs { prompt: Some(8000), output: Some(1000), ..args() }, "--output 1000"),
            (InspectArgs { flops: Some(0.0), ..args() }, "--flops"),
            (InspectArgs { bandwidth: Some(f64::NAN), ..args() }, "--bandwidth"),
            (InspectArgs { batch: 0, ..args() }, "--batch"),
            (InspectArgs { tpot: Some(-1.0), ..args() }, "--tpot"),
        ];
        for (args, name) in cases {
            let error = inspect(&args).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        let cases = [
            (0.0, "0 B"),
            (999.0, "999 B"),
            (1000.0, "1.00 kB"),
            (999_600.0, "1.00 MB"),
            (1.235e10, "12.3 GB"),
            (2.5e17, "250000 TB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(bytes_text(bytes), expected);
        }
        assert_eq!(time_text(0.000_045_3), "45.3 us");
        assert_eq!(time_text(0.0453), "45.3 ms");
        assert_eq!(time_text(75.0), "75.00 s");
    }
}
