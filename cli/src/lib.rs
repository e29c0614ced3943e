//! The `baton` binary.
