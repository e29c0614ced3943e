//! Measures a GPU, and the rates of kernels and whole steps on it, as a table in Markdown. `--card` only describes
//! the GPU.
//!
//! `cargo xtask gpu-check` runs it. The exit code is 2 if there is no GPU, and 3 if a target was missed.

use std::process::ExitCode;

use baton_model::kernel_code;
use baton_model_cuda::measure::{Amount, Figure, card, measure};

const NO_GPU: u8 = 2;
const MISSED: u8 = 3;

fn main() -> ExitCode {
    let ordinal = std::env::var("BATON_KERNELS_ON").ok();
    let ordinal = ordinal.and_then(|name| name.strip_prefix("cuda:")?.parse().ok()).unwrap_or(0);
    let card = match card(ordinal) {
        Ok(card) => card,
        Err(error) => {
            eprintln!("no GPU: {error}");
            return NO_GPU.into();
        }
    };
    let ((major, minor), gib) = (card.capability, card.memory_bytes as f64 / f64::from(1 << 30));
    println!("{}, compute capability {major}.{minor}, {gib:.1} GiB", card.name);
    if std::env::args().any(|argument| argument == "--card") {
        return ExitCode::SUCCESS;
    }
    // Beside this program, so that it is removed with the build.
    let kernel_cache = std::env::current_exe().ok().map(|program| program.with_file_name("gpu-kernels"));
    println!("\n| what | median, ms | reached | of the ceiling | target |\n|---|---|---|---|---|");
    let mut num_missed = 0;
    let measured = measure(ordinal, &kernel_code(kernel_cache), &mut |figure| {
        num_missed += usize::from(figure.is_missed());
        println!("{}", row(figure));
    });
    match (measured, num_missed) {
        (Err(error), _) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        (Ok(()), 0) => ExitCode::SUCCESS,
        (Ok(()), _) => MISSED.into(),
    }
}

fn row(figure: &Figure) -> String {
    let reached = match figure.amount {
        Amount::Bytes(bytes) => format!("{:.0} GB/s", bytes / figure.seconds / 1e9),
        Amount::Operations(operations) => format!("{:.0} TFLOP/s", operations / figure.seconds / 1e12),
    };
    let percent =
        |share: Option<f64>| share.map_or("–".to_owned(), |share| format!("{:.1} %", 100.0 * share));
    let missed = if figure.is_missed() { ", MISSED" } else { "" };
    let (what, milliseconds) = (&figure.what, 1e3 * figure.seconds);
    let (share, target) = (percent(figure.share), percent(figure.target));
    format!("| {what} | {milliseconds:.3} | {reached} | {share} | {target}{missed} |")
}
