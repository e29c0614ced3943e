//! The body of a Responses request, and the chat that it asks for.

use baton_router_core::{
    ChatInput, ClientRequest, ClientSampling, Echo, FieldNames, PromptInput, RequestArrival, Serving,
};
use baton_tools::{ToolRequest, chat_choice};
use serde_json::{Map, Value};

use super::input;
use crate::http::{
    error::ApiError,
    messages,
    params::{self, request_body},
};

request_body! { @served
    /// The request.
    ResponsesRequest {
        input: Value,
        instructions: Option<String>,
        max_output_tokens: Option<u32>,
        tools: Option<Vec<Value>>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
        text: Option<Map<String, Value>>,
        reasoning: Option<Map<String, Value>>,
        priority: Option<i32>,
    }
}

impl ResponsesRequest {
    pub(super) fn into_input(self, arrival: RequestArrival) -> Result<ClientRequest, ApiError> {
        let serving = Serving { priority: self.priority.unwrap_or(0), ..self.serving()? };
        let sampling = ClientSampling {
            max_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: params::top_k(self.top_k)?,
            seed: self.seed.map(|seed| seed as u64),
            grammar: input::format(self.text.as_ref())?,
            ..ClientSampling::default()
        };
        let tools = input::tools(self.tools)?;
        let choice = self.tool_choice.map(chat_choice).transpose()?;
        let calls = ToolRequest::parse(
            tools.as_deref(),
            choice.as_ref(),
            self.parallel_tool_calls,
            ToolRequest::MAX_TOOLS,
        );
        // The fields of a function are fields of the tool here, and those of allowed tools fields of the choice.
        let place =
            |text: &str| text.replace("].function", "]").replace("tool_choice.allowed_tools", "tool_choice");
        let calls =
            calls.map_err(|refusal| ApiError::invalid(place(&refusal.param), place(&refusal.to_string())))?;
        let messages = input::messages(self.instructions.as_deref(), &self.input)?;
        let (messages, kept) = messages::normalise(messages)?;
        let chat = ChatInput {
            messages,
            kept,
            documents: Vec::new(),
            tools: tools.filter(|_| calls.is_some()).map(Value::Array),
            calls: calls.map(Box::new),
            continue_final: false,
            thinking: input::thinking(self.reasoning.as_ref())?,
            extra: Map::new(),
        };
        Ok(ClientRequest {
            id: arrival.answer_id("resp_"),
            endpoint: "/v1/responses",
            model: self.model.unwrap_or_default(),
            prompts: vec![PromptInput::Chat(chat)],
            n: 1,
            echo: Echo::Off,
            stop: Vec::new(),
            sampling,
            serving,
            names: FieldNames {
                prompt: "input",
                max_tokens: "max_output_tokens",
                logprobs: "top_logprobs",
                tool_schema: "parameters",
                ..FieldNames::default()
            },
            arrival,
        })
    }
}
