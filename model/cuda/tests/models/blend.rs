//! Blended prompts on the device: against its own full prefills to the bit, and near those of processors.

use std::ops::Range;

use baton_cuda_kernels::device::Fp8Products;
use baton_kv_cache::{BlockId, KvDtype};
use baton_model_spec::{
    BatchSequence, BlendPassage, BlendRatio, BlendRefusal, BlendedPrompt, Executor, FIRST_KEPT_LAYER,
    PassageKv, Selection, SelectionOrder,
};

use crate::whole::{Machine, Pair, fixtures, loaded, prompt};

/// Rows of a step: less than the tokens of a passage, of the head, and of what is selected.
const NUM_ROWS: usize = 40;
/// The end of the last passage. The last step of a full prefill has more rows than decoding.
const HEAD: usize = 130;
const NUM_TOKENS: usize = 145;
/// Text, a passage, text, and two passages that touch.
const PASSAGES: [Range<usize>; 3] = [9..62, 66..67, 67..130];

fn selection(ratio: f32, order: SelectionOrder) -> Selection {
    let ratio = BlendRatio::new(ratio).unwrap();
    Selection { layer: FIRST_KEPT_LAYER, num_first_tokens: 2, ratio, order }
}

/// What is kept of the passages.
fn passages<E: Executor>(
    machine: &mut Machine<E>,
    tokens: &[u32],
    blocks: &[BlockId],
    ranges: &[Range<usize>],
) -> Vec<PassageKv> {
    let Machine { executor, storage, .. } = machine;
    let blender = executor.blending().unwrap();
    let token_bytes = blender.passage_token_bytes();
    let compute = |range: &Range<usize>| {
        // SAFETY: nothing else uses the storage.
        unsafe { blender.compute_passage(&tokens[range.clone()], blocks, storage) }.unwrap()
    };
    let kvs: Vec<PassageKv> = ranges.iter().map(compute).collect();
    assert!(kvs.iter().all(|kv| kv.size_bytes() == kv.num_tokens() * token_bytes));
    kvs
}

/// Computes the passages, and blends the tokens up to the end of the last one. Returns which were computed in all layers.
fn blend<E: Executor>(
    machine: &mut Machine<E>,
    tokens: &[u32],
    blocks: &[BlockId],
    ranges: &[Range<usize>],
    selection: Selection,
) -> Vec<usize> {
    let kvs = passages(machine, tokens, blocks, ranges);
    let head = ranges.last().expect("a passage").end;
    blend_with(machine, (ranges, &kvs), &tokens[..head], blocks, selection, false).0
}

/// Blends all `tokens` with what is kept of the passages. Perhaps also returns the logits after the last one.
fn blend_with<E: Executor>(
    machine: &mut Machine<E>,
    (ranges, kvs): (&[Range<usize>], &[PassageKv]),
    tokens: &[u32],
    blocks: &[BlockId],
    selection: Selection,
    wants_logits: bool,
) -> (Vec<usize>, Vec<f32>) {
    let Machine { executor, storage, .. } = machine;
    let blender = executor.blending().unwrap();
    let passage = |(range, kv): (&Range<usize>, _)| BlendPassage { start_idx: range.start, kv };
    let passages: Vec<_> = ranges.iter().zip(kvs).map(passage).collect();
    let prompt = BlendedPrompt { tokens, blocks, passages: &passages, selection, wants_logits };
    let mut layers = Vec::new();
    // SAFETY: as above.
    let computed = unsafe { blender.blend(&prompt, storage, &mut |layer_idx| layers.push(layer_idx)) };
    assert_eq!(layers, (0..storage.layout().num_layers).collect::<Vec<_>>());
    let blended = computed.unwrap();
    (blended.computed, blended.logits.to_vec())
}

/// The logits after all tokens, of which the KV of the first `start_idx` is there.
fn finish<E: Executor>(
    machine: &mut Machine<E>,
    tokens: &[u32],
    blocks: &[BlockId],
    mut start_idx: usize,
) -> Vec<f32> {
    loop {
        let chunk = &tokens[start_idx..tokens.len().min(start_idx + NUM_ROWS)];
        let logits = machine.run(vec![BatchSequence { tokens: chunk, start_idx, blocks, num_logits: 1 }]);
        start_idx += chunk.len();
        if start_idx == tokens.len() {
            return logits.into_iter().next().expect("one row");
        }
    }
}

/// The head in full, and the rest.
fn prefill<E: Executor>(machine: &mut Machine<E>, tokens: &[u32], head: usize) -> Vec<f32> {
    let blocks = machine.place(tokens.len());
    finish(machine, &tokens[..head], &blocks, 0);
    finish(machine, tokens, &blocks, head)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// With norms of keys and KV of eight bits, with a bias, with experts, with KV that has no tensor cores, with scaled rotations.
const MODELS: [(&str, KvDtype); 5] = [
    ("qwen3", KvDtype::Fp8),
    ("qwen2", KvDtype::Bf16),
    ("mixtral", KvDtype::Bf16),
    ("qwen3", KvDtype::F32),
    ("llama-rope-yarn", KvDtype::Bf16),
];

#[test]
fn with_every_token_selected_the_bits_are_those_of_a_full_prefill() {
    // They have three layers, so a ninth layer is the last one.
    for ((name, dtype), layer) in [(MODELS[0], 1), (MODELS[1], 2), (MODELS[3], 9)] {
        let block_size = if dtype == KvDtype::F32 { 5 } else { 8 };
        let mut machine = Machine::device(loaded(name, dtype, block_size), NUM_ROWS, Fp8Products::None);
        let tokens = prompt(NUM_TOKENS, 1);
        let expected = prefill(&mut machine, &tokens, HEAD);
        let blocks = machine.place(NUM_TOKENS);
        let all = Selection { layer, ..selection(1.0, SelectionOrder::Deviation) };
        let computed = blend(&mut machine, &tokens, &blocks, &PASSAGES, all);
        assert_eq!(computed.len(), HEAD);
        let found = finish(&mut machine, &tokens, &blocks, HEAD);
        assert_eq!(bits(&found), bits(&expected), "{name}, {}", dtype.name());
        machine.executor.device().check();
    }
}

#[test]
fn a_passage_with_nothing_before_it_is_reused_bit_for_bit() {
    const PASSAGE: Range<usize> = 0..HEAD;
    for (name, dtype) in [MODELS[0], MODELS[1]] {
        let mut machine = Machine::device(loaded(name, dtype, 8), NUM_ROWS, Fp8Products::None);
        let tokens = prompt(NUM_TOKENS, 2);
        let expected = prefill(&mut machine, &tokens, HEAD);
        let blocks = machine.place(NUM_TOKENS);
        let none = Selection { num_first_tokens: 0, ..selection(0.0, SelectionOrder::Deviation) };
        let computed = blend(&mut machine, &tokens, &blocks, std::slice::from_ref(&PASSAGE), none);
        assert!(computed.is_empty());
        let found = finish(&mut machine, &tokens, &blocks, HEAD);
        assert_eq!(bits(&found), bits(&expected), "{name}, {}", dtype.name());
    }
}

/// Gemma 3 with global layers only. It has a layer behind layer 2, and norms behind its products.
fn gemma3_without_windows() -> tempfile::TempDir {
    let (from, to) = (fixtures().join("gemma3"), tempfile::tempdir().unwrap());
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["layer_types"] = vec!["full_attention"; 4].into();
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(from.join("model.safetensors"), to.path().join("model.safetensors")).unwrap();
    to
}

/// Of the same tokens: which ones deviate most depends on roundings.
#[test]
fn blended_prompts_are_near_those_of_processors() {
    let gemma3 = gemma3_without_windows();
    // A whole path takes the place of a fixture's name.
    let late = (gemma3.path().to_str().unwrap(), KvDtype::Bf16, 2);
    let early = MODELS.map(|(name, dtype)| (name, dtype, 1));
    for (name, dtype, layer) in early.into_iter().chain([late]) {
        let mut pair = Pair::new(name, dtype, if dtype == KvDtype::F32 { 5 } else { 8 });
        let tokens = pair.prompt(NUM_TOKENS, 3);
        let place = pair.place(NUM_TOKENS);
        let cpu = passages(&mut pair.cpu, &tokens, &place[0], &PASSAGES);
        let device = passages(&mut pair.device, &tokens, &place[1], &PASSAGES);
        let (cpu, device) = ((&PASSAGES[..], &cpu[..]), (&PASSAGES[..], &device[..]));
        // All of them are more than a step of the largest size has.
        for ratio in if name == "qwen2" { &[0.1, 0.6][..] } else { &[0.6] } {
            let random = Selection { layer, ..selection(*ratio, SelectionOrder::Random { seed: 5 }) };
            let (place, head) = (pair.place(NUM_TOKENS), &tokens[..HEAD]);
            let (expected_rows, _) = blend_with(&mut pair.cpu, cpu, head, &place[0], random, false);
            let (rows, _) = blend_with(&mut pair.device, device, head, &place[1], random, false);
            assert_eq!(rows, expected_rows);
            let expected = finish(&mut pair.cpu, &tokens, &place[0], HEAD);
            let found = finish(&mut pair.device, &tokens, &place[1], HEAD);
            pair.assert_near(&found, &expected, &format!("blended, {ratio}"));
            // What follows, in the same step.
            let (_, expected) = blend_with(&mut pair.cpu, cpu, &tokens, &place[0], random, true);
            let (_, found) = blend_with(&mut pair.device, device, &tokens, &place[1], random, true);
            pair.assert_near(&found, &expected, &format!("blended to the end, {ratio}"));
        }
    }
}

#[test]
fn the_tokens_whose_keys_deviate_most_are_selected() {
    for (name, layer) in [("qwen3", 1), ("qwen2", 2)] {
        let mut pair = Pair::new(name, KvDtype::Bf16, 8);
        let tokens = pair.prompt(NUM_TOKENS, 4);
        let place = pair.place(NUM_TOKENS);
        let most = Selection { layer, ..selection(0.3, SelectionOrder::Deviation) };
        let expected = blend(&mut pair.cpu, &tokens, &place[0], &PASSAGES, most);
        let found = blend(&mut pair.device, &tokens, &place[1], &PASSAGES, most);
        let num_common = found.iter().filter(|position| expected.contains(position)).count();
        assert_eq!(found.len(), expected.len());
        // Deviations that roundings let change places.
        assert!(num_common + 6 >= expected.len(), "{name}: {num_common} of {}", expected.len());
    }
}

#[test]
fn models_with_windows_are_not_blended() {
    let mut machine = Machine::device(loaded("mistral", KvDtype::Bf16, 8), NUM_ROWS, Fp8Products::None);
    let refused = machine.executor.blending().err().expect("it has a window");
    assert!(matches!(refused, BlendRefusal::SlidingWindow { .. }), "{refused}");
}
