//! How far blended prompts are from full prefills, by what is selected.
//!
//! ```text
//! blend_quality MODEL [--layer N] [--seeds N] [--passage TOKENS]
//! blend_quality MODEL [--layer N] --answers
//! ```
//!
//! Keys of layer N decide which tokens deviate most; without the flag those of layer 1. Earlier layers are computed for all tokens.
//!
//! Prompts are those of `MODEL/eval` that have paragraphs, each with its paragraphs in N random orders. A passage is a
//! paragraph, or with `--passage` so many tokens. The question follows the passages and is computed in full. Each line gives
//! the KL divergence of the next token from that of a full prefill, in nats: after the prompt, and as a mean over all
//! tokens of the question; and how often the most likely next token is the same. The exit code is 1 unless, at every ratio,
//! selecting nothing is worse than selecting at random, and that worse than selecting by deviation, and with a ratio of 1
//! nothing differs.
//!
//! `--answers` counts right answers: to questions about passages that need one another, about facts in long texts, and to sums
//! behind such texts. Beside them are the divergences of the first token and of an answer's first eight tokens, as a worker's gate
//! compares them. The exit code is 1 unless passages that need one another and are only reused lose 30 points; with a later layer than
//! the first, which may show what they need, it is 0.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use baton_kv_cache::{BlockId, BlockStorage, KvDtype};
use baton_model::{Activations, Backend, Batch, BatchSequence, CpuExecutor, Executor, LoadOptions, load};
use baton_model_spec::{
    BlendPassage, BlendRatio, BlendedPrompt, BlendingExecutor, FIRST_KEPT_LAYER, PassageKv, Selection,
    SelectionOrder,
};
use baton_tokenizer::Tokenizer;
use serde_json::Value;

const RATIOS: [f32; 4] = [0.05, 0.15, 0.3, 1.0];
const FILES: [&str; 2] = ["two-hop-256.jsonl", "recall-512.jsonl"];
/// Their passages need one another. Those of the second have filler, and so more tokens.
const BOUND_FILES: [&str; 2] = ["passages-256.jsonl", "filled-passages-512.jsonl"];
/// The question follows paragraphs of [`FILES`].
const SUMS_FILE: &str = "sums.jsonl";
/// More than any answer of the model.
const MAX_ANSWER_TOKENS: usize = 24;
/// Tokens of an answer whose divergence is measured, as by a worker.
const NUM_COMPARED: usize = 8;

/// A prompt whose first part is made of passages.
struct Prompt {
    tokens: Vec<u32>,
    passages: Vec<Range<usize>>,
    /// What a right answer ends with.
    answer: String,
}

/// What is selected.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    layer: usize,
    num_first_tokens: usize,
    ratio: f32,
    order: fn(u64) -> SelectionOrder,
}

/// Sums over prompts.
#[derive(Clone, Copy, Default)]
struct Loss {
    num_prompts: usize,
    last_kl: f64,
    mean_kl: f64,
    num_equal: usize,
}

/// A greedy answer.
struct Answer {
    is_right: bool,
    /// The first tokens, each with the logits that it was taken from.
    tokens: Vec<(u32, Vec<f32>)>,
}

/// Sums over answers.
#[derive(Clone, Copy, Default)]
struct Score {
    num_right: usize,
    first_kl: f64,
    mean_kl: f64,
}

struct Blender {
    executor: CpuExecutor,
    storage: BlockStorage,
    blocks: Vec<BlockId>,
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let model = PathBuf::from(args.next().expect("the folder of a model"));
    let (mut layer, mut are_answers_wanted) = (FIRST_KEPT_LAYER, false);
    let (mut num_seeds, mut passage_tokens) = (3, None);
    while let Some(flag) = args.next() {
        if flag == "--answers" {
            are_answers_wanted = true;
            continue;
        }
        let value: usize = args.next().and_then(|value| value.parse().ok()).expect("a number after the flag");
        match flag.as_str() {
            "--layer" => layer = value,
            "--seeds" => num_seeds = value as u64,
            "--passage" => passage_tokens = Some(value),
            _ => panic!("unknown flag {flag}"),
        }
    }
    println!("keys of layer {layer} decide");
    if are_answers_wanted {
        return answers(&model, layer);
    }
    let tokenizer = Tokenizer::load(&model).expect("a tokenizer");
    let prompts = prompts(&model, &tokenizer, &FILES, Some(num_seeds), passage_tokens);
    let num_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let num_passages: usize = prompts.iter().map(|prompt| prompt.passages.len()).sum();
    println!(
        "{} prompts, seeds 0 to {}, {} tokens and {:.1} passages each",
        prompts.len(),
        num_seeds - 1,
        num_tokens / prompts.len(),
        num_passages as f64 / prompts.len() as f64
    );
    let cases = cases(layer, &RATIOS, &[(4, 0.0), (4, 0.15)]);
    let losses = Blender::new(&model).losses(&prompts, &cases);
    println!("selection       first  ratio  KL at the end  KL over the question  same token");
    for (case, loss) in cases.iter().zip(&losses) {
        let num = loss.num_prompts as f64;
        println!(
            "{:<14} {:>6} {:>6} {:>14.5} {:>21.5} {:>10.1}%",
            case.name,
            case.num_first_tokens,
            case.ratio,
            loss.last_kl / num,
            loss.mean_kl / num,
            100.0 * loss.num_equal as f64 / num
        );
    }
    if is_in_order(&losses) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints the share of right answers for each case.
fn answers(model: &Path, layer: usize) -> ExitCode {
    let tokenizer = Tokenizer::load(model).expect("a tokenizer");
    let mut blender = Blender::new(model);
    let cases = cases(layer, &[0.15, 0.3], &[(4, 0.0), (5, 0.0), (6, 0.0), (8, 0.0)]);
    let text = || prompts(model, &tokenizer, &FILES, None, None);
    let bound = BOUND_FILES.map(|file| (file, prompts(model, &tokenizer, &[file], None, None)));
    let others = [("sums behind texts", sums(model, &tokenizer, &text())), ("facts in texts", text())];
    let mut are_needed = true;
    for (file, prompts) in bound.into_iter().chain(others) {
        let percent = |num_right: usize| 100.0 * num_right as f64 / prompts.len() as f64;
        let (full, of_cases) = blender.scores(&tokenizer, &prompts, &cases);
        let full = percent(full);
        println!("{file}: {} prompts; full prefill: {full:.1} % right", prompts.len());
        println!("selection       first  ratio  computed   right  KL of the first token  of the answer");
        for (case, score) in cases.iter().zip(of_cases) {
            let right = percent(score.num_right);
            let computed = 100.0 * computed_share(&prompts, case);
            let [first_kl, mean_kl] = [score.first_kl, score.mean_kl].map(|sum| sum / prompts.len() as f64);
            println!(
                "{:<14} {:>6} {:>6} {computed:>8.1}% {right:>6.1}% {first_kl:>22.5} {mean_kl:>14.5}",
                case.name, case.num_first_tokens, case.ratio
            );
            let is_reused_only = case.name == "none" && BOUND_FILES.contains(&file);
            are_needed &= layer > FIRST_KEPT_LAYER || !is_reused_only || full - right >= 30.0;
        }
    }
    if are_needed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The share of the passages' tokens that the layers after the one whose keys decide compute.
fn computed_share(prompts: &[Prompt], case: &Case) -> f64 {
    let (mut computed, mut all) = (0.0, 0.0);
    for range in prompts.iter().flat_map(|prompt| &prompt.passages) {
        let num_first = range.len().min(case.num_first_tokens) as f64;
        all += range.len() as f64;
        computed += num_first + f64::from(case.ratio) * (range.len() as f64 - num_first);
    }
    computed / all
}

/// Nothing, then for each ratio at random and by deviation, then with so many first tokens of each passage and a ratio of the
/// others.
fn cases(layer: usize, ratios: &[f32], with_first: &[(usize, f32)]) -> Vec<Case> {
    let deviation: fn(u64) -> SelectionOrder = |_| SelectionOrder::Deviation;
    let none = Case { name: "none", layer, num_first_tokens: 0, ratio: 0.0, order: deviation };
    let random = Case { name: "random", order: |seed| SelectionOrder::Random { seed }, ..none };
    let of_ratio = |&ratio| [Case { ratio, ..random }, Case { name: "deviation", ratio, ..none }];
    let first = |&(num_first_tokens, ratio)| Case { name: "with first", num_first_tokens, ratio, ..none };
    [none].into_iter().chain(ratios.iter().flat_map(of_ratio)).chain(with_first.iter().map(first)).collect()
}

fn is_in_order(losses: &[Loss]) -> bool {
    let none = losses[0].mean_kl;
    let pairs = losses[1..=2 * RATIOS.len()].chunks_exact(2);
    pairs.zip(RATIOS).all(|(pair, ratio)| match ratio {
        1.0 => pair.iter().all(|loss| loss.mean_kl == 0.0 && loss.num_equal == loss.num_prompts),
        _ => none > pair[0].mean_kl && pair[0].mean_kl > pair[1].mean_kl,
    })
}

/// `num_seeds`: in how many random orders the paragraphs are; `None` leaves them in theirs.
fn prompts(
    model: &Path,
    tokenizer: &Tokenizer,
    files: &[&str],
    num_seeds: Option<u64>,
    passage_tokens: Option<usize>,
) -> Vec<Prompt> {
    let mut prompts = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(model.join("eval").join(file)).expect("examples of the model");
        for (idx, line) in text.lines().enumerate() {
            let example: Value = serde_json::from_str(line).expect("an example");
            let messages = example["messages"].as_array().expect("messages");
            let text: Vec<&str> = messages.iter().filter_map(|message| message["content"].as_str()).collect();
            let text = text.join("\n\n");
            let mut paragraphs: Vec<&str> = text.split("\n\n").collect();
            let question = paragraphs.pop().expect("a question comes last");
            if paragraphs.is_empty() {
                continue;
            }
            let answer = example["answer"].as_str().expect("an answer");
            for seed in 0..num_seeds.unwrap_or(1) {
                if num_seeds.is_some() {
                    shuffle(&mut paragraphs, seed << 32 | idx as u64);
                }
                prompts.push(Prompt::new(tokenizer, &paragraphs, question, answer, passage_tokens));
            }
        }
    }
    prompts
}

/// A sum behind each text.
fn sums(model: &Path, tokenizer: &Tokenizer, texts: &[Prompt]) -> Vec<Prompt> {
    let lines = std::fs::read_to_string(model.join("eval").join(SUMS_FILE)).expect("examples of the model");
    let examples = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("an example"));
    let behind = |(text, example): (&Prompt, Value)| {
        let question = example["messages"][0]["content"].as_str().expect("a question").to_owned();
        let mut tokens = text.tokens[..text.head()].to_vec();
        tokens.extend(tokenizer.encode(&format!("{question}<|end|>\n<|assistant|>\n"), false).expect("text"));
        let answer = example["answer"].as_str().expect("an answer").to_owned();
        Prompt { tokens, passages: text.passages.clone(), answer }
    };
    texts.iter().zip(examples).map(behind).collect()
}

impl Prompt {
    fn new(
        tokenizer: &Tokenizer,
        paragraphs: &[&str],
        question: &str,
        answer: &str,
        passage_tokens: Option<usize>,
    ) -> Prompt {
        let encode = |text: &str| tokenizer.encode(text, false).expect("text");
        let mut tokens = encode("<|bos|><|user|>\n");
        let (start, mut passages) = (tokens.len(), Vec::new());
        for paragraph in paragraphs {
            let first = tokens.len();
            tokens.extend(encode(&format!("{paragraph}\n\n")));
            passages.push(first..tokens.len());
        }
        if let Some(size) = passage_tokens {
            let end = tokens.len();
            passages = (start..end).step_by(size).map(|first| first..end.min(first + size)).collect();
        }
        tokens.extend(encode(&format!("{question}<|end|>\n<|assistant|>\n")));
        Prompt { tokens, passages, answer: answer.to_owned() }
    }

    /// The end of the last passage.
    fn head(&self) -> usize {
        self.passages.last().expect("a prompt has passages").end
    }
}

impl Blender {
    fn new(model: &Path) -> Blender {
        let options = LoadOptions {
            kv_dtype: Some(KvDtype::F32),
            activations: Activations::F32,
            threads: Some(1),
            ..LoadOptions::default()
        };
        let model = load(model, Backend::Cpu, &options, &mut |_| {}).expect("a model");
        let executor = model.cpu_executor().expect("threads");
        let layout = executor.kv_layout();
        let blocks: Vec<BlockId> = (0..(2048 / layout.block_size) as u32).map(BlockId).collect();
        let storage = BlockStorage::new(layout, blocks.len()).expect("memory");
        Blender { executor, storage, blocks }
    }

    fn losses(&mut self, prompts: &[Prompt], cases: &[Case]) -> Vec<Loss> {
        let mut losses = vec![Loss::default(); cases.len()];
        for (seed, prompt) in prompts.iter().enumerate() {
            self.prefill(&prompt.tokens[..prompt.head()], 0);
            let full = self.prefill(&prompt.tokens, prompt.head());
            let kvs = self.passages(prompt);
            for (case, loss) in cases.iter().zip(&mut losses) {
                self.blend(prompt, &kvs, case.selection(seed as u64));
                let blended = self.prefill(&prompt.tokens, prompt.head());
                loss.add(&full, &blended, self.executor.vocab_size());
            }
        }
        losses
    }

    /// How many greedy answers are right after a full prefill, and the scores of each case.
    fn scores(&mut self, tokenizer: &Tokenizer, prompts: &[Prompt], cases: &[Case]) -> (usize, Vec<Score>) {
        let (mut num_right, mut scores) = (0, vec![Score::default(); cases.len()]);
        for (seed, prompt) in prompts.iter().enumerate() {
            self.prefill(&prompt.tokens[..prompt.head()], 0);
            let full = self.answer(tokenizer, prompt);
            num_right += usize::from(full.is_right);
            let kvs = self.passages(prompt);
            for (case, score) in cases.iter().zip(&mut scores) {
                self.blend(prompt, &kvs, case.selection(seed as u64));
                score.add(&full, &self.answer(tokenizer, prompt));
            }
        }
        (num_right, scores)
    }

    /// The greedy answer. The KV of the passages is there.
    fn answer(&mut self, tokenizer: &Tokenizer, prompt: &Prompt) -> Answer {
        let [end] = tokenizer.encode("<|end|>", false).expect("text")[..] else { panic!("a token") };
        let mut tokens = prompt.tokens.clone();
        let mut first = Vec::new();
        let mut start_idx = prompt.head();
        while tokens.len() < prompt.tokens.len() + MAX_ANSWER_TOKENS {
            let logits = self.prefill(&tokens, start_idx);
            let last = &logits[logits.len() - self.executor.vocab_size()..];
            let token = argmax(last).expect("a vocabulary") as u32;
            if first.len() < NUM_COMPARED {
                first.push((token, last.to_vec()));
            }
            if token == end {
                break;
            }
            start_idx = tokens.len();
            tokens.push(token);
        }
        let text = tokenizer.decode(&tokens[prompt.tokens.len()..], true);
        Answer { is_right: text.trim().trim_end_matches('.').ends_with(&prompt.answer), tokens: first }
    }

    /// Computes the tokens from `start_idx` on and returns the logits after each.
    fn prefill(&mut self, tokens: &[u32], start_idx: usize) -> Vec<f32> {
        let tokens = &tokens[start_idx..];
        let sequence = BatchSequence { tokens, start_idx, blocks: &self.blocks, num_logits: tokens.len() };
        let batch = Batch { sequences: vec![sequence] };
        // SAFETY: no other code uses the storage.
        let logits = unsafe { self.executor.execute(&batch, &self.storage, &mut |_| {}) };
        logits.expect("processors do not fail").to_vec()
    }

    fn passages(&mut self, prompt: &Prompt) -> Vec<PassageKv> {
        let Blender { executor, storage, blocks } = self;
        // SAFETY: no other code uses the storage.
        let compute = |range: &Range<usize>| unsafe {
            executor.compute_passage(&prompt.tokens[range.clone()], blocks, storage)
        };
        prompt.passages.iter().map(compute).collect::<Result<_, _>>().expect("processors do not fail")
    }

    fn blend(&mut self, prompt: &Prompt, kvs: &[PassageKv], selection: Selection) {
        let passage = |(range, kv): (&Range<usize>, _)| BlendPassage { start_idx: range.start, kv };
        let passages: Vec<BlendPassage<'_>> = prompt.passages.iter().zip(kvs).map(passage).collect();
        let tokens = &prompt.tokens[..prompt.head()];
        let blended = BlendedPrompt {
            tokens,
            blocks: &self.blocks,
            passages: &passages,
            selection,
            wants_logits: false,
        };
        // SAFETY: no other code uses the storage.
        let outcome = unsafe { self.executor.blend(&blended, &self.storage, &mut |_| {}) };
        outcome.expect("processors do not fail");
    }
}

impl Case {
    fn selection(&self, seed: u64) -> Selection {
        Selection {
            layer: self.layer,
            num_first_tokens: self.num_first_tokens,
            ratio: BlendRatio::new(self.ratio).expect("a ratio"),
            order: (self.order)(seed),
        }
    }
}

impl Score {
    /// Tokens are compared up to the first that differs.
    fn add(&mut self, full: &Answer, blended: &Answer) {
        let both = || full.tokens.iter().zip(&blended.tokens);
        let num_equal = both().take_while(|(full, blended)| full.0 == blended.0).count();
        let kls: Vec<f64> =
            both().take(num_equal + 1).map(|(full, blended)| kl(&full.1, &blended.1)).collect();
        self.num_right += usize::from(blended.is_right);
        self.first_kl += kls[0];
        self.mean_kl += kls.iter().sum::<f64>() / kls.len() as f64;
    }
}

impl Loss {
    /// Adds a prompt with these logits after each token of the question.
    fn add(&mut self, full: &[f32], blended: &[f32], vocab_size: usize) {
        let mut rows = full.chunks_exact(vocab_size).zip(blended.chunks_exact(vocab_size));
        let kls: Vec<f64> = rows.clone().map(|(full, blended)| kl(full, blended)).collect();
        let (last_full, last_blended) = rows.next_back().expect("a question has tokens");
        self.num_prompts += 1;
        self.last_kl += kls[kls.len() - 1];
        self.mean_kl += kls.iter().sum::<f64>() / kls.len() as f64;
        self.num_equal += usize::from(argmax(last_full) == argmax(last_blended));
    }
}

/// The KL divergence of softmax of `q` from that of `p`, in nats.
fn kl(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| {
        let max = logits.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(f64::from(x)));
        max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
    };
    let (of_p, of_q) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - of_p, f64::from(q) - of_q);
        p.exp() * (p - q)
    });
    terms.sum()
}

fn argmax(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
}

/// Fisher and Yates, with xorshift.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for last in (1..items.len()).rev() {
        for shift in [13, -7i32, 17] {
            state ^= if shift > 0 { state << shift } else { state >> -shift };
        }
        items.swap(last, (state >> 16) as usize % (last + 1));
    }
}
