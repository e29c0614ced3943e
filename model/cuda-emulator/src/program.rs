//! Compiles kernels with g++ and `cpp/emulator.h`, with the address sanitizer around every buffer.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use baton_cuda_kernels::kernel::KernelSource;

use crate::files::{cpp_folder, kernel_files, kernel_folder};

/// The program with the kernels of `sources`. The program and its object files are cached beside the build's other
/// outputs, by a hash of everything that affects them.
pub fn program(sources: &[KernelSource]) -> PathBuf {
    let mut objects = vec![object(&cpp_folder().join("run.h"), &[])];
    for source in sources {
        // A path of its own replaces the folder of the kernels.
        objects.push(object(&kernel_folder().join(source.file), &source.defines));
    }
    let mut hasher = blake3::Hasher::new();
    for object in &objects {
        hasher.update(object.as_os_str().as_encoded_bytes());
    }
    let last = sources.last().map_or("none", |source| name_of(Path::new(source.file)));
    built(&format!("{last}-{}", &hasher.finalize().to_hex()[..16]), |command| {
        command.args(&objects);
    })
}

/// Compiles one file. Each file is an object of its own, so that a change of one constant leaves the others.
fn object(file: &Path, defines: &[(&str, u64)]) -> PathBuf {
    let mut hasher = emulator_hash();
    for (_, header) in kernel_files().headers() {
        hasher.update(header.as_bytes());
    }
    hasher.update(&read(file));
    hasher.update(format!("{defines:?}").as_bytes());
    built(&format!("{}-{}.o", name_of(file), &hasher.finalize().to_hex()[..16]), |command| {
        command.arg("-c").args(KERNEL_FLAGS).arg("-include").arg(emulator_header());
        command.arg("-I").arg(cpp_folder()).arg("-I").arg(kernel_folder());
        command.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        command.args(["-x", "c++"]).arg(file);
    })
}

/// Fused multiplications are forbidden, so that results are the same on every machine.
const KERNEL_FLAGS: [&str; 5] =
    ["-ffp-contract=off", "-DBATON_EMULATED", "-Wall", "-Wno-unused", "-Wno-unknown-pragmas"];

/// A header that includes `emulator.h`, with its precompiled form beside it: reading the emulator and the standard
/// library takes longer than compiling most kernels.
fn emulator_header() -> PathBuf {
    let emulator = cpp_folder().join("emulator.h");
    let hash = emulator_hash().update(emulator.as_os_str().as_encoded_bytes()).finalize().to_hex();
    let name = format!("emulator-{}.h", &hash[..16]);
    let header = output_folder().join(&name);
    built(&format!("{name}.gch"), |command| {
        std::fs::write(&header, format!("#include {emulator:?}\n"))
            .expect("the build's folder can be written");
        command.args(KERNEL_FLAGS).args(["-x", "c++-header"]).arg(&header);
    });
    header
}

/// Of what every object includes.
pub(crate) fn emulator_hash() -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new();
    for name in ["emulator.h", "shared_memory.h", "visibility.h", "copies.h", "warpgroup.h"] {
        hasher.update(&read(&cpp_folder().join(name)));
    }
    hasher
}

fn name_of(file: &Path) -> &str {
    file.file_name().and_then(|name| name.to_str()).expect("a file with a name in ASCII")
}

pub(crate) fn read(file: &Path) -> Vec<u8> {
    std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Beside the build's other outputs.
pub(crate) fn output_folder() -> PathBuf {
    let test = std::env::current_exe().expect("this is a program");
    let folder = test.parent().expect("in a folder").join("emulated-kernels");
    std::fs::create_dir_all(&folder).expect("the build's folder can be written");
    folder
}

/// Runs g++, unless its output is cached. Tests run as threads and as processes: one of them runs it, the others wait.
fn built(name: &str, arguments: impl FnOnce(&mut Command)) -> PathBuf {
    let folder = output_folder();
    let path = folder.join(name);
    let lock = File::create(folder.join(format!("{name}.lock"))).expect("the build's folder can be written");
    lock.lock().expect("a file can be locked");
    if path.exists() {
        return path;
    }
    let new = folder.join(format!("{name}.new"));
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    arguments(&mut command);
    let output = command.arg("-o").arg(&new).output();
    let output = output.expect("g++ is there: `cargo xtask setup` installs it");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&new, &path).expect("the build's folder can be written");
    path
}
