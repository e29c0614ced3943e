//! `baton.v1.Inference`: a thin shell over the core.

use std::{collections::VecDeque, pin::Pin, sync::Arc};

use baton_proto::v1::{
    AbortRequest, AbortResponse, GenerateRequest, GenerateResponse, Load, LoadsRequest, LoadsResponse,
    ModelInfoRequest, ModelInfoResponse, ResumeRequest, WorkerLoad, inference_server,
};
use futures_util::Stream;
use prost::Message;
use tonic::{Request, Response, Status};

use super::convert::{input, part, responses, status, values_bytes};
use baton_router_core::{
    BodyRoom, Core, CoreError, DurableCall, Event, Events, PromptInput, ReadBody, RequestArrival,
};
use baton_tools::{CallIds, ChatAnswer};

/// Serves `Inference`.
#[derive(Debug)]
pub(super) struct Inference {
    core: Arc<Core>,
}

impl Inference {
    pub(super) fn new(core: Arc<Core>) -> Inference {
        Inference { core }
    }

    /// A call, new or resumed. `read` gives its message, on another thread if that is long.
    async fn serve(
        &self,
        room: Arc<BodyRoom>,
        read: impl FnOnce(&Core) -> Result<(GenerateRequest, RequestArrival), CoreError> + Send + 'static,
    ) -> Result<Response<Responses>, Status> {
        let counted = room.clone();
        let read = move |core: &Core| {
            let (request, arrival) = read(core)?;
            let id = match request.request_id.as_str() {
                "" => arrival.answer_id(""),
                id => id.to_owned(),
            };
            counted.grow(values_bytes(&request))?;
            input(request, id, arrival)
        };
        let input = self.core.offload(room.num_bytes(), read).await.map_err(status)?;
        let id = input.id.clone();
        let is_chat = matches!(input.prompts[..], [PromptInput::Chat(_)]);
        let request = self.core.prepare(input, room).await.map_err(status)?;
        let num_chats = if is_chat { request.n as usize } else { 0 };
        let call_ids = CallIds::new("call_", &id);
        let answers = vec![ChatAnswer::new(request.reader.clone(), call_ids.clone()); num_chats];
        let events = self.core.stream(request).await.map_err(status)?;
        let num_known = events.num_delivered();
        let outgoing =
            Outgoing { id, events, answers, call_ids, num_known, ready: VecDeque::new(), over: false };
        let stream = futures_util::stream::unfold(outgoing, |mut outgoing| async move {
            let response = outgoing.next().await?;
            Some((response, outgoing))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

/// What a call of the journal is one of.
const GENERATE: &str = "/baton.v1.Inference/Generate";

fn arrival_of<T>(request: &Request<T>) -> RequestArrival {
    request.extensions().get::<RequestArrival>().expect("the edge observes every call").clone()
}

fn room_of<T>(request: &Request<T>) -> Arc<BodyRoom> {
    request.extensions().get::<Arc<BodyRoom>>().expect("the edge bounds every call").clone()
}

/// Events that become responses; one event may become two.
struct Outgoing {
    id: String,
    events: Events,
    /// Of each choice of a chat.
    answers: Vec<ChatAnswer>,
    call_ids: CallIds,
    /// Tokens that the client of a resumed stream has already.
    num_known: u64,
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
                Ok(mut event) => {
                    let answer = self.answers.get_mut(event.index as usize);
                    let read = answer.map(|answer| answer.read(&event.text, event.finish.is_some()));
                    let read = read.into_iter().flatten();
                    let mut parts: Vec<_> = read.map(|read_part| part(read_part, &self.call_ids)).collect();
                    if self.num_known > 0 && !event.tokens.is_empty() {
                        self.num_known = self.num_known.saturating_sub(event.tokens.len() as u64);
                        event = Event { finish: event.finish, ..Event::empty(event.index) };
                        parts.clear();
                    }
                    let extras = || self.events.extras();
                    self.ready.extend(responses(&self.id, event, parts, extras));
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
    type GenerateStream = Responses;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let (mut arrival, room) = (arrival_of(&request), room_of(&request));
        let (request, of_body) = (request.into_inner(), room.clone());
        let read = move |core: &Core| {
            if core.config.durable.is_some() {
                let body = ReadBody { bytes: request.encode_to_vec().into(), room: of_body };
                let call = DurableCall::new(GENERATE, body);
                let call = if request.request_id.is_empty() { call } else { call.named() };
                arrival.durable = Some(Arc::new(call));
            }
            Ok((request, arrival))
        };
        self.serve(room, read).await
    }

    type ResumeStream = Responses;

    async fn resume(&self, request: Request<ResumeRequest>) -> Result<Response<Responses>, Status> {
        let mut arrival = arrival_of(&request);
        let ResumeRequest { request_id, next_token_idx } = request.into_inner();
        let (call, ReadBody { bytes, room }) =
            self.core.find_stream(&arrival.caller, &request_id).await.map_err(status)?;
        if call.endpoint != GENERATE {
            let message = format!("the stream {request_id:?} is one of {}: resume it there", call.endpoint);
            return Err(Status::invalid_argument(message));
        }
        arrival.durable = Some(Arc::new(call.after_tokens(next_token_idx).map_err(status)?));
        let read = |_: &Core| match GenerateRequest::decode(bytes) {
            Ok(request) => Ok((request, arrival)),
            Err(error) => Err(CoreError::Internal { message: format!("the journal holds no call: {error}") }),
        };
        self.serve(room, read).await
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        let arrival = request.extensions().get::<RequestArrival>().expect("the edge observes every call");
        let id = &request.get_ref().request_id;
        if self.core.abort(&arrival.caller, id) {
            return Ok(Response::new(AbortResponse {}));
        }
        Err(Status::not_found(format!("no request with the id {id:?} runs here")))
    }

    async fn model_info(&self, _: Request<ModelInfoRequest>) -> Result<Response<ModelInfoResponse>, Status> {
        let model = self.core.model().map_err(status)?;
        Ok(Response::new(ModelInfoResponse {
            model: model.name.clone(),
            architecture: model.architecture.clone(),
            context_length: self.core.context_length().map(|num| u32::try_from(num).unwrap_or(u32::MAX)),
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
                // What it says to this router alone is not for clients.
                load: listed.report.map(|report| Load {
                    covered: None,
                    is_home_of_another: false,
                    ..report.load
                }),
                age_ms: u64::try_from(age).unwrap_or(u64::MAX),
            }
        });
        Ok(Response::new(LoadsResponse { workers: workers.collect() }))
    }
}
