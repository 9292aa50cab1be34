// openai-node: chats, completions, responses, embeddings, models, errors.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, CALL, check, CITY, model, PARIS, tell, url } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.string(), rank: z.number().int() });
const parameters = { type: "object", properties: { rank: { type: "integer" } }, required: ["rank"] };
const tools = [{ type: "function", function: { name: "rate", description: "Rate.", parameters } }];
const say = (text) => ({ model, messages: [{ role: "user", content: `say:${text}` }] });

await check("text", async () => {
  const found = await client.chat.completions.create(say("Hello"));
  assert.equal(found.choices[0].message.content, "Hello");
  assert.equal(found.choices[0].finish_reason, "stop");
  assert.equal(found.usage.completion_tokens, 6);
});
await check("stream", async () => {
  let text = "";
  let usage;
  const stream = await client.chat.completions.create({ ...say("Hello"), stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "Hello");
  assert.equal(usage.completion_tokens, 6);
});
await check("stream helper", async () => {
  const seen = [];
  const stream = client.chat.completions.stream(say("Hello"));
  stream.on("content", (delta) => seen.push(delta));
  assert.equal(await stream.finalContent(), "Hello");
  assert.equal(seen.join(""), "Hello");
  assert.equal((await stream.totalUsage()).completion_tokens >= 0, true);
});
await check("aborted stream", async () => {
  const stream = await client.chat.completions.create({ ...say(""), messages: [{ role: "user", content: "hang:x" }], stream: true });
  for await (const _ of stream) break;
  assert.equal(stream.controller.signal.aborted, true);
});
await check("readable stream", async () => {
  const stream = await client.chat.completions.create({ ...say("Hello"), stream: true });
  const text = await new Response(stream.toReadableStream()).text();
  assert.equal(text.trim().split("\n").map((line) => JSON.parse(line).choices[0].delta.content ?? "").join(""), "Hello");
});
await check("parse", async () => {
  const asked = { ...say(CITY), response_format: zodResponseFormat(City, "city") };
  assert.deepEqual((await client.chat.completions.parse(asked)).choices[0].message.parsed, PARIS);
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, PARIS);
});
await check("json object", async () => {
  const found = await client.chat.completions.create({ ...say(CITY), response_format: { type: "json_object" } });
  assert.deepEqual(JSON.parse(found.choices[0].message.content), PARIS);
});
for (const choice of ["auto", "required", { type: "function", function: { name: "rate" } }]) {
  await check(`tools ${JSON.stringify(choice)}`, async () => {
    const asked = { ...say(CALL), tools, tool_choice: choice };
    const found = (await client.chat.completions.create(asked)).choices[0];
    assert.equal(found.message.tool_calls.length, 1);
    assert.deepEqual(JSON.parse(found.message.tool_calls[0].function.arguments), { rank: 7 });
    assert.equal(found.finish_reason, typeof choice === "string" ? "tool_calls" : "stop");
    const final = await client.chat.completions.stream(asked).finalMessage();
    assert.equal(final.tool_calls[0].function.arguments, found.message.tool_calls[0].function.arguments);
  });
}
for (const stream of [false, true]) {
  await check(`runner of tools, stream ${stream}`, async () => {
    const rated = [];
    const rate = { name: "rate", description: "Rate.", parameters: z.object({ rank: z.number() }), function: ({ rank }) => { rated.push(rank); return "say:done"; } };
    const runner = client.chat.completions.runTools({ ...say(CALL), stream, tools: [zodFunction(rate)] });
    assert.equal(await runner.finalContent(), "done");
    assert.deepEqual(rated, [7]);
    assert.equal((await runner.finalFunctionToolCall()).name, "rate");
  });
}
await check("several choices", async () => {
  const found = await client.chat.completions.create({ ...say("Hello"), n: 2, seed: 1, temperature: 0.5, stop: "l" });
  assert.deepEqual(found.choices.map((one) => one.message.content), ["He", "He"]);
});
await check("raw response", async () => {
  const { data, response, request_id } = await client.chat.completions.create(say("Hello")).withResponse();
  assert.equal(data.choices[0].message.content, "Hello");
  assert.equal(response.status, 200);
  assert.ok(request_id);
  assert.equal((await client.chat.completions.create(say("Hello")).asResponse()).status, 200);
});
await check("completions", async () => {
  assert.equal((await client.completions.create({ model, prompt: "say:Hello" })).choices[0].text, "Hello");
  let text = "";
  for await (const part of await client.completions.create({ model, prompt: "say:Hello", stream: true })) text += part.choices[0].text;
  assert.equal(text, "Hello");
});
await check("embeddings", async () => {
  const found = await client.embeddings.create({ model, input: ["abcd", "abcd"] });
  const floats = await client.embeddings.create({ model, input: "abcd", encoding_format: "float" });
  assert.equal(found.data.length, 2);
  found.data[0].embedding.forEach((one, i) => assert.ok(Math.abs(one - floats.data[0].embedding[i]) < 1e-6));
});
await check("models", async () => {
  const seen = [];
  for await (const one of client.models.list()) seen.push(one.id);
  assert.deepEqual(seen, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});
await check("responses", async () => {
  const found = await client.responses.create({ model, input: "say:Hello", instructions: "Be brief." });
  assert.equal(found.output_text, "Hello");
  assert.equal((await client.responses.retrieve(found.id)).id, found.id);
  const next = await client.responses.create({ model, input: "say:again", previous_response_id: found.id });
  assert.equal(next.output_text, "again");
  let count = 0;
  for await (const _ of client.responses.inputItems.list(next.id, { limit: 1 })) count += 1;
  assert.equal(count, 3);
  await client.responses.delete(found.id);
  await assert.rejects(client.responses.retrieve(found.id), OpenAI.NotFoundError);
});
await check("stream of a response", async () => {
  const kinds = [];
  for await (const event of await client.responses.create({ model, input: "say:Hello", stream: true })) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  const stream = client.responses.stream({ model, input: "say:Hello" });
  assert.equal((await stream.finalResponse()).output_text, "Hello");
});
await check("parse of a response", async () => {
  const found = await client.responses.parse({ model, input: `say:${CITY}`, text: { format: zodTextFormat(City, "city") } });
  assert.deepEqual(found.output_parsed, PARIS);
});
await check("tools of a response", async () => {
  const flat = [{ type: "function", name: "rate", parameters, strict: false }];
  const first = await client.responses.create({ model, input: `say:${CALL}`, tools: flat });
  assert.equal(first.output[0].type, "function_call");
  const input = [{ type: "function_call_output", call_id: first.output[0].call_id, output: "say:seven" }];
  const second = await client.responses.create({ model, input, previous_response_id: first.id, tools: flat });
  assert.equal(second.output_text, "seven");
});
await check("input tokens", async () => {
  assert.ok((await client.responses.inputTokens.count({ model, input: "say:Hello" })).input_tokens > 0);
});
await check("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...say("x"), model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...say("x"), temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.chat.completions.create({ model, messages: [{ role: "user", content: "fail:" }] }), OpenAI.InternalServerError);
  await assert.rejects(client.chat.completions.create({ model, messages: [{ role: "user", content: "hang:x" }] }, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});
tell();
