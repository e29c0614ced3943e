//! The sampler compared with a plain reference: which tokens are possible, and how often they are sampled.

use std::borrow::Cow;

use baton_engine::{
    Request, SamplingParams,
    sampler::{InvalidLogits, Sampler, TokenHistory, random_unit},
};
use proptest::prelude::*;

const VOCAB_SIZE: usize = 200;

fn history(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> TokenHistory {
    TokenHistory::new(&Request {
        prompt: prompt.into(),
        output: output.to_vec(),
        sampling: params.clone(),
        ..Request::default()
    })
}

fn sample(logits: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> u32 {
    let history = history(params, prompt, output);
    Sampler::default().sample(logits, params, &history).expect("usable logits").id
}

/// Reference probabilities: everything sorted, in f64, without code of the sampler.
fn reference(logits: &[f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for (token, logit) in logits.iter_mut().enumerate() {
        let count = output.iter().filter(|&&other| other as usize == token).count();
        let penalty = f64::from(params.repetition_penalty);
        if count > 0 || prompt.contains(&(token as u32)) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
        if count > 0 {
            *logit -= f64::from(params.presence_penalty) + f64::from(params.frequency_penalty) * count as f64;
        }
        *logit += params
            .logit_bias
            .iter()
            .filter(|bias| bias.0 as usize == token)
            .map(|bias| f64::from(bias.1))
            .sum::<f64>();
        if output.len() < params.min_tokens as usize && params.stop_token_ids.contains(&(token as u32)) {
            *logit = f64::NEG_INFINITY;
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut probabilities = vec![0.0; logits.len()];
    if params.temperature == 0.0 {
        probabilities[order[0]] = 1.0;
        return probabilities;
    }
    let max = logits[order[0]];
    let weight = |token: usize| ((logits[token] - max) / f64::from(params.temperature)).exp();
    order.retain(|&token| weight(token) >= f64::from(params.min_p));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut sum = 0.0;
    let num_kept = order.iter().position(|&token| {
        sum += weight(token);
        sum >= f64::from(params.top_p) * total
    });
    order.truncate(num_kept.map_or(order.len(), |idx| idx + 1));
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    for token in order {
        probabilities[token] = weight(token) / total;
    }
    probabilities
}

/// Logits with some structure: a peak, a slope, and many similar ones.
fn some_logits() -> Vec<f32> {
    (0..VOCAB_SIZE)
        .map(|token| 4.0 * random_unit(3, token as u64) as f32 - 2.0 + 3.0 / (1 + token % 17) as f32)
        .collect()
}

#[test]
fn tokens_are_sampled_with_their_probabilities() {
    let base = SamplingParams { temperature: 1.0, max_tokens: 1000, ..SamplingParams::default() };
    let cases = [
        base.clone(),
        SamplingParams { temperature: 0.5, ..base.clone() },
        SamplingParams { temperature: 1.7, ..base.clone() },
        SamplingParams { top_k: 5, ..base.clone() },
        SamplingParams { top_p: 0.5, ..base.clone() },
        SamplingParams { top_p: 0.99, ..base.clone() }, // more tokens than top-p sorts first
        SamplingParams { min_p: 0.2, ..base.clone() },
        SamplingParams { top_k: 20, top_p: 0.8, min_p: 0.05, temperature: 0.9, ..base.clone() },
        SamplingParams {
            repetition_penalty: 1.5,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(7, 2.0), (8, -100.0)],
            min_tokens: 10,
            stop_token_ids: vec![0, 17],
            ..base
        },
    ];
    let logits = some_logits();
    let (prompt, output) = (&[0, 1, 34, 51][..], &[34, 34, 5, 68][..]);
    for params in cases {
        let expected = reference(&logits, &params, prompt, output);
        let history = history(&params, prompt, output);
        let mut sampler = Sampler::default();
        let mut counts = vec![0; VOCAB_SIZE];
        let num_samples = 20_000;
        for seed in 0..num_samples {
            let params = SamplingParams { seed, ..params.clone() };
            counts[sampler.sample(&logits, &params, &history).expect("usable logits").id as usize] += 1;
        }
        for (token, (&count, &expected)) in counts.iter().zip(&expected).enumerate() {
            let actual = f64::from(count) / num_samples as f64;
            // Five standard deviations of a binomial and a few for the rarest; seeds are fixed, so this
            // is not a gamble.
            let deviation = (expected * (1.0 - expected) / num_samples as f64).sqrt();
            let tolerance = if expected == 0.0 { 0.0 } else { 5.0 * deviation + 4.0 / num_samples as f64 };
            assert!(
                (actual - expected).abs() <= tolerance,
                "token {token}: {actual} against {expected} with {params:?}"
            );
        }
    }
}

#[test]
fn candidates_are_in_order_of_likelihood_where_some_are_removed() {
    let logits = some_logits();
    for (top_k, top_p) in [(5, 1.0), (30, 1.0), (0, 0.7), (30, 0.9)] {
        for seed in 0..300 {
            let base = SamplingParams { temperature: 1.0, max_tokens: 9, seed, ..SamplingParams::default() };
            let params = SamplingParams { top_k, top_p, ..base };
            let probabilities = reference(&logits, &params, &[], &[]);
            let mut order: Vec<usize> = (0..VOCAB_SIZE).filter(|&token| probabilities[token] > 0.0).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let mut left = random_unit(seed, 0);
            let expected = order.iter().find(|&&token| {
                left -= probabilities[token];
                left < 0.0
            });
            let sampled = Sampler::default().sample(&logits, &params, &history(&params, &[], &[]));
            let found = sampled.expect("usable logits").id as usize;
            assert_eq!(Some(&found), expected, "top_k {top_k}, top_p {top_p}, seed {seed}");
        }
    }
}

#[test]
fn the_likeliest_comes_first_and_without_a_mask_where_it_is_sampled() {
    let logits = some_logits();
    let likeliest =
        sample(&logits, &SamplingParams { max_tokens: 9, ..SamplingParams::default() }, &[0], &[]);
    for seed in 0..2000 {
        let params = SamplingParams { temperature: 0.3, seed, max_tokens: 9, ..SamplingParams::default() };
        let history = history(&params, &[0], &[]);
        let without_mask = Sampler::default().sample_likeliest(&logits, &params, &history).unwrap();
        let is_below = random_unit(seed, 0) < reference(&logits, &params, &[0], &[])[likeliest as usize];
        assert_eq!(without_mask.map(|token| token.id), is_below.then_some(likeliest), "seed {seed}");
        assert_eq!(sample(&logits, &params, &[0], &[]) == likeliest, is_below, "seed {seed}");
    }
}

#[test]
fn each_output_token_has_a_random_number_of_its_own() {
    let params = SamplingParams { temperature: 1.0, seed: 5, ..SamplingParams::default() };
    let mut counts = [0; 4];
    for num_output_tokens in 0..400 {
        counts[sample(&[0.0; 4], &params, &[0], &vec![0; num_output_tokens]) as usize] += 1;
    }
    assert!(counts.iter().all(|count| (70..130).contains(count)), "{counts:?}");
}

#[test]
fn greedy_takes_the_largest_and_the_first_of_equals() {
    let params = SamplingParams { max_tokens: 100, ..SamplingParams::default() };
    assert_eq!(sample(&[1.0, 3.0, 2.0, 3.0], &params, &[0], &[]), 1);
    assert_eq!(sample(&[f32::NEG_INFINITY, -3.0], &params, &[0], &[]), 1);
    let biased = SamplingParams { logit_bias: vec![(2, 1.5)], ..params.clone() };
    assert_eq!(sample(&[1.0, 3.0, 2.0, 3.0], &biased, &[0], &[]), 2);
    let penalised = SamplingParams { repetition_penalty: 2.0, ..params.clone() };
    assert_eq!(sample(&[1.0, 3.0, 2.0, 2.5], &penalised, &[1], &[]), 3, "tokens of the prompt count");
    let present = SamplingParams { presence_penalty: 1.0, ..params.clone() };
    assert_eq!(sample(&[1.0, 3.0, 2.0, 2.5], &present, &[1], &[]), 1, "only the output counts");
    assert_eq!(sample(&[1.0, 3.0, 2.0, 2.5], &present, &[1], &[1]), 3);
    let stopping = SamplingParams { min_tokens: 2, stop_token_ids: vec![1], ..params };
    assert_eq!(sample(&[1.0, 3.0, 2.0], &stopping, &[0], &[0]), 2, "one output token of two");
    assert_eq!(sample(&[1.0, 3.0, 2.0], &stopping, &[0], &[0, 0]), 1);
}

#[test]
fn tokens_of_the_prompt_are_listed_for_the_repetition_penalty_alone() {
    let counts = |params: &SamplingParams, output: &[u32]| -> Vec<(u32, u32)> {
        let mut history = history(params, &[5, 6, 5], output);
        // A draft that is not accepted leaves nothing.
        [8, 6].into_iter().for_each(|token| history.push(token));
        [6, 8].into_iter().for_each(|token| history.pop(token));
        history.sampling(params).counts.iter().map(|count| (count.token, count.num_output)).collect()
    };
    let present = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
    let frequent = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    for params in [&present, &frequent] {
        assert!(counts(params, &[]).is_empty());
        assert_eq!(counts(params, &[6, 7, 6]), [(6, 2), (7, 1)], "from one on");
    }
    let repeated = SamplingParams { repetition_penalty: 1.1, ..present };
    assert_eq!(counts(&repeated, &[6, 7, 6]), [(5, 0), (6, 2), (7, 1)]);
    assert!(counts(&SamplingParams::default(), &[6]).is_empty());
}

#[test]
fn invalid_logits_are_an_error() {
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let biased = SamplingParams { logit_bias: vec![(0, 1.0)], ..SamplingParams::default() };
    for logits in [[1.0, f32::NAN, 0.0], [f32::INFINITY, 1.0, 0.0], [f32::NEG_INFINITY; 3]] {
        for params in [&greedy, &warm, &biased] {
            let history = history(params, &[0], &[]);
            assert_eq!(
                Sampler::default().sample(&logits, params, &history),
                Err(InvalidLogits),
                "{logits:?}"
            );
        }
    }
    // No token is left to choose.
    let masked = SamplingParams { min_tokens: 1, stop_token_ids: vec![0, 1], ..SamplingParams::default() };
    let history = history(&masked, &[0], &[]);
    assert_eq!(Sampler::default().sample(&[1.0, 2.0], &masked, &history), Err(InvalidLogits));
}

#[test]
fn parameters_at_their_limits_work() {
    let small = SamplingParams { repetition_penalty: f32::MIN_POSITIVE, ..SamplingParams::default() };
    assert_eq!(sample(&[1.0, 9.0, 7.0], &small, &[1], &[]), 1);
    let large = SamplingParams { repetition_penalty: f32::MAX, ..SamplingParams::default() };
    assert_eq!(sample(&[-9.0, -8.0], &large, &[0, 1], &[]), 0, "both are as unlikely as can be");
    let biased = SamplingParams { logit_bias: vec![(1, f32::MAX)], ..SamplingParams::default() };
    assert_eq!(sample(&[1.0, 1e38, 7.0], &biased, &[0], &[]), 1);
}

#[test]
fn random_numbers_are_spread_and_depend_on_seed_and_index() {
    let mut buckets = [0; 16];
    for seed in 0..64 {
        for idx in 0..256 {
            let unit = random_unit(seed, idx);
            assert!((0.0..1.0).contains(&unit));
            buckets[(unit * 16.0) as usize] += 1;
        }
    }
    assert!(buckets.iter().all(|&count| (900..1150).contains(&count)), "{buckets:?}");
    // Consecutive seeds do not repeat each other's numbers one step later.
    assert_ne!(random_unit(1, 1), random_unit(2, 0));
    assert_ne!(random_unit(0, 1), random_unit(0x9E37_79B9_7F4A_7C15, 0));
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let truncation = (0..40u32, 0.05..1.0f32, prop_oneof![Just(0.0f32), 0.0..0.9f32]);
    let penalties = (0.5..2.0f32, -2.0..2.0f32, -2.0..2.0f32);
    let bias = prop::collection::vec((0..VOCAB_SIZE as u32, -3.0..3.0f32), 0..4);
    (prop_oneof![Just(0.0f32), 0.05..3.0f32], truncation, penalties, bias, any::<u64>()).prop_map(
        |(temperature, (top_k, top_p, min_p), (repetition, presence, frequency), logit_bias, seed)| {
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty: repetition,
                presence_penalty: presence,
                frequency_penalty: frequency,
                logit_bias,
                seed,
                ..SamplingParams::default()
            }
        },
    )
}

proptest! {
    #[test]
    fn only_allowed_tokens_come(
        params in params(),
        logits in prop::collection::vec(-8.0..8.0f32, VOCAB_SIZE),
        tokens in prop::collection::vec(0..VOCAB_SIZE as u32, 1..20),
    ) {
        let (prompt, output) = tokens.split_at(tokens.len() / 2);
        let token = sample(&logits, &params, prompt, output);
        // Rounding may decide differently at the very edge: allow a hair more than the parameters do.
        let wider = SamplingParams {
            top_p: (params.top_p + 1e-4).min(1.0),
            min_p: params.min_p * 0.9999,
            ..params.clone()
        };
        let allowed = reference(&logits, &wider, prompt, output);
        prop_assert!(allowed[token as usize] > 0.0, "{token} is not allowed by {params:?}");
        prop_assert_eq!(token, sample(&logits, &params, prompt, output), "again the same");
    }

    #[test]
    fn rows_after_drafts_count_them_as_output_and_copy_no_list(
        params in params(),
        has_repetition_penalty in any::<bool>(),
        // Few, so that drafts repeat tokens and each other.
        tokens in prop::collection::vec(0..30u32, 1..40),
        drafts in prop::collection::vec(0..30u32, 0..9),
    ) {
        let repetition_penalty = if has_repetition_penalty { params.repetition_penalty } else { 1.0 };
        let params = SamplingParams { repetition_penalty, ..params };
        let (prompt, output) = tokens.split_at(tokens.len() / 2);
        let before = history(&params, prompt, output);
        let samplings: Vec<_> = before.samplings(&drafts, &params).collect();
        prop_assert_eq!(samplings.len(), drafts.len() + 1);
        for (num_drafts, sampling) in samplings.into_iter().enumerate() {
            let after = history(&params, prompt, &[output, &drafts[..num_drafts]].concat());
            let expected = after.sampling(&params);
            prop_assert!(matches!(sampling.counts, Cow::Borrowed(_)), "{num_drafts} drafts");
            prop_assert_eq!(sampling.num_counted(), expected.counts.len());
            prop_assert_eq!(sampling.changes_logits(), expected.changes_logits());
            prop_assert_eq!(sampling.into_owned(), expected);
        }
    }

    #[test]
    fn a_mask_never_changes_a_likeliest_that_was_sampled_without_it(
        params in params(),
        logits in prop::collection::vec(-8.0..8.0f32, VOCAB_SIZE),
        tokens in prop::collection::vec(0..VOCAB_SIZE as u32, 1..20),
        mask in prop::collection::vec(any::<bool>(), VOCAB_SIZE),
    ) {
        let (prompt, output) = tokens.split_at(tokens.len() / 2);
        let history = history(&params, prompt, output);
        let likeliest = Sampler::default().sample_likeliest(&logits, &params, &history).unwrap();
        let Some(token) = likeliest.filter(|token| mask[token.id as usize]) else { return Ok(()) };
        // As a mask does: nothing is left of them.
        let removed = (0..).zip(&mask).filter(|(_, is_allowed)| !**is_allowed).map(|(id, _)| (id, f32::MIN));
        let logit_bias = params.logit_bias.iter().copied().chain(removed).collect();
        let masked = SamplingParams { logit_bias, ..params };
        prop_assert_eq!(token.id, sample(&logits, &masked, prompt, output));
    }
}
