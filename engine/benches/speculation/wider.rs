//! A target with exactly the output of another model and a higher cost: its MLPs get additional inputs that are
//! multiplied by zeroes. So it accepts what the smaller model would accept, and as in larger models most of a step is
//! reading weights.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A directory with `model` (one file of safetensors), its MLPs `factor` times as wide.
pub(crate) fn widen(model: &Path, factor: usize) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let mut config: Value = serde_json::from_slice(&read(&model.join("config.json"))).expect("it is JSON");
    let size = config["intermediate_size"].as_u64().expect("it has MLPs") as usize;
    config["intermediate_size"] = json!(factor * size);
    fs::write(dir.path().join("config.json"), config.to_string()).expect("it can be written");

    let file = read(&model.join("model.safetensors"));
    let (len, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize);
    let mut tensors: Map<String, Value> = serde_json::from_slice(header).expect("it is JSON");
    let mut bytes = Vec::new();
    for (name, tensor) in tensors.iter_mut().filter(|(name, _)| *name != "__metadata__") {
        let number = |value: &Value| value.as_u64().expect("a number") as usize;
        let given = &data[number(&tensor["data_offsets"][0])..number(&tensor["data_offsets"][1])];
        let begin = bytes.len();
        let widened = if name.contains("gate_proj") || name.contains("up_proj") {
            // The outputs do not matter.
            bytes.extend(given.repeat(factor));
            Some(0)
        } else if name.contains("down_proj") {
            let row_bytes = given.len() / number(&tensor["shape"][0]);
            for row in given.chunks_exact(row_bytes) {
                bytes.extend(row);
                bytes.resize(bytes.len() + (factor - 1) * row_bytes, 0);
            }
            Some(1)
        } else {
            bytes.extend(given);
            None
        };
        if let Some(dim) = widened {
            tensor["shape"][dim] = json!(factor * size);
        }
        tensor["data_offsets"] = json!([begin, bytes.len()]);
    }
    let header = Value::Object(tensors).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat();
    fs::write(dir.path().join("model.safetensors"), file).expect("it can be written");
    dir
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
