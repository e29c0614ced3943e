//! Requests that other processes send to a worker: from the message to the last token.
#![no_main]

use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use baton_engine::{
    EngineConfig, EngineHandle, EngineThread, PrefillEvent, SampledToken, TokenEvent, TokenStream,
};
use baton_engine_testing::FakeModel;
use baton_fuzz::Change;
use baton_proto::worker as proto;
use baton_worker_messages::{request_from_begin, request_from_generate};
use libfuzzer_sys::fuzz_target;
use prost::Message;

#[derive(Arbitrary, Debug)]
enum Input<'a> {
    Generate(&'a [u8]),
    Begin(&'a [u8]),
    Fields(Box<Fields<'a>>),
}

#[derive(Arbitrary, Debug)]
struct Fields<'a> {
    to_prefill: bool,
    /// The first token comes from a prefill worker.
    first: Option<Change>,
    id: &'a str,
    cache_salt: &'a str,
    prompt: Vec<u8>,
    num_output_tokens: u8,
    speculation: i32,
    priority: i32,
    max_tokens: Change,
    min_tokens: Change,
    numbers: [Option<f32>; 6],
    top_k: u32,
    seed: u64,
    logit_bias: Vec<(u8, f32)>,
    stop_token_ids: Vec<u8>,
    logprobs: Option<Change>,
}

const CONTEXT_LENGTH: usize = 48;

static ENGINE: LazyLock<(EngineHandle, Mutex<EngineThread>)> = LazyLock::new(|| {
    let config = EngineConfig {
        num_blocks: 16,
        max_running: 4,
        token_budget: 8,
        max_drafted_step_tokens: 8,
        itl_target: Some(Duration::from_millis(5)),
        context_length: CONTEXT_LENGTH,
        max_waiting: 4,
        prefix_cache: true,
        model_revision: "fake".into(),
        step_prior: None,
        grammars: None,
        blending: None,
        clock: Instant::now,
        thread_waits: || std::time::Duration::ZERO,
    };
    let (handle, thread) =
        baton_engine::start(FakeModel::new(4).executor(), None, config).expect("an engine");
    (handle, Mutex::new(thread))
});

fuzz_target!(|input: Input<'_>| match input {
    Input::Generate(bytes) => {
        if let Ok(message) = proto::GenerateRequest::decode(bytes) {
            generate(&message, None);
        }
    }
    Input::Begin(bytes) => {
        if let Ok(message) = proto::Begin::decode(bytes) {
            prefill(&message);
        }
    }
    Input::Fields(fields) => {
        let sampling = Some(fields.sampling());
        let (request_id, cache_salt) = (fields.id.to_owned(), fields.cache_salt.to_owned());
        let mut tokens: Vec<u32> = fields.prompt.iter().map(|token| u32::from(*token)).collect();
        let num_output_tokens = u32::from(fields.num_output_tokens);
        if fields.to_prefill {
            let token_ids = tokens;
            let default = proto::Begin::default();
            prefill(&proto::Begin {
                request_id,
                cache_salt,
                sampling,
                token_ids,
                num_output_tokens,
                priority: fields.priority,
                ..default
            });
        } else {
            let output = tokens.split_off(tokens.len().saturating_sub(num_output_tokens as usize));
            let message = proto::GenerateRequest {
                request_id,
                cache_salt,
                sampling,
                prompt_token_ids: tokens,
                output_token_ids: output,
                speculation_mode: fields.speculation,
                priority: fields.priority,
                ..proto::GenerateRequest::default()
            };
            generate(&message, fields.first.map(|first| first.of(1) as u32));
        }
    }
});

impl Fields<'_> {
    fn sampling(&self) -> proto::Sampling {
        let [temperature, top_p, min_p, repetition, presence, frequency] = self.numbers;
        proto::Sampling {
            max_tokens: self.max_tokens.of(8) as u32,
            min_tokens: self.min_tokens.of(0) as u32,
            temperature: temperature.unwrap_or(1.0),
            top_k: self.top_k,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            repetition_penalty: repetition.unwrap_or(1.0),
            presence_penalty: presence.unwrap_or(0.0),
            frequency_penalty: frequency.unwrap_or(0.0),
            logit_bias: self.logit_bias.iter().map(|&(token, bias)| (token.into(), bias)).collect(),
            seed: self.seed,
            stop_token_ids: self.stop_token_ids.iter().map(|token| u32::from(*token)).collect(),
            logprobs: self.logprobs.map(|logprobs| logprobs.of(2) as u32),
            prompt_logprobs: self.logprobs.map(|num| num.of(2) as u32).filter(|_| self.seed % 2 == 1),
            grammar: None,
        }
    }
}

fn generate(message: &proto::GenerateRequest, first: Option<u32>) {
    let Ok(request) = request_from_generate(message) else { return };
    let Some(first) = first else {
        let Ok(tokens) = ENGINE.0.generate(request) else { return };
        return assert!(num_tokens(tokens) >= 1);
    };
    let Ok(reservation) = block_on(ENGINE.0.reserve(request)) else { return };
    let first = SampledToken { id: first, logprobs: None };
    if let Ok(tokens) = ENGINE.0.decode(reservation, first) {
        num_tokens(tokens);
    }
}

/// Reads to the terminal event.
fn num_tokens(mut tokens: TokenStream) -> usize {
    let mut num_tokens = 0;
    loop {
        match block_on(tokens.next()) {
            Some(TokenEvent::Token(_)) => num_tokens += 1,
            Some(TokenEvent::Finished(_)) => break,
            Some(
                TokenEvent::Started { .. }
                | TokenEvent::Blended { .. }
                | TokenEvent::Scored { .. }
                | TokenEvent::Verified(_),
            ) => {}
            other => panic!("{other:?} of a request that was accepted"),
        }
    }
    assert!(num_tokens < CONTEXT_LENGTH);
    assert!(block_on(tokens.next()).is_none(), "an event after the terminal one");
    num_tokens
}

fn prefill(message: &proto::Begin) {
    let Ok(request) = request_from_begin(message) else { return };
    let Ok((mut events, _held)) = ENGINE.0.prefill(request) else { return };
    loop {
        match block_on(events.next()) {
            Some(PrefillEvent::FirstToken(_)) => break,
            Some(
                PrefillEvent::Started { .. } | PrefillEvent::Blended { .. } | PrefillEvent::Ready { .. },
            ) => {}
            other => panic!("{other:?} of a request that was accepted"),
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}
