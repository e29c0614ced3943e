//! A prefill worker and a decode worker in one process, with real sockets and shared memory between
//! them and a model that notices every misplaced byte.
#![forbid(unsafe_code)]

mod architectures;
mod balance;
mod cancel;
mod faults;
mod first_token;
mod gate;
mod grammars;
mod harness;
mod leaving;
mod loans;
mod matrix;
#[path = "../../../tests/ports.rs"]
mod ports;
mod preemption;
mod prefix;
mod reports;
mod serving;
mod sides;
mod speculation;
