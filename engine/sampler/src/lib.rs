//! From a row of logits to a token, and to the log-probability of a known one. A pure function of the row, the parameters
//! and the tokens so far: it does not know what else is in the batch.
//!
//! In this order: repetition, frequency and presence penalty; logit bias; stop ids are masked until `min_tokens`;
//! then what a grammar does not allow.
//! Temperature 0 then takes the largest logit (the smallest id of equals). Otherwise: temperature, min-p, top-k,
//! top-p over the remaining candidates, and one random number. It chooses among candidates in the order of their
//! likelihood if top-k or top-p removed some; else the likeliest comes first, and the others in the order of ids. So where the
//! likeliest is chosen, it is chosen whatever a grammar takes away from the others. Log-probabilities are those of the
//! unmodified row, as in OpenAI and vLLM (`logprobs`). What needs a whole row is in `row`.

#![forbid(unsafe_code)]

mod logprobs;
mod row;

use std::{
    borrow::Cow,
    cmp::Ordering,
    collections::{HashMap, hash_map::Entry},
};

use baton_grammar::TokenMask;
pub use baton_model_spec::InvalidLogits;
use baton_model_spec::{DraftedCount, SampledToken, TokenCount, TokenSampling};

use baton_random::{GOLDEN, hash, mix};
use baton_request::{Request, SamplingParams};
use logprobs::wanted_logprobs;
use row::{NEGLIGIBLE, check, exp, largest, sum_of, weight};

pub use logprobs::ScoredToken;

/// Number of the likeliest tokens that top-p sorts first. It sorts more only when these are too few.
const NUCLEUS_GUESS: usize = 64;

/// Chooses tokens. Holds scratch memory only.
#[derive(Debug, Default)]
pub struct Sampler {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
}

/// The tokens before, as far as the sampler needs them.
#[derive(Clone, Debug)]
pub struct TokenHistory {
    num_output_tokens: usize,
    /// `None` without penalties.
    counts: Option<TokenCounts>,
}

/// Tokens of the output, and with a repetition penalty those of the prompt.
#[derive(Clone, Debug, Default)]
struct TokenCounts {
    /// Each token once: first those of the prompt, if they count, then the others in the order of their first occurrence.
    list: Vec<TokenCount>,
    num_in_prompt: usize,
    /// Index of each token in the list.
    places: HashMap<u32, usize>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    /// Logit minus the largest, divided by the temperature. After top-k: the exponential of that.
    weight: f32,
}

impl TokenHistory {
    /// The history of a request before its next token.
    pub fn new(request: &Request) -> TokenHistory {
        let params = &request.sampling;
        let repeats = params.repetition_penalty != 1.0;
        let penalises = repeats || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        // The other penalties are for tokens of the output alone: those of the prompt would change nothing.
        let counted: &[u32] = if repeats { &request.prompt[..] } else { &[] };
        let counts = penalises.then(|| TokenCounts::of_prompt(counted));
        let mut history = TokenHistory { num_output_tokens: 0, counts };
        request.output.iter().for_each(|&token| history.push(token));
        history
    }

    /// Adds an output token.
    pub fn push(&mut self, token: u32) {
        self.num_output_tokens += 1;
        if let Some(counts) = &mut self.counts {
            counts.push(token);
        }
    }

    /// Removes the newest output token.
    pub fn pop(&mut self, token: u32) {
        self.num_output_tokens -= 1;
        if let Some(counts) = &mut self.counts {
            counts.pop(token);
        }
    }

    /// Sampling of the next token.
    pub fn sampling<'a>(&'a self, params: &'a SamplingParams) -> TokenSampling<'a> {
        sampling_at(self.num_output_tokens, self.counts(), params)
    }

    /// Sampling of the token after the next one, which is not counted yet.
    pub fn sampling_after_next<'a>(&'a self, params: &'a SamplingParams) -> TokenSampling<'a> {
        sampling_at(self.num_output_tokens + 1, self.counts(), params)
    }

    /// Sampling of the next token and of the token after each of `drafts`.
    pub fn samplings<'a>(
        &'a self,
        drafts: &'a [u32],
        params: &'a SamplingParams,
    ) -> impl Iterator<Item = TokenSampling<'a>> {
        let mut drafted: Vec<DraftedCount> = Vec::new();
        let after = drafts.iter().enumerate().map(move |(idx, &draft)| {
            if let Some(counts) = &self.counts {
                counts.count_draft(draft, &mut drafted);
            }
            let sampling = sampling_at(self.num_output_tokens + 1 + idx, self.counts(), params);
            TokenSampling { drafted: drafted.clone(), ..sampling }
        });
        std::iter::once(self.sampling(params)).chain(after)
    }

    fn counts(&self) -> &[TokenCount] {
        self.counts.as_ref().map_or(&[], |counts| &counts.list)
    }

    /// Output tokens so far, those of earlier attempts included.
    pub fn num_output_tokens(&self) -> usize {
        self.num_output_tokens
    }
}

impl TokenCounts {
    fn of_prompt(prompt: &[u32]) -> TokenCounts {
        let mut counts = TokenCounts::default();
        for &token in prompt {
            if let Entry::Vacant(place) = counts.places.entry(token) {
                place.insert(counts.list.len());
                counts.list.push(TokenCount { token, num_output: 0 });
            }
        }
        counts.num_in_prompt = counts.list.len();
        counts
    }

    fn push(&mut self, token: u32) {
        let place = *self.places.entry(token).or_insert_with(|| {
            self.list.push(TokenCount { token, num_output: 0 });
            self.list.len() - 1
        });
        self.list[place].num_output += 1;
    }

    /// Counts a draft after those that `drafted` counts, as [`push`](Self::push) would, and leaves the list as it is: it may have
    /// every token of a long prompt.
    fn count_draft(&self, token: u32, drafted: &mut Vec<DraftedCount>) {
        if let Some(again) = drafted.iter_mut().find(|drafted| drafted.count.token == token) {
            again.count.num_output += 1;
            return;
        }
        let idx = match self.places.get(&token) {
            Some(&place) => place,
            None => drafted.last().map_or(0, |last| last.idx + 1).max(self.list.len()),
        };
        let num_output = 1 + self.list.get(idx).map_or(0, |count| count.num_output);
        let at = drafted.partition_point(|drafted| drafted.idx < idx);
        drafted.insert(at, DraftedCount { idx, count: TokenCount { token, num_output } });
    }

    /// Removes the newest token.
    fn pop(&mut self, token: u32) {
        let place = self.places[&token];
        self.list[place].num_output -= 1;
        if self.list[place].num_output == 0 && place >= self.num_in_prompt {
            debug_assert_eq!(place, self.list.len() - 1, "later tokens were removed before");
            self.places.remove(&token);
            self.list.pop();
        }
    }
}

/// Sampling of the output token with index `output_idx`. The random number does not depend on batch, role, attempt or
/// preemption.
fn sampling_at<'a>(
    output_idx: usize,
    counts: &'a [TokenCount],
    params: &'a SamplingParams,
) -> TokenSampling<'a> {
    let must_not_stop = output_idx < params.min_tokens as usize;
    TokenSampling {
        // Invariant 7: seed and index are the same in every attempt, batch and role.
        random: random_unit(params.seed, output_idx as u64),
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        counts: Cow::Borrowed(counts),
        drafted: Vec::new(),
        logit_bias: Cow::Borrowed(&params.logit_bias),
        masked: Cow::Borrowed(if must_not_stop { &params.stop_token_ids } else { &[] }),
        on_host: false,
        is_masked: params.grammar.is_some(),
        logprobs: params.logprobs,
    }
}

impl Sampler {
    /// Samples the next token.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        history: &TokenHistory,
    ) -> Result<SampledToken, InvalidLogits> {
        self.sample_row(logits, &history.sampling(params))
    }

    /// Samples the next token among those that `mask` allows.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn sample_within(
        &mut self,
        mask: &TokenMask,
        logits: &[f32],
        params: &SamplingParams,
        history: &TokenHistory,
    ) -> Result<SampledToken, InvalidLogits> {
        let sampling = history.sampling(params);
        copy_changed(logits, &sampling, &mut self.logits)?;
        mask.apply_to(&mut self.logits);
        let id = choose(&self.logits, &mut self.candidates, &sampling)?;
        let logprobs = wanted_logprobs(logits, id, sampling.logprobs)?;
        Ok(SampledToken { id, logprobs })
    }

    /// The likeliest token, if every mask that allows it leads to it: it is the likeliest then, too, and first in the order, and
    /// the random number is below its share of all weights, which a mask only makes larger.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn sample_likeliest(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        history: &TokenHistory,
    ) -> Result<Option<SampledToken>, InvalidLogits> {
        let sampling = history.sampling(params);
        let row = changed(logits, &sampling, &mut self.logits)?;
        let (id, max) = largest(row)?;
        // The margin is larger than what rounding makes of a sum.
        if !sampling.is_greedy() && sampling.random * total_of(row, max, &sampling) >= 1.0 - 1e-4 {
            return Ok(None);
        }
        let logprobs = wanted_logprobs(logits, id, sampling.logprobs)?;
        Ok(Some(SampledToken { id, logprobs }))
    }

    /// Samples a token from a row.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn sample_row(
        &mut self,
        logits: &[f32],
        sampling: &TokenSampling<'_>,
    ) -> Result<SampledToken, InvalidLogits> {
        let id = self.sample_row_id(logits, sampling)?;
        let logprobs = wanted_logprobs(logits, id, sampling.logprobs)?;
        Ok(SampledToken { id, logprobs })
    }

    /// [`sample_row`](Self::sample_row) without log-probabilities.
    ///
    /// # Errors
    /// When the row is invalid.
    pub fn sample_row_id(
        &mut self,
        logits: &[f32],
        sampling: &TokenSampling<'_>,
    ) -> Result<u32, InvalidLogits> {
        choose(changed(logits, sampling, &mut self.logits)?, &mut self.candidates, sampling)
    }
}

/// The random number of an output token, in [0, 1): a function of seed and index alone, so that a
/// token does not depend on batch, role, attempt or preemption.
///
/// Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
/// Generators, 2014), once over the seed and once over the sum with the index's Weyl step.
pub fn random_unit(seed: u64, output_idx: u64) -> f64 {
    // Invariant 8: no state, only seed and index.
    let bits = mix(hash(seed).wrapping_add(output_idx.wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The row, or its copy if the sampling changes it.
fn changed<'a>(
    logits: &'a [f32],
    sampling: &TokenSampling<'_>,
    copy: &'a mut Vec<f32>,
) -> Result<&'a [f32], InvalidLogits> {
    if !sampling.changes_logits() {
        return Ok(logits);
    }
    copy_changed(logits, sampling, copy)?;
    Ok(copy)
}

fn copy_changed(
    logits: &[f32],
    sampling: &TokenSampling<'_>,
    copy: &mut Vec<f32>,
) -> Result<(), InvalidLogits> {
    copy.clear();
    copy.extend_from_slice(logits);
    check(copy)?;
    apply(copy, sampling);
    Ok(())
}

fn apply(logits: &mut [f32], sampling: &TokenSampling<'_>) {
    for count in sampling.counted() {
        let logit = &mut logits[count.token as usize];
        let mut penalised = if *logit > 0.0 {
            *logit / sampling.repetition_penalty
        } else {
            *logit * sampling.repetition_penalty
        };
        if count.num_output > 0 {
            penalised -= sampling.presence_penalty + sampling.frequency_penalty * count.num_output as f32;
        }
        *logit = bounded(penalised);
    }
    for &(token, bias) in &*sampling.logit_bias {
        logits[token as usize] = bounded(logits[token as usize] + bias);
    }
    for &token in &*sampling.masked {
        logits[token as usize] = f32::NEG_INFINITY;
    }
}

/// Extreme parameters of a request may overflow; that is not an error of the model.
fn bounded(logit: f32) -> f32 {
    logit.clamp(f32::MIN, f32::MAX)
}

fn choose(
    logits: &[f32],
    candidates: &mut Vec<Candidate>,
    sampling: &TokenSampling<'_>,
) -> Result<u32, InvalidLogits> {
    let (likeliest, max) = largest(logits)?;
    if sampling.is_greedy() {
        return Ok(likeliest);
    }
    let (lowest, temperature) = (lowest(sampling), sampling.temperature);
    candidates.clear();
    for (&logit, id) in logits.iter().zip(0..) {
        let scaled = (logit - max) / temperature;
        if scaled >= lowest {
            candidates.push(Candidate { id, weight: scaled });
        }
    }
    keep_top_k(candidates, sampling.top_k as usize);
    candidates.iter_mut().for_each(|candidate| candidate.weight = exp(candidate.weight));
    keep_top_p(candidates, sampling.top_p);

    // The weight of the likeliest is 1.
    let mut left = sampling.random * total_weight(candidates) - 1.0;
    if left < 0.0 {
        return Ok(likeliest);
    }
    for candidate in candidates.iter().filter(|candidate| candidate.id != likeliest) {
        left -= f64::from(candidate.weight);
        if left < 0.0 {
            return Ok(candidate.id);
        }
    }
    Ok(candidates.last().map_or(likeliest, |candidate| candidate.id)) // the subtraction was not exact
}

/// Scaled logits of candidates are not lower.
fn lowest(sampling: &TokenSampling<'_>) -> f32 {
    if sampling.min_p > 0.0 { sampling.min_p.ln().max(NEGLIGIBLE) } else { NEGLIGIBLE }
}

fn keep_top_k(candidates: &mut Vec<Candidate>, top_k: usize) {
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, Candidate::likelier);
        candidates.truncate(top_k);
        // The selection leaves an arbitrary order, on which the choice by the random number would depend.
        // Invariant 7: ids break ties, so this order is the only one.
        candidates.sort_unstable_by(Candidate::likelier);
    }
}

/// Keeps the fewest likeliest candidates that together have `top_p` of the weight.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f32) {
    if top_p >= 1.0 {
        return;
    }
    let wanted = f64::from(top_p) * total_weight(candidates);
    let mut sum = 0.0;
    let mut num_sorted = 0;
    let mut num_next = NUCLEUS_GUESS;
    while num_sorted < candidates.len() {
        let rest = &mut candidates[num_sorted..];
        let num = num_next.min(rest.len());
        if num < rest.len() {
            rest.select_nth_unstable_by(num - 1, Candidate::likelier);
        }
        rest[..num].sort_unstable_by(Candidate::likelier);
        for idx in num_sorted..num_sorted + num {
            sum += f64::from(candidates[idx].weight);
            if sum >= wanted {
                candidates.truncate(idx + 1);
                return;
            }
        }
        num_sorted += num;
        num_next *= 4;
    }
}

/// The weights of all tokens that min-p leaves, to 0.00001 of it.
fn total_of(logits: &[f32], max: f32, sampling: &TokenSampling<'_>) -> f64 {
    let (lowest, temperature) = (lowest(sampling), sampling.temperature);
    sum_of(logits, |logit| weight((logit - max) / temperature, lowest))
}

fn total_weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

impl Candidate {
    /// A total order (ids are unique), so that neither a selection nor a sample depends on an algorithm.
    fn likelier(&self, other: &Candidate) -> Ordering {
        other.weight.total_cmp(&self.weight).then(self.id.cmp(&other.id))
    }
}
