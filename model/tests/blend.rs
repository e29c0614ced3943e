//! Blended prompts against full prefills, on every architecture that can blend.

mod machine;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::slice;

use baton_kv_cache::KvDtype;
use baton_model::{Backend, LoadOptions, load};
use baton_model_cpu::PassageNumbers;
use baton_model_spec::{
    BatchSequence, BlendPassage, BlendRatio, BlendRefusal, BlendedPrompt, DecoderSpec, FIRST_KEPT_LAYER,
    PassageKv, RopeScaling, RopeSpec, Selection, SelectionOrder,
};

use machine::{CASES, Machine, Place, bits, dir_of, exact};

/// Fixtures with sliding windows.
const REFUSED: &[&str] = &["gemma2", "gemma3", "gemma3-legacy-linear", "mistral", "phi3", "qwen2-window"];

const NUM_TOKENS: usize = 150;
/// Text, a passage, text, and two passages that touch; neither begins or ends with a block.
const PASSAGES: [Range<usize>; 3] = [9..49, 53..54, 54..130];
/// The end of the last passage.
const HEAD: usize = 130;
/// No model has such a layer: the keys of its last one decide.
const TOO_LATE: usize = 9;

fn tokens() -> Vec<u32> {
    (0..NUM_TOKENS as u32).map(|idx| (idx * idx * 7 + idx * 31 + 3) % 250).collect()
}

fn selection(ratio: f32, num_first_tokens: usize) -> Selection {
    let ratio = BlendRatio::new(ratio).unwrap();
    Selection { layer: FIRST_KEPT_LAYER, num_first_tokens, ratio, order: SelectionOrder::Deviation }
}

fn compute_passages(machine: &mut Machine, tokens: &[u32], ranges: &[Range<usize>]) -> Vec<PassageKv> {
    let place = machine.place(tokens.len());
    let blender = machine.executor.blending().unwrap();
    let token_bytes = blender.passage_token_bytes();
    // SAFETY: no other code uses the storage.
    let compute = |range: &Range<usize>| unsafe {
        blender.compute_passage(&tokens[range.clone()], &place.blocks, &machine.storage).unwrap()
    };
    let kvs: Vec<PassageKv> = ranges.iter().map(compute).collect();
    assert!(kvs.iter().all(|kv| kv.size_bytes() == kv.num_tokens() * token_bytes));
    kvs
}

/// Blends the tokens up to `head` and returns how many were computed in all layers.
fn blend(
    machine: &mut Machine,
    place: &Place,
    tokens: &[u32],
    ranges: &[Range<usize>],
    head: usize,
    selection: Selection,
) -> usize {
    blend_to(machine, place, &tokens[..head], ranges, selection, false).0
}

/// The same for all tokens, perhaps with the logits after the last one.
fn blend_to(
    machine: &mut Machine,
    place: &Place,
    tokens: &[u32],
    ranges: &[Range<usize>],
    selection: Selection,
    wants_logits: bool,
) -> (usize, Vec<f32>) {
    let kvs = compute_passages(machine, tokens, ranges);
    let passage = |(range, kv): (&Range<usize>, _)| BlendPassage { start_idx: range.start, kv };
    let passages: Vec<BlendPassage<'_>> = ranges.iter().zip(&kvs).map(passage).collect();
    let prompt =
        BlendedPrompt { tokens, blocks: &place.blocks, passages: &passages, selection, wants_logits };
    let mut layers = Vec::new();
    let blender = machine.executor.blending().unwrap();
    // SAFETY: no other code uses the storage.
    let blended =
        unsafe { blender.blend(&prompt, &machine.storage, &mut |layer_idx| layers.push(layer_idx)) }.unwrap();
    let blended = (blended.computed.len(), blended.logits.to_vec());
    assert_eq!(layers, (0..machine.storage.layout().num_layers).collect::<Vec<_>>());
    blended
}

/// The bytes of a layer's KV in the full blocks of the first `num_tokens` tokens.
fn kv(machine: &Machine, place: &Place, num_tokens: usize, layer_idx: usize) -> Vec<u8> {
    let blocks = &place.blocks[..num_tokens / place.block_size];
    // SAFETY: no other code uses the storage.
    blocks.iter().flat_map(|&block| unsafe { machine.storage.layer(block, layer_idx) }.to_vec()).collect()
}

fn assert_same(name: &str, machine: &mut Machine, one: &Place, other: &Place, head: usize, tokens: &[u32]) {
    for layer_idx in 0..machine.storage.layout().num_layers {
        let same = kv(machine, one, head, layer_idx) == kv(machine, other, head, layer_idx);
        assert!(same, "{name}: KV of layer {layer_idx}");
    }
    let [one, other] = [one, other].map(|place| bits(&machine.prefill(place, tokens, head, 7)));
    assert_eq!(one, other, "{name}: logits");
}

/// The models that blend: fixtures, and Gemma 3 with global layers only.
fn models() -> Vec<(String, PathBuf, Option<tempfile::TempDir>)> {
    let fixtures = CASES.iter().filter(|name| !REFUSED.contains(name));
    let mut models: Vec<_> = fixtures.map(|name| (name.to_string(), dir_of(name), None)).collect();
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir_of("gemma3")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("config.json");
    let text =
        std::fs::read_to_string(&config).unwrap().replace("\"sliding_attention\",", "\"full_attention\",");
    let text = text.replace("\"sliding_attention\"\n", "\"full_attention\"\n");
    std::fs::write(&config, text).unwrap();
    models.push(("gemma3, global layers".into(), dir.path().to_owned(), Some(dir)));
    models
}

/// Formats of KV, sizes of blocks, numbers of threads.
const FORMATS: [(Option<KvDtype>, usize, usize); 4] =
    [(Some(KvDtype::F32), 16, 2), (None, 5, 3), (Some(KvDtype::Fp8), 16, 1), (Some(KvDtype::Int8), 5, 2)];

fn formats() -> impl Iterator<Item = LoadOptions> {
    FORMATS.into_iter().map(|(kv_dtype, block_size, threads)| {
        let activations = LoadOptions::default().activations;
        LoadOptions { kv_dtype, block_size, threads: Some(threads), activations, ..exact() }
    })
}

#[test]
fn with_every_token_selected_the_bits_are_those_of_a_full_prefill() {
    let tokens = tokens();
    for (name, dir, _guard) in models() {
        // A selecting layer for each of the formats.
        for (options, layer) in formats().zip([2, 1, TOO_LATE, 1]) {
            let mut machine = Machine::new(&dir, &options);
            let (full, blended) = (machine.place(NUM_TOKENS), machine.place(NUM_TOKENS));
            machine.prefill(&full, &tokens, 0, usize::MAX);
            let all = Selection { layer, ..selection(1.0, 0) };
            let num_computed = blend(&mut machine, &blended, &tokens, &PASSAGES, HEAD, all);
            assert_eq!(num_computed, HEAD);
            assert_same(&name, &mut machine, &full, &blended, HEAD, &tokens);
        }
    }
}

#[test]
fn what_follows_a_head_is_the_same_in_its_step_or_after_it() {
    let tokens = tokens();
    for (name, dir, _guard) in models() {
        let mut machine = Machine::new(&dir, &exact());
        let (apart, together) = (machine.place(NUM_TOKENS), machine.place(NUM_TOKENS));
        blend(&mut machine, &apart, &tokens, &PASSAGES, HEAD, selection(0.3, 2));
        let expected = bits(&machine.prefill(&apart, &tokens, HEAD, 7));
        let (_, logits) = blend_to(&mut machine, &together, &tokens, &PASSAGES, selection(0.3, 2), true);
        assert_eq!(bits(&logits), expected, "{name}");
        for layer_idx in 0..machine.storage.layout().num_layers {
            let same =
                kv(&machine, &apart, NUM_TOKENS, layer_idx) == kv(&machine, &together, NUM_TOKENS, layer_idx);
            assert!(same, "{name}: KV of layer {layer_idx}");
        }
    }
}

#[test]
fn a_passage_with_nothing_before_it_is_reused_bit_for_bit() {
    const PASSAGE: Range<usize> = 0..100;
    let tokens = tokens();
    for (name, dir, _guard) in models() {
        for options in formats() {
            let mut machine = Machine::new(&dir, &options);
            // Text after the passage is computed; or there is none, and no token is computed in all layers.
            for head in [110, 100] {
                let (full, blended) = (machine.place(NUM_TOKENS), machine.place(NUM_TOKENS));
                machine.prefill(&full, &tokens, 0, usize::MAX);
                let passage = slice::from_ref(&PASSAGE);
                let num_computed = blend(&mut machine, &blended, &tokens, passage, head, selection(0.0, 0));
                assert_eq!(num_computed, head - 100);
                assert_same(&name, &mut machine, &full, &blended, head, &tokens);
            }
        }
    }
}

/// The keys of a token in a layer, of a storage with f32.
fn keys_at(machine: &Machine, place: &Place, position: usize, layer_idx: usize) -> Vec<f32> {
    let layout = machine.storage.layout();
    let (block, slot) = (place.blocks[position / place.block_size], position % place.block_size);
    // SAFETY: no other code uses the storage.
    let piece = unsafe { machine.storage.layer(block, layer_idx) };
    let head = |head_idx| {
        let at = layout.head_offset(head_idx) + layout.token_offset(slot);
        piece[at..at + 4 * layout.head_dim].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()))
    };
    (0..layout.num_kv_heads).flat_map(head).collect()
}

/// Rotates keys as the formula says, in f64.
fn rotated(keys: &[f32], head_dim: usize, rope: &RopeSpec, position: usize) -> Vec<f64> {
    let frequencies = rope.inverse_frequencies();
    let half = frequencies.len();
    let mut keys: Vec<f64> = keys.iter().map(|&x| f64::from(x)).collect();
    for head in keys.chunks_exact_mut(head_dim) {
        for (idx, &frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
            let factor = f64::from(rope.attention_factor());
            let (a, b) = (head[idx], head[idx + half]);
            head[idx] = factor * (a * cos - b * sin);
            head[idx + half] = factor * (b * cos + a * sin);
        }
    }
    keys
}

fn spec_of(dir: &Path) -> DecoderSpec {
    load(dir, Backend::Cpu, &exact(), &mut |_| {}).unwrap().shard().spec().clone()
}

#[test]
fn tokens_that_are_not_selected_keep_their_passages_keys_rotated_to_their_positions() {
    let tokens = tokens();
    for (name, dir, _guard) in models() {
        let spec = spec_of(&dir);
        let mut machine = Machine::new(&dir, &exact());
        let full = machine.place(NUM_TOKENS);
        machine.prefill(&full, &tokens, 0, usize::MAX);
        let passages = compute_passages(&mut machine, &tokens, &PASSAGES);
        for layer in [1, 2, TOO_LATE] {
            let blended = machine.place(NUM_TOKENS);
            let some = Selection { layer, ..selection(0.2, 2) };
            let num_computed = blend(&mut machine, &blended, &tokens, &PASSAGES, HEAD, some);
            assert_eq!(num_computed, 9 + 4 + 2 + 1 + 2 + 22, "text, first tokens, a fifth of 112 others");
            let num_exact = spec.layers.len().min(layer + 1);
            for layer_idx in 0..spec.layers.len() {
                let same = kv(&machine, &full, HEAD, layer_idx) == kv(&machine, &blended, HEAD, layer_idx);
                assert_eq!(same, layer_idx < num_exact, "{name}: {num_exact} layers are exact; {layer_idx}");
            }
            for layer_idx in num_exact..spec.layers.len() {
                let num = num_kept(&machine, &blended, &spec, &passages, layer_idx);
                assert_eq!(num, HEAD - num_computed, "{name}: layer {layer_idx}, selected by {layer}");
            }
            // What follows is computed as ever over this KV, in chunks of any size.
            let logits: Vec<_> =
                [1, 3, 20].map(|chunk| bits(&machine.prefill(&blended, &tokens, HEAD, chunk))).into();
            assert!(logits.windows(2).all(|pair| pair[0] == pair[1]), "{name}, {layer}");
        }
    }
}

/// How many tokens of the passages have the keys in a layer that their passage has, rotated to their positions.
fn num_kept(
    machine: &Machine,
    place: &Place,
    spec: &DecoderSpec,
    passages: &[PassageKv],
    layer_idx: usize,
) -> usize {
    let rope = &spec.ropes[spec.layers[layer_idx].rope_idx];
    let is_kept = |own: &[f32], position: usize| {
        let expected = rotated(own, spec.head_dim, rope, position);
        let got = keys_at(machine, place, position, layer_idx);
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        got.iter().zip(&expected).all(|(a, b)| (f64::from(*a) - b).abs() <= 1e-5 * largest)
    };
    let of_passage = |(range, passage): (&Range<usize>, &PassageKv)| {
        let (keys, _) = passage.numbers::<PassageNumbers>().layer(layer_idx);
        let tokens = keys.chunks_exact(spec.kv_width()).zip(range.clone());
        tokens.filter(|&(own, position)| is_kept(own, position)).count()
    };
    PASSAGES.iter().zip(passages).map(of_passage).sum()
}

#[test]
fn a_blend_repeats_bit_for_bit_on_any_number_of_threads() {
    let tokens = tokens();
    for name in ["llama", "qwen3-moe"] {
        let runs = [1, 2, 3].map(|threads| {
            let options = LoadOptions { threads: Some(threads), ..exact() };
            let mut machine = Machine::new(&dir_of(name), &options);
            let place = machine.place(NUM_TOKENS);
            blend(&mut machine, &place, &tokens, &PASSAGES, HEAD, selection(0.3, 1));
            machine.run(vec![BatchSequence {
                tokens: &tokens[HEAD..],
                start_idx: HEAD,
                blocks: &place.blocks,
                num_logits: 3,
            }])
        });
        assert!(runs[0] == runs[1] && runs[0] == runs[2], "{name}");
    }
}

#[test]
fn models_with_sliding_windows_long_rope_or_one_layer_and_parallel_ranks_refuse() {
    for name in REFUSED {
        let error = Machine::new(&dir_of(name), &exact()).executor.blending().err().expect(name);
        assert!(matches!(error, BlendRefusal::SlidingWindow { .. }), "{name}: {error}");
    }
    let error = Machine::new(&dir_of("gemma2"), &exact()).executor.blending().err().unwrap();
    assert_eq!(error.to_string(), "layer 0 has a sliding window of 24 tokens");
    let mut spec = spec_of(&dir_of("llama"));
    assert_eq!(spec.check_blending(), Ok(()));
    let rope = spec.ropes[0].clone();
    let divisors = vec![2.0; rope.rotary_dim / 2];
    spec.ropes[0].scaling = RopeScaling::LongRope { divisors, attention_factor: 1.0 };
    assert_eq!(spec.check_blending(), Err(BlendRefusal::LongRope { layer_idx: 0 }));
    spec.ropes[0] = rope;
    spec.layers.truncate(1);
    assert_eq!(spec.check_blending(), Err(BlendRefusal::TooFewLayers { num_layers: 1 }));
    let error = Machine::parallel(&dir_of("llama"), &exact(), 2).executor.blending().err().unwrap();
    assert_eq!(error, BlendRefusal::Backend);
}
