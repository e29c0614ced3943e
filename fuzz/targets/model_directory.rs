//! Directories of safetensors: headers, and the tensors that make up quantised weights.
#![no_main]

use baton_fuzz::{model, tensors::Case};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (model::Options, Case)| {
    let (options, case) = input;
    let [config, tensors] = case.files();
    baton_fuzz::write("config.json", &config);
    baton_fuzz::write("model.safetensors", &tensors);
    model::load_and_compute(baton_fuzz::folder(), &options.load_options());
});
