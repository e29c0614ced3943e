//! The router from outside: real HTTP and gRPC against fake workers.

mod client;
mod fake;
mod harness;
mod model;

mod chat;
mod completions;
mod edges;
mod errors;
mod grpc;
mod load;
mod migration;
mod ranges;
mod retry;
