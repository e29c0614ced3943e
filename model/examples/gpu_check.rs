//! Measures a GPU, and the rates of kernels and whole steps on it. `cargo xtask gpu-check` runs it.
//!
//! ```text
//! gpu_check card       describes the GPU
//! gpu_check ceilings   measures a large copy and a large product
//! gpu_check all        measures kernels and steps, too; or attention, experts, few-rows, steps
//! ```
//!
//! It writes one JSON object per line, each as soon as it is known. The exit code is 2 if there is no GPU.

use std::process::ExitCode;

use baton_model::kernel_code;
use baton_model_cuda::measure::{Amount, Figure, Finding, Scope, card, measure};
use serde_json::{Value, json};

const NO_GPU: u8 = 2;

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
    let asked = std::env::args().nth(1).unwrap_or_default();
    let scope = Scope::NAMES.iter().find(|(name, _)| *name == asked).map(|(_, scope)| *scope);
    if scope.is_none() && asked != "card" {
        let names = Scope::NAMES.map(|(name, _)| name).join(", ");
        eprintln!("expected card, {names}; found {asked:?}");
        return ExitCode::FAILURE;
    }
    let (major, minor) = card.capability;
    println!(
        "{}",
        json!({"card": card.name, "capability": format!("{major}.{minor}"), "memory_bytes": card.memory_bytes})
    );
    let Some(scope) = scope else { return ExitCode::SUCCESS };
    // Beside this program, so that it is removed with the build.
    let kernel_cache = std::env::current_exe().ok().map(|program| program.with_file_name("gpu-kernels"));
    let mut report = |finding: &Finding| println!("{}", line(finding));
    match measure(ordinal, &kernel_code(kernel_cache), scope, &mut report) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// `rate` is in GB/s or TFLOP/s; `share` and `target` are of the ceiling.
fn line(finding: &Finding) -> Value {
    match finding {
        Finding::LeftOut { what, needed_bytes, free_bytes } => {
            let gigabytes = |bytes: usize| bytes as f64 / 1e9;
            let why = format!(
                "needs {:.1} GB, {:.1} GB are free",
                gigabytes(*needed_bytes),
                gigabytes(*free_bytes)
            );
            json!({"left_out": what, "why": why})
        }
        Finding::Measured(figure) => {
            let (rate, unit) = match figure.amount {
                Amount::Bytes(bytes) => (bytes / figure.seconds / 1e9, "GB/s"),
                Amount::Operations(operations) => (operations / figure.seconds / 1e12, "TFLOP/s"),
            };
            let Figure { what, seconds, share, target, .. } = figure;
            json!({
                "figure": what, "ms": 1e3 * seconds, "rate": rate, "unit": unit, "share": share,
                "target": target, "is_missed": figure.is_missed(),
            })
        }
    }
}
