//! Tiers that are about as slow as computing: blocks come from the end of a prompt while it is computed, and are saved as there is room.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use baton_engine::{EngineConfig, EngineHandle, EngineThread, Request, SamplingParams, TokenEvent};
use baton_engine_testing::FakeModel;
use baton_kv_cache::BlockHash;
use baton_kv_events::{BlockHolder, Keep};
use baton_kv_store::{HostSlots, KvStore, ReadError, Record, RecordName, Slots, TierCounts};
use baton_worker_tiers::{FetchLimits, Recall, SaveAtEnd, Tiers};
use tokio_util::task::TaskTracker;

const BLOCK_SIZE: usize = 4;
const NUM_TOKENS: usize = 401;
/// Records that wait for a disk at most.
const NUM_QUEUED: usize = 11;
/// Of a block: to compute.
const BLOCK_TIME: Duration = Duration::from_millis(2);
/// To read: so little less that a recall of all blocks ends within the time to compute them.
const READ_TIME: Duration = Duration::from_micros(1500);

/// Slots that take their time, may lose a block and, as a disk, hang.
#[derive(Debug)]
struct SlowSlots {
    slots: HostSlots,
    /// For each block that is read.
    read_time: Duration,
    /// They are not waited for.
    is_disk: bool,
    loses_one: Arc<AtomicBool>,
    hangs: Arc<AtomicBool>,
}

impl Slots for SlowSlots {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn is_memory(&self) -> bool {
        !self.is_disk
    }

    fn num_slots(&self) -> u32 {
        self.slots.num_slots()
    }

    fn record_bytes(&self) -> usize {
        self.slots.record_bytes()
    }

    fn write(&self, slot: u32, record: &Arc<Record>) -> io::Result<()> {
        if self.is_disk {
            thread::sleep(BLOCK_TIME);
        }
        self.slots.write(slot, record)
    }

    fn read(&self, wanted: &[(u32, BlockHash)]) -> Vec<Result<Arc<Record>, ReadError>> {
        while self.is_disk && self.hangs.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(self.read_time * wanted.len() as u32);
        let mut read = self.slots.read(wanted);
        if self.loses_one.load(Ordering::Relaxed) {
            let middle = read.len() / 2;
            read[middle] = Err(ReadError::Damaged);
        }
        read
    }

    fn keep(&self, _: u32, _: Keep) -> io::Result<()> {
        Ok(())
    }

    fn take_found(&mut self) -> Vec<(u32, RecordName, Keep)> {
        Vec::new()
    }
}

/// Keeps an engine in a step while it is closed.
#[derive(Debug, Default)]
struct Gate {
    is_closed: AtomicBool,
    is_reached: AtomicBool,
}

impl Gate {
    fn pass(&self) {
        while self.is_closed.load(Ordering::Relaxed) {
            self.is_reached.store(true, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Worker {
    model: FakeModel,
    engine: EngineHandle,
    thread: Option<EngineThread>,
    tiers: Arc<Tiers>,
    loses_one: Arc<AtomicBool>,
    hangs: Arc<AtomicBool>,
    gate: Arc<Gate>,
}

impl Worker {
    fn start() -> Worker {
        Worker::over(false, READ_TIME)
    }

    /// Over slots that are memory, or a disk, and take so long for each block that is read.
    fn over(is_disk: bool, read_time: Duration) -> Worker {
        Worker::over_tiers(&[(1000, is_disk)], read_time)
    }

    /// Over tiers with room for so many blocks each, which are memory or a disk.
    fn over_tiers(tiers: &[(u64, bool)], read_time: Duration) -> Worker {
        let model = FakeModel::new(BLOCK_SIZE);
        let config = EngineConfig {
            num_blocks: 180,
            max_running: 4,
            token_budget: 2 * BLOCK_SIZE,
            max_drafted_step_tokens: 2 * BLOCK_SIZE,
            itl_target: None,
            context_length: 512,
            max_waiting: 16,
            prefix_cache: true,
            model_revision: "fake".into(),
            step_prior: None,
            grammars: None,
            blending: None,
            clock: Instant::now,
            thread_waits: || Duration::ZERO,
        };
        let gate = Arc::new(Gate::default());
        let executor = model.executor_with_hook({
            let gate = gate.clone();
            move |batch| {
                let num_tokens: usize = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
                thread::sleep(BLOCK_TIME * num_tokens as u32 / BLOCK_SIZE as u32);
                gate.pass();
                Ok(())
            }
        });
        let (engine, thread) = baton_engine::start(executor, None, config).expect("it starts");
        let limits = FetchLimits {
            engine: engine.clone(),
            fetch_deadline: None,
            handoff_deadline: Duration::from_secs(60),
        };
        let layout = *engine.storage().layout();
        let [loses_one, hangs] = [(), ()].map(|()| Arc::new(AtomicBool::new(false)));
        let slots = |&(num_blocks, is_disk): &(u64, bool)| {
            let slots = HostSlots::new(num_blocks * layout.block_bytes() as u64, layout.block_bytes());
            let (loses_one, hangs) = (loses_one.clone(), hangs.clone());
            Box::new(SlowSlots { slots, read_time, is_disk, loses_one, hangs }) as Box<dyn Slots>
        };
        let slots = tiers.iter().map(slots).collect();
        let log = engine.cache_log().clone();
        let tell = move |tier, events| log.append(BlockHolder::Tier(tier), events);
        let store = KvStore::over_slots(slots, engine.storage().clone(), NUM_QUEUED, tell);
        let tiers = Arc::new(Tiers::over(store, limits, TaskTracker::new()));
        Worker { model, engine, thread: Some(thread), tiers, loses_one, hangs, gate }
    }

    /// Answers as a worker does. Returns the tokens of the prompt that the cache supplied. The engine computes all others.
    async fn answer(&self, nth: u32) -> usize {
        let before = self.engine.num_computed_tokens();
        let request = request(nth);
        let prompt = request.prompt.clone();
        let save = SaveAtEnd::new(Some(&self.tiers), &request);
        let beside = match Recall::of(Some(&self.tiers), &request).await {
            Some(recall) => recall.run().await.and_then(|beside| beside.start(0)),
            None => None,
        };
        let mut stream = self.engine.generate(request).expect("accepted");
        let (mut tokens, mut num_cached) = (Vec::new(), 0);
        loop {
            match stream.next().await.expect("a terminal event comes first") {
                TokenEvent::Started { cached_tokens } | TokenEvent::Adopted { cached_tokens } => {
                    num_cached += cached_tokens;
                }
                TokenEvent::Token(token) => tokens.push(token.id),
                TokenEvent::Finished(_) => break,
                other => panic!("unexpected {other:?}"),
            }
        }
        assert_eq!(tokens, self.model.greedy(&prompt, 1));
        let num_computed = (self.engine.num_computed_tokens() - before) as usize;
        assert_eq!(num_computed + num_cached, NUM_TOKENS);
        drop((beside, save));
        num_cached
    }

    /// Until the tier holds so many blocks.
    async fn until_saved(&self, num_blocks: u64) {
        self.until(|| self.tiers.counts()[0].num_held >= num_blocks).await;
    }

    async fn until(&self, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < deadline, "{:?}", self.tiers.counts());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn end(mut self) {
        self.tiers.tasks().close();
        self.tiers.tasks().wait().await;
        // Copies that have begun keep their blocks until they are done.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = self.engine.check_idle_integrity().await {
            assert!(Instant::now() < deadline, "{error}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.engine.shutdown();
        self.thread.take().expect("it runs").join().expect("it ends");
    }
}

/// A prompt of [`NUM_TOKENS`] tokens.
fn request(nth: u32) -> Request {
    let prompt = (0..NUM_TOKENS as u32).map(|idx| (idx * idx + nth * 7) % 64).collect();
    let sampling = SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() };
    Request { prompt, sampling, ..Request::default() }
}

const NUM_BLOCKS: u64 = (NUM_TOKENS / BLOCK_SIZE) as u64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_as_slow_as_computing_comes_from_the_end_meanwhile() {
    let worker = Worker::start();
    // Three prompts of 100 blocks: the pool holds the newest.
    for nth in 0..3 {
        assert_eq!(worker.answer(nth).await, 0);
        worker.until_saved(NUM_BLOCKS * u64::from(nth + 1)).await;
    }
    // The tier was not read yet, and is taken to be fast.
    let num_cached = worker.answer(0).await;
    assert_eq!(num_cached, NUM_TOKENS - 1);
    // It takes about as long as computing does, so each does a part: a half where sleeps take as long as they should.
    let is_part = |num_cached| (1..NUM_TOKENS - 1).contains(&num_cached);
    for nth in 1..4 {
        let num_cached = worker.answer(nth % 3).await;
        assert!(is_part(num_cached), "{num_cached} of {NUM_TOKENS}");
    }
    // A block that is lost ends it: those behind it have come.
    worker.loses_one.store(true, Ordering::Relaxed);
    let num_cached = worker.answer(1).await;
    assert!(is_part(num_cached), "{num_cached} of {NUM_TOKENS}");
    assert_eq!(worker.tiers.counts()[0].damaged, 1);
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tier_is_not_slow_because_the_engine_is() {
    let worker = Worker::over(false, BLOCK_TIME / 20);
    for nth in 0..3 {
        worker.answer(nth).await;
        worker.until_saved(NUM_BLOCKS * u64::from(nth + 1)).await;
    }
    let recall = Recall::of(Some(&worker.tiers), &request(0)).await.expect("the tier has it");
    worker.gate.is_closed.store(true, Ordering::Relaxed);
    let stream = worker.engine.generate(request(2)).expect("accepted");
    worker.until(|| worker.gate.is_reached.load(Ordering::Relaxed)).await;
    // All is read at once, and the engine does not answer in time.
    let recall = tokio::spawn(recall.run());
    let token_seconds = || worker.tiers.counts()[0].recall_token_seconds;
    worker.until(|| token_seconds() > 0.0).await;
    let as_read = token_seconds();
    let beside = recall.await.expect("no panic");
    assert_eq!(token_seconds(), as_read);
    worker.gate.is_closed.store(false, Ordering::Relaxed);
    drop((stream, beside));
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_keeps_no_recall_from_memory() {
    // The memory holds the newest two prompts, the pool less than that.
    let worker = Worker::over_tiers(&[(2 * NUM_BLOCKS, false), (1000, true)], BLOCK_TIME / 20);
    for nth in 0..6 {
        assert_eq!(worker.answer(nth).await, 0);
        let num_saved = NUM_BLOCKS * u64::from(nth + 1);
        worker.until(|| worker.tiers.counts()[1].num_held >= num_saved).await;
    }
    worker.hangs.store(true, Ordering::Relaxed);
    let mut recalls = Vec::new();
    for nth in 0..4 {
        recalls.push(Recall::of(Some(&worker.tiers), &request(nth)).await.expect("the disk has it"));
    }
    let recalls: Vec<_> = recalls.into_iter().map(|recall| tokio::spawn(recall.run())).collect();
    for recall in recalls {
        drop(recall.await.expect("no panic"));
    }
    let num_cached = worker.answer(4).await;
    worker.hangs.store(false, Ordering::Relaxed);
    assert_eq!(num_cached, NUM_TOKENS - 1);
    worker.end().await;
}

#[tokio::test]
async fn a_tier_that_hangs_is_waited_for_as_long_as_computing_takes() {
    const FEW: usize = 5;
    // One try that ends soon is enough: the machine may be busy. Each has tiers of its own, as a read that is late counts as a slow one.
    for _ in 0..20 {
        let worker = Worker::over(true, BLOCK_TIME / 20);
        for nth in 0..3 {
            worker.answer(nth).await;
            worker.until_saved(NUM_BLOCKS * u64::from(nth + 1)).await;
        }
        worker.hangs.store(true, Ordering::Relaxed);
        let prompt = Arc::from(&request(0).prompt[..=FEW * BLOCK_SIZE]);
        let request = Request { prompt, ..request(0) };
        let recall = Recall::of(Some(&worker.tiers), &request).await.expect("the disk has it");
        assert!(recall.is_awaited());
        let started = Instant::now();
        drop(recall.run().await);
        let took = started.elapsed();
        worker.hangs.store(false, Ordering::Relaxed);
        worker.end().await;
        // Twenty times as long as these blocks take.
        if took < 20 * BLOCK_TIME * FEW as u32 {
            return;
        }
    }
    panic!("it was waited for longer each time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scored_prompt_is_not_recalled() {
    let worker = Worker::start();
    for nth in 0..3 {
        worker.answer(nth).await;
        worker.until_saved(NUM_BLOCKS * u64::from(nth + 1)).await;
    }
    let mut request = request(0);
    assert!(Recall::of(Some(&worker.tiers), &request).await.is_some(), "the pool has the newest");
    request.sampling.prompt_logprobs = Some(0);
    assert!(Recall::of(Some(&worker.tiers), &request).await.is_none());
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_leaves_ends_its_recall_and_leaves_no_block() {
    let worker = Worker::start();
    for nth in 0..3 {
        worker.answer(nth).await;
        worker.until_saved(NUM_BLOCKS * u64::from(nth + 1)).await;
    }
    worker.answer(0).await;
    let request = request(1);
    let recall = Recall::of(Some(&worker.tiers), &request).await.expect("the tier has it");
    let beside = recall.run().await.and_then(|beside| beside.start(0)).expect("it is slow");
    let stream = worker.engine.generate(request).expect("accepted");
    tokio::time::sleep(BLOCK_TIME * 10).await;
    drop((stream, beside));
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_gets_all_of_a_prompt_that_is_longer_than_its_queue() {
    let worker = Worker::over(true, BLOCK_TIME);
    worker.answer(0).await;
    worker.until_saved(NUM_BLOCKS).await;
    assert_eq!(worker.tiers.counts()[0].dropped, 0);
    // What other prompts took from the pool meanwhile is not saved, and no block is kept for it.
    for nth in 1..8 {
        worker.answer(nth).await;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while !worker.tiers.tasks().is_empty() {
        assert!(Instant::now() < deadline, "{:?}", worker.tiers.counts());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let TierCounts { num_held, dropped, .. } = worker.tiers.counts()[0];
    assert!(num_held > 3 * NUM_BLOCKS && num_held + dropped <= 8 * NUM_BLOCKS, "{num_held} and {dropped}");
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_ends_does_not_wait_for_what_a_disk_has_no_room_for() {
    let worker = Worker::over(true, BLOCK_TIME);
    for nth in 0..4 {
        worker.answer(nth).await;
    }
    let tiers = worker.tiers.clone();
    worker.end().await;
    let TierCounts { num_held, dropped, .. } = tiers.counts()[0];
    assert!(dropped > 0 && num_held + dropped <= 4 * NUM_BLOCKS, "{num_held} and {dropped}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_sequences_that_end_at_once_are_saved() {
    let worker = Worker::start();
    let prompt = |nth: u32| -> Vec<u32> { (0..BLOCK_SIZE as u32 + 1).map(|idx| (idx + nth) % 64).collect() };
    let requests: Vec<Request> = (0..60)
        .map(|nth| {
            let sampling = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
            Request { prompt: prompt(nth).into(), sampling, ..Request::default() }
        })
        .collect();
    let saves: Vec<_> = requests.iter().map(|request| SaveAtEnd::new(Some(&worker.tiers), request)).collect();
    for request in requests {
        let mut stream = worker.engine.generate(request).expect("accepted");
        while !matches!(stream.next().await, Some(TokenEvent::Finished(_))) {}
    }
    drop(saves);
    worker.until_saved(60).await;
    assert_eq!(worker.tiers.counts()[0].dropped, 0);
    worker.end().await;
}
