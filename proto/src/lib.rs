//! The protocol's types, generated from the `.proto` files beside this folder, and their one conversion from and to the
//! types of `baton-request`, `baton-cluster-record` and `baton-kv-events`. Other types are converted by the services that own them, at
//! their edge.
#![forbid(unsafe_code)]
// Generated; the comments are in the .proto files.
#![allow(missing_docs, unreachable_pub, clippy::large_enum_variant)]

mod cache;
mod record;
mod request;

// The nesting of the packages: generated code refers to its neighbours by `super`.
mod baton {
    pub mod v1 {
        tonic::include_proto!("baton.v1");
    }
    pub mod worker {
        pub mod v1 {
            tonic::include_proto!("baton.worker.v1");
        }
    }
}

/// What clients call.
pub use baton::v1;
/// What the router asks of workers, and workers of each other.
pub use baton::worker::v1 as worker;

pub use record::{kv_format_from_proto, kv_format_to_proto};
pub use request::{MissingField, failure_from_status, failure_to_status, is_server_fault};

/// Every file above as an encoded `FileDescriptorSet`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests {
    use super::DESCRIPTORS;

    /// Without it protoc-gen-go makes nothing of them.
    #[test]
    fn each_file_names_its_package_of_go() {
        for package in ["baton/v1;batonv1", "baton/worker/v1;workerv1"] {
            let option = format!("github.com/baton-serve/baton/proto/{package}");
            assert!(DESCRIPTORS.windows(option.len()).any(|bytes| bytes == option.as_bytes()), "{option}");
        }
    }
}
