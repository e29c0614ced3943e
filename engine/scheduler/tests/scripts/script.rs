//! Scripts: commands at the margin, and their expected output indented below.
//!
//! ```text
//! pool blocks=8 block_size=4 running=4 budget=16   starts over; the first line of a script
//! add id=1 prompt=10 max=20                        10 prompt tokens, 20 at its longest
//!     role=prefill|decode                          default: generate
//!     text=a                                       prompts of equal text share their prefix
//!     keep=8 ttl=3                                 its first 8 tokens are to be kept for 3 s
//!     rest=low                                     what is not kept goes first
//!     scored=1                                     its prompt is scored: it shares no blocks
//! time now=3                                       seconds since the start
//! step                                             plans and carries it out: `1: 0..10 token` is a
//!                                                  chunk, `token` that one was sampled after it
//! draft id=1 right=2 wrong=1                       for the next step, in which `1: 9..12 token draft 2
//!                                                  accepted 1` is a chunk whose last two were drafted
//! fetch id=9 text=a first=2 end=4                  blocks 2 and 3 of this text come from outside, held by id 9
//! expect id=9 text=a first=2                       blocks 2 and later of this text are on their way
//! decode id=1 | end id=1 | release id=1 | give_up_slot id=1
//! state                                            the waiting sequences, the number of running ones, free blocks
//! queued                                           tokens to compute before all sequences decode, their pairs, and the
//!                                                  blocks to admit the queue
//! ```

use std::{collections::BTreeMap, fmt::Write, time::Duration};

use baton_kv_cache::{BlockHash, HashRoot};
use baton_request::{KeptPrefix, Retention};
use baton_scheduler::{Scheduler, SchedulerConfig, Sequence, SequenceId, SequenceRole, StepPlan};

/// Runs a script and compares its output with the expected one.
#[track_caller]
pub fn check(script: &str) {
    let lines: Vec<_> = script.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let margin =
        lines.iter().map(|line| line.len() - line.trim_start().len()).min().expect("a script has lines");
    let expected: Vec<_> = lines.iter().map(|line| &line[margin.min(line.len())..]).collect();
    let mut player = None;
    let mut actual = String::new();
    for line in expected.iter().filter(|line| !line.starts_with(' ')) {
        writeln!(actual, "{line}").expect("a string");
        if line.starts_with('#') {
            continue;
        }
        let command = Command::parse(line);
        if command.name == "pool" {
            player = Some(Player::new(&command));
            continue;
        }
        for answer in player.as_mut().expect("a pool comes first").run(&command) {
            writeln!(actual, "    {answer}").expect("a string");
        }
    }
    let mut expected = expected.join("\n");
    while expected.ends_with([' ', '\n']) {
        expected.pop();
    }
    assert_eq!(actual.trim_end(), expected, "\n--- what it answered:\n{actual}");
}

struct Command<'a> {
    name: &'a str,
    arguments: BTreeMap<&'a str, &'a str>,
}

impl<'a> Command<'a> {
    fn parse(line: &'a str) -> Command<'a> {
        let mut words = line.split_whitespace();
        let name = words.next().expect("a line has a word");
        let arguments = words.map(|word| word.split_once('=').expect("arguments are key=value")).collect();
        Command { name, arguments }
    }

    fn number(&self, key: &str) -> usize {
        self.arguments[key].parse().expect("a number")
    }

    /// A draft of so many right tokens, then so many `wrong` ones.
    fn tokens(&self, sampled: &str) -> Vec<u32> {
        let number = |key| if self.arguments.contains_key(key) { self.number(key) } else { 0 };
        [vec![SAMPLED; number(sampled)], vec![WRONG; number("wrong")]].concat()
    }

    fn id(&self) -> SequenceId {
        let priority =
            self.arguments.get("priority").map_or(0, |priority| priority.parse().expect("a number"));
        SequenceId::new(priority, self.number("id") as u64)
    }
}

struct Player {
    scheduler: Scheduler,
    block_size: usize,
    plan: StepPlan,
    /// The greatest length, and whether the sequence ends after one token.
    ends: BTreeMap<SequenceId, (usize, bool)>,
    /// Drafts for the next step.
    drafts: Vec<(SequenceId, Vec<u32>)>,
}

/// The token that is sampled for every sequence.
const SAMPLED: u32 = 77;
/// A token that is never sampled.
const WRONG: u32 = 78;

impl Player {
    fn new(pool: &Command<'_>) -> Player {
        let config = SchedulerConfig {
            num_blocks: pool.number("blocks"),
            block_size: pool.number("block_size"),
            max_running: pool.number("running"),
            token_budget: pool.number("budget"),
            itl_target: None,
        };
        let mut scheduler = Scheduler::new(config);
        if pool.arguments.contains_key("recall") {
            scheduler.recall_preempted();
        }
        Player {
            scheduler,
            block_size: config.block_size,
            plan: StepPlan::default(),
            ends: BTreeMap::new(),
            drafts: Vec::new(),
        }
    }

    fn run(&mut self, command: &Command<'_>) -> Vec<String> {
        let answers = match command.name {
            "add" => self.add(command),
            "step" => self.step(),
            "time" => {
                self.scheduler.set_time(Duration::from_secs(command.number("now") as u64));
                Vec::new()
            }
            "decode" => {
                self.scheduler.start_decode(command.id(), SAMPLED);
                Vec::new()
            }
            "draft" => {
                self.drafts.push((command.id(), command.tokens("right")));
                Vec::new()
            }
            "end" => {
                self.scheduler.end(command.id());
                Vec::new()
            }
            "release" => {
                self.scheduler.release(command.id());
                Vec::new()
            }
            "give_up_slot" => {
                assert!(self.scheduler.give_up_slot(command.id()), "the reservation is granted");
                Vec::new()
            }
            "fetch" => self.fetch(command),
            "expect" => {
                let first = command.number("first");
                self.scheduler.expect(command.id(), first, self.hashes(command, first + 1)[first]);
                Vec::new()
            }
            "resume" => {
                self.scheduler.resume(command.id(), command.number("blocks"));
                Vec::new()
            }
            "state" => vec![format!(
                "waiting {} running {} free {}",
                self.scheduler.num_waiting(),
                self.scheduler.num_running(),
                self.scheduler.num_free_blocks()
            )],
            "queued" => vec![format!(
                "tokens {} pairs {} blocks {}",
                self.scheduler.num_queued_tokens(),
                self.scheduler.num_queued_pairs(),
                self.scheduler.num_queued_blocks()
            )],
            other => panic!("no command {other}"),
        };
        self.scheduler.check_integrity().expect("the accounting is right after every command");
        answers
    }

    fn add(&mut self, command: &Command<'_>) -> Vec<String> {
        let id = command.id();
        let role = match command.arguments.get("role") {
            None => SequenceRole::Generate,
            Some(&"prefill") => SequenceRole::Prefill,
            Some(&"decode") => SequenceRole::Decode,
            Some(other) => panic!("no role {other}"),
        };
        // Its own text unless the script gives one.
        let text = match command.arguments.get("text") {
            Some(text) => u32::from(text.as_bytes()[0]) * 1000,
            None => 1_000_000 + id.number as u32 * 1000,
        };
        let prompt = (0..command.number("prompt") as u32).map(|idx| text + idx);
        let tokens = prompt.chain(command.tokens("output")).collect();
        let is_scored = command.arguments.contains_key("scored");
        let root = (!is_scored).then(|| HashRoot::new("script", "", ""));
        let max = command.number("max");
        self.ends.insert(id, (max, role == SequenceRole::Prefill));
        let kept = command.arguments.contains_key("keep").then(|| KeptPrefix {
            num_tokens: command.number("keep"),
            ttl: Duration::from_secs(command.number("ttl") as u64),
        });
        let rest_is_low = command.arguments.get("rest") == Some(&"low");
        let retention = Retention { kept: kept.into_iter().collect(), rest_is_low };
        let sequence = Sequence::new(id, role, tokens, max, self.block_size, root).with_retention(retention);
        self.scheduler.add(if is_scored { sequence.with_scores() } else { sequence });
        Vec::new()
    }

    /// The hashes of the first blocks of a text.
    fn hashes(&self, command: &Command<'_>, num_blocks: usize) -> Vec<BlockHash> {
        let text = u32::from(command.arguments["text"].as_bytes()[0]) * 1000;
        let tokens: Vec<u32> = (text..).take(num_blocks * self.block_size).collect();
        HashRoot::new("script", "", "").block_hashes(&tokens, self.block_size).collect()
    }

    fn fetch(&mut self, command: &Command<'_>) -> Vec<String> {
        let (first, end) = (command.number("first"), command.number("end"));
        let hashes = self.hashes(command, end);
        match self.scheduler.reserve_prefix(command.id(), &hashes[first..], hashes.len() - first) {
            Some(found) => {
                let after = first.checked_sub(1).map(|before| hashes[before]);
                self.scheduler.cache_prefix(command.id(), 0, after, &hashes[first..]);
                vec![format!("cached before {}", found.num_cached_blocks)]
            }
            None => vec!["no room".into()],
        }
    }

    fn step(&mut self) -> Vec<String> {
        let mut answers = Vec::new();
        self.scheduler.step(&mut self.plan);
        if self.plan.is_empty() {
            answers.push("nothing".into());
        }
        for admission in &self.plan.admitted {
            let verb = match (admission.is_first, admission.is_recalled) {
                (true, _) => "admit",
                (false, false) => "readmit",
                (false, true) => "recall",
            };
            let cached = match admission.num_cached_blocks {
                0 => String::new(),
                num => format!(" cached {num}"),
            };
            answers.push(format!("{verb} {}{cached}", admission.id.number));
        }
        let adopted = self.plan.adopted.iter().map(|it| (it.id.number, it.first_block_idx, it.num_blocks));
        answers.extend(adopted.map(|(id, first, num)| format!("adopt {id}: {first}..{}", first + num)));
        answers.extend(self.plan.preempted.iter().map(|id| format!("preempt {}", id.number)));
        for (id, draft) in std::mem::take(&mut self.drafts) {
            draft.into_iter().for_each(|token| self.scheduler.push_draft(id, token));
        }
        self.scheduler.plan_drafts(&mut self.plan);
        self.scheduler.advance(&self.plan);
        let mut ends = Vec::new();
        for chunk in &self.plan.chunks.clone() {
            let mut draft = String::new();
            if chunk.wants_token {
                let num_accepted = self.sample(chunk.id);
                if chunk.num_drafts > 0 {
                    draft = format!(" draft {} accepted {num_accepted}", chunk.num_drafts);
                }
                let (max, ends_at_once) = self.ends[&chunk.id];
                if ends_at_once || self.num_tokens(chunk.id) == max {
                    self.scheduler.end(chunk.id);
                    ends.push(format!("end {}", chunk.id.number));
                }
            }
            let end = chunk.start_idx + chunk.num_tokens;
            let token = if chunk.wants_token { " token" } else { "" };
            answers.push(format!("{}: {}..{end}{token}{draft}", chunk.id.number, chunk.start_idx));
        }
        answers.extend(ends);
        answers
    }

    /// Samples until a token was not drafted or the sequence has its greatest length. Returns how many were drafted.
    fn sample(&mut self, id: SequenceId) -> usize {
        let mut num_accepted = 0;
        while self.scheduler.push_token(id, SAMPLED) {
            num_accepted += 1;
            if self.num_tokens(id) == self.ends[&id].0 {
                break;
            }
        }
        num_accepted
    }

    fn num_tokens(&self, id: SequenceId) -> usize {
        self.scheduler.sequence(id).expect("it runs").tokens().len()
    }
}
