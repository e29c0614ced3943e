//! Scripts for the prefill side. Each line is an input and the expected actions.
//! The sequence has 3 blocks of 4 tokens, of which the peer has cached 1, and 2 layers. The grant has generation 1.

use std::time::{Duration, Instant};

use baton_kv_layout::BlockId;
use baton_request::{Failure, FailureKind};

use crate::{Begin, DecodeMessage, Generation, Grant, Piece, PrefillMessage, Secret, Source, TransportKind};
use crate::{Limits, prefill::HandedOver};

use super::machines::prefill::{Action, Input, PrefillHandoff};
use crate::{PushError, Pushed, RouteError};

const LIMITS: Limits =
    Limits { total: Duration::from_secs(100), stall: Duration::from_secs(30), stop: Duration::from_secs(10) };

fn check(script: &str) {
    let mut now = Instant::now();
    let mut handoff = PrefillHandoff::new(7, 4, 2, LIMITS, now);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (input, expected) = line.split_once("=>").expect("input => actions");
        let input = parse(input.trim(), &mut now);
        let actions = handoff.on(input, now);
        assert_eq!(show(&actions), expected.trim(), "after `{line}` of {script}");
        assert_eq!(handoff.deadline().is_none(), handoff.is_over(), "after `{line}` of {script}");
    }
}

fn parse(input: &str, now: &mut Instant) -> Input {
    let mut words = input.split_whitespace();
    let message = match words.next().expect("an input") {
        "Begin" => DecodeMessage::Begin(begin(7, 11, 4)),
        "Begin-for-another" => DecodeMessage::Begin(begin(6, 11, 4)),
        // `begin TOKENS BLOCK_SIZE` and `grant CACHED BLOCKS`: the peer's blocks, of another size.
        "begin" => DecodeMessage::Begin(begin(7, number(&mut words), number(&mut words))),
        "fetch" => DecodeMessage::Fetch(begin(7, number(&mut words), number(&mut words))),
        "Done" => DecodeMessage::Done,
        "grant" => grant(number(&mut words), number(&mut words) as u32),
        "Grant" => grant(1, 2),
        "Grant-all-cached" => grant(3, 0),
        "Progress" => DecodeMessage::Progress,
        "Commit" => DecodeMessage::Commit { generation: Generation(1) },
        "Commit-stale" => DecodeMessage::Commit { generation: Generation(2) },
        "Cancel" => DecodeMessage::Cancel { reason: "client left".into() },
        "closed" => return Input::StreamClosed("reset".into()),
        "progress" => return Input::Progress,
        "started" => return Input::Started,
        // `held NUM_BLOCKS`: blocks from 10 on, as for `ready`.
        "held" => {
            let blocks = (0..number(&mut words) as u32).map(|n| BlockId(10 + n)).collect();
            return Input::Held { blocks };
        }
        // `ready LAYER FIRST_BLOCK NUM_BLOCKS`: the engine's blocks are 10 + position.
        "ready" => {
            let mut number = || number(&mut words);
            let (layer_idx, first_block_idx, num_blocks) = (number(), number(), number());
            let blocks = (first_block_idx..first_block_idx + num_blocks).map(|n| BlockId(10 + n as u32));
            return Input::Ready {
                layers: layer_idx..layer_idx + 1,
                first_block_idx,
                blocks: blocks.collect(),
            };
        }
        "token" => return Input::FirstToken(5),
        "routed" => return Input::Routed(Ok(())),
        "unroutable" => return Input::Routed(Err(RouteError::Unreachable("no".into()))),
        "pushed" => {
            let pieces: Vec<_> = words
                .map(|word| {
                    let (block_idx, layer_idx) = word.split_once('/').expect("block/layer");
                    let (block_idx, layer_idx) = (block_idx.parse().unwrap(), layer_idx.parse().unwrap());
                    Piece { block_idx, layer_idx, checksum: 0 }
                })
                .collect();
            let bytes = 10 * pieces.len() as u64;
            return Input::Pushed(Ok(Pushed { pieces, transport: TransportKind::Shm, bytes }));
        }
        "push-lost" => return Input::Pushed(Err(PushError::Lost("reset".into()))),
        "push-revoked" => return Input::Pushed(Err(PushError::Revoked)),
        "route-refused" => return Input::Routed(Err(RouteError::OtherIncarnation("d".into()))),
        "engine-failed" => return Input::Fail(Failure::new(FailureKind::Internal, "broken")),
        "idle" => return Input::Idle,
        "after" => {
            let seconds = words.next().and_then(|n| n.parse().ok()).expect("seconds");
            *now += Duration::from_secs(seconds);
            return Input::Tick;
        }
        other => panic!("unknown input {other}"),
    };
    Input::Message(message)
}

fn number<'a>(words: &mut impl Iterator<Item = &'a str>) -> usize {
    words.next().and_then(|n| n.parse().ok()).expect("a number")
}

fn begin(prefill_incarnation: u64, num_tokens: usize, block_size: usize) -> Begin {
    Begin {
        request_id: "r".into(),
        attempt: 0,
        prefill_incarnation,
        num_tokens,
        block_size,
        deadline: Duration::from_secs(90),
    }
}

fn grant(num_cached_blocks: usize, num_blocks: u32) -> DecodeMessage {
    let block_ids = (0..num_blocks).map(|n| BlockId(20 + n)).collect();
    DecodeMessage::Grant(Grant {
        generation: Generation(1),
        secret: Secret::default(),
        num_cached_blocks,
        block_ids,
        offers: vec![],
    })
}

fn source(source: &Source) -> String {
    let blocks: Vec<String> = source.blocks().iter().map(ToString::to_string).collect();
    match source {
        Source::Block(_) => blocks.concat(),
        Source::Tokens { tokens, .. } => format!("{}[{}..{}]", blocks.join("+"), tokens.start, tokens.end),
    }
}

fn show(actions: &[Action]) -> String {
    let shown: Vec<String> = actions.iter().map(show_one).collect();
    shown.join(", ")
}

fn show_one(action: &Action) -> String {
    match action {
        Action::Compute => "compute".into(),
        Action::Hold => "hold".into(),
        Action::Route { .. } => "route".into(),
        Action::Push(pieces) => {
            let pieces: Vec<_> = pieces
                .iter()
                .map(|p| format!("{}>{}@{}/{}", source(&p.src), p.dst, p.block_idx, p.layer_idx))
                .collect();
            format!("push {}", pieces.join(" "))
        }
        Action::Send(PrefillMessage::Started) => "send Started".into(),
        Action::Send(PrefillMessage::Held { num_tokens }) => format!("send Held {num_tokens}"),
        Action::Send(PrefillMessage::FirstToken(token)) => format!("send FirstToken {token}"),
        Action::Send(PrefillMessage::Written(written)) => {
            let last = if written.last { " last" } else { "" };
            let num_pieces = written.pushed.as_ref().map_or(0, |pushed| pushed.pieces.len());
            format!("send Written {num_pieces} pieces{last}")
        }
        Action::Send(PrefillMessage::Stopped) => "send Stopped".into(),
        Action::Send(PrefillMessage::Failed(failed)) => format!("send Failed {:?}", failed.kind),
        Action::Finish(Ok(HandedOver::Committed)) => "finish well".into(),
        Action::Finish(Ok(HandedOver::Ended)) => "finish without kv".into(),
        Action::Finish(Err(error)) => format!("finish {}", error.label()),
        Action::Stop => "stop".into(),
        Action::Release => "release".into(),
        Action::Send(PrefillMessage::Progress) => "send Progress".into(),
        Action::Close => "close".into(),
    }
}

#[test]
fn pieces_are_pushed_layer_by_layer_as_they_become_ready() {
    check(
        "Begin           => compute
         started         => send Started
         Grant           => route
         routed          =>
         ready 0 0 3     => push b11>b20@0/0 b12>b21@1/0
         ready 1 0 3     => push b11>b20@0/1 b12>b21@1/1
         token           => send FirstToken 5
         pushed 0/0 1/0  => send Written 2 pieces
         pushed 0/1 1/1  => send Written 2 pieces last
         Commit          => finish well, release, close",
    );
}

#[test]
fn pieces_that_are_ready_before_the_grant_are_kept_for_one_push() {
    check(
        "Begin           => compute
         started         => send Started
         ready 0 0 3     =>
         ready 1 0 3     =>
         token           => send FirstToken 5
         Grant           => route
         routed          => push b11>b20@0/0 b12>b21@1/0 b11>b20@0/1 b12>b21@1/1
         pushed 0/0 1/0 0/1 1/1 => send Written 4 pieces last
         Commit          => finish well, release, close",
    );
}

#[test]
fn the_last_piece_may_be_written_before_the_token_is_sampled() {
    check(
        "Begin           => compute
         started         => send Started
         Grant           => route
         ready 0 1 2     =>
         ready 1 1 2     =>
         routed          => push b11>b20@0/0 b12>b21@1/0 b11>b20@0/1 b12>b21@1/1
         pushed 0/0 1/0 0/1 1/1 => send Written 4 pieces last
         token           => send FirstToken 5
         Commit          => finish well, release, close",
    );
}

#[test]
fn pieces_that_become_ready_while_the_route_is_full_share_the_next_push() {
    check(
        "Begin           => compute
         started         => send Started
         Grant           => route
         routed          =>
         ready 0 1 1     => push b11>b20@0/0
         ready 0 1 1     =>
         ready 0 2 1     => push b12>b21@1/0
         ready 1 1 1     => push b11>b20@0/1
         ready 0 0 3     =>
         ready 1 2 1     => push b12>b21@1/1",
    );
}

#[test]
fn a_larger_peer_block_waits_for_all_own_blocks_with_its_tokens() {
    // 13 tokens: here | 0-3 | 4-7 | 8-11 | 12 |, there | 0-5 | 6-11 | 12 |.
    check(
        "begin 13 6      => compute
         started         => send Started
         grant 0 3       => route
         routed          =>
         ready 0 0 1     =>
         ready 0 1 2     => push b10+b11[0..6]>b20@0/0 b11+b12[6..12]>b21@1/0
         ready 1 0 2     => push b10+b11[0..6]>b20@0/1
         ready 0 3 1     => push b13[12..13]>b22@2/0
         ready 1 2 1     => push b11+b12[6..12]>b21@1/1
         ready 1 3 1     =>
         token           => send FirstToken 5
         pushed 0/0 1/0  => send Written 2 pieces, push b13[12..13]>b22@2/1
         pushed 0/1      => send Written 1 pieces
         pushed 2/0 1/1  => send Written 2 pieces
         pushed 2/1      => send Written 1 pieces last
         Commit          => finish well, release, close",
    );
}

#[test]
fn smaller_peer_blocks_complete_several_at_a_time() {
    // 7 tokens: here | 0-3 | 4-6 |, there | 0 1 | 2 3 | 4 5 | 6 |, the first of them cached there.
    check(
        "begin 7 2       => compute
         started         => send Started
         ready 0 0 1     =>
         grant 1 3       => route
         routed          => push b10[2..4]>b20@0/0
         ready 1 0 2     => push b10[2..4]>b20@0/1 b11[4..6]>b21@1/1 b11[6..7]>b22@2/1
         ready 0 1 1     => push b11[4..6]>b21@1/0 b11[6..7]>b22@2/0",
    );
}

#[test]
fn a_grant_is_counted_in_the_peers_blocks() {
    for grant in ["grant 0 4", "grant 3 1", "grant 0 2", "grant 18446744073709551615 3"] {
        check(&format!(
            "begin 13 6  => compute
             started     => send Started
             {grant}     => send Failed Internal, finish decode_lost, stop
             idle        => send Stopped, release, close"
        ));
    }
}

#[test]
fn a_peer_with_every_block_cached_is_told_that_nothing_follows() {
    check(
        "Begin            => compute
         started          => send Started
         Grant-all-cached => route
         routed           => send Written 0 pieces last
         ready 0 0 3      =>
         token            => send FirstToken 5
         Commit           => finish well, release, close",
    );
}

#[test]
fn a_begin_meant_for_another_incarnation_is_refused() {
    check("Begin-for-another => send Failed PrefillLost, finish refused, send Stopped, close");
}

#[test]
fn a_cancel_before_the_engine_started_releases_everything() {
    check("Cancel => finish cancelled, send Stopped, close");
    check(
        "Begin   => compute
         Cancel  => finish cancelled, stop
         idle    => send Stopped, release, close",
    );
}

#[test]
fn a_cancel_is_answered_after_the_last_write() {
    check(
        "Begin        => compute
         started      => send Started
         Grant        => route
         routed       =>
         ready 0 0 3  => push b11>b20@0/0 b12>b21@1/0
         Cancel       => finish cancelled, stop
         ready 1 0 3  =>
         token        =>
         push-revoked =>
         idle         => send Stopped, release, close
         idle         =>",
    );
}

#[test]
fn messages_out_of_order_fail_the_handoff() {
    check("Grant   => send Failed Internal, finish decode_lost, send Stopped, close");
    check("Commit  => send Failed Internal, finish decode_lost, send Stopped, close");
    // A grant answers `Started`.
    for message in ["Begin", "Commit", "Grant"] {
        check(&format!(
            "Begin       => compute
             {message}   => send Failed Internal, finish decode_lost, stop
             idle        => send Stopped, release, close"
        ));
    }
    for message in ["Grant", "Begin", "Commit-stale"] {
        check(&format!(
            "Begin       => compute
             started     => send Started
             Grant       => route
             routed      =>
             {message}   => send Failed Internal, finish decode_lost, stop
             idle        => send Stopped, release, close"
        ));
    }
}

#[test]
fn a_commit_of_another_generation_frees_nothing() {
    check(
        "Begin            => compute
         started          => send Started
         Grant-all-cached => route
         routed           => send Written 0 pieces last
         token            => send FirstToken 5
         Commit-stale     => send Failed Internal, finish decode_lost, stop
         idle             => send Stopped, release, close",
    );
}

#[test]
fn a_broken_stream_stops_the_work_and_sends_nothing() {
    check("closed => finish decode_lost, close");
    check(
        "Begin        => compute
         started      => send Started
         Grant        => route
         closed       => finish decode_lost, stop
         routed       =>
         idle         => release, close",
    );
    check(
        "Begin        => compute
         Cancel       => finish cancelled, stop
         closed       =>
         idle         => release, close",
    );
}

#[test]
fn a_failure_of_this_side_is_reported_to_the_peer() {
    check(
        "Begin          => compute
         engine-failed  => send Failed Internal, finish refused, stop
         idle           => send Stopped, release, close",
    );
    check(
        "Begin          => compute
         started        => send Started
         Grant          => route
         unroutable     => send Failed PrefillLost, finish transfer_failed, stop
         idle           => send Stopped, release, close",
    );
    check(
        "Begin          => compute
         started        => send Started
         Grant          => route
         routed         =>
         ready 0 0 3    => push b11>b20@0/0 b12>b21@1/0
         push-lost      => send Failed PrefillLost, finish transfer_failed, stop
         idle           => send Stopped, release, close",
    );
    check(
        "Begin          => compute
         ready 0 3 1    => send Failed Internal, finish refused, stop
         idle           => send Stopped, release, close",
    );
}

#[test]
fn every_state_has_a_deadline() {
    check("after 29 =>\n after 1 => send Failed Deadline, finish deadline, send Stopped, close");
    check(
        "Begin       => compute
         after 89    =>
         after 1     => send Failed Deadline, finish deadline, stop
         after 9     =>
         after 1     => release, close
         idle        =>",
    );
    // Progress of the engine, for any request, restarts the deadline until the first token.
    check(
        "Begin       => compute
         after 89    =>
         progress    => send Progress
         after 89    =>
         started     => send Started
         progress    => send Progress
         after 89    =>
         token       => send FirstToken 5
         progress    =>
         after 23    =>
         after 1     => send Failed Deadline, finish deadline, stop
         progress    =>
         idle        => send Stopped, release, close",
    );
    check(
        "progress           =>
         fetch 12 4  => hold
         progress           =>
         after 90           => send Failed Deadline, finish deadline, stop
         idle               => send Stopped, release, close",
    );
    // Computing has no stall deadline. A route with pushes in flight has.
    check(
        "Begin       => compute
         started     => send Started
         Grant       => route
         after 20    =>
         routed      =>
         after 40    =>
         ready 0 0 3 => push b11>b20@0/0 b12>b21@1/0
         after 20    =>
         ready 1 0 3 => push b11>b20@0/1 b12>b21@1/1
         after 9     =>
         after 1     => send Failed Deadline, finish deadline, stop
         idle        => send Stopped, release, close",
    );
    // Written pieces restart both.
    check(
        "Begin           => compute
         started         => send Started
         Grant           => route
         routed          =>
         after 89        =>
         ready 0 0 3     => push b11>b20@0/0 b12>b21@1/0
         ready 1 0 3     => push b11>b20@0/1 b12>b21@1/1
         token           => send FirstToken 5
         pushed 0/0 1/0  => send Written 2 pieces
         after 29        =>
         pushed 0/1 1/1  => send Written 2 pieces last
         after 29        =>
         after 1         => send Failed Deadline, finish deadline, stop
         idle            => send Stopped, release, close",
    );
    check(
        "Begin       => compute
         started     => send Started
         Grant       => route
         after 30    => send Failed Deadline, finish deadline, stop
         idle        => send Stopped, release, close",
    );
    check(
        "Begin            => compute
         started          => send Started
         Grant-all-cached => route
         routed           => send Written 0 pieces last
         token            => send FirstToken 5
         after 29         =>
         after 1          => send Failed Deadline, finish deadline, stop
         idle             => send Stopped, release, close",
    );
}

#[test]
fn progress_of_a_decode_worker_that_waits_for_blocks_restarts_the_deadline() {
    check(
        "Begin       => compute
         started     => send Started
         token       => send FirstToken 5
         after 89    =>
         Progress    =>
         after 112   =>
         Progress    =>
         after 112   =>
         after 1     => send Failed Deadline, finish deadline, stop
         Progress    =>
         idle        => send Stopped, release, close",
    );
    for before in ["", "started => send Started"] {
        check(&format!(
            "Begin       => compute
             {before}
             Progress    => send Failed Internal, finish decode_lost, stop
             idle        => send Stopped, release, close"
        ));
    }
}

#[test]
fn cached_blocks_are_handed_over_and_nothing_is_computed() {
    check(
        "fetch 12 4 => hold
         held 2            => send Held 8
         grant 1 1         => route
         routed            => push b11>b20@0/0 b11>b20@0/1
         pushed 0/0 0/1    => send Written 2 pieces last
         Commit            => finish well, release, close",
    );
    // Blocks of another size: two of 4 tokens cover one of 6.
    check(
        "fetch 12 6 => hold
         held 2            => send Held 6
         grant 0 1         => route
         routed            => push b10+b11[0..6]>b20@0/0 b10+b11[0..6]>b20@0/1
         pushed 0/0 0/1    => send Written 2 pieces last
         Commit            => finish well, release, close",
    );
}

#[test]
fn a_worker_without_cached_blocks_reports_none() {
    check(
        "fetch 12 4 => hold
         held 0            => send Held 0
         Cancel            => finish cancelled, stop
         idle              => send Stopped, release, close",
    );
}

#[test]
fn a_grant_that_does_not_match_the_held_blocks_is_refused() {
    check(
        "fetch 12 4 => hold
         grant 0 3         => send Failed Internal, finish decode_lost, stop",
    );
    check(
        "fetch 12 4 => hold
         held 2            => send Held 8
         grant 0 3         => send Failed Internal, finish decode_lost, stop",
    );
}

#[test]
fn a_request_that_its_first_token_ends_frees_its_blocks_and_succeeds() {
    check(
        "Begin           => compute
         started         => send Started
         Grant           => route
         routed          =>
         ready 0 0 3     => push b11>b20@0/0 b12>b21@1/0
         ready 1 0 3     => push b11>b20@0/1 b12>b21@1/1
         token           => send FirstToken 5
         Done            => finish without kv, stop
         pushed 0/0 1/0  =>
         idle            => send Stopped, release, close",
    );
    // Before the grant, or after the last piece.
    check(
        "Begin           => compute
         started         => send Started
         token           => send FirstToken 5
         Done            => finish without kv, stop
         after 10        => release, close",
    );
    check(
        "Begin            => compute
         started          => send Started
         Grant-all-cached => route
         routed           => send Written 0 pieces last
         token            => send FirstToken 5
         Done             => finish without kv, stop
         closed           =>
         idle             => release, close",
    );
}

#[test]
fn done_without_a_first_token_fails_the_handoff() {
    check("Done => send Failed Internal, finish decode_lost, send Stopped, close");
    check(
        "Begin   => compute
         started => send Started
         Done    => send Failed Internal, finish decode_lost, stop",
    );
    check(
        "fetch 12 4 => hold
         held 2     => send Held 8
         Done       => send Failed Internal, finish decode_lost, stop",
    );
}

#[test]
fn a_revoked_grant_waits_for_the_reason() {
    let granted = "Begin          => compute
         started        => send Started
         Grant          => route";
    let pushing = "routed         =>
         ready 0 0 3    => push b11>b20@0/0 b12>b21@1/0";
    let held = "fetch 12 4     => hold
         held 2         => send Held 8
         grant 1 1      => route";
    let before_the_token = [
        format!("{granted}\n route-refused =>"),
        format!("{granted}\n {pushing}\n push-revoked =>"),
        // The next layer is not pushed.
        format!("{granted}\n {pushing}\n push-revoked =>\n ready 1 0 3 =>"),
        // The answers to other pushes do not matter.
        format!(
            "{granted}\n {pushing}
             ready 1 0 3    => push b11>b20@0/1 b12>b21@1/1
             push-revoked   =>
             push-revoked   =>"
        ),
        format!(
            "{granted}\n {pushing}
             ready 1 0 3    => push b11>b20@0/1 b12>b21@1/1
             push-revoked   =>
             pushed 0/1 1/1 =>"
        ),
        format!("{held}\n route-refused =>"),
        format!("{held}\n routed => push b11>b20@0/0 b11>b20@0/1\n push-revoked =>"),
    ];
    let token = "token          => send FirstToken 5";
    let after_the_token = [
        format!("{granted}\n {token}\n route-refused =>"),
        format!("{granted}\n {pushing}\n {token}\n push-revoked =>"),
        format!("{granted}\n {pushing}\n push-revoked =>\n {token}"),
    ];
    for gone in &after_the_token {
        check(&format!(
            "{gone}
             Done           => finish without kv, stop
             idle           => send Stopped, release, close"
        ));
    }
    for gone in before_the_token.iter().chain(&after_the_token) {
        check(&format!(
            "{gone}
             Cancel         => finish cancelled, stop
             idle           => send Stopped, release, close"
        ));
        check(&format!(
            "{gone}
             closed         => finish decode_lost, stop
             idle           => release, close"
        ));
        check(&format!(
            "{gone}
             after 0        =>
             after 1        => send Failed PrefillLost, finish transfer_failed, stop
             idle           => send Stopped, release, close"
        ));
    }
}
