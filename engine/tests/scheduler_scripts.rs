//! The scheduler, by scripts: commands at the margin, what they answer indented below.
//!
//! ```text
//! pool blocks=8 block_size=4 running=4 budget=16   starts over; the first line of a script
//! add id=1 prompt=10 max=20                        10 prompt tokens, 20 at its longest
//!     role=prefill|decode                          default: generate
//!     text=a                                       prompts of equal text share their prefix
//! step                                             plans and carries it out: `1: 0..10 token` is a
//!                                                  chunk, `token` that one was sampled after it
//! draft id=1 right=2 wrong=1                       for the next step, in which `1: 9..12 token draft 2
//!                                                  accepted 1` is a chunk whose last two were drafted
//! decode id=1 | end id=1 | release id=1
//! state                                            who waits, how many run, free blocks
//! ```

use std::{collections::BTreeMap, fmt::Write};

use baton_engine::{
    plan::Plan,
    scheduler::{Scheduler, SchedulerConfig},
    sequence::{Role, Sequence, SequenceId},
};
use baton_kv_cache::HashRoot;

#[test]
fn a_prompt_is_computed_in_block_aligned_chunks_then_decodes() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=10
        add id=1 prompt=23 max=26
        step
            admit 1
            1: 0..8
        step
            1: 8..16
        step
            1: 16..23 token
        step
            1: 23..24 token
        step
            1: 24..25 token
            end 1
        state
            waiting 0 running 0 free 16
        ",
    );
}

#[test]
fn a_budget_below_a_block_still_moves() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=3
        add id=1 prompt=7 max=9
        step
            admit 1
            1: 0..3
        step
            1: 3..4
        step
            1: 4..7 token
        step
            1: 7..8 token
            end 1
        ",
    );
}

#[test]
fn decodes_come_before_prompts_and_prompts_share_what_is_left() {
    check(
        "
        pool blocks=64 block_size=4 running=4 budget=12
        add id=1 prompt=4 max=20
        add id=2 prompt=8 max=20
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..8 token
        add id=3 prompt=20 max=30
        add id=4 prompt=2 max=30
        # 3 stops at a block boundary; two tokens of the budget are left, enough for 4.
        step
            admit 3
            admit 4
            1: 4..5 token
            2: 8..9 token
            3: 0..8
            4: 0..2 token
        step
            1: 5..6 token
            2: 9..10 token
            4: 2..3 token
            3: 8..16
        step
            1: 6..7 token
            2: 10..11 token
            4: 3..4 token
            3: 16..20 token
        ",
    );
}

#[test]
fn places_are_limited() {
    check(
        "
        pool blocks=64 block_size=4 running=2 budget=32
        add id=1 prompt=4 max=6
        add id=2 prompt=4 max=20
        add id=3 prompt=4 max=20
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        step
            1: 4..5 token
            2: 4..5 token
            end 1
        step
            admit 3
            2: 5..6 token
            3: 0..4 token
        ",
    );
}

#[test]
fn a_common_prefix_is_computed_once_and_its_last_token_always() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=64
        add id=1 prompt=12 max=14 text=a
        step
            admit 1
            1: 0..12 token
        add id=2 prompt=12 max=14 text=a
        add id=3 prompt=13 max=14 text=a
        add id=4 prompt=12 max=14 text=b
        step
            admit 2 cached 2
            admit 3 cached 3
            admit 4
            1: 12..13 token
            2: 8..12 token
            3: 12..13 token
            4: 0..12 token
            end 1
            end 3
        ",
    );
}

#[test]
fn cached_blocks_are_reused_last_of_all_and_the_oldest_release_first() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=9 max=10 text=a
        add id=2 prompt=9 max=10 text=b
        step
            admit 1
            admit 2
            1: 0..9 token
            2: 0..9 token
            end 1
            end 2
        state
            waiting 0 running 0 free 6
        # Needs three blocks: the two that hold nothing, and the tail of a.
        add id=3 prompt=9 max=10 text=c
        step
            admit 3
            3: 0..9 token
            end 3
        add id=4 prompt=9 max=10 text=a
        step
            admit 4 cached 1
            4: 4..9 token
            end 4
        add id=5 prompt=9 max=10 text=c
        step
            admit 5 cached 2
            5: 8..9 token
            end 5
        ",
    );
}

#[test]
fn the_youngest_is_preempted_and_comes_back_before_newcomers() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=8 max=20
        add id=2 prompt=7 max=20
        step
            admit 1
            admit 2
            1: 0..8 token
            2: 0..7 token
        step
            1: 8..9 token
            2: 7..8 token
        step
            1: 9..10 token
            2: 8..9 token
        add id=3 prompt=2 max=4
        step
            1: 10..11 token
            2: 9..10 token
        step
            1: 11..12 token
            2: 10..11 token
        # 1 needs its fourth block and takes those of 2; nobody is admitted in that step.
        step
            preempt 2
            1: 12..13 token
        state
            waiting 2 running 1 free 2
        # The head, 2, is too large now, and 3 does not overtake it.
        step
            1: 13..14 token
        end id=1
        # Two of its blocks were still in the cache.
        step
            readmit 2 cached 2
            admit 3
            2: 8..12 token
            3: 0..2 token
        step
            2: 12..13 token
            3: 2..3 token
            end 3
        ",
    );
}

#[test]
fn a_sequence_that_finds_no_younger_one_gives_way_itself() {
    check(
        "
        pool blocks=4 block_size=4 running=4 budget=64
        add id=1 prompt=7 max=12
        add id=2 prompt=4 max=5 role=prefill
        step
            admit 1
            admit 2
            1: 0..7 token
            2: 0..4 token
            end 2
        step
            1: 7..8 token
        add id=3 prompt=4 max=5 role=prefill
        # A place for 3 would take the last block that 1 may need.
        step
            1: 8..9 token
        end id=1
        step
            admit 3
            3: 0..4 token
            end 3
        state
            waiting 0 running 0 free 2
        release id=2
        release id=3
        state
            waiting 0 running 0 free 4
        ",
    );
}

#[test]
fn a_prefill_ends_with_its_blocks_held() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=64
        add id=1 prompt=10 max=20 role=prefill text=a
        step
            admit 1
            1: 0..10 token
            end 1
        state
            waiting 0 running 0 free 5
        # Held blocks are shared like any other.
        add id=2 prompt=10 max=20 role=prefill text=a
        step
            admit 2 cached 2
            2: 8..10 token
            end 2
        state
            waiting 0 running 0 free 4
        release id=1
        state
            waiting 0 running 0 free 5
        release id=2
        state
            waiting 0 running 0 free 8
        ",
    );
}

#[test]
fn a_hold_that_is_given_up_early_lets_the_prefill_end() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=4
        add id=1 prompt=8 max=20 role=prefill
        step
            admit 1
            1: 0..4
        release id=1
        step
            1: 4..8 token
            end 1
        state
            waiting 0 running 0 free 8
        ",
    );
}

#[test]
fn a_reservation_waits_its_turn_and_decodes_what_others_computed() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=64
        add id=1 prompt=11 max=16
        add id=2 prompt=9 max=12 role=decode text=a
        step
            admit 1
            1: 0..11 token
        step
            1: 11..12 token
        state
            waiting 1 running 1 free 3
        end id=1
        step
            admit 2
        state
            waiting 0 running 1 free 3
        step
            nothing
        decode id=2
        step
            2: 9..10 token
        # What arrived is in the prefix cache: only a tail is reserved for the next.
        add id=3 prompt=9 max=12 role=decode text=a
        step
            admit 3 cached 2
            2: 10..11 token
            end 2
        release id=3
        state
            waiting 0 running 0 free 6
        ",
    );
}

#[test]
fn a_reservation_is_never_preempted_and_never_preempts() {
    check(
        "
        pool blocks=5 block_size=4 running=4 budget=64
        add id=1 prompt=4 max=20
        add id=2 prompt=4 max=8 role=decode
        step
            admit 1
            admit 2
            1: 0..4 token
        step
            1: 4..5 token
        step
            1: 5..6 token
        step
            1: 6..7 token
        step
            1: 7..8 token
        step
            1: 8..9 token
        step
            1: 9..10 token
        step
            1: 10..11 token
        step
            1: 11..12 token
        step
            1: 12..13 token
        step
            1: 13..14 token
        step
            1: 14..15 token
        step
            1: 15..16 token
        # Every block is its own or reserved: it waits for the reservation to end.
        step
            preempt 1
        step
            nothing
        release id=2
        step
            readmit 1 cached 4
            1: 16..17 token
        ",
    );
}

#[test]
fn a_prefill_under_way_is_not_preempted() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=2
        add id=1 prompt=3 max=20
        add id=2 prompt=16 max=20 role=prefill
        step
            admit 1
            1: 0..2
        step
            admit 2
            1: 2..3 token
            2: 0..1
        step
            1: 3..4 token
            2: 1..2
        step
            1: 4..5 token
            2: 2..3
        step
            1: 5..6 token
            2: 3..4
        step
            1: 6..7 token
            2: 4..5
        step
            1: 7..8 token
            2: 5..6
        # All other blocks are those of 2, which somebody may be reading, though it is the youngest.
        step
            preempt 1
            2: 6..8
        ",
    );
}

#[test]
fn a_preempted_remote_prompt_is_recomputed_here() {
    check(
        "
        pool blocks=6 block_size=4 running=4 budget=8
        add id=1 prompt=8 max=20
        add id=2 prompt=7 max=15 role=decode
        step
            admit 1
            admit 2
            1: 0..8 token
        decode id=2
        step
            1: 8..9 token
            2: 7..8 token
        step
            1: 9..10 token
            2: 8..9 token
        step
            1: 10..11 token
            2: 9..10 token
        step
            1: 11..12 token
            2: 10..11 token
        step
            preempt 2
            1: 12..13 token
        end id=1
        step
            readmit 2 cached 2
            2: 8..12 token
        ",
    );
}

#[test]
fn a_draft_is_verified_in_one_step_and_as_much_of_it_is_kept_as_is_right() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=16
        add id=1 prompt=6 max=30
        step
            admit 1
            1: 0..6 token
        draft id=1 right=3
        step
            1: 6..10 token draft 3 accepted 3
        draft id=1 right=1 wrong=3
        step
            1: 10..15 token draft 4 accepted 1
        draft id=1 wrong=2
        step
            1: 12..15 token draft 2 accepted 0
        step
            1: 13..14 token
        ",
    );
}

#[test]
fn blocks_of_rejected_tokens_return_after_the_step() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=16
        add id=1 prompt=4 max=30
        step
            admit 1
            1: 0..4 token
        state
            waiting 0 running 1 free 7
        draft id=1 wrong=8
        step
            1: 4..13 token draft 8 accepted 0
        # Its five tokens are computed; the next one needs no block yet.
        state
            waiting 0 running 1 free 6
        draft id=1 right=8
        step
            1: 5..14 token draft 8 accepted 8
        state
            waiting 0 running 1 free 4
        ",
    );
}

#[test]
fn accepted_tokens_are_cached_and_rejected_ones_never() {
    check(
        "
        pool blocks=16 block_size=4 running=4 budget=32
        add id=1 prompt=6 max=20 text=a
        step
            admit 1
            1: 0..6 token
        draft id=1 right=2 wrong=6
        step
            1: 6..15 token draft 8 accepted 2
        end id=1
        # The first eight tokens of a text that goes on as 1 did: six and two that were accepted.
        add id=2 prompt=6 max=40 text=a output=4
        # And as the draft went on that was rejected.
        add id=3 prompt=6 max=40 text=a output=2 wrong=6
        step
            admit 2 cached 2
            admit 3 cached 2
            2: 8..10 token
            3: 8..14 token
        ",
    );
}

#[test]
fn drafts_get_what_nobody_else_takes() {
    check(
        "
        pool blocks=8 block_size=4 running=4 budget=9
        add id=1 prompt=4 max=30
        add id=2 prompt=4 max=30
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        # The budget is for 9: the second draft is cut.
        draft id=1 wrong=5
        draft id=2 wrong=5
        step
            1: 4..10 token draft 5 accepted 0
            2: 4..7 token draft 2 accepted 0
        # A prompt goes before drafts, and what is decoded as well.
        add id=3 prompt=6 max=8
        draft id=1 wrong=5
        step
            admit 3
            1: 5..7 token draft 1 accepted 0
            2: 5..6 token
            3: 0..6 token
        ",
    );
}

#[test]
fn nobody_is_preempted_for_a_draft_and_none_is_longer_than_its_sequence_may_become() {
    check(
        "
        pool blocks=4 block_size=4 running=4 budget=32
        add id=1 prompt=4 max=10
        add id=2 prompt=4 max=7
        step
            admit 1
            admit 2
            1: 0..4 token
            2: 0..4 token
        # Each takes a block for the token it decodes; then there is none.
        draft id=1 right=9
        draft id=2 right=9
        step
            1: 4..8 token draft 3 accepted 3
            2: 4..6 token draft 1 accepted 1
            end 2
        ",
    );
}

/// Runs a script; what it answers must be what it says.
#[track_caller]
fn check(script: &str) {
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

    /// So many tokens as are drawn, then so many `wrong` ones.
    fn tokens(&self, drawn: &str) -> Vec<u32> {
        let number = |key| if self.arguments.contains_key(key) { self.number(key) } else { 0 };
        [vec![DRAWN; number(drawn)], vec![WRONG; number("wrong")]].concat()
    }

    fn id(&self) -> SequenceId {
        SequenceId(self.number("id") as u64)
    }
}

struct Player {
    scheduler: Scheduler,
    block_size: usize,
    plan: Plan,
    /// Longest length, and whether it ends after one token.
    ends: BTreeMap<SequenceId, (usize, bool)>,
    /// For the next step.
    drafts: Vec<(SequenceId, Vec<u32>)>,
}

/// What every sequence draws.
const DRAWN: u32 = 77;
/// What none does.
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
        Player {
            scheduler: Scheduler::new(config),
            block_size: config.block_size,
            plan: Plan::default(),
            ends: BTreeMap::new(),
            drafts: Vec::new(),
        }
    }

    fn run(&mut self, command: &Command<'_>) -> Vec<String> {
        let answers = match command.name {
            "add" => self.add(command),
            "step" => self.step(),
            "decode" => {
                self.scheduler.start_decode(command.id(), DRAWN);
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
            "state" => vec![format!(
                "waiting {} running {} free {}",
                self.scheduler.num_waiting(),
                self.scheduler.num_running(),
                self.scheduler.num_free_blocks()
            )],
            other => panic!("no command {other}"),
        };
        self.scheduler.check_integrity().expect("the books are right after every command");
        answers
    }

    fn add(&mut self, command: &Command<'_>) -> Vec<String> {
        let id = command.id();
        let role = match command.arguments.get("role") {
            None => Role::Generate,
            Some(&"prefill") => Role::Prefill,
            Some(&"decode") => Role::Decode,
            Some(other) => panic!("no role {other}"),
        };
        // A text of its own unless the script gives one.
        let text = match command.arguments.get("text") {
            Some(text) => u32::from(text.as_bytes()[0]) * 1000,
            None => 1_000_000 + id.0 as u32 * 1000,
        };
        let prompt = (0..command.number("prompt") as u32).map(|idx| text + idx);
        let tokens = prompt.chain(command.tokens("output")).collect();
        let root = Some(HashRoot::new("script", "", ""));
        let max = command.number("max");
        self.ends.insert(id, (max, role == Role::Prefill));
        self.scheduler.add(Sequence::new(id, role, tokens, max, self.block_size, root));
        Vec::new()
    }

    fn step(&mut self) -> Vec<String> {
        let mut answers = Vec::new();
        self.scheduler.step(&mut self.plan);
        if self.plan.is_empty() {
            answers.push("nothing".into());
        }
        for admission in &self.plan.admitted {
            let verb = if admission.is_first { "admit" } else { "readmit" };
            let cached = match admission.num_cached_blocks {
                0 => String::new(),
                num => format!(" cached {num}"),
            };
            answers.push(format!("{verb} {}{cached}", admission.id.0));
        }
        answers.extend(self.plan.preempted.iter().map(|id| format!("preempt {}", id.0)));
        for (id, draft) in std::mem::take(&mut self.drafts) {
            draft.into_iter().for_each(|token| self.scheduler.push_draft(id, token));
        }
        self.scheduler.plan_drafts(&mut self.plan);
        self.scheduler.advance(&self.plan);
        let mut ends = Vec::new();
        for chunk in &self.plan.chunks.clone() {
            let mut draft = String::new();
            if chunk.wants_token {
                let num_accepted = self.draw(chunk.id);
                if chunk.num_drafts > 0 {
                    draft = format!(" draft {} accepted {num_accepted}", chunk.num_drafts);
                }
                let (max, ends_at_once) = self.ends[&chunk.id];
                if ends_at_once || self.num_tokens(chunk.id) == max {
                    self.scheduler.end(chunk.id);
                    ends.push(format!("end {}", chunk.id.0));
                }
            }
            let end = chunk.start_idx + chunk.num_tokens;
            let token = if chunk.wants_token { " token" } else { "" };
            answers.push(format!("{}: {}..{end}{token}{draft}", chunk.id.0, chunk.start_idx));
        }
        answers.extend(ends);
        answers
    }

    /// Draws until a token was not drafted, or the sequence is as long as it may be; how many were.
    fn draw(&mut self, id: SequenceId) -> usize {
        let mut num_accepted = 0;
        while self.scheduler.push_token(id, DRAWN) {
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
