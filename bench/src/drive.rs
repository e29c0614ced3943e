//! Sends the planned requests to their targets and records when the answers arrive.

use std::{
    iter,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Context;
use baton_command::openai::RequestError;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    plan::Plan,
    progress::Progress,
    target::{Answer, Prepared, Target},
    workload::{Planned, Prompts},
};

/// The planned requests and everything that is needed to send them.
pub(crate) struct Load {
    pub(crate) plan: Mutex<Plan>,
    pub(crate) prompts: Prompts,
    /// One target, or two that take turns.
    pub(crate) targets: Vec<Target>,
    /// Beside each turn of a target, one more request, which is not counted: one for each target, or none.
    pub(crate) neighbours: Vec<Target>,
    /// Requests in flight at once, if they have no planned times.
    pub(crate) concurrency: usize,
    pub(crate) timeout: Duration,
    /// No request begins later than this.
    pub(crate) duration: Option<Duration>,
}

/// The outcome of one request.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) target_idx: usize,
    /// The turn of two targets that it was part of, all of whose requests began at once.
    pub(crate) turn: Option<usize>,
    /// When it should have been sent. Its times count from here, so that a late load generator or a slow server
    /// makes the numbers worse, not better (no coordinated omission).
    pub(crate) due: Instant,
    pub(crate) sent: Instant,
    pub(crate) result: Result<Answer, RequestError>,
}

/// The outcomes of all requests.
#[derive(Debug)]
pub(crate) struct Outcomes {
    pub(crate) requests: Vec<Outcome>,
    /// From the first request to the last answer.
    pub(crate) elapsed: Duration,
}

impl Load {
    /// The target whose turn it is. Two take turns as A B B A, so that neither always comes after the other.
    fn target_idx(&self, turn: usize) -> usize {
        if self.targets.len() < 2 { 0 } else { (turn + turn / 2) % 2 }
    }

    fn next_request(&self) -> Option<Planned> {
        self.plan.lock().expect("a plan does not panic").next()
    }

    /// The requests of a turn. The last two turns share what is left.
    fn wave(&self, turn: usize) -> Vec<Planned> {
        let mut plan = self.plan.lock().expect("a plan does not panic");
        let left = plan.num_left().unwrap_or(usize::MAX);
        let share = if turn.is_multiple_of(2) { left.div_ceil(2) } else { left };
        plan.by_ref().take(share.min(self.concurrency)).collect()
    }

    fn prepare(&self, planned: &Planned, target_idx: usize) -> anyhow::Result<Prepared> {
        let prompt = self.prompts.make(&planned.clone().for_target(target_idx));
        self.targets[target_idx].prepare(prompt, planned.output_tokens, planned.id)
    }

    /// Runs to the end, or until `stop`: then no request is started, running requests are dropped, and the outcomes so
    /// far are returned.
    pub(crate) async fn run(self, progress: Progress, stop: CancellationToken) -> anyhow::Result<Outcomes> {
        let start = Instant::now();
        let is_timed = self.plan.lock().expect("a plan does not panic").is_timed();
        let mut load = Running { load: Arc::new(self), progress, stop, start, tasks: JoinSet::new() };
        let requests = if is_timed {
            load.open_loop().await?
        } else if load.load.targets.len() > 1 {
            load.waves().await?
        } else {
            load.closed_loop().await?
        };
        load.progress.finish();
        Ok(Outcomes { requests, elapsed: start.elapsed() })
    }
}

struct Running {
    load: Arc<Load>,
    progress: Progress,
    stop: CancellationToken,
    start: Instant,
    tasks: JoinSet<anyhow::Result<Vec<Outcome>>>,
}

impl Running {
    /// Each of `concurrency` clients sends its next request when its last one is answered. It pauses after failures in a row.
    async fn closed_loop(&mut self) -> anyhow::Result<Vec<Outcome>> {
        for _ in 0..self.load.concurrency {
            let client = self.client();
            self.tasks.spawn(async move {
                let (mut outcomes, mut failures) = (Vec::new(), Failures::default());
                while !client.is_over()
                    && let Some(planned) = client.load.next_request()
                {
                    if !client.wait(failures.pause()).await {
                        break;
                    }
                    let prepared = client.load.prepare(&planned, 0)?;
                    let Some(outcome) = client.request(0, None, prepared, Instant::now()).await else {
                        break;
                    };
                    failures.note(outcome.result.is_ok());
                    outcomes.push(outcome);
                }
                Ok(outcomes)
            });
        }
        self.collect().await
    }

    /// Two targets take turns, each with `concurrency` requests while the other idles. Clients that moved on to the next
    /// target one by one would pile up at the slower target, and the batches would differ. Turns pause like clients when all
    /// requests of turns in a row fail.
    async fn waves(&mut self) -> anyhow::Result<Vec<Outcome>> {
        let (mut outcomes, mut failures) = (Vec::new(), Failures::default());
        let mut turn = 0;
        while !self.client().is_over() {
            let wave = self.load.wave(turn);
            let Some(first) = wave.first() else { break };
            if !self.client().wait(failures.pause()).await {
                break;
            }
            let target_idx = self.load.target_idx(turn);
            self.add_neighbour(target_idx, first)?;
            for planned in &wave {
                let prepared = self.load.prepare(planned, target_idx)?;
                let client = self.client();
                self.tasks.spawn(async move {
                    let outcome = client.request(target_idx, Some(turn), prepared, Instant::now()).await;
                    Ok(outcome.into_iter().collect())
                });
            }
            turn += 1;
            let of_turn = self.collect().await?;
            failures.note(of_turn.iter().any(|outcome| outcome.result.is_ok()));
            outcomes.extend(of_turn);
        }
        Ok(outcomes)
    }

    /// Sends a request like this, which is not counted. The turn ends with it, and the run with its failure.
    fn add_neighbour(&mut self, target_idx: usize, like: &Planned) -> anyhow::Result<()> {
        let Some(neighbour) = self.load.neighbours.get(target_idx).cloned() else { return Ok(()) };
        let planned = Planned { id: !like.id, ..like.clone() };
        let prompt = self.load.prompts.make(&planned);
        let prepared = neighbour.prepare(prompt, planned.output_tokens, planned.id)?;
        let (timeout, stop) = (self.load.timeout, self.stop.clone());
        self.tasks.spawn(async move {
            let answer = tokio::select! {
                answer = tokio::time::timeout(timeout, neighbour.send(prepared)) => answer,
                () = stop.cancelled() => return Ok(Vec::new()),
            };
            answer.unwrap_or(Err(RequestError::Timeout)).context("a neighbour's request failed")?;
            Ok(Vec::new())
        });
        Ok(())
    }

    /// Each request is sent at its time, independent of the others.
    async fn open_loop(&mut self) -> anyhow::Result<Vec<Outcome>> {
        let start = self.start;
        let load = Arc::clone(&self.load);
        for (turn, planned) in iter::from_fn(|| load.next_request()).enumerate() {
            let target_idx = load.target_idx(turn);
            let prepared = load.prepare(&planned, target_idx)?;
            let due = start + planned.at.unwrap_or_default();
            let client = self.client();
            if client.load.duration.is_some_and(|duration| due > start + duration) {
                break;
            }
            tokio::select! {
                () = sleep_until(due) => {}
                () = self.stop.cancelled() => break,
            }
            self.tasks.spawn(async move {
                Ok(client.request(target_idx, None, prepared, due).await.into_iter().collect())
            });
        }
        self.collect().await
    }

    fn client(&self) -> Client {
        Client {
            load: Arc::clone(&self.load),
            progress: self.progress.clone(),
            stop: self.stop.clone(),
            start: self.start,
        }
    }

    async fn collect(&mut self) -> anyhow::Result<Vec<Outcome>> {
        let mut outcomes = Vec::new();
        while let Some(done) = self.tasks.join_next().await {
            outcomes.extend(done.expect("tasks neither panic nor are aborted")?);
        }
        outcomes.sort_by_key(|outcome| outcome.due);
        Ok(outcomes)
    }
}

struct Client {
    load: Arc<Load>,
    progress: Progress,
    stop: CancellationToken,
    start: Instant,
}

impl Client {
    fn is_over(&self) -> bool {
        self.stop.is_cancelled() || self.load.duration.is_some_and(|duration| self.start.elapsed() > duration)
    }

    /// Waits. `false`: the run has ended meanwhile.
    async fn wait(&self, pause: Duration) -> bool {
        // The shortest sleep of the runtime is a millisecond.
        if pause.is_zero() {
            return true;
        }
        let left = self.load.duration.map_or(pause, |duration| duration.saturating_sub(self.start.elapsed()));
        tokio::select! {
            () = tokio::time::sleep(pause.min(left)) => {}
            () = self.stop.cancelled() => {}
        }
        !self.is_over()
    }

    /// `None` when the run was stopped meanwhile.
    async fn request(
        &self,
        target_idx: usize,
        turn: Option<usize>,
        prepared: Prepared,
        due: Instant,
    ) -> Option<Outcome> {
        let target = &self.load.targets[target_idx];
        let sent = Instant::now();
        let result = tokio::select! {
            result = tokio::time::timeout(self.load.timeout, target.send(prepared)) => {
                result.unwrap_or(Err(RequestError::Timeout))
            }
            () = self.stop.cancelled() => return None,
        };
        self.progress.done(result.is_ok());
        Some(Outcome { target_idx, turn, due, sent, result })
    }
}

/// Failures in a row. Without pauses a server that refuses at once would be asked as fast as this machine can.
#[derive(Debug, Default)]
struct Failures(u32);

impl Failures {
    const FIRST_PAUSE: Duration = Duration::from_millis(10);
    const LONGEST_PAUSE: Duration = Duration::from_secs(1);

    fn note(&mut self, is_ok: bool) {
        self.0 = if is_ok { 0 } else { self.0.saturating_add(1) };
    }

    /// The wait before the next request: none after one failure, then doubled with each.
    fn pause(&self) -> Duration {
        let Some(doublings) = self.0.checked_sub(2) else { return Duration::ZERO };
        Self::FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(doublings)).min(Self::LONGEST_PAUSE)
    }
}

/// Sleeps with a precision of a few microseconds. The runtime's timer is up to a millisecond late: so it sleeps a
/// millisecond less, and yields for the rest.
async fn sleep_until(due: Instant) {
    if let Some(early) = due.checked_sub(Duration::from_millis(1))
        && early > Instant::now()
    {
        tokio::time::sleep_until(early.into()).await;
    }
    while Instant::now() < due {
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::SocketAddr,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };

    use baton_command::openai::OpenAi;

    use super::*;
    use crate::{
        target::OpenAiTarget,
        workload::{Lengths, Material, Synthetic},
    };

    const ANSWER: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

    /// What a server was asked.
    #[derive(Default)]
    struct Asked {
        num_requests: AtomicUsize,
        num_neighbours: AtomicUsize,
    }

    /// Answers every request with two chunks; every third one, neighbours not counted, with 429.
    async fn serve(listener: TcpListener, asked: Arc<Asked>) {
        loop {
            let (connection, _) = listener.accept().await.unwrap();
            tokio::spawn(serve_connection(connection, asked.clone()));
        }
    }

    async fn serve_connection(mut connection: TcpStream, asked: Arc<Asked>) {
        let mut received = Vec::new();
        loop {
            let body_end = loop {
                if let Some(end) = request_end(&received) {
                    break end;
                }
                if connection.read_buf(&mut received).await.unwrap_or(0) == 0 {
                    return;
                }
            };
            let body: Vec<u8> = received.drain(..body_end).collect();
            let is_neighbour = String::from_utf8_lossy(&body).contains("is_neighbour");
            let num = if is_neighbour { &asked.num_neighbours } else { &asked.num_requests };
            let answer = if num.fetch_add(1, Ordering::Relaxed) % 3 == 2 && !is_neighbour {
                let body = r#"{"error": {"message": "full"}}"#;
                format!("HTTP/1.1 429 Too Many Requests\r\ncontent-length: {}\r\n\r\n{body}", body.len())
            } else {
                let events = [
                    r#"{"choices": [{"text": "a", "finish_reason": null}]}"#,
                    r#"{"choices": [{"text": "b", "finish_reason": "length"}]}"#,
                    r#"{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}"#,
                    "[DONE]",
                ];
                let chunk = |event| {
                    let data = format!("data: {event}\n\n");
                    format!("{:x}\r\n{data}\r\n", data.len())
                };
                ANSWER.to_owned() + &events.map(chunk).concat() + "0\r\n\r\n"
            };
            connection.write_all(answer.as_bytes()).await.unwrap();
        }
    }

    /// Where the first request ends, once it is whole.
    fn request_end(received: &[u8]) -> Option<usize> {
        let text = String::from_utf8_lossy(received);
        let head = text.find("\r\n\r\n")? + 4;
        let length = text.split("content-length: ").nth(1)?.split("\r\n").next()?;
        Some(head + length.parse::<usize>().unwrap()).filter(|&end| end <= received.len())
    }

    fn requests(rate: Option<f64>) -> Synthetic {
        Synthetic::new(rate, Lengths::Fixed(3), Lengths::Fixed(2), 1)
    }

    /// Thirty requests.
    async fn run(rate: Option<f64>, num_targets: usize, has_neighbours: bool) -> (Outcomes, Arc<Asked>) {
        let plan = Plan::of(requests(rate).take(30).collect());
        run_plan(plan, None, num_targets, has_neighbours).await
    }

    async fn run_plan(
        plan: Plan,
        duration: Option<Duration>,
        num_targets: usize,
        has_neighbours: bool,
    ) -> (Outcomes, Arc<Asked>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::<Asked>::default();
        let server = tokio::spawn(serve(listener, asked.clone()));
        let load = load(address, plan, duration, num_targets, has_neighbours);
        let outcomes = load.run(Progress::hidden(), CancellationToken::new()).await.unwrap();
        server.abort();
        (outcomes, asked)
    }

    fn load(
        server: SocketAddr,
        plan: Plan,
        duration: Option<Duration>,
        num_targets: usize,
        has_neighbours: bool,
    ) -> Load {
        let target = Target::OpenAi(OpenAiTarget {
            server: OpenAi::new(&format!("http://{server}"), None, None).unwrap(),
            chat: false,
            model: "m".into(),
            temperature: 0.0,
            ignore_eos: true,
            extra: serde_json::Map::new(),
        });
        let mut neighbour = target.clone();
        if let Target::OpenAi(neighbour) = &mut neighbour {
            neighbour.extra.insert("is_neighbour".into(), true.into());
        }
        Load {
            plan: Mutex::new(plan),
            prompts: Prompts {
                material: Material::Ids { low: 0, high: 9 },
                seed: 1,
                block_tokens: 1,
                shared_prefix: 0,
            },
            targets: vec![target; num_targets],
            neighbours: if has_neighbours { vec![neighbour; num_targets] } else { Vec::new() },
            concurrency: 4,
            timeout: Duration::from_secs(60),
            duration,
        }
    }

    #[tokio::test]
    async fn every_request_has_one_outcome() {
        for rate in [None, Some(2000.0)] {
            let (outcomes, _) = run(rate, 1, false).await;
            assert_eq!(outcomes.requests.len(), 30);
            let (ok, failed): (Vec<_>, Vec<_>) =
                outcomes.requests.iter().partition(|outcome| outcome.result.is_ok());
            assert_eq!((ok.len(), failed.len()), (20, 10));
            for outcome in &failed {
                let error = outcome.result.as_ref().unwrap_err();
                assert_eq!((error.kind(), error.to_string()), ("http_429".into(), "HTTP 429: full".into()));
            }
            for outcome in &outcomes.requests {
                assert!(outcome.due <= outcome.sent);
            }
            assert_eq!(ok[0].result.as_ref().unwrap().arrivals.len(), 2);
            assert_eq!(ok[0].result.as_ref().unwrap().output_tokens, Some(2));
        }
    }

    #[tokio::test]
    async fn two_targets_take_turns() {
        let (outcomes, asked) = run(None, 2, false).await;
        assert_eq!(asked.num_neighbours.load(Ordering::Relaxed), 0);
        let num_b = outcomes.requests.iter().filter(|outcome| outcome.target_idx == 1).count();
        assert_eq!(num_b, 15);
        // Four clients: waves of four, A B B A, and the last two share what is left.
        let turns: Vec<_> =
            outcomes.requests.chunk_by(|a, b| a.target_idx == b.target_idx).map(<[Outcome]>::len).collect();
        assert_eq!(turns, [4, 8, 8, 7, 3]);
        let turns: Vec<_> =
            outcomes.requests.chunk_by(|a, b| a.turn == b.turn).map(<[Outcome]>::len).collect();
        assert_eq!(turns, [4, 4, 4, 4, 4, 4, 3, 3]);
        assert_eq!(outcomes.requests[29].turn, Some(7));
        // A wave begins when the one before it is answered.
        let answered = |outcome: &Outcome| outcome.result.as_ref().ok().and_then(|answer| answer.finished);
        let waves = [0..4, 4..8, 8..12, 12..16, 16..20, 20..24, 24..27, 27..30];
        for (before, after) in waves.iter().zip(&waves[1..]) {
            let end = outcomes.requests[before.clone()].iter().filter_map(answered).max();
            let start = outcomes.requests[after.clone()].iter().map(|outcome| outcome.sent).min();
            assert!(end <= start, "{before:?} and {after:?} overlap");
        }
    }

    #[tokio::test]
    async fn an_endless_plan_ends_with_its_time() {
        for num_targets in [1, 2] {
            let duration = Duration::from_millis(50);
            let plan = Plan::endless(requests(None));
            let (outcomes, asked) = run_plan(plan, Some(duration), num_targets, false).await;
            assert!(outcomes.elapsed > duration, "{:?}", outcomes.elapsed);
            // The time is up at the latest when all clients have sent one request.
            assert!(outcomes.requests.len() >= 4, "{}", outcomes.requests.len());
            assert_eq!(outcomes.requests.len(), asked.num_requests.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn pauses_grow_with_failures_in_a_row_to_a_second() {
        let mut failures = Failures::default();
        let mut pauses = Vec::new();
        for is_ok in [false, false, false, true, false, false] {
            failures.note(is_ok);
            pauses.push(failures.pause().as_millis());
        }
        assert_eq!(pauses, [0, 10, 20, 0, 0, 10]);
        for num_failures in [9, 40, u32::MAX] {
            assert_eq!(Failures(num_failures).pause(), Duration::from_secs(1), "{num_failures}");
        }
    }

    #[tokio::test]
    async fn a_server_that_fails_at_once_is_not_asked_without_a_pause() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        for num_targets in [1, 2] {
            let duration = Duration::from_millis(300);
            let load = load(closed, Plan::endless(requests(None)), Some(duration), num_targets, false);
            let outcomes = load.run(Progress::hidden(), CancellationToken::new()).await.unwrap();
            assert!(outcomes.requests.iter().all(|outcome| outcome.result.is_err()));
            // Each of four clients at 0 ms, twice, and at the earliest at 10, 30, 70 and 150 ms.
            let num_requests = outcomes.requests.len();
            assert!((1..=24).contains(&num_requests), "{num_requests}");
        }
    }

    #[tokio::test]
    async fn neighbours_accompany_each_turn_and_are_not_counted() {
        let (outcomes, asked) = run(None, 2, true).await;
        assert_eq!((outcomes.requests.len(), asked.num_requests.load(Ordering::Relaxed)), (30, 30));
        // As many as the waves in the test above.
        assert_eq!(asked.num_neighbours.load(Ordering::Relaxed), 8);
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_a_failure_of_its_own_kind() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let server = OpenAi::new(&format!("http://{closed}"), None, None).unwrap();
        let error = server.models().await.unwrap_err();
        assert_eq!(error.kind(), "connect", "{error}");
    }
}
