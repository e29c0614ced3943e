//! Streams begin in the journal, and are taken from it again.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use baton_journal::{AcceptError, Acceptance, Journal, ResumeError, Session};
use baton_proto::worker::Token;
use baton_request::Request;
use prost::Message;

use super::{
    Caller, Core, CoreError, DurableCall, Events, PreparedRequest,
    durable::{DurableSession, Kept, Resumption},
};

impl Core {
    /// Begins a request whose answer is streamed. With a journal, a request of one choice is journalled before it begins: when its
    /// client or the router is lost, its stream can be resumed.
    ///
    /// # Errors
    /// As [`generate`](Core::generate); and when the journal is full or cannot be written.
    pub async fn stream(self: &Arc<Self>, request: PreparedRequest) -> Result<Events, CoreError> {
        let session = match (&self.journal, &request.arrival.durable) {
            (Some(journal), Some(call)) => match &call.resumption {
                Some(resumption) => {
                    let mut session = resumption.session.lock().unwrap_or_else(PoisonError::into_inner);
                    Some(session.take().expect("a call begins one stream"))
                }
                None if request.is_one_choice() => Some(self.accept(journal, &request, call).await?),
                None => None,
            },
            _ => None,
        };
        self.begin(request, session)
    }

    async fn accept(
        &self,
        journal: &Journal,
        request: &PreparedRequest,
        call: &DurableCall,
    ) -> Result<DurableSession, CoreError> {
        let model = self.model()?;
        let kept = Kept {
            request: Some((&request.prompts[0]).into()),
            created: request.arrival.created(),
            model: model.name.clone(),
            vocab_size: model.vocab_size as u64,
        };
        let acceptance = Acceptance {
            id: request.arrival.caller.qualified(&request.id),
            owner: owner_of(&request.arrival.caller),
            endpoint: call.endpoint.clone(),
            body: call.body.clone(),
            prepared: kept.encode_to_vec(),
        };
        let writer = journal.accept(acceptance).await?;
        Ok(DurableSession { writer, replay: None, ending: None })
    }

    /// Takes a stream of this caller from the journal. Its call is to be served like any other: it goes on where the stream was. Another
    /// connection that still has the stream gets no more of it.
    ///
    /// # Errors
    /// Without a journal, without such a stream of this tenant in it, or when it was made for another model.
    pub async fn resume(&self, caller: &Caller, id: &str) -> Result<DurableCall, CoreError> {
        let Some(journal) = &self.journal else {
            return Err(CoreError::Invalid {
                message: "this router keeps no journal (--durable): streams cannot be resumed".to_owned(),
                param: None,
                code: Some("stream_not_durable"),
            });
        };
        let model = self.model()?;
        let resumed = journal.resume(&caller.qualified(id), owner_of(caller).as_deref()).await?;
        let (Session { acceptance, tokens, ending }, writer) = resumed;
        let broken = || CoreError::internal(format!("the journal of {id:?} holds no request"));
        let kept = Kept::decode(&*acceptance.prepared).map_err(|_| broken())?;
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
        let request = request.ok_or_else(broken)?;
        let replay: Result<VecDeque<Token>, _> = tokens.iter().map(|token| Token::decode(&**token)).collect();
        let replay = replay.map_err(|_| broken())?;
        tracing::info!(request = id, tokens = replay.len(), ended = ending.is_some(), "stream resumed");
        let session = DurableSession { writer, replay: Some(replay), ending };
        Ok(DurableCall {
            endpoint: acceptance.endpoint,
            body: acceptance.body,
            num_delivered: 0,
            resumption: Some(Resumption {
                id: id.to_owned(),
                kept,
                request,
                session: Mutex::new(Some(session)),
            }),
        })
    }

    /// Aborts a request of this caller that runs here, or whose stream is parked; whether there was one.
    pub fn abort(&self, caller: &Caller, id: &str) -> bool {
        self.active.abort(caller.tenant(), id)
            || self.journal.as_ref().is_some_and(|journal| journal.abort(&caller.qualified(id)))
    }
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

impl From<AcceptError> for CoreError {
    fn from(error: AcceptError) -> CoreError {
        match error {
            AcceptError::Exists { id } => CoreError::Duplicate { id },
            AcceptError::Full { .. } | AcceptError::Behind { .. } | AcceptError::Write(_) => {
                CoreError::unavailable(error.to_string())
            }
        }
    }
}

impl From<ResumeError> for CoreError {
    fn from(error: ResumeError) -> CoreError {
        let message = error.to_string();
        match error {
            ResumeError::Unknown { .. } => {
                CoreError::NotFound { message, param: None, code: Some("stream_not_found") }
            }
            ResumeError::Read { .. } => CoreError::internal(message),
        }
    }
}
