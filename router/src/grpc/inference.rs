//! `baton.v1.Inference`: a thin shell over the core.

use std::{collections::VecDeque, pin::Pin, sync::Arc};

use baton_proto::v1::{
    AbortRequest, AbortResponse, GenerateRequest, GenerateResponse, LoadsRequest, LoadsResponse,
    ModelInfoRequest, ModelInfoResponse, WorkerLoad, inference_server,
};
use futures_util::Stream;
use tonic::{Request, Response, Status};

use super::convert::{call_id, input, responses, status};
use baton_router_core::{Core, Events, PromptInput, RequestArrival};
use baton_tools::ChatAnswer;

/// Serves `Inference`.
#[derive(Debug)]
pub(super) struct Inference {
    core: Arc<Core>,
}

impl Inference {
    pub(super) fn new(core: Arc<Core>) -> Inference {
        Inference { core }
    }
}

/// Events that become responses; one event may become two.
struct Outgoing {
    id: String,
    events: Events,
    /// Of each choice of a chat.
    answers: Vec<ChatAnswer>,
    ready: VecDeque<GenerateResponse>,
    over: bool,
}

impl Outgoing {
    async fn next(&mut self) -> Option<Result<GenerateResponse, Status>> {
        loop {
            if let Some(response) = self.ready.pop_front() {
                return Some(Ok(response));
            }
            if self.over {
                return None;
            }
            match self.events.next().await? {
                Ok(event) => {
                    let answer = self.answers.get_mut(event.index as usize);
                    let parts = answer.map(|answer| answer.read(&event.text, event.finish.is_some()));
                    let extras = || self.events.extras();
                    self.ready.extend(responses(&self.id, event, parts.unwrap_or_default(), extras));
                }
                Err(error) => {
                    self.over = true;
                    return Some(Err(status(error)));
                }
            }
        }
    }
}

#[tonic::async_trait]
impl inference_server::Inference for Inference {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let arrival =
            request.extensions().get::<RequestArrival>().expect("the edge observes every call").clone();
        let request = request.into_inner();
        let id = match request.request_id.as_str() {
            "" => uuid::Uuid::new_v4().to_string(),
            id => id.to_owned(),
        };
        let input = input(request, id.clone(), arrival).map_err(status)?;
        let is_chat = matches!(input.prompts[..], [PromptInput::Chat(_)]);
        let request = self.core.prepare(input).await.map_err(status)?;
        let num_chats = if is_chat { request.n as usize } else { 0 };
        let answers = vec![ChatAnswer::new(request.reader.clone(), call_id); num_chats];
        let events = self.core.generate(request).map_err(status)?;
        let outgoing = Outgoing { id, events, answers, ready: VecDeque::new(), over: false };
        let stream = futures_util::stream::unfold(outgoing, |mut outgoing| async move {
            let response = outgoing.next().await?;
            Some((response, outgoing))
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let arrival = request.extensions().get::<RequestArrival>().expect("the edge observes every call");
        let id = &request.get_ref().request_id;
        if self.core.active.abort(arrival.caller.tenant(), id) {
            return Ok(Response::new(AbortResponse {}));
        }
        Err(Status::not_found(format!("no request with the id {id:?} runs here")))
    }

    async fn model_info(&self, _: Request<ModelInfoRequest>) -> Result<Response<ModelInfoResponse>, Status> {
        let model = self.core.model().map_err(status)?;
        Ok(Response::new(ModelInfoResponse {
            model: model.name.clone(),
            architecture: model.architecture.clone(),
            context_length: u32::try_from(self.core.context_length()).unwrap_or(u32::MAX),
            vocab_size: u32::try_from(model.vocab_size).unwrap_or(u32::MAX),
            eos_token_ids: model.defaults.eos_token_ids.clone(),
            has_chat_template: model.tokenizer.has_chat_template(),
        }))
    }

    async fn loads(&self, _: Request<LoadsRequest>) -> Result<Response<LoadsResponse>, Status> {
        let workers = self.core.workers.list().into_iter().map(|listed| {
            let age = listed.report.as_ref().map_or(0, |report| report.at.elapsed().as_millis());
            WorkerLoad {
                worker_id: listed.record.id.0.clone(),
                role: listed.record.role.name().to_owned(),
                address: listed.record.address.clone(),
                load: listed.report.map(|report| report.load),
                age_ms: u64::try_from(age).unwrap_or(u64::MAX),
            }
        });
        Ok(Response::new(LoadsResponse { workers: workers.collect() }))
    }
}
