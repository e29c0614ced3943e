//! A smaller model as drafter. It runs a few tokens ahead of the target, on KV blocks of its own. It samples as the
//! target would, with the request's parameters and the random number of that output index. Where the two models
//! agree, so do their samples, greedy or not.
//!
//! ```text
//! tokens    |<------------------ num_tokens ------------------>|<- draft ->|
//! computed  |<-- num_computed -->|<--------- missing --------->|               all is missing of a prompt that
//! ahead                                                        |<----->|       was computed elsewhere
//! ```
//!
//! Before it drafts for a sequence it computes the missing tokens, once the output is long enough for this to pay: at
//! most `token_budget` tokens of all sequences in one step. In that step it drafts for the sequences of which nothing
//! is missing any more. What it computed ahead counts later, as far as these tokens were accepted. An executor that
//! samples launches each step before the token that it follows is known.

use std::{collections::HashMap, time::Instant};

use baton_kv_cache::{BlockId, BlockStorage};
use baton_model_spec::{Batch, BatchSequence, Executor, SampledRow};
use baton_scheduler::{BlockPool, Sequence, SequenceId};

use crate::{
    config::{EngineConfig, EngineStartError},
    events::EngineError,
    execution::{UNKNOWN, collect, execute, launch},
    live::LiveRequests,
    speculation::cost::DraftCosts,
};

pub(super) struct DraftModel {
    executor: Box<dyn Executor>,
    storage: BlockStorage,
    pool: BlockPool,
    token_budget: usize,
    kv: HashMap<SequenceId, DraftKv>,
    /// The drafts of this step; reused.
    runs: Vec<Run>,
}

/// The KV of one sequence.
#[derive(Debug, Default)]
struct DraftKv {
    blocks: Vec<BlockId>,
    /// Tokens of the sequence whose KV is in the blocks.
    num_computed: usize,
    /// Drafted tokens whose KV is in the blocks after them.
    ahead: Vec<u32>,
}

/// A draft under way.
struct Run {
    id: SequenceId,
    /// Tokens to compute next.
    num_tokens: usize,
    /// Whether a token is sampled after them, because nothing is missing then.
    is_complete: bool,
    /// Tokens left to draft.
    num_drafts: usize,
}

/// A step of the draft model.
struct DraftStep {
    /// The sequences that get a draft token, in the order of their rows. Their drafts may have ended since the
    /// launch.
    drafted: Vec<SequenceId>,
    num_tokens: usize,
    /// Whether the step computes only drafts.
    is_draft: bool,
    /// Whether it was launched and another step may be launched before it is collected.
    can_be_followed: bool,
}

impl DraftModel {
    /// # Panics
    /// When its blocks do not have the target's size, or `storage` does not match the configuration.
    pub(super) fn new(
        executor: Box<dyn Executor>,
        storage: Option<BlockStorage>,
        config: &EngineConfig,
        vocab_size: usize,
        block_size: usize,
    ) -> Result<DraftModel, EngineStartError> {
        let layout = executor.kv_layout();
        assert_eq!(layout.block_size, block_size, "the draft model's blocks have the target's size");
        if executor.vocab_size() != vocab_size {
            return Err(EngineStartError::Vocabulary { draft: executor.vocab_size(), target: vocab_size });
        }
        let in_host_memory = || {
            BlockStorage::new(layout, config.num_blocks).map_err(|source| EngineStartError::Memory {
                num_blocks: config.num_blocks,
                block_bytes: layout.block_bytes(),
                source,
            })
        };
        let storage = storage.map_or_else(in_host_memory, Ok)?;
        let found = (storage.num_blocks(), *storage.layout());
        assert_eq!(found, (config.num_blocks, layout), "blocks of a draft model");
        Ok(DraftModel {
            executor,
            storage,
            pool: BlockPool::new(config.num_blocks),
            token_budget: config.token_budget,
            kv: HashMap::new(),
            runs: Vec::new(),
        })
    }

    pub(super) fn attach_thread(&mut self) -> Result<(), EngineError> {
        Ok(self.executor.attach_thread()?)
    }

    /// Drafts at most the wanted number of tokens for each sequence.
    pub(super) fn draft(
        &mut self,
        wanted: impl Iterator<Item = (SequenceId, usize)>,
        live: &mut LiveRequests,
        costs: &mut DraftCosts,
        clock: fn() -> Instant,
    ) -> Result<(), EngineError> {
        self.forget_ended(live);
        let plain = live.scheduler.step_time();
        for (id, num_drafts) in wanted {
            let sequence = live.scheduler.sequence(id).expect("planned sequences run");
            let num_output = live.num_output_tokens(id);
            let pays = |num_missing| costs.pays_to_catch_up(plain, num_missing, num_output, num_drafts);
            if let Some(num_tokens) = self.prepare(sequence, num_drafts, pays) {
                self.runs.push(Run { id, num_tokens, is_complete: true, num_drafts });
            }
        }
        // The sequence with the fewest missing tokens comes first: a long prompt does not keep others from drafting.
        self.runs.sort_by_key(|run| run.num_tokens);
        let mut budget = self.token_budget;
        self.runs.retain_mut(|run| {
            run.is_complete = run.num_tokens <= budget;
            run.num_tokens = run.num_tokens.min(budget);
            budget -= run.num_tokens;
            run.num_tokens > 0
        });
        let (mut started, mut ahead) = (clock(), None);
        while ahead.is_some() || !self.runs.is_empty() {
            let step = match ahead.take() {
                Some(step) => step,
                None => self.begin(live)?,
            };
            ahead = self.look_ahead(&step, live)?;
            self.finish(&step, live)?;
            let now = clock();
            let elapsed = now - started;
            started = now;
            if step.is_draft {
                costs.observe_draft(plain, step.num_tokens, elapsed);
            } else {
                costs.observe_catch_up(plain, step.num_tokens, elapsed);
            }
            self.runs.retain(|run| {
                let goes_on = run.num_drafts > 0;
                if !goes_on {
                    live.end_draft(run.id);
                }
                goes_on
            });
        }
        Ok(())
    }

    /// Releases the blocks of sequences that ended or were preempted.
    fn forget_ended(&mut self, live: &LiveRequests) {
        self.kv.retain(|&id, kv| {
            let runs = live.scheduler.sequence(id).is_some();
            if !runs {
                self.pool.release(&kv.blocks);
            }
            runs
        });
        debug_assert!(self.pool.check_integrity(self.kv.values().map(|kv| &kv.blocks[..])).is_ok());
    }

    /// Finds blocks for all tokens of a sequence and a draft. Returns how many tokens are missing. `None` when it
    /// does not pay to compute them, or blocks are missing: then the sequence gets no draft.
    fn prepare(
        &mut self,
        sequence: &Sequence,
        num_drafts: usize,
        pays: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let pool = &mut self.pool;
        let kv = self.kv.entry(sequence.id).or_insert_with(|| {
            let blocks = pool.find_prefix(sequence.sharable_hashes());
            pool.acquire(&blocks);
            DraftKv { num_computed: blocks.len() * sequence.block_size(), blocks, ahead: Vec::new() }
        });
        kv.settle(sequence, pool);
        let num_tokens = sequence.tokens().len();
        if !pays(num_tokens - kv.num_computed) {
            return None;
        }
        // The last token of a draft is never fed back.
        while kv.blocks.len() * sequence.block_size() < num_tokens + num_drafts - 1 {
            let Some(block) = pool.allocate() else {
                pool.release(&kv.blocks);
                self.kv.remove(&sequence.id);
                return None;
            };
            kv.blocks.push(block);
        }
        Some(num_tokens - kv.num_computed)
    }

    /// Begins a step that computes the next tokens of every run and drafts one more token for complete runs. Launches
    /// it if the executor samples. Otherwise `finish` computes it.
    fn begin(&mut self, live: &LiveRequests) -> Result<DraftStep, EngineError> {
        let complete = self.runs.iter().filter(|run| run.is_complete).map(|run| run.id);
        let mut step = DraftStep {
            drafted: complete.collect(),
            num_tokens: self.runs.iter().map(|run| run.num_tokens).sum(),
            // The newest token is always missing, and after a fully accepted draft also its last token.
            is_draft: self.runs.iter().all(|run| run.num_tokens <= 2),
            can_be_followed: false,
        };
        if self.executor.sampling().is_some() {
            let samplings: Vec<_> = step.drafted.iter().map(|&id| live.draft_sampling(id)).collect();
            let batch = batch(&self.runs, &self.kv, live);
            let (executor, storage) = (&mut *self.executor, &self.storage);
            step.can_be_followed = launch(executor, &batch, &samplings, &[], storage, &mut |_| {})?;
        }
        Ok(step)
    }

    /// Launches the step after `step`, which is being computed, if another one follows. It is computed in vain for
    /// the sequences whose draft ends with the tokens of `step`, which are not known yet.
    fn look_ahead(
        &mut self,
        step: &DraftStep,
        live: &LiveRequests,
    ) -> Result<Option<DraftStep>, EngineError> {
        let goes_on = |run: &&Run| run.is_complete && run.num_drafts > 1;
        if !step.can_be_followed || !self.runs.iter().any(|run| goes_on(&run)) {
            return Ok(None);
        }
        let runs = self.runs.iter().filter(goes_on);
        let sequences = runs.clone().map(|run| {
            let kv = &self.kv[&run.id];
            let start_idx = kv.num_computed + kv.ahead.len() + run.num_tokens;
            BatchSequence { tokens: UNKNOWN, start_idx, blocks: &kv.blocks, num_logits: 1 }
        });
        let batch = Batch { sequences: sequences.collect() };
        let drafted: Vec<SequenceId> = runs.map(|run| run.id).collect();
        let row_of =
            |id| step.drafted.iter().position(|&other| other == id).expect("the sequence gets a draft token");
        let follows: Vec<usize> = drafted.iter().map(|&id| row_of(id)).collect();
        let samplings: Vec<_> = drafted.iter().map(|&id| live.draft_sampling_after_next(id)).collect();
        let (executor, storage) = (&mut *self.executor, &self.storage);
        let can_be_followed = launch(executor, &batch, &samplings, &follows, storage, &mut |_| {})?;
        Ok(Some(DraftStep { num_tokens: drafted.len(), drafted, is_draft: true, can_be_followed }))
    }

    /// Waits for a step's tokens, or computes and samples them, and advances every run.
    fn finish(&mut self, step: &DraftStep, live: &mut LiveRequests) -> Result<(), EngineError> {
        let (executor, storage) = (&mut *self.executor, &self.storage);
        // Only this drafter uses the storage. A batch's tokens are in blocks that their sequence allocated and
        // releases when no step is under way. Shared blocks are full and never computed again. So the safety argument
        // of `execute` and `launch` holds here.
        let rows = if executor.sampling().is_some() {
            collect(executor, &mut |_| {})?
        } else {
            let vocab_size = executor.vocab_size();
            let logits = execute(executor, &batch(&self.runs, &self.kv, live), storage, &mut |_| {})?;
            logits.chunks_exact(vocab_size).map(SampledRow::Logits).collect()
        };
        let mut rows = step.drafted.iter().zip(rows);
        for run in &mut self.runs {
            let sequence = live.scheduler.sequence(run.id).expect("planned sequences run");
            let kv = self.kv.get_mut(&run.id).expect("the sequence was prepared");
            if kv.num_computed < sequence.tokens().len() {
                kv.advance(run.num_tokens, sequence, &mut self.pool);
            } else {
                kv.ahead.extend(sequence.draft().last());
            }
            let mut sample = || {
                let (_, row) = rows.find(|&(&id, _)| id == run.id).expect("a row for each complete run");
                live.sample_draft(run.id, row)
            };
            let goes_on = run.is_complete && sample();
            run.num_drafts = if goes_on { run.num_drafts - 1 } else { 0 };
            run.num_tokens = 1;
        }
        Ok(())
    }
}

/// The next tokens of every run.
fn batch<'a>(runs: &[Run], kv: &'a HashMap<SequenceId, DraftKv>, live: &'a LiveRequests) -> Batch<'a> {
    let sequences = runs.iter().map(|run| {
        let sequence = live.scheduler.sequence(run.id).expect("planned sequences run");
        let kv = &kv[&run.id];
        let start_idx = kv.num_computed + kv.ahead.len();
        BatchSequence {
            tokens: &sequence.tokens_and_draft()[start_idx..start_idx + run.num_tokens],
            start_idx,
            blocks: &kv.blocks,
            num_logits: usize::from(run.is_complete),
        }
    });
    Batch { sequences: sequences.collect() }
}

impl DraftKv {
    /// Counts the KV computed ahead, as far as the tokens were accepted. The newest token is left to compute: a draft
    /// begins with the logits after it.
    fn settle(&mut self, sequence: &Sequence, pool: &mut BlockPool) {
        let (_, tokens) = sequence.tokens().split_last().expect("a sequence has tokens");
        let came_to_be = self.ahead.iter().zip(&tokens[self.num_computed..]).take_while(|(a, b)| a == b);
        let num_tokens = came_to_be.count();
        self.ahead.clear();
        self.advance(num_tokens, sequence, pool);
    }

    /// Counts tokens of the sequence as computed. Blocks that this fills may be shared.
    fn advance(&mut self, num_tokens: usize, sequence: &Sequence, pool: &mut BlockPool) {
        let first = self.num_computed / sequence.block_size();
        self.num_computed += num_tokens;
        let filled = self.num_computed / sequence.block_size();
        let hashes = sequence.hashes().iter().zip(&self.blocks).take(filled).skip(first);
        hashes.for_each(|(&hash, &block)| pool.cache(block, hash, None));
    }
}
