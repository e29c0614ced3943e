//! `baton`, as the whole-system tests start it.

fn main() -> std::process::ExitCode {
    baton_cli::main(std::env::args_os())
}
