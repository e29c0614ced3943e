//! `kernels/sample.cu` against a plain reference.

use baton_cuda_emulator::emulator::Emulator;
use baton_cuda_kernels::kernel::{Address, Kernel, LaunchShape};
use baton_cuda_kernels::sample::*;
use baton_model_spec::TokenCount;
use baton_model_testing::noise;

/// A row with all settings of its sampling.
#[derive(Clone, Debug)]
struct Case {
    logits: Vec<f32>,
    counts: Vec<TokenCount>,
    biases: Vec<BiasedToken>,
    stops: Vec<u32>,
    /// A bit for each token that may come. Empty: all may.
    mask: Vec<u32>,
    row: RowSampling,
}

/// Added to a token's logit after the penalties.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct BiasedToken {
    token: u32,
    bias: f32,
}

#[derive(Clone, Debug, PartialEq)]
struct Result {
    sampled: RowOutcome,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// [`SampleRows`] with fewer threads.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Narrow(SampleRows);

const NARROW: u32 = 64;

// SAFETY: as for [`SampleRows`].
unsafe impl Kernel for Narrow {
    const NAME: &'static str = SampleRows::NAME;

    fn shape(&self) -> LaunchShape {
        LaunchShape { threads: NARROW, ..self.0.shape() }
    }
}

impl Case {
    fn new(logits: Vec<f32>) -> Case {
        let row = RowSampling {
            random: 0.5,
            first_count: 0,
            num_counts: 0,
            first_bias: 0,
            num_biases: 0,
            first_stop: 0,
            num_stops: 0,
            first_saved: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            temperature: 1.0,
            lowest_scaled: lowest_scaled(0.0),
            top_k: 0,
            top_p: 1.0,
            num_top: NO_LOGPROBS,
            mask: 0,
        };
        Case { logits, counts: vec![], biases: vec![], stops: vec![], mask: vec![], row }
    }

    fn with(mut self, change: impl FnOnce(&mut RowSampling)) -> Case {
        change(&mut self.row);
        self
    }
}

/// The bytes of plain data.
fn bytes<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: these structs have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }.to_vec()
}

fn run(cases: &[Case], is_narrow: bool) -> Vec<Result> {
    let vocab = cases[0].logits.len();
    let max_top = 20;
    let (mut rows, mut counts, mut biases, mut stops, mut num_saved) = (vec![], vec![], vec![], vec![], 0);
    let (mut masks, num_words): (Vec<u32>, usize) = (vec![], vocab.div_ceil(32));
    for case in cases {
        rows.push(RowSampling {
            first_count: counts.len() as u32,
            num_counts: case.counts.len() as u32,
            first_bias: biases.len() as u32,
            num_biases: case.biases.len() as u32,
            first_stop: stops.len() as u32,
            num_stops: case.stops.len() as u32,
            mask: if case.mask.is_empty() { 0 } else { (masks.len() / num_words + 1) as u32 },
            first_saved: num_saved as u32,
            ..case.row
        });
        counts.extend_from_slice(&case.counts);
        biases.extend_from_slice(&case.biases);
        stops.extend_from_slice(&case.stops);
        masks.extend_from_slice(&case.mask);
        num_saved += case.counts.len() + case.biases.len();
    }
    let logits: Vec<f32> = cases.iter().flat_map(|case| case.logits.iter().copied()).collect();
    let mut emulator = Emulator::new(source_with(if is_narrow { NARROW } else { THREADS }));
    let kernel = SampleRows {
        logits: emulator.buffer(&bytes(&logits)),
        rows: emulator.buffer(&bytes(&rows)),
        counts: emulator.buffer(&bytes(&counts)),
        biases: emulator.buffer(&bytes(&biases)),
        stops: emulator.buffer(&bytes(&stops)),
        masks: emulator.buffer(&bytes(&masks)),
        saved: emulator.poisoned(num_saved * 4),
        tokens: emulator.poisoned(rows.len() * 4),
        logprobs: emulator.poisoned(rows.len() * 4),
        top_ids: emulator.poisoned(rows.len() * max_top * 4),
        top_logprobs: emulator.poisoned(rows.len() * max_top * 4),
        vocab: vocab as u32,
        max_top: max_top as u32,
        num_rows: rows.len() as u64,
    };
    if is_narrow {
        emulator.launch(&Narrow(kernel));
    } else {
        emulator.launch(&kernel);
    }
    let memory = emulator.run();
    let word = |address: Address, idx: usize| {
        u32::from_le_bytes(memory.of(address)[idx * 4..][..4].try_into().unwrap())
    };
    let result = |(idx, row): (usize, &RowSampling)| {
        let num_top = if row.num_top == NO_LOGPROBS { 0 } else { row.num_top as usize };
        let top = (idx * max_top..idx * max_top + num_top)
            .map(|at| (word(kernel.top_ids, at), f32::from_bits(word(kernel.top_logprobs, at))));
        Result {
            sampled: RowOutcome::read(word(kernel.tokens, idx)),
            logprob: f32::from_bits(word(kernel.logprobs, idx)),
            top: top.collect(),
        }
    };
    rows.iter().enumerate().map(result).collect()
}

/// The rules of the host's sampler in plain code. The engine's own sampler is out of reach of this crate.
fn reference(case: &Case) -> RowOutcome {
    let largest = |logits: &[f32]| -> Option<(u32, f32)> {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let is_valid = max.is_finite() && !logits.iter().any(|logit| logit.is_nan());
        is_valid.then(|| (logits.iter().position(|&logit| logit == max).unwrap() as u32, max))
    };
    let (row, mut logits) = (&case.row, case.logits.clone());
    if largest(&logits).is_none() {
        return RowOutcome::InvalidLogits;
    }
    for count in &case.counts {
        let logit = &mut logits[count.token as usize];
        *logit = if *logit > 0.0 { *logit / row.repetition_penalty } else { *logit * row.repetition_penalty };
        if count.num_output > 0 {
            *logit -= row.presence_penalty + row.frequency_penalty * count.num_output as f32;
        }
        *logit = logit.clamp(f32::MIN, f32::MAX);
    }
    for biased in &case.biases {
        let logit = &mut logits[biased.token as usize];
        *logit = (*logit + biased.bias).clamp(f32::MIN, f32::MAX);
    }
    case.stops.iter().for_each(|&token| logits[token as usize] = f32::NEG_INFINITY);
    for (token, logit) in logits.iter_mut().enumerate().filter(|_| !case.mask.is_empty()) {
        if case.mask[token / 32] >> (token % 32) & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
    let Some((likeliest, max)) = largest(&logits) else { return RowOutcome::InvalidLogits };
    if row.temperature == 0.0 || row.top_k == 1 {
        return RowOutcome::Token(likeliest);
    }
    let scaled = logits.iter().map(|logit| (logit - max) / row.temperature).enumerate();
    let mut candidates: Vec<(usize, f32)> =
        scaled.filter(|(_, scaled)| *scaled >= row.lowest_scaled).collect();
    let has_top_k = row.top_k > 0 && (row.top_k as usize) < candidates.len();
    if has_top_k || row.top_p < 1.0 {
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }
    if has_top_k {
        candidates.truncate(row.top_k as usize);
    }
    let weight = |candidate: &(usize, f32)| f64::from(candidate.1.exp());
    if row.top_p < 1.0 {
        let wanted = f64::from(row.top_p) * candidates.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let reaches = |candidate| {
            sum += weight(candidate);
            sum >= wanted
        };
        let num = candidates.iter().position(reaches).map_or(candidates.len(), |idx| idx + 1);
        candidates.truncate(num);
    }
    let mut left = row.random * candidates.iter().map(weight).sum::<f64>();
    // The likeliest comes first.
    let place = candidates.iter().position(|candidate| candidate.0 as u32 == likeliest).unwrap();
    candidates[..=place].rotate_right(1);
    for candidate in &candidates {
        left -= weight(candidate);
        if left < 0.0 {
            return RowOutcome::Token(candidate.0 as u32);
        }
    }
    RowOutcome::Token(candidates.last().unwrap().0 as u32)
}

/// Whether the host could have sampled this token with slightly different rounding.
fn is_on_a_boundary(case: &Case, sampled: RowOutcome) -> bool {
    let near = [-2e-6, 0.0, 2e-6];
    near.into_iter().flat_map(|random| near.map(|top_p| (random, top_p))).any(|(random, top_p)| {
        let moved = case.clone().with(|row| {
            row.random = (row.random + random).clamp(0.0, 1.0 - 1e-16);
            row.top_p = if row.top_p < 1.0 { (row.top_p + top_p as f32).min(1.0 - 1e-7) } else { 1.0 };
        });
        reference(&moved) == sampled
    })
}

fn check(cases: &[Case], is_narrow: bool) {
    let results = run(cases, is_narrow);
    let mut num_moved = 0;
    for (case, result) in cases.iter().zip(&results) {
        let expected = reference(case);
        if result.sampled != expected {
            num_moved += 1;
            let is_near = is_on_a_boundary(case, result.sampled);
            assert!(is_near, "{:?} and not {expected:?}: {:?}", result.sampled, case.row);
        }
        if let (RowOutcome::Token(token), true) = (result.sampled, case.row.num_top != NO_LOGPROBS) {
            let max = f64::from(case.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let sum: f64 = case.logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
            let logprob = |token: u32| (f64::from(case.logits[token as usize]) - max - sum.ln()) as f32;
            let mut order: Vec<u32> = (0..case.logits.len() as u32).collect();
            order.sort_by(|a, b| case.logits[*b as usize].total_cmp(&case.logits[*a as usize]));
            order.truncate(case.row.num_top as usize);
            let ids: Vec<u32> = result.top.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, order, "{:?}", case.row);
            for (token, found) in result.top.iter().copied().chain([(token, result.logprob)]) {
                let expected = logprob(token);
                // f32 sums of some thousand numbers, and a difference of numbers of this size.
                let is_close = found == expected || (found - expected).abs() <= 4e-6 + expected.abs() * 2e-7;
                assert!(is_close, "token {token}: {found}, expected {expected}: {:?}", case.row);
            }
        }
    }
    assert!(num_moved * 50 <= cases.len(), "{num_moved} of {} were on a boundary", cases.len());
}

/// Rows of several shapes: narrow, wide, flat, with ties, with excluded tokens.
fn rows(vocab: usize) -> Vec<Vec<f32>> {
    let normal = |seed: u64| -> Vec<f32> {
        let parts: Vec<Vec<f32>> = (0..6).map(|part| noise(seed * 6 + part, vocab)).collect();
        (0..vocab).map(|id| parts.iter().map(|part| part[id]).sum()).collect()
    };
    let shaped = |seed, shape: fn(f32) -> f32| normal(seed).into_iter().map(shape).collect();
    vec![
        shaped(1, |x| 2.0 * x),
        shaped(2, |x| 8.0 * x),
        shaped(3, |x| 0.02 * x + 3.0),
        shaped(4, |x| (4.0 * x).round() * 0.5),
        vec![-1.5; vocab],
        shaped(5, |x| if x > 0.5 { f32::NEG_INFINITY } else { 3.0 * x }),
        shaped(6, |x| 1e30 * x),
    ]
}

/// All settings of a row, in combinations that matter.
fn cases(vocab: usize) -> Vec<Case> {
    let mut cases = vec![];
    let randoms = noise(77, 10_000);
    for (row_idx, logits) in rows(vocab).into_iter().enumerate() {
        for (way, (temperature, top_k, top_p, min_p)) in [
            (0.0, 0, 1.0, 0.0),
            (1.0, 1, 1.0, 0.0),
            (1.0, 0, 1.0, 0.0),
            (0.7, 5, 1.0, 0.0),
            (1.0, 300, 1.0, 0.0),
            (1.0, u32::MAX, 1.0, 0.1),
            (1.3, 0, 0.9, 0.0),
            (5.0, 0, 0.999, 0.0),
            (1.0, 0, 1e-6, 0.0),
            (0.9, 40, 0.8, 0.02),
            (2.0, 200, 0.97, 0.0),
        ]
        .into_iter()
        .enumerate()
        {
            let mut case = Case::new(logits.clone()).with(|row| {
                row.random = f64::from(randoms[cases.len()].abs()).min(0.999_999_9);
                (row.temperature, row.top_k, row.top_p) = (temperature, top_k, top_p);
                row.lowest_scaled = lowest_scaled(min_p);
                row.num_top = [NO_LOGPROBS, 0, 3, NO_LOGPROBS, (vocab as u32).min(20)][way % 5];
            });
            if (way + row_idx) % 3 == 2 {
                // Half of the tokens, none of a word, and all of a word.
                let word = |idx: usize| [0xa5c3_96f0, 0, u32::MAX][idx % 3];
                case.mask = (0..vocab.div_ceil(32)).map(word).collect();
            }
            if (way + row_idx) % 2 == 1 {
                let token = |idx: usize| (idx * 7 % vocab) as u32;
                let num = vocab.min(12);
                case.counts = (0..num as u32)
                    .map(|idx| TokenCount { token: token(idx as usize), num_output: idx % 4 })
                    .collect();
                case.biases = vec![
                    BiasedToken { token: token(0), bias: 4.5 },
                    BiasedToken { token: token(num - 1), bias: f32::MAX },
                ];
                case.biases.truncate(1 + usize::from(way == 1));
                // At least one token is left.
                case.stops = (0..num / 2).map(token).chain([token(1)]).take(num - 1).collect();
                (case.row.repetition_penalty, case.row.presence_penalty) = (1.3, 0.5);
                case.row.frequency_penalty = -0.25;
            }
            cases.push(case);
        }
    }
    cases
}

#[test]
fn tokens_match_the_host() {
    // Lists of 64 tokens: larger cases need the search.
    check(&cases(13), true);
    check(&cases(515).into_iter().step_by(2).collect::<Vec<_>>(), true);
}

#[test]
fn the_thread_count_of_a_device_samples_the_same_tokens() {
    check(&cases(600).into_iter().skip(6).step_by(36).collect::<Vec<_>>(), false);
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    let mut cases: Vec<Case> = cases(600).into_iter().step_by(9).collect();
    let together = run(&cases, true);
    cases.reverse();
    let mut reversed = run(&cases, true);
    reversed.reverse();
    for ((case, a), b) in cases.iter().rev().zip(&together).zip(&reversed) {
        assert_eq!(a.sampled, b.sampled);
        if case.row.num_top != NO_LOGPROBS {
            assert_eq!((a.logprob.to_bits(), &a.top), (b.logprob.to_bits(), &b.top));
        }
    }
}

#[test]
fn the_end_of_the_interval_is_a_token() {
    let cases: Vec<Case> = rows(515)
        .into_iter()
        .flat_map(|logits| {
            [(0, 1.0), (7, 1.0), (0, 0.5), (100, 0.99)].map(|(top_k, top_p)| {
                Case::new(logits.clone()).with(|row| {
                    (row.top_k, row.top_p, row.random) = (top_k, top_p, 1.0 - f64::EPSILON / 2.0);
                })
            })
        })
        .collect();
    for (case, result) in cases.iter().zip(run(&cases, true)) {
        let RowOutcome::Token(token) = result.sampled else { panic!("{:?}", case.row) };
        assert!(case.logits[token as usize].is_finite());
    }
}

#[test]
fn unusable_rows_are_marked() {
    let good = noise(9, 600);
    let with = |token: usize, value: f32| {
        let mut logits = good.clone();
        logits[token] = value;
        Case::new(logits)
    };
    let all = |value: f32| Case::new(vec![value; 600]);
    let mut cases = vec![];
    for is_changed in [false, true] {
        for bad in [with(599, f32::NAN), with(0, f32::INFINITY), all(f32::NEG_INFINITY), all(f32::NAN)] {
            for temperature in [0.0, 1.0] {
                let mut case = bad.clone().with(|row| row.temperature = temperature);
                if is_changed {
                    // The invalid number itself may be changed.
                    case.stops = vec![599];
                    case.counts = vec![TokenCount { token: 0, num_output: 1 }];
                    case.row.presence_penalty = 1.0;
                    case.row.num_top = 2;
                }
                cases.push(case);
            }
        }
    }
    // A valid row stays valid beside invalid ones. A row without any candidate is invalid.
    cases.push(with(3, f32::NEG_INFINITY));
    let mut empty = Case::new(good.clone());
    empty.stops = (0..600).collect();
    cases.push(empty);
    check(&cases, true);
    let num_invalid =
        run(&cases, true).iter().filter(|result| result.sampled == RowOutcome::InvalidLogits).count();
    assert_eq!(num_invalid, cases.len() - 1);
}

#[test]
fn a_sampled_token_is_counted_once() {
    let count = |token, num_output| TokenCount { token, num_output };
    let none = count(NO_TOKEN, 0);
    // The counts before, the sampled tokens, and the expected counts.
    let long: Vec<TokenCount> = (0..700).map(|token| count(token, token % 3)).chain([none]).collect();
    let mut longer = long.clone();
    longer[699].num_output += 1;
    let lists = [
        (vec![count(5, 0), count(9, 2), none], 9, vec![count(5, 0), count(9, 3), none]),
        (vec![], 9, vec![]),
        (vec![count(5, 0), none], 7, vec![count(5, 0), count(7, 1)]),
        (long, 699, longer),
        (vec![count(5, 0), none], NO_TOKEN, vec![count(5, 0), count(NO_TOKEN, 1)]),
    ];
    let mut counts: Vec<TokenCount> = vec![];
    let mut rows = vec![];
    for (list, ..) in &lists {
        let (first_count, num_counts) = (counts.len() as u32, list.len() as u32);
        rows.push(RowSampling { first_count, num_counts, ..Case::new(vec![]).row });
        counts.extend(list);
    }
    // The same lists in another order.
    let sampled: Vec<u32> = lists.iter().rev().map(|(_, token, _)| *token).collect();
    let sources: Vec<u32> = (0..lists.len() as u32).rev().collect();
    let mut emulator = Emulator::new(source_with(NARROW));
    let kernel = CountSampled {
        rows: emulator.buffer(&bytes(&rows)),
        counts: emulator.buffer(&bytes(&counts)),
        sources: emulator.buffer(&bytes(&sources)),
        sampled: emulator.buffer(&bytes(&sampled)),
        num_rows: rows.len() as u64,
    };
    emulator.launch(&kernel);
    let expected: Vec<TokenCount> = lists.iter().flat_map(|(_, _, list)| list).copied().collect();
    assert_eq!(emulator.run().of(kernel.counts), bytes(&expected));
}

#[test]
fn an_entry_without_a_token_is_skipped() {
    let case = |with_none: bool| {
        let mut case = Case::new(noise(9, 600));
        case.counts = (0..40).map(|token| TokenCount { token: token * 9, num_output: token % 3 }).collect();
        if with_none {
            case.counts.insert(20, TokenCount { token: NO_TOKEN, num_output: 1 });
        }
        case.with(|row| (row.presence_penalty, row.repetition_penalty, row.num_top) = (0.5, 1.2, 3))
    };
    let results = run(&[case(false), case(true)], true);
    assert_eq!(results[0], results[1]);
}
