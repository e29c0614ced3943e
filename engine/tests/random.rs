//! Thousands of requests of every kind for a prefill and a decode engine, many of them cancelled at random moments.
//! Requests that were not cancelled have the right tokens, and every block returns.

mod support;

use std::{cell::Cell, rc::Rc, sync::atomic::Ordering};

use baton_engine::{
    EngineConfig, EngineHandle, PrefillEvent, Request, SubmitError, TokenEvent, TokenStream,
    sampler::random_unit,
};
use baton_engine_testing::FakeModel;
use support::{
    BLOCK_SIZE, TestEngine, config, draft, engine,
    handoff::{copy, copy_blocks, copy_prefix, hold, reserve_prefix},
    join_all, request, sampling_draft_of_cost, sampling_engine, speculating,
};

const NUM_REQUESTS: usize = 10_000;
/// So many that most of them wait.
const MANY_CLIENTS: usize = 48;
/// So few that hardly any waits.
const FEW_CLIENTS: usize = 6;

/// Random numbers of one request: reproducible up to the interleaving of threads.
struct Dice {
    seed: u64,
    num_thrown: Cell<u64>,
}

impl Dice {
    fn below(&self, num: u64) -> u64 {
        let idx = self.num_thrown.replace(self.num_thrown.get() + 1);
        (random_unit(self.seed, idx) * num as f64) as u64
    }
}

/// A client that may cancel.
struct Client {
    model: FakeModel,
    p: EngineHandle,
    d: EngineHandle,
    dice: Dice,
    request: Request,
    /// Events until it cancels.
    patience: u64,
    has_fetched: bool,
}

struct Left;

impl Client {
    fn new(seed: u64, model: FakeModel, p: &EngineHandle, d: &EngineHandle) -> Client {
        let dice = Dice { seed, num_thrown: Cell::new(0) };
        // Few texts, so that prefixes are shared, and cached blocks evicted.
        let text = dice.below(6) as u32;
        let num_prompt = 1 + dice.below(40) as u32;
        let prompt: Vec<u32> = (0..num_prompt).map(|idx| (text * 11 + idx * idx) % 64).collect();
        let max_tokens = 1 + dice.below(20) as u32;
        let patience = if dice.below(10) < 3 { dice.below(20) } else { u64::MAX };
        let (p, d, request) = (p.clone(), d.clone(), request(&prompt, max_tokens));
        Client { model, p, d, dice, request, patience, has_fetched: false }
    }

    /// Whether it has fetched a prefix.
    async fn run(mut self) -> bool {
        let result = match self.dice.below(6) {
            0 => self.generate().await,
            1 => self.resume().await,
            2 => self.fetch().await,
            3 => self.fetch_beside().await,
            _ => self.hand_off().await,
        };
        // Cancellation is not an error of the engine.
        let (Ok(()) | Err(Left)) = result;
        self.has_fetched
    }

    fn use_patience(&mut self) -> Result<(), Left> {
        self.patience = self.patience.checked_sub(1).ok_or(Left)?;
        Ok(())
    }

    fn expected(&self) -> Vec<u32> {
        self.model.greedy(&self.request.prompt, self.request.sampling.max_tokens as usize)
    }

    async fn generate(&mut self) -> Result<(), Left> {
        let stream = self.d.generate(self.request.clone()).expect("accepted");
        let expected = self.expected();
        self.read(stream, &expected).await
    }

    async fn resume(&mut self) -> Result<(), Left> {
        let expected = self.expected();
        let num_delivered = self.dice.below(expected.len() as u64) as usize;
        let request = Request { output: expected[..num_delivered].to_vec(), ..self.request.clone() };
        let stream = self.d.generate(request).expect("accepted");
        self.read(stream, &expected[num_delivered..]).await
    }

    /// Fetches the part of the prompt that the other engine has cached, before the prompt is computed.
    async fn fetch(&mut self) -> Result<(), Left> {
        self.use_patience()?;
        let held = hold(&self.p, &self.request).await;
        self.use_patience()?;
        let num_tokens = held.blocks().len() * BLOCK_SIZE;
        let reserved = reserve_prefix(&self.d, &self.request, num_tokens).await;
        self.use_patience()?;
        if let Some(reservation) = reserved.filter(|it| it.num_cached_blocks() < it.blocks().len()) {
            copy_prefix(&self.p, &held, &self.d, &reservation);
            // Other requests advance meanwhile.
            tokio::task::yield_now().await;
            self.use_patience()?;
            self.d.cache_prefix(reservation);
            self.has_fetched = true;
        }
        drop(held);
        self.generate().await
    }

    /// Fetches the end of what the other engine has cached while this one computes the prompt.
    async fn fetch_beside(&mut self) -> Result<(), Left> {
        let stream = self.d.generate(self.request.clone()).expect("accepted");
        self.use_patience()?;
        let held = hold(&self.p, &self.request).await;
        let hashes = self.d.prefix_hashes(&self.request, held.blocks().len() * BLOCK_SIZE);
        let first = self.dice.below(hashes.len() as u64 + 1) as usize;
        self.use_patience()?;
        if let Some(reservation) =
            self.d.reserve_blocks(&hashes, first, hashes.len() - first).await.expect("it runs")
        {
            copy_blocks(&self.p, &held.blocks()[first..], &self.d, &reservation);
            tokio::task::yield_now().await;
            self.use_patience()?;
            self.d.cache_prefix(reservation);
        }
        drop(held);
        let expected = self.expected();
        self.read(stream, &expected).await
    }

    async fn hand_off(&mut self) -> Result<(), Left> {
        let (mut events, held) = self.p.prefill(self.request.clone()).expect("accepted");
        let num_blocks = self.p.storage().layout().num_blocks_for(self.request.prompt.len());
        let mut table = vec![None; num_blocks];
        let first = loop {
            self.use_patience()?;
            match events.next().await.expect("a terminal event comes first") {
                PrefillEvent::Started { .. }
                | PrefillEvent::Adopted { .. }
                | PrefillEvent::Blended { .. } => {}
                PrefillEvent::Ready { first_block_idx, blocks, .. } => {
                    (first_block_idx..).zip(blocks).for_each(|(idx, block)| table[idx] = Some(block));
                }
                PrefillEvent::FirstToken(token) => break token,
                PrefillEvent::Failed(error) => panic!("{error}"),
            }
        };
        self.use_patience()?;
        let reservation = if self.patience < 3 {
            // Cancels while it waits in the queue, unless there is room at once.
            let mut place = Box::pin(self.d.reserve(self.request.clone()));
            tokio::select! {
                biased;
                reservation = &mut place => reservation,
                () = tokio::task::yield_now() => return Err(Left),
            }
        } else {
            self.d.reserve(self.request.clone()).await
        };
        let reservation = reservation.expect("granted");
        self.use_patience()?;
        let blocks: Vec<_> = table.into_iter().map(|block| block.expect("named")).collect();
        copy(&self.p, &blocks, &self.d, &reservation);
        drop(held);
        self.use_patience()?;
        let expected = self.expected();
        assert_eq!(first.id, expected[0]);
        let stream = self.d.decode(reservation, first).expect("accepted");
        self.read(stream, &expected[1..]).await
    }

    async fn read(&mut self, mut stream: TokenStream, expected: &[u32]) -> Result<(), Left> {
        let mut tokens = Vec::new();
        loop {
            self.use_patience()?;
            match stream.next().await.expect("a terminal event comes first") {
                TokenEvent::Token(token) => tokens.push(token.id),
                TokenEvent::Started { .. }
                | TokenEvent::Adopted { .. }
                | TokenEvent::Blended { .. }
                | TokenEvent::Scored { .. }
                | TokenEvent::Verified(_) => {}
                TokenEvent::Finished(_) => break,
                TokenEvent::Failed(error) => panic!("{error}"),
            }
        }
        assert_eq!(tokens, expected, "of {:?}", self.request);
        Ok(())
    }
}

#[tokio::test]
async fn random_clients_get_right_tokens_and_blocks_return() {
    let (_, d) = engine(decoding());
    run_clients(d, MANY_CLIENTS).await;
}

#[tokio::test]
async fn random_clients_see_no_change_from_drafts() {
    let model = FakeModel::new(BLOCK_SIZE);
    let drafter = draft(FakeModel { errs_in: Some(5), ..model });
    run_clients(speculating(model, drafter, decoding()), MANY_CLIENTS).await;
}

#[tokio::test]
async fn random_clients_see_no_change_from_steps_ahead() {
    let (d, num_ahead) = sampling_engine(FakeModel::new(BLOCK_SIZE), None, decoding(), |_| Ok(()));
    run_clients(d, MANY_CLIENTS).await;
    assert!(num_ahead.load(Ordering::Relaxed) > 100);
}

#[tokio::test]
async fn random_clients_see_no_change_from_drafts_between_steps_ahead() {
    let model = FakeModel::new(BLOCK_SIZE);
    // Half of the drafts are right, which does not pay at half a step per token: so the target has steps without drafts,
    // which alone are launched ahead, on machines of any speed.
    let (drafter, num_drafted_ahead) = sampling_draft_of_cost(FakeModel { errs_in: Some(2), ..model }, 0.5);
    let (d, num_ahead) = sampling_engine(model, Some(drafter), decoding(), |_| Ok(()));
    run_clients(d, FEW_CLIENTS).await;
    for counter in [num_ahead, num_drafted_ahead] {
        assert!(counter.load(Ordering::Relaxed) > 10, "{counter:?}");
    }
}

#[tokio::test]
async fn random_clients_see_no_change_from_prefixes_beside_steps_ahead() {
    let (d, num_ahead) = sampling_engine(FakeModel::new(BLOCK_SIZE), None, decoding(), |_| Ok(()));
    let num_fetched = run_clients(d, FEW_CLIENTS).await;
    assert!(num_fetched > 100, "{num_fetched}");
    assert!(num_ahead.load(Ordering::Relaxed) > 1000, "{num_ahead:?}");
}

/// Tight pools: everything waits, preempts and evicts.
fn decoding() -> EngineConfig {
    EngineConfig { num_blocks: 48, max_running: 10, token_budget: 32, ..config() }
}

/// How many prefixes were fetched.
async fn run_clients(d: TestEngine, num_clients: usize) -> usize {
    let (model, p) = engine(EngineConfig { num_blocks: 40, max_running: 6, token_budget: 24, ..config() });
    let next = Rc::new(Cell::new(0));
    let num_fetched = Rc::new(Cell::new(0));
    let workers = (0..num_clients).map(|_| {
        let (p, d, next, num_fetched) =
            (p.clone_handle(), d.clone_handle(), next.clone(), num_fetched.clone());
        async move {
            while next.get() < NUM_REQUESTS {
                let seed = next.replace(next.get() + 1) as u64;
                let has_fetched = Client::new(seed, model, &p, &d).run().await;
                num_fetched.update(|num| num + usize::from(has_fetched));
            }
        }
    });
    join_all(workers.collect()).await;
    p.check_whole().await;
    d.check_whole().await;
    assert_eq!(p.stop(), Ok(()));
    assert_eq!(d.stop(), Ok(()));
    num_fetched.get()
}

#[tokio::test]
async fn shutdown_under_load_ends_every_stream() {
    let (_, engine) = engine(EngineConfig { num_blocks: 40, max_running: 6, ..config() });
    let mut streams = Vec::new();
    for idx in 0..60 {
        if idx == 40 {
            engine.shutdown();
        }
        match engine.generate(request(&[idx], 100)) {
            Ok(stream) => streams.push(stream),
            Err(error) => assert_eq!(error, SubmitError::ShuttingDown),
        }
    }
    assert_eq!(streams.len(), 40);
    for stream in streams {
        let _ = support::collect(stream).await; // checks that it has exactly one terminal event
    }
}
