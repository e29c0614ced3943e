//! The files of a model's directory, without reading weights.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use baton_command::hub_name;
use serde_json::Value;

use super::finding::Finding;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// The beginning of a file that git left in place of a large one.
const POINTER: &[u8] = b"version https://git-lfs";
/// Pointers are smaller.
const MAX_POINTER_BYTES: u64 = 1024;

/// Looks at a directory of Hugging Face, or a `.gguf` file.
pub(super) fn files(model: &Path) -> Finding {
    let shown = model.display();
    let Ok(meta) = fs::metadata(model) else {
        let fix = match hub_name(model) {
            Some(name) => format!("`hf download {name} --local-dir DIR`, and give DIR by --model"),
            None => {
                "name an existing directory or .gguf file by --model, and let this user read it".to_owned()
            }
        };
        return Finding::broken("model", format!("{shown} cannot be read"), fix);
    };
    if meta.is_file() {
        return weights(model, vec![model.to_owned()]);
    }
    let absent: Vec<&str> = [CONFIG, "tokenizer.json"]
        .into_iter()
        .filter(|name| fs::File::open(model.join(name)).is_err())
        .collect();
    if !absent.is_empty() {
        return Finding::broken(
            "model",
            format!("{shown} has no {} that can be read", absent.join(" and no ")),
            "fetch the whole repository: `hf download NAME --local-dir DIR`",
        );
    }
    match shards(model) {
        Ok(files) if files.is_empty() => Finding::broken(
            "model",
            format!("{shown} has no .safetensors file; a router needs none, workers do"),
            "fetch the weights as safetensors: `hf download NAME --local-dir DIR`",
        ),
        Ok(files) => weights(model, files),
        Err(why) => {
            Finding::broken("model", why, "fetch the repository again: `hf download NAME --local-dir DIR`")
        }
    }
}

/// Files of weights by the index, or all that are there.
fn shards(model: &Path) -> Result<Vec<PathBuf>, String> {
    if let Ok(text) = fs::read_to_string(model.join(INDEX)) {
        let index: Value = serde_json::from_str(&text).map_err(|error| format!("{INDEX}: {error}"))?;
        let map = index["weight_map"].as_object().ok_or_else(|| format!("{INDEX} has no weight_map"))?;
        let names: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
        return Ok(names.into_iter().map(|name| model.join(name)).collect());
    }
    let entries = fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
    Ok(entries.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors")).collect())
}

fn weights(model: &Path, files: Vec<PathBuf>) -> Finding {
    let mut num_bytes = 0;
    for file in &files {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let (Ok(meta), Ok(_)) = (fs::metadata(file), fs::File::open(file)) else {
            return Finding::broken(
                "model",
                format!("{name} is missing or cannot be read"),
                "fetch it again (`hf download` goes on where it stopped), and let this user read it",
            );
        };
        if meta.len() < MAX_POINTER_BYTES && fs::read(file).is_ok_and(|bytes| bytes.starts_with(POINTER)) {
            return Finding::broken(
                "model",
                format!("{name} is a pointer of git-lfs, not weights"),
                "git lfs pull",
            );
        }
        num_bytes += meta.len();
    }
    let gib = num_bytes as f64 / f64::from(1 << 30);
    let files = match files.len() {
        1 => "1 file".to_owned(),
        num_files => format!("{num_files} files"),
    };
    Finding::ok("model", format!("{}: {files} of weights, {gib:.2} GiB", model.display()))
}
