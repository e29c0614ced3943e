//! Whole models with quantised weights on the emulated device, against processors that compute in f32 with the
//! dequantised weights: few rows, many rows, and both in turn.

use std::fs;
use std::path::Path;

use baton_checkpoint::{DeviceModel, LoadOptions, load_for_device};
use baton_cuda_emulator::session::Threads;
use baton_cuda_emulator::test_device::{self, TestDevice};
use baton_cuda_kernels::device::Fp8Products;
use baton_kv_cache::{KvDtype, e4m3};
use baton_model_cpu::CpuModel;
use baton_model_cuda::multiply::FEW_ROWS;
use baton_model_cuda::weights::DeviceWeightBytes;
use baton_model_spec::{Activations, IntegerFormat, IntegerRow, IntegerWidth, Quantisation};
use baton_model_testing::noise;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use tempfile::TempDir;

use super::whole::{Pair, TOLERANCE, check_routed, fixtures, of_side, on_device};

/// Tokens of a prompt with many rows.
pub(super) const MANY: usize = FEW_ROWS + 6;

/// A suffix, and the tensor that is stored under it.
pub(super) type Stored = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn options() -> LoadOptions {
    LoadOptions { kv_dtype: Some(KvDtype::Bf16), block_size: 8, threads: Some(2), ..LoadOptions::default() }
}

pub(super) fn loaded(model: &Path, quantise: Option<Quantisation>) -> DeviceModel {
    load_for_device(model, &LoadOptions { quantise, ..options() }).unwrap()
}

fn loaded_on_cpu(model: &Path) -> CpuModel {
    let options = LoadOptions { activations: Activations::F32, ..options() };
    baton_model_cpu::load(model, &options, &mut |_| {}).unwrap()
}

fn pair(what: &str, cpu: &Path, device: &Path, quantise: Option<Quantisation>, fp8: Fp8Products) -> Pair {
    let cpu = loaded_on_cpu(cpu);
    Pair::of(what.into(), &cpu, loaded(device, quantise), MANY, fp8)
}

/// Many rows at once, then a few rows after them, like drafts that are verified.
fn check(pair: &mut Pair) {
    let tokens = pair.prompt(MANY + 3, 1);
    let place = pair.place(tokens.len());
    pair.run("many at once", &[(&tokens[..MANY], 0, &place, 1)]);
    pair.run("few behind them", &[(&tokens[MANY..], MANY, &place, 3)]);
    println!("{}: off by {:.4} at most", pair.what, pair.largest_error);
}

/// The same, and a prompt in chunks, batches of few and of many rows, and repeated steps.
fn check_every_way(pair: &mut Pair) {
    check(pair);
    let tokens = pair.prompt(MANY, 4);
    let place = pair.place(MANY);
    let expected = pair.run("many at once again", &[(&tokens, 0, &place, 1)]);
    let chunked = pair.place(MANY);
    let mut last = vec![];
    for (start_idx, end) in [(0, 17), (17, MANY - 1), (MANY - 1, MANY)] {
        let chunk = [(&tokens[start_idx..end], start_idx, &chunked, 1)];
        last = pair.device.run(of_side(&chunk, 1)).swap_remove(0);
    }
    pair.assert_near(&last, &expected, "in chunks of few");
    let (other, third) = (pair.prompt(40, 2), pair.prompt(31, 3));
    let [other_place, third_place] = [pair.place(40), pair.place(31)];
    pair.run("many of two", &[(&other[..39], 0, &other_place, 1), (&third[..30], 0, &third_place, 1)]);
    for _ in 0..2 {
        let decoded = [(&other[39..], 39, &other_place, 1), (&third[30..], 30, &third_place, 1)];
        pair.run("decoding", &decoded);
    }
}

fn write(config: &serde_json::Value, tensors: &[(String, Dtype, Vec<usize>, Vec<u8>)]) -> TempDir {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn floats_of(view: &TensorView<'_>) -> Vec<f32> {
    match view.dtype() {
        Dtype::F32 => {
            view.data().chunks_exact(4).map(|w| f32::from_le_bytes(w.try_into().unwrap())).collect()
        }
        _ => view.data().chunks_exact(2).map(|h| half::bf16::from_le_bytes([h[0], h[1]]).to_f32()).collect(),
    }
}

/// A fixture whose weights `--quantize` has quantised.
fn rounded(name: &str, format: IntegerFormat) -> TempDir {
    let from = fixtures().join(name);
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let is_tied = config["tie_word_embeddings"] == true;
    let mut tensors = vec![];
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let mut values = floats_of(&view);
        let is_head = name == "lm_head.weight" || (is_tied && name.ends_with("embed_tokens.weight"));
        let is_rounded = name.contains(".layers.") && !name.ends_with(".gate.weight");
        if view.shape().len() == 2 && (is_head || is_rounded) {
            let width = if is_head { IntegerWidth::Eight } else { format.width };
            let format = IntegerFormat { width, ..format };
            for row in values.chunks_exact_mut(view.shape()[1]) {
                let rounded: Vec<f32> = IntegerRow::quantise(row, format).values(format).collect();
                row.copy_from_slice(&rounded);
            }
        }
        tensors.push((name.to_owned(), Dtype::F32, view.shape().to_vec(), bytes_of(&values)));
    }
    write(&config, &tensors)
}

/// A random Llama. `store` writes the matrices of its layers.
pub(super) fn llama(
    intermediate: usize,
    quantization_config: serde_json::Value,
    store: impl Fn(&[f32], usize, usize) -> Vec<Stored>,
) -> TempDir {
    let (hidden, head_dim, heads, kv_heads, vocab, layers) = (128, 32, 4, 2, 256, 2);
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocab, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false,
        "quantization_config": quantization_config,
    });
    let mut tensors = vec![];
    let plain = |name: &str, rows: usize, cols: usize, seed: u64, size: f32| {
        let values: Vec<f32> = noise(seed, rows * cols).iter().map(|x| x * size).collect();
        (name.to_owned(), Dtype::F32, vec![rows, cols], bytes_of(&values))
    };
    tensors.push(plain("model.embed_tokens.weight", vocab, hidden, 1, 1.0));
    tensors.push(plain("lm_head.weight", vocab, hidden, 2, 0.3));
    let norm = |name: String| (name, Dtype::F32, vec![hidden], bytes_of(&vec![1.0; hidden]));
    tensors.push(norm("model.norm.weight".into()));
    for layer in 0..layers {
        let prefix = format!("model.layers.{layer}.");
        tensors.push(norm(format!("{prefix}input_layernorm.weight")));
        tensors.push(norm(format!("{prefix}post_attention_layernorm.weight")));
        let (query, kv) = (heads * head_dim, kv_heads * head_dim);
        for (idx, (name, rows, cols)) in [
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ]
        .into_iter()
        .enumerate()
        {
            // The tensors of one product have different magnitudes, and so have rows and groups.
            let size = (idx + 1) as f32 / 24.0;
            let mut values = noise((10 * layer + idx + 3) as u64, rows * cols);
            for (place, value) in values.iter_mut().enumerate() {
                let (row, col) = (place / cols, place % cols);
                *value = *value * size * (0.5 + (row % 5) as f32 / 4.0) + (col / 32 % 3) as f32 / 60.0;
            }
            let stored = store(&values, rows, cols).into_iter();
            let named =
                |(suffix, dtype, shape, bytes)| (format!("{prefix}{name}.{suffix}"), dtype, shape, bytes);
            tensors.extend(stored.map(named));
        }
    }
    write(&config, &tensors)
}

/// Integers of `bits` bits in groups. With zeros, the levels span the least to the largest number.
pub(super) fn integers(
    values: &[f32],
    rows: usize,
    cols: usize,
    bits: u32,
    group: usize,
    has_zeros: bool,
) -> Vec<Stored> {
    let (top, middle) = ((1 << bits) - 1, 1 << (bits - 1));
    let (mut levels, mut scales, mut zeros) = (vec![], vec![], vec![]);
    for numbers in values.chunks_exact(group) {
        let (least, most) =
            numbers.iter().fold((0.0f32, 0.0f32), |(least, most), x| (least.min(*x), most.max(*x)));
        let scale =
            if has_zeros { (most - least) / top as f32 } else { most.max(-least) / (middle - 1) as f32 };
        let zero = if has_zeros { (-least / scale).round() as i32 } else { middle };
        levels.extend(numbers.iter().map(|x| ((x / scale).round() as i32 + zero).clamp(0, top)));
        scales.push(scale);
        zeros.push((zero - middle) as i8 as u8);
    }
    let groups = vec![rows, cols / group];
    let mut stored = match bits {
        8 => {
            let bytes = levels.iter().map(|level| (level - 128) as i8 as u8).collect();
            vec![("weight", Dtype::I8, vec![rows, cols], bytes)]
        }
        _ => {
            let word = |eight: &[i32]| eight.iter().rev().fold(0u32, |word, level| word << 4 | *level as u32);
            let words: Vec<u32> = levels.chunks_exact(8).map(word).collect();
            vec![("weight_packed", Dtype::I32, vec![rows, cols / 8], bytemuck::cast_slice(&words).to_vec())]
        }
    };
    stored.push(("weight_scale", Dtype::F32, groups.clone(), bytes_of(&scales)));
    if has_zeros {
        stored.push(("weight_zero_point", Dtype::I8, groups, zeros));
    }
    stored
}

/// E4M3 with a scale for each block of rows and columns.
pub(super) fn fp8(
    values: &[f32],
    rows: usize,
    cols: usize,
    [block_rows, block_cols]: [usize; 2],
) -> Vec<Stored> {
    let shape = [rows.div_ceil(block_rows), cols.div_ceil(block_cols)];
    let mut scales = vec![0.0f32; shape[0] * shape[1]];
    let block = |place: usize| place / cols / block_rows * shape[1] + place % cols / block_cols;
    for (place, value) in values.iter().enumerate() {
        scales[block(place)] = scales[block(place)].max(value.abs() / 448.0);
    }
    let codes = values
        .iter()
        .enumerate()
        .map(|(place, value)| e4m3::from_f32(value / scales[block(place)]))
        .collect();
    let name = if block_cols < cols { "weight_scale_inv" } else { "weight_scale" };
    vec![
        ("weight", Dtype::F8_E4M3, vec![rows, cols], codes),
        (name, Dtype::F32, shape.to_vec(), bytes_of(&scales)),
    ]
}

#[test]
fn quantising_for_a_device_is_as_for_processors() {
    for (name, quantise, tolerance) in [
        ("llama", "int8", TOLERANCE),
        // After this many tokens, the same numbers in bf16 are as far from the reference.
        ("qwen2", "int4", 2.0 * TOLERANCE),
        ("phi3", "int4:64", TOLERANCE),
    ] {
        let quantisation: Quantisation = quantise.parse().unwrap();
        let plain = rounded(name, quantisation.format());
        let fixture = fixtures().join(name);
        let what = format!("{name} in {quantise}");
        let mut pair = pair(&what, plain.path(), &fixture, Some(quantisation), Fp8Products::None);
        pair.tolerance = tolerance;
        check(&mut pair);
    }
}

#[test]
fn integers_of_files_are_multiplied_directly() {
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    for (bits, group, has_zeros) in [(8, 0, true), (4, 32, true), (4, 64, false)] {
        let group_of = |cols| if group == 0 { cols } else { group };
        let dir = llama(192, config.clone(), |values, rows, cols| {
            integers(values, rows, cols, bits, group_of(cols), has_zeros)
        });
        let what = format!("{bits} bits, groups of {group}, zeros {has_zeros}");
        let mut pair = pair(&what, dir.path(), dir.path(), None, Fp8Products::None);
        if group == 32 { check_every_way(&mut pair) } else { check(&mut pair) }
    }
}

#[test]
fn blocks_of_gguf_are_multiplied_directly() {
    for name in ["llama-q4_0", "gemma3-q8_0"] {
        let path = fixtures().join(format!("../../gguf/fixtures/{name}.gguf"));
        check(&mut pair(name, &path, &path, None, Fp8Products::None));
    }
}

/// Few rows, and so many that the experts' weights are widened. With the same numbers in bf16, one row in nine of the
/// first model is far off, because rows take other experts.
#[test]
fn experts_can_have_quantised_weights() {
    for name in ["mixtral-q8_0", "qwen3moe-q5_1"] {
        let path = fixtures().join(format!("../../gguf/fixtures/{name}.gguf"));
        let mut pair = pair(name, &path, &path, None, Fp8Products::None);
        check_routed(&mut pair, 2, 30, 0.2);
    }
    let quantisation: Quantisation = "int4".parse().unwrap();
    let plain = rounded("mixtral", quantisation.format());
    let fixture = fixtures().join("mixtral");
    // Two of four experts for each row.
    let many = 2 * FEW_ROWS + 2;
    let cpu = loaded_on_cpu(plain.path());
    let device = loaded(&fixture, Some(quantisation));
    let mut pair = Pair::of("mixtral in int4".into(), &cpu, device, many, Fp8Products::None);
    check_routed(&mut pair, 1, 30, 0.2);
    check_routed(&mut pair, 1, many, 0.2);
}

fn can_be(products: Fp8Products) -> bool {
    TestDevice::new(&[], 0, Threads::Shuffled).limit_fp8(products)
}

/// Relative to the largest logit, with activations quantised to E4M3: four significant bits are off by 2^-4 at most
/// and by 2^-5.5 on average, independently. So is a sum of their products, once for each of the 8 products of two
/// layers: about 0.06 in all, and three times that for the worst of 256 logits.
const TOLERANCE_OF_ROUNDED: f32 = 0.2;

/// Launches and products of a prompt with many rows.
fn launches_of_many(pair: &mut Pair) -> usize {
    let tokens = pair.prompt(MANY, 5);
    let place = pair.place(MANY);
    let count = |pair: &mut Pair| pair.device.executor.device().counts().num_launches;
    let before = count(pair);
    pair.device.run(of_side(&[(&tokens, 0, &place, 1)], 1));
    count(pair) - before
}

#[test]
fn fp8_is_multiplied_with_any_scales() {
    let config = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 64]});
    let large = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    use Fp8Products::{Blocks, None, Plain, Scaled};

    // A scale for each row, for the whole matrix, or for each block. fp8 products support the first two, and blocks
    // of one size.
    for (blocks, ways) in [
        ([1, 0], &[None, Plain, Scaled, Blocks][..]),
        ([usize::MAX, 0], &[Scaled]),
        ([32, 64], &[Scaled, Blocks]),
        ([128, 128], &[Scaled, Blocks]),
    ] {
        let is_large = blocks[0] == 128;
        let config = if is_large { &large } else { &config };
        let dir = llama(if is_large { 384 } else { 192 }, config.clone(), |values, rows, cols| {
            let block = [blocks[0].min(rows), if blocks[1] == 0 { cols } else { blocks[1] }];
            fp8(values, rows, cols, block)
        });
        for &products in ways {
            if !can_be(products) {
                println!("SKIPPED: the device does not multiply fp8 as {products:?}");
                continue;
            }
            let what = format!("fp8, scales of {blocks:?}, {products:?}");
            let mut pair = pair(&what, dir.path(), dir.path(), Option::None, products);
            if products != None && blocks[1] == 0 || products == Blocks && is_large {
                pair.tolerance = TOLERANCE_OF_ROUNDED;
            }
            check(&mut pair);
            // Norms and gates quantise the activations of three of the four products of a layer.
            let are_scaled = products == Scaled && blocks[1] == 0 || products == Blocks && is_large;
            if are_scaled && test_device::ordinal().is_none() {
                let (num_launches, num_layers) = (launches_of_many(&mut pair), pair.num_layers());
                println!("{what}: {num_launches} launches for {num_layers} layers");
                assert!(num_launches <= 10 * num_layers + 6, "{what}");
            }
        }
    }
}

#[test]
fn nan_in_fp8_stays_nan_on_a_device() {
    let config = json!({"quant_method": "fp8", "fmt": "e4m3"});
    let dir = llama(192, config, |values, rows, cols| {
        let mut stored = fp8(values, rows, cols, [1, cols]);
        stored[0].3[5] = 0x7f;
        stored
    });
    let mut pair = pair("NaN", dir.path(), dir.path(), None, Fp8Products::None);
    let tokens = pair.prompt(9, 1);
    let place = pair.place(9);
    let logits = pair.device.run(of_side(&[(&tokens, 0, &place, 1)], 1));
    assert!(logits[0].iter().all(|logit| logit.is_nan()));
}

#[test]
fn memory_matches_the_form() {
    let bytes = |dir: &Path, quantise: Option<&str>| -> DeviceWeightBytes {
        let quantise = quantise.map(|text| text.parse().unwrap());
        let model = loaded(dir, quantise);
        on_device(model, 1, Fp8Products::None).unwrap().weight_bytes()
    };
    // Numbers in the layers, the head and the embedding.
    let (layers, head) = (2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 200 * 128), 256 * 128);
    let none = DeviceWeightBytes::default();
    let plain = llama(200, json!(null), |values, rows, cols| {
        vec![("weight", Dtype::F32, vec![rows, cols], bytes_of(&values[..rows * cols]))]
    });
    let all = bytes(plain.path(), None);
    assert_eq!(all, DeviceWeightBytes { bf16: (layers + 2 * head) * 2, ..none });
    // Rows of 200 are padded to steps of 128 numbers. They have a scale for each 32 numbers or the rest.
    let down = |row: u64| 2 * 128 * row;
    let int4 = bytes(plain.path(), Some("int4"));
    let others = layers - down(200);
    let expected = DeviceWeightBytes {
        bf16: head * 2,
        int8: head + head / 32 * 4,
        int4: others / 2 + others / 32 * 4 + down(128 + 7 * 4),
        ..none
    };
    assert_eq!(int4, expected);
    // There is no fp8 kernel for rows of 200.
    let config = json!({"quant_method": "fp8", "fmt": "e4m3"});
    let in_fp8 = llama(200, config, |values, rows, cols| fp8(values, rows, cols, [1, cols]));
    let widened = down(200 * 2);
    let scales = 2 * (128 + 2 * 64 + 128 + 2 * 200) * 4;
    let expected = DeviceWeightBytes { bf16: 2 * head * 2 + widened, fp8: others + scales, widened, ..none };
    let found = bytes(in_fp8.path(), None);
    assert_eq!((found, found.total()), (expected, expected.bf16 + expected.fp8));
}
