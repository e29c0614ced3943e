//! `baton`, as the whole-system tests start it.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    baton_cli::main(std::env::args_os())
}
