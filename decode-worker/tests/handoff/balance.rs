//! Requests that migrate for balance: both workers must grant it.

use baton_proto::{failure_from_status, worker as proto};
use baton_request::FailureKind;
use tonic::Status;

use crate::harness::{TestWorker, decode, expected, generate, prompt, request};

const NUM_PROMPT: usize = 20;
const NUM_ANSWER: usize = 6;

/// A request leaves `from` for balance and arrives at `to`.
async fn migrate(from: &TestWorker, to: &TestWorker) -> Result<(), Status> {
    migrate_from(from.peer(), to).await
}

async fn migrate_from(source: proto::PrefillPeer, to: &TestWorker) -> Result<(), Status> {
    let prompt = prompt(3, NUM_PROMPT);
    let request = proto::GenerateRequest {
        prefix_source: Some(source),
        for_balance: true,
        ..request(&prompt, NUM_ANSWER as u32, None)
    };
    let answer = generate(&to.client().await, request).await?;
    assert_eq!(answer.finished(), expected(&prompt, NUM_ANSWER));
    Ok(())
}

fn assert_refused(result: Result<(), Status>, why: &str) {
    let failure = failure_from_status(&result.expect_err("it is refused"));
    assert_eq!(failure.kind, FailureKind::MigrationRefused, "{failure:?}");
    assert!(failure.message.contains(why), "{failure:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn balance_does_not_undo_what_it_has_just_moved() {
    let [a, b, c, d] = ["d0", "d1", "d2", "d3"].map(|name| decode().named(name).start());
    let (a, b, c, d) = tokio::join!(a, b, c, d);
    migrate(&a, &b).await.expect("nothing has moved before");
    assert_refused(migrate(&b, &a).await, "worker d0: balance moved a request the other way");
    assert_refused(migrate(&c, &a).await, "worker d0: balance moved a request the other way");
    // The worker at which it arrives would take it; the one that it leaves took one itself.
    assert_refused(migrate(&b, &c).await, "worker d1: balance moved a request the other way");
    assert_refused(migrate(&a, &b).await, "worker d1: balance moved a request the same way");
    // What was refused has not arrived: the worker that would have taken it gives.
    migrate(&c, &d).await.expect("nothing has moved to or from either");
    for worker in [&a, &b, &c, &d] {
        worker.assert_all_free().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_cross_each_other_do_not_both_move() {
    let (a, b) = tokio::join!(decode().start(), decode().named("d1").start());
    let (there, back) = tokio::join!(migrate(&a, &b), migrate(&b, &a));
    assert!(there.is_err() || back.is_err(), "both have moved");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_stays_where_the_worker_that_it_leaves_cannot_be_asked() {
    let (mut a, b) = tokio::join!(decode().start(), decode().named("d1").start());
    let restarted = proto::PrefillPeer { incarnation: 1 ^ a.peer().incarnation, ..a.peer() };
    assert_refused(migrate_from(restarted, &b).await, "it has restarted");
    let (peer, c) = (a.peer(), decode().named("d2").start().await);
    a.kill();
    assert_refused(migrate_from(peer, &c).await, "worker d0: ");
    let unnamed = proto::GenerateRequest { for_balance: true, ..request(&[1, 2, 3], 2, None) };
    let status = generate(&c.client().await, unnamed).await.expect_err("nothing says where it runs");
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}
