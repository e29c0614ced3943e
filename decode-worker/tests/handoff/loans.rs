//! Blocks that a decode worker lends for a measurement.

use std::time::Duration;

use baton_decode_worker::{loan::Lender, service::DecodeService};
use baton_handoff::Grant;
use baton_proto::{
    kv_format_to_proto,
    worker::{LendRequest, Loan, decode_client::DecodeClient, decode_server::DecodeServer},
};
use baton_worker_messages::grant_from_proto;
use tokio::{net::TcpListener, time::timeout};
use tonic::{
    Streaming,
    transport::{Channel, Server, server::TcpIncoming},
};

use crate::harness::{PATIENCE, TestWorker, decode, prefill, transports};

/// Borrows from `worker` over `client`. Returns one of the grants.
async fn borrow(worker: &TestWorker, client: &mut DecodeClient<Channel>) -> (Grant, Streaming<Loan>) {
    let kv_format = Some(kv_format_to_proto(worker.worker.kv_format()));
    let request = LendRequest { max_blocks: 4, kv_format };
    let mut stream = client.lend(request).await.expect("it lends").into_inner();
    let loan = timeout(PATIENCE, stream.message()).await.expect("in time").expect("no failure");
    let grant = loan.expect("a loan").grants.pop().expect("grants");
    (grant_from_proto(grant), stream)
}

/// Invariant 6: whatever its borrower does.
#[tokio::test(flavor = "multi_thread")]
async fn a_loan_ends_at_its_deadline() {
    for kind in transports() {
        let p = prefill().transport(kind).start().await;
        let d = decode().transport(kind).start().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("it is bound"));
        let service = DecodeService::new(d.worker.clone(), Duration::from_millis(300));
        let server = Server::builder().add_service(DecodeServer::new(service));
        let server = tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        let mut brief = DecodeClient::connect(address).await.expect("it listens");

        let (old, mut stream) = borrow(&d, &mut brief).await;
        d.assert_all_free().await;
        let end = timeout(PATIENCE, stream.message()).await.expect("in time").expect("no failure");
        assert_eq!(end, None, "{kind}");
        let route = async |grant: &Grant| {
            let sender = &p.worker.data_plane().sender;
            let route = sender.route(grant.access_key(), &grant.offers, ());
            timeout(PATIENCE, route).await.expect("in time")
        };
        assert!(route(&old).await.is_err(), "{kind}: a write under a grant of the ended loan is refused");

        // The next borrower gets a loan.
        drop(borrow(&d, &mut brief).await);
        d.assert_all_free().await;
        // As if its borrower took nothing of the stream: nothing polls it.
        let lender = Lender::new(d.worker.clone(), Duration::from_millis(300));
        let kv_format = Some(kv_format_to_proto(d.worker.kv_format()));
        let loan = lender.lend(LendRequest { max_blocks: 4, kv_format }, None).await.expect("it lends");
        d.assert_all_free().await;
        drop(loan);
        // One under the lease of production lasts long enough to be written.
        let mut client = d.client().await;
        let (grant, stream) = borrow(&d, &mut client).await;
        let opened = route(&grant).await.unwrap_or_else(|error| panic!("{kind}: {error}"));
        opened.close().await;
        drop(stream);
        d.assert_all_free().await;
        server.abort();
    }
}
