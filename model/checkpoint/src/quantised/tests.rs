use std::path::Path;

use baton_model_spec::fields::{Fields, parse_object};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::*;
use crate::checkpoint::Checkpoint;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/quantised/fixtures");

/// The fixtures of `record.py`; for each the group size that kernels support, if any, and whether it has zero points.
const CASES: &[(&str, Option<(usize, bool)>)] = &[
    ("awq", Some((32, true))),
    ("bytes-one", Some((128, false))),
    ("bytes-rows", Some((128, false))),
    ("bytes-zeros", Some((128, true))),
    ("fp8-blocks", None),
    ("fp8-one", None),
    ("fp8-rows", None),
    ("gptq-4", Some((32, true))),
    ("gptq-4-act-order", None),
    ("gptq-4-v2", None),
    ("gptq-8-rows", Some((128, false))),
    ("packed-4-act-order", None),
    ("packed-4-groups", Some((32, false))),
    ("packed-4-rows", Some((128, false))),
    ("packed-4-zeros", Some((32, true))),
    ("packed-8-rows", Some((128, false))),
];

fn quantisation(config: &str) -> Result<Option<StoredQuantisation>, LoadError> {
    let path = Path::new("config.json");
    let object = parse_object(path, format!("{{\"quantization_config\": {config}}}").as_bytes())?;
    StoredQuantisation::read(&Fields::new(path, &object))
}

/// The fixture as a model directory, its quantisation method, and its numbers row by row.
fn fixture(name: &str) -> (tempfile::TempDir, StoredQuantisation, Vec<Vec<f32>>) {
    let bytes = std::fs::read(Path::new(FIXTURES).join(format!("{name}.safetensors"))).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let config = &metadata.metadata().as_ref().unwrap()["quantization_config"];
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let expected = tensors.tensor("expected").unwrap();
    let words = expected.data().chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
    let values: Vec<f32> = words.collect();
    let rows = values.chunks_exact(expected.shape()[1]).map(<[f32]>::to_vec).collect();
    (dir, quantisation(config).unwrap().unwrap(), rows)
}

#[test]
fn numbers_and_integers_equal_those_that_were_packed() {
    let mut found: Vec<String> = std::fs::read_dir(FIXTURES)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap().replace(".safetensors", ""))
        .collect();
    found.sort();
    assert_eq!(found, CASES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    for (name, groups) in CASES {
        let (dir, quantisation, expected) = fixture(name);
        let shape = [expected.len(), expected[0].len()];
        let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
        let matrix = checkpoint.take("layer.weight", &shape).unwrap();
        let is_noise = |tensor: &str| tensor == "expected" || is_about_activations(tensor);
        checkpoint.refuse_rest("layer", is_noise).unwrap();
        let format = matrix.integer_format();
        assert_eq!(format.map(|format| (format.group, format.has_zeros)), *groups, "{name}");
        for (row_idx, expected) in expected.iter().enumerate() {
            assert_eq!(matrix.row_values(row_idx).collect::<Vec<_>>(), *expected, "{name} {row_idx}");
            let Some(format) = format else { continue };
            let row = matrix.integer_row(row_idx);
            assert_eq!(row.values(format).collect::<Vec<_>>(), *expected, "{name} {row_idx} as integers");
            let num_groups = expected.len().div_ceil(format.group);
            assert_eq!(row.scales.len(), num_groups, "{name}");
            assert_eq!(row.zeros.len(), if format.has_zeros { num_groups } else { 0 }, "{name}");
        }
    }
}

#[test]
fn parts_have_the_numbers_of_the_whole() {
    for (name, groups) in CASES {
        let (dir, quantisation, expected) = fixture(name);
        let (rows, cols) = (expected.len(), expected[0].len());
        let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
        let matrix = checkpoint.take("layer.weight", &[rows, cols]).unwrap();
        let group = groups.map_or(32, |(group, _)| group);
        let ends =
            [(0, cols), (0, 3), (5, cols), (5, 40), (group.min(cols), cols), (0, group.min(cols)), (32, 64)];
        for (start, end) in ends.into_iter().filter(|(start, end)| start <= end && *end <= cols) {
            let part = matrix.rows_at(3..rows).columns_at(start..end);
            for (row_idx, expected) in expected[3..].iter().enumerate() {
                let found: Vec<f32> = part.row_values(row_idx).collect();
                assert_eq!(found, expected[start..end], "{name} {row_idx}, {start} to {end}");
                let Some(format) = part.integer_format() else { continue };
                let is_inside = |col: usize| !col.is_multiple_of(format.group) && col != cols;
                // A row with a single scale may be cut anywhere.
                let is_split =
                    !name.contains("rows") && !name.contains("bytes") && (is_inside(start) || is_inside(end));
                assert_eq!(part.splits(format).is_some(), is_split, "{name}, {start} to {end}");
                if !is_split {
                    let row = part.integer_row(row_idx);
                    assert_eq!(
                        row.values(format).collect::<Vec<_>>(),
                        expected[start..end],
                        "{name} as integers"
                    );
                    assert_eq!(row.scales.len(), (end - start).div_ceil(format.group));
                }
            }
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let check = |name: &str, shape: [usize; 2], expected: &str| {
        let (dir, quantisation, _) = fixture(name);
        let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
        let error = checkpoint.take("layer.weight", &shape).unwrap_err().to_string();
        let error = error.replace(&format!("{}/", dir.path().display()), "");
        assert_eq!(error, format!("model.safetensors: tensor layer.{expected}"));
    };
    check("awq", [16, 64], "qweight has shape [64, 3], expected [64, 2]");
    check("awq", [24, 32], "qweight has shape [64, 3], expected [32, 3]");
    check("gptq-4", [24, 48], "qweight has shape [8, 24], expected [6, 24]");
    check("packed-4-groups", [24, 60], "weight_shape has shape [24, 64], expected [24, 60]");
    check("packed-4-rows", [24, 58], "weight_shape has shape [24, 60], expected [24, 58]");
    check("bytes-rows", [23, 64], "weight has shape [24, 64], expected [23, 64]");
    check("fp8-blocks", [24, 65], "weight has shape [24, 64], expected [24, 65]");
    let (dir, _, _) = fixture("awq");
    let quantisation = StoredQuantisation::Gptq { zero_offset: 1, group: None };
    let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
    let error = checkpoint.take("layer.weight", &[24, 64]).unwrap_err().to_string();
    assert!(error.ends_with("tensor layer.qweight has shape [64, 3], expected [8, 24]"), "{error}");
}

/// A directory with a GPTQ layer of eight rows. The numbers of group `g` are `g + 1`.
fn gptq_of_groups(num_groups: usize, cols: usize) -> tempfile::TempDir {
    let scales: Vec<f32> = (0..num_groups).flat_map(|group| [(group + 1) as f32; 8]).collect();
    let bytes = |words: Vec<u32>| -> Vec<u8> { words.into_iter().flat_map(u32::to_le_bytes).collect() };
    let tensors = [
        ("layer.qweight", Dtype::I32, vec![cols / 8, 8], bytes(vec![0x9999_9999; cols])),
        ("layer.qzeros", Dtype::I32, vec![num_groups, 1], bytes(vec![0x7777_7777; num_groups])),
        (
            "layer.scales",
            Dtype::F32,
            vec![num_groups, 8],
            bytes(scales.into_iter().map(f32::to_bits).collect()),
        ),
    ];
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    dir
}

#[test]
fn groups_have_the_stated_size_and_the_last_may_be_short() {
    let take = |num_groups: usize, cols: usize, group: Option<usize>| {
        let dir = gptq_of_groups(num_groups, cols);
        let quantisation = StoredQuantisation::Gptq { zero_offset: 1, group };
        let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
        let matrix = checkpoint.take("layer.weight", &[8, cols]);
        matrix.map_err(|error| error.to_string().replace(&format!("{}/", dir.path().display()), ""))
    };
    // As SmolLM2-135M has 576 columns; two groups could be halves; a module with a size of its own; none stated.
    for (num_groups, cols, stated, size) in
        [(5, 576, Some(128), 128), (2, 96, Some(64), 64), (3, 96, Some(64), 32), (3, 96, None, 32)]
    {
        let matrix = take(num_groups, cols, stated).unwrap();
        let expected: Vec<f32> = (0..cols).map(|k| (k / size + 1) as f32).collect();
        let format = matrix.integer_format().unwrap();
        assert_eq!(format.group, size);
        for row_idx in [0, 7] {
            assert_eq!(matrix.row_values(row_idx).collect::<Vec<_>>(), expected, "{cols} by {stated:?}");
            let row = matrix.integer_row(row_idx);
            assert_eq!(row.scales.len(), num_groups);
            assert_eq!(row.values(format).collect::<Vec<_>>(), expected, "{cols} by {stated:?}, as integers");
        }
    }
    let refusal = take(5, 576, Some(64)).unwrap_err();
    let expected = "tensor layer.scales has scales of 5 groups for 576 columns, expected 9 of 64";
    assert_eq!(refusal, format!("model.safetensors: {expected}"));
}

/// As auto_round_extension/torch/qlinear_torch_zp.py packs: the zero point of symmetric 4 bits is 8, and stored as 7.
#[test]
fn the_middle_level_of_auto_round_is_zero() {
    // Inputs 0 to 15 have levels 0 to 15, and so on, for each of 8 outputs.
    let words = [0x7654_3210_u32, 0xfedc_ba98, 0x7654_3210, 0xfedc_ba98];
    let levels: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes().repeat(8)).collect();
    let zeros = 0x7777_7777_u32.to_le_bytes();
    let scales: Vec<u8> = half::f16::from_f32(0.5).to_le_bytes().repeat(8);
    let view = |dtype, shape: [usize; 2], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let tensors = [
        ("layer.qweight", view(Dtype::I32, [4, 8], levels.as_slice())),
        ("layer.qzeros", view(Dtype::I32, [1, 1], zeros.as_slice())),
        ("layer.scales", view(Dtype::F16, [1, 8], scales.as_slice())),
    ];
    let dir = tempfile::tempdir().unwrap();
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();

    let config = r#"{"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
                     "group_size": 32, "sym": true, "data_type": "int", "autoround_version": "0.5.1"}"#;
    let quantisation = quantisation(config).unwrap().unwrap();
    let mut checkpoint = Checkpoint::open_quantised(dir.path(), quantisation).unwrap();
    let matrix = checkpoint.take("layer.weight", &[8, 32]).unwrap();
    let expected: Vec<f32> = (0..32).map(|col| ((col % 16) as f32 - 8.0) * 0.5).collect();
    for row_idx in 0..8 {
        assert_eq!(matrix.row_values(row_idx).collect::<Vec<_>>(), expected, "{row_idx}");
    }
}
