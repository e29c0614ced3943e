//! The `baton` binary.

fn main() -> std::process::ExitCode {
    baton_cli::main(std::env::args_os())
}
