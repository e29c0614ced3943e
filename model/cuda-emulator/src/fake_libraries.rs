//! The code that talks to CUDA's libraries, run on fakes of them (`fake/`): by way of cudarc, NVRTC and cuBLASLt, with streams,
//! events and graphs. What is run is a test program's own tests, as on a device.

use std::ffi::OsString;
use std::process::Command;

use crate::files::fake_folder;
use crate::test_device;

/// Runs these tests of this test program on the fake libraries. Where `BATON_KERNELS_ON` names a device nothing is done.
///
/// # Panics
/// When one does not pass, or is skipped.
pub fn run_own_tests(names: &[&str]) {
    if test_device::ordinal().is_some() {
        return println!("SKIPPED: BATON_KERNELS_ON names a device");
    }
    let program = std::env::current_exe().expect("this is a program");
    let dir = tempfile::tempdir_in(program.parent().expect("in a folder")).expect("it can be written");
    // Compiled kernels are kept beside the program: these are for no other.
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
    let output = command.output().expect("it can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}\n{complained}", output.status);
    let all_passed = format!("test result: ok. {} passed", names.len());
    assert!(said.contains(&all_passed) && !said.contains("SKIPPED"), "{said}");
}
