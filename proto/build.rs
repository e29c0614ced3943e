//! Compiles the .proto files without a system `protoc`.

use std::{env, fs, path::PathBuf};

use prost::Message;

const FILES: [&str; 2] = ["baton/v1/inference.proto", "baton/worker/v1/worker.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in FILES {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    // For gRPC reflection, which serves the descriptors as they are.
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
