//! The code that talks to CUDA's libraries, run on some that pretend to be them (`emulator/pretended/`): by way of cudarc, NVRTC
//! and cuBLASLt, with streams, events and graphs. What is run is this program's own tests, as on a device.

use std::ffi::OsString;
use std::process::Command;

use super::test_device;

/// Steps that are launched ahead and become graphs, prompts, a queue of its own, what is tried when a device is opened, and
/// products of every kind.
const TESTS: [&str; 6] = [
    "cuda::drawing_tests::tokens_are_those_of_the_logits",
    "cuda::drawing_tests::a_step_follows_another_before_that_is_collected",
    "cuda::block_queue::tests::pieces_are_gathered_hashed_and_scattered",
    "cuda::attention::tests::a_device_that_multiplies_by_warpgroups_is_tried",
    "cuda::fp8_trial::tests::what_a_device_says_that_it_can_it_can",
    "cuda::low_bit_tests::fp8_is_multiplied_with_any_scales",
];

#[test]
fn a_driver_is_talked_to_as_it_wants() {
    if test_device::ordinal().is_some() {
        return println!("SKIPPED: BATON_KERNELS_ON names a device");
    }
    let program = std::env::current_exe().expect("this is a program");
    let dir = tempfile::tempdir_in(program.parent().expect("in a folder")).expect("it can be written");
    // Compiled kernels lie beside the program: these are for nobody else.
    let tests = dir.path().join("tests");
    std::fs::hard_link(&program, &tests).expect("in one file system");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/emulator/pretended/build.sh");
    let built = Command::new("sh").arg(script).arg(dir.path()).output().expect("there is a shell");
    let why = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{why}: `cargo xtask setup` installs g++");
    let mut folders = OsString::from(dir.path());
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        folders.push(":");
        folders.push(others);
    }
    let mut command = Command::new(tests);
    command.args(TESTS).args(["--exact", "--nocapture"]);
    command.env("LD_LIBRARY_PATH", folders).env("BATON_NVRTC", dir.path()).env("BATON_KERNELS_ON", "cuda:0");
    let output = command.output().expect("it can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}\n{complained}", output.status);
    let all_passed = format!("test result: ok. {} passed", TESTS.len());
    assert!(said.contains(&all_passed) && !said.contains("SKIPPED"), "{said}");
}
