//! Baton as its users meet it: real processes, real sockets, real etcd, real faults.

mod bad_input;
mod bench;
mod cancel;
mod clients;
mod doctor;
mod faults;
mod gguf;
mod harness;
mod prompts;
mod serving;
mod sides;
mod up;
