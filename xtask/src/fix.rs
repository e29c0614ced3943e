//! `cargo xtask fix`: repairs what a program can repair.

use anyhow::Result;

use crate::{descriptors, workspace::Workspace};

/// Whether everything could be repaired or needed no repair.
pub(crate) fn run(workspace: &Workspace) -> Result<bool> {
    if descriptors::write(workspace)? {
        println!("fix: made tools/protoc's descriptors anew");
    }
    // Clippy first: its suggestions are not formatted. It must accept a checkout with uncommitted changes.
    let clippy = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--fix",
        "--allow-dirty",
        "--allow-staged",
        "--",
        "-D",
        "warnings",
    ];
    let mut all_well = true;
    for args in [&clippy[..], &["fmt", "--all"], &["fmt", "--manifest-path", "fuzz/Cargo.toml"]] {
        println!("fix: cargo {} …", args.join(" "));
        all_well &= workspace.cargo().args(args).status()?.success();
    }
    Ok(all_well)
}
