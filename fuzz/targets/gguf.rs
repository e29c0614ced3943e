//! The GGUF container: any bytes.
#![no_main]

use baton_gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    for value in gguf.metadata().values() {
        let _ = (value.to_string(), value.as_unsigned(), value.as_float());
        if let Some(array) = value.as_array() {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for tensor in gguf.tensors().values() {
        assert!(tensor.start + tensor.size_bytes <= bytes.len());
    }
});
