//! The executor that sleeps.
//!
//! The KV of a token is a hash of all tokens up to it, eight bytes in one layer: the lower half is its key, the upper half its
//! value. The next token is chosen by the hash that is *read back* from the block. So KV that a handoff lost or mixed up
//! changes every token that follows, as with a real model.
//!
//! ```text
//! tokens            t0         t1                  t2
//! KV in blocks      h(t0)      h(h(t0), t1)        h(h(h(t0), t1), t2)  -> next token
//! ```

use std::{
    ops::Range,
    thread,
    time::{Duration, Instant},
};

use baton_cost::{StepLine, StepWork};
use baton_kv_cache::{BlockStorage, KvDtype, KvLayout};
use baton_model_spec::{
    Batch, BatchSequence, ExecuteError, Executor, SampledRow, SampledToken, SamplingExecutor, TokenSampling,
};

/// The hash before the first token.
const ROOT: u64 = baton_random::GOLDEN;
/// The logit of the chosen token; those of the others are below 1. So the token is chosen at every usual temperature.
const CHOSEN: f32 = 100.0;

/// An executor that takes the time of a step and computes nothing.
///
/// Sampling parameters do not change its tokens, except bias, masks and grammars: then the host samples from a row of logits
/// in which the token stands out. It never ends a text by itself.
#[derive(Debug)]
pub struct SimExecutor {
    layout: KvLayout,
    vocab_size: usize,
    line: StepLine,
    /// The part of a step that the host needs.
    host: Duration,
    /// Tokens that would end a text, in order.
    ends: Vec<u32>,
    /// When the newest step has been, or will be computed.
    free_at: Instant,
    /// The launched step: the hash at each requested row, and whether the host samples there.
    launched: Option<Vec<(u64, bool)>>,
    logits: Vec<f32>,
}

impl SimExecutor {
    /// For blocks of `block_size` tokens and a vocabulary of `vocab_size`. A step takes what `line` says; `host_seconds` of it
    /// are the host's. `ends` are the tokens that would end a text; at least one token is not among them.
    ///
    /// # Panics
    /// When every token ends a text.
    pub fn new(
        block_size: usize,
        vocab_size: usize,
        line: StepLine,
        host_seconds: f64,
        mut ends: Vec<u32>,
    ) -> SimExecutor {
        ends.sort_unstable();
        ends.dedup();
        ends.retain(|&end| (end as usize) < vocab_size);
        assert!(ends.len() < vocab_size, "some token goes on");
        SimExecutor {
            layout: KvLayout { block_size, num_layers: 1, num_kv_heads: 1, head_dim: 1, dtype: KvDtype::F32 },
            vocab_size,
            line,
            host: Duration::from_secs_f64(host_seconds),
            ends,
            free_at: Instant::now(),
            launched: None,
            logits: Vec::new(),
        }
    }

    /// Starts the clock of a step. The device begins a step when the one before has ended, if the host needed no longer in
    /// between than a step's time counts for it.
    fn start(&mut self, batch: &Batch<'_>) {
        let work = |it: &BatchSequence<'_>| StepWork::chunk(it.start_idx as f64, it.tokens.len() as f64);
        let work = batch.sequences.iter().map(work).fold(StepWork::default(), StepWork::plus);
        let now = Instant::now();
        let begins = if now < self.free_at + self.host { self.free_at } else { now };
        self.free_at = begins + Duration::from_secs_f64(self.line.seconds(&work));
    }

    /// Asleep, not busy: many workers share the processors.
    fn wait(&self) {
        thread::sleep(self.free_at.saturating_duration_since(Instant::now()));
    }

    /// Writes the KV of a sequence's tokens, and passes on the hash after each that is asked for.
    ///
    /// # Safety
    /// As for [`Executor::execute`].
    unsafe fn write(&self, it: &BatchSequence<'_>, storage: &BlockStorage, mut on_row: impl FnMut(u64)) {
        let block_size = self.layout.block_size;
        let mut hash = match it.start_idx.checked_sub(1) {
            None => ROOT,
            Some(last) => {
                // SAFETY: the caller guarantees that computed KV of the sequence is not written.
                let piece = unsafe { storage.layer(it.blocks[last / block_size], 0) };
                let [key, value] = self
                    .slot(last % block_size)
                    .map(|range| u64::from(u32::from_le_bytes(piece[range].try_into().expect("four bytes"))));
                key | value << 32
            }
        };
        let first_row = it.tokens.len() - it.num_logits;
        for (idx, &token) in it.tokens.iter().enumerate() {
            hash = baton_random::hash(hash ^ u64::from(token));
            let position = it.start_idx + idx;
            // SAFETY: the caller guarantees exclusive access to the slots of the batch's tokens.
            let piece = unsafe { storage.layer_mut(it.blocks[position / block_size], 0) };
            let [key, value] = self.slot(position % block_size);
            piece[key].copy_from_slice(&(hash as u32).to_le_bytes());
            piece[value].copy_from_slice(&((hash >> 32) as u32).to_le_bytes());
            if idx >= first_row {
                on_row(hash);
            }
        }
    }

    /// Where a token's key and value are in a piece.
    fn slot(&self, slot_idx: usize) -> [Range<usize>; 2] {
        let key = self.layout.token_offset(slot_idx);
        [0, self.layout.half_bytes()].map(|half| half + key..half + key + 4)
    }

    /// The token after a text with this hash.
    fn token(&self, hash: u64) -> u32 {
        let num_candidates = self.vocab_size - self.ends.len();
        // The upper bits of a product with a random number are evenly distributed.
        let nth = ((u128::from(baton_random::hash(hash)) * num_candidates as u128) >> 64) as u32;
        // The nth token that ends nothing.
        self.ends.iter().fold(nth, |token, &end| token + u32::from(end <= token))
    }

    fn push_logits(&self, hash: u64, logits: &mut Vec<f32>) {
        let start = logits.len();
        let unit =
            |id: u64| (baton_random::hash(hash ^ id.rotate_left(32)) >> 40) as f32 / (1u64 << 24) as f32;
        logits.extend((0..self.vocab_size as u64).map(unit));
        logits[start + self.token(hash) as usize] = CHOSEN;
    }
}

impl Executor for SimExecutor {
    fn kv_layout(&self) -> KvLayout {
        self.layout
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    unsafe fn execute(
        &mut self,
        batch: &Batch<'_>,
        storage: &BlockStorage,
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<&[f32], ExecuteError> {
        self.start(batch);
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        for sequence in &batch.sequences {
            // SAFETY: the caller's duty is the same.
            unsafe { self.write(sequence, storage, |hash| self.push_logits(hash, &mut logits)) };
        }
        self.wait();
        on_layer(0);
        self.logits = logits;
        Ok(&self.logits)
    }

    fn sampling(&mut self) -> Option<&mut dyn SamplingExecutor> {
        Some(self)
    }
}

impl SamplingExecutor for SimExecutor {
    /// No step follows before this one is collected: waiting costs the host nothing that a second step could hide.
    unsafe fn launch(
        &mut self,
        batch: &Batch<'_>,
        samplings: &[TokenSampling<'_>],
        follows: &[usize],
        storage: &BlockStorage,
        _: &mut dyn FnMut(usize),
    ) -> Result<bool, ExecuteError> {
        assert!(follows.is_empty() && self.launched.is_none(), "one step is under way at a time");
        self.start(batch);
        let mut rows = Vec::with_capacity(samplings.len());
        for sequence in &batch.sequences {
            // SAFETY: the caller's duty is the same, until the step is collected.
            unsafe {
                self.write(sequence, storage, |hash| {
                    let sampling = &samplings[rows.len()];
                    let is_restricted =
                        sampling.is_masked || !(sampling.masked.is_empty() && sampling.logit_bias.is_empty());
                    rows.push((hash, sampling.on_host || sampling.logprobs.is_some() || is_restricted));
                });
            }
        }
        self.launched = Some(rows);
        Ok(false)
    }

    fn mask(&mut self, _: &[u32]) -> Result<(), ExecuteError> {
        // The host samples such rows.
        Ok(())
    }

    fn least_left(&mut self) -> Result<Duration, ExecuteError> {
        assert!(self.launched.is_some(), "a step is under way");
        Ok(self.free_at.saturating_duration_since(Instant::now()))
    }

    fn collect(&mut self, on_layer: &mut dyn FnMut(usize)) -> Result<Vec<SampledRow<'_>>, ExecuteError> {
        let rows = self.launched.take().expect("a step is under way");
        let mut logits = std::mem::take(&mut self.logits);
        logits.clear();
        for &(hash, _) in rows.iter().filter(|&&(_, is_host)| is_host) {
            self.push_logits(hash, &mut logits);
        }
        self.wait();
        on_layer(0);
        self.logits = logits;
        let this = &*self;
        let mut for_host = this.logits.chunks_exact(this.vocab_size);
        let row = |(hash, is_host)| match is_host {
            true => SampledRow::Logits(for_host.next().expect("one for each")),
            false => SampledRow::Sampled(Ok(SampledToken { id: this.token(hash), logprobs: None })),
        };
        Ok(rows.into_iter().map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use baton_kv_cache::BlockId;

    use super::*;

    const LINE: StepLine = StepLine { fixed: 0.0, per_token: 0.0, per_context_token: 0.0, per_pair: 0.0 };

    fn executor(line: StepLine) -> SimExecutor {
        SimExecutor::new(4, 10, line, 0.0, vec![0, 3, 9, 3, 77])
    }

    fn storage() -> BlockStorage {
        BlockStorage::new(executor(LINE).layout, 16).expect("memory")
    }

    /// One step of one sequence; its tokens.
    fn step(
        executor: &mut SimExecutor,
        storage: &BlockStorage,
        (tokens, start_idx, num_logits): (&[u32], usize, usize),
        blocks: &[BlockId],
        sampling: &TokenSampling<'_>,
    ) -> Vec<u32> {
        let sequences = vec![BatchSequence { tokens, start_idx, blocks, num_logits }];
        let samplings = vec![sampling.clone(); num_logits];
        let mut layers = Vec::new();
        // SAFETY: nothing else uses the storage.
        let can_follow = unsafe {
            executor.launch(&Batch { sequences }, &samplings, &[], storage, &mut |layer| layers.push(layer))
        };
        assert!(!can_follow.expect("it does not fail"));
        let rows = executor.collect(&mut |layer| layers.push(layer)).expect("it does not fail");
        let token = |row| match row {
            SampledRow::Sampled(sampled) => sampled.expect("a token").id,
            SampledRow::Logits(logits) => {
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                best.expect("a vocabulary") as u32
            }
        };
        let tokens = rows.into_iter().map(token).collect();
        assert_eq!(layers, [0]);
        tokens
    }

    fn blocks(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().copied().map(BlockId).collect()
    }

    const PLAIN: fn() -> TokenSampling<'static> = TokenSampling::default;

    /// The answer of so many tokens, computed a token at a time.
    fn answer(prompt: &[u32], num_tokens: usize, ids: &[u32]) -> Vec<u32> {
        let (mut executor, storage, blocks) = (executor(LINE), storage(), blocks(ids));
        let mut all = prompt.to_vec();
        for start in 0..prompt.len() + num_tokens - 1 {
            let is_last = usize::from(start + 1 >= prompt.len());
            let one = [all[start]];
            all.extend(step(&mut executor, &storage, (&one, start, is_last), &blocks, &PLAIN()));
        }
        all.split_off(prompt.len())
    }

    #[test]
    fn tokens_depend_on_the_text_alone() {
        let prompt = [1, 2, 5, 7, 1, 1];
        let whole = answer(&prompt, 20, &[0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(whole, answer(&prompt, 20, &[9, 3, 15, 0, 1, 2, 8]), "other blocks");
        assert!(whole.iter().all(|token| ![0, 3, 9].contains(token)), "it does not end: {whole:?}");
        // A retry computes the prompt and what was delivered in one step, and continues; drafts are verified in one step, too.
        let mut text = prompt.to_vec();
        text.extend(&whole[..7]);
        let (mut executor, storage, blocks) = (executor(LINE), storage(), blocks(&[5, 4, 3, 2, 1]));
        let rows = step(&mut executor, &storage, (&text, 0, 8), &blocks, &PLAIN());
        assert_eq!(rows, whole[..8]);
        // With parameters by which the host samples, the token is the same.
        let restricted = [
            TokenSampling { on_host: true, ..PLAIN() },
            TokenSampling { logprobs: Some(2), ..PLAIN() },
            TokenSampling { masked: vec![0].into(), ..PLAIN() },
            TokenSampling { logit_bias: vec![(1, 1.0)].into(), ..PLAIN() },
        ];
        for sampling in restricted {
            let rows = step(&mut executor, &storage, (&whole[7..8], 13, 1), &blocks, &sampling);
            assert_eq!(rows, whole[8..9], "{sampling:?}");
        }
        // Another first token, many tokens ago, is another text.
        let mut other = prompt;
        other[0] = 2;
        assert_ne!(answer(&other, 20, &[0, 1, 2, 3, 4, 5, 6]), whole);
    }

    #[test]
    fn damaged_kv_changes_what_follows() {
        let (mut executor, storage, blocks) = (executor(LINE), storage(), blocks(&[0, 1, 2]));
        let mut next = |is_damaged: bool| {
            step(&mut executor, &storage, (&[1, 2, 4, 5], 0, 0), &blocks, &PLAIN());
            if is_damaged {
                // SAFETY: nothing else uses the storage. The value of the last token.
                unsafe { storage.layer_mut(BlockId(0), 0)[31] ^= 1 };
            }
            step(&mut executor, &storage, (&[6, 7, 8, 5, 6, 7, 8, 5], 4, 8), &blocks, &PLAIN())
        };
        let whole = next(false);
        assert_eq!(next(false), whole);
        assert_ne!(next(true), whole);
    }

    #[test]
    fn a_step_takes_its_time_and_steps_in_a_row_lose_none() {
        let line = StepLine { fixed: 0.01, per_token: 0.002, ..LINE };
        let mut executor = executor(line);
        // Whatever the host needs is part of the step.
        executor.host = Duration::from_secs(3600);
        let (storage, blocks) = (storage(), blocks(&[0, 1, 2]));
        let began = executor.free_at;
        for start in [0, 5] {
            step(&mut executor, &storage, (&[1, 2, 4, 5, 6], start, 1), &blocks, &PLAIN());
            assert!(Instant::now() >= executor.free_at, "it returns when the step has passed");
        }
        assert_eq!(executor.free_at - began, Duration::from_millis(40));
        // Without a share of the host, a device that was idle begins when it is told to.
        executor.host = Duration::ZERO;
        let before = Instant::now();
        step(&mut executor, &storage, (&[1], 10, 1), &blocks, &PLAIN());
        assert!(executor.free_at >= before + Duration::from_millis(12));
    }
}
