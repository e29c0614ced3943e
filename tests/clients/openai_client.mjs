// The official JavaScript client of OpenAI against a running Baton: it must understand every answer.
//
//     node openai_client.mjs http://127.0.0.1:8080 FOLDER
//
// FOLDER has node_modules with what package.json names. The checks compare answers with each other.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [base, folder] = process.argv.slice(2);
const url = base.replace(/\/(v1)?$/, "");
const require = createRequire(`${folder}/`);
const OpenAI = require("openai");
const { zodResponseFormat, zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

// No retries: a single failure must be visible.
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Mara keeps the red key. Tell me a story about Mara and the key." }];
// Greedy and of a fixed length, so that answers can be compared and counted.
const fixed = { model, messages, temperature: 0, ignore_eos: true };
const Note = z.object({ number: z.number().int().min(0).max(99), name: z.enum(["Mara", "Otto"]) });
const parameters = {
  type: "object",
  properties: { number: { type: "integer", minimum: 0, maximum: 99 }, name: { enum: ["Mara", "Otto"] } },
  required: ["number", "name"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "note", parameters, strict: true } }];

const checks = {
  async "a chat has an answer with usage"() {
    const answer = await client.chat.completions.create({ ...fixed, max_completion_tokens: 12 });
    const [choice] = answer.choices;
    assert.equal(answer.object, "chat.completion");
    assert.equal(choice.finish_reason, "length");
    assert(choice.message.content.length > 0);
    assert.equal(answer.usage.completion_tokens, 12);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12);
  },

  async "a streamed chat says the same"() {
    const whole = await client.chat.completions.create({ ...fixed, max_tokens: 24 });
    const options = { stream: true, stream_options: { include_usage: true } };
    const stream = await client.chat.completions.create({ ...fixed, max_tokens: 24, ...options });
    let text = "";
    let usage = null;
    let numChunks = 0;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
      numChunks += 1;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage.completion_tokens, 24);
    assert(numChunks > 4, "it arrived in one piece");
  },

  async "the streaming helper reassembles the answer"() {
    const whole = await client.chat.completions.create({ ...fixed, max_tokens: 24 });
    const stream = client.chat.completions.stream({ ...fixed, max_tokens: 24 });
    assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  },

  async "a client may leave in the middle"() {
    const stream = await client.chat.completions.create({ ...fixed, max_tokens: 1000, stream: true });
    for await (const _ of stream) break;
    const answer = await client.chat.completions.create({ ...fixed, max_tokens: 4 });
    assert.equal(answer.usage.completion_tokens, 4);
  },

  async "a required call fits its schema, streamed or not"() {
    const params = { model, messages, temperature: 0, max_tokens: 200, tools, tool_choice: "required" };
    const answer = await client.chat.completions.create(params);
    const [choice] = answer.choices;
    assert.equal(choice.finish_reason, "tool_calls");
    Note.parse(JSON.parse(choice.message.tool_calls[0].function.arguments));
    const streamed = await client.chat.completions.stream(params).finalMessage();
    const call = (message) => message.tool_calls.map(({ function: { name, arguments: text } }) => [name, text]);
    assert.deepEqual(call(streamed), call(choice.message));
  },

  async "answers are parsed"() {
    const params = { model, messages, temperature: 0, max_tokens: 200 };
    const format = zodResponseFormat(Note, "note");
    const chat = await client.chat.completions.parse({ ...params, response_format: format });
    assert.deepEqual(Note.parse(chat.choices[0].message.parsed), chat.choices[0].message.parsed);
    const response = await client.responses.parse({
      model, input: messages, temperature: 0, max_output_tokens: 200, text: { format: zodTextFormat(Note, "note") },
    });
    assert.deepEqual(response.output_parsed, chat.choices[0].message.parsed);
  },

  async "a response says what a chat says, streamed or not"() {
    const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 24 });
    const params = { model, input: messages, temperature: 0, max_output_tokens: 24 };
    const response = await client.responses.create(params);
    assert.equal(response.output_text, chat.choices[0].message.content);
    assert.equal(response.incomplete_details.reason, "max_output_tokens");
    let text = "";
    const types = new Set();
    for await (const event of await client.responses.create({ ...params, stream: true })) {
      types.add(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, response.output_text);
    assert(types.has("response.created") && types.has("response.incomplete"), [...types].join());
  },

  async "mistakes raise the right exception"() {
    const refused = (params, kind, param) =>
      assert.rejects(client.chat.completions.create({ ...fixed, ...params }), (error) => {
        assert(error instanceof kind, String(error));
        assert.equal(error.param, param);
        return true;
      });
    await refused({ model: "no-such-model" }, OpenAI.NotFoundError, "model");
    await refused({ max_tokns: 3 }, OpenAI.BadRequestError, "max_tokns");
    await refused({ n: 0, stream: true }, OpenAI.BadRequestError, "n");
    const response = client.responses.create({ model, input: "x", previous_response_id: "resp_1" });
    await assert.rejects(response, OpenAI.BadRequestError);
  },
};

let numFailed = 0;
for (const [name, check] of Object.entries(checks)) {
  const started = performance.now();
  let word = "ok";
  try {
    await check();
  } catch (error) {
    console.log(error);
    word = "FAILED";
    numFailed += 1;
  }
  console.log(`${word.padEnd(6)} ${((performance.now() - started) / 1000).toFixed(2).padStart(6)} s  ${name}`);
}
console.log(`${Object.keys(checks).length - numFailed} of ${Object.keys(checks).length} checks passed`);
process.exit(numFailed === 0 ? 0 : 1);
