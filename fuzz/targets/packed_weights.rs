//! Damaged files of packed weights in the cache.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use arbitrary::Arbitrary;
use baton_fuzz::{Change, model};
use baton_model::LoadOptions;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Damage {
    Bytes {
        at: u16,
        bytes: Vec<u8>,
    },
    Length(Change),
    /// Only these bytes.
    Whole(Vec<u8>),
    Folder,
    Lock(Vec<u8>),
}

struct Cached {
    model: PathBuf,
    options: LoadOptions,
    file: PathBuf,
    bytes: Vec<u8>,
}

static CACHED: LazyLock<Cached> = LazyLock::new(|| {
    let model = baton_fuzz::write("model.gguf", include_bytes!("../../tests/gguf/fixtures/llama-q4_0.gguf"));
    let dir = baton_fuzz::folder().join("cache");
    let options = LoadOptions {
        weight_cache: Some(dir.clone()),
        threads: Some(1),
        activations: model::own_activations(),
        ..LoadOptions::default()
    };
    model::load_and_compute(&model, &options);
    let files = std::fs::read_dir(&dir).expect("a cache").map(|entry| entry.expect("a file").path());
    let file = files.into_iter().find(|path| path.extension().is_some_and(|ending| ending == "panels"));
    let file = file.expect("packed weights");
    let bytes = std::fs::read(&file).expect("packed weights");
    Cached { model, options, file, bytes }
});

fuzz_target!(|damage: Vec<Damage>| {
    let Cached { model, options, file, bytes } = &*CACHED;
    let mut bytes = bytes.clone();
    // A new inode: a mapped file is never rewritten.
    let _ = std::fs::remove_file(file);
    let _ = std::fs::remove_dir(file);
    for damage in &damage {
        match damage {
            Damage::Bytes { at, bytes: new } => {
                let at = usize::from(*at) % bytes.len().max(1);
                bytes.iter_mut().skip(at).zip(new).for_each(|(byte, new)| *byte = *new);
            }
            Damage::Length(change) => bytes.resize(change.of(bytes.len() as u64).min(1 << 16) as usize, 0),
            Damage::Whole(new) => bytes.clone_from(new),
            Damage::Folder => {
                let _ = std::fs::create_dir(file);
            }
            Damage::Lock(new) => {
                let _ = std::fs::write(file.with_extension("new"), new);
            }
        }
    }
    // Fails where the file is a folder.
    let _ = std::fs::write(file, &bytes);
    model::load_and_compute(model, options);
});
