//! A whole model on a device through the engine. The device is emulated unless `BATON_KERNELS_ON` names one. The
//! device samples the same tokens as the host.

mod support;

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use baton_cuda_emulator::{
    files::repository,
    models::{
        MEMORY_BYTES, sampled_by_host, test_model, test_model_of_ranks, test_models, test_models_of_ranks,
    },
};
use baton_engine::{
    BlendConfig, BlendMarks, Drafter, EngineConfig, EngineError, EngineHandle, EngineThread, FinishReason,
    PrefillEvent, Request, SampledToken, SamplingParams, Speculation,
};
use baton_kv_cache::BlockStorage;
use baton_model::{
    Activations, Backend, BatchLimits, DeviceModel, Executor, LoadOptions, load, load_for_device,
    load_ranks_for_devices,
};
use baton_request::{Grammar, GrammarKind, SpeculationMode};
use support::{config, kinds::read, request};

const LIMITS: BatchLimits =
    BatchLimits { num_rows: 64, num_sequences: 8, context_length: 128, num_blended: 512 };

#[derive(Clone, Copy, Debug, PartialEq)]
enum SamplingSide {
    OnDevice,
    OnHost,
}

/// The tiny model.
fn fixture() -> PathBuf {
    repository().join("tests/parity/fixtures/qwen3")
}

fn options() -> LoadOptions {
    // The tests compare runs in which a sequence meets other sequences at other times: on a GPU its bits depend on them
    // otherwise.
    LoadOptions { block_size: 8, threads: Some(1), is_deterministic: true, ..LoadOptions::default() }
}

fn loaded(dir: &Path) -> DeviceModel {
    load_for_device(dir, &options()).expect("a fixture")
}

fn engine_config() -> EngineConfig {
    EngineConfig {
        num_blocks: 64,
        max_running: LIMITS.num_sequences,
        token_budget: LIMITS.num_rows,
        context_length: LIMITS.context_length,
        blending: Some(BlendConfig { max_store_bytes: 1 << 20 }),
        ..config()
    }
}

fn on_device(dir: &Path, sampling: SamplingSide, drafter: Option<Drafter>) -> (EngineHandle, EngineThread) {
    start(test_model(loaded(dir), LIMITS, engine_config().num_blocks), sampling, drafter)
}

fn two_ranks() -> Vec<DeviceModel> {
    load_ranks_for_devices(&fixture(), 2, &options()).expect("a fixture")
}

fn on_two_devices(sampling: SamplingSide) -> (EngineHandle, EngineThread) {
    start(test_model_of_ranks(two_ranks(), LIMITS, engine_config().num_blocks), sampling, None)
}

fn start(
    (executor, storage): (Box<dyn Executor>, BlockStorage),
    sampling: SamplingSide,
    drafter: Option<Drafter>,
) -> (EngineHandle, EngineThread) {
    let executor = if sampling == SamplingSide::OnHost { sampled_by_host(executor) } else { executor };
    let speculation = |drafter| Speculation { drafter, max_draft_tokens: 4 };
    baton_engine::start_over(storage, executor, drafter.map(speculation), engine_config()).expect("it starts")
}

/// A draft model that is mostly right: the same model with weights of eight bits.
fn loaded_draft() -> DeviceModel {
    let int8 = "int8".parse().expect("it is one");
    let options = LoadOptions { quantise: Some(int8), ..options() };
    load_for_device(&fixture(), &options).expect("a fixture")
}

fn drafter((executor, storage): (Box<dyn Executor>, BlockStorage)) -> Option<Drafter> {
    Some(Drafter::Model { executor, storage: Some(storage), cost: 0.2 })
}

/// An engine with a draft model on the device.
fn with_draft_model(sampling: SamplingSide) -> (EngineHandle, EngineThread) {
    let num_blocks = engine_config().num_blocks;
    let target = loaded(&fixture());
    let models = test_models(target, loaded_draft(), LIMITS, num_blocks, MEMORY_BYTES);
    let (target, draft) = models.expect("both fit");
    start(target, sampling, drafter(draft))
}

/// An engine of two ranks, with a draft model on the device of the first.
fn on_two_devices_with_draft_model() -> (EngineHandle, EngineThread) {
    let num_blocks = engine_config().num_blocks;
    let (target, draft) = test_models_of_ranks(two_ranks(), loaded_draft(), LIMITS, num_blocks);
    start(target, SamplingSide::OnDevice, drafter(draft))
}

fn prompt(seed: u32, num_tokens: u32) -> Vec<u32> {
    (0..num_tokens).map(|idx| (idx * 37 + seed * 101 + idx * idx % 7) % 250).collect()
}

/// Requests with every parameter of sampling.
fn requests(max_tokens: u32) -> Vec<Request> {
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 1.5, ..greedy.clone() };
    let kinds = [
        SamplingParams { logprobs: Some(3), ..greedy.clone() },
        SamplingParams { stop_token_ids: (0..128).collect(), min_tokens: 3, ..greedy },
        SamplingParams { logprobs: Some(0), ..warm.clone() },
        SamplingParams { top_k: 30, logprobs: Some(20), ..warm.clone() },
        SamplingParams { top_p: 0.9, min_p: 0.01, ..warm.clone() },
        SamplingParams { top_k: 100, logit_bias: vec![(3, 2.5), (7, -4.0)], ..warm.clone() },
        SamplingParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.7,
            frequency_penalty: 0.9,
            top_p: 0.95,
            logprobs: Some(2),
            ..warm
        },
        // The biases are unsorted: the host samples.
        SamplingParams {
            temperature: 1.5,
            logit_bias: vec![(9, 2.5), (1, 4.0)],
            ..SamplingParams::default()
        },
    ];
    let request = |(idx, kind): (u32, &SamplingParams)| Request {
        sampling: SamplingParams { max_tokens, seed: 10 + u64::from(idx), ..kind.clone() },
        ..request(&prompt(idx, 3 + idx), 0)
    };
    (0..).zip(&kinds).map(request).collect()
}

type Seen = (Vec<SampledToken>, Result<FinishReason, EngineError>);

async fn run(engine: &EngineHandle, requests: Vec<Request>) -> Vec<Seen> {
    let streams: Vec<_> =
        requests.into_iter().map(|request| engine.generate(request).expect("accepted")).collect();
    let mut seen = Vec::new();
    for stream in streams {
        let (tokens, end, _) = read(stream).await;
        seen.push((tokens, end));
    }
    engine.check_idle_integrity().await.expect("idle and whole");
    seen
}

/// Compares tokens exactly, and log-probabilities within the difference of sums in f32 and in f64: products are the same
/// in all runs.
fn assert_same(found: &[Seen], expected: &[Seen]) {
    assert_eq!(found.len(), expected.len());
    for (idx, (found, expected)) in found.iter().zip(expected).enumerate() {
        let ids = |seen: &Seen| seen.0.iter().map(|token| token.id).collect::<Vec<_>>();
        assert_eq!((ids(found), &found.1), (ids(expected), &expected.1), "request {idx}");
        for (found, expected) in found.0.iter().zip(&expected.0) {
            let (Some(found), Some(expected)) = (&found.logprobs, &expected.logprobs) else {
                assert_eq!(found.logprobs, expected.logprobs);
                continue;
            };
            let all = |logprobs: &baton_engine::TokenLogprobs| {
                let top = logprobs.top.iter().copied();
                top.chain([(0, logprobs.logprob)]).collect::<Vec<_>>()
            };
            assert_eq!(all(found).len(), all(expected).len());
            for (found, expected) in all(found).into_iter().zip(all(expected)) {
                assert_eq!(found.0, expected.0, "request {idx}");
                assert!((found.1 - expected.1).abs() < 1e-5, "request {idx}: {found:?}, {expected:?}");
            }
        }
    }
}

#[tokio::test]
async fn the_device_samples_the_tokens_of_the_host() {
    let (by_device, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let (by_host, _other) = on_device(&fixture(), SamplingSide::OnHost, None);
    let expected = run(&by_host, requests(6)).await;
    assert!(expected.iter().any(|(_, end)| *end == Ok(FinishReason::Stop)));
    assert_same(&run(&by_device, requests(6)).await, &expected);

    // Without the last request steps are computed ahead.
    let but_one: Vec<Request> = requests(5).into_iter().take(7).collect();
    let expected = run(&by_host, but_one.clone()).await;
    assert_same(&run(&by_device, but_one).await, &expected);
}

/// Also the first one, while nothing is counted: a token of the output is likelier right after it, or less likely.
#[tokio::test]
async fn tokens_are_penalised_before_the_host_knows_them() {
    let (by_device, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let (by_host, _other) = on_device(&fixture(), SamplingSide::OnHost, None);
    for penalty in [-2.0, 2.0] {
        let sampling = SamplingParams {
            max_tokens: 4,
            presence_penalty: penalty,
            frequency_penalty: penalty,
            ..SamplingParams::default()
        };
        let penalised = |seed| Request { sampling: sampling.clone(), ..request(&prompt(seed, 5), 0) };
        let penalised: Vec<Request> = (1..4).map(penalised).collect();
        let expected = run(&by_host, penalised.clone()).await;
        assert_same(&run(&by_device, penalised).await, &expected);
    }
}

/// The device gets the masks while it computes the step, also of a step ahead and of drafts.
#[tokio::test]
async fn masked_tokens_are_those_of_the_host() {
    let (by_device, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let (by_host, _other) = on_device(&fixture(), SamplingSide::OnHost, None);
    let constrained = |text: &str, seed: u32, speculation| {
        let grammar = Some(Grammar::new(GrammarKind::Regex, text));
        let sampling =
            SamplingParams { grammar, temperature: 1.2, max_tokens: 14, ..SamplingParams::default() };
        Request { sampling, speculation, ..request(&prompt(seed, 6), 0) }
    };
    let requests = vec![
        constrained("(a|b|ab){9}", 1, SpeculationMode::Off),
        requests(12).swap_remove(2),
        constrained("(a|b)abababababab(a|b)*", 2, SpeculationMode::Auto),
        constrained("(a|b){12}", 3, SpeculationMode::Auto),
    ];
    let expected = run(&by_host, requests.clone()).await;
    assert_same(&run(&by_device, requests).await, &expected);
    assert!(expected.iter().all(|(tokens, end)| !tokens.is_empty() && end.is_ok()), "{expected:?}");
}

#[tokio::test]
async fn several_ranks_sample_the_tokens_of_the_host() {
    let (by_device, _thread) = on_two_devices(SamplingSide::OnDevice);
    let (by_host, _other) = on_two_devices(SamplingSide::OnHost);
    let requests: Vec<Request> = requests(5).into_iter().take(7).collect();
    let expected = run(&by_host, requests.clone()).await;
    assert_same(&run(&by_device, requests).await, &expected);
}

#[tokio::test]
async fn greedy_tokens_are_those_of_the_cpu() {
    let (by_device, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let options = LoadOptions { activations: Activations::F32, ..options() };
    let executor = load(&fixture(), Backend::Cpu, &options, &mut |_| {})
        .expect("a fixture")
        .cpu_executor()
        .expect("a thread");
    let (cpu, _other) = baton_engine::start(Box::new(executor), None, engine_config()).expect("it starts");
    let requests: Vec<Request> = (1..4).map(|seed| request(&prompt(seed, 8 + 9 * seed), 6)).collect();
    assert_same(&run(&by_device, requests.clone()).await, &run(&cpu, requests).await);
}

/// Runs one request after the other, so that drafts and the numbers of rows are the same.
#[tokio::test]
async fn drafts_are_verified_on_the_device() {
    let (by_device, _thread) = on_device(&fixture(), SamplingSide::OnDevice, Some(Drafter::Ngram));
    let (by_host, _other) = on_device(&fixture(), SamplingSide::OnHost, Some(Drafter::Ngram));
    for idx in [0, 3, 6] {
        let request = requests(8).remove(idx);
        // A repeating text.
        let sampling = SamplingParams { logit_bias: vec![(1, 9.0), (2, 9.0), (3, 9.0)], ..request.sampling };
        let repeating = Request { prompt: [1, 2, 3].repeat(4 + idx).into(), sampling, ..request };
        let expected = run(&by_host, vec![repeating.clone()]).await;
        assert_same(&run(&by_device, vec![repeating]).await, &expected);
    }
    let (_, counts) = by_device.drafts().expect("it drafts");
    assert!(0 < counts.accepted && counts.accepted < counts.drafted, "{counts:?}");
    assert_eq!(by_host.drafts(), by_device.drafts());
}

/// The number of drafts varies between runs, and with it the number of rows.
#[tokio::test]
async fn a_draft_model_on_the_device_changes_no_token() {
    let (plain, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let chosen = |range: Range<usize>| -> Vec<Request> {
        let kinds = [0, 6, 3];
        kinds[range].iter().map(|&idx| requests(9).swap_remove(idx)).collect()
    };
    let expected = run(&plain, chosen(0..3)).await;
    // Draft model and target may sample on different sides.
    for (sampling, range) in [(SamplingSide::OnDevice, 0..3), (SamplingSide::OnHost, 2..3)] {
        let (drafted, _other) = with_draft_model(sampling);
        assert_same(&run(&drafted, chosen(range.clone())).await, &expected[range]);
        let (_, counts) = drafted.drafts().expect("it drafts");
        assert!(0 < counts.accepted && counts.accepted < counts.drafted, "{sampling:?}: {counts:?}");
    }
}

/// Neither a greedy token nor a sampled one.
#[tokio::test]
async fn a_draft_model_changes_no_token_of_several_ranks() {
    let (plain, _thread) = on_two_devices(SamplingSide::OnDevice);
    let (drafted, _other) = on_two_devices_with_draft_model();
    let chosen = || -> Vec<Request> { [0, 3].map(|idx| requests(7).swap_remove(idx)).into() };
    assert_same(&run(&drafted, chosen()).await, &run(&plain, chosen()).await);
    let (_, counts) = drafted.drafts().expect("it drafts");
    assert!(0 < counts.accepted && counts.accepted < counts.drafted, "{counts:?}");
}

/// Also beside sequences that decode: a step of a head alone samples nothing, so it is not launched.
#[tokio::test]
async fn heads_are_blended_on_the_device() {
    let (engine, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let plain = request(&prompt(1, 90), 4);
    let blended = |ratio| Request {
        blend: Some(BlendMarks { passages: vec![10..40, 45..85], layer: 1, ratio: Some(ratio) }),
        ..plain.clone()
    };
    let full = run(&engine, vec![plain.clone()]).await;
    assert_same(&run(&engine, vec![blended(1.0)]).await, &full);
    let salted = Request { cache_salt: "other".into(), ..blended(0.1) };
    let alone = run(&engine, vec![salted]).await;
    let others: Vec<Request> = (5..8).map(|seed| request(&prompt(seed, seed), 6)).collect();
    let expected = run(&engine, others.clone()).await;
    let together = run(&engine, [others, vec![blended(0.1)]].concat()).await;
    assert_same(&together[3..], &alone);
    assert_same(&together[..3], &expected);
    let counts = engine.blends().expect("it blends");
    assert_eq!((counts.blended, counts.passages_computed, counts.passages_found), (3, 4, 2));
}

/// Also beside other prompts, whose layers are announced while the step is computed: heads come after them.
#[tokio::test]
async fn blocks_of_a_head_are_announced_when_it_is_blended() {
    let (engine, _thread) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let layout = *engine.storage().layout();
    for seed in 0..8 {
        let plain = request(&prompt(seed, 120), 4);
        let blended = Request {
            blend: Some(BlendMarks { passages: vec![10..25, 25..40], layer: 1, ratio: Some(0.2) }),
            ..request(&prompt(seed + 50, 60), 4)
        };
        let num_blocks = layout.num_blocks_for(blended.prompt.len());
        let (mut beside, _held) = engine.prefill(plain).expect("accepted");
        let (mut events, _held_too) = engine.prefill(blended).expect("accepted");
        let mut num_ready = vec![0; layout.num_layers * num_blocks];
        loop {
            match events.next().await.expect("a terminal event comes first") {
                PrefillEvent::Ready { layers, first_block_idx, blocks } => {
                    for layer_idx in layers {
                        for idx in first_block_idx..first_block_idx + blocks.len() {
                            num_ready[layer_idx * num_blocks + idx] += 1;
                        }
                    }
                }
                PrefillEvent::FirstToken(_) => break,
                PrefillEvent::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        assert!(num_ready.iter().all(|&num| num == 1), "{seed}: {num_ready:?}");
        loop {
            match beside.next().await.expect("a terminal event comes first") {
                PrefillEvent::FirstToken(_) => break,
                PrefillEvent::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
}

#[test]
fn a_draft_model_that_does_not_fit_beside_the_model_is_an_error() {
    if std::env::var_os("BATON_KERNELS_ON").is_some() {
        eprintln!("SKIPPED: how much memory there is the emulator is told");
        return;
    }
    // There is room for one of the two models.
    let [target, draft] = [0; 2].map(|_| loaded(&fixture()));
    let error = test_models(target, draft, LIMITS, 1, 10 << 20).err().expect("no memory").to_string();
    assert!(error.contains("bytes of device memory"), "{error}");
}

#[tokio::test]
async fn invalid_logits_fail_only_their_request() {
    const BAD_TOKEN: usize = 251;
    let dir = tempfile::tempdir().expect("a folder");
    fs::copy(fixture().join("config.json"), dir.path().join("config.json")).expect("a copy");
    let mut file = fs::read(fixture().join("model.safetensors")).expect("a file");
    let header_len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_len]).expect("a header");
    let embedding = &header["model.embed_tokens.weight"];
    let [start, end] = [0, 1].map(|idx| embedding["data_offsets"][idx].as_u64().expect("a number") as usize);
    let num_tokens = embedding["shape"][0].as_u64().expect("a number") as usize;
    let row_bytes = (end - start) / num_tokens;
    let row = 8 + header_len + start + BAD_TOKEN * row_bytes;
    file[row..row + row_bytes].fill(0xff);
    fs::write(dir.path().join("model.safetensors"), file).expect("a file");

    let (engine, _thread) = on_device(dir.path(), SamplingSide::OnDevice, None);
    let (sound, _other) = on_device(&fixture(), SamplingSide::OnDevice, None);
    let mut requests: Vec<Request> = (1..4).map(|seed| request(&prompt(seed, 5 + seed), 3)).collect();
    let expected = run(&sound, requests.clone()).await;
    std::sync::Arc::make_mut(&mut requests[1].prompt)[3] = BAD_TOKEN as u32;
    let found = run(&engine, requests).await;
    assert_eq!(found[1], (vec![], Err(EngineError::InvalidLogits)));
    assert_same(&[found[0].clone(), found[2].clone()], &[expected[0].clone(), expected[2].clone()]);
}
