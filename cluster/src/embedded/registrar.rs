//! The worker's side: holds the stream open, and opens it again whenever it ends.

use std::time::Duration;

use baton_proto::worker::{self as proto, registry_client::RegistryClient};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    transport::Channel,
};

use crate::{
    Dialer, DiscoveryError, RegistrationKey, RegistrationState, WorkerRecord,
    backoff::Backoff,
    config::{ROUTER, url},
    registration_state::StateReport,
};

/// A router that accepts a connection and then stays silent counts as unreachable.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const BACKOFF_LIMIT: Duration = Duration::from_secs(2);

/// Registers one worker with one router.
pub(crate) struct Registrar {
    channel: Channel,
    /// Shows the worker's API key.
    authorization: Option<MetadataValue<Ascii>>,
    record: WorkerRecord,
    report: StateReport,
}

/// Why a session ended.
enum End {
    Withdrawn,
    Lost(Status),
    /// The router ended the stream, as a router does that shuts down.
    Closed,
    Refused(String),
}

impl Registrar {
    pub(crate) fn new(
        router: &str,
        key: Option<&RegistrationKey>,
        record: WorkerRecord,
        report: StateReport,
        dialer: &Dialer,
    ) -> Result<Registrar, DiscoveryError> {
        url(ROUTER, router)?;
        let endpoint = dialer
            .endpoint(router)
            .map_err(|error| DiscoveryError::Config(format!("{ROUTER}: {error}")))?
            .connect_timeout(Duration::from_secs(2))
            .http2_keep_alive_interval(Duration::from_secs(1))
            .keep_alive_timeout(Duration::from_secs(2))
            .keep_alive_while_idle(true);
        let authorization = key.map(RegistrationKey::header).transpose()?;
        Ok(Registrar { channel: dialer.dial(endpoint).channel, authorization, record, report })
    }

    pub(crate) async fn run(mut self, withdraw: CancellationToken) {
        let mut backoff = Backoff::new(BACKOFF_LIMIT);
        loop {
            match self.session(&withdraw, &mut backoff).await {
                End::Withdrawn => return,
                End::Lost(status) => self.report.searching(problem(&status)),
                End::Closed => self.report.router_left(),
                End::Refused(reason) => self.report.set(RegistrationState::Refused(reason)),
            }
            tokio::select! {
                () = withdraw.cancelled() => return,
                () = sleep(backoff.next()) => {}
            }
        }
    }

    async fn session(&mut self, withdraw: &CancellationToken, backoff: &mut Backoff) -> End {
        // One message: the record. Dropping the sender ends the stream.
        let (records, outbound) = mpsc::channel(1);
        let record = proto::WorkerRecord::from(&self.record);
        records.try_send(record).expect("the channel is new and has room for one");
        let mut client = RegistryClient::new(self.channel.clone());
        let mut request = Request::new(ReceiverStream::new(outbound));
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        let opened = tokio::select! {
            () = withdraw.cancelled() => return End::Withdrawn,
            opened = timeout(ANSWER_TIMEOUT, async {
                let mut answers = client.register(request).await?.into_inner();
                let first = answers.message().await?;
                Ok::<_, Status>((answers, first))
            }) => opened,
        };
        let mut answers = match opened {
            Err(_) => return End::Lost(Status::deadline_exceeded("the router does not answer")),
            Ok(Err(status)) => return End::Lost(status),
            Ok(Ok((_, None))) => return End::Lost(Status::unavailable("the router closed the stream")),
            Ok(Ok((_, Some(first)))) if !first.refused.is_empty() => return End::Refused(first.refused),
            Ok(Ok((answers, Some(_)))) => answers,
        };
        backoff.reset();
        // Invariant 11: the router has answered, so it knows the record.
        self.report.set(RegistrationState::Registered);
        loop {
            tokio::select! {
                () = withdraw.cancelled() => {
                    // Half-closing ends the lease. The router confirms by ending its side of the stream.
                    drop(records);
                    let _ = timeout(ANSWER_TIMEOUT, async { while let Ok(Some(_)) = answers.message().await {} }).await;
                    return End::Withdrawn;
                }
                answer = answers.message() => match answer {
                    Ok(Some(answer)) if answer.refused.is_empty() => {}
                    Ok(Some(answer)) => return End::Refused(answer.refused),
                    Ok(None) => return End::Closed,
                    Err(status) => return End::Lost(status),
                }
            }
        }
    }
}

/// Why the router does not answer as it should, with the option to change if it is the key.
fn problem(status: &Status) -> String {
    let message = status.message();
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied if message.contains("API key") => {
            format!("{message}; give this worker a key of role worker with --api-key (BATON_API_KEY)")
        }
        _ => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_refused_names_its_option() {
        let refused = Status::permission_denied("workers register with an API key of their own");
        assert!(problem(&refused).ends_with("--api-key (BATON_API_KEY)"), "{}", problem(&refused));
        assert_eq!(problem(&Status::unavailable("no API key was read")), "no API key was read");
        assert_eq!(problem(&Status::unauthenticated("a certificate")), "a certificate");
    }
}
