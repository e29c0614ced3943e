//! `baton simulate` without the rest of `baton`: it compiles in a tenth of the time.

use clap::Parser;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    args: baton_simulator::SimulateArgs,
}

fn main() -> anyhow::Result<()> {
    baton_simulator::run(Command::parse().args)
}
