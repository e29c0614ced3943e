//! What a client of one engine sees: tokens, limits, cancellation, failure.

mod support;

use baton_engine::FinishReason;
use support::{Output, config, engine, request};

#[tokio::test]
async fn greedy_tokens_are_those_of_the_model() {
    let (model, engine) = engine(config());
    let prompt: Vec<u32> = (0..21).collect();
    let output = engine.generate_all(request(&prompt, 30)).await;
    assert_eq!(output, Output { tokens: model.greedy(&prompt, 30), end: Ok((FinishReason::Length, 0)) });
    engine.check_whole().await;
}
