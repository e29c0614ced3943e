//! Scripts for the decode side. Each line is an input and the expected actions.
//! The sequence has 3 blocks, of which 1 is cached, and 2 layers. The grant has generation 1.

use std::time::{Duration, Instant};

use baton_kv_layout::BlockId;
use baton_request::{Failure, FailureKind};

use crate::{Begin, DecodeMessage, Generation, Grant, Piece, PrefillMessage, Secret, TransportKind, Written};
use crate::{HandoffError, KvFault};
use crate::{Limits, Pushed, decode::RemotePrefilled};

use super::machines::decode::{Action, DecodeHandoff, Input};

const LIMITS: Limits =
    Limits { total: Duration::from_secs(100), stall: Duration::from_secs(30), stop: Duration::from_secs(10) };

fn check(script: &str) {
    check_kind(Kind::RemotePrefill, script);
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    RemotePrefill,
    PrefixFetch,
}

fn check_kind(kind: Kind, script: &str) {
    let mut now = Instant::now();
    let begin = Begin {
        request_id: "r".into(),
        attempt: 0,
        prefill_incarnation: 7,
        num_tokens: if kind == Kind::RemotePrefill { 11 } else { 12 },
        block_size: 4,
        deadline: LIMITS.total,
    };
    let (mut handoff, actions) = DecodeHandoff::begin(begin, kind == Kind::PrefixFetch, 2, LIMITS, now);
    let expected = if kind == Kind::RemotePrefill { "send Begin" } else { "send Fetch" };
    assert_eq!(show(&actions), expected);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (input, expected) = line.split_once("=>").expect("input => actions");
        let actions = match input.trim() {
            "request-ended" => handoff.request_ended(now),
            input => handoff.on(parse(input, &mut now), now),
        };
        assert_eq!(show(&actions), expected.trim(), "after `{line}` of {script}");
        assert_eq!(handoff.deadline().is_none(), handoff.is_over(), "after `{line}` of {script}");
    }
}

fn parse(input: &str, now: &mut Instant) -> Input<u32> {
    let mut words = input.split_whitespace();
    let message = match words.next().expect("an input") {
        "Started" => PrefillMessage::Started,
        "Held" => {
            let num_tokens = words.next().and_then(|n| n.parse().ok()).expect("a number");
            PrefillMessage::Held { num_tokens }
        }
        "Progress" => PrefillMessage::Progress,
        "FirstToken" => PrefillMessage::FirstToken(5),
        "Written" => {
            let mut written = Written { generation: Generation(1), pushed: None, last: false };
            let mut pieces = vec![];
            let mut is_huge = false;
            for word in words {
                match word {
                    "huge" => is_huge = true,
                    "last" => written.last = true,
                    "stale" => written.generation = Generation(2),
                    piece => pieces.push(parse_piece(piece)),
                }
            }
            let bytes = match is_huge {
                true => u64::MAX,
                false => 10 * pieces.len() as u64,
            };
            if !pieces.is_empty() {
                written.pushed = Some(Pushed { pieces, transport: TransportKind::Tcp, bytes });
            }
            PrefillMessage::Written(written)
        }
        "Stopped" => PrefillMessage::Stopped,
        "Failed" => PrefillMessage::Failed(Failure::new(FailureKind::Full, "full")),
        "own-progress" => return Input::Progress,
        "granted" => return Input::Granted(grant(2)),
        "granted-nothing" => return Input::Granted(grant(0)),
        "granted-too-few" => return Input::Granted(grant(1)),
        "no-blocks" => return Input::ReserveFailed(Failure::new(FailureKind::Draining, "draining")),
        "verified" => {
            let num_pieces = words.next().and_then(|n| n.parse().ok()).expect("a number");
            return Input::Verified { num_pieces, result: Ok(()) };
        }
        "wrong" => {
            let result = Err(KvFault::Checksum { block_idx: 0, layer_idx: 0 });
            return Input::Verified { num_pieces: 1, result };
        }
        "cancel" => return Input::Cancel("client left".into()),
        "closed" => return Input::StreamClosed("reset".into()),
        "after" => {
            let seconds = words.next().and_then(|n| n.parse().ok()).expect("seconds");
            *now += Duration::from_secs(seconds);
            return Input::Tick;
        }
        other => panic!("unknown input {other}"),
    };
    Input::Message(message)
}

fn grant(num_blocks: u32) -> Grant {
    Grant {
        generation: Generation(1),
        secret: Secret::default(),
        num_cached_blocks: 1,
        block_ids: (0..num_blocks).map(BlockId).collect(),
        offers: vec![],
    }
}

fn parse_piece(text: &str) -> Piece {
    let (block_idx, layer_idx) = text.split_once('/').expect("block/layer");
    Piece { block_idx: block_idx.parse().unwrap(), layer_idx: layer_idx.parse().unwrap(), checksum: 0 }
}

fn show(actions: &[Action<u32>]) -> String {
    let shown: Vec<String> = actions.iter().map(show_one).collect();
    shown.join(", ")
}

fn show_one(action: &Action<u32>) -> String {
    match action {
        Action::Send(DecodeMessage::Begin(_)) => "send Begin".into(),
        Action::Send(DecodeMessage::Fetch(_)) => "send Fetch".into(),
        Action::Send(DecodeMessage::Done) => "send Done".into(),
        Action::Send(DecodeMessage::Grant(_)) => "send Grant".into(),
        Action::Send(DecodeMessage::Progress) => "send Progress".into(),
        Action::Send(DecodeMessage::Commit { .. }) => "send Commit".into(),
        Action::Send(DecodeMessage::Cancel { .. }) => "send Cancel".into(),
        Action::Reserve { num_tokens: 11 } => "reserve".into(),
        Action::Reserve { num_tokens } => format!("reserve {num_tokens}"),
        Action::FirstToken(token) => format!("first token {token}"),
        Action::Verify(pieces) => {
            let pieces: Vec<_> = pieces.iter().map(|p| format!("{}/{}", p.block_idx, p.layer_idx)).collect();
            format!("verify {}", pieces.join(" "))
        }
        Action::Revoke(_) => "revoke".into(),
        Action::WriterStopped(_) => "writer stopped".into(),
        Action::Finish(Ok(RemotePrefilled::Committed(committed))) => {
            format!("finish with {} bytes", committed.bytes)
        }
        Action::Finish(Ok(RemotePrefilled::Ended)) => "finish without kv".into(),
        Action::Finish(Err(HandoffError::KvRejected(fault))) => format!("finish kv_rejected: {fault}"),
        Action::Finish(Err(error)) => format!("finish {}", error.label()),
        Action::Close => "close".into(),
    }
}

#[test]
fn a_handoff_commits_when_all_is_verified_and_the_token_is_known() {
    check(
        "Started                    => reserve
         granted                    => send Grant
         Written 0/0 1/0            => verify 0/0 1/0
         FirstToken                 => first token 5
         verified 2                 =>
         Written 0/1 1/1 last       => verify 0/1 1/1
         verified 2                 => send Commit, finish with 40 bytes, close",
    );
}

#[test]
fn the_token_may_come_before_the_grant_or_last() {
    check(
        "Started                    => reserve
         FirstToken                 => first token 5
         granted                    => send Grant
         Written 0/0 1/0 0/1 1/1    => verify 0/0 1/0 0/1 1/1
         verified 4                 =>
         Written last               => send Commit, finish with 40 bytes, close",
    );
    check(
        "Started                    => reserve
         granted                    => send Grant
         Written 0/0 1/0 0/1 1/1 last => verify 0/0 1/0 0/1 1/1
         verified 4                 =>
         FirstToken                 => first token 5, send Commit, finish with 40 bytes, close",
    );
}

#[test]
fn nothing_is_committed_before_the_last_piece_is_verified() {
    check(
        "Started                    => reserve
         granted                    => send Grant
         FirstToken                 => first token 5
         Written 0/0                => verify 0/0
         Written 1/0 0/1 1/1 last   => verify 1/0 0/1 1/1
         verified 1                 =>
         wrong                      => revoke, send Cancel, finish kv_rejected: piece 0/0 has a wrong checksum
         verified 3                 =>
         Stopped                    => writer stopped, close",
    );
}

#[test]
fn reports_that_do_not_match_the_grant_are_rejected() {
    for (written, fault) in [
        ("0/0 0/0", "piece 0/0 was written twice"),
        ("2/0", "piece 2/0 was never granted"),
        ("0/2", "piece 0/2 was never granted"),
        ("4000000000/0", "piece 4000000000/0 was never granted"),
        ("0/0 stale", "written under another generation"),
        ("0/0 1/0 0/1 last", "1 pieces are missing"),
        ("last", "4 pieces are missing"),
    ] {
        check(&format!(
            "Started           => reserve
             granted           => send Grant
             Written {written} => revoke, send Cancel, finish kv_rejected: {fault}
             Written 1/1       =>
             Stopped           => writer stopped, close"
        ));
    }
}

#[test]
fn byte_counts_that_overflow_are_capped() {
    check(
        "Started                         => reserve
         granted                         => send Grant
         FirstToken                      => first token 5
         Written 0/0 1/0 huge            => verify 0/0 1/0
         Written 0/1 1/1 last            => verify 0/1 1/1
         verified 4                      => send Commit, finish with 18446744073709551615 bytes, close",
    );
}

#[test]
fn messages_out_of_order_fail_the_handoff() {
    for (before, message) in [
        ("", "FirstToken"),
        ("", "Written 0/0"),
        ("", "Stopped"),
        ("Started => reserve", "Started"),
        ("Started => reserve", "Written 0/0"),
        ("Started => reserve", "Stopped"),
    ] {
        check(&format!(
            "{before}
             {message} => send Cancel, finish prefill_lost
             closed    => close"
        ));
    }
    check(
        "Started       => reserve
         FirstToken    => first token 5
         granted       => send Grant
         FirstToken    => revoke, send Cancel, finish prefill_lost
         closed        => close",
    );
}

#[test]
fn a_grant_that_comes_too_late_is_revoked() {
    check(
        "Started    => reserve
         cancel     => send Cancel, finish cancelled
         granted    => revoke
         Stopped    => close",
    );
    check(
        "Started    => reserve
         closed     => finish prefill_lost, close
         granted    => revoke",
    );
    check(
        "Started          => reserve
         granted-too-few  => revoke, send Cancel, finish refused
         Stopped          => close",
    );
}

#[test]
fn a_cancelled_handoff_waits_for_the_peer_to_stop_but_not_for_ever() {
    check(
        "cancel     => send Cancel, finish cancelled
         cancel     =>
         Started    =>
         Failed     =>
         Stopped    => close
         Stopped    =>",
    );
    check(
        "Started    => reserve
         granted    => send Grant
         cancel     => revoke, send Cancel, finish cancelled
         after 9    =>
         after 1    => close
         closed     =>",
    );
}

#[test]
fn a_peer_that_fails_or_vanishes_gives_a_typed_error() {
    check(
        "Failed     => finish full
         closed     => close",
    );
    check(
        "Started    => reserve
         granted    => send Grant
         Failed     => revoke, finish full
         Stopped    => writer stopped, close",
    );
    check(
        "Started    => reserve
         granted    => send Grant
         closed     => revoke, finish prefill_lost, close",
    );
    check(
        "Started    => reserve
         no-blocks  => send Cancel, finish draining
         Stopped    => close",
    );
}

#[test]
fn a_peer_that_vanishes_after_its_last_message_is_not_needed() {
    let check = |rest: &str| {
        check(&format!(
            "Started                      => reserve
             granted                      => send Grant
             Written 0/0 1/0              => verify 0/0 1/0
             FirstToken                   => first token 5
             Written 0/1 1/1 last         => verify 0/1 1/1
             closed                       =>
             {rest}"
        ));
    };
    check("verified 4 => finish with 40 bytes, close");
    check(
        "verified 2 =>
         wrong      => revoke, finish kv_rejected: piece 0/0 has a wrong checksum, close",
    );
    check("cancel     => revoke, finish cancelled, close");
    check("after 30   => revoke, finish deadline, close");
}

#[test]
fn a_peer_that_vanishes_before_its_last_message_is_lost() {
    for said in ["FirstToken => first token 5", "Written 0/0 1/0 0/1 1/1 last => verify 0/0 1/0 0/1 1/1"] {
        check(&format!(
            "Started    => reserve
             granted    => send Grant
             {said}
             closed     => revoke, finish prefill_lost, close"
        ));
    }
}

#[test]
fn every_state_has_a_deadline() {
    check(
        "after 99   =>
         after 1    => send Cancel, finish deadline
         after 10   => close",
    );
    check(
        "Started    => reserve
         after 99   =>
         after 1    => send Cancel, finish deadline
         Stopped    => close",
    );
    // Progress of the engine, for any request, restarts the total deadline, and so do written pieces. Other events extend only the stall
    // deadline.
    check(
        "after 99    =>
         Progress    =>
         after 99    =>
         Started     => reserve
         Progress    =>
         granted     => send Grant
         after 29    =>
         Progress    =>
         after 29    =>
         Written 0/0 => verify 0/0
         after 29    =>
         FirstToken  => first token 5
         after 29    =>
         verified 1  =>
         after 29    =>
         Written 1/0 => verify 1/0
         after 29    =>
         Written 0/1 => verify 0/1
         after 29    =>
         verified 1  =>
         after 29    =>
         verified 1  =>
         after 29    =>
         Written 1/1 => verify 1/1
         after 30    => revoke, send Cancel, finish deadline
         after 10    => close",
    );
    check(
        "Started     => reserve
         granted     => send Grant
         FirstToken  => first token 5
         Progress    => revoke, send Cancel, finish prefill_lost
         closed      => close",
    );
    check(
        "Started     => reserve
         granted     => send Grant
         after 29    =>
         Written 0/0 => verify 0/0
         after 29    =>
         verified 1  =>
         after 29    =>
         FirstToken  => first token 5
         after 29    =>
         after 1     => revoke, send Cancel, finish deadline
         after 10    => close",
    );
    check(
        "Started     => reserve
         granted     => send Grant
         after 30    => revoke, send Cancel, finish deadline
         Stopped     => writer stopped, close",
    );
}

#[test]
fn a_wait_for_own_blocks_is_as_long_as_the_own_queue_and_no_fault_of_the_peer() {
    // Before the first token, only the peer's progress counts.
    check(
        "own-progress =>
         Started      => reserve
         after 99     =>
         own-progress =>
         FirstToken   => first token 5
         own-progress => send Progress
         after 99     =>
         own-progress => send Progress
         after 99     =>
         granted      => send Grant
         own-progress =>
         after 1      => revoke, send Cancel, finish deadline
         own-progress =>
         Stopped      => writer stopped, close",
    );
    // Without own progress this worker is full. The kind tells the router to avoid it, and not the peer.
    check(
        "Started      => reserve
         FirstToken   => first token 5
         after 99     =>
         after 1      => send Cancel, finish full
         Stopped      => close",
    );
    check_kind(
        Kind::PrefixFetch,
        "Held 8       => reserve 8
         own-progress =>
         after 100    => send Cancel, finish deadline",
    );
}

#[test]
fn a_prefix_fetch_reserves_as_much_as_the_peer_holds_and_needs_no_token() {
    check_kind(
        Kind::PrefixFetch,
        "Held 8              => reserve 8
         granted-too-few     => send Grant
         Written 0/0 0/1 last => verify 0/0 0/1
         verified 2          => send Commit, finish with 20 bytes, close",
    );
    // Meanwhile the missing blocks were cached for another request.
    check_kind(
        Kind::PrefixFetch,
        "Held 4              => reserve 4
         granted-nothing     => send Grant
         Written last        => send Commit, finish with 0 bytes, close",
    );
}

#[test]
fn a_fetch_of_a_prefix_that_is_not_cached_is_cancelled() {
    check_kind(
        Kind::PrefixFetch,
        "Held 0   => send Cancel, finish not_cached
         Stopped  => close",
    );
}

#[test]
fn a_peer_that_reports_an_impossible_prefix_fails_the_handoff() {
    for held in ["Held 16", "Held 3", "Started"] {
        check_kind(
            Kind::PrefixFetch,
            &format!(
                "{held}  => send Cancel, finish prefill_lost
                 closed  => close"
            ),
        );
    }
    check("Held 8 => send Cancel, finish prefill_lost");
    check_kind(
        Kind::PrefixFetch,
        "Held 8     => reserve 8
         FirstToken => send Cancel, finish prefill_lost",
    );
}

#[test]
fn a_request_that_its_first_token_ends_is_done_without_kv() {
    check(
        "Started       => reserve
         granted       => send Grant
         Written 0/0   => verify 0/0
         FirstToken    => first token 5
         request-ended => revoke, send Done, finish without kv
         Written 1/0   =>
         verified 1    =>
         Stopped       => writer stopped, close",
    );
    check(
        "Started       => reserve
         FirstToken    => first token 5
         request-ended => send Done, finish without kv
         granted       => revoke
         Stopped       => close",
    );
    // All KV was verified before the token came: the handoff is committed, and its blocks are freed later.
    check(
        "Started                      => reserve
         granted                      => send Grant
         Written 0/0 1/0 0/1 1/1 last => verify 0/0 1/0 0/1 1/1
         verified 4                   =>
         FirstToken                   => first token 5, send Commit, finish with 40 bytes, close
         request-ended                =>",
    );
    // Later failures do not change the outcome.
    check(
        "Started       => reserve
         granted       => send Grant
         FirstToken    => first token 5
         request-ended => revoke, send Done, finish without kv
         Failed        =>
         cancel        =>
         closed        => close",
    );
}
