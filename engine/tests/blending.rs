//! Blended prompts through the engine: their tokens, what they share, what is counted, and who refuses.

mod support;

use std::{
    ops::Range,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use baton_engine::{
    BlendConfig, BlendCounts, BlendMarks, Drafter, EngineConfig, EngineError, EngineHandle, EngineThread,
    NUM_FIRST_TOKENS, PrefillEvent, Request, SampledToken, Speculation, SubmitError,
};
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_model::{Activations, Backend, Batch, CpuExecutor, ExecuteError, Executor, LoadOptions, load};
use baton_model_spec::{BlendRefusal, Blended, BlendedPrompt, BlendingExecutor, PassageKv};
use support::{Output, collect, config, request};

const VOCABULARY: u32 = 250;
const BLOCK_SIZE: usize = 8;
const FIRST: usize = NUM_FIRST_TOKENS;
const RATIO: f32 = 0.2;

/// An engine of a fixture, shut down when dropped.
struct Blending {
    engine: EngineHandle,
    _thread: EngineThread,
}

fn blending(max_store_bytes: usize) -> Option<BlendConfig> {
    Some(BlendConfig { max_store_bytes })
}

fn roomy() -> EngineConfig {
    EngineConfig { max_drafted_step_tokens: 16, context_length: 256, blending: blending(1 << 20), ..config() }
}

fn start(model: &str, config: EngineConfig) -> Blending {
    start_with(model, None, config)
}

fn start_with(model: &str, drafter: Option<Drafter>, config: EngineConfig) -> Blending {
    let speculation = |drafter| Speculation { drafter, max_draft_tokens: 4 };
    let executor = Box::new(executor(model));
    let (engine, thread) =
        baton_engine::start(executor, drafter.map(speculation), config).expect("an engine");
    Blending { engine, _thread: thread }
}

fn executor(model: &str) -> CpuExecutor {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures").join(model);
    let options = LoadOptions {
        block_size: BLOCK_SIZE,
        kv_dtype: Some(KvDtype::F32),
        activations: Activations::F32,
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = load(&dir, Backend::Cpu, &options, &mut |_| {}).expect("a fixture");
    model.cpu_executor().expect("a thread")
}

/// A model whose logits are not finite while it is bad.
struct Unsound {
    model: CpuExecutor,
    is_bad: Arc<AtomicBool>,
    logits: Vec<f32>,
}

impl Unsound {
    fn keep(&mut self, logits: Vec<f32>) -> &[f32] {
        self.logits = logits;
        if self.is_bad.load(Ordering::Relaxed) {
            self.logits.fill(f32::NAN);
        }
        &self.logits
    }
}

impl Executor for Unsound {
    fn kv_layout(&self) -> KvLayout {
        self.model.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        // SAFETY: as the caller promises.
        let logits = unsafe { self.model.execute(batch, storage, on_layer) }?.to_vec();
        Ok(self.keep(logits))
    }

    fn blending(&mut self) -> Result<&mut dyn BlendingExecutor, BlendRefusal> {
        Ok(self)
    }
}

impl BlendingExecutor for Unsound {
    fn max_blended_tokens(&self) -> usize {
        self.model.max_blended_tokens()
    }

    fn passage_token_bytes(&self) -> usize {
        self.model.passage_token_bytes()
    }

    unsafe fn compute_passage(
        &mut self,
        tokens: &[u32],
        blocks: &[BlockId],
        storage: &BlockStorage,
    ) -> Result<PassageKv, ExecuteError> {
        // SAFETY: as the caller promises.
        unsafe { self.model.compute_passage(tokens, blocks, storage) }
    }

    unsafe fn blend(
        &mut self,
        prompt: &BlendedPrompt<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Blended<'_>, ExecuteError> {
        // SAFETY: as the caller promises.
        let Blended { computed, logits } = unsafe { self.model.blend(prompt, storage, on_layer) }?;
        let logits = logits.to_vec();
        Ok(Blended { computed, logits: self.keep(logits) })
    }
}

impl Blending {
    async fn run(&self, request: &Request) -> Output {
        collect(self.engine.generate(request.clone()).expect("accepted")).await
    }

    fn blends(&self) -> BlendCounts {
        self.engine.blends().expect("it blends")
    }
}

fn text(seed: u32, num_tokens: u32) -> Vec<u32> {
    (0..num_tokens).map(|idx| (idx * idx * 13 + idx * (29 + seed) + seed * 7) % VOCABULARY).collect()
}

/// Three documents of different lengths; none fills its blocks.
fn documents() -> [Vec<u32>; 3] {
    [text(1, 37), text(2, 21), text(3, 30)]
}

/// Some text, the documents in an order, and a question; to be blended with a ratio or with [`RATIO`].
fn prompt(order: &[usize], question: u32, ratio: Option<f32>) -> Request {
    let mut tokens = text(9, 5);
    let mut passages: Vec<Range<usize>> = Vec::new();
    for &idx in order {
        let start = tokens.len();
        tokens.extend(&documents()[idx]);
        passages.push(start..tokens.len());
    }
    tokens.extend(text(question, 9));
    let ratio = Some(ratio.unwrap_or(RATIO));
    Request { blend: Some(BlendMarks { passages, layer: 1, ratio }), ..request(&tokens, 12) }
}

fn plain(request: &Request) -> Request {
    Request { blend: None, ..request.clone() }
}

fn num_cached(output: &Output) -> usize {
    output.end.as_ref().expect("it finished").1
}

#[tokio::test]
async fn with_every_token_computed_the_output_is_that_of_a_full_prefill() {
    for model in ["llama", "qwen3", "mixtral", "qwen3-moe"] {
        let blending = start(model, roomy());
        for order in [&[0, 1, 2][..], &[2, 0], &[1]] {
            let blended = blending.run(&prompt(order, 20, Some(1.0))).await;
            let full = blending.run(&plain(&prompt(order, 20, None))).await;
            assert_eq!(blended, full, "{model}, {order:?}: neither finds the other's blocks");
            assert_eq!(num_cached(&full), 0);
        }
    }
}

/// The model has three layers: whatever the ratio, all KV is computed.
#[tokio::test]
async fn with_keys_of_the_last_layer_the_output_is_that_of_a_full_prefill() {
    let blending = start("llama", EngineConfig { prefix_cache: false, ..roomy() });
    let full = blending.run(&plain(&prompt(&[0, 1, 2], 20, None))).await;
    for (layer, is_full) in [(1, false), (2, true), (8, true)] {
        let mut request = prompt(&[0, 1, 2], 20, None);
        request.blend.as_mut().expect("it has passages").layer = layer;
        assert_eq!(blending.run(&request).await == full, is_full, "layer {layer}");
    }
    assert_eq!(blending.blends().blended, 3);
}

#[tokio::test]
async fn passages_are_computed_once_and_found_at_any_position() {
    let blending = start("llama", roomy());
    let counts = |counts: BlendCounts| (counts.blended, counts.passages_computed, counts.passages_found);
    blending.run(&prompt(&[0, 1], 20, None)).await;
    assert_eq!(counts(blending.blends()), (1, 2, 0));
    blending.run(&prompt(&[1, 0, 2], 20, None)).await;
    assert_eq!(counts(blending.blends()), (2, 3, 2));
    blending.run(&prompt(&[2, 2], 20, None)).await;
    assert_eq!(counts(blending.blends()), (3, 3, 4));
    let BlendCounts { tokens, tokens_computed, tokens_reused, store_bytes, .. } = blending.blends();
    let head = |num_documents: u64, num_tokens: u64| {
        let rest = num_tokens - FIRST as u64 * num_documents;
        5 + FIRST as u64 * num_documents + (f64::from(RATIO) * rest as f64).round() as u64
    };
    assert_eq!(tokens, 5 + 58 + 5 + 88 + 5 + 60);
    assert_eq!(tokens_computed, head(2, 58) + head(3, 88) + head(2, 60));
    // Of the second prompt and of the third one, which has one document twice.
    let kept = |num_tokens: u64| num_tokens - FIRST as u64;
    let num_found = kept(37) + kept(21) + 2 * kept(30);
    assert!(
        (num_found / 2..num_found).contains(&tokens_reused),
        "{tokens_reused}: a fifth of them is computed"
    );
    assert!(store_bytes > 0);

    // Another tenant finds nothing.
    let other = Request { cache_salt: "other".into(), ..prompt(&[0, 1], 20, None) };
    blending.run(&other).await;
    assert_eq!(counts(blending.blends()), (4, 5, 4));
}

/// An engine whose store has room for so many tokens of passages.
fn start_with_room_for(num_tokens: usize) -> Blending {
    let bytes_per_token = 2 * 2 * 4 * {
        let roomy_engine = start("llama", roomy());
        let layout = roomy_engine.engine.storage().layout();
        assert_eq!(layout.num_layers, 3, "two are kept");
        layout.num_kv_heads * layout.head_dim
    };
    start("llama", EngineConfig { blending: blending(num_tokens * bytes_per_token), ..roomy() })
}

#[tokio::test]
async fn a_full_store_changes_no_tokens() {
    let roomy_engine = start("llama", roomy());
    // The longest document alone.
    let small = start_with_room_for(37);
    for order in [&[0, 1, 2][..], &[2, 1, 0]] {
        let expected = roomy_engine.run(&prompt(order, 20, None)).await.tokens;
        assert_eq!(small.run(&prompt(order, 20, None)).await.tokens, expected);
    }
    let counts = small.blends();
    assert_eq!((counts.passages_computed, counts.passages_found), (5, 1));
}

#[tokio::test]
async fn passages_that_memory_has_no_room_for_are_computed_in_full() {
    // A prompt of 88 may have four times as much.
    for (num_tokens, num_blended) in [(22, 1), (21, 0), (0, 0)] {
        let small = start_with_room_for(num_tokens);
        let request = prompt(&[0, 1, 2], 20, None);
        let blended = small.run(&request).await;
        let full = small.run(&plain(&request)).await;
        assert_eq!(small.blends().blended, num_blended);
        let is_same = (blended.tokens == full.tokens, num_cached(&full) > 0);
        assert_eq!(is_same, (num_blended == 0, num_blended == 0), "room for {num_tokens}");
    }
}

#[tokio::test]
async fn a_head_that_is_too_long_is_not_blended() {
    let blending = start("llama", EngineConfig { blending: blending(1 << 30), ..roomy() });
    let can_blend = |end: usize| {
        let passages = vec![0..64, 64..end];
        blending.engine.can_blend(&BlendMarks { passages, layer: 1, ratio: Some(RATIO) })
    };
    assert_eq!([32_512, 32_513].map(can_blend), [true, false]);
}

#[tokio::test]
async fn tokens_depend_neither_on_the_batch_nor_on_preemption_nor_on_retries() {
    let alone = start("llama", roomy());
    let orders: Vec<Vec<usize>> = vec![vec![0, 1, 2], vec![2, 1, 0], vec![1], vec![0, 2], vec![2, 0, 1]];
    let requests: Vec<Request> =
        orders.iter().zip(20..).map(|(order, nth)| prompt(order, nth, None)).collect();
    let mut expected = Vec::new();
    for request in &requests {
        expected.push(alone.run(request).await.tokens);
    }
    let full = alone.run(&plain(&requests[0])).await.tokens;
    assert_ne!(expected[0], full, "the documents' tokens are really reused");
    for (num_blocks, token_budget, prefix_cache, drafter) in [
        (256, 64, true, None),
        (256, 7, true, Some(Drafter::Ngram)),
        (20, 16, false, None),
        (20, 16, true, None),
    ] {
        let config = EngineConfig { num_blocks, token_budget, prefix_cache, context_length: 150, ..roomy() };
        let crowded = start_with("llama", drafter, EngineConfig { max_running: 4, ..config });
        let mut streams = Vec::new();
        for request in &requests {
            streams.push((crowded.engine.generate(request.clone()).expect("accepted"), true));
            streams.push((crowded.engine.generate(plain(request)).expect("accepted"), false));
        }
        let mut expected = expected.iter();
        for (stream, is_blended) in streams {
            let tokens = collect(stream).await.tokens;
            if is_blended {
                assert_eq!(&tokens, expected.next().expect("one each"), "{num_blocks}, {token_budget}");
            }
        }
        let report = crowded.engine.check_idle_integrity().await.expect("idle and whole");
        assert_eq!(report.num_owned, 0);
        if num_blocks == 20 {
            assert!(crowded.blends().blended >= requests.len() as u64);
        }
    }
    for num_delivered in [1, 5, 11] {
        let elsewhere = start("llama", roomy());
        let resumed = Request { output: expected[0][..num_delivered].to_vec(), ..requests[0].clone() };
        assert_eq!(elsewhere.run(&resumed).await.tokens, expected[0][num_delivered..]);
    }
}

#[tokio::test]
async fn only_prompts_that_are_blended_alike_share_blocks() {
    let blending = start("llama", roomy());
    let first = prompt(&[0, 1], 20, None);
    let output = blending.run(&first).await;
    assert_eq!(num_cached(&output), 0);
    assert_eq!(num_cached(&blending.run(&plain(&first)).await), 0, "no exact prefix");

    // The same documents in front of another question.
    let next = blending.run(&prompt(&[0, 1], 31, None)).await;
    assert_eq!(num_cached(&next), 0, "a head of 63 tokens ends within a block, so it is computed again");
    let aligned = |question: u32, ratio| {
        let mut request = prompt(&[0, 1], question, ratio);
        let marks = request.blend.as_mut().expect("it has passages");
        // The last document gives up its last tokens, so that the head ends with a block.
        marks.passages[1].end = 56;
        request
    };
    let first = blending.run(&aligned(20, None)).await;
    let num_blended = blending.blends().blended;
    assert_eq!(num_cached(&first), 0, "other passages");
    let again = blending.run(&aligned(20, None)).await;
    assert_eq!((num_cached(&again), &again.tokens), (64, &first.tokens));
    assert_eq!(num_cached(&blending.run(&aligned(31, None)).await), 56);
    assert_eq!(blending.blends().blended, num_blended, "nothing was blended again");
    assert_eq!(num_cached(&blending.run(&aligned(20, Some(0.3))).await), 0, "another ratio");
    let salted = Request { cache_salt: "other".into(), ..aligned(20, None) };
    assert_eq!(num_cached(&blending.run(&salted).await), 0);
}

/// One of them may be the reason, also one that an earlier request brought.
#[tokio::test]
async fn passages_of_a_request_with_invalid_logits_are_not_found_again() {
    let is_bad = Arc::new(AtomicBool::new(false));
    let executor = Unsound { model: executor("llama"), is_bad: is_bad.clone(), logits: Vec::new() };
    let config = EngineConfig { prefix_cache: false, ..roomy() };
    let (engine, thread) = baton_engine::start(Box::new(executor), None, config).expect("an engine");
    let blending = Blending { engine, _thread: thread };
    let found_and_computed = || {
        let BlendCounts { passages_found, passages_computed, .. } = blending.blends();
        (passages_found, passages_computed)
    };
    let expected = blending.run(&prompt(&[0, 1], 20, None)).await;
    is_bad.store(true, Ordering::Relaxed);
    let failed = blending.run(&prompt(&[1, 2], 20, None)).await;
    assert_eq!((failed.end, found_and_computed()), (Err(EngineError::InvalidLogits), (1, 3)));
    is_bad.store(false, Ordering::Relaxed);
    let again = blending.run(&prompt(&[0, 1], 20, None)).await;
    assert_eq!((again.tokens, found_and_computed()), (expected.tokens, (2, 4)), "the second was forgotten");
    blending.run(&prompt(&[2], 20, None)).await;
    assert_eq!(found_and_computed(), (2, 5));
}

#[tokio::test]
async fn a_blended_prefill_hands_over_every_piece_once_and_its_blocks_decode_elsewhere() {
    let p = start("llama", EngineConfig { token_budget: 24, ..roomy() });
    let d = start("llama", roomy());
    let request = prompt(&[2, 0, 1], 20, None);
    let expected = d.run(&request).await.tokens;
    let layout = *p.engine.storage().layout();
    let num_blocks = layout.num_blocks_for(request.prompt.len());

    let d = start("llama", roomy());
    let reservation = d.engine.reserve(request.clone()).await.expect("there is room");
    let (mut events, _held) = p.engine.prefill(request.clone()).expect("accepted");
    let mut num_ready = vec![0; layout.num_layers * num_blocks];
    let mut num_told = Vec::new();
    let first = loop {
        match events.next().await.expect("a terminal event comes first") {
            PrefillEvent::Started { cached_tokens } => assert_eq!(cached_tokens, 0),
            PrefillEvent::Ready { layers, first_block_idx, blocks } => {
                for layer_idx in layers {
                    for (idx, &block) in (first_block_idx..).zip(&blocks) {
                        num_ready[layer_idx * num_blocks + idx] += 1;
                        // SAFETY: the piece was announced, and no other code writes the reserved block.
                        unsafe {
                            let to = d.engine.storage().layer_mut(reservation.blocks()[idx], layer_idx);
                            to.copy_from_slice(p.engine.storage().layer(block, layer_idx));
                        }
                    }
                }
            }
            PrefillEvent::Adopted { .. } => unreachable!("nothing came from outside"),
            PrefillEvent::Blended { reused_tokens } => num_told.push(reused_tokens),
            PrefillEvent::FirstToken(token) => break token,
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    };
    assert!(num_ready.iter().all(|&num| num == 1), "{num_ready:?}");
    let mut tokens = vec![first.id];
    tokens.extend(collect(d.engine.decode(reservation, first).expect("accepted")).await.tokens);
    assert_eq!(tokens, expected);
    assert_eq!(d.blends(), BlendCounts::default(), "it blended nothing");
    assert_eq!(num_told, [0], "all passages were new");
    // What it received is cached as what it is.
    assert_eq!(num_cached(&d.run(&plain(&request)).await), 0);
}

#[tokio::test]
async fn engines_that_do_not_blend_compute_in_full() {
    let request = prompt(&[0, 1], 20, None);
    for (model, config) in [("gemma3", roomy()), ("llama", EngineConfig { blending: None, ..roomy() })] {
        let refusing = start(model, config);
        let blended = refusing.run(&request).await;
        let full = refusing.run(&plain(&request)).await;
        assert_eq!(blended.tokens, full.tokens);
        assert_eq!(num_cached(&full), 64, "it is an exact prefix");
        assert_eq!(refusing.engine.blends(), None);
        // What another engine may have blended is no exact prefix.
        let other = prompt(&[1, 0], 20, None);
        let reservation = refusing.engine.reserve(other.clone()).await.expect("there is room");
        let first = SampledToken { id: 1, logprobs: None };
        collect(refusing.engine.decode(reservation, first).expect("accepted")).await;
        assert_eq!(num_cached(&refusing.run(&plain(&other)).await), 0);
    }
}

#[tokio::test]
async fn a_prompt_without_a_ratio_is_computed_in_full() {
    let blending = start("llama", roomy());
    let mut undecided = prompt(&[0, 1], 20, None);
    undecided.blend.as_mut().expect("it has passages").ratio = None;
    let output = blending.run(&undecided).await;
    let full = blending.run(&plain(&undecided)).await;
    assert_eq!((&output.tokens, num_cached(&full)), (&full.tokens, 64));
    assert_eq!(blending.blends(), BlendCounts::default());
}

#[tokio::test]
async fn bad_marks_are_refused_at_once() {
    let blending = start("llama", roomy());
    let mut bad = prompt(&[0, 1], 20, None);
    bad.blend.as_mut().expect("it has passages").passages.reverse();
    let Err(SubmitError::Invalid(error)) = blending.engine.generate(bad) else { panic!("accepted") };
    assert_eq!(error.to_string(), "blend.passages: a passage begins at 5, and the one before it ends at 63");
}
