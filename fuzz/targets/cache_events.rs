//! Streams of cache events: repeats, gaps, late batches, dumps, removals of what never was, and sheer nonsense, against a plain
//! model. And prompts that a worker is believed to hold before it says so.
#![no_main]

use baton_kv_index::testing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    let script = &script[..script.len().min(400)];
    testing::check(script);
    testing::check_nonsense(script);
    testing::check_beliefs(script);
});
