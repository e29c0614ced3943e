//! The decode worker: its service, and run(config).
