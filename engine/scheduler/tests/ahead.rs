//! A step that is decided before the tokens of the step before it are known.

use baton_kv_cache::{BlockHash, BlockId, HashRoot};
use baton_scheduler::{Scheduler, SchedulerConfig, Sequence, SequenceId, SequenceRole, StepPlan};

const BLOCK_SIZE: usize = 4;
const TOKEN: u32 = 77;

/// A scheduler, and the plan of its last step, whose tokens are not known yet.
struct Stepping {
    scheduler: Scheduler,
    plan: StepPlan,
}

impl Stepping {
    fn new(num_blocks: usize, max_running: usize, token_budget: usize) -> Stepping {
        let block_size = BLOCK_SIZE;
        let config = SchedulerConfig { num_blocks, block_size, max_running, token_budget, itl_target: None };
        Stepping { scheduler: Scheduler::new(config), plan: StepPlan::default() }
    }

    fn add(&mut self, id: u64, num_prompt: usize, max_num_tokens: usize) {
        self.add_as(SequenceRole::Generate, id, num_prompt, max_num_tokens);
    }

    fn add_as(&mut self, role: SequenceRole, id: u64, num_prompt: usize, max_num_tokens: usize) {
        let prompt = vec![id as u32; num_prompt];
        self.scheduler.add(Sequence::new(
            SequenceId::new(0, id),
            role,
            prompt,
            max_num_tokens,
            BLOCK_SIZE,
            None,
        ));
    }

    fn step(&mut self) {
        self.scheduler.step(&mut self.plan);
    }

    /// The blocks that the step of `plan` reads and writes.
    fn blocks(&self, plan: &StepPlan) -> Vec<BlockId> {
        let table = |id| self.scheduler.sequence(id).expect("it runs").blocks();
        plan.chunks.iter().flat_map(|chunk| table(chunk.id)).copied().collect()
    }

    /// Sets blocks aside for a prefix that is not cached.
    fn reserve_prefix(&mut self, id: u64, num_blocks: usize) -> Option<Vec<BlockId>> {
        let hashes = hashes(id, num_blocks);
        let found = self.scheduler.reserve_prefix(SequenceId::new(0, id), &hashes, num_blocks);
        self.scheduler.check_integrity().expect("the accounting is right");
        found.map(|found| {
            assert_eq!((found.blocks.len(), found.num_cached_blocks), (num_blocks, 0));
            found.blocks
        })
    }

    /// The chunks of the step after `plan`: sequence, start, and the row that it follows.
    fn ahead(&mut self) -> Option<Vec<(u64, usize, usize)>> {
        let (mut next, mut follows) = (StepPlan::default(), vec![]);
        let is_decided = self.scheduler.step_ahead(&self.plan, &mut next, &mut follows);
        self.scheduler.check_integrity().expect("the accounting is right");
        is_decided.then(|| {
            assert!(next.chunks.iter().all(|chunk| chunk.num_tokens == 1 && chunk.wants_token));
            let chunks = next.chunks.iter().zip(&follows);
            let chunks = chunks.map(|(chunk, &row)| (chunk.id.number, chunk.start_idx, row)).collect();
            self.plan = next;
            chunks
        })
    }

    /// Completes `plan` with its tokens. Another step was launched after it or not.
    fn collect(&mut self, plan: &StepPlan, is_ahead: bool) {
        self.scheduler.computed(is_ahead);
        self.scheduler.advance(plan);
        for chunk in plan.chunks.iter().filter(|chunk| chunk.wants_token) {
            if self.scheduler.sequence(chunk.id).is_some() {
                self.scheduler.push_token(chunk.id, TOKEN);
            }
        }
        self.scheduler.check_integrity().expect("the accounting is right");
    }
}

/// Hashes of a text that only `id` has.
fn hashes(id: u64, num_blocks: usize) -> Vec<BlockHash> {
    let tokens = vec![id as u32; num_blocks * BLOCK_SIZE];
    HashRoot::new("ahead", "", "").block_hashes(&tokens, BLOCK_SIZE).collect()
}

#[test]
fn every_sequence_has_one_more_token_unless_its_length_ends_it() {
    let mut all = Stepping::new(64, 8, 64);
    for (id, num_prompt, max_num_tokens) in [(1, 4, 20), (2, 7, 8), (3, 9, 11)] {
        all.add(id, num_prompt, max_num_tokens);
    }
    all.step();
    let first = all.plan.clone();
    assert_eq!(all.ahead(), Some(vec![(1, 4, 0), (3, 9, 2)]));
    let second = all.plan.clone();
    all.collect(&first, true);
    all.scheduler.end(SequenceId::new(0, 2));
    // The row of the step that is followed.
    assert_eq!(all.ahead(), Some(vec![(1, 5, 0)]));
    all.collect(&second, true);
    all.scheduler.end(SequenceId::new(0, 3));
    let third = all.plan.clone();
    all.collect(&third, false);
    // The same as if every token had been known.
    all.step();
    assert_eq!((all.plan.chunks[0].start_idx, all.plan.chunks[0].num_tokens), (6, 1));
}

#[test]
fn a_step_that_depends_on_tokens_or_admissions_is_not_decided_ahead() {
    // A waiting sequence can be admitted. Without a slot none can.
    for (max_running, expected) in [(2, None), (1, Some(vec![(1, 4, 0)]))] {
        let mut all = Stepping::new(64, max_running, 64);
        all.add(1, 4, 20);
        all.step();
        all.add(2, 4, 20);
        assert_eq!(all.ahead(), expected);
    }
    // A running sequence is not in the step.
    let mut all = Stepping::new(64, 8, 64);
    all.add_as(SequenceRole::Decode, 1, 4, 20);
    all.add(2, 4, 20);
    all.step();
    all.scheduler.start_decode(SequenceId::new(0, 1), TOKEN);
    assert_eq!(all.ahead(), None);
    // A prompt is not complete.
    let mut all = Stepping::new(64, 8, 8);
    all.add(1, 9, 20);
    all.step();
    assert_eq!(all.ahead(), None);
    // A prefill ends after its first token.
    let mut all = Stepping::new(64, 8, 8);
    all.add_as(SequenceRole::Prefill, 1, 4, 20);
    all.step();
    assert_eq!(all.ahead(), None);
    // Drafts.
    let mut all = Stepping::new(64, 8, 64);
    all.add(1, 4, 20);
    all.step();
    let plan = all.plan.clone();
    all.collect(&plan, false);
    all.step();
    all.scheduler.push_draft(SequenceId::new(0, 1), TOKEN);
    all.scheduler.plan_drafts(&mut all.plan);
    assert_eq!(all.ahead(), None);
    // No block is left. A sequence is preempted only when it must be.
    let mut all = Stepping::new(4, 8, 64);
    (1..3).for_each(|id| all.add(id, 3, 12));
    for _ in 0..5 {
        all.step();
        let plan = all.plan.clone();
        all.collect(&plan, false);
    }
    all.step();
    assert_eq!(all.ahead(), None);
    let plan = all.plan.clone();
    all.collect(&plan, false);
    all.step();
    assert_eq!(all.plan.preempted, [SequenceId::new(0, 2)]);
}

#[test]
fn blocks_of_a_sequence_that_ends_meanwhile_return_after_the_step() {
    let mut all = Stepping::new(8, 8, 64);
    (1..3).for_each(|id| all.add(id, 4, 20));
    all.step();
    let first = all.plan.clone();
    assert_eq!(all.ahead(), Some(vec![(1, 4, 0), (2, 4, 1)]));
    assert_eq!(all.scheduler.num_free_blocks(), 4, "two more for what follows");
    let second = all.plan.clone();
    all.collect(&first, true);
    all.scheduler.end(SequenceId::new(0, 1));
    assert_eq!(all.scheduler.num_free_blocks(), 4, "the step that is ahead writes there");
    assert_eq!(all.ahead(), Some(vec![(2, 5, 1)]), "it follows the second row");
    let third = all.plan.clone();
    all.collect(&second, true);
    assert_eq!(all.scheduler.num_free_blocks(), 6);
    all.scheduler.end(SequenceId::new(0, 2));
    assert_eq!(all.ahead(), None, "no sequence is left");
    all.collect(&third, false);
    assert_eq!(all.scheduler.num_free_blocks(), 8);
    assert!(all.scheduler.is_idle());
}

/// No block that the step ahead reads or writes is reused, even if its sequence ends meanwhile. Running sequences continue.
#[test]
fn a_prefix_is_given_no_block_of_the_step_that_is_ahead() {
    let mut all = Stepping::new(12, 8, 64);
    (1..4).for_each(|id| all.add(id, 4, 20));
    all.step();
    let first = all.plan.clone();
    assert!(all.ahead().is_some());
    let second = all.plan.clone();
    let under_way = all.blocks(&second);
    all.collect(&first, true);
    all.scheduler.end(SequenceId::new(0, 3));
    // Six are free. The step ahead writes to two of each, and two sequences may need one more.
    assert_eq!(all.reserve_prefix(10, 5), None);
    let prefix = all.reserve_prefix(10, 4).expect("there is room");
    assert!(prefix.iter().all(|block| !under_way.contains(block)), "{prefix:?} of {under_way:?}");

    assert_eq!(all.ahead(), Some(vec![(1, 5, 0), (2, 5, 1)]));
    let third = all.plan.clone();
    all.collect(&second, true);
    // The two blocks of the ended sequence are back.
    let other = all.reserve_prefix(11, 2).expect("there is room");
    assert_eq!(all.reserve_prefix(12, 1), None);
    all.scheduler.cache_prefix(SequenceId::new(0, 10), 0, None, &hashes(10, 4));
    all.scheduler.release(SequenceId::new(0, 10));
    // The next hold on the prefix gets the same blocks, before the step is over.
    assert_eq!(all.scheduler.hold_cached(SequenceId::new(0, 13), &hashes(10, 4)), prefix);

    let mut under_way = third;
    for num_tokens in 6..10 {
        assert_eq!(all.ahead(), Some(vec![(1, num_tokens, 0), (2, num_tokens, 1)]));
        let next = all.plan.clone();
        let blocks = all.blocks(&next);
        assert!(blocks.iter().all(|block| !prefix.contains(block) && !other.contains(block)));
        all.collect(&under_way, true);
        under_way = next;
    }
    all.collect(&under_way, false);
    (1..3).for_each(|id| all.scheduler.end(SequenceId::new(0, id)));
    [11, 13].into_iter().for_each(|id| all.scheduler.release(SequenceId::new(0, id)));
    assert_eq!(all.scheduler.num_free_blocks(), 12);
    assert!(all.scheduler.is_idle());
}

#[test]
fn a_prefix_is_given_no_block_that_the_next_admission_needs() {
    let mut all = Stepping::new(8, 8, 64);
    all.add(1, 4, 9);
    all.step();
    let first = all.plan.clone();
    assert_eq!(all.ahead(), Some(vec![(1, 4, 0)]));
    let second = all.plan.clone();
    all.collect(&first, true);
    // Of six free blocks these sequences need two and one, and may need one more each.
    all.add(2, 8, 20);
    all.add(3, 4, 20);
    assert_eq!(all.reserve_prefix(10, 2), None);
    // A front of it fits.
    let front = all.scheduler.reserve_prefix(SequenceId::new(0, 10), &hashes(10, 4), 1);
    assert_eq!(front.map(|front| (front.blocks.len(), front.num_cached_blocks)), Some((1, 0)));
    assert_eq!(all.ahead(), None);
    all.collect(&second, false);
    all.step();
    let admitted: Vec<u64> = all.plan.admitted.iter().map(|admission| admission.id.number).collect();
    assert_eq!(admitted, [2, 3]);
}
