//! `baton inspect`: what a model costs, on paper, with the formulas, and where its measured steps are under the roofline.
//!
//! Reads `config.json` or a GGUF file's metadata, and the sizes of files; of weights only a head that is stored beside a tied
//! embedding, to compare them. The numbers come from [`baton_model::cost`]; here they are only asked for and shown.

mod inspection;
mod peaks;
mod roofline;
mod text;

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use anyhow::Context;
use baton_command::{embedded_model, model_path};
use baton_kv_cache::KvDtype;
use baton_model::{Backend, ModelConfig, cost::ModelCost, gguf_files, gguf_memory_bytes, load_config};

use self::{
    inspection::{Inspection, WeightSize},
    text::bytes_text,
};

pub(crate) use inspection::InspectArgs;

/// Prints what the model costs.
pub(crate) fn run(args: InspectArgs) -> anyhow::Result<()> {
    run_to(&args, &mut io::stdout().lock())
}

/// The same, to `out`. A reader that leaves early, as `head` does, is an error.
fn run_to(args: &InspectArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let model = match &args.model {
        Some(model) => model_path(model).map(|_| model.clone())?,
        None => embedded_model::directory()?,
    };
    let config = load_config(&model)?;
    let file_bytes = weight_file_bytes(&model)?;
    let weights = match &args.dtype {
        Some(given) => given.clone(),
        None => WeightSize::in_memory(memory_bytes(&model, &config, args.device.backend())?, &config),
    };
    let inspection = Inspection::new(&config, weights, args)?;
    write!(out, "{} in {}\n\n{inspection}", config.architecture, model.display())?;
    if let Some(path) = &args.roofline {
        let title = format!("{} in {}", config.architecture, model.display());
        let picture = roofline::picture(&inspection, &title);
        fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(bytes) = file_bytes {
        let [in_files, in_memory] =
            [bytes, inspection.cost.weight_bytes()].map(|bytes| bytes_text(bytes as f64));
        writeln!(out, "\nThe weight files here hold {in_files}; in memory weights take {in_memory}.")?;
    }
    Ok(out.flush()?)
}

/// What the weights take in the memory of a backend.
fn memory_bytes(model: &Path, config: &ModelConfig, backend: Backend) -> anyhow::Result<u64> {
    if model.is_file() {
        return Ok(gguf_memory_bytes(model, backend)?);
    }
    let weights = (config.stored, config.dtype);
    Ok(ModelCost::in_memory(&config.decoder, weights, backend, KvDtype::F32).weight_bytes())
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

#[cfg(test)]
mod tests {
    use baton_model::{FloatDtype, StoredWeights};
    use clap::Parser;

    use super::{inspection::parse_dtype, peaks::Device, text::time_text, *};
    use crate::args::{Cli, Command};

    const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "torch_dtype": "bfloat16",
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192}"#;

    fn args() -> InspectArgs {
        InspectArgs {
            model: None,
            dtype: None,
            kv_dtype: None,
            device: Device::H100,
            threads: None,
            step_profile: None,
            roofline: None,
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
    fn devices_are_named_in_upper_or_lower_case() {
        for name in ["H200", "h200"] {
            let Command::Inspect(args) = Cli::parse_from(["baton", "inspect", "--device", name]).command
            else {
                panic!("not inspect")
            };
            assert_eq!(args.device, Device::H200, "{name}");
        }
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
        assert_eq!(WeightSize::in_memory(8_030_261_248, &config).bytes, 1.0);
    }

    #[test]
    fn weights_of_files_are_stored_as_the_files_say() {
        let gguf = |name: &str| {
            let file = format!("../tests/gguf/fixtures/{name}.gguf");
            load_config(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
        };
        let directory = |method: &str| {
            let method = format!("{{\"quantization_config\": {{\"quant_method\": \"{method}\"}},");
            ModelConfig::parse(Path::new("config.json"), LLAMA.replacen('{', &method, 1).as_bytes()).unwrap()
        };
        let stored = |config: &ModelConfig| WeightSize::in_memory(1, config).stored;
        assert_eq!(stored(&directory("fp8")), StoredWeights::Fp8);
        assert_eq!(stored(&gguf("llama-f32")), StoredWeights::Floats(FloatDtype::F32));
        assert_eq!(stored(&gguf("llama-f16")), StoredWeights::Floats(FloatDtype::F16));
        assert!(matches!(stored(&gguf("llama-q8_0")), StoredWeights::Integers(_)));
    }

    #[test]
    fn weights_in_memory_are_shown_beside_those_in_the_files() {
        let gguf = "../tests/gguf/fixtures/qwen3moe-q5_1.gguf";
        let model = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join(gguf));
        let mut out = Vec::new();
        run_to(&InspectArgs { model, ..args() }, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("(as held in memory)") && text.contains("; in memory weights take "), "{text}");

        let method = r#"{"quantization_config": {"quant_method": "fp8"},"#;
        let fp8 = LLAMA.replacen('{', method, 1);
        let config = ModelConfig::parse(Path::new("config.json"), fp8.as_bytes()).unwrap();
        let bytes = |backend| memory_bytes(Path::new("."), &config, backend).unwrap();
        assert_eq!(bytes(Backend::Cpu), 16_060_522_496, "in bf16");
        assert!((8_030_261_248..10_000_000_000).contains(&bytes(Backend::Cuda)));
    }

    #[test]
    fn a_directory_takes_what_the_device_holds_without_its_weights_too() {
        let gptq = |desc_act: bool| {
            format!(
                r#"{{"quantization_config": {{"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": {desc_act}}},"#
            )
        };
        let dir = tempfile::tempdir().unwrap();
        for (config, on_processors, on_gpus, kv) in [
            (LLAMA.replace("bfloat16", "float32"), 4.0, 2.0, "4 bytes (f32)"),
            (LLAMA.replace("bfloat16", "float16"), 2.0, 2.0, "2 bytes (f16)"),
            (LLAMA.to_owned(), 2.0, 2.0, "2 bytes (bf16)"),
            // 1.05 B of 8.03 B parameters are in the embedding and the head.
            (LLAMA.replacen('{', &gptq(false), 1), 0.71, 0.723, "2 bytes (bf16)"),
            (LLAMA.replacen('{', &gptq(true), 1), 1.185, 1.24, "2 bytes (bf16)"),
        ] {
            fs::write(dir.path().join("config.json"), &config).unwrap();
            for (device, expected, kv) in
                [(Device::Cpu, on_processors, kv), (Device::H100, on_gpus, "2 bytes (bf16)")]
            {
                let model = Some(dir.path().to_owned());
                // Given, so that the peaks of this processor are not measured.
                let args = InspectArgs { model, device, flops: Some(1.0), bandwidth: Some(1.0), ..args() };
                let mut out = Vec::new();
                run_to(&args, &mut out).unwrap();
                let text = String::from_utf8(out).unwrap();
                assert!(text.contains(&format!("parameters x {expected:.3} bytes")), "{expected} in\n{text}");
                assert!(text.contains(&format!("128 elements x {kv}")), "{kv} in\n{text}");
            }
        }
    }

    #[test]
    fn given_speeds_are_used() {
        let args = InspectArgs { ttft: Some(100.0), tpot: Some(10.0), output: Some(101), ..args() };
        let text = inspect(&args).unwrap();
        assert!(text.contains("as given") && text.contains("1.10 s"), "{text}");
    }

    #[test]
    fn the_name_of_a_hub_explains_how_to_get_the_model() {
        let error = run(InspectArgs { model: Some("meta-llama/Llama-3.1-8B".into()), ..args() }).unwrap_err();
        assert!(error.to_string().contains("hf download meta-llama/Llama-3.1-8B"), "{error}");
    }

    #[test]
    fn a_reader_that_leaves_ends_the_command_without_a_panic() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(run_to(&args(), &mut Closed).unwrap_err().to_string().contains("broken pipe"));
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

    #[test]
    fn measured_steps_are_beside_and_under_the_roofline() {
        let dir = tempfile::tempdir().unwrap();
        let profile = dir.path().join("steps.json");
        // 9 ms a step: 4.53 are the least for one sequence.
        let step =
            r#"{"step": {"fixed": 0.009, "per_token": 0.0, "per_context_token": 0.0, "per_pair": 0.0}}"#;
        fs::write(&profile, step).unwrap();
        let args = InspectArgs { step_profile: Some(profile), batch: 4, ..args() };
        let config = ModelConfig::parse(Path::new("config.json"), LLAMA.as_bytes()).unwrap();
        let inspection = Inspection::new(&config, WeightSize::of(config.dtype), &args).unwrap();
        let text = inspection.to_string();
        assert!(text.contains("9.00 ms   by --step-profile: 52 % of the roofline"), "{text}");
        let picture = roofline::picture(&inspection, "a <model>");
        for part in [
            "a &lt;model&gt;",
            "bf16 989 TFLOP/s",
            "1  decode of 1 x 1152 tokens",
            "2  decode of 4 x 1152 tokens",
            "4  decode of 32 x 1152 tokens",
            "(50 %, 9.00 ms)",
            "5  prefill of 1024 tokens",
        ] {
            assert!(picture.contains(part), "{part} in\n{picture}");
        }
        assert_eq!(picture.matches("class=\"found\"").count(), 5);
    }
}
