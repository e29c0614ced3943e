//! Requests of every kind, over a vocabulary of three tokens, and everything that a client sees of them.

use baton_engine::{
    DraftCounts, EngineError, FinishReason, Request, SampledToken, SamplingParams, TokenEvent, TokenStream,
};
use baton_request::{Grammar, GrammarKind};

use super::{END, request};

pub fn prompt(seed: u32, num_tokens: u32) -> Vec<u32> {
    (0..num_tokens).map(|idx| (idx * idx + seed * idx + seed / 3) % 3).collect()
}

/// Of bounded length, with text that is forced.
pub fn words() -> Grammar {
    Grammar::new(GrammarKind::Regex, "(abb|aba)(ab|ba|aabbaabb){2,5}")
}

/// Of any length.
pub fn pairs() -> Grammar {
    Grammar::new(GrammarKind::Lark, "start: pair+\npair: \"a\" pair? \"b\"")
}

/// Requests of every kind.
pub fn requests() -> Vec<Request> {
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 0.9, ..greedy.clone() };
    let kinds = [
        greedy.clone(),
        SamplingParams { logprobs: Some(2), ..greedy.clone() },
        SamplingParams { stop_token_ids: vec![1], min_tokens: 7, ..greedy.clone() },
        SamplingParams { repetition_penalty: 1.4, presence_penalty: 0.7, frequency_penalty: 0.9, ..greedy },
        warm.clone(),
        SamplingParams { top_p: 0.8, min_p: 0.05, logprobs: Some(0), ..warm.clone() },
        SamplingParams { top_k: 2, logit_bias: vec![(0, 0.7), (2, -0.4)], ..warm.clone() },
        SamplingParams { repetition_penalty: 0.8, frequency_penalty: 0.5, ..warm.clone() },
        SamplingParams { stop_token_ids: vec![2], min_tokens: 4, ..warm.clone() },
        SamplingParams { stop_token_ids: vec![END], grammar: Some(words()), ..SamplingParams::default() },
        SamplingParams {
            stop_token_ids: vec![END],
            grammar: Some(words()),
            logprobs: Some(1),
            ..warm.clone()
        },
        SamplingParams { stop_token_ids: vec![END], grammar: Some(pairs()), frequency_penalty: 0.4, ..warm },
    ];
    let request = |(idx, kind): (u32, &SamplingParams)| Request {
        sampling: SamplingParams { max_tokens: 17 + idx % 27, seed: u64::from(idx), ..kind.clone() },
        // Some have tokens of an earlier attempt.
        output: if idx % 4 == 3 { vec![0, 1, 0] } else { Vec::new() },
        ..request(&prompt(idx, 2 + idx * 5 % 37), 0)
    };
    (0..).zip(kinds.iter().cycle()).take(36).map(request).collect()
}

/// What a client sees, without the number of cached tokens, and the counts of drafts.
pub async fn read(
    mut stream: TokenStream,
) -> (Vec<SampledToken>, Result<FinishReason, EngineError>, DraftCounts) {
    let (mut tokens, mut counts) = (Vec::new(), DraftCounts::default());
    loop {
        let end = match stream.next().await.expect("a terminal event comes first") {
            TokenEvent::Started { .. }
            | TokenEvent::Adopted { .. }
            | TokenEvent::Blended { .. }
            | TokenEvent::Scored { .. } => continue,
            TokenEvent::Verified(of_step) => {
                assert!(of_step.drafted > 0 && of_step.accepted <= of_step.drafted);
                counts.drafted += of_step.drafted;
                counts.accepted += of_step.accepted;
                continue;
            }
            TokenEvent::Token(token) => {
                tokens.push(token);
                continue;
            }
            TokenEvent::Finished(reason) => Ok(reason),
            TokenEvent::Failed(error) => Err(error),
        };
        assert_eq!(stream.next().await, None, "nothing follows a terminal event");
        return (tokens, end, counts);
    }
}
