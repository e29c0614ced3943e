//! The environment of a process without other threads, which a test of the usual harness is not.

use std::process::Command;

const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Runs itself with the variable unset and set. `--shown` prints what the process then has.
fn main() {
    if std::env::args().any(|argument| argument == "--shown") {
        baton_cuda::set_connections();
        return print!("{}", std::env::var(VARIABLE).expect("it is set"));
    }
    check(None, "16");
    check(Some("1"), "1");
    std::thread::spawn(|| {
        let given = std::env::var_os(VARIABLE);
        baton_cuda::set_connections();
        assert_eq!(std::env::var_os(VARIABLE), given, "the main thread might read the environment");
    })
    .join()
    .expect("it does not panic");
}

fn check(given: Option<&str>, expected: &str) {
    let mut command = Command::new(std::env::current_exe().expect("this is a program"));
    command.arg("--shown").env_remove(VARIABLE).envs(given.map(|value| (VARIABLE, value)));
    let output = command.output().expect("it can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "given {given:?}");
}
