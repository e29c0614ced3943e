//! Requests with a grammar: what they produce matches, however they were computed, and others notice nothing.

mod support;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc,
};

use baton_engine::{
    Drafter, EngineConfig, EngineError, FinishReason, Request, SamplingParams, SpeculationMode, SubmitError,
    TokenEvent,
};
use baton_engine_testing::FakeModel;
use baton_grammar::{GrammarCompiler, GrammarError, GrammarLimits, Vocabulary, VocabularyToken};
use baton_model_spec::Batch;
use baton_request::{Grammar, GrammarKind};
use support::{
    BLOCK_SIZE, END, MAX_STEP_TOKENS, TestEngine, config, draft, draft_with_hook, engine_of, grammars,
    handoff::hand_off,
    kinds::{pairs, prompt, read, requests, words},
    request, sampling_engine, speculating, speculating_with_hook,
};

fn model() -> FakeModel {
    FakeModel { vocab_size: 3, ..FakeModel::new(BLOCK_SIZE) }
}

fn plain() -> TestEngine {
    engine_of(model(), config(), |_| Ok(())).1
}

fn constrained(grammar: Grammar, seed: u32) -> Request {
    let sampling = SamplingParams {
        max_tokens: 60,
        temperature: 0.9,
        seed: seed.into(),
        stop_token_ids: vec![END],
        grammar: Some(grammar),
        ..SamplingParams::default()
    };
    Request { sampling, ..request(&prompt(seed, 3 + seed % 9), 0) }
}

/// Whether the grammar allows these tokens, and whether they end it.
fn follows(grammar: &Grammar, tokens: &[u32]) -> (bool, bool) {
    match grammars().matcher(grammar, tokens) {
        Ok(matcher) => (true, matcher.has_ended()),
        Err(_) => (false, false),
    }
}

#[tokio::test]
async fn tokens_match_and_end_with_the_grammar() {
    let engine = plain();
    let mut num_stops = 0;
    for seed in 0..40 {
        for grammar in [words(), pairs()] {
            let output = engine.generate_all(constrained(grammar.clone(), seed)).await;
            let (reason, _) = output.end.expect("finished");
            assert_eq!(follows(&grammar, &output.tokens), (true, reason == FinishReason::Stop), "{seed}");
            num_stops += usize::from(reason == FinishReason::Stop);
        }
    }
    assert!(num_stops > 45, "{num_stops} of 80 end");
    // Without its stop id the end of the text ends the sequence all the same: nothing could follow.
    let mut endless = constrained(words(), 1);
    endless.sampling.stop_token_ids.clear();
    let output = engine.generate_all(endless).await;
    assert_eq!((output.end.unwrap().0, output.tokens.last()), (FinishReason::Stop, Some(&END)));
    engine.check_whole().await;
}

#[tokio::test]
async fn tokens_are_the_same_wherever_and_however_they_are_computed() {
    let plain = plain();
    // The host samples a greedy request without masks while it can; a device always has them.
    let all: Vec<Request> = (0..24)
        .map(|seed| {
            let mut request = constrained(if seed % 2 == 0 { words() } else { pairs() }, seed);
            request.sampling.temperature = if seed % 3 == 0 { 0.0 } else { 0.9 };
            request
        })
        .collect();
    let mut expected = Vec::new();
    for request in &all {
        let mut request = request.clone();
        request.speculation = SpeculationMode::Off;
        let (tokens, end, counts) = read(plain.generate(request).expect("accepted")).await;
        assert_eq!(counts.drafted, 0);
        expected.push((tokens, end));
    }
    // Few blocks: sequences are preempted and computed again.
    for (num_blocks, max_running, token_budget) in [(256, 32, 64), (40, 8, 16), (26, 3, 7)] {
        let config = || EngineConfig { num_blocks, max_running, token_budget, ..config() };
        let errs = FakeModel { errs_in: Some(4), ..model() };
        for engine in [
            engine_of(model(), config(), |_| Ok(())).1,
            speculating(model(), Drafter::Ngram, config()),
            speculating(model(), draft(errs), config()),
            sampling_engine(model(), None, config(), |_| Ok(())).0,
            sampling_engine(model(), Some(draft(errs)), config(), |_| Ok(())).0,
        ] {
            let streams: Vec<_> =
                all.iter().map(|request| engine.generate(request.clone()).expect("accepted")).collect();
            for (idx, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                let (tokens, end, _) = read(stream).await;
                assert_eq!((&tokens, &end), (&expected.0, &expected.1), "request {idx}, {num_blocks} blocks");
            }
            engine.check_whole().await;
        }
    }
    // The first token on another engine; and after a part of the answer, as when a worker was lost.
    let (p, d) = (self::plain(), self::plain());
    for (request, (tokens, end)) in all.iter().zip(&expected) {
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let (output, _) = hand_off(&p, &d, request.clone()).await;
        assert_eq!((&output.tokens, output.end.map(|(reason, _)| reason)), (&ids, end.clone()));
        let num_delivered = ids.len() / 2;
        let rest = Request { output: ids[..num_delivered].to_vec(), ..request.clone() };
        let output = d.generate_all(rest.clone()).await;
        assert_eq!(output.tokens, ids[num_delivered..]);
        let (output, _) = hand_off(&p, &d, rest).await;
        assert_eq!(output.tokens, ids[num_delivered..]);
    }
}

#[tokio::test]
async fn forced_text_is_verified_several_tokens_at_a_time() {
    let (model, engine) = engine_of(model(), config(), |_| Ok(()));
    assert_eq!(model.vocab_size, 3);
    let fixed = "ab".repeat(20);
    let grammar = Grammar::new(GrammarKind::Regex, format!("(a|b){fixed}b*"));
    let request = constrained(grammar.clone(), 7);
    let mut one_by_one = request.clone();
    one_by_one.speculation = SpeculationMode::Off;
    let (expected, end, none) = read(engine.generate(one_by_one).expect("accepted")).await;
    let num_slow = engine.num_computed_tokens();
    let (tokens, same_end, counts) = read(engine.generate(request).expect("accepted")).await;
    assert_eq!((&tokens, &same_end), (&expected, &end));
    assert_eq!(none.drafted, 0);
    // In a vocabulary of single letters nothing else is allowed, so every draft is accepted.
    assert!(counts.accepted >= 36 && counts.accepted == counts.drafted, "{counts:?} of {num_slow}");
    assert_eq!((engine.drafts(), engine.forced_drafts()), (None, counts));
    engine.check_whole().await;
}

#[tokio::test]
async fn forced_text_does_not_count_as_the_drafters() {
    let engine = speculating(model(), Drafter::Ngram, config());
    // Only the first token is not forced, and nothing can be looked up for it.
    let grammar = Grammar::new(GrammarKind::Regex, format!("(a|b){}", "a".repeat(40)));
    let request = Request { prompt: [END].into(), ..constrained(grammar, 7) };
    let (_, end, counts) = read(engine.generate(request).expect("accepted")).await;
    assert_eq!(end, Ok(FinishReason::Stop));
    assert!(counts.accepted >= 30, "{counts:?}");
    let forced = engine.forced_drafts();
    let (drafter, proposed) = engine.drafts().expect("it has a drafter");
    assert_eq!(drafter, "ngram");
    assert_eq!(
        (proposed.drafted + forced.drafted, proposed.accepted + forced.accepted),
        (counts.drafted, counts.accepted)
    );
    assert!(forced.accepted >= 30 && proposed.drafted <= 5, "{forced:?} {proposed:?}");
    engine.check_whole().await;
}

#[tokio::test]
async fn rules_whose_tokens_cannot_be_taken_back_are_followed_without_drafts() {
    let lark = format!("start: name \"{}\"\nname[max_tokens=3]: /a+/", "ba".repeat(12));
    let request = || constrained(Grammar::new(GrammarKind::Lark, lark.clone()), 7);
    let mut expected = None;
    let in_vain = || draft_with_hook(model(), |_| panic!("it drafts"));
    for engine in [
        engine_of(model(), config(), |_| Ok(())).1,
        speculating(model(), Drafter::Ngram, config()),
        speculating(model(), in_vain(), config()),
        sampling_engine(model(), None, config(), |_| Ok(())).0,
        sampling_engine(model(), Some(in_vain()), config(), |_| Ok(())).0,
    ] {
        let (tokens, end, counts) = read(engine.generate(request()).expect("accepted")).await;
        assert_eq!((end, counts.drafted), (Ok(FinishReason::Stop), 0));
        assert_eq!(&tokens, expected.get_or_insert_with(|| tokens.clone()));
        engine.check_whole().await;
    }
}

#[tokio::test]
async fn drafts_that_a_grammar_refuses_become_rare() {
    let num_draft_steps = Arc::new(AtomicUsize::new(0));
    let count = num_draft_steps.clone();
    let drafter = draft_with_hook(model(), move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    let engine = speculating(model(), drafter, config());
    // The draft model, which has no mask, proposes the end each time. No text is forced.
    let mut request = constrained(Grammar::new(GrammarKind::Regex, "(a|b){200}"), 7);
    request.sampling.max_tokens = 300;
    request.sampling.logit_bias = vec![(END, 100.0)];
    let (tokens, end, counts) = read(engine.generate(request).expect("accepted")).await;
    assert_eq!((tokens.len(), end, counts.drafted), (201, Ok(FinishReason::Stop), 0));
    let num_draft_steps = num_draft_steps.load(Ordering::Relaxed);
    assert!((5..30).contains(&num_draft_steps), "{num_draft_steps} of 200");
    engine.check_whole().await;
}

#[tokio::test]
async fn forced_text_of_many_obeys_the_limit_of_other_drafts() {
    let grammar = Grammar::new(GrammarKind::Regex, format!("(a|b){}", "ab".repeat(20)));
    for drafter in [None, Some(Drafter::Ngram)] {
        // The first step waits until all are submitted. The most rows of a step.
        let (permit, permits) = mpsc::channel::<()>();
        let most = Arc::new(AtomicUsize::new(0));
        let hook = {
            let most = most.clone();
            move |batch: &Batch<'_>| {
                permits.recv().ok();
                let num_rows: usize = batch.sequences.iter().map(|sequence| sequence.num_logits).sum();
                most.fetch_max(num_rows, Ordering::Relaxed);
                Ok(())
            }
        };
        let config = EngineConfig { num_blocks: 512, ..config() };
        let engine = match drafter {
            None => engine_of(model(), config, hook).1,
            Some(drafter) => speculating_with_hook(model(), drafter, config, hook),
        };
        // Some without a grammar, in which the same tokens follow each other again and again.
        let requests = (0..16).map(|seed| match seed % 4 {
            0 => request(&prompt(seed, 9), 60),
            _ => constrained(grammar.clone(), seed),
        });
        let streams: Vec<_> = requests.map(|request| engine.generate(request).expect("accepted")).collect();
        drop(permit);
        for stream in streams {
            assert!(read(stream).await.1.is_ok());
        }
        assert_eq!(most.load(Ordering::Relaxed), MAX_STEP_TOKENS);
        engine.check_whole().await;
    }
}

#[tokio::test]
async fn forced_text_that_was_refused_is_drafted_again_while_steps_run_ahead() {
    // The tokenizer writes the text in pairs, for which the model has no logits: it refuses every draft.
    let load = || {
        let token = |text: &str, is_special| VocabularyToken { bytes: text.into(), is_special };
        let tokens = [token("a", false), token("b", false), token("<end>", true), token("aa", false)];
        let encode = |text: &str| vec![3u32; text.len() / 2];
        Vocabulary::new(tokens, &[END], Box::new(encode))
    };
    let grammars = Some(Arc::new(GrammarCompiler::new(load, GrammarLimits::default())));
    let config = EngineConfig { grammars, ..config() };
    let (engine, num_ahead) = sampling_engine(model(), None, config, |_| Ok(()));
    let mut request = constrained(Grammar::new(GrammarKind::Regex, "a{200}"), 3);
    request.sampling.max_tokens = 300;
    let mut stream = engine.generate(request).expect("accepted");
    let (mut num_tokens, mut verified) = (0, Vec::new());
    while let Some(event) = stream.next().await {
        match event {
            TokenEvent::Verified(counts) => {
                assert_eq!(counts.accepted, 0);
                verified.push(num_tokens);
            }
            TokenEvent::Token(_) => num_tokens += 1,
            TokenEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert_eq!(num_tokens, 201);
    // Probes after 8, 16, 32 and 64 steps.
    let gaps = verified.windows(2).map(|pair| pair[1] - pair[0]);
    let rests: Vec<usize> = gaps.filter(|&gap| gap > 1).collect();
    assert!(rests.len() >= 3 && rests.is_sorted(), "{verified:?}");
    let num_ahead = num_ahead.load(Ordering::Relaxed);
    assert!(num_ahead > 150, "{num_ahead} of 200");
    engine.check_whole().await;
}

#[tokio::test]
async fn grammars_as_deep_as_they_may_be_are_followed() {
    let engine = plain();
    let regex = format!("{}a|b{}", "(".repeat(95), ")*".repeat(95));
    let rules: String =
        (0..200).map(|rule| format!("r{rule}: \"a\" r{} \"b\" | \"b\"\n", rule + 1)).collect();
    let lark = format!("start: r0\n{rules}r200: \"a\"\n");
    for (kind, text) in [(GrammarKind::Regex, regex), (GrammarKind::Lark, lark)] {
        for temperature in [0.0, 0.9] {
            let grammar = Grammar::new(kind, text.clone());
            let mut request = constrained(grammar.clone(), 3);
            (request.sampling.temperature, request.sampling.max_tokens) = (temperature, 400);
            let output = engine.generate_all(request).await;
            assert!(output.end.is_ok(), "{:?}", output.end);
            assert!(follows(&grammar, &output.tokens).0);
        }
    }
    engine.check_whole().await;
}

#[tokio::test]
async fn neighbours_without_a_grammar_are_the_same_and_run_ahead_beside_it() {
    let (engine, num_ahead) = sampling_engine(model(), None, config(), |_| Ok(()));
    let neighbour = || request(&prompt(5, 9), 40);
    let alone = engine.generate_all(neighbour()).await;
    assert_eq!(num_ahead.load(Ordering::Relaxed), 39);
    let beside = engine.generate(neighbour()).expect("accepted");
    let grammar = Grammar::new(GrammarKind::Regex, "(a|b){30}");
    let request = Request { speculation: SpeculationMode::Off, ..constrained(grammar, 3) };
    let constrained = engine.generate_all(request).await;
    assert!(matches!(constrained.end, Ok((FinishReason::Stop, _))));
    assert_eq!(support::collect(beside).await.tokens, alone.tokens);
    // But for the steps of prompts and for the one after an end.
    let num_ahead = num_ahead.load(Ordering::Relaxed) - 39;
    assert!(num_ahead >= 36, "{num_ahead} of 39");
}

#[tokio::test]
async fn every_kind_is_among_the_requests_of_the_other_tests() {
    assert!(requests().iter().filter(|request| request.sampling.grammar.is_some()).count() >= 9);
}

#[tokio::test]
async fn grammars_that_cannot_be_used_are_refused() {
    let engine = plain();
    let refused = |request: Request| match engine.generate(request).expect_err("refused") {
        SubmitError::Grammar(error) => error,
        error => panic!("{error}"),
    };
    let bad = constrained(Grammar::new(GrammarKind::Regex, "("), 0);
    assert!(matches!(refused(bad), GrammarError::Invalid { kind: GrammarKind::Regex, .. }));
    let elsewhere = Request { output: vec![1], ..constrained(words(), 0) };
    assert_eq!(refused(elsewhere), GrammarError::Refused { token: 1 });
    let (_, without) = engine_of(model(), EngineConfig { grammars: None, ..config() }, |_| Ok(()));
    let error = without.generate(constrained(words(), 0)).expect_err("refused");
    assert!(error.to_string().contains("does not know the model's tokenizer"), "{error}");
    engine.check_whole().await;
}

#[tokio::test]
async fn a_prepared_request_needs_no_compiler_when_it_is_submitted() {
    let engine = plain();
    let request = constrained(words(), 3);
    let tokens = engine.generate_all(request.clone()).await.tokens;
    let (delivered, rest) = tokens.split_at(tokens.len() / 2);
    let prepared = engine.prepare(Request { output: delivered.to_vec(), ..request }).expect("it follows");
    let (_, without) = engine_of(model(), EngineConfig { grammars: None, ..config() }, |_| Ok(()));
    let output = support::collect(without.generate(prepared).expect("accepted")).await;
    assert_eq!(output.tokens, rest);
}

#[tokio::test]
async fn a_first_token_that_the_grammar_refuses_fails_the_request_alone() {
    let (p, d) = (plain(), plain());
    let other = d.generate(request(&prompt(2, 5), 30)).expect("accepted");
    let request = constrained(words(), 0);
    let prefilled = support::handoff::prefill(&p, request.clone()).await;
    let reservation = d.reserve(request).await.expect("granted");
    let wrong = baton_engine::SampledToken { id: 1, logprobs: None };
    let output = support::collect(d.decode(reservation, wrong).expect("accepted")).await;
    assert_eq!(output.end, Err(EngineError::Grammar(GrammarError::Refused { token: 1 })));
    assert_eq!(support::collect(other).await.tokens.len(), 30);
    drop(prefilled);
    d.check_whole().await;
}
