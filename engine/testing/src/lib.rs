//! A fake model for tests of the engine and of the crates above it. Only tests depend on this crate.
//!
//! The model writes token ids into its KV blocks, in every layer, head and half. Its logits are a hash of what it
//! *reads back* from the blocks. So a block that is mixed up, written too late, overwritten or never transferred changes
//! every token that follows. [`FakeModel::greedy`] gives the expected tokens.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use baton_engine::sampler::Sampler;
use baton_kv_cache::{BlockId, BlockStorage, KvDtype, KvLayout};
use baton_model_spec::{
    Batch, BatchSequence, ExecuteError, Executor, InvalidLogits, SampledRow, SampledToken, SamplingExecutor,
    TokenCount, TokenSampling,
};

/// Sizes of a fake model, and the errors that it makes.
#[derive(Clone, Copy, Debug)]
pub struct FakeModel {
    /// Layout of its KV. Elements have four bytes.
    pub layout: KvLayout,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// A sequence that ends with this token gets NaN for logits.
    pub nan_after: Option<u32>,
    /// After one in so many texts it disagrees with a model that has `None` here. A draft model with 1 is always wrong.
    pub errs_in: Option<u64>,
}

type StepHook = Box<dyn FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send>;

/// Runs a [`FakeModel`].
pub struct FakeExecutor {
    model: FakeModel,
    hook: StepHook,
    logits: Vec<f32>,
}

/// Runs a [`FakeModel`] and samples, except where a logit bias is set. It computes a step when the step is collected, as
/// late as possible: so blocks that were given away too early change the tokens.
struct FakeSamplingExecutor {
    executor: FakeExecutor,
    sampler: Sampler,
    launched: VecDeque<LaunchedStep>,
    num_ahead: Arc<AtomicUsize>,
    /// Whether launched steps are computed. `None`: a step is computed when it is collected.
    is_computed: Option<Arc<AtomicBool>>,
    /// The token after each row of the last collected step; `None` where the engine samples.
    sampled: Vec<Option<Result<SampledToken, InvalidLogits>>>,
}

struct LaunchedStep {
    sequences: Vec<(Vec<u32>, usize, Vec<BlockId>, usize)>,
    samplings: Vec<TokenSampling<'static>>,
    follows: Vec<usize>,
    storage: *const BlockStorage,
}

// SAFETY: the engine keeps the storage until a launched step is collected.
unsafe impl Send for LaunchedStep {}

impl FakeModel {
    /// Two layers, two heads, and a vocabulary of 64.
    pub fn new(block_size: usize) -> FakeModel {
        FakeModel {
            layout: KvLayout { block_size, num_layers: 2, num_kv_heads: 2, head_dim: 2, dtype: KvDtype::F32 },
            vocab_size: 64,
            nan_after: None,
            errs_in: None,
        }
    }

    /// An executor of this model.
    pub fn executor(self) -> Box<dyn Executor> {
        self.executor_with_hook(|_| Ok(()))
    }

    /// An executor that calls `hook` with each batch before it computes: it may wait, fail or panic.
    pub fn executor_with_hook(
        self,
        hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
    ) -> Box<dyn Executor> {
        Box::new(FakeExecutor { model: self, hook: Box::new(hook), logits: Vec::new() })
    }

    /// The same as an executor that samples itself. `num_ahead` counts the steps that are launched before the step before
    /// them is collected.
    pub fn sampling_executor_with_hook(
        self,
        num_ahead: Arc<AtomicUsize>,
        hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
    ) -> Box<dyn Executor> {
        Box::new(self.sampling(num_ahead, hook, None))
    }

    /// An executor that samples itself. While `is_computed` is false, its launched step is under way.
    pub fn sampling_executor_while(self, is_computed: Arc<AtomicBool>) -> Box<dyn Executor> {
        Box::new(self.sampling(Arc::default(), |_| Ok(()), Some(is_computed)))
    }

    fn sampling(
        self,
        num_ahead: Arc<AtomicUsize>,
        hook: impl FnMut(&Batch<'_>) -> Result<(), ExecuteError> + Send + 'static,
        is_computed: Option<Arc<AtomicBool>>,
    ) -> FakeSamplingExecutor {
        FakeSamplingExecutor {
            executor: FakeExecutor { model: self, hook: Box::new(hook), logits: Vec::new() },
            sampler: Sampler::default(),
            launched: VecDeque::new(),
            num_ahead,
            is_computed,
            sampled: Vec::new(),
        }
    }

    /// The first `num_tokens` greedy tokens after `prompt`.
    pub fn greedy(&self, prompt: &[u32], num_tokens: usize) -> Vec<u32> {
        let mut tokens = prompt.to_vec();
        for _ in 0..num_tokens {
            let logits = self.logits(&tokens);
            let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            tokens.push(best.expect("a vocabulary is not empty") as u32);
        }
        tokens.split_off(prompt.len())
    }

    /// The logits after `tokens`.
    pub fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let copies = self.num_copies();
        let all = tokens.iter().flat_map(|&token| std::iter::repeat_n(token, copies));
        let mut logits = Vec::new();
        self.push_logits(all, tokens.last().copied(), &mut logits);
        logits
    }

    /// Copies of a token in the KV: one for each layer, half and head.
    fn num_copies(&self) -> usize {
        self.layout.num_layers * 2 * self.layout.num_kv_heads
    }

    fn push_logits(&self, copies: impl Iterator<Item = u32>, last: Option<u32>, logits: &mut Vec<f32>) {
        let mut state = copies.fold(0, |state, token| mix(state ^ u64::from(token)));
        if self.errs_in.is_some_and(|num_texts| state % num_texts == 0) {
            state = !state;
        }
        let is_nan = last.is_some() && last == self.nan_after;
        logits.extend((0..self.vocab_size as u64).map(|id| {
            let unit = (mix(state ^ (id << 32)) >> 40) as f32 / (1u64 << 24) as f32;
            if is_nan { f32::NAN } else { 10.0 * unit - 5.0 }
        }));
    }
}

impl FakeExecutor {
    /// Offset of a copy of a token in the piece of its layer.
    fn offset(&self, is_value: bool, head_idx: usize, slot_idx: usize) -> usize {
        let layout = &self.model.layout;
        let half = if is_value { layout.half_bytes() } else { 0 };
        half + layout.head_offset(head_idx) + layout.token_offset(slot_idx)
    }
}

impl Executor for FakeExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.model.layout
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        (self.hook)(batch)?;
        let layout = self.model.layout;
        for layer_idx in 0..layout.num_layers {
            for sequence in &batch.sequences {
                for (idx, &token) in sequence.tokens.iter().enumerate() {
                    let position = sequence.start_idx + idx;
                    let block = sequence.blocks[position / layout.block_size];
                    // SAFETY: the caller guarantees exclusive access to the slots of the batch's tokens.
                    let piece = unsafe { storage.layer_mut(block, layer_idx) };
                    for is_value in [false, true] {
                        for head_idx in 0..layout.num_kv_heads {
                            let at = self.offset(is_value, head_idx, position % layout.block_size);
                            let salt = salt(position, layer_idx, is_value, head_idx);
                            piece[at..at + 4].copy_from_slice(&(token ^ salt).to_le_bytes());
                        }
                    }
                }
            }
            on_layer(layer_idx);
        }
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        let wanted = batch.sequences.iter().flat_map(|sequence| {
            let num_tokens = sequence.tokens.len();
            (num_tokens - sequence.num_logits..num_tokens).map(move |idx| (sequence, idx))
        });
        for (sequence, last_idx) in wanted {
            let positions = 0..=sequence.start_idx + last_idx;
            let this = &*self;
            let read = positions.flat_map(|position| {
                (0..layout.num_layers).flat_map(move |layer_idx| {
                    let block = sequence.blocks[position / layout.block_size];
                    // SAFETY: the caller guarantees that the sequence's blocks are not written.
                    let piece = unsafe { storage.layer(block, layer_idx) };
                    [false, true].into_iter().flat_map(move |is_value| {
                        (0..layout.num_kv_heads).map(move |head_idx| {
                            let at = this.offset(is_value, head_idx, position % layout.block_size);
                            let bytes = piece[at..at + 4].try_into().expect("four bytes");
                            u32::from_le_bytes(bytes) ^ salt(position, layer_idx, is_value, head_idx)
                        })
                    })
                })
            });
            this.model.push_logits(read, Some(sequence.tokens[last_idx]), &mut logits);
        }
        self.logits = logits;
        Ok(&self.logits)
    }
}

impl Executor for FakeSamplingExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.executor.kv_layout()
    }

    fn vocab_size(&self) -> usize {
        self.executor.vocab_size()
    }

    unsafe fn execute(
        &mut self,
        _: &Batch<'_>,
        _: &BlockStorage,
        _: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        unreachable!("the engine launches the steps of an executor that samples")
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        Some(self)
    }
}

impl SamplingExecutor for FakeSamplingExecutor {
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        _: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        assert!(self.launched.len() < 2, "two steps are under way");
        assert_eq!(self.launched.is_empty(), follows.is_empty(), "a second step follows the first");
        let num_logits: usize = batch.sequences.iter().map(|it| it.num_logits).sum();
        assert_eq!(num_logits, samplings.len(), "a sampling for each row");
        if let Some(before) = self.launched.front() {
            assert!(before.sequences.iter().all(|it| it.3 <= 1), "what follows drafts is not known");
            assert!(batch.sequences.iter().all(|it| it.num_logits == 1), "drafts follow the tokens");
        }
        self.num_ahead.fetch_add(self.launched.len(), Ordering::Relaxed);
        let owned =
            |it: &BatchSequence<'_>| (it.tokens.to_vec(), it.start_idx, it.blocks.to_vec(), it.num_logits);
        self.launched.push_back(LaunchedStep {
            sequences: batch.sequences.iter().map(owned).collect(),
            samplings: samplings.iter().cloned().map(TokenSampling::into_owned).collect(),
            follows: follows.to_vec(),
            storage,
        });
        Ok(samplings.iter().all(samples))
    }

    fn mask(&mut self, masks: &[u32]) -> Result<(), ExecuteError> {
        let vocab_size = self.vocab_size();
        let step = self.launched.back_mut().expect("a step is under way");
        let masked = step.samplings.iter_mut().filter(|sampling| sampling.is_masked);
        let mut masks = masks.chunks_exact(vocab_size.div_ceil(32));
        for sampling in masked {
            let mask = masks.next().expect("a mask for each masked row");
            let is_refused = |token: &u32| mask[*token as usize / 32] >> (token % 32) & 1 == 0;
            sampling.masked.to_mut().extend((0..vocab_size as u32).filter(is_refused));
            sampling.is_masked = false;
        }
        assert!(masks.next().is_none(), "a mask for each masked row");
        Ok(())
    }

    fn least_left(&mut self) -> Result<Duration, ExecuteError> {
        let is_computed = self.is_computed.as_ref().is_none_or(|it| it.load(Ordering::Relaxed));
        Ok(if is_computed { Duration::ZERO } else { Duration::from_millis(1) })
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        while self.least_left()? > Duration::ZERO {
            std::thread::yield_now();
        }
        let mut step = self.launched.pop_front().expect("a step is under way");
        assert!(step.samplings.iter().all(|sampling| !sampling.is_masked), "masks come before the tokens");
        for (idx, &row_idx) in step.follows.iter().enumerate() {
            let sampled = self.sampled[row_idx].as_ref().expect("all rows of the step before were sampled");
            // After invalid logits the token does not matter.
            let token = sampled.as_ref().map_or(0, |token| token.id);
            step.sequences[idx].0 = vec![token];
            let sampling = &mut step.samplings[idx];
            if !sampling.has_penalties() {
                continue;
            }
            let counts = sampling.counts.to_mut();
            match counts.iter().position(|count| count.token == token) {
                Some(place) => counts[place].num_output += 1,
                None => counts.push(TokenCount { token, num_output: 1 }),
            }
        }
        let sequences = step.sequences.iter().map(|(tokens, start_idx, blocks, num_logits)| BatchSequence {
            tokens,
            start_idx: *start_idx,
            blocks,
            num_logits: *num_logits,
        });
        let batch = Batch { sequences: sequences.collect() };
        let vocab_size = self.vocab_size();
        // SAFETY: the engine keeps the storage of a launched step, and guarantees what `execute` needs for its batch.
        let logits = unsafe { self.executor.execute(&batch, &*step.storage, on_layer) }?;
        let rows = logits.chunks_exact(vocab_size).zip(&step.samplings);
        let sample = |(row, sampling): (_, &TokenSampling<'_>)| {
            samples(sampling).then(|| self.sampler.sample_row(row, sampling))
        };
        self.sampled = rows.clone().map(sample).collect();
        let answers = rows.zip(&self.sampled).map(|((row, _), sampled)| match sampled {
            Some(sampled) => SampledRow::Sampled(sampled.clone()),
            None => SampledRow::Logits(row),
        });
        Ok(answers.collect())
    }
}

/// Whether the fake device samples with these parameters.
fn samples(sampling: &TokenSampling<'_>) -> bool {
    sampling.logit_bias.is_empty() && !sampling.on_host
}

/// Makes the copies of a token differ, so that one cannot replace another.
fn salt(position: usize, layer_idx: usize, is_value: bool, head_idx: usize) -> u32 {
    let place = [position as u64, layer_idx as u64, u64::from(is_value), head_idx as u64];
    place.into_iter().fold(1, |state, part| mix(state ^ part)) as u32
}

/// The finaliser of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
