//! The prefill worker: its service, and run(config).
