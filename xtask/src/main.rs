//! Checks and set-up of the workspace.
fn main() {}
