//! Steps that become graphs.

use baton_checkpoint::DeviceModel;
use baton_cuda_emulator::test_device;
use baton_cuda_kernels::device::Fp8Products;
use baton_kv_cache::KvDtype;
use baton_model_spec::BatchSequence;

use super::low_bit;
use super::whole::{Machine, Pair, fixtures, loaded, prompt};

#[test]
fn a_context_that_grows_keeps_its_graph() {
    let mut pair = Pair::new("qwen3", KvDtype::Bf16, 8);
    let tokens = prompt(61, 1);
    let place = pair.place(61);
    let mut computed = 0;
    // 1, 2, 4 and 8 blocks.
    for context in [7, 15, 30, 60] {
        for chunk in tokens[computed..context].chunks(60) {
            pair.run("a chunk", &[(chunk, computed, &place, 1)]);
            computed += chunk.len();
        }
        pair.run("decoding", &[(&tokens[context..=context], context, &place, 1)]);
        computed += 1;
    }
    assert_eq!(pair.device.executor.device().repeated(), [4]);
}

/// Three steps of each of two sizes. The first step of a size launches, the second records, the third replays.
#[test]
fn steps_with_drafts_are_graphs() {
    let mut pair = Pair::new("qwen3", KvDtype::Bf16, 8);
    let tokens = [prompt(40, 1), prompt(30, 2), prompt(20, 3)];
    let places = [pair.place(40), pair.place(30), pair.place(20)];
    let prompts: Vec<_> = tokens.iter().zip(&places).map(|(it, place)| (&it[..10], 0, place, 1)).collect();
    pair.run("prompts", &prompts);
    // Drafts of some sequences, not always as many. The last ones are rejected.
    for (round, num_drafts) in [[8, 0, 2], [1, 3, 0], [0, 4, 4]].into_iter().enumerate() {
        let start_idx = 10 + round;
        let step = tokens.iter().zip(&places).zip(num_drafts).map(|((it, place), num_drafts)| {
            (&it[start_idx..=start_idx + num_drafts], start_idx, place, num_drafts + 1)
        });
        pair.run("verifying", &step.collect::<Vec<_>>());
        let alone = (&tokens[0][13 + round..17 + round], 13 + round, &places[0], 4);
        if round > 0 {
            pair.run("verifying alone", &[alone]);
        } else {
            pair.run("catching up", &[(&tokens[0][11..17], 11, &places[0], 6)]);
        }
    }
    let mut repeated = pair.device.executor.device().repeated();
    repeated.sort_unstable();
    assert_eq!(repeated, [3, 3], "16 rows of one sequence, and of up to four");
}

/// Launches and products of a step of one token, for each layer and for the rest of a step: its beginning, the last
/// norm and the head. Attention is one launch, with splits of a context (qwen3) and without (llama).
#[test]
fn a_layer_takes_few_launches() {
    if test_device::ordinal().is_some() {
        return println!("SKIPPED: only the emulated device counts");
    }
    let bf16 = |name| loaded(name, KvDtype::Bf16, 8);
    let int4 = Some("int4".parse().unwrap());
    let cases: [(&str, DeviceModel, usize, usize); 5] = [
        ("llama", bf16("llama"), 9, 5),
        ("llama, int4", low_bit::loaded(&fixtures().join("llama"), int4), 9, 5),
        ("qwen3", bf16("qwen3"), 9, 5),
        // With a cap of logits, and a norm after the last layer.
        ("gemma2", bf16("gemma2"), 10, 7),
        ("mixtral", bf16("mixtral"), 12, 5),
    ];
    for (what, model, per_layer, others) in cases {
        let mut machine = Machine::device(model, 64, Fp8Products::None);
        let (tokens, blocks) = (prompt(12, 1), machine.place(12));
        let step = |range: std::ops::Range<usize>| {
            let start_idx = range.start;
            BatchSequence { tokens: &tokens[range], start_idx, blocks: &blocks, num_logits: 1 }
        };
        machine.run(vec![step(0..10)]);
        let before = machine.executor.device().counts();
        machine.run(vec![step(10..11)]);
        let after = machine.executor.device().counts();
        let num_layers = machine.storage.layout().num_layers;
        let num_launches = after.num_repeated - before.num_repeated;
        println!("{what}: {num_launches} launches for {num_layers} layers");
        assert!(num_launches <= per_layer * num_layers + others, "{what}");
        // Block tables change only with a new block.
        assert_eq!(after.num_launches, before.num_launches, "{what}");
    }
}

/// Only logits need attention and the MLP of the last layer: a chunk of a prompt before the last one has none.
#[test]
fn without_logits_a_step_ends_with_the_last_layers_kv() {
    if test_device::ordinal().is_some() {
        return println!("SKIPPED: only the emulated device counts");
    }
    let mut machine = Machine::device(loaded("llama", KvDtype::Bf16, 8), 64, Fp8Products::None);
    let (tokens, blocks) = (prompt(20, 1), machine.place(20));
    let mut launches = |start_idx: usize, num_logits: usize| {
        let before = machine.executor.device().counts().num_launches;
        let tokens = &tokens[start_idx..start_idx + 10];
        machine.run(vec![BatchSequence { tokens, start_idx, blocks: &blocks, num_logits }]);
        machine.executor.device().counts().num_launches - before
    };
    let (without, with) = (launches(0, 0), launches(10, 1));
    println!("{without} launches without logits, {with} with");
    assert!(without + 6 <= with, "attention, two products, the gate, and the norm and product of the logits");
}
