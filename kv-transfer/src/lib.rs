//! The handoff: its state machine, and the transports that move KV blocks between workers.
