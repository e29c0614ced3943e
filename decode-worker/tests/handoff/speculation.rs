//! A decode worker with drafts gives the tokens of one without, with local and with remote prefill.

use std::{path::Path, time::Duration};

use baton_engine::Drafter;
use baton_engine_testing::FakeModel;
use baton_model::Batch;
use baton_proto::{v1::SpeculationMode, worker::generate_event::Event};
use baton_worker::DrafterConfig;

use crate::harness::{BLOCK_SIZE, TestWorker, decode, expected, generate, next, prefill, prompt, request};

/// A worker whose steps take a millisecond. Its draft model is mostly right and takes almost no time.
async fn speculating() -> TestWorker {
    let slow = Box::new(|_: &Batch<'_>| {
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    });
    decode().hook(slow).drafter(draft()).start().await
}

fn draft() -> Drafter {
    let model = FakeModel { errs_in: Some(6), ..FakeModel::new(BLOCK_SIZE) };
    Drafter::Model { executor: model.executor(), storage: None, cost: 0.2 }
}

/// Drafted and accepted tokens, as `/metrics` counts them.
async fn counts(worker: &TestWorker, drafter: &str) -> (u32, u32) {
    let metrics = worker.metrics().await;
    let count = |name: &str| {
        let line = format!("baton_{name}_tokens_total{{drafter=\"{drafter}\"}} ");
        let rest = metrics.split(&line).nth(1).unwrap_or_else(|| panic!("{line:?} is not in\n{metrics}"));
        rest.lines().next().unwrap().parse().unwrap()
    };
    (count("drafted"), count("accepted"))
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_change_no_token_of_a_remote_or_local_prompt() {
    let p = prefill().start().await;
    let d = speculating().await;
    let client = d.client().await;
    for (seed, num_tokens) in [(1, 1), (2, 4), (3, 64), (4, 101), (5, 24)] {
        for peer in [Some(p.peer()), None] {
            let prompt = prompt(seed, num_tokens);
            let mut request = request(&prompt, 60, peer.clone());
            request.cache_salt = format!("{peer:?}");
            let answer = generate(&client, request).await.unwrap();
            assert_eq!(answer.finished(), expected(&prompt, 60), "{num_tokens} tokens, {peer:?}");
        }
    }
    let (drafted, accepted) = counts(&d, "draft").await;
    assert!(0 < accepted && accepted < drafted, "{accepted} of {drafted}");
    p.assert_all_free().await;
    d.assert_all_free().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_tell_what_was_drafted_and_a_request_can_opt_out() {
    let d = speculating().await;
    let mut client = d.client().await;
    let prompt = prompt(7, 30);
    let mut sums = (0, 0);
    let mut events = client.generate(request(&prompt, 50, None)).await.unwrap().into_inner();
    while let Some(event) = next(&mut events).await.unwrap() {
        if let Event::Token(token) = event {
            assert!(token.accepted_tokens <= token.drafted_tokens);
            sums = (sums.0 + token.drafted_tokens, sums.1 + token.accepted_tokens);
        }
    }
    assert!(sums.0 > 0, "{sums:?}");
    assert_eq!(counts(&d, "draft").await, sums);

    let mut plain = request(&prompt, 50, None);
    plain.set_speculation_mode(SpeculationMode::Off);
    let answer = generate(&client, plain).await.unwrap();
    assert_eq!(answer.finished(), expected(&prompt, 50));
    assert_eq!(counts(&d, "draft").await, sums, "nothing was drafted");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_draft_model_of_the_tiny_model_changes_no_token() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let p = prefill().model(dir.clone()).start().await;
    let plain = decode().model(dir.clone()).start().await;
    let draft = DrafterConfig::Model(dir.join("draft"));
    let speculating = decode().model(dir).with(|config| {
        config.drafter = Some(draft);
        config.token_budget = 512;
    });
    let speculating = speculating.start().await;
    let (plain_client, client) = (plain.client().await, speculating.client().await);
    for (seed, temperature) in [(1, 0.0), (2, 0.0), (3, 0.7), (4, 1.0)] {
        let prompt: Vec<u32> = prompt(seed, 90).into_iter().map(|token| token * 20 + 300).collect();
        let mut request = request(&prompt, 80, Some(p.peer()));
        let sampling = request.sampling.as_mut().expect("the request has sampling parameters");
        (sampling.temperature, sampling.seed) = (temperature, u64::from(seed));
        let expected = generate(&plain_client, request.clone()).await.unwrap().finished();
        assert_eq!(generate(&client, request).await.unwrap().finished(), expected, "seed {seed}");
    }
    // How often drafting pays depends on the machine.
    assert!(counts(&speculating, "draft").await.0 > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repetitive_text_is_drafted_from_n_grams() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let plain = decode().model(dir.clone()).start().await;
    let ngram = |config: &mut baton_worker::WorkerConfig| config.drafter = Some(DrafterConfig::Ngram);
    let speculating = decode().model(dir).with(ngram).start().await;
    let prompt: Vec<u32> = prompt(1, 12).into_iter().map(|token| token * 20 + 300).collect();
    let request = request(&prompt.repeat(6), 60, None);
    let expected = generate(&plain.client().await, request.clone()).await.unwrap().finished();
    assert_eq!(generate(&speculating.client().await, request).await.unwrap().finished(), expected);
    assert!(counts(&speculating, "ngram").await.1 > 0);
}
