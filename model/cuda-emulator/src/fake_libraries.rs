//! Runs the code that calls CUDA's libraries on fake libraries (`fake/`): cudarc, NVRTC and cuBLASLt, with streams,
//! events and graphs. A test program runs its own tests again, as on a device.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use crate::files::fake_folder;
use crate::program::{emulator_hash, output_folder, read};
use crate::test_device;

/// Keeps launches from overlapping, and has the fake driver expect it.
pub const APART: [(&str, &str); 2] = [("BATON_OVERLAP_LAUNCHES", "0"), ("FAKE_OVERLAP", "0")];

/// The variable that tells a test that the libraries are fake.
const FAKE: &str = "BATON_FAKE_LIBRARIES";

/// Whether this process runs on fake libraries: some of what they do is known.
pub fn are_fake() -> bool {
    std::env::var_os(FAKE).is_some()
}

/// Runs these tests of the current test program on the fake libraries, with these variables. Does nothing where
/// `BATON_KERNELS_ON` names a device.
///
/// # Panics
/// When a test fails or is skipped.
pub fn run_own_tests(names: &[&str], variables: &[(&str, &str)]) {
    if test_device::ordinal().is_some() {
        return println!("SKIPPED: BATON_KERNELS_ON names a device");
    }
    let program = std::env::current_exe().expect("this is a program");
    let dir = tempfile::tempdir_in(program.parent().expect("in a folder")).expect("it can be written");
    // The cache of compiled kernels is beside the program, apart from real ones.
    let tests = dir.path().join("tests");
    std::fs::hard_link(&program, &tests).expect("in one file system");
    let built = Command::new("sh").arg(fake_folder().join("build.sh")).arg(dir.path()).output();
    let built = built.expect("there is a shell");
    let why = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{why}: `cargo xtask setup` installs g++");
    let mut folders = OsString::from(dir.path());
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.push(":");
        folders.push(others);
    }
    let mut command = Command::new(tests);
    command.args(names).args(["--exact", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", folders).env("BATON_NVRTC", dir.path()).env("BATON_KERNELS_ON", "cuda:0");
    // Tests compile the same kernels. Each has a cache of its own, in which it also keeps what it measured.
    command.env("FAKE_NVRTC_CODE", compiled_folder());
    // Some tests are of ranks.
    command.env("FAKE_DEVICES", "2").env_remove("BATON_NCCL").env(FAKE, "1").envs(variables.iter().copied());
    let output = command.output().expect("it can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}\n{complained}", output.status);
    let all_passed = format!("test result: ok. {} passed", names.len());
    assert!(said.contains(&all_passed) && !said.contains("SKIPPED"), "{said}");
}

/// The folder of kernels that the fake NVRTC compiled with the current files of the emulator.
fn compiled_folder() -> PathBuf {
    let mut hasher = emulator_hash();
    for name in ["nvrtc.cpp", "module.h"] {
        hasher.update(&read(&fake_folder().join(name)));
    }
    let folder = output_folder().join(format!("fake-{}", &hasher.finalize().to_hex()[..16]));
    std::fs::create_dir_all(&folder).expect("the build's folder can be written");
    folder
}
