//! Streams begin in the journal, and are taken from it again.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use baton_journal::{AcceptError, Acceptance, Journal, ResumeError};
use baton_proto::worker::Token;
use baton_request::Request;
use prost::Message;

use super::{
    Caller, Core, CoreError, DurableCall, Events, PreparedRequest, ReadBody,
    durable::{DurableSession, Kept, Resumption},
};

/// A request whose key gets its tokens back when the journal refuses it, or its client leaves meanwhile.
struct Unpaid<'a>(&'a PreparedRequest);

impl Drop for Unpaid<'_> {
    fn drop(&mut self) {
        self.0.refund();
    }
}

impl Core {
    /// Begins a request whose answer is streamed. With a journal, a request of one choice is journalled before it begins: when its
    /// client or the router is lost, its stream can be resumed.
    ///
    /// # Errors
    /// As [`generate`](Core::generate); and when the journal is full or cannot be written.
    pub async fn stream(self: &Arc<Self>, request: PreparedRequest) -> Result<Events, CoreError> {
        let permit = self.room_for(&request)?;
        let (active, session) = match self.journal.as_deref().zip(request.arrival.durable.as_deref()) {
            Some((journal, DurableCall { resumption: Some(resumption), .. })) => {
                let session = take(journal, resumption).await?;
                (self.enter(&request, Some(&session))?, Some(session))
            }
            Some((journal, call)) if request.is_one_choice() => {
                // First: a request that is refused changes nothing in the journal.
                let active = self.enter(&request, None)?;
                let unpaid = Unpaid(&request);
                let session = self.accept(journal, &request, call).await?;
                std::mem::forget(unpaid);
                (active, Some(session))
            }
            _ => (self.enter(&request, None)?, None),
        };
        Ok(self.begin(request, session, active, permit))
    }

    async fn accept(
        &self,
        journal: &Journal,
        request: &PreparedRequest,
        call: &DurableCall,
    ) -> Result<DurableSession, CoreError> {
        let model = self.model()?;
        let ReadBody { bytes, room } = call.take_body().expect("a call begins one stream");
        let kept = Kept {
            request: Some((&request.prompts[0]).into()),
            created: request.arrival.created(),
            model: model.name.clone(),
            vocab_size: model.vocab_size as u64,
            making_of_events: model.making_of_events(),
        };
        let acceptance = Acceptance {
            id: request.arrival.caller.qualified(&request.id),
            owner: owner_of(&request.arrival.caller),
            endpoint: call.endpoint.clone(),
            body: bytes.into(),
            prepared: kept.encode_to_vec(),
        };
        let writer = journal.accept(acceptance).await.map_err(|error| match error {
            // It does not run here: this request has entered. The journal's id has the tenant.
            AcceptError::Exists { .. } => CoreError::Parked { id: request.id.clone() },
            AcceptError::Full { .. } | AcceptError::Behind { .. } | AcceptError::Write(_) => {
                CoreError::unavailable(error.to_string())
            }
        })?;
        drop(room);
        Ok(DurableSession { writer, replay: None, ending: None })
    }

    /// Finds a stream of this caller in the journal. Its call, with this body, is to be served like any other: it goes on where the stream
    /// was. When that begins, another connection that still has the stream gets no more of it.
    ///
    /// # Errors
    /// Without a journal, without such a stream of this tenant in it, when it was made for another model, or without room to read it.
    pub async fn find_stream(&self, caller: &Caller, id: &str) -> Result<(DurableCall, ReadBody), CoreError> {
        let Some(journal) = &self.journal else {
            return Err(CoreError::Invalid {
                message: "this router keeps no journal (--durable): streams cannot be resumed".to_owned(),
                param: None,
                code: Some("stream_not_durable"),
            });
        };
        let model = self.model()?;
        let (qualified, room) = (caller.qualified(id), self.body_room());
        // Before it is read: its records, and what is made of them. One stream may take half of the room of all.
        room.grow((2 * journal.num_bytes(&qualified)).min(self.config.max_bodies_bytes / 2))?;
        let session = journal.find(&qualified, owner_of(caller).as_deref()).await?;
        let kept = Kept::decode(&*session.acceptance.prepared).map_err(|_| broken(id))?;
        if (&*kept.model, kept.vocab_size) != (&model.name, model.vocab_size as u64) {
            return Err(CoreError::Invalid {
                message: format!(
                    "the stream {id:?} is one of the model {:?}, this is {:?}",
                    kept.model, model.name
                ),
                param: None,
                code: Some("model_mismatch"),
            });
        }
        let request = kept.request.as_ref().and_then(|message| Request::try_from(message).ok());
        let request = request.ok_or_else(|| broken(id))?;
        let body = ReadBody { bytes: session.acceptance.body.clone().into(), room: room.clone() };
        let endpoint = session.acceptance.endpoint.clone();
        let resumption = Resumption {
            id: id.to_owned(),
            is_renumbered: kept.making_of_events != model.making_of_events(),
            kept,
            request,
            found: Mutex::new(Some((session, room))),
        };
        Ok((DurableCall::resumed(endpoint, resumption), body))
    }

    /// Aborts a request of this caller that runs here, or whose stream is parked; whether there was one.
    pub fn abort(&self, caller: &Caller, id: &str) -> bool {
        self.active.abort(caller.tenant(), id)
            || self.journal.as_ref().is_some_and(|journal| journal.abort(&caller.qualified(id)))
    }
}

/// Takes a stream that was found, with all that the journal has of it by now.
async fn take(journal: &Journal, resumption: &Resumption) -> Result<DurableSession, CoreError> {
    let found = resumption.found.lock().unwrap_or_else(PoisonError::into_inner).take();
    let (found, _room) = found.expect("a call begins one stream");
    let (session, writer) = journal.take(found).await?;
    let id = &resumption.id;
    let replay: Result<VecDeque<Token>, _> =
        session.tokens.iter().map(|token| Token::decode(&**token)).collect();
    let replay = replay.map_err(|_| broken(id))?;
    tracing::info!(request = id, tokens = replay.len(), ended = session.ending.is_some(), "stream resumed");
    Ok(DurableSession { writer, replay: Some(replay), ending: session.ending })
}

fn broken(id: &str) -> CoreError {
    CoreError::internal(format!("the journal of {id:?} holds no request"))
}

fn owner_of(caller: &Caller) -> Option<String> {
    Some(caller.tenant()).filter(|tenant| !tenant.is_empty()).map(str::to_owned)
}

impl PreparedRequest {
    /// Only then the order of tokens says the order of events. Scores of a prompt are no tokens.
    fn is_one_choice(&self) -> bool {
        self.n == 1 && matches!(&self.prompts[..], [prompt] if prompt.sampling.prompt_logprobs.is_none())
    }
}

impl From<ResumeError> for CoreError {
    fn from(error: ResumeError) -> CoreError {
        let message = error.to_string();
        match error {
            ResumeError::Unknown { .. } => {
                CoreError::NotFound { message, param: None, code: Some("stream_not_found") }
            }
            ResumeError::Replaced { .. } => CoreError::Replaced,
            ResumeError::Read { .. } => CoreError::internal(message),
        }
    }
}
