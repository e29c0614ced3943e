//! Records of workers, from etcd and from workers that register.
#![no_main]

use arbitrary::Arbitrary;
use baton_cluster::WorkerRecord;
use baton_fuzz::{Change, pick};
use baton_proto::worker as proto;
use libfuzzer_sys::fuzz_target;
use prost::Message;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Json(&'a [u8]),
    Message(&'a [u8]),
    Fields { role: i32, dtype: u8, address: &'a str, id: &'a str, sizes: [Change; 3] },
}

fuzz_target!(|input: Input<'_>| {
    let record = match input {
        Input::Json(bytes) => WorkerRecord::from_json(bytes).ok(),
        Input::Message(bytes) => from_message(proto::WorkerRecord::decode(bytes).ok()),
        Input::Fields { role, dtype, address, id, sizes } => {
            let [num_blocks, block_size, num_layers] = sizes.map(|change| change.of(16) as u32);
            let capacity = proto::Capacity { num_blocks, block_size, ..proto::Capacity::default() };
            let dtype = (*pick(&["f32", "f16", "bf16", "fp8", "int8", "other"], dtype)).to_owned();
            let kv_format = proto::KvFormat { dtype, block_size, num_layers, ..proto::KvFormat::default() };
            from_message(Some(proto::WorkerRecord {
                id: id.to_owned(),
                role,
                address: address.to_owned(),
                kv_format: Some(kv_format),
                capacity: Some(capacity),
                ..proto::WorkerRecord::default()
            }))
        }
    };
    if let Some(record) = record {
        assert_eq!(WorkerRecord::from_json(&record.to_json()).as_ref(), Ok(&record));
        assert_eq!(WorkerRecord::try_from(proto::WorkerRecord::from(&record)), Ok(record));
    }
});

fn from_message(message: Option<proto::WorkerRecord>) -> Option<WorkerRecord> {
    WorkerRecord::try_from(message?).ok()
}
