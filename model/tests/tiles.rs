//! Every architecture on the software model of tiles: what processors with AMX compute, on any processor.

mod machine;

use baton_kv_cache::KvDtype;
use baton_model::{Activations, LoadOptions};
use baton_model_cpu::testing::{Isa, tested_isas};

use machine::{CASES, Expected, Machine, bits, difference, dir_of, exact, expected, has_experts};

/// How weights are quantised, the type of KV, and the tolerated difference of logits from those of transformers, relative
/// to the largest logit. Those with KV in f32 and of int8 are the ones of `parity.rs`; attention in tiles rounds as often as
/// products do, so KV in bf16 may add as much again. `None` where no bound from transformers holds: see [`VECTORS`].
const FORMATS: [(Option<&str>, KvDtype, Option<f32>); 4] = [
    (None, KvDtype::F32, Some(0.06)),
    (None, KvDtype::Bf16, Some(0.12)),
    (Some("int8"), KvDtype::Bf16, Some(0.3)),
    (Some("int4"), KvDtype::Bf16, None),
];

/// The tolerated difference from vectors, which multiply the same weights of four bits with activations of eight bits: what
/// such activations may change.
const VECTORS: f32 = 0.3;

fn check(name: &str, (quantise, kv_dtype, tolerance): (Option<&str>, KvDtype, Option<f32>)) {
    let what = format!("{name}, weights {quantise:?}, KV {kv_dtype:?}");
    let dir = dir_of(name);
    let Expected { prompt, positions, logits, .. } = expected(&dir);
    let options = LoadOptions {
        kv_dtype: Some(kv_dtype),
        activations: Activations::Auto,
        quantise: quantise.map(|text| text.parse().unwrap()),
        ..exact()
    };
    let mut machine = Machine::in_tiles(&dir, &options);
    let rows = machine.all_logits(&prompt, &[prompt.len()]);
    let all = rows.concat();
    // Two tiles of rows and one, fewer rows than tiles multiply in int8, and those few that vectors multiply in int4.
    let chunks = machine.all_logits(&prompt, &[prompt.len() - 21, 13, 5, 2, 1]).concat();
    assert!(bits(&chunks) == bits(&all), "{what}: chunks have other bits");

    let here = Machine::new(&dir, &options).all_logits(&prompt, &[prompt.len()]).concat();
    if Isa::detect().has_tiles() {
        assert!(bits(&here) == bits(&all), "{what}: this processor's tiles have other bits than their model");
    } else if kv_dtype == KvDtype::Bf16 {
        assert!(bits(&here) != bits(&all), "{what}: nothing is computed in tiles");
    }

    if has_experts(name) {
        return;
    }
    let (error, tolerance) = match tolerance {
        Some(tolerance) => {
            let got: Vec<f32> = positions.iter().flat_map(|position| rows[*position].clone()).collect();
            (difference(&got, &logits), tolerance)
        }
        None => (difference(&all, &here), VECTORS),
    };
    assert!(error <= tolerance, "{what}: off by {error}");
}

#[test]
fn logits_in_tiles_are_near_those_of_transformers_whatever_the_chunks() {
    if !tested_isas().contains(&Isa::TileModel) {
        eprintln!("skipped: this CPU has no vectors for the software model of tiles");
        return;
    }
    for name in CASES {
        for format in FORMATS {
            check(name, format);
        }
    }
}
