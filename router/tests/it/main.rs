#![recursion_limit = "512"]

//! The router from outside: real HTTP and gRPC against fake workers.

mod client;
mod fake;
mod harness;
mod model;

mod cache_control;
mod chat;
mod completions;
mod durable;
mod edges;
mod errors;
mod fields;
mod grpc;
mod index;
mod keys;
mod load;
mod messages;
mod migration;
mod openapi;
mod page;
mod planning;
mod ranges;
mod responses;
mod retry;
mod timing;
mod token_ids;
mod tools;
