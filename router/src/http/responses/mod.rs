//! `POST /v1/responses`: OpenAI's Responses, without state. A request is translated into a chat; its answer is a list of items.

pub(crate) mod request;

mod input;
mod output;

use std::sync::Arc;

use axum::{
    extract::{Extension, Request, State},
    response::Response,
};
use baton_request_fields::Endpoint;
use baton_router_core::{Core, RequestArrival};
use baton_tools::CallIds;

use super::{
    blocks::Blocks,
    body::{json, read_json},
    error::ApiError,
    sse,
};
use output::{Echo, ResponseChunks};
use request::ResponsesRequest;

/// Serves one response.
pub(crate) async fn responses(
    State(core): State<Arc<Core>>,
    Extension(arrival): Extension<RequestArrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let (request, room) = read_json::<ResponsesRequest>(&core, request, None).await?;
    Endpoint::Responses.check(&request.rest, core.config.unknown_fields)?;
    let streamed = request.stream.unwrap_or(false);
    let convert = move |core: &Core| {
        let echo = Echo::new(core, &request, arrival.created())?;
        Ok(request.into_input(arrival).map(|input| (echo, input)))
    };
    let (echo, input) = core.offload(room.num_bytes(), convert).await??;
    let id = input.id.clone();
    let request = core.prepare(input, room).await?;
    let blocks = Blocks::new(request.reader.clone(), CallIds::new("call_", &id));
    let mut events = if streamed { core.stream(request).await? } else { core.generate(request)? };
    let mut chunks = ResponseChunks::new(id, echo, blocks);
    if streamed {
        return sse::stream(events, chunks, core.config.stream_keep_alive).await;
    }
    while let Some(event) = events.next().await {
        chunks.read(&event?);
    }
    Ok(json(&chunks.whole(Some(events.usage()), &events.extras())))
}
