//! A target that says exactly what another model says and costs more: layers are added that change nothing, as what
//! they add to the residual stream is multiplied by zeroes. So it accepts what the smaller one accepts.

use std::{fs, ops::Range, path::Path};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A directory with `model` (one file of safetensors) and as many layers.
pub(crate) fn deepen(model: &Path, num_layers: usize) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let mut config: Value = serde_json::from_slice(&read(&model.join("config.json"))).expect("it is JSON");
    let num_given = config["num_hidden_layers"].as_u64().expect("it has layers") as usize;
    config["num_hidden_layers"] = json!(num_layers);
    fs::write(dir.path().join("config.json"), config.to_string()).expect("it can be written");

    let file = read(&model.join("model.safetensors"));
    let (len, rest) = file.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().expect("8 bytes")) as usize);
    let given: Map<String, Value> = serde_json::from_slice(header).expect("it is JSON");
    let (mut tensors, mut bytes) = (Map::new(), Vec::new());
    let mut add = |name: String, tensor: &Value, is_zero: bool| {
        let begin = bytes.len();
        bytes.extend_from_slice(&data[place(tensor)]);
        if is_zero {
            bytes[begin..].fill(0);
        }
        let mut tensor = tensor.clone();
        tensor["data_offsets"] = json!([begin, bytes.len()]);
        tensors.insert(name, tensor);
    };
    for (name, tensor) in given.iter().filter(|(name, _)| *name != "__metadata__") {
        add(name.clone(), tensor, false);
        if let Some(part) = name.strip_prefix("model.layers.0.") {
            let is_zero = part.contains("o_proj") || part.contains("down_proj");
            (num_given..num_layers)
                .for_each(|idx| add(format!("model.layers.{idx}.{part}"), tensor, is_zero));
        }
    }
    let header = Value::Object(tensors).to_string();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat();
    fs::write(dir.path().join("model.safetensors"), file).expect("it can be written");
    dir
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn place(tensor: &Value) -> Range<usize> {
    let offset = |idx: usize| tensor["data_offsets"][idx].as_u64().expect("an offset") as usize;
    offset(0)..offset(1)
}
