//! Log-probabilities of prompts: those of the model, each once and in order, whatever else the engine does.

mod support;

use std::{fs, path::Path};

use baton_engine::{
    EngineConfig, FinishReason, InvalidRequest, Problem, Request, ScoredToken, TokenEvent, TokenStream,
};
use baton_engine_testing::FakeModel;
use baton_kv_cache::KvDtype;
use baton_model::{Activations, Backend, LoadOptions, load};
use support::{BLOCK_SIZE, TestEngine, config, engine, request, sampling_engine};

const NUM_TOP: u32 = 3;
/// A small model, and what transformers computed with it.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/fixtures/qwen3");

fn prompt(first: u32, num_tokens: u32) -> Vec<u32> {
    (first..first + num_tokens).map(|token| token * 7 % 64).collect()
}

fn scored(prompt: &[u32], max_tokens: u32) -> Request {
    let mut request = request(prompt, max_tokens);
    request.sampling.prompt_logprobs = Some(NUM_TOP);
    request
}

/// The scores that come before the first token, and all tokens.
async fn read(mut stream: TokenStream) -> (Vec<ScoredToken>, Vec<u32>) {
    let (mut scores, mut tokens) = (Vec::new(), Vec::new());
    loop {
        match stream.next().await.expect("a terminal event comes first") {
            TokenEvent::Started { cached_tokens } => assert_eq!(cached_tokens, 0),
            TokenEvent::Scored { first_idx, tokens: of_chunk } => {
                assert_eq!(first_idx, scores.len() + 1, "in order, and each once");
                assert!(tokens.is_empty() && !of_chunk.is_empty() && of_chunk.len() <= 64);
                scores.extend(of_chunk);
            }
            TokenEvent::Adopted { .. } => panic!("it begins with no cached token"),
            TokenEvent::Blended { .. } => panic!("nothing is blended"),
            TokenEvent::Verified(_) => {}
            TokenEvent::Token(token) => tokens.push(token.id),
            TokenEvent::Finished(reason) => {
                assert_eq!(reason, FinishReason::Length);
                return (scores, tokens);
            }
            TokenEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// Compares with a softmax of the model's logits in f64.
fn check(model: &FakeModel, prompt: &[u32], scores: &[ScoredToken]) {
    assert_eq!(scores.len(), prompt.len() - 1);
    for (idx, score) in (1..).zip(scores) {
        let logits = model.logits(&prompt[..idx]);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = |id: u32| f64::from(logits[id as usize]) - sum.ln();
        assert_eq!(score.id, prompt[idx]);
        assert!((f64::from(score.logprobs.logprob) - expected(score.id)).abs() < 1e-5, "token {idx}");
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        assert_eq!(score.logprobs.top.iter().map(|top| top.0).collect::<Vec<_>>(), ids[..NUM_TOP as usize]);
        let num_likelier = logits.iter().filter(|&&logit| logit > logits[score.id as usize]).count();
        assert_eq!(score.rank as usize, num_likelier + 1);
    }
}

/// Scored prompts beside others, then the first one again.
async fn check_all(model: &FakeModel, engine: &TestEngine) {
    let requests: Vec<Request> = (0..12)
        .map(|idx| match idx % 3 {
            0 => scored(&prompt(idx, 1 + 15 * idx), 3 + idx),
            1 => scored(&prompt(idx, 5), 20),
            _ => request(&prompt(idx, 20 + idx), 30),
        })
        .collect();
    let again = requests[9].clone();
    let streams: Vec<_> =
        requests.iter().map(|request| engine.generate(request.clone()).expect("accepted")).collect();
    for (request, stream) in requests.iter().zip(streams) {
        let (scores, tokens) = read(stream).await;
        assert_eq!(tokens, model.greedy(&request.prompt, request.sampling.max_tokens as usize));
        match request.sampling.prompt_logprobs {
            Some(_) => check(model, &request.prompt, &scores),
            None => assert!(scores.is_empty()),
        }
    }
    let (scores, _) = read(engine.generate(again.clone()).expect("accepted")).await;
    check(model, &again.prompt, &scores);
    engine.check_whole().await;
}

#[tokio::test]
async fn prompts_are_scored_whatever_the_batch_chunks_cache_or_preemption() {
    for (num_blocks, token_budget) in [(256, 512), (256, 7), (50, 64), (50, 9)] {
        let config = EngineConfig { num_blocks, token_budget, context_length: 200, ..config() };
        let (model, engine) = engine(config);
        // The other request's prompt, so that its blocks are cached.
        engine.generate_all(request(&prompt(9, 136), 1)).await.end.expect("it ends");
        check_all(&model, &engine).await;
    }
}

#[tokio::test]
async fn a_device_that_samples_leaves_scores_to_the_host() {
    let model = FakeModel::new(BLOCK_SIZE);
    for token_budget in [512, 9] {
        let config = EngineConfig { token_budget, num_blocks: 50, context_length: 200, ..config() };
        let (engine, _) = sampling_engine(model, None, config, |_| Ok(()));
        check_all(&model, &engine).await;
    }
}

#[tokio::test]
async fn a_later_attempt_scores_nothing() {
    let (model, engine) = engine(config());
    let prompt = prompt(2, 9);
    let expected = model.greedy(&prompt, 8);
    let resumed = Request { output: expected[..3].to_vec(), ..scored(&prompt, 8) };
    let (scores, tokens) = read(engine.generate(resumed).expect("accepted")).await;
    assert_eq!((scores.len(), &tokens[..]), (0, &expected[3..]));
}

#[tokio::test]
async fn only_the_worker_that_generates_scores_a_prompt() {
    let (_, engine) = engine(config());
    let refused = InvalidRequest::new("prompt_logprobs", Problem::PromptElsewhere);
    assert_eq!(engine.prefill(scored(&[1, 2], 2)).expect_err("refused"), refused.clone().into());
    assert_eq!(engine.reserve(scored(&[1, 2], 2)).await.expect_err("refused"), refused.into());
    engine.check_whole().await;
}

/// What transformers computed: a prompt with the token after it, and logits after some of its positions.
fn recorded() -> (Vec<u32>, Vec<(usize, Vec<f32>)>) {
    let bytes = fs::read(Path::new(FIXTURE).join("expected.safetensors")).expect("a fixture");
    let num_header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + num_header]).expect("a header");
    let words = |name: &str| -> Vec<u32> {
        let offset = |end: usize| header[name]["data_offsets"][end].as_u64().expect("an offset") as usize;
        let tensor = &bytes[8 + num_header..][offset(0)..offset(1)];
        tensor.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("a word"))).collect()
    };
    let positions = words("positions");
    let logits: Vec<f32> = words("logits").into_iter().map(f32::from_bits).collect();
    let rows = logits.chunks_exact(logits.len() / positions.len()).map(<[f32]>::to_vec);
    let prompt = [&words("prompt")[..], &words("greedy")[..1]].concat();
    (prompt, positions.into_iter().map(|position| position as usize).zip(rows).collect())
}

#[tokio::test]
async fn prompts_are_scored_as_by_transformers() {
    let options = LoadOptions {
        kv_dtype: Some(KvDtype::F32),
        activations: Activations::F32,
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = load(Path::new(FIXTURE), Backend::Cpu, &options, &mut |_| {}).expect("a fixture");
    let executor = model.cpu_executor().expect("a thread");
    // Steps of 16 tokens: the prompt is cut.
    let config = EngineConfig { token_budget: 16, context_length: 128, ..config() };
    let (engine, _thread) = baton_engine::start(Box::new(executor), None, config).expect("it starts");
    let (prompt, rows) = recorded();
    let (scores, _) = read(engine.generate(scored(&prompt, 2)).expect("accepted")).await;
    assert_eq!((scores.len(), rows.len()), (prompt.len() - 1, 4));
    for (position, logits) in &rows {
        let largest = logits.iter().copied().fold(0.0, f32::max);
        let sum: f32 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        let score = &scores[*position];
        let expected = logits[score.id as usize] - largest - sum.ln();
        let difference = (score.logprobs.logprob - expected).abs();
        assert!(difference < 2e-4 * largest.max(1.0), "{position}: {score:?}, {expected}");
    }
}
